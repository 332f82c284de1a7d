"""Vocabulary of the field table (ROLL's fields, their defaults and fate) and of the report."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal


class Fate(StrEnum):
    """Outcome of a field, in the order of the report."""

    DECISION = "needs a decision"
    """Nothing here does the same: the user must decide what to write."""
    CHANGED = "means something else here"
    """It has a counterpart, which computes something else."""
    UNKNOWN = "unknown to ROLL"
    """Not a field of ROLL, which silently ignores typos."""
    ADAPTED = "done in another way here"
    """Same effect on the training, by other means."""
    DROPPED = "dropped: without effect in ROLL, or not needed here"
    MAPPED = "mapped"

    @property
    def short(self) -> str:
        """The words before the colon, for a list of counts."""
        return self.value.partition(":")[0]


TO_READ = (Fate.DECISION, Fate.CHANGED)
"""Outcomes that the user should read."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the report."""

    fate: Fate
    field: str
    """Path in the ROLL file."""
    value: Any
    """Value in the file, or ROLL's default."""
    note: str
    """Our field, or the reason why there is none. For `Fate.DECISION`: also what to write."""


@dataclass
class Notes:
    """Collector of the report lines that depend on several fields at once."""

    lines: list[Line] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)
    """Paths of our fields whose errors a line already explains."""

    def mapped(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.MAPPED, name, value, note))

    def changed(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.CHANGED, name, value, note))

    def dropped(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.DROPPED, name, value, note))

    def adapted(self, name: str, value: Any, note: str) -> None:
        self.lines.append(Line(Fate.ADAPTED, name, value, note))

    def undecided(self, name: str, value: Any, note: str, *, covers: str = "") -> None:
        """Add a line that needs a decision.

        Args:
            covers: path of our field; an error there is not reported again.
        """
        self.lines.append(Line(Fate.DECISION, name, value, note))
        if covers:
            self.covered.add(covers)


class ConvertError(Exception):
    """The file is not a valid ROLL configuration. The message names the file or the field."""


Unread = Callable[["View"], str]
"""Function from the top-level `View` to the reason why ROLL ignores a field, or to ""."""


_KIND_NAMES = {int: "number", float: "number", str: "text", bool: "switch", dict: "mapping"}


@dataclass(frozen=True, slots=True)
class Field:
    """One setting."""

    fate: Fate
    note: str
    """Our field, or the reason why there is none."""
    default: Any = None
    """ROLL's default."""
    off: tuple[Any, ...] = ()
    """For DECISION: values that have no effect, besides the default."""
    choices: Mapping[Any, str] = field(default_factory=dict)
    """Supported values -> our fields. Other values have the fate of the field."""
    unread: Unread | None = None
    kind: type | None = None
    """Type of the value; None: the type of the default, where an int may stand for a float."""

    def check(self, path: str, value: Any) -> Any:
        """Return the value.

        Raises:
            ConvertError: ROLL would reject the type of the value.
        """
        if self.kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        kind = self.kind or type(self.default)
        whole = self.kind is int and isinstance(value, float)
        kinds = (int, float) if kind in (int, float) else (kind,)
        if kind is type(None) or (
            isinstance(value, kinds) and (kind is bool or not isinstance(value, bool)) and not whole
        ):
            return value
        name = "whole number" if self.kind is int else _KIND_NAMES.get(kind, kind.__name__)
        raise ConvertError(f"{path}: must be a {name}, not {value!r}")

    def line(self, path: str, value: Any, top: View) -> Line:
        """Return the report line of this field with this value."""
        reason = self.unread(top) if self.unread else ""
        if reason:
            return Line(Fate.DROPPED, path, value, reason)
        if value is None and self.default is None:
            return Line(Fate.DROPPED, path, value, "not set")
        if isinstance(value, str) and value in self.choices:
            return Line(Fate.MAPPED, path, value, self.choices[value])
        if (
            self.fate is Fate.DECISION
            and not self.choices
            and (value == self.default or value in self.off)
        ):
            return Line(Fate.DROPPED, path, value, "no effect at this value")
        return Line(self.fate, path, value, self.note)


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of fields, one such mapping per name, or a list of them."""

    fields: Mapping[str, Field | Section]
    repeated: Literal["", "by name", "in a list"] = ""
    rest: Field | None = None
    """Field that stands for any other key; None: other keys are unknown."""
    reported_elsewhere: bool = False
    """True if other code writes the report lines of its keys."""


Fields = Mapping[str, Field | Section]


def mapped(
    note: str, default: Any = None, unread: Unread | None = None, *, kind: type | None = None
) -> Field:
    """Declare a field that keeps its meaning; `note` names our field and any change of values."""
    return Field(Fate.MAPPED, note, default, unread=unread, kind=kind)


def changed(note: str, default: Any = None, unread: Unread | None = None) -> Field:
    """Declare a field with a counterpart that computes something else."""
    return Field(Fate.CHANGED, note, default, unread=unread)


def adapted(note: str, default: Any = None, unread: Unread | None = None) -> Field:
    """Declare a field that has the same effect by other means."""
    return Field(Fate.ADAPTED, note, default, unread=unread)


def cannot(note: str, default: Any = None, *off: Any, unread: Unread | None = None) -> Field:
    """Declare an unsupported field. Its default and the values `off` have no effect."""
    return Field(Fate.DECISION, note, default, off, unread=unread)


def one_of(
    choices: Mapping[Any, str],
    otherwise: str,
    default: Any = None,
    unread: Unread | None = None,
    *,
    otherwise_is: Fate = Fate.DECISION,
) -> Field:
    """Declare a field of which only some values (`choices`: value -> our field) are supported."""
    return Field(otherwise_is, otherwise, default, choices=choices, unread=unread)


def dropped(note: str, default: Any = None) -> Field:
    """Declare a field that nothing here needs."""
    return Field(Fate.DROPPED, note, default)


def dead(note: str = "no code of ROLL's agentic pipeline reads it", default: Any = None) -> Field:
    """Declare a field that has no effect in ROLL."""
    return Field(Fate.DROPPED, note, default)


class View:
    """The values of a section, with ROLL's defaults. Only fields of the table can be read.

    Raises:
        ConvertError: a value has a type that ROLL rejects. The message names its path.
    """

    def __init__(self, values: Any, fields: Fields, path: str = "") -> None:
        if values is not None and not isinstance(values, Mapping):
            raise ConvertError(f"{path}: must be a mapping, not {values!r}")
        self._values: Mapping[str, Any] = values or {}
        self._fields = fields
        self._path = path

    def __getitem__(self, key: str) -> Any:
        entry, value = self._fields[key], self._values.get(key)
        if isinstance(entry, Section):
            return value
        return entry.default if value is None else entry.check(self._at(key), value)

    def __contains__(self, key: str) -> bool:
        """Return True if the file sets the field."""
        return self._values.get(key) is not None

    def section(self, key: str) -> View:
        """Return the view of a nested section.

        Raises:
            ConvertError: the value is not a mapping.
        """
        section = self._fields[key]
        assert isinstance(section, Section)
        return View(self._values.get(key), section.fields, self._at(key))

    def sections(self, key: str) -> dict[str, View]:
        """Return the views of a section that is repeated by name.

        Raises:
            ConvertError: the value is not a mapping.
        """
        section = self._fields[key]
        assert isinstance(section, Section)
        named = View(self._values.get(key), {}, self._at(key))
        return {
            name: View(values, section.fields, f"{self._at(key)}.{name}")
            for name, values in named.given.items()
        }

    @property
    def given(self) -> dict[str, Any]:
        """The values in the file, without defaults."""
        return {str(key): value for key, value in self._values.items()}

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key


def report_lines(
    values: Mapping[str, Any], fields: Fields, variables: frozenset[str]
) -> list[Line]:
    """Return a report line for every key of a configuration.

    Args:
        values: the resolved configuration.
        fields: the table of its top level.
        variables: names that interpolations (`${name}`) of the file read.
    """
    top = View(values, fields)
    known = {key: value for key, value in values.items() if key in fields or key not in variables}
    lines = _walk("", known, Section(fields), top)
    return lines + [
        Line(Fate.DROPPED, key, value, "a variable of the file, used where ${...} names it")
        for key, value in values.items()
        if key not in known
    ]


def _walk(path: str, values: Any, section: Section, top: View) -> list[Line]:
    lines: list[Line] = []
    for key, value in _items(values):
        name = f"{path}.{key}" if path else str(key)
        entry = section.fields.get(key, section.rest)
        if entry is None:
            # A field that the file also sets was not meant.
            others = [each for each in section.fields if each not in values]
            close = difflib.get_close_matches(str(key), others, 1, 0.75)
            note = f"{_UNKNOWN}{_MEANT}{close[0]}?" if close else _UNKNOWN
            lines.append(Line(Fate.UNKNOWN, name, redacted(key, value), note))
        elif isinstance(entry, Field):
            lines.append(entry.line(name, redacted(key, value), top))
        elif entry.reported_elsewhere:
            continue
        elif entry.repeated:
            pairs = (
                _items(value)
                if entry.repeated == "by name"
                else [(str(place), item) for place, item in enumerate(value or [])]
            )
            for which, inner in pairs:
                lines += _walk(
                    f"{name}.{which}" if entry.repeated == "by name" else f"{name}[{which}]",
                    inner,
                    entry,
                    top,
                )
        else:
            lines += _walk(name, value, entry, top)
    return lines


_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return True if the name is that of a secret, such as WANDB_API_KEY or HF_TOKEN."""
    return _SECRET.search(name) is not None


def redacted(name: str, value: Any) -> Any:
    """Return `value` with secrets replaced by ***."""
    if isinstance(value, Mapping):
        return {key: redacted(str(key), inner) for key, inner in value.items()}
    return "***" if is_secret(name) and value is not None else value


def _items(values: Any) -> list[tuple[str, Any]]:
    return (
        [(str(key), value) for key, value in values.items()] if isinstance(values, Mapping) else []
    )


_UNKNOWN = "ROLL has no such field and ignores it"
_MEANT = ": did you mean "


def meant(line: Line) -> str:
    """Return the field that an unknown key probably means, or ""."""
    return line.note.partition(_MEANT)[2].removesuffix("?")
