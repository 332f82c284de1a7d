"""An engine that answers polls and computes nothing is given up; one that is slow, or held, is not.

In virtual time, on the actor that polls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from agenticrun_workers.inference import EngineError
from agenticrun_workers.inference.actor import MIN_PREFILL, EngineActor
from agenticrun_workers.inference.engine import STEP_SECONDS, EngineStats
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.node import shared_node
from virtual_clock import on_virtual_clock

HOUR = 3600.0
POLL = 5.0


@dataclass(frozen=True)
class Engine:
    """Computes, and has requests, as functions of the time in seconds. Its polls succeed."""

    computed: Callable[[float], int | None]
    running: Callable[[float], int] = lambda seconds: 1
    waiting: int = 0
    prefilling: int = 0
    held: Callable[[float], bool] = lambda seconds: False

    async def check_health(self) -> None:
        pass

    def stats(self) -> EngineStats:
        now = asyncio.get_running_loop().time()
        return EngineStats(
            policy_version=0,
            running=self.running(now),
            waiting=self.waiting,
            generated_tokens=0,
            prompt_tokens=0,
            busy_seconds=0.0,
            computed_tokens=self.computed(now),
            prefilling=self.prefilling,
            held=self.held(now),
        )


def given_up(engine: Engine, limit: float = 10 * HOUR) -> tuple[float, str] | None:
    """Return when the actor gives the engine up, and the message; None: not within `limit`."""

    async def watch() -> tuple[float, str] | None:
        shared_node.set(Node("here", "127.0.0.1"))
        actor = EngineActor("engine-0")
        actor._engine = engine  # type: ignore[assignment]
        watcher = asyncio.create_task(actor._watch())
        await asyncio.wait({watcher}, timeout=limit)
        if not watcher.done():
            watcher.cancel()
            return None
        with pytest.raises(EngineError) as caught:
            await actor.health()
        return asyncio.get_running_loop().time(), str(caught.value)

    return on_virtual_clock(watch())


def test_an_engine_that_never_answers_is_given_up_after_the_longest_step() -> None:
    found = given_up(Engine(lambda seconds: 0, waiting=7))
    assert found is not None
    seconds, message = found
    assert seconds == STEP_SECONDS
    assert "has computed 0 tokens in 300 s (requests in flight: 8): it is stuck" in message
    assert "raise spec.roles.inference.cpus or gpus" in message


def test_an_engine_that_stops_in_the_middle_is_given_up_as_long_after_it() -> None:
    found = given_up(Engine(lambda seconds: int(100 * min(seconds, HOUR))))
    assert found is not None
    assert HOUR + STEP_SECONDS - POLL <= found[0] <= HOUR + STEP_SECONDS + POLL


def test_one_token_per_minute_is_too_slow_and_one_per_second_is_not() -> None:
    found = given_up(Engine(lambda seconds: int(seconds / 60)))
    assert found is not None
    assert found[0] == STEP_SECONDS
    assert "has computed 5 tokens in 300 s (requests in flight: 1)" in found[1]
    assert given_up(Engine(lambda seconds: int(seconds))) is None


def test_requests_that_wait_behind_a_full_engine_do_not_count_against_it() -> None:
    engine = Engine(lambda seconds: int(seconds), running=lambda seconds: 2, waiting=10_000)
    assert given_up(engine) is None


def test_an_engine_that_is_paused_or_waits_for_weights_is_not_given_up() -> None:
    assert given_up(Engine(lambda seconds: 0, held=lambda seconds: True)) is None
    found = given_up(Engine(lambda seconds: 0, held=lambda seconds: seconds <= HOUR))
    assert found is not None
    assert found[0] == HOUR + STEP_SECONDS, "from when it should compute again"


def test_an_engine_without_requests_is_not_given_up_and_its_idle_time_does_not_count() -> None:
    assert given_up(Engine(lambda seconds: 0, running=lambda seconds: 0)) is None
    found = given_up(Engine(lambda seconds: 0, running=lambda seconds: int(seconds > HOUR)))
    assert found is not None
    assert found[0] == HOUR + STEP_SECONDS


def test_a_long_prompt_on_a_slow_cpu_has_the_time_that_it_needs_and_no_more() -> None:
    tokens, seconds = 8192, 8192 / MIN_PREFILL
    prompt = Engine(lambda now: tokens * int(now / seconds), prefilling=tokens)
    assert given_up(prompt) is None
    found = given_up(Engine(lambda seconds: 0, prefilling=tokens))
    assert found is not None
    assert STEP_SECONDS + seconds <= found[0] <= STEP_SECONDS + seconds + POLL


def test_an_engine_whose_tokens_are_unknown_is_not_given_up() -> None:
    assert given_up(Engine(lambda seconds: None)) is None
