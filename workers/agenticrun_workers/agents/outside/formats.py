"""Formats that a request demands of its answer: JSON, a JSON schema, a tool call.

Where nothing is trained, engines enforce formats: `AnswerFormat.structural_tag`. A run's engines do
not, because masks change log-probs. There llguidance reads what was sampled. It says how much of it
a valid answer can begin with, and which bytes may follow, and `session` samples with that. It needs
no torch, which xgrammar imports: env workers are small without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from agenticrun_workers.agents.chat_families import HERMES, CallText
from agenticrun_workers.agents.json_schema import Schema, resolved, types_of
from agenticrun_workers.agents.outside.messages import ApiError, refused

if TYPE_CHECKING:
    from llguidance import LLMatcher

SPACES = b" \t\n\r"
MAX_SPACES = 40
"""Most spaces and line breaks between two parts of a value: a weak policy would never stop."""
MAX_DEPTH = 48
"""Limit of references that lead to references."""
MANY = 64
"""Fewest bytes that may follow inside a text of any form; elsewhere fewer may."""
MOST_WRITTEN = 1024
"""Bytes that are written at once: a schema may demand a value without an end."""
CLOSING = b'}],"/0{'
"""Bytes that end a value, or else begin a short one, the first that is possible first."""
JSON_OPTIONS = {
    "x-guidance": {
        "whitespace_pattern": rf"[ \t\n\r]{{1,{MAX_SPACES}}}",
        "json_allow_general_unicode_escapes": True,
    }
}

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


@dataclass(frozen=True)
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
        options = []
        for name, schema in (self.calls or {}).items():
            how = self.call_text
            assert how is not None
            end = [_text_tag(how.end)] if how.end else []
            begin = _text_tag(how.before_arguments(name))
            options.append(_sequence_tag(begin, _json_tag(schema, how.style), *end))
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

    @property
    def grammar(self) -> str:
        """The format in the language of llguidance, a variant of Lark."""
        rules = [f"SPACES: /[ \\t\\n\\r]{{1,{MAX_SPACES}}}/", "ANY_TEXT: /(?s:.*)/"]
        options = [
            self._call_rule(name, schema, rules) for name, schema in (self.calls or {}).items()
        ]
        if self.schema is not None:
            options.append(_json_rule(self.schema))
        before = "SPACES?"
        if self.reasoning is not None:
            begins, ends = self.reasoning
            # Spaces stay outside the lazy rule, or it would take those before an answer without
            # reasoning.
            before = "SPACES? (reasoning SPACES?)?" if begins else "reasoning SPACES?"
            rules.append(f"reasoning[lazy]: {_quoted(begins)} ANY_TEXT {_quoted(ends)}")
        return "\n".join([f"start: {before} ({' | '.join(options)})", *rules])

    def _call_rule(self, name: str, schema: Schema, rules: list[str]) -> str:
        """Return the rule of a call, and add to `rules` what it refers to."""
        how = self.call_text
        assert how is not None
        if how.quoted:
            before = [*_words(how.start), _quoted(json.dumps(name)), *_words(how.between)]
            return " SPACES? ".join([*before, _json_rule(schema), *_words(how.end)])
        arguments = (
            _json_rule(schema) if how.tags is None else _tagged_rule(schema, how.tags, rules)
        )
        return f"{_quoted(how.before_arguments(name))} {arguments} {_quoted(how.end)}"

    def read(self, text: str) -> Reading:
        """Return how far a text keeps to the format.

        Raises:
            ApiError: the format cannot be read.
        """
        said = text.encode()
        matcher = self._matcher.deep_copy()
        size = matcher.try_consume_tokens([*said])
        if matcher.is_error():
            raise self._refused(matcher)
        kept = said[:size].decode(errors="ignore")
        matcher.rollback(size - len(kept.encode()))
        if matcher.is_stopped():
            return Reading(len(kept), True, "", True)
        return Reading(len(kept), False, *self._continued(matcher))

    @cached_property
    def _matcher(self) -> LLMatcher:
        """At the start of a text. Each draw of an answer is read, so the grammar is made once."""
        return _compiled(self.grammar)

    def _continued(self, matcher: LLMatcher) -> tuple[str, bool]:
        """Return text towards a whole answer, and True if all answers have it here.

        Raises:
            ApiError: the format cannot be read further.
        """
        allowed = self._allowed(matcher)
        for end in self._ends if len(allowed) < MANY else (*self._ends, '"'):
            closed, fixed = matcher.deep_copy(), True
            for byte in end.encode():
                if closed.is_stopped() or not closed.validate_tokens([byte]):
                    break
                options = self._allowed(closed)
                # Spaces that mean nothing are no option, and still may be written.
                fixed = fixed and (options == [byte] or (byte in SPACES and byte not in options))
                closed.consume_token(byte)
            else:
                if closed.is_stopped() or self._allowed(closed) != allowed:
                    return end, fixed
        if len(allowed) >= MANY:
            return "_", False  # a text whose end is not possible here, such as a key that is known
        written, fixed = bytearray(), True
        while not matcher.is_stopped():
            allowed = self._allowed(matcher)
            if written.endswith((b":", b",")) and matcher.validate_tokens([*SPACES]) == len(SPACES):
                byte = ord(" ")
            elif _is_whole(written) and (
                written.endswith(b": ") or len(allowed) > 1 or len(written) >= MOST_WRITTEN
            ):
                break
            else:
                byte = next((each for each in CLOSING if each in allowed), allowed[0])
                fixed = fixed and len(allowed) == 1
            matcher.consume_token(byte)
            written.append(byte)
        return written.decode(), fixed

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        """Return the bytes that may follow, without spaces that mean nothing."""
        mask = matcher.compute_logit_bias()
        if matcher.is_error():
            raise self._refused(matcher)
        allowed = [byte for byte in range(256) if mask[byte]]
        # One space alone is text, or a part of what must follow.
        meaningless = all(mask[byte] for byte in SPACES)
        return [byte for byte in allowed if not (meaningless and byte in SPACES)] or allowed

    def _refused(self, matcher: LLMatcher) -> ApiError:
        return refused(
            "tools" if self.schema is None else "response_format",
            f"cannot be enforced: {matcher.get_error().splitlines()[0]}. Simplify the schema",
        )

    @property
    def _ends(self) -> Sequence[str]:
        """Texts that end an argument and its name, reasoning, and a call."""
        how = self.call_text
        ends = [*how.tags[:0:-1]] if how is not None and how.tags is not None else []
        ends += [f"\n{self.reasoning[1]}\n\n"] if self.reasoning is not None else []
        return [*ends, how.end] if how is not None and how.end else ends


def _text_tag(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _json_tag(schema: Schema, style: str = "json") -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": _with_required(schema),
        "style": style,
        "max_whitespace_cnt": MAX_SPACES,
    }


def _sequence_tag(*elements: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _words(text: str) -> list[str]:
    """Return the parts of a text between which there may be spaces."""
    return [_quoted(word) for word in re.findall(r"[{}:,]|[^\s{}:,]+", text)]


def _json_rule(schema: Schema) -> str:
    return "%json " + json.dumps(JSON_OPTIONS | ({} if schema is True else schema))


def _tagged_rule(root: Schema, tags: tuple[str, str, str], rules: list[str]) -> str:
    """Return the rule of arguments between tags, and add the rules that it refers to."""
    opening, begins, ends = tags
    number = len(rules)
    marks = f"({_quoted(opening)} | {_quoted(ends.strip())})"
    text = f"(ANY_TEXT & ~(ANY_TEXT {marks} ANY_TEXT)) {_quoted(ends)}"
    rules.append(f"text_{number}[lazy]: {text}")

    def value(schema: Schema) -> str:
        """Return the rule of a value and the text after it. Texts stand there as they are."""
        schema = _meant(schema, root)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            written = [each if isinstance(each, str) else _quoted(each) for each in values]
            return f"({' | '.join(_quoted(each + ends) for each in written)})"
        kinds = types_of(schema, root)
        if not kinds or "string" in kinds:
            return f"text_{number}"
        whole = {"$defs": {"root": root}}
        return f"{_json_rule(_from_root(schema) | _from_root(whole))} {_quoted(ends)}"

    schema = _meant(root, root)
    others = schema.get("additionalProperties", True)
    required = schema.get("required", ())
    known = _properties(schema)
    parts = [
        f"({_quoted(opening + key + begins)} {value(part)}){'' if key in required else '?'}"
        for key, part in known.items()
    ]
    if others is not False:
        names = f" & ~({' | '.join(map(_quoted, known))})" if known else ""
        rules.append(f"NAME_{number}: /[^<>\\n]+/{names}")
        parts.append(f"({_quoted(opening)} NAME_{number} {_quoted(begins)} {value(others)})*")
    return " ".join(parts)


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of each property that has a name, the required ones included."""
    properties: dict[str, Any] = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    return properties | {key: others for key in schema.get("required", ()) if key not in properties}


def _with_required(schema: Any) -> Any:
    """Return an equal schema in which each required name has its property.

    xgrammar does not require others.
    """
    if not isinstance(schema, Mapping):
        return schema
    written = dict(schema)
    for key, part in schema.items():
        if key in ("properties", "$defs", "definitions"):
            written[key] = {name: _with_required(each) for name, each in part.items()}
        elif key in ("anyOf", "allOf"):
            written[key] = [_with_required(each) for each in part]
        elif key in ("items", "additionalProperties"):
            written[key] = _with_required(part)
    return written | ({"properties": _properties(written)} if "required" in schema else {})


def _meant(schema: Schema, root: Schema) -> Schema:
    """Return the schema that a schema refers to."""
    for _ in range(MAX_DEPTH):
        if schema is True:
            return {}
        if "$ref" in schema:
            schema = resolved(root, schema["$ref"])
        elif "allOf" in schema:
            schema = schema["allOf"][0]
        else:
            break
    return schema


def _from_root(schema: Any) -> Any:
    """Return a part of a schema that has the whole schema as its definition `root`."""
    if isinstance(schema, list):
        return [_from_root(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/root{part[1:]}"
        if key == "$ref" and isinstance(part, str)
        else _from_root(part)
        for key, part in schema.items()
    }


class _Bytes:
    """A tokenizer of which each byte is a token."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([each]) for each in range(256)), b"")

    def __call__(self, text: bytes) -> list[int]:
        return [*text]


@lru_cache(maxsize=32)
def _compiled(grammar: str) -> LLMatcher:
    """Return a matcher at the start of a text. To copy it is faster than to compile it again."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    return LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes()), slices=[]), grammar, log_level=0)


def _is_whole(text: bytearray) -> bool:
    """Return True if there is a text that ends with a whole character."""
    return bool(text) and text.decode(errors="ignore").encode() == text


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
