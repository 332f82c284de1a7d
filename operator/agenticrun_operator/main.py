"""Entry point of the operator process (`python -m agenticrun_operator`)."""

from __future__ import annotations

import asyncio

import kopf

from agenticrun_operator import handlers, logs
from agenticrun_operator.settings import Settings


def main() -> None:
    """Run the operator until SIGTERM or SIGINT."""
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(serve(settings))


async def serve(settings: Settings) -> None:
    """Reconcile until kopf stops."""
    registry = kopf.OperatorRegistry()
    kopf_settings = kopf.OperatorSettings()
    handlers.configure(kopf_settings)
    handlers.register(registry, settings)
    await kopf.operator(
        registry=registry,
        settings=kopf_settings,
        standalone=True,
        clusterwide=True,
    )
