"""Episodes that `check_env` plays and records, so that two can be compared.

Another process plays them too:
python -m agenticrun_workers.envs.checking.played_episodes < subject.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agenticrun_workers.envs.calls import EnvCalls
from agenticrun_workers.envs.env import Env, EnvFault, StepResult, make_env
from agenticrun_workers.types import StopReason, Stream

Event = list[Any]
"""The result of one call as JSON."""

ANSWERS = ("1", "a", "yes", "Up", "look", "42")
"""Answers for environments that do not list their valid actions."""


@dataclass(frozen=True)
class Subject:
    """The environment to check.

    Args:
        make: builds a new one.
        type, config: the same for another process; `type` is empty if it has no name there.
        seeds: episodes to play.
        items: items to play in turn, for environments with `set_item`.
        turns: maximum number of turns in an episode.
        timeout: seconds for one call.
    """

    make: Callable[[], Env]
    type: str
    config: Mapping[str, Any]
    seeds: Sequence[int]
    items: Sequence[Mapping[str, Any]] = ()
    turns: int = 20
    timeout: float = 10.0
    calls: EnvCalls = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", EnvCalls(self.timeout))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Env]:
        """Build an environment, and close it after the `with` block. Raises `EnvFault`."""
        env = self.make()
        try:
            yield env
        finally:
            await self.calls.close(env)

    def item(self, seed: int) -> Mapping[str, Any] | None:
        return self.items[seed % len(self.items)] if self.items else None


async def actions_of(subject: Subject, env: Env) -> list[str]:
    """Return the answers to choose from now."""
    listed = await subject.calls.valid_actions(env) if hasattr(env, "valid_actions") else []
    return listed or list(ANSWERS)


async def events(
    subject: Subject, env: Env, seed: int, split: Stream = Stream.TRAIN
) -> AsyncIterator[Event]:
    """Play an episode with random valid answers and yield each call's result. Raises `EnvFault`."""
    draw = np.random.default_rng(seed)
    start = await subject.calls.reset(env, seed, split, subject.item(seed))
    yield ["reset", start.observation, start.instruction]
    for _ in range(subject.turns):
        actions = await actions_of(subject, env)
        action = actions[int(draw.integers(len(actions)))]
        result = await subject.calls.step(env, action)
        yield [
            action,
            result.observation,
            result.reward,
            result.terminated,
            result.truncated,
            _numbers(result),
        ]
        if result.terminated or result.truncated:
            return


async def episode(
    subject: Subject, env: Env, seed: int, split: Stream = Stream.TRAIN
) -> list[Event]:
    """Play a whole episode. Raises `EnvFault`."""
    return [event async for event in events(subject, env, seed, split)]


async def episodes(subject: Subject, split: Stream = Stream.TRAIN) -> list[list[Event]]:
    """Play one episode for each seed, each in a new environment. Raises `EnvFault`."""
    played = []
    for seed in subject.seeds:
        async with subject.opened() as env:
            played.append(await episode(subject, env, seed, split))
    return played


def episodes_of_another_process(subject: Subject) -> list[list[Event]]:
    """Play the same episodes in a process with other string hashes.

    Raises `EnvFault`, also when that process dies or hangs.
    """
    asked = {
        "path": sys.path,
        "type": subject.type,
        "config": dict(subject.config),
        "seeds": list(subject.seeds),
        "items": list(map(dict, subject.items)),
        "turns": subject.turns,
        "timeout": subject.timeout,
    }
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "4711",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    limit = 60.0 + subject.timeout * (2 + len(subject.seeds))
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "agenticrun_workers.envs.checking.played_episodes"],
            input=json.dumps(asked, default=str),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvFault(
            StopReason.TIMEOUT,
            f"a process that plays {len(subject.seeds)} episodes hangs for {limit:.0f} s",
        ) from None
    answer = ended.stdout.rpartition("\n@")[2]
    if ended.returncode != 0 or not answer:
        how = (
            f"killed by signal {-ended.returncode}"
            if ended.returncode < 0
            else f"exit code {ended.returncode}"
        )
        raise EnvFault(
            StopReason.ENV_ERROR,
            f"a process that plays {len(subject.seeds)} episodes ends itself: {how}",
        )
    played = json.loads(answer)
    if isinstance(played, str):
        raise EnvFault(StopReason.ENV_ERROR, played)
    found: list[list[Event]] = played
    return found


def _numbers(result: StepResult) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(result.metrics.items())}


async def _played_for_others() -> list[list[Event]] | str:
    asked = json.load(sys.stdin)
    sys.path[:] = asked.pop("path")
    config = asked["config"]
    try:
        return await episodes(Subject(lambda: make_env(asked["type"], config), **asked))
    except EnvFault as fault:
        return str(fault)


if __name__ == "__main__":
    import asyncio

    print(
        "\n@" + json.dumps(asyncio.run(_played_for_others())), flush=True
    )  # after whatever the environment printed
    os._exit(0)  # threads that hang are not waited for
