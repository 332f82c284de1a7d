"""The converter knows every field of ROLL, and the example configurations use every one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_workers.convert import compose
from agenticrun_workers.convert.fields import Fields, Section
from agenticrun_workers.convert.mapping import AGENTIC

DATA = Path(__file__).parents[2] / "data/roll"
EXAMPLES = sorted((DATA / "agentic").glob("*.yaml"))
SECTIONS = {
    path.removeprefix("top"): names.split()
    for path, names in yaml.safe_load((DATA / "fields.yaml").read_text()).items()
}
"""Path of a section -> its fields, as ROLL's code has them."""


def table(path: str) -> Fields:
    """Return the table of a section."""
    fields: Fields = AGENTIC
    for key in filter(None, path.split(".")):
        section = fields[key]
        assert isinstance(section, Section)
        fields = section.fields
    return fields


@pytest.mark.parametrize(("path", "names"), SECTIONS.items())
def test_every_field_of_roll_is_in_the_table(path: str, names: list[str]) -> None:
    assert set(names) - set(table(path)) == set()


def used(values: Any, path: str = "") -> set[str]:
    """Return every key of a configuration, without names of environments and list indices."""
    if isinstance(values, list):
        return set().union(*(used(value, path) for value in values))
    if not isinstance(values, dict):
        return set()
    if path == "custom_envs":
        return set().union(*(used(value, "custom_envs.*") for value in values.values()))
    below = [used(value, f"{path}.{key}" if path else str(key)) for key, value in values.items()]
    return {f"{path}.{key}" if path else str(key) for key in values} | set().union(*below)


ROLES = (
    "actor_train",
    "actor_infer",
    "reference",
    "critic",
    "train_env_manager",
    "val_env_manager",
)


def test_the_examples_use_every_field_of_roll() -> None:
    keys = {key for example in EXAMPLES for key in used(compose(example).config)}
    of_any_role = {
        key.split(".", 1)[1] for key in keys if key.split(".")[0] in ROLES and "." in key
    }
    missing = []
    for path, names in SECTIONS.items():
        role, _, rest = path.partition(".")
        for name in names:
            inner = f"{rest}.{name}" if rest else name
            there = (
                inner in of_any_role
                if role in ROLES
                else f"{path.replace('custom_envs', 'custom_envs.*')}.{name}".lstrip(".") in keys
            )
            if not there:
                missing.append(f"{path}.{name}")
    assert missing == []
