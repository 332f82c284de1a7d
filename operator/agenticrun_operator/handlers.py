"""Connects kopf's watch events, start-up and clean-up to the `OperatorRuntime`.

Uses only low-level `on.event` handlers: they write nothing to the objects (no annotations, no
finalizers) and see each event once.
"""

from __future__ import annotations

from typing import Any

import kopf

from agenticrun_api.names import GROUP, LABEL_RUN, PLURAL, VERSION
from agenticrun_operator.runtime import MissingApi, OperatorRuntime

WATCH_SECONDS = 300
"""Lifetime of a watch. A watch that hangs without an error is replaced after this time."""


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
        try:
            await runtime.start()
        except MissingApi as error:
            raise kopf.PermanentError(str(error)) from error

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

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def run_event(name: str, namespace: str | None, meta: kopf.Meta, **_: Any) -> None:
        runtime.run_changed((str(namespace), name), str(meta["resourceVersion"]))

    @kopf.on.event(
        "ray.io", "v1", "rayclusters", labels={LABEL_RUN: kopf.PRESENT}, registry=registry
    )
    async def cluster_event(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        runtime.child_changed((str(namespace), labels[LABEL_RUN]))

    @kopf.on.event("v1", "pods", labels={LABEL_RUN: kopf.PRESENT}, registry=registry)
    async def pod_event(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        runtime.child_changed((str(namespace), labels[LABEL_RUN]))


def configure(settings: kopf.OperatorSettings) -> None:
    """Change kopf's settings.

    kopf posts no events, does not scan for namespaces and CRDs, renews its watches regularly and
    watches only the pods and RayClusters of runs.
    """
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + 10
    settings.watching.label_selectors["pods"] = LABEL_RUN
    settings.watching.label_selectors["ray.io", "rayclusters"] = LABEL_RUN
