"""Run all checks on an environment and report what they find.

from agenticrun_workers.envs.checking import check_env

def test_maze():
    check_env("maze:Maze", {"size": 5}).assert_ok()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agenticrun_workers.envs.checking.checklist import (
    CHECKS,
    FIRST,
    Check,
)
from agenticrun_workers.envs.checking.played_episodes import Subject
from agenticrun_workers.envs.env import Env, EnvConfigError, EnvFault, make_env
from agenticrun_workers.findings import Finding, Report, Verdict, failed, not_checked


def check_env(
    env: str | Callable[..., Env],
    config: Mapping[str, Any] | None = None,
    *,
    seeds: int | Sequence[int] = 20,
    items: Sequence[Mapping[str, Any]] = (),
    turns: int = 20,
    timeout: float = 10.0,
) -> Report:
    """Play an environment in many ways.

    Args:
        env: a registered name, `module:Class`, or the class itself.
        config: its config, as in YAML for names, or keyword arguments of the class.
        seeds: number of episodes to play, or their seeds.
        items: items to play, for environments with `set_item`.
        turns: maximum number of turns in an episode.
        timeout: seconds that one call may take.

    Raises:
        PluginError: the environment cannot be found or rejects its config.
    """
    config = dict(config or {})
    named = env if isinstance(env, str) else _name_of(env)

    def make() -> Env:
        return make_env(env, config) if isinstance(env, str) else env(**config)

    if getattr(make(), "is_service", False):
        raise EnvConfigError(
            f"{named or env} is an EnvironmentService and only its agent knows the actions: "
            "play it with agenticrun debug"
        )
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    subject = Subject(make, named, config, chosen, items, turns, timeout)
    findings: dict[str, Finding] = {}
    for name, check in {**FIRST, **CHECKS}.items():
        blocked = any(
            findings[first].verdict is Verdict.FAILED for first in FIRST if first in findings
        )
        findings[name] = (
            not_checked("after the failure above")
            if blocked
            else asyncio.run(_checked(check, subject))
        )
    return Report(findings)


async def _checked(check: Check, subject: Subject) -> Finding:
    try:
        return await check(subject)
    except EnvFault as fault:
        return failed(
            str(fault), "it must not raise, hang, or return anything but text and finite numbers"
        )


def _name_of(factory: Callable[..., Env]) -> str:
    """Return `module:Class` of a class that another process can import, or an empty string."""
    module, name = getattr(factory, "__module__", "__main__"), getattr(factory, "__qualname__", "<")
    return "" if module == "__main__" or "<" in name else f"{module}:{name}"
