"""Starts the actors of a run and calls their methods, typed, on Ray or inside one process."""

from agenticrun_workers.launch.handle import (
    ActorDied,
    ActorHandle,
    ActorUnavailable,
    OtherActorDied,
    Result,
    killed_on_error,
)
from agenticrun_workers.launch.launcher import ActorOptions, Launcher
from agenticrun_workers.launch.node import Node, NodeMetrics, current_node
from agenticrun_workers.launch.packing import packed

__all__ = [
    "ActorDied",
    "ActorHandle",
    "ActorOptions",
    "ActorUnavailable",
    "Launcher",
    "Node",
    "NodeMetrics",
    "OtherActorDied",
    "Result",
    "current_node",
    "killed_on_error",
    "packed",
]
