"""kopf starts and stops the operator; it must not end it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import kopf
import pytest
from pydantic import SecretStr

from agenticrun_operator.main import serve
from agenticrun_operator.settings import Settings


async def test_kopf_never_gives_up_a_request_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    async def operator(**arguments: Any) -> None:
        started.update(arguments)

    monkeypatch.setattr(kopf, "operator", operator)
    await serve(Settings(worker_image="worker:1", operator_key=SecretStr("k" * 32)))
    backoffs = started["settings"].networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    for _ in ("the first request", "the second request"):
        assert sum(islice(backoffs, 10_000)) > 24 * 3600
