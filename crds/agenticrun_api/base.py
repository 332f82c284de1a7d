"""The base class of the API models, and rules over several fields.

Each rule is written twice, side by side: in CEL, which the kube-apiserver evaluates, and as a
Python check, which `agenticrun validate` and the workers evaluate. A test gives both the same
inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from agenticrun_api.masking import mask_secrets

SERVED: dict[str, Any] = {"served": True}
"""Validation context of a run that the apiserver serves or that a pod mounts."""

LOCAL: dict[str, Any] = {"local": True}
"""Validation context of a run for this machine."""


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
    value_cel: str = ""
    """CEL expression of the text that completes the message: the value at fault."""
    value: Callable[[Any], str] | None = None
    """The same text in Python."""
    on_cluster: bool = False
    """True: about pods, so that it is not checked in a run for this machine."""
    added: bool = False
    """True: earlier versions accepted what the rule refuses. It is not checked in a run that is
    served, so that a run of an earlier version continues after an upgrade."""


def refused(path: str, message: str) -> PydanticCustomError:
    """Return an error that names a field below the one that is validated: `.groupSize`, `[1]`."""
    return PydanticCustomError("rule", "{message}", {"message": message, "path": path})


def unique(items: str, key: str = "", *, message: str) -> Rule:
    """Return a rule that no two items of a list are equal, or have the same `key`.

    The CRD cannot say so by `x-kubernetes-list-type: map`. Such lists equal themselves in CEL only
    if they have no duplicates, so a run of an earlier version that has some could no longer be
    written, its status included: spec.pipeline would count as changed.
    """
    item = f".{key}" if key else ""
    once = f"self.{items}.exists_one(x, x{item} == {{}})"
    keys = f"self.{items}.map(e, e{item})" if key else f"self.{items}"

    def first_repeated(model: Any) -> str | None:
        found = [getattr(entry, key) if key else entry for entry in getattr(model, items)]
        return next((entry for entry in found if found.count(entry) > 1), None)

    return Rule(
        f"self.{items}.all(e, {once.format(f'e{item}')})",
        message,
        f".{items}",
        lambda model: first_repeated(model) is None,
        value_cel=f"{keys}.filter(k, !{once.format('k')})[0]",
        value=lambda model: str(first_repeated(model)),
        added=True,
    )


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
    def _rules_hold(self, info: ValidationInfo) -> Self:
        for rule in self.RULES:
            if (rule.added and info.context is SERVED) or (
                rule.on_cluster and info.context is LOCAL
            ):
                continue
            if rule.check is not None and not rule.check(self):
                value = f": {rule.value(self)}" if rule.value else ""
                raise refused(rule.path, rule.message + value)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the model as in YAML: camelCase, JSON types, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


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


QUANTITY_PATTERN = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,2})?$"
"""Quantities of Kubernetes, without negative ones and without absurd exponents."""
QUANTITY_LENGTH = 24


def _quantity(value: Any, info: ValidationInfo) -> str:
    """Return a quantity as text. Raise if it is none, with how to write it."""
    text = value
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Beyond 2^53 a float is no longer the integer that was written.
        whole = isinstance(value, int) or (value.is_integer() and abs(value) < MAX_NUMBER)
        text = str(int(value)) if whole else str(value)
        if not whole and info.context is not LOCAL:  # the apiserver takes integers and texts
            raise refused("", f"write a quantity that is no whole number in quotes: '{text}'")
    if isinstance(text, str) and _is_quantity(text):
        return text
    if value is None:
        raise refused("", "write a quantity of Kubernetes (500m, 2, 1.5Gi), or leave the field out")
    advice = "such as 500m, 2, 1.5Gi"
    if isinstance(value, str):
        # Most mistakes are units of another spelling, which this corrects: 4GiB, 4GB, 1K.
        plain = value.replace(" ", "").removesuffix("B").removesuffix("b")
        start, unit = plain[:-1], plain[-1:]
        spellings = (plain, start + unit.lower(), start + unit.upper())
        advice = next((f"as {each}" for each in spellings if _is_quantity(each)), advice)
    raise refused("", f"write a quantity of Kubernetes {advice} (got {value!r})")


def _is_quantity(text: str) -> bool:
    return len(text) <= QUANTITY_LENGTH and re.fullmatch(QUANTITY_PATTERN, text) is not None


Quantity = Annotated[
    str,
    BeforeValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": QUANTITY_LENGTH,
        }
    ),
]
"""A Kubernetes resource quantity, for example 500m, 2, 4Gi."""

_ESCAPE_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    "|\x1b\\][^\x07\x1b\n]*(?:\x07|\x1b\\\\)"  # titles, links, the clipboard
)
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")


def clean_text(text: str) -> str:
    r"""Return a text that can be stored, sent, and shown on a terminal.

    Texts of user code, containers, webhooks and logs hold anything. A lone surrogate, as in the
    name of a file that is not UTF-8, cannot be encoded; a NUL or an escape acts on the terminal of
    the reader. Letters of any script and emoji stay as they are.

    Args:
        text: from outside.

    Returns:
        The text with `\udce9` for a lone surrogate and `\N{REPLACEMENT CHARACTER}` for a control
        character. A pair of surrogates is the character that it makes. Line breaks are newlines,
        newline and tab stay, and escape sequences of terminals are left out.
    """
    # First: a lone carriage return would move the cursor to the start of a line.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _SURROGATE_PAIR.sub(_joined, text)
    # Sequences go before single control characters, or their letters would stay.
    text = _ESCAPE_SEQUENCE.sub("", text.encode(errors="backslashreplace").decode())
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def one_line(text: str, limit: int) -> str:
    """Return a text from outside as one clean line without secrets, of at most so many characters.

    Secrets are masked before lines are joined, because some of them end with their line.
    """
    return " ".join(mask_secrets(clean_text(text)).split())[:limit]


CLEAN = BeforeValidator(lambda value: clean_text(value) if isinstance(value, str) else value)
"""Cleans a text on the way in."""

Coefficient = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10_000_000)]
Positive = Annotated[int, Field(ge=1, le=10_000_000)]
MAX_NUMBER = 2**53
Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
"""An integer that every JSON parser can represent."""
PlugIn = Annotated[str, Field(min_length=1, max_length=253)]
"""A registered name, or `module:Class`."""
Tag = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")
]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(max_length=4096)]
Open = Annotated[dict[str, Any], AfterValidator(_finite)]
"""A mapping that the schema does not restrict. Its reader validates it before training starts."""
