"""Reads and writes YAML as kubectl does: equal keys are errors, and `1e9` is a number.

PyYAML keeps the last of equal keys without a word, and takes numbers in scientific notation for
texts unless they have a dot and a sign. It would write the text "1e9" without quotes.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode


class EqualKeys(yaml.YAMLError):
    """A mapping has a key twice. The message names the lines of both."""

    def __init__(self, key: str, first: int, second: int):
        self.key = key
        super().__init__(f"line {second}: {key} is set twice (line {first}): remove one of the two")


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Compose a mapping, and refuse equal keys before merge keys (`<<`) add theirs."""
        node = super().compose_mapping_node(anchor)
        assert isinstance(node, MappingNode)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the constructor refuses it
            line = key.start_mark.line + 1
            if key.value in lines:
                raise EqualKeys(key.value, lines[key.value], line)
            lines[key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `_Loader` would take for numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def read_yaml(text: str) -> Any:
    """Return the value of the only document.

    Raises:
        EqualKeys: a mapping has a key twice.
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
