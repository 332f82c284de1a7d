"""Answers as actions of OpenEnv: what the JSON schema of an environment's action accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agenticrun_workers.envs.tool_calls import Invalid, as_text, parse_json

Schema = Mapping[str, Any]

MOST_CHOICES = 100
"""Values of an integer field with bounds that count as a list of choices."""

DEFINITION = re.compile(r"#/(?:\$defs|definitions)/([^/]+)")
"""References that are followed: those to a definition of the schema."""

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class ActionForm:
    """The form of an answer.

    - With `actions`, an answer is one of these words.
    - With one field to fill in, the answer is its value.
    - With several fields, the answer is a JSON object. So it is with several kinds of actions.

    Args:
        schema: JSON schema of the action.
        actions: words for actions: a mapping from each word to the field's value or to the whole
            action, or a list of values.
        fields: fields that every action has, with their values.

    Raises:
        ValueError: `actions` or `fields` do not fit the schema.
    """

    def __init__(
        self,
        schema: Schema,
        actions: Mapping[str, Any] | Sequence[Any] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._defs: Mapping[str, Any] = {**schema.get("definitions", {}), **schema.get("$defs", {})}
        kinds = self._options(schema)
        own: dict[str, Schema] = {}
        for kind in kinds:
            for name, found in kind.get("properties", {}).items():
                part = self._resolved(found)
                same = name not in own or own[name] == part
                own[name] = part if same else {"anyOf": [own[name], part]}
        own.pop("metadata", None)
        unknown = set(fields or {}) - own.keys()
        if unknown:
            raise ValueError(
                f"actionFields: the action has no field {', '.join(sorted(unknown))} "
                f"(it has: {', '.join(own)})"
            )
        required = {name for name in own if all(name in kind.get("required", ()) for kind in kinds)}
        constants = {name: part["const"] for name, part in own.items() if "const" in part}
        self._fixed = {name: constants[name] for name in constants if name in required}
        self._fixed |= dict(fields or {})
        self._own = {name: part for name, part in own.items() if name not in self._fixed}
        self._required = [name for name in self._own if name in required]
        open_fields = self._required or [name for name in self._own if name not in constants]
        self._single = open_fields[0] if len(open_fields) == len(kinds) == 1 else None
        self._words = None if actions is None else self._actions_of_words(actions)

    def parse(self, text: str) -> dict[str, Any] | Invalid:
        """Return the action of an answer."""
        plain = text.strip()
        if self._words is not None:
            action = _chosen(plain, self._words)
            return Invalid(self.question()) if action is None else action
        if not self._own:
            return dict(self._fixed)
        if not plain:
            return Invalid("The answer is empty.")
        value = parse_json(text) if "{" in text else None
        if isinstance(value, dict) and value and value.keys() <= self._own.keys():
            return self._fixed | value
        if self._single is not None:
            try:
                return self._fixed | {self._single: self._value(text, self._own[self._single])}
            except ValueError as error:
                return Invalid(str(error))
        if isinstance(value, dict):
            known = ", ".join(self._own)
            return Invalid(f"The action has the fields {known}, not {', '.join(map(str, value))}.")
        return Invalid("The answer is not a JSON object.")

    def answers(self) -> list[str]:
        """Return all valid answers, if there are few; else none."""
        if self._words is not None:
            return list(self._words)
        if self._single is None:
            return []
        return list(self._choices(self._own[self._single]))

    def answer_of(self, value: Any) -> str:
        """Return the answer that plays a value of the single field, or a whole action."""
        for word, action in (self._words or {}).items():
            if value in (action, action.get(self._single or "")):
                return word
        return as_text(value)

    def question(self) -> str:
        """Return how to answer, in words."""
        choices = self.answers()
        if choices:
            return f"Answer with one of: {', '.join(choices)}."
        if not self._own:
            return "Any answer plays the only action."
        lines = []
        if self._single is not None:
            lines = [f"Answer with {self._single}: {self._described(self._own[self._single])}."]
        if len(self._own) > 1 or self._single is None:
            lines += [
                f"{'Or answer' if lines else 'Answer'} with a JSON object that has these fields:",
                *(
                    f"- {name}{'' if name in self._required else ' (optional)'}: "
                    f"{self._described(part)}"
                    for name, part in self._own.items()
                ),
            ]
        return "\n".join(lines)

    def _actions_of_words(
        self, actions: Mapping[str, Any] | Sequence[Any]
    ) -> dict[str, dict[str, Any]]:
        named = (
            actions if isinstance(actions, Mapping) else {as_text(each): each for each in actions}
        )
        if not named or isinstance(actions, str):
            raise ValueError("actions must be a list of values, or a mapping from words to values")
        found = {}
        for word, value in named.items():
            if isinstance(value, Mapping) and value.keys() <= self._own.keys():
                action = dict(value)
            elif self._single is not None:
                action = {self._single: value}
            else:
                raise ValueError(
                    f"actions: {word!r} must be an object with the action's fields: "
                    f"{', '.join(self._own)}"
                )
            found[str(word)] = self._fixed | action
        return found

    def _value(self, text: str, part: Schema) -> Any:
        """Return the value that a text is under a schema. Raises `ValueError`."""
        plain = text.strip()
        for option in self._options(part):
            if choices := self._choices(option):
                value = _chosen(plain, {word: (value,) for word, value in choices.items()})
                if value is not None:
                    return value[0]
                continue
            match option.get("type"):
                case "string" | None if "properties" not in option:
                    return text
                case "integer" if re.fullmatch(r"[+-]?\d{1,18}", plain):
                    return int(plain)
                case "number" if (number := _finite(plain)) is not None:
                    return number
                case "boolean" if plain.lower() in BOOLEANS:
                    return BOOLEANS[plain.lower()]
                case "array" if isinstance(value := parse_json(plain), list):
                    return value
                case "object" | None if isinstance(value := parse_json(plain), dict):
                    return value
        raise ValueError(f"{plain[:80]!r} is not {self._described(part)}.")

    def _choices(self, part: Schema) -> dict[str, Any]:
        """Return the values of a schema by word, if they are few."""
        options = self._options(part)
        if len(options) != 1:
            return {}
        (option,) = options
        if "const" in option:
            return {as_text(option["const"]): option["const"]}
        if "enum" in option:
            return {as_text(value): value for value in option["enum"] if value is not None}
        if option.get("type") == "boolean":
            return {"true": True, "false": False}
        if option.get("type") == "integer":
            low = option.get("minimum", option.get("exclusiveMinimum", -math.inf))
            high = option.get("maximum", option.get("exclusiveMaximum", math.inf))
            low += "exclusiveMinimum" in option and "minimum" not in option
            high -= "exclusiveMaximum" in option and "maximum" not in option
            if high - low < MOST_CHOICES:
                return {str(value): value for value in range(math.ceil(low), math.floor(high) + 1)}
        return {}

    def _options(self, part: Schema, above: tuple[Any, ...] = ()) -> list[Schema]:
        """Return the alternatives of a schema without null, which an answer leaves out.

        Args:
            above: the alternatives that lead to this schema. One that refers back to them adds no
                other value.
        """
        part = self._resolved(part)
        key = next((key for key in ("anyOf", "oneOf") if part.get(key)), None)
        if key is not None:
            alternatives = part[key]
            if alternatives in above:
                return []
            beside = {name: value for name, value in part.items() if name != key}
            return [
                option
                for each in alternatives
                for option in self._options(
                    _joined(beside, self._resolved(each)), (*above, alternatives)
                )
            ]
        types = part.get("type")
        if isinstance(types, list):
            return [{**part, "type": each} for each in types if each != "null"]
        return [] if types == "null" else [part]

    def _resolved(self, part: Schema, above: tuple[str, ...] = ()) -> Schema:
        """Return a schema joined with the ones that it refers to or consists of (`allOf`).

        Args:
            above: names of the definitions that lead to this schema, which are not followed again.
        """
        parts = [*part.get("allOf", ())]
        found = DEFINITION.fullmatch(str(part.get("$ref", "")))
        name = found[1].replace("~1", "/").replace("~0", "~") if found else ""
        if name in self._defs and name not in above:
            parts.insert(0, self._defs[name])
            above = (*above, name)
        joined: Schema = {}
        for each in parts:
            joined = _joined(joined, self._resolved(each, above))
        own = {key: value for key, value in part.items() if key not in ("$ref", "allOf")}
        return _joined(joined, own)

    def _described(self, part: Schema) -> str:
        """Return a schema in words."""
        part = self._resolved(part)
        kinds = " or ".join(dict.fromkeys(map(self._kind, self._options(part)))) or "any value"
        description = str(part.get("description", "")).strip().rstrip(".")
        return f"{kinds} ({description})" if description else kinds

    def _kind(self, option: Schema, depth: int = 0) -> str:
        if choices := self._choices(option):
            return f"one of {', '.join(choices)}" if len(choices) > 1 else next(iter(choices))
        kind = option.get("type", "object" if "properties" in option else "text")
        if kind == "array" and depth < 3:
            items = [self._kind(each, depth + 1) for each in self._options(option.get("items", {}))]
            return f"a list of {' or '.join(items)}" if items else "a list"
        if kind == "object" and option.get("properties") and depth < 3:
            fields = (
                f"{name}: "
                + " or ".join(self._kind(each, depth + 1) for each in self._options(part))
                for name, part in option["properties"].items()
            )
            return f"an object {{{', '.join(fields)}}}"
        names = {"string": "text", "integer": "a whole number", "number": "a number"}
        return names.get(kind, str(kind))


def _joined(first: Schema, second: Schema) -> Schema:
    """Return a schema with the fields of both. Where they differ, the second one counts."""
    both = {**first, **second}
    if "properties" in both:
        both["properties"] = {**first.get("properties", {}), **second.get("properties", {})}
    if "required" in both:
        required = [*first.get("required", ()), *second.get("required", ())]
        both["required"] = [*dict.fromkeys(required)]
    return both


def _chosen(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value whose word a text is; case counts only between equal words."""
    if text in values:
        return values[text]
    found = [value for word, value in values.items() if word.lower() == text.lower()]
    return found[0] if len(found) == 1 else None


def _finite(text: str) -> float | None:
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", text.lower()):
        return None
    number = float(text)
    return number if math.isfinite(number) else None
