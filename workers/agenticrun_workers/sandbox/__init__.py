"""Runs Python code that nobody vouches for, in a process that the kernel keeps from everything but computing."""

from agenticrun_workers.sandbox.python import (
    Limits,
    Outcome,
    SandboxMode,
    SandboxUnavailable,
    describe,
    run_python,
)

__all__ = ["Limits", "Outcome", "SandboxMode", "SandboxUnavailable", "describe", "run_python"]
