"""The operator's key: created once, shared by replicas, never replaced."""

from __future__ import annotations

import asyncio
import copy
from base64 import b64encode
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from agenticrun_operator import operator_key as module
from agenticrun_operator.errors import AlreadyExists, KubeUnavailable
from agenticrun_operator.operator_key import UnusableKey, read_or_create, wait_for_key
from agenticrun_operator.resources import OperatorKey
from agenticrun_operator.settings import Settings

PLACE = ("system", "agenticrun-operator-key")
FORMER = "the key that an earlier chart has made"


class Secrets:
    """The Secrets of an apiserver."""

    def __init__(self, *, slow: bool = False) -> None:
        self.stored: dict[tuple[str, str], dict[str, Any]] = {}
        self.creations = 0
        self.slow = slow
        self.failures = 0

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        assert kind == "Secret"
        if self.failures:
            self.failures -= 1
            raise KubeUnavailable("down")
        found = copy.deepcopy(self.stored.get((namespace, name)))
        if self.slow:
            await asyncio.sleep(0)  # another replica reads before this one creates
        return found

    async def create(self, manifest: dict[str, Any]) -> None:
        place = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if place in self.stored:
            raise AlreadyExists(place[1])
        self.creations += 1
        self.stored[place] = copy.deepcopy(manifest)


def hold(key: str | None) -> Secrets:
    """Return an apiserver that holds a Secret with this key."""
    secrets = Secrets()
    data = {} if key is None else {"key": b64encode(key.encode()).decode()}
    secrets.stored[PLACE] = {"kind": "Secret", "data": data}
    return secrets


async def test_the_first_start_creates_a_key_and_every_other_start_reads_it() -> None:
    secrets = Secrets()
    first = await read_or_create(secrets, *PLACE)
    again = await read_or_create(secrets, *PLACE)
    assert (first.id, secrets.creations) == (again.id, 1)
    assert first.id != (await read_or_create(Secrets(), *PLACE)).id


async def test_two_replicas_that_start_together_have_one_key() -> None:
    secrets = Secrets(slow=True)
    one, two = await asyncio.gather(
        read_or_create(secrets, *PLACE), read_or_create(secrets, *PLACE)
    )
    assert (one.id, secrets.creations) == (two.id, 1)


async def test_the_key_of_an_earlier_chart_is_kept() -> None:
    secrets = hold(FORMER)
    assert (await read_or_create(secrets, *PLACE)).id == OperatorKey(FORMER).id
    assert secrets.creations == 0


@pytest.mark.parametrize("key", [None, "", "short"])
async def test_a_damaged_secret_is_named_and_not_replaced(key: str | None) -> None:
    secrets = hold(key)
    before = copy.deepcopy(secrets.stored)
    with pytest.raises(UnusableKey, match="system/agenticrun-operator-key has no usable key"):
        await read_or_create(secrets, *PLACE)
    assert secrets.stored == before


async def test_the_start_waits_for_an_apiserver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    secrets = hold(FORMER)
    secrets.failures = 3
    assert (await wait_for_key(secrets, *PLACE)).id == OperatorKey(FORMER).id


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"operator_key": SecretStr(FORMER), "operator_key_secret": "a/b"},
        {"operator_key_secret": "b"},
        {"operator_key": SecretStr("short")},
    ],
)
def test_settings_name_exactly_one_key(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(worker_image="worker:1", **values)
