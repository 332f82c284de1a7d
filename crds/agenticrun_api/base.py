"""The base class of the API models, and rules over several fields.

Each rule is written twice, side by side: in CEL, which the kube-apiserver evaluates, and as a
Python check, which `agenticrun validate` and the workers evaluate. A test gives both the same
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError


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
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        for rule in self.RULES:
            if rule.check is not None and not rule.check(self):
                raise PydanticCustomError(
                    "rule", "{message}", {"message": rule.message, "path": rule.path}
                )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the model as in YAML: camelCase, JSON types, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


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
Open = dict[str, Any]
"""A mapping that the schema does not restrict. Its reader validates it before training starts."""
