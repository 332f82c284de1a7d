"""The checks of `check_env`, each an async function of the subject."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import random
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from agenticrun_workers.envs.checking.played_episodes import (
    Event,
    Subject,
    episode,
    episodes,
    episodes_of_another_process,
    events,
)
from agenticrun_workers.envs.env import (
    AtCapacity,
    EnvFault,
    HasVocabulary,
    Renders,
    TakesItem,
)
from agenticrun_workers.findings import Finding, failed, not_checked, ok, warning
from agenticrun_workers.types import StopReason, Stream

Check = Callable[[Subject], Awaitable[Finding]]

ODD_ANSWERS = (
    "",
    " ",
    "\n",
    "no such action",
    "🙂 ½ 中文",
    "\u202eright to left",
    "\0",
    "{}[]()\\",
    "-1e999",
    "x" * 100_000,
)

OWN_RANDOM = (
    "keep a random generator of your own, made in reset from its seed: "
    "random.Random(seed) or np.random.default_rng(seed)"
)

SLOW_CALL = 0.010
"""Seconds of a call on the event loop that block all other episodes of the worker too long."""
QUICK_CALL = 0.000_2
"""Seconds below which a thread costs more than the call."""


async def other_process(subject: Subject) -> Finding:
    """Compare with another process. Runs first, so that a crash or a hang happens there."""
    if not subject.type:
        return not_checked("the class cannot be imported by another process")
    theirs = await asyncio.to_thread(episodes_of_another_process, subject)
    advice = (
        "do not use hash() of texts, the order of sets, the time, or the machine: "
        "members of a group must play the same level anywhere"
    )
    return _same(
        subject,
        await episodes(subject),
        theirs,
        "this process and another one, with another PYTHONHASHSEED,",
        advice,
    )


async def plays(subject: Subject) -> Finding:
    played = await episodes(subject)
    over = sum(map(_is_over, played))
    described = any(each[0][2].strip() for each in played)
    if not described:
        return warning(
            "there is no instruction",
            "say in `instruction` what the task is and how to answer, or in the agent's "
            "systemTemplate",
        )
    if isinstance(subject.make(), TakesItem) and not subject.items:
        return warning(
            "it has set_item, but no items were given to play",
            "name a run with a dataset (--file, --tag), or pass items",
        )
    return ok(
        f"{len(played)} episodes of valid types, {over} of them ended within {subject.turns} turns"
    )


async def same_seed(subject: Subject) -> Finding:
    return _same(
        subject,
        await episodes(subject),
        await episodes(subject),
        "two new environments with the same seed",
        OWN_RANDOM,
    )


async def reused(subject: Subject) -> Finding:
    async with subject.opened() as env:
        # Such an environment is closed after each episode, and remembers nothing.
        if not getattr(env, "reusable", True):
            return not_checked("reusable = False: each episode gets a new one")
        again = [await episode(subject, env, seed) for seed in subject.seeds]
    return _same(
        subject,
        await episodes(subject),
        again,
        "a new environment and one that has played others before",
        "let reset forget everything, or set reusable = False",
    )


async def interleaved(subject: Subject) -> Finding:
    """Play all episodes side by side, one turn each."""
    seen: dict[int, list[Event]] = {seed: [] for seed in subject.seeds}
    async with AsyncExitStack() as envs:
        running = {
            seed: events(subject, await envs.enter_async_context(subject.opened()), seed)
            for seed in subject.seeds
        }
        while running:
            # One turn of each: shared state shows only while others are in the middle of theirs.
            for seed, episode_of in list(running.items()):
                try:
                    seen[seed].append(await anext(episode_of))
                except StopAsyncIteration:
                    del running[seed]
                except AtCapacity as full:
                    return warning(
                        f"{len(subject.seeds)} episodes at once are too many: {full}",
                        "set envs[].maxConcurrent, or give the server more places",
                    )
    return _same(
        subject,
        await episodes(subject),
        list(seen.values()),
        "an episode alone and one beside others",
        f"share nothing between instances; {OWN_RANDOM}",
    )


async def threads(subject: Subject) -> Finding:
    async def played(seed: int) -> list[Event]:
        async with subject.opened() as env:
            return await episode(subject, env, seed)

    def alone(seed: int) -> list[Event]:
        return asyncio.run(played(seed))

    env = subject.make()
    # The run itself never uses a thread for it.
    if not getattr(env, "blocking", True):
        return not_checked("not played in threads: blocking = False, so no thread ever calls it")
    if inspect.iscoroutinefunction(env.step):
        return not_checked("not played in threads: step is async, so no thread ever calls it")
    with ThreadPoolExecutor(4) as pool:
        seen = await asyncio.gather(
            *(
                asyncio.get_running_loop().run_in_executor(pool, alone, seed)
                for seed in subject.seeds
            )
        )
    return _same(
        subject,
        await episodes(subject),
        list(seen),
        "an episode alone and one beside others in threads",
        f"share nothing between instances; {OWN_RANDOM}",
    )


async def global_random(subject: Subject) -> Finding:
    generators: tuple[tuple[str, Any, Any], ...] = (
        ("random", random.random, random.getstate),
        ("numpy.random", np.random.random, np.random.get_state),
    )
    for name, draw, state_of in generators:
        draw()  # the state is none that a seed leads to
        before = pickle.dumps(state_of())
        async with subject.opened() as env:
            await episode(subject, env, subject.seeds[0])
        if pickle.dumps(state_of()) != before:
            return failed(f"an episode changes the state of the process's {name}", OWN_RANDOM)
    return ok("an episode leaves the process's random numbers alone")


async def other_seeds(subject: Subject) -> Finding:
    kinds = {str(each) for each in await episodes(subject)}
    if len(kinds) == 1 and len(subject.seeds) > 1:
        return warning(
            f"all {len(subject.seeds)} seeds give the same episode",
            "draw the level from the seed that reset gets",
        )
    return ok(f"{len(kinds)} different episodes of {len(subject.seeds)} seeds")


async def splits(subject: Subject) -> Finding:
    """Compare the splits by finished episodes: equal beginnings do not imply equal levels.

    The warm-up must not play levels of validation either.
    """
    both = [await episodes(subject, split) for split in (Stream.TRAIN, Stream.VALIDATION)]
    warmup = await episodes(subject, Stream.WARMUP)
    # If there is only one episode, both splits have it.
    if len({str(each) for each in both[0]}) < 2:
        return not_checked("one episode only")
    train, validation = [
        {str(each) for each in played if _is_over(each)} for played in (both[0] + warmup, both[1])
    ]
    shared = len(train & validation)
    if both[0] == both[1]:
        return warning(
            "training and validation give the same episodes for the same seeds",
            "they play different seeds, so this matters if levels are few: then let reset(seed, "
            "split) choose from those of its split",
        )
    if shared:
        return warning(
            f"{shared} of {len(train)} episodes of training are in validation too",
            "let a hash of the level decide whether it is for training or for validation",
        )
    return ok("no episode of training is in validation")


async def odd_answers(subject: Subject) -> Finding:
    noticed = False
    for answer in ODD_ANSWERS:
        async with subject.opened() as env:
            await subject.calls.reset(
                env, subject.seeds[0], Stream.TRAIN, subject.item(subject.seeds[0])
            )
            try:
                result = await subject.calls.step(env, answer)
            except EnvFault as fault:
                return failed(
                    f"the answer {answer[:20]!r}: {fault}",
                    "an invalid answer is a normal step with the metric action_is_valid: 0",
                )
        noticed |= result.metrics.get("action_is_valid", 1.0) == 0
    if not noticed:
        # No failure: an environment may have a meaning for any text.
        return warning(
            "no odd answer has the metric action_is_valid: 0",
            "report it, so that formatPenalty and the metrics know invalid answers",
        )
    return ok(f"{len(ODD_ANSWERS)} odd answers (empty, huge, unicode) are normal steps")


async def listed_actions(subject: Subject) -> Finding:
    seed = subject.seeds[0]
    async with subject.opened() as env:
        await subject.calls.reset(env, seed, Stream.TRAIN, subject.item(seed))
        actions = await subject.calls.valid_actions(env) if hasattr(env, "valid_actions") else []
    if not actions:
        return not_checked(
            "no valid_actions: warm-up by random play and the random policy cannot play it"
        )
    for action in actions[:50]:
        async with subject.opened() as env:
            await subject.calls.reset(env, seed, Stream.TRAIN, subject.item(seed))
            result = await subject.calls.step(env, action)
        if result.metrics.get("action_is_valid", 1.0) == 0:
            return failed(
                f"{action!r} is listed by valid_actions, but step calls it invalid",
                "list what step accepts in this state",
            )
    return ok(f"{len(actions)} valid actions in the first state")


async def after_the_end(subject: Subject) -> Finding:
    seed = subject.seeds[0]
    async with subject.opened() as env:
        first = await episode(subject, env, seed)
        try:
            await subject.calls.step(env, "after the end")
        except EnvFault as fault:
            # Raising is fine: the run never steps after the end, but a hang would hold a thread.
            if fault.reason is StopReason.TIMEOUT:
                return failed(f"a step after the end: {fault}", "return or raise: nothing may hang")
        if getattr(env, "may_ignore_seeds", False):
            return ok("a step after the end does not hang")
        if getattr(env, "reusable", True) and await episode(subject, env, seed) != first:
            return failed(
                "after a step too many the same seed gives another episode",
                "let reset forget everything, or set reusable = False",
            )
    return ok("a step after the end does no harm")


async def vocabulary(subject: Subject) -> Finding:
    env = subject.make()
    if not isinstance(env, HasVocabulary):
        return not_checked(
            "no vocabulary: models of spec.model.initialize need one, models from the hub do not"
        )
    # The longest first, as in the tokenizer: `a` must not hide `ab`.
    pieces = sorted(set(env.vocabulary()), key=len, reverse=True)
    known = re.compile(
        f"(?:(?>{'|'.join(map(re.escape, pieces))}))*"
    )  # the longest piece, as the tokenizer takes it
    for each in await episodes(subject):
        for action, observation, *_ in each:
            for text in (observation, *(() if action == "reset" else (action,))):
                read = known.match(text)
                at = read.end() if read else 0
                if at < len(text):
                    found = f"vocabulary() does not cover {text[at : at + 10]!r} of {text[:40]!r}"
                    # Texts of the data set are not the environment's own words.
                    if subject.items:
                        return warning(
                            found, "name the words of the data set in spec.model.initialize.words"
                        )
                    return failed(found, "list every piece of observations and answers")
    return ok(f"{len(pieces)} pieces cover all observations and answers")


async def pictures(subject: Subject) -> Finding:
    seed = subject.seeds[0]
    async with subject.opened() as env:
        if not isinstance(env, Renders):
            return not_checked("no render")
        await subject.calls.reset(env, seed, Stream.TRAIN, subject.item(seed))
        try:
            picture = np.asarray(env.render())
        except Exception as error:  # a user's code may raise anything
            return failed(
                f"render raised {type(error).__name__}: {error}", "draw without a display"
            )
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        return failed(
            f"render returned {picture.dtype} {list(picture.shape)}",
            "return RGB, uint8 [height, width, 3]",
        )
    return ok(f"{picture.shape[1]} x {picture.shape[0]} pixels")


async def speed(subject: Subject) -> Finding:
    resets: list[float] = []
    steps: list[float] = []
    async with AsyncExitStack() as envs:
        env = await envs.enter_async_context(subject.opened())
        for seed in subject.seeds:
            if not getattr(env, "reusable", True):
                await envs.aclose()
                env = await envs.enter_async_context(subject.opened())
            marks = [time.perf_counter()]
            async for _ in events(subject, env, seed):
                marks.append(time.perf_counter())
            seconds = np.diff(marks).tolist()
            resets.append(seconds[0])
            steps += seconds[1:]
    reset, step = float(np.median(resets)), float(np.median(steps or [0.0]))
    speed = f"{1 / max(reset, 1e-9):,.0f} resets and {1 / max(step, 1e-9):,.0f} steps per second"
    on_loop = not getattr(env, "blocking", True)
    if on_loop and max(reset, step) > SLOW_CALL:
        return warning(
            f"{speed}, on the event loop",
            "all other episodes wait for it: leave out blocking = False, or make it faster",
        )
    if not on_loop and max(reset, step) < QUICK_CALL and not inspect.iscoroutinefunction(env.step):
        return ok(f"{speed}; blocking = False would save a thread's hop per call")
    return ok(speed)


def _is_over(played: list[Event]) -> bool:
    return len(played) > 1 and bool(played[-1][3] or played[-1][4])


def _same(
    subject: Subject, ours: list[list[Event]], theirs: list[list[Event]], who: str, advice: str
) -> Finding:
    difference = _difference(ours, theirs)
    if not difference:
        return ok(f"{who} play the same")
    if getattr(subject.make(), "may_ignore_seeds", False):
        return warning(
            f"{who} differ {difference}",
            "if this environment ignores seeds, the members of a group play different levels: use "
            "an estimator without a group baseline, such as reinforce",
        )
    return failed(f"{who} differ {difference}", advice)


def _difference(ours: list[list[Event]], theirs: list[list[Event]]) -> str:
    """Return where two lists of episodes differ first, or an empty string."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for turn, (event, again) in enumerate(zip(one, other, strict=False)):
            if event != again:
                return f"in episode {number}, turn {turn}: {_shown(event)} and {_shown(again)}"
        if len(one) != len(other):
            return f"in episode {number}: {len(one) - 1} and {len(other) - 1} turns"
    return ""


def _shown(event: Event) -> str:
    text = str(event)
    return text if len(text) < 60 else f"{text[:60]} ..."


FIRST: dict[str, Check] = {"other process": other_process, "types": plays}

CHECKS: dict[str, Check] = {
    "same seed": same_seed,
    "reuse": reused,
    "interleaved": interleaved,
    "threads": threads,
    "global random": global_random,
    "other seeds": other_seeds,
    "splits": splits,
    "odd answers": odd_answers,
    "valid actions": listed_actions,
    "after the end": after_the_end,
    "vocabulary": vocabulary,
    "render": pictures,
    "speed": speed,
}
