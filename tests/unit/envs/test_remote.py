"""Packages, addresses, headers and patience of environments of others."""

from __future__ import annotations

import pytest

from agenticrun_workers.envs import make_env
from agenticrun_workers.envs.env import EnvConfigError
from agenticrun_workers.envs.remote import (
    Patience,
    checked_package,
    checked_url,
    uses_proxy,
    with_secrets,
)


def test_a_package_that_is_missing_is_named_with_the_place_to_write_it() -> None:
    with pytest.raises(ValueError, match=r"no-such is needed: .* spec\.code\.pip\.requirements"):
        checked_package("no_such_package", "no-such")
    for type in ("textarena", "reasoning_gym"):
        with pytest.raises(EnvConfigError, match=r"the package \S+ is needed|has no config key"):
            make_env(type, {"id": "x"})


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://localhost:8000", False),
        ("http://127.0.0.1:8000/a", False),
        ("http://[::1]:8000", False),
        ("https://maze.example.com", True),
    ],
)
def test_servers_of_this_machine_are_reached_without_a_proxy(url: str, proxy: bool) -> None:
    assert uses_proxy(checked_url(f"{url}/")) is proxy


def test_headers_take_values_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAZE_TOKEN", "secret")
    assert with_secrets({"A": "Bearer ${MAZE_TOKEN}", "B": "$5"}) == {
        "A": "Bearer secret",
        "B": "$5",
    }


def test_pauses_grow_until_patience_is_over() -> None:
    patience = Patience(10.0)
    pauses = [patience.pause() for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0
    assert not patience.over
    assert Patience(0.0).over
    assert Patience(0.0).left > 0
