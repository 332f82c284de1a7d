"""Connects kopf's start-up and clean-up to the operator's `runtime`.

kopf watches nothing here: its watches end the whole operator when KubeRay's CRD is deleted, do not
notice a CRD that appears, and do not report what was deleted in a gap (docs/decisions/0002).
`watches.py` does that instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import kopf

from agenticrun_operator.runtime import running_operator
from agenticrun_operator.settings import Settings

KOPF_RETRY_SECONDS = 10.0
"""Delay until kopf repeats a request of its own that failed."""


def register(registry: kopf.OperatorRegistry, settings: Settings) -> None:
    """Add the operator's handlers to kopf's registry."""
    running = AsyncExitStack()

    @kopf.on.login(registry=registry)
    def login_in_pod(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs)

    @kopf.on.login(registry=registry)
    def login_outside(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        await running.enter_async_context(running_operator(settings))

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await running.aclose()


class Endless:
    """An infinite sequence of one delay. Each iteration starts over."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def __iter__(self) -> Iterator[float]:
        return itertools.repeat(self._seconds)


def configure(settings: kopf.OperatorSettings) -> None:
    """Change kopf's settings: it posts no events and watches neither namespaces nor CRDs.

    It reads the list of resources at the start, although nothing here needs it. Unless it keeps
    trying, an apiserver that is down for a minute then would end the operator.
    """
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.error_backoffs = Endless(KOPF_RETRY_SECONDS)
