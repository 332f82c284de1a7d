"""`check_env`: does an environment keep the promises of the protocol? For users' own tests, and for `agenticrun check-env`.

from agenticrun_workers.envs.checking import check_env

def test_maze():
    check_env("maze:Maze", {"size": 5}).assert_ok()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agenticrun_workers.envs.checking.checklist import CHECKS, FIRST, Check
from agenticrun_workers.envs.checking.played_episodes import Subject
from agenticrun_workers.envs.checking.report import Finding, Report, Verdict, failed, not_checked
from agenticrun_workers.envs.env import Env
from agenticrun_workers.envs.faults import EnvFault
from agenticrun_workers.envs.registry import EnvConfigError, make_env

__all__ = ["Finding", "Report", "Verdict", "check_env"]


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
        seeds: episodes to play: how many, or their seeds.
        items: what episodes are about, for environments with `set_item`.
        turns: turns of an episode that are played at most.
        timeout: seconds that one call may take.

    Raises:
        PluginError: it cannot be found or refuses its config.
    """
    config = dict(config or {})
    named = env if isinstance(env, str) else _name_of(env)

    def make() -> Env:
        return make_env(env, config) if isinstance(env, str) else env(**config)

    if getattr(make(), "is_service", False):
        raise EnvConfigError(
            f"{named or env} is an EnvironmentService, whose actions only its agent knows: play it with agenticrun debug"
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
    """`module:Class` of a class that another process can import; else nothing."""
    module, name = getattr(factory, "__module__", "__main__"), getattr(factory, "__qualname__", "<")
    return "" if module == "__main__" or "<" in name else f"{module}:{name}"
