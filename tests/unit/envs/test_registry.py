"""Finding environments and agents by name, entry point or module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agenticrun_workers import plugins
from agenticrun_workers.envs import (
    EnvConfigError,
    EnvImportError,
    EnvNotFound,
    FrozenLake,
    make_env,
    register_env,
)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("user_envs", None)


def test_a_registered_name_builds_its_class() -> None:
    assert isinstance(make_env("frozen_lake", {"size": 5}), FrozenLake)


def test_a_decorated_class_can_be_made_by_its_name() -> None:
    @register_env("tiny-for-this-test")
    class Tiny(FrozenLake):
        pass

    assert isinstance(make_env("tiny-for-this-test", {}), Tiny)


def test_module_and_class_address_any_class(user_module: Path) -> None:
    (user_module / "user_envs.py").write_text(
        "class Maze:\n    def __init__(self, deep_size=1):\n        self.deep_size = deep_size\n"
    )
    assert make_env("user_envs:Maze", {"deepSize": 7}).deep_size == 7  # type: ignore[attr-defined]


def test_an_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(
        "lake-by-entry-point", "agenticrun_workers.envs.frozen_lake:FrozenLake", "agenticrun.envs"
    )
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [point] if group == "agenticrun.envs" else []
    )
    assert isinstance(make_env("lake-by-entry-point", {}), FrozenLake)


def test_a_failing_import_carries_the_original_error(user_module: Path) -> None:
    (user_module / "user_envs.py").write_text("import no_such_thing\n")
    with pytest.raises(
        EnvImportError,
        match="importing user_envs failed: ModuleNotFoundError: No module named 'no_such_thing'",
    ):
        make_env("user_envs:Maze", {})


def test_a_module_that_exits_when_it_is_imported_is_an_import_error(user_module: Path) -> None:
    (user_module / "user_envs.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(EnvImportError, match="importing user_envs failed: SystemExit: 0"):
        make_env("user_envs:Maze", {})


def test_a_missing_class_is_an_import_error(user_module: Path) -> None:
    (user_module / "user_envs.py").write_text("")
    with pytest.raises(EnvImportError, match="user_envs has no Maze"):
        make_env("user_envs:Maze", {})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(EnvNotFound, match=r"no env is called 'frozen' .*frozen_lake.*module:Class"):
        make_env("frozen", {})


def test_a_config_key_that_the_class_does_not_take_is_named(user_module: Path) -> None:
    (user_module / "user_envs.py").write_text(
        "class Maze:\n    def __init__(self, *, depth=1): ...\n"
    )
    with pytest.raises(EnvConfigError, match="has no config key 'width' \\(known: depth\\)"):
        make_env("user_envs:Maze", {"width": 3})
