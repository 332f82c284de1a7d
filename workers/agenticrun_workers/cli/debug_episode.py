"""The episode of `agenticrun debug`, printed call by call.

Agent and environment are those of training, but everything runs on one thread.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from agenticrun_api import Pipeline
from agenticrun_workers.agents import ChatFormat, Episode, Generate, make_agent, random_valid_policy
from agenticrun_workers.envs import Env, EnvCalls, EnvFault, Renders, make_env
from agenticrun_workers.envs.calls import CLOSE_SECONDS, checked_step
from agenticrun_workers.models.devices import claim_device
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.models.tokenizer import load_tokenizer
from agenticrun_workers.rollout.datasets import EpisodeItems
from agenticrun_workers.rollout.env_worker import agent_limits
from agenticrun_workers.rollout.groups import tag_cycle
from agenticrun_workers.rollout.rendering import FrameRecorder, animated_gif
from agenticrun_workers.seeds import env_seed, sampling_seed
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    Stream,
    Trajectory,
)


class CannotPlay(Exception):
    """The environment lacks a method that the request needs."""


@dataclass(frozen=True)
class DebugRequest:
    """The episode to play, and the console to print it on."""

    pipeline: Pipeline
    tag: str
    policy: str
    source: ModelSource
    gpu: bool
    """The role of the engines has GPUs."""
    seed: int | None
    """None: the seed of the run's first group of the tag."""
    render: Path | None
    console: Console


class PrintedEnv:
    """Wrapper that prints every call of an environment.

    It runs on the event loop (`blocking` is false), so that breakpoints open on the main thread.
    """

    blocking = False

    def __init__(self, env: Any, view: EpisodeView) -> None:
        self._env = env
        self._view = view
        self.reset = self._printing_call(env.reset, lambda answer, *_: view.began(answer))
        # Services answer with more than a step.
        tell = view.served if getattr(env, "is_service", False) else view.stepped
        self.step = self._printing_call(env.step, lambda answer, action: tell(action, answer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def _printing_call(
        self, call: Callable[..., Any], tell: Callable[..., None]
    ) -> Callable[..., Any]:
        @functools.wraps(call)
        async def telling(*places: Any, **names: Any) -> Any:
            try:
                answer = call(*places, **names)
                if inspect.isawaitable(answer):
                    answer = await answer
            except Exception as error:
                # Printed here, with the call: the worker turns errors of environments into a stop
                # reason.
                self._view.failed(error)
                raise
            tell(answer, *places)
            return answer

        return telling


async def play(debug: DebugRequest) -> None:
    """Play the episode and print it.

    Raises:
        CannotPlay: the environment lacks render() or valid_actions().
        InvalidConfig: the data set is invalid.
        PluginError: the environment or the agent cannot be built.
        EngineError: the engine cannot start.
        MissingGpus: the model has GPUs, and this machine has none.
    """
    pipeline, spec = debug.pipeline, debug.pipeline.env(debug.tag)
    tokenizer = load_tokenizer(debug.source.tokenizer())
    chat = ChatFormat(tokenizer)
    view = EpisodeView(debug.console, chat)
    env: Any = make_env(spec.type, spec.config)
    film: FrameRecorder | None = None
    if debug.render:
        if not isinstance(env, Renders):
            raise CannotPlay(f"{type(env).__name__} has no render(): leave out --render")
        film = FrameRecorder(env)
    printed_env = cast(Env, PrintedEnv(film or env, view))
    # A breakpoint stops for as long as the user wants.
    limits = replace(agent_limits(pipeline, spec, Stream.TRAIN), step_timeout=None)
    agent = make_agent(spec.agent.type, spec.agent.config, tokenizer=tokenizer, limits=limits)
    episode = _episode(debug)
    view.title(
        f"{spec.tag}: {spec.type}, agent {spec.agent.type}, policy {debug.policy}, "
        f"seed {episode.env_seed}"
    )
    try:
        async with _policy(debug, env, chat) as generate:
            made = await agent.collect_trajectory(episode, printed_env, _printing(generate, view))
    finally:
        # With a limit: a broken `close` must not hide what was printed.
        await EnvCalls(CLOSE_SECONDS).close(env)
    view.ended([made] if isinstance(made, Trajectory) else list(made))
    if film and debug.render:
        debug.render.write_bytes(animated_gif(film.frames))
        view.note(f"{debug.render}: {len(film.frames)} images")


def _episode(debug: DebugRequest) -> Episode:
    """Return the first training episode of the tag, or the one that the seed selects."""
    pipeline = debug.pipeline
    cycle = tag_cycle(pipeline.train_envs.shares())
    group = cycle.index(debug.tag) if debug.tag in cycle else 0
    if debug.seed is not None:
        # The seed selects the item of the data set, too.
        group += debug.seed * len(cycle)
    key = EpisodeKey(Stream.TRAIN, group, 0)
    item = EpisodeItems(pipeline).of(debug.tag, Stream.TRAIN, group)
    if debug.seed is not None:
        return Episode(key, debug.tag, debug.seed, debug.seed, item)
    return Episode(
        key,
        debug.tag,
        env_seed(pipeline.seed, Stream.TRAIN, group),
        sampling_seed(pipeline.seed, key),
        item,
    )


def _printing(generate: Generate, view: EpisodeView) -> Generate:
    async def telling(request: GenerationRequest) -> Generation:
        view.asked(request)
        generation = await generate(request)
        view.answered(request, generation)
        return generation

    return telling


@asynccontextmanager
async def _policy(debug: DebugRequest, env: Any, chat: ChatFormat) -> AsyncIterator[Generate]:
    if debug.policy == "human":
        yield _human(env, chat, debug.console)
    elif debug.policy == "model":
        from agenticrun_workers.inference.builder import transformers_engine

        with debug.source.folder() as folder:
            device = claim_device("the model", ["0"] if debug.gpu else [])
            engine = transformers_engine(debug.pipeline, debug.source, folder, device)
            await engine.start()
            try:
                yield engine.generate
            finally:
                await engine.stop()
    elif hasattr(env, "valid_actions"):
        yield random_valid_policy(cast(Env, _OnThisThread(env)), chat)
    else:
        raise CannotPlay(
            f"{type(env).__name__} has no valid_actions(), which a random policy needs: "
            "use --policy human or model"
        )


class _OnThisThread:
    blocking = False

    def __init__(self, env: Any) -> None:
        self.valid_actions = env.valid_actions


def _human(env: Any, chat: ChatFormat, console: Console) -> Generate:
    async def generate(request: GenerationRequest) -> Generation:
        while True:
            if hasattr(env, "valid_actions"):
                actions = env.valid_actions()
                listed = await actions if inspect.isawaitable(actions) else actions
                console.print(
                    f"valid: {', '.join(listed[:20])}{' ...' if len(listed) > 20 else ''}",
                    markup=False,
                    style="dim",
                )
            try:
                tokens_T = chat.answer(console.input("answer> "))
            # Ctrl-D: the episode ends as after an aborted request.
            except EOFError:
                return _generation(np.zeros(0, np.int32), FinishReason.ABORT)
            except Exception as error:  # tokenizers raises plain Exception
                console.print(
                    f"the tokenizer cannot encode this: use only texts of the environment's "
                    f"vocabulary() ({error})",
                    markup=False,
                )
                continue
            limit = request.sampling.max_new_tokens
            # As an engine does: what is too long is cut.
            return _generation(
                tokens_T[:limit],
                FinishReason.STOP if len(tokens_T) <= limit else FinishReason.LENGTH,
            )

    return generate


def _generation(tokens_T: Any, finish: FinishReason) -> Generation:
    return Generation(
        tokens_T, np.zeros(len(tokens_T), np.float32), np.zeros(len(tokens_T), np.int32), finish
    )


MAX_IDS = 24
"""Maximum number of token ids to print for one prompt or answer."""

LABEL = 12


class EpisodeView:
    """Printer of an episode: colours in a terminal, the same words without one."""

    def __init__(self, console: Console, chat: ChatFormat) -> None:
        self._console = console
        self._chat = chat
        self._turn = 0
        self._context_T = np.zeros(0, np.int32)
        """Tokens of the last prompt and its answer, shape [tokens]."""

    def title(self, text: str) -> None:
        self._console.print(Text(text, style="bold"))

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def began(self, answer: Any) -> None:
        """Print the info that `reset` returned."""
        info = answer[1] if isinstance(answer, tuple) and len(answer) == 2 else None
        if info:
            self._line("reset info", str(info), "dim")

    def asked(self, request: GenerationRequest) -> None:
        """Print the part of the prompt that is new since the last answer."""
        self._turn += 1
        prompt_T, known = request.prompt_tokens, len(self._context_T)
        # Step-wise agents write a new prompt each turn.
        continues = 0 < known < len(prompt_T) and np.array_equal(prompt_T[:known], self._context_T)
        new_T = prompt_T[known:] if continues else prompt_T
        self._console.print(Rule(Text(f"turn {self._turn}", style="bold"), align="left"))
        count = f"{len(new_T)} tokens" + (f" after {known}" if continues else "")
        self._piece(
            "prompt", f"{count}, at most {request.sampling.max_new_tokens} to answer", new_T, "cyan"
        )

    def answered(self, request: GenerationRequest, generation: Generation) -> None:
        self._context_T = np.concatenate([request.prompt_tokens, generation.tokens_T])
        self._piece(
            "answer",
            f"{len(generation.tokens_T)} tokens, {generation.finish}",
            generation.tokens_T,
            "green",
        )

    def stepped(self, action: str, answer: Any) -> None:
        """Print an action and the result of its `step`."""
        self._line("action", repr(action), "bold")
        try:
            result = checked_step(answer)
        except EnvFault as fault:
            self._line("no step", str(fault), "bold red")
            return
        ended = "".join(
            f", {name}" for name in ("terminated", "truncated") if getattr(result, name)
        )
        self._line("reward", f"{result.reward:.4g}{ended}", "magenta")
        if result.metrics:
            self._line("metrics", _metrics(result.metrics))
        self._line("observation", result.observation)

    def served(self, action: Any, answer: Any) -> None:
        """Print an action and the result of its `step`, for an `EnvironmentService`."""
        self._line("action", repr(action), "bold")
        if not isinstance(answer, tuple) or len(answer) != 5:
            self._line(
                "no step",
                f"{answer!r} is not (observation, reward, terminated, truncated, info)",
                "bold red",
            )
            return
        observation, reward, terminated, truncated, info = answer
        ended = f"{', terminated' if terminated else ''}{', truncated' if truncated else ''}"
        self._line("reward", f"{reward}{ended}", "magenta")
        if info:
            self._line("info", str(info))
        if observation is not None:
            self._line(
                "observation", observation if isinstance(observation, str) else repr(observation)
            )

    def failed(self, error: BaseException) -> None:
        """Print the traceback of an exception of the environment."""
        self._console.print(
            Text("".join(traceback.format_exception(error)).rstrip(), style="red"), soft_wrap=True
        )

    def ended(self, trajectories: Sequence[Trajectory]) -> None:
        for number, trajectory in enumerate(trajectories, start=1):
            name = (
                "end"
                if len(trajectories) == 1
                else f"end, trajectory {number} of {len(trajectories)}"
            )
            self._console.print(Rule(Text(name, style="bold"), align="left"))
            self._line("stop reason", trajectory.stop_reason, "bold")
            if trajectory.error:
                self._line("error", trajectory.error, "bold red")
            self._line("score", f"{trajectory.score:.4g}", "magenta")
            if trajectory.metrics:
                self._line("metrics", _metrics(trajectory.metrics))
            samples = "one sample per turn" if trajectory.stepwise else "one sample"
            self._line(
                "tokens",
                f"{trajectory.num_tokens}, {trajectory.num_response_tokens} of them trained, "
                f"{samples}",
            )
            if not trajectory.stop_reason.trainable:
                self._line(
                    "",
                    f"an episode that ends with {trajectory.stop_reason} is not trained on",
                    "yellow",
                )
            elif trajectory.turns:
                self._console.print(self._masked(trajectory))

    def _masked(self, trajectory: Trajectory) -> Text:
        """Return all tokens as text, with the trained ones marked."""
        marked = Text()
        left, right = ("", "") if self._console.is_terminal else ("«", "»")
        marked.append(
            "trained tokens are " + ("green" if self._console.is_terminal else "«so»") + ":\n",
            style="dim",
        )
        for turn in trajectory.turns:
            marked.append(self._chat.shown(turn.prompt_T), style="dim")
            marked.append(f"{left}{self._chat.shown(turn.response_T)}{right}", style="bold green")
            if trajectory.stepwise:
                marked.append("\n")
        return marked

    def _piece(self, name: str, counted: str, tokens_T: IntArray, style: str) -> None:
        self._line(name, counted)
        if len(tokens_T):
            self._line("", self._chat.shown(tokens_T), style)
            ids, half = tokens_T.tolist(), MAX_IDS // 2
            shown = ids if len(ids) <= MAX_IDS else [*ids[:half], "...", *ids[-half:]]
            self._line("", f"ids {' '.join(map(str, shown))}", "dim")

    def _line(self, name: str, text: str, style: str = "") -> None:
        """Print a label and a text, with the lines of the text aligned."""
        line = Text(f"{name:<{LABEL}} ", style="dim")
        line.append(text.replace("\n", "\n" + " " * (LABEL + 1)), style=style or "not dim")
        self._console.print(line, soft_wrap=True)


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
