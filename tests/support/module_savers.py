"""Modules of a checkpoint that write at once, where ranks write in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from agenticrun_workers.driver.checkpoints import (
    Checkpoint,
    CheckpointStore,
    DriverState,
    IsDurable,
    SaveModule,
)


def at_once(write: Callable[[str], Awaitable[None]]) -> SaveModule:
    """A module whose files are durable when `write` returns."""

    async def is_durable() -> bool:
        return True

    async def save(folder: str) -> IsDurable:
        await write(folder)
        return is_durable

    return save


async def save_whole(
    store: CheckpointStore,
    state: DriverState,
    modules: Mapping[str, Callable[[str], Awaitable[None]]],
) -> Checkpoint:
    """Save and publish."""
    return await (
        await store.save(state, {name: at_once(write) for name, write in modules.items()})
    )
