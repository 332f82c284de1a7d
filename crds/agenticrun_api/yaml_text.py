"""Reads and writes YAML as kubectl does, so that a file is the same run everywhere.

kubectl reads YAML with Go's library and turns it into JSON. There `1e3`, `1.0` and `0o14` are
integers, `y` is true, dates and `1:30` are texts, and keys are texts. PyYAML reads each of them
otherwise, and keeps the last of equal keys without a word.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode

_TAG = "tag:yaml.org,2002:"

_TRUE = frozenset(["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"])
_FALSE = frozenset(["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"])
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER = re.compile(
    r"([-+]?)(0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)", re.ASCII
)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_LARGEST = 2**63 - 1
"""Largest integer that Kubernetes stores exactly."""


class InvalidYaml(yaml.YAMLError):
    """The text is YAML, but kubectl would read something else than it says."""


class EqualKeys(InvalidYaml):
    """A mapping has a key twice. The message names the lines of both."""

    def __init__(self, key: str, first: int, second: int):
        self.key = key
        super().__init__(f"line {second}: {key} is set twice (line {first}): remove one of the two")


def _resolved(text: str) -> str:
    """Return the tag of a scalar without quotes."""
    if text in _TRUE or text in _FALSE:
        return f"{_TAG}bool"
    if text in _NULL:
        return f"{_TAG}null"
    if text == "<<":
        return f"{_TAG}merge"
    if not text.startswith("_"):
        digits = text if text.startswith(".") else text.replace("_", "")
        if _INTEGER.fullmatch(digits):
            return f"{_TAG}int"
        if _SPECIAL_FLOAT.fullmatch(text) or (
            _FLOAT.fullmatch(digits) and abs(float(digits)) != float("inf")
        ):
            return f"{_TAG}float"
    return f"{_TAG}str"


def _number(text: str) -> int | float:
    """Return the number that JSON has for a scalar: floats without a fraction are integers."""
    digits = text.replace("_", "")
    if found := _INTEGER.fullmatch(digits):
        sign, digits = found.groups()
        is_octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
        number = int(sign + digits, 8 if is_octal else 0)
        if not -_LARGEST - 1 <= number <= _LARGEST:
            raise ValueError(f"{text} is too large for Kubernetes to store exactly")
        return number
    special = _SPECIAL_FLOAT.fullmatch(text)
    value = float(text.replace(".", "") if special else digits)
    exact = not special and value.is_integer() and abs(value) <= _LARGEST
    return int(value) if exact else value


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _resolved(value)
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Compose a mapping, and refuse equal keys before merge keys (`<<`) add theirs."""
        node = super().compose_mapping_node(anchor)
        assert isinstance(node, MappingNode)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the constructor refuses it
            line = key.start_mark.line + 1
            is_merge = key.tag == f"{_TAG}merge"
            name = key.value if is_merge else _key(self.construct_object(key), line)
            if name in lines:
                raise EqualKeys(name, lines[name], line)
            lines[name] = line
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. JSON's keys are texts: `y` becomes "true", and 007 becomes "7"."""
        found = super().construct_mapping(node, deep)
        return {_key(key, node.start_mark.line + 1): value for key, value in found.items()}

    def number(self, node: yaml.ScalarNode) -> int | float:
        try:
            return _number(node.value)
        except ValueError as error:
            line = node.start_mark.line + 1
            raise InvalidYaml(f"line {line}: {error}: write it in quotes") from error

    def boolean(self, node: yaml.ScalarNode) -> bool:
        return node.value in _TRUE

    def refuse(self, node: yaml.Node) -> None:
        raise InvalidYaml(f"line {node.start_mark.line + 1}: JSON has no {node.tag}: quote it")


def _key(key: Any, line: int) -> str:
    if isinstance(key, bool):
        return str(key).lower()
    if isinstance(key, str | int):
        return str(key)
    raise InvalidYaml(f"line {line}: the mapping has the key {key!r}, which is no text: quote it")


_Loader.add_constructor(f"{_TAG}int", _Loader.number)
_Loader.add_constructor(f"{_TAG}float", _Loader.number)
_Loader.add_constructor(f"{_TAG}bool", _Loader.boolean)
# kubectl makes texts of these, or fails.
for _name in ("timestamp", "binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"{_TAG}{_name}", _Loader.refuse)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `_Loader`, or another reader of YAML 1.1, would not take for texts."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = _resolved(value) if kind is yaml.ScalarNode and implicit[0] else f"{_TAG}str"
        usual = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return usual if tag == f"{_TAG}str" else tag


class BlockDumper(_Dumper):
    """Writes texts of several lines as they are, where YAML can."""

    def text(self, text: str) -> yaml.ScalarNode:
        as_it_is = "\n" in text and all(line.isprintable() for line in text.split("\n"))
        return self.represent_scalar(f"{_TAG}str", text, "|" if as_it_is else None)


BlockDumper.add_representer(str, BlockDumper.text)


def read_yaml(text: str) -> Any:
    """Return the value of the only document.

    Raises:
        InvalidYaml: kubectl would read something else, such as the last of equal keys.
        yaml.YAMLError: the text is not one YAML document.
    """
    return yaml.load(text, _Loader)  # a SafeLoader


def read_yaml_documents(text: str) -> list[Any]:
    """Return the value of each document; raises as `read_yaml` does."""
    return list(yaml.load_all(text, _Loader))  # a SafeLoader


def write_yaml(document: Any, *, ascii_only: bool = False) -> str:
    """Return a document as YAML, in the order of its keys."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=not ascii_only)
    return text
