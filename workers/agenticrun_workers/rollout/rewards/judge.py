"""The judge protocol, the episodes that judges score, and judges by name."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.envs import EnvFault
from agenticrun_workers.envs.calls import (
    MAX_HANGING,
    Outcome,
    attempt,
    hanging,
    in_task,
    in_thread,
    number,
    raised,
)
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
    """A finished episode as text.

    `item` comes from the data set and `metrics` from the environment.
    """

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
        """Hash that is equal for equal episodes."""
        return hashlib.sha256(
            json.dumps(asdict(self), sort_keys=True, default=repr).encode()
        ).digest()

    def fill(self, template: str) -> str:
        """Fill the placeholders of a template.

        They are {transcript}, {prompt}, {answer}, {score}, {tag}, {item[column]} and
        {metrics[name]}.
        """
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
    """Reason for a missing score: returned for one episode, or raised for a whole call."""


Judgement = float | JudgeFailed


@runtime_checkable
class Judge(Protocol):
    """Scores episodes, several in one call."""

    calls_at_once: int
    """Maximum number of concurrent calls."""
    episodes_per_call: int | None
    """Maximum number of episodes per call, besides `rewards[].maxBatchSize`; None = no limit."""

    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        """Return a score, or the reason for a missing one, for each episode in order.

        An exception fails all episodes of the call. A method `close`, sync or async, is called at
        the end if there is one.
        """
        ...


class JudgeNotFound(PluginNotFound):
    """No judge of that name is registered or installed."""


class JudgeImportError(PluginImportError):
    """The judge's module could not be imported."""


class JudgeConfigError(PluginConfigError):
    """A config key is unknown to the judge, or it rejects a value."""


_registry: Registry[Any] = Registry(
    "judge", "agenticrun.judges", ErrorTypes(JudgeNotFound, JudgeImportError, JudgeConfigError)
)

register_judge = _registry.register


def make_judge(type: str, config: Mapping[str, Any]) -> Judge:
    """Build a judge.

    Args:
        type: registered name, entry point, `module:Class`, or `module:function` with an episode as
            its first parameter.
        config: keyword arguments, with camelCase keys.

    Raises:
        JudgeNotFound: no such judge.
        JudgeImportError: its module cannot be imported.
        JudgeConfigError: its config is invalid.
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
    """Raise `ValueError` if a template uses a field that episodes do not have."""
    example = JudgedEpisode("tag", (JudgedTurn("", "", 0.0),), _Anything(), _Anything())
    try:
        example.fill(template)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{name} {template!r}: {error!r}; known fields are {', '.join(TEMPLATE_FIELDS)}"
        ) from error


class _Anything(dict[str, Any]):
    """Mapping with every key, since the columns of an item are not known in advance."""

    def __missing__(self, key: str) -> str:
        return key


class FunctionJudge(Judge):
    """Judge that calls `function(episode, **arguments) -> float`, sync or async.

    An async function scores the episodes of a call concurrently. A sync one runs in a thread, one
    episode after another; a thread that hangs is abandoned.

    Raises:
        TypeError: the function does not accept these arguments.
    """

    episodes_per_call: int | None = None
    calls_at_once = 8

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        # Wrong arguments are refused when the run is checked, and not in the first episode.
        inspect.signature(function).bind(None, **arguments)
        self._function = partial(function, **arguments)

    @override
    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        """Whatever the function raises fails only its own episode."""
        if inspect.iscoroutinefunction(self._function):
            outcomes = await asyncio.gather(
                *(in_task(self._function(episode)) for episode in episodes)
            )
        else:
            outcomes = [await self._in_thread(episode) for episode in episodes]
        return [
            (
                JudgeFailed(str(raised(outcome.error, self._function.func)))
                if outcome.error is not None
                else checked(outcome.value, "it returned")
            )
            for outcome in outcomes
        ]

    async def _in_thread(self, episode: JudgedEpisode) -> Outcome:
        # Each abandoned thread keeps its memory until its call returns.
        if hanging() >= MAX_HANGING:
            raise JudgeFailed(f"{MAX_HANGING} earlier calls hang forever: give each a time limit")
        return await in_thread(partial(attempt, self._function, episode))


def checked(score: object, what: str) -> Judgement:
    """Return a score as a float, or why it cannot be a reward; `what` begins the reason."""
    try:
        return score if isinstance(score, JudgeFailed) else number(score, what)
    except EnvFault as fault:
        return JudgeFailed(str(fault))
