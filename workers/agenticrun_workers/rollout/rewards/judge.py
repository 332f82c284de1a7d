"""The judge protocol, the episodes that judges score, and judges by name."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.plugins import (
    ErrorTypes,
    PluginConfigError,
    PluginImportError,
    PluginNotFound,
    Registry,
    snake_case,
)
from agenticrun_workers.types import Trajectory

TEMPLATE_FIELDS = ("transcript", "prompt", "answer", "item", "score", "metrics", "tag")


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """One exchange as text."""

    prompt: str
    """Prompt text since the last answer, including special tokens."""
    answer: str
    reward: float
    valid: bool = True
    action: str | None = None
    """The action that the agent parsed; None = no action."""


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """A finished episode as text. `item` is the data set's, `metrics` are the environment's."""

    tag: str
    turns: tuple[JudgedTurn, ...]
    item: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The first prompt."""
        return self.turns[0].prompt

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.turns[-1].answer

    @property
    def score(self) -> float:
        """Sum of the environment's rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def transcript(self) -> str:
        """The whole conversation."""
        return "".join(turn.prompt + turn.answer for turn in self.turns)

    @property
    def content_hash(self) -> bytes:
        """Equal for equal episodes."""
        return hashlib.sha256(
            json.dumps(asdict(self), sort_keys=True, default=repr).encode()
        ).digest()

    def fill(self, template: str) -> str:
        """A template with {transcript}, {prompt}, {answer}, {score}, {tag}, {item[column]} and {metrics[name]} filled in."""
        return template.format_map({name: getattr(self, name) for name in TEMPLATE_FIELDS})


def judged_episode(
    trajectory: Trajectory, chat: ChatFormat, item: Mapping[str, Any] | None
) -> JudgedEpisode:
    """Return a trajectory as text."""
    turns = [
        JudgedTurn(
            chat.shown(turn.prompt_T),
            chat.text(turn.response_T),
            turn.reward,
            turn.valid,
            turn.action,
        )
        for turn in trajectory.turns
    ]
    return JudgedEpisode(trajectory.tag, tuple(turns), item or {}, dict(trajectory.metrics))


class JudgeFailed(Exception):
    """Reason for a missing score: as a value for one episode, raised for a whole call."""


Judgement = float | JudgeFailed


@runtime_checkable
class Judge(Protocol):
    """Scores episodes, several in one call."""

    calls_at_once: int
    """Limit of concurrent calls."""
    episodes_per_call: int | None
    """Most episodes of one call, beside `rewards[].maxBatchSize`; None: no limit of its own."""

    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        """Return a score, or the reason for a missing one, for each episode in order.

        An exception fails all episodes of the call.
        """
        ...


class JudgeNotFound(PluginNotFound):
    """No judge of that name."""


class JudgeImportError(PluginImportError):
    """The judge's module could not be imported."""


class JudgeConfigError(PluginConfigError):
    """The judge does not know a config key, or refuses a value."""


_registry: Registry[Any] = Registry(
    "judge", "agenticrun.judges", ErrorTypes(JudgeNotFound, JudgeImportError, JudgeConfigError)
)

register_judge = _registry.register


def make_judge(type: str, config: Mapping[str, Any]) -> Judge:
    """A registered judge, a `module:Class` that is one, or a `module:function` of an episode made into one.

    Raises `JudgeNotFound`, `JudgeImportError` or `JudgeConfigError`, each saying what to do.
    """
    target = _registry.find(type)
    if inspect.isclass(target):
        judge: Judge = _registry.make(type, config)
        return judge
    arguments = {snake_case(key): value for key, value in config.items()}
    try:
        return FunctionJudge(target, arguments)
    except (TypeError, ValueError) as error:
        raise JudgeConfigError(f"judge {type!r} refuses its config: {error}") from error


def check_template(template: str, name: str) -> None:
    """Raise `ValueError` if the template asks for what an episode does not have."""
    example = JudgedEpisode("tag", (JudgedTurn("", "", 0.0),), _Anything(), _Anything())
    try:
        example.fill(template)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{name} {template!r}: {error!r}; known fields are {', '.join(TEMPLATE_FIELDS)}"
        ) from error


class _Anything(dict[str, Any]):
    """Has every key: which columns an item has is known only when it comes."""

    def __missing__(self, key: str) -> str:
        return key


MAX_THREADS = 8


class FunctionJudge:
    """`function(episode, **arguments) -> float`, sync or async.

    An async function scores the episodes of a call side by side. A sync one runs in a thread, one episode after the other.
    Raises `TypeError` if the function does not take these arguments.
    """

    episodes_per_call: int | None = None
    calls_at_once = MAX_THREADS

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        inspect.signature(function).bind(None, **arguments)
        self._function = function
        self._arguments = dict(arguments)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="judge")

    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        """See `Judge`. What the function raises fails its own episode only."""
        if inspect.iscoroutinefunction(self._function):
            return list(await asyncio.gather(*map(self._await_one, episodes)))
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: list(map(self._call_one, episodes))
        )

    async def _await_one(self, episode: JudgedEpisode) -> Judgement:
        try:
            return float(await self._function(episode, **self._arguments))
        except Exception as error:  # a user's function may raise anything
            return _failure(error)

    def _call_one(self, episode: JudgedEpisode) -> Judgement:
        try:
            return float(self._function(episode, **self._arguments))
        except Exception as error:  # a user's function may raise anything
            return _failure(error)


def _failure(error: Exception) -> JudgeFailed:
    return JudgeFailed(f"{type(error).__name__}: {error}")
