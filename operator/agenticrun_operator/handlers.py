"""Connects kopf's start-up, clean-up and probes to the `OperatorRuntime`.

kopf watches nothing here: a watch of kopf that gets 403 or 404, because a namespace or a CRD is
missing, ends the whole operator. `watches.py` does that instead.
"""

from __future__ import annotations

from typing import Any

import kopf

from agenticrun_operator.runtime import OperatorRuntime


def register(registry: kopf.OperatorRegistry, runtime: OperatorRuntime) -> None:
    """Add the operator's handlers to kopf's registry."""

    @kopf.on.login(registry=registry)
    def login_in_pod(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs)

    @kopf.on.login(registry=registry)
    def login_outside(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        await runtime.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await runtime.stop()

    @kopf.on.probe(registry=registry, id="workers")
    async def workers(**_: Any) -> int:
        runtime.check_alive()
        return runtime.reconcile_workers.alive

    @kopf.on.probe(registry=registry, id="secondsSinceEvent")
    async def last_event(**_: Any) -> float:
        return round(runtime.seconds_since_event, 1)


def configure(settings: kopf.OperatorSettings) -> None:
    """Change kopf's settings: it posts no events and watches neither namespaces nor CRDs."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
