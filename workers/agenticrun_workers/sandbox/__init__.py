"""Runs untrusted Python code in a process that the kernel limits to computing."""

from agenticrun_workers.sandbox.python import (
    Limits,
    Outcome,
    SandboxMode,
    SandboxUnavailable,
    describe,
    run_python,
)

__all__ = ["Limits", "Outcome", "SandboxMode", "SandboxUnavailable", "describe", "run_python"]
