"""Calls of environments: every shape works, and an error costs only its own episode."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs import EnvCalls, EnvFault, EnvironmentService, StepResult
from agenticrun_workers.envs import calls as env_calls
from agenticrun_workers.envs.calls import (
    MAX_BLOCKING_CALLS,
    MAX_MESSAGE,
    MAX_TEXT,
    Abandoned,
    hanging,
)
from agenticrun_workers.envs.service import ServiceCalls
from agenticrun_workers.types import StopReason, Stream
from waiting import eventually, eventually_in_loop

CLOSED = inspect.CORO_CLOSED
INFINITY, NOT_A_NUMBER = float("inf"), float("nan")
GOOD = StepResult("seen", 0.5, False)


@dataclass
class Does:
    """A sync environment that does what the test says."""

    now: Callable[[], Any]
    first: Callable[[], Any] = lambda: "start"
    blocking: bool = True
    instruction: str = ""

    def reset(self, seed: int, split: Stream) -> Any:
        return self.first()

    def step(self, action: str) -> Any:
        return self.now()

    def valid_actions(self) -> Any:
        return self.now()


class DoesAsync(Does):
    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return self.now()


def step(env: Any, timeout: float | None = 30.0) -> StepResult:
    return asyncio.run(EnvCalls(timeout).step(env, "go"))


def fault_of(env: Any, timeout: float | None = 30.0) -> EnvFault:
    with pytest.raises(EnvFault) as caught:
        step(env, timeout)
    return caught.value


def returns(value: Any) -> Does:
    return Does(lambda: value, blocking=False)


def raises(error: BaseException) -> Callable[[], Any]:
    def do() -> Any:
        raise error

    return do


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ANY_ERROR = [
    (ValueError("bad cell"), "ValueError: bad cell (test_calls.py:"),
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit(), "GeneratorExit"),
    (BaseException("base"), "BaseException: base"),
    (asyncio.CancelledError("mine"), "CancelledError: mine"),
    (TimeoutError("the emulator is late"), "TimeoutError: the emulator is late"),
    (Unspeakable(), "Unspeakable: (it has no text)"),
    (ValueError("two\nlines"), "ValueError: two lines"),
    (ValueError("half a pair: \ud83d"), "ValueError: half a pair: \\ud83d"),
]


@pytest.mark.parametrize(
    "env",
    [Does, DoesAsync, lambda now: Does(now, blocking=False)],
    ids=["thread", "coroutine", "direct"],
)
@pytest.mark.parametrize(("error", "message"), ANY_ERROR, ids=lambda value: type(value).__name__)
def test_whatever_is_raised_is_a_fault_that_names_it(
    env: Any, error: BaseException, message: str
) -> None:
    fault = fault_of(env(raises(error)))
    assert fault.reason is StopReason.ENV_ERROR
    assert str(fault).startswith(message)


@pytest.mark.parametrize("env", [Does, lambda now: Does(now, blocking=False)])
def test_stop_iteration_that_futures_refuse_is_a_fault(env: Any) -> None:
    assert "StopIteration: over" in str(fault_of(env(raises(StopIteration("over")))))


def test_a_fault_names_the_line_of_the_environment_and_not_that_of_a_library() -> None:
    line = library_fails.__code__.co_firstlineno + 1
    assert f"(test_calls.py:{line})" in str(fault_of(Does(library_fails)))


def library_fails() -> Any:
    return np.zeros(3).reshape(2, 2)


def test_a_message_has_a_bound() -> None:
    assert len(str(fault_of(Does(raises(ValueError("x" * 10_000_000)))))) < MAX_MESSAGE + 100


HUGE = "x" * (MAX_TEXT + 1)
NO_STEPS = [
    (None, "step returned NoneType, neither a StepResult nor a tuple of five"),
    (("seen", 1.0), "step returned tuple"),
    (StepResult(7, 0.0, False), "an observation of int, not text"),  # type: ignore[arg-type]
    (StepResult(b"seen", 0.0, False), "an observation of bytes, not text"),  # type: ignore[arg-type]
    (StepResult(HUGE, 0.0, False), "an observation of 1,048,577 characters; 1,048,576 are allowed"),
    (StepResult("\ud800", 0.0, False), "not valid unicode"),
    (StepResult("seen", NOT_A_NUMBER, False), "step returned the reward nan"),
    (StepResult("seen", -INFINITY, False), "step returned the reward -inf"),
    (StepResult("seen", 1e300, False), "the reward 1e+300, which is too large (at most 3.4e38)"),
    (StepResult("seen", 10**400, False), "the reward of type int, which is too large (at most"),
    (StepResult("seen", bytearray(b"1"), False), "the reward of type bytearray, which is not a"),  # type: ignore[arg-type]
    (StepResult("seen", np.array("1"), False), "the reward of type ndarray, which is not a"),  # type: ignore[arg-type]
    (StepResult("seen", "1.0", False), "the reward '1.0', which is not a number"),  # type: ignore[arg-type]
    (StepResult("seen", None, False), "the reward of type NoneType"),  # type: ignore[arg-type]
    (StepResult("seen", np.zeros(2), False), "the reward of type ndarray"),  # type: ignore[arg-type]
    (StepResult("seen", 1j, False), "the reward of type complex"),  # type: ignore[arg-type]
    (StepResult("seen", 0.0, None), "terminated of NoneType, not True or False"),  # type: ignore[arg-type]
    (StepResult("seen", 0.0, False, np.zeros(2)), "truncated of ndarray"),  # type: ignore[arg-type]
    (StepResult("seen", 0.0, False, metrics={"speed": INFINITY}), "the metric speed = inf"),
    (StepResult("seen", 0.0, False, metrics={"speed": NOT_A_NUMBER}), "the metric speed = nan"),
    (
        StepResult("seen", 0.0, False, metrics={"speed": "fast"}),  # type: ignore[dict-item]
        "the metric speed = 'fast', which is not a number",
    ),
    (StepResult("seen", 0.0, False, metrics={"score": 1.0}), "the metric 'score' has a reserved"),
    (StepResult("seen", 0.0, False, metrics={"stop/timeout": 1.0}), "response_length,"),
    (StepResult("seen", 0.0, False, metrics=[1.0]), "metrics that are not a mapping"),  # type: ignore[arg-type]
    (StepResult("seen", 0.0, False, metrics={1: 1.0}), "metrics that are not a mapping from names"),  # type: ignore[dict-item]
    (
        StepResult("seen", 0.0, False, modes={"speed": "median"}),  # type: ignore[dict-item]
        "the mode 'median' of the metric speed; known are first, last,",
    ),
    (StepResult("seen", 0.0, False, info=None), "an info of NoneType, not a mapping"),  # type: ignore[arg-type]
    (("seen", 0.0, False, False, None), "an info of NoneType, not a mapping"),
    (("seen", NOT_A_NUMBER, False, False, {}), "step returned the reward nan"),
    (
        ("seen", 0.0, False, False, {"metrics": {"a": 1.0}, "metrics_agg_mode": {"a": "total"}}),
        "the mode 'total' of the metric a",
    ),
    (("seen", 0.0, False, False, {"metrics": 3}), "metrics that are not a mapping"),
]


@pytest.mark.parametrize(("answer", "message"), NO_STEPS, ids=[message for _, message in NO_STEPS])
def test_what_is_no_step_is_a_fault_that_says_why(answer: object, message: str) -> None:
    fault = fault_of(returns(answer))
    assert fault.reason is StopReason.ENV_ERROR
    assert message in str(fault)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "reset returned NoneType, not text"),
        (("start", None), "reset returned an info of NoneType"),
        (("start", {}, 3), "reset returned tuple, not text"),
        (HUGE, "reset returned 1,048,577 characters"),
        (("start", {"env_instruction": 3}), "the instruction is int, not text"),
    ],
)
def test_what_is_no_beginning_is_a_fault(answer: object, message: str) -> None:
    with pytest.raises(EnvFault, match=message):
        asyncio.run(EnvCalls().reset(Does(lambda: GOOD, lambda: answer), 0, Stream.TRAIN))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "did not return a list of strings"),
        ("go", "did not return a list of strings"),
        ([1], "did not return a list of strings"),
    ],
)
def test_valid_actions_are_texts(answer: object, message: str) -> None:
    with pytest.raises(EnvFault, match=message):
        asyncio.run(EnvCalls().valid_actions(returns(answer)))
    assert asyncio.run(EnvCalls().valid_actions(returns(("Left", "Right")))) == ["Left", "Right"]


@given(
    reward=st.one_of(
        st.floats(-1e30, 1e30),
        st.integers(-(2**70), 2**70),
        st.booleans(),
        st.floats(-1, 1, width=32).map(np.float32),
    ),
    ended=st.tuples(st.booleans(), st.booleans()),
    metrics=st.dictionaries(st.text(), st.floats(-1e30, 1e30), max_size=3),
    text=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_a_tuple_means_the_same_as_a_step_result(
    reward: Any, ended: tuple[bool, bool], metrics: dict[str, float], text: str
) -> None:
    modes: dict[str, Any] = dict.fromkeys(metrics, "max")
    info = {"metrics": metrics, "metrics_agg_mode": modes}
    of_tuple = step(returns((text, reward, np.bool_(ended[0]), ended[1], info)))
    assert of_tuple == step(
        returns(StepResult(text, reward, ended[0], ended[1], metrics, modes, info))
    )
    assert (type(of_tuple.reward), of_tuple.reward) == (float, float(reward))
    assert (of_tuple.terminated, of_tuple.truncated, of_tuple.observation) == (*ended, text)


class SeedOnly:
    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        return f"{seed} {options}", {"env_instruction": "go"}


class ByName:
    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        return f"{seed} {options}", {}


class SeedAndSplit:
    instruction = "go"

    def reset(self, seed: int, stream: Stream) -> Any:
        return f"{seed} {stream}"


class SplitByDefault:
    async def reset(self, seed: int, split: Stream = Stream.TRAIN) -> Any:
        return f"{seed} {split}"


class AnyArguments:
    def reset(self, *arguments: Any) -> Any:
        return " ".join(map(str, arguments))


@pytest.mark.parametrize(
    ("env", "observation", "instruction"),
    [
        (SeedOnly(), "7 None", "go"),
        (ByName(), "7 None", ""),
        (SeedAndSplit(), "7 validation", "go"),
        (SplitByDefault(), "7 validation", ""),
        (AnyArguments(), "7 validation", ""),
    ],
)
def test_every_shape_of_reset_is_called_as_it_is_meant(
    env: Any, observation: str, instruction: str
) -> None:
    start = asyncio.run(EnvCalls().reset(env, 7, Stream.VALIDATION))
    assert (start.observation, start.instruction) == (observation, instruction)


def test_the_warm_up_plays_the_levels_of_training() -> None:
    class Service(EnvironmentService):
        async def reset(
            self, seed: int | None = None, options: Mapping[str, Any] | None = None
        ) -> Any:
            return f"{seed} {(options or {})['split']}"

        async def step(self, action: Any) -> Any: ...

    async def seen(stream: Stream) -> set[str]:
        env: Any = SeedAndSplit()  # only its reset is called
        start = await EnvCalls().reset(env, 7, stream)
        return {start.observation, await ServiceCalls().begin(Service(), 7, stream, None)}

    for stream, split in (("train", "train"), ("validation", "validation"), ("warmup", "train")):
        assert asyncio.run(seen(Stream(stream))) == {f"7 {split}"}


def test_a_sync_method_may_return_a_coroutine() -> None:
    async def later() -> StepResult:
        return GOOD

    assert step(Does(lambda: later())) == GOOD


SLOW_SECONDS = 10.0
"""Longer than machines stall."""


class Stubborn(Does):
    """Does not let itself be cancelled."""

    async def step(self, action: str) -> Any:
        for _ in range(2):
            try:
                await asyncio.sleep(SLOW_SECONDS)
            except asyncio.CancelledError:
                continue
        return GOOD


@pytest.mark.parametrize(
    "make",
    [
        lambda release: Does(release.wait),
        lambda _: Stubborn(lambda: GOOD),
        lambda _: Does(lambda: asyncio.sleep(SLOW_SECONDS)),
    ],
    ids=["thread", "stubborn", "coroutine"],
)
def test_what_takes_too_long_is_a_timeout_at_once(make: Callable[[threading.Event], Any]) -> None:
    release = threading.Event()
    env = make(release)

    async def timed() -> tuple[StopReason, float]:
        began = time.perf_counter()
        with pytest.raises(EnvFault, match=r"step took more than 0\.05 s") as caught:
            await EnvCalls(0.05).step(env, "go")
        return caught.value.reason, time.perf_counter() - began

    try:
        reason, seconds = asyncio.run(timed())
    finally:
        release.set()
    assert reason is StopReason.TIMEOUT
    assert seconds < SLOW_SECONDS


class Late(Does):
    """Returns a coroutine when it is too late for it."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.made: list[Coroutine[Any, Any, StepResult]] = []
        self.may_return = threading.Event()

    def step(self, action: str) -> Any:
        async def later() -> StepResult:
            return GOOD

        self.made.append(later())
        # Until the event, no exception gets into this thread: it waits in C code.
        with suppress(Abandoned):
            self.may_return.wait()
        return self.made[0]


@pytest.mark.parametrize("loop_ends", [False, True])
def test_a_coroutine_that_comes_too_late_is_closed(loop_ends: bool) -> None:
    env = Late()

    def closed() -> bool:
        return inspect.getcoroutinestate(env.made[0]) == CLOSED

    async def timed() -> None:
        with pytest.raises(EnvFault):
            await EnvCalls(0.05).step(env, "go")
        if not loop_ends:
            env.may_return.set()
            await eventually_in_loop(closed, 60.0, "the coroutine is closed")

    asyncio.run(timed())
    env.may_return.set()
    eventually(closed, 60.0, "the coroutine is closed")


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_at_any_moment_leaves_no_coroutine_without_an_await(turns: int) -> None:
    made: list[Coroutine[Any, Any, StepResult]] = []

    def now() -> Any:
        made.append(asyncio.sleep(SLOW_SECONDS, GOOD))
        return made[0]

    async def cancelled() -> None:
        stepping = asyncio.create_task(EnvCalls(None).step(Does(now, blocking=False), "go"))
        for _ in range(turns):
            await asyncio.sleep(0)
        stepping.cancel()
        await asyncio.wait({stepping})

    asyncio.run(cancelled())
    assert all(inspect.getcoroutinestate(each) == CLOSED for each in made)


TRACED = """
import asyncio, sys, threading
from agenticrun_workers.envs import EnvCalls, EnvFault

class Hangs:
    def step(self, action):
        threading.Event().wait()

sys.settrace(lambda *_: None)
try:
    asyncio.run(EnvCalls(0.05).step(Hangs(), "go"))
except EnvFault as fault:
    print(fault)
"""


def test_a_call_that_hangs_does_not_stop_a_process_with_a_debugger() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=300, check=True
    )
    assert "step took more than 0.05 s" in done.stdout, done


def test_64_hanging_threads_starve_no_other_call_and_do_not_block_the_exit() -> None:
    release = threading.Event()

    async def play() -> int:
        short, long = (
            EnvCalls(3.0),
            EnvCalls(60.0),
        )  # healthy calls take microseconds, and machines stall
        hung = await asyncio.gather(
            *(short.step(Does(release.wait), "go") for _ in range(2 * MAX_BLOCKING_CALLS)),
            return_exceptions=True,
        )
        healthy = await asyncio.gather(
            *(long.step(Does(lambda: GOOD), "go") for _ in range(2 * MAX_BLOCKING_CALLS))
        )
        assert healthy == [GOOD] * len(healthy)
        return sum(
            isinstance(fault, EnvFault) and fault.reason is StopReason.TIMEOUT for fault in hung
        )

    assert nobody_hangs()
    try:
        assert asyncio.run(play()) == 2 * MAX_BLOCKING_CALLS
        assert hanging() == 2 * MAX_BLOCKING_CALLS
        assert all(
            thread.daemon for thread in threading.enumerate() if thread.name.startswith("env")
        )
    finally:
        release.set()
    assert nobody_hangs()


def nobody_hangs() -> bool:
    """Wait for abandoned threads."""
    return eventually(lambda: not hanging(), 60, "abandoned threads end")


def test_waiting_for_a_free_thread_is_not_the_environments_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_calls, "MAX_BLOCKING_CALLS", 2)
    begun, limit, release = [], asyncio.timeout, threading.Event()

    def recorded(seconds: float) -> asyncio.Timeout:
        begun.append(seconds)
        return limit(seconds)

    async def play() -> list[StepResult]:
        calls = EnvCalls(60.0)
        steps = [
            asyncio.create_task(calls.step(Does(lambda: release.wait() and GOOD), "go"))
            for _ in range(14)
        ]
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            assert begun == [60.0] * 2
        finally:
            release.set()
        return await asyncio.gather(*steps)

    monkeypatch.setattr(asyncio, "timeout", recorded)
    assert asyncio.run(play()) == [GOOD] * 14
    assert begun == [60.0] * 14


def test_all_calls_of_a_process_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode of random play has `EnvCalls` of its own."""
    monkeypatch.setattr(env_calls, "MAX_BLOCKING_CALLS", 3)
    release, running = threading.Event(), []

    def wait() -> StepResult:
        running.append(threading.current_thread())
        release.wait()
        return GOOD

    async def play() -> list[StepResult]:
        steps = [asyncio.create_task(EnvCalls(60.0).step(Does(wait), "go")) for _ in range(14)]
        while len(running) < 3:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(running) == 3
        release.set()
        return await asyncio.gather(*steps)

    assert asyncio.run(play()) == [GOOD] * 14
    assert len(set(running)) == 3


def test_an_endless_loop_is_stopped() -> None:
    counted = [0]

    def loop() -> Any:
        while True:
            counted[0] += 1

    fault_of(Does(loop), 3.0)
    assert nobody_hangs()
    reached = counted[0]
    time.sleep(0.05)
    assert counted[0] == reached > 0


def test_threads_are_used_again() -> None:
    async def names() -> set[str]:
        calls = EnvCalls()
        seen = [
            (
                await calls.step(
                    Does(lambda: StepResult(threading.current_thread().name, 0.0, False)), "go"
                )
            ).observation
            for _ in range(50)
        ]
        return set(seen)

    assert len(asyncio.run(names())) == 1
