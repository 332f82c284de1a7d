"""How the table of ROLL's fields is written: what each field is there, and what becomes of it here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agenticrun_workers.convert.report import Fate, Line


class ConvertError(Exception):
    """A file that is no ROLL configuration. The message names the file and what is wrong."""


Unread = Callable[["View"], str]
"""Why the field is not read in this configuration (a View of its top level), or nothing."""


_KIND_NAMES = {int: "number", float: "number", str: "text", bool: "switch", dict: "mapping"}


@dataclass(frozen=True, slots=True)
class Field:
    """One setting."""

    fate: Fate
    note: str
    """Our field, or why there is none."""
    default: Any = None
    """ROLL's."""
    off: tuple[Any, ...] = ()
    """CANNOT: values beside the default that ask for nothing."""
    choices: Mapping[Any, str] = field(default_factory=dict)
    """CANNOT: values that we do have, with where they go."""
    unread: Unread | None = None
    kind: type | None = None
    """What a value must be; None: as the default is."""

    def check(self, path: str, value: Any) -> Any:
        """The value. Raises `ConvertError` if ROLL would refuse its type."""
        kind = self.kind or type(self.default)
        kinds = (int, float) if kind in (int, float) else (kind,)
        if kind is type(None) or (
            isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
        ):
            return value
        raise ConvertError(
            f"{path}: must be a {_KIND_NAMES.get(kind, kind.__name__)}, not {value!r}"
        )

    def line(self, path: str, value: Any, top: View) -> Line:
        """What becomes of this field with this value."""
        reason = self.unread(top) if self.unread else ""
        if reason:
            return Line(Fate.DROPPED, path, value, reason)
        if value is None and self.default is None:
            return Line(Fate.DROPPED, path, value, "not set")
        if isinstance(value, str) and value in self.choices:
            return Line(Fate.MAPPED, path, value, self.choices[value])
        if (
            self.fate is Fate.CANNOT
            and not self.choices
            and (value == self.default or value in self.off)
        ):
            return Line(Fate.DROPPED, path, value, "asks for nothing")
        return Line(self.fate, path, value, self.note)


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of fields, one such mapping per name, or a list of them."""

    fields: Mapping[str, Field | Section]
    repeated: Literal["", "by name", "in a list"] = ""
    rest: Field | None = None
    """What any other key is; None: an unknown field."""
    told_elsewhere: bool = False
    """Its lines come from the code that knows its keys."""


Fields = Mapping[str, Field | Section]


def mapped(
    note: str, default: Any = None, unread: Unread | None = None, *, kind: type | None = None
) -> Field:
    """Keeps its meaning, maybe under another name or with values translated as the note says."""
    return Field(Fate.MAPPED, note, default, unread=unread, kind=kind)


def changed(note: str, default: Any = None, unread: Unread | None = None) -> Field:
    """There is something like it with another meaning."""
    return Field(Fate.CHANGED, note, default, unread=unread)


def cannot(note: str, default: Any = None, *off: Any, unread: Unread | None = None) -> Field:
    """Asks for something that we do not have, unless it has its default or one of the values `off`."""
    return Field(Fate.CANNOT, note, default, off, unread=unread)


def one_of(
    choices: Mapping[Any, str], otherwise: str, default: Any = None, unread: Unread | None = None
) -> Field:
    """Some values have a counterpart, each said where; any other one has not."""
    return Field(Fate.CANNOT, otherwise, default, choices=choices, unread=unread)


def dropped(note: str, default: Any = None) -> Field:
    """Nothing here needs it."""
    return Field(Fate.DROPPED, note, default)


def dead(note: str = "no code of ROLL's agentic pipeline reads it", default: Any = None) -> Field:
    """Never had an effect in ROLL."""
    return Field(Fate.DROPPED, note, default)


class View:
    """The values of a section, ROLL's defaults where none is given. Only fields of the table can be asked for.

    Raises:
        ConvertError: values of another type than ROLL takes, by their path.
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
        """Whether the file gives it a value."""
        return self._values.get(key) is not None

    def section(self, key: str) -> View:
        """The view of a section below. Raises `ConvertError` if it is no mapping."""
        section = self._fields[key]
        assert isinstance(section, Section)
        return View(self._values.get(key), section.fields, self._at(key))

    def sections(self, key: str) -> dict[str, View]:
        """The views of a section that is repeated by name. Raises `ConvertError`."""
        section = self._fields[key]
        assert isinstance(section, Section)
        named = View(self._values.get(key), {}, self._at(key))
        return {
            name: View(values, section.fields, f"{self._at(key)}.{name}")
            for name, values in named.given.items()
        }

    @property
    def given(self) -> dict[str, Any]:
        """What the file says."""
        return {str(key): value for key, value in self._values.items()}

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key


def report_lines(
    values: Mapping[str, Any], fields: Fields, variables: frozenset[str]
) -> list[Line]:
    """A line for every key of a configuration. `variables` are names that interpolations of the file read."""
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
            lines.append(
                Line(Fate.UNKNOWN, name, redacted(key, value), _guess(str(key), section.fields))
            )
        elif isinstance(entry, Field):
            lines.append(entry.line(name, redacted(key, value), top))
        elif entry.told_elsewhere:
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
    """Whether a setting of this name is nothing to write down: WANDB_API_KEY, HF_TOKEN ..."""
    return _SECRET.search(name) is not None


def redacted(name: str, value: Any) -> Any:
    """`value` without secrets, for the report."""
    if isinstance(value, Mapping):
        return {key: redacted(str(key), inner) for key, inner in value.items()}
    return "***" if is_secret(name) and value is not None else value


def _items(values: Any) -> list[tuple[str, Any]]:
    return (
        [(str(key), value) for key, value in values.items()] if isinstance(values, Mapping) else []
    )


def _guess(key: str, fields: Fields) -> str:
    close = difflib.get_close_matches(key, fields, 1)
    return (
        f"ROLL has no such field and ignores it: did you mean {close[0]}?"
        if close
        else "ROLL has no such field and ignores it"
    )
