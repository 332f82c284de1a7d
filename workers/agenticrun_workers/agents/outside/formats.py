"""Formats that a request demands of its answer: JSON, a JSON schema, a tool call.

Where nothing is trained, engines enforce formats: `AnswerFormat.structural_tag`. A run's engines do
not, because masks change log-probs. There a format reads a text from its start. It says how much of
it a valid answer can begin with, and which text would follow, and `session` samples with that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_workers.agents.chat_families import HERMES, CallText
from agenticrun_workers.agents.json_schema import Schema, resolved, types_of
from agenticrun_workers.agents.outside.messages import refused

SPACE = " \t\n\r"
MAX_SPACES = 40
"""Most spaces and line breaks between two parts of a value: a weak policy would never stop."""
HEX = "0123456789abcdefABCDEF"
MAX_DEPTH = 48
"""Limit of nested values in an answer, and of references that lead to references."""

MAX_ITEMS = 10_000
"""Largest `minItems` and `maxItems`. Answers have fewer items, because each takes a token or more.
xgrammar 0.2.7 and 0.2.8 compile this many in milliseconds, and refuse a `minItems` of 2**31."""

ANNOTATIONS = ("title", "description", "default", "examples", "$schema", "$id", "$comment")
KEYWORDS = (
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "$ref",
    "$defs",
    "definitions",
)
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

ANY = ("object", "array", "string", "number", "boolean", "null")
"""Types of which a value may be if its schema has none; every integer is a number."""
ELSEWHERE = ("$ref", "allOf", "anyOf")
"""Keywords that say everything about a value: no other keyword may stand beside them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The part of a text that keeps to a format, and how it may continue."""

    fits: int
    """Number of leading characters that a valid answer can begin with."""
    complete: bool
    """True if these characters are a whole answer."""
    next: str
    """Text that continues from there towards a whole answer."""
    fixed: bool
    """True if every valid answer continues with `next`, except for its spaces."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of an answer: a tool call, a JSON value, or one of the two."""

    calls: Mapping[str, Schema] | None = None
    """Schema of the arguments of each tool that may be called; None = no tool call."""
    schema: Schema | None = None
    """Schema of the JSON value; None = no JSON value."""
    call_text: CallText | None = HERMES.call_text
    """Form of a call in the policy's family."""
    reasoning: tuple[str, str] | None = None
    """Texts around reasoning of any form, with which an answer may begin. Where the first is empty,
    every answer begins with reasoning."""

    @property
    def opening(self) -> str:
        """Beginning of every valid answer, as far as it is known."""
        if self.calls is None or self.schema is not None or self.reasoning:
            return ""
        assert self.call_text is not None
        if len(self.calls) == 1:
            return self.call_text.before_arguments(next(iter(self.calls)))
        return self.call_text.start + ('"' if self.call_text.quoted else "")

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The format in the language of xgrammar, which SGLang and vLLM have."""
        options = [self._call_tag(name, schema) for name, schema in (self.calls or {}).items()]
        if self.schema is not None:
            options.append(_json_tag(self.schema))
        answer = {"type": "or", "elements": options}
        if self.reasoning is None:
            return {"type": "structural_tag", "format": answer}
        begins, ends = self.reasoning
        reasoning = _sequence_tag(
            *([_text_tag(begins)] if begins else []),
            {"type": "any_text", "excludes": [ends]},
            _text_tag(ends),
            {"type": "regex", "pattern": rf"[ \t\n\r]{{0,{MAX_SPACES}}}"},
        )
        first = {"type": "optional", "content": reasoning} if begins else reasoning
        return {"type": "structural_tag", "format": _sequence_tag(first, answer)}

    def _call_tag(self, name: str, schema: Schema) -> dict[str, Any]:
        how = self.call_text
        assert how is not None
        return _sequence_tag(
            _text_tag(how.before_arguments(name)),
            _json_tag(schema, how.style),
            *([_text_tag(how.end)] if how.end else []),
        )

    def read(self, text: str) -> Reading:
        """Return how far a text keeps to the format."""
        begins, ends = self.reasoning or (None, "")
        said = text.lstrip()
        if begins is None or not said.startswith(begins):
            reading = self._read(text, 0)
            if begins and said and reading.fits < len(text) and begins.startswith(said):
                return Reading(len(text), False, begins[len(said) :], False)
            return reading
        place = text.find(ends)
        if place < 0:
            return Reading(len(text), False, f"\n{ends}\n\n", False)
        return self._read(text, place + len(ends))

    def _read(self, text: str, start: int) -> Reading:
        """Return how far a text keeps to the format from a place on."""
        reader = _Reader(text, self.schema, start)
        try:
            reader.skip_space()
            if self._wants_call(reader):
                assert self.calls is not None
                assert self.call_text is not None
                reader.call(self.calls, self.call_text)
            else:
                reader.value(self.schema)
        except _Stop as stop:
            return Reading(stop.at, False, stop.next, stop.fixed)
        return Reading(reader.at, True, "", True)

    def _wants_call(self, reader: _Reader) -> bool:
        if self.calls is None or self.call_text is None:
            return False
        return self.schema is None or reader.sees(self.call_text.start[0])


def _text_tag(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _json_tag(schema: Schema, style: str = "json") -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "style": style,
        "max_whitespace_cnt": MAX_SPACES,
    }


def _sequence_tag(*elements: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


class _Stop(Exception):
    """The text cannot continue this way, or it is complete."""

    def __init__(self, at: int, next: str, *, fixed: bool = False) -> None:
        super().__init__(at)
        self.at, self.next, self.fixed = at, next, fixed


class _Reader:
    """Reads values from a text. Its methods raise `_Stop` at the end of what fits."""

    def __init__(self, text: str, root: Schema, start: int) -> None:
        self.at = start
        self._text = text
        self._root = root
        self._depth = 0

    def sees(self, letters: str) -> bool:
        """Return True if the next character is one of these."""
        return self.at < len(self._text) and self._text[self.at] in letters

    def skip_space(self) -> None:
        end = self.at + MAX_SPACES
        while self.at < end and self.sees(SPACE):
            self.at += 1

    def call(self, calls: Mapping[str, Schema], how: CallText) -> None:
        """Read a tool call."""
        if how.quoted:
            self._words(how.start)
            self.skip_space()
            name = json.loads(self._one_of([json.dumps(each) for each in calls], how.between))
            self._words(how.between)
            self.skip_space()
        else:
            self._literal(how.start)
            found = self._one_of([each + how.between for each in calls])
            name = found.removesuffix(how.between)
        self._root = calls[name]
        if how.tags is not None:
            self._tagged(calls[name], how.tags, how.end)
            return
        self.value(calls[name])
        if how.quoted:
            self._words(how.end)
        else:
            self._literal(how.end)

    def _tagged(self, schema: Schema, tags: tuple[str, str, str], end: str) -> None:
        """Read arguments that are text between tags, and the end of the call."""
        opening, begins, ends = tags
        schema = self._meant(schema)
        known: Mapping[str, Schema] = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        missing = list(schema.get("required", ()))
        left = [*missing, *(key for key in known if key not in missing)]
        while True:
            wanted = [opening] if others is not False else [opening + key + begins for key in left]
            found = self._one_of([*([] if missing else [end]), *wanted])
            if found == end:
                return
            if others is False:
                key = found.removeprefix(opening).removesuffix(begins)
            else:
                key = self._tag_name(missing[0] if missing else "key", begins)
            left = [each for each in left if each != key]
            missing = [each for each in missing if each != key]
            self._tag_value(self._meant(known.get(key, others)), opening, ends)

    def _tag_name(self, default: str, begins: str) -> str:
        """Read the name of any argument, and the text after it."""
        start = self.at
        while self.at < len(self._text) and not self.sees("<>\n"):
            self.at += 1
        if self.at == start:
            raise _Stop(start, default + begins)
        name = self._text[start : self.at]
        self._literal(begins)
        return name

    def _tag_value(self, schema: Schema, opening: str, ends: str) -> None:
        """Read the value of an argument and the text after it. Texts stand there as they are."""
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            written = [
                each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
                for each in values
            ]
            self._one_of([each + ends for each in written])
            return
        kinds = types_of(schema, self._root)
        if kinds and "string" not in kinds:
            self.value(schema)
            self._literal(ends)
            return
        close, start = ends.strip(), self.at
        places = {mark: self._text.find(mark, start) for mark in (close, opening)}
        found = [(place, mark) for mark, place in places.items() if place >= 0]
        if not found:
            raise _Stop(len(self._text), ends)
        place, mark = min(found)
        before, after = ends[: ends.index(close)], ends[ends.index(close) + len(close) :]
        if mark == opening or not self._text[start:place].endswith(before):
            raise _Stop(place + len(mark) - 1, ends)
        self.at = place + len(close)
        self._literal(after)

    def _meant(self, schema: Schema) -> Schema:
        """Return the schema that a schema refers to."""
        for _ in range(MAX_DEPTH):
            if schema is True:
                return {}
            if "$ref" in schema:
                schema = resolved(self._root, schema["$ref"])
            elif "allOf" in schema:
                schema = schema["allOf"][0]
            else:
                break
        return schema

    def value(self, schema: Schema) -> None:
        """Read one value of the schema."""
        if self._depth >= MAX_DEPTH:
            raise _Stop(self.at, "null")
        self._depth += 1
        schema = {} if schema is True else schema
        if "$ref" in schema:
            self.value(resolved(self._root, schema["$ref"]))
        elif "allOf" in schema:
            self.value(schema["allOf"][0])
        elif "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            self._one_of([json.dumps(value, ensure_ascii=False) for value in values])
        elif "anyOf" in schema:
            self._any_of(schema["anyOf"])
        elif isinstance(kinds := schema.get("type", ANY), str):
            self._of_type(kinds, schema)
        else:
            self._any_of([schema | {"type": kind} for kind in kinds])
        self._depth -= 1

    def _of_type(self, kind: str, schema: Schema) -> None:
        match kind:
            case "object":
                self._object(schema)
            case "array":
                self._array(schema)
            case "string":
                self._string()
            case "number" | "integer":
                self._number(whole=kind == "integer")
            case "boolean":
                self._one_of(["true", "false"])
            case _:
                self._literal("null")

    def _any_of(self, schemas: Sequence[Schema]) -> None:
        """Read a value of the schema that fits the longest part of the text."""
        start, depth = self.at, self._depth
        ends: list[int] = []
        stops: list[_Stop] = []
        for schema in schemas:
            self.at, self._depth = start, depth
            try:
                self.value(schema)
                ends.append(self.at)
            except _Stop as stop:
                stops.append(stop)
        furthest = max((stop.at for stop in stops), default=-1)
        if ends and max(ends) >= furthest:
            self.at, self._depth = max(ends), depth
            return
        last = [stop for stop in stops if stop.at == furthest]
        raise _Stop(furthest, last[0].next, fixed=len(last) == 1 and last[0].fixed)

    def _object(self, schema: Schema) -> None:
        known: Mapping[str, Schema] = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        missing = list(schema.get("required", ()))
        left = [*missing, *(key for key in known if key not in missing)]
        self._literal("{")
        self.skip_space()
        first = True
        while True:
            may_end, may_go_on = not missing, bool(left) or others is not False
            if may_end and self.sees("}"):
                self.at += 1
                return
            if may_end and not (may_go_on and self.sees('"' if first else ",")):
                raise _Stop(self.at, "}", fixed=not may_go_on)
            if not first:
                self._literal(",")
                self.skip_space()
            key = self._key(left, missing, others)
            left = [each for each in left if each != key]
            missing = [each for each in missing if each != key]
            self._mark(":")
            self.skip_space()
            self.value(known.get(key, others))
            self.skip_space()
            first = False

    def _key(self, left: Sequence[str], missing: Sequence[str], others: Schema) -> str:
        if others is False:
            written = [json.dumps(key, ensure_ascii=False) for key in left]
            return str(json.loads(self._one_of(written, ": ")))
        if not self.sees('"'):
            asked = json.dumps(missing[0], ensure_ascii=False) if missing else '"key"'
            raise _Stop(self.at, f"{asked}: ")
        start = self.at
        self._string()
        return str(json.loads(self._text[start : self.at]))

    def _array(self, schema: Schema) -> None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        self._literal("[")
        self.skip_space()
        count = 0
        while True:
            if count >= least and self.sees("]"):
                self.at += 1
                return
            if count:
                if most is not None and count >= most:
                    raise _Stop(self.at, "]", fixed=True)
                if not self.sees(","):
                    raise _Stop(self.at, "]" if count >= least else ", ", fixed=count < least)
                self.at += 1
                self.skip_space()
            elif most == 0 or (self.at == len(self._text) and not least):
                raise _Stop(self.at, "]", fixed=most == 0)
            self.value(schema.get("items", True))
            self.skip_space()
            count += 1

    def _string(self) -> None:
        self._literal('"')
        while not self.sees('"'):
            if self.at == len(self._text) or ord(self._text[self.at]) < ord(" "):
                raise _Stop(self.at, '"')
            if self._text[self.at] == "\\":
                self._escape()
            else:
                self.at += 1
        self.at += 1

    def _escape(self) -> None:
        self.at += 1
        if self.sees("u"):
            self.at += 1
            for number in range(4):
                if not self.sees(HEX):
                    raise _Stop(self.at, "0020"[number:])
                self.at += 1
        elif self.sees('"\\/bfnrt'):
            self.at += 1
        else:
            raise _Stop(self.at, "n")

    def _number(self, *, whole: bool) -> None:
        if self.sees("-"):
            self.at += 1
        if self.sees("0"):
            self.at += 1
        else:
            self._digits()
        if not whole and self.sees("."):
            self.at += 1
            self._digits()
        if not whole and self.sees("eE"):
            self.at += 1
            if self.sees("+-"):
                self.at += 1
            self._digits()

    def _digits(self) -> None:
        if not self.sees("0123456789"):
            raise _Stop(self.at, "0")
        while self.sees("0123456789"):
            self.at += 1

    def _mark(self, mark: str) -> None:
        """Read spaces and a mark."""
        self.skip_space()
        self._literal(mark)

    def _words(self, text: str) -> None:
        """Read a part of a JSON object, with other spaces than the text has, too."""
        for spaces, word in re.findall(r"(\s*)([{}:,]|[^\s{}:,]+)", text):
            start = self.at
            self.skip_space()
            self._literal(word, spaces if self.at - start < MAX_SPACES else "")

    def _literal(self, literal: str, before: str = "") -> None:
        """Read a fixed text. `before` is written before it, if anything is."""
        size = _common(self._text, self.at, literal)
        if size < len(literal):
            spaces = before if not size else ""
            raise _Stop(self.at + size, spaces + literal[size:], fixed=True)
        self.at += size

    def _one_of(self, options: Sequence[str], after: str = "") -> str:
        """Read the longest option that the text has. `after` is written after one."""
        found = [each for each in options if self._text.startswith(each, self.at)]
        if found:
            longest = max(found, key=len)
            self.at += len(longest)
            return longest
        sizes = [_common(self._text, self.at, each) for each in options]
        size = max(sizes)
        nearest = [each for each, own in zip(options, sizes, strict=True) if own == size]
        raise _Stop(self.at + size, nearest[0][size:] + after, fixed=len(nearest) == 1)


def _common(text: str, at: int, literal: str) -> int:
    """Return the number of characters of the literal that the text has at this place."""
    size = 0
    while size < len(literal) and text.startswith(literal[size], at + size):
        size += 1
    return size


def check_schema(schema: Any, param: str) -> Schema:
    """Return a schema of objects, if everything in it can be enforced.

    Raises:
        ApiError: names the place of what cannot be enforced.
    """
    if not isinstance(schema, Mapping):
        raise refused(param, "a JSON schema is expected, an object")
    parts = [*_parts(schema, param)]
    checked = {id(part) for _, part in parts}
    for path, part in parts:
        _check_part(part, path, schema, checked)
    top: Schema = schema
    for _ in range(MAX_DEPTH):
        top = resolved(schema, top["$ref"]) if top is not True and "$ref" in top else top
    if top is True or top.get("type") != "object" or "anyOf" in top:
        raise refused(param, "the type of the whole answer must be object")
    return schema


def _parts(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the schema and all schemas in it, each with its place."""
    yield path, schema
    if not isinstance(schema, Mapping):
        return
    for name in ("properties", "$defs", "definitions"):
        inner = schema.get(name, {})
        if not isinstance(inner, Mapping):
            raise refused(f"{path}.{name}", "an object of schemas is expected")
        for key, part in inner.items():
            yield from _parts(part, f"{path}.{name}.{key}")
    for name in ("anyOf", "allOf"):
        inner = schema.get(name, [])
        if not isinstance(inner, list) or (name in schema and not inner):
            raise refused(f"{path}.{name}", "a list of schemas is expected, at least one")
        for place, part in enumerate(inner):
            yield from _parts(part, f"{path}.{name}[{place}]")
    for name in ("items", "additionalProperties"):
        if not isinstance(schema.get(name, True), bool):
            yield from _parts(schema[name], f"{path}.{name}")


def _check_part(schema: Any, path: str, root: Schema, checked: Container[int]) -> None:
    """Raise `ApiError` if a part of a schema cannot be enforced.

    Args:
        schema: the part.
        path: its place.
        root: the whole schema.
        checked: `id` of each part that is checked. A reference to anything else, such as a default,
            would lead to a schema with keywords that nothing has checked.
    """
    if schema is True:
        return
    if not isinstance(schema, Mapping):
        raise refused(path, f"a schema is expected, not {schema!r}")
    unknown = [key for key in schema if key not in KEYWORDS and key not in ANNOTATIONS]
    if unknown:
        raise refused(
            f"{path}.{unknown[0]}",
            "this keyword cannot be enforced: leave it out (known: " + ", ".join(KEYWORDS) + ")",
        )
    said = [key for key in schema if key in KEYWORDS and key not in ("$defs", "definitions")]
    alone = [key for key in said if key in ELSEWHERE]
    if alone and len(said) > 1:
        raise refused(path, f"{alone[0]} cannot be enforced together with {', '.join(said)}")
    if said and "type" not in schema and not {"enum", "const", *ELSEWHERE} & {*said}:
        raise refused(f"{path}.type", "is missing")
    kinds = schema.get("type", "object")
    listed = kinds if isinstance(kinds, list) else [kinds]
    if not listed or any(not isinstance(kind, str) or kind not in TYPES for kind in listed):
        raise refused(f"{path}.type", f"must be one of {', '.join(TYPES)}, not {kinds!r}")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise refused(f"{path}.enum", "a list of values is expected, at least one")
    every = schema.get("allOf", [])
    if isinstance(every, list) and len(every) > 1:
        raise refused(f"{path}.allOf", "more than one schema cannot be enforced")
    _check_array(schema, path)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise refused(f"{path}.required", "a list of names is expected")
    absent = [key for key in required if key not in schema.get("properties", {})]
    if absent and schema.get("additionalProperties", True) is False:
        raise refused(f"{path}.required", f"{absent[0]!r} is not one of the properties")
    if "$ref" in schema:
        try:
            known = id(resolved(root, schema["$ref"])) in checked
        except KeyError:
            known = False
        if not known:
            raise refused(f"{path}.$ref", f"{schema['$ref']!r} is not a schema in this schema")


def _check_array(schema: Mapping[str, Any], path: str) -> None:
    if schema.get("items") is False:
        raise refused(f"{path}.items", "must be a schema; for no items, set maxItems to 0")
    for key in ("minItems", "maxItems"):
        count = schema.get(key, 0)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise refused(f"{path}.{key}", "must be a whole number of at least 0")
        if count > MAX_ITEMS:
            raise refused(
                f"{path}.{key}",
                f"must be at most {MAX_ITEMS}, not {count}: lower it or leave it out",
            )
    if schema.get("maxItems", schema.get("minItems", 0)) < schema.get("minItems", 0):
        raise refused(f"{path}.maxItems", "must be at least minItems")
