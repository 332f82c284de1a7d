"""Entry point of the operator process (`python -m agenticrun_operator`).

kopf logs in, and starts and stops the operator. It watches nothing here: its watches end the whole
operator when KubeRay's CRD is deleted, do not notice a CRD that appears, and do not report what was
deleted in a gap (docs/decisions/0002). `watches.py` does that instead.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import Any

import kopf

from agenticrun_operator import logs
from agenticrun_operator.runtime import running_operator
from agenticrun_operator.settings import Settings

KOPF_RETRY_SECONDS = 10.0
"""Delay until kopf repeats a request of its own that failed."""


def main() -> None:
    """Run the operator until SIGTERM or SIGINT."""
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(serve(settings))


async def serve(settings: Settings) -> None:
    """Reconcile until kopf stops."""
    registry, running = kopf.OperatorRegistry(), AsyncExitStack()

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

    kopf_settings = kopf.OperatorSettings()
    kopf_settings.posting.enabled = False
    kopf_settings.scanning.disabled = True
    # kopf reads the list of resources at the start, although nothing here needs it. Unless it keeps
    # trying, an apiserver that is down for a minute then would end the operator.
    kopf_settings.networking.error_backoffs = itertools.repeat(KOPF_RETRY_SECONDS)
    await kopf.operator(
        registry=registry,
        settings=kopf_settings,
        standalone=True,
        clusterwide=True,
    )
