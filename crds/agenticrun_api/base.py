"""The base class of the API models, and rules over several fields.

Each rule is written twice, side by side: in CEL, which the kube-apiserver evaluates, and as a
Python check, which `agenticrun validate` and the workers evaluate. A test gives both the same
inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Rule:
    """A condition over several fields of one model."""

    cel: str
    """The condition in CEL, over `self` (and `oldSelf` for a transition)."""
    message: str
    """The error message: what is wrong and what to do."""
    path: str
    """The field that the error names, relative to the model: `.groupSize`."""
    check: Callable[[Any], bool] | None
    """The same condition in Python; None for a transition, which only the apiserver can check."""
    reason: str = "FieldValueInvalid"


def refused(path: str, message: str) -> PydanticCustomError:
    """Return an error that names a field below the one that is validated: `.groupSize`, `[1]`."""
    return PydanticCustomError("rule", "{message}", {"message": message, "path": path})


def camel(name: str) -> str:
    """Return the name of a field as in YAML: `group_size` -> `groupSize`."""
    return to_camel(name)


class Model(BaseModel):
    """Base class: camelCase in YAML, snake_case in Python, immutable, rejects unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        for rule in self.RULES:
            if rule.check is not None and not rule.check(self):
                raise refused(rule.path, rule.message)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the model as in YAML: camelCase, JSON types, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


@dataclass(frozen=True)
class UniqueBy:
    """Marks a list in which no two items have the same value of a field.

    The apiserver checks it without CEL (`x-kubernetes-list-type: map`), which costs less than a
    rule and names the item. The error in Python is the apiserver's.
    """

    key: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": [self.key],
        }

    def _check(self, items: list[Any]) -> list[Any]:
        seen = set()
        for index, item in enumerate(items):
            value = getattr(item, self.key)
            if value in seen:
                shown = json.dumps({self.key: value}, separators=(",", ":"))
                raise refused(f"[{index}]", f"Duplicate value: {shown}")
            seen.add(value)
        return items


def _infinities(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the numbers that JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _infinities(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _infinities(inner, f"{path}[{index}]")


def _finite(config: dict[str, Any]) -> dict[str, Any]:
    for path in _infinities(config):
        raise refused(path, "Input should be a finite number")
    return config


QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"

Quantity = Annotated[
    str,
    BeforeValidator(
        lambda value: (
            str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        )
    ),
    Field(pattern=QUANTITY_PATTERN, max_length=24),
    WithJsonSchema(
        {"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": 24}
    ),
]
"""A Kubernetes resource quantity, for example 500m, 2, 4Gi."""

Coefficient = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10_000_000)]
Positive = Annotated[int, Field(ge=1, le=10_000_000)]
PlugIn = Annotated[str, Field(min_length=1, max_length=253)]
"""A registered name, or `module:Class`."""
Tag = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")
]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(max_length=4096)]
Open = Annotated[dict[str, Any], AfterValidator(_finite)]
"""A mapping that the schema does not restrict. Its reader validates it before training starts."""
