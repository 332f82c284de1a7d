"""What `agenticrun debug` prints: colours in a terminal, the same words without one."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.envs import EnvFault
from agenticrun_workers.envs.answers import checked_step
from agenticrun_workers.types import Generation, GenerationRequest, IntArray, Trajectory

MAX_IDS = 24
"""Token ids that are listed of one piece."""

LABEL = 12


class View:
    """Tells an episode call by call."""

    def __init__(self, console: Console, chat: ChatFormat) -> None:
        self._console = console
        self._chat = chat
        self._turn = 0
        self._context_T = np.zeros(0, np.int32)
        """The last prompt and its answer."""

    def title(self, text: str) -> None:
        self._console.print(Text(text, style="bold"))

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def began(self, answer: Any) -> None:
        """`reset` returned."""
        info = answer[1] if isinstance(answer, tuple) and len(answer) == 2 else None
        if info:
            self._line("reset info", str(info), "dim")

    def asked(self, request: GenerationRequest) -> None:
        """The policy is asked for an answer: show what is new to it."""
        self._turn += 1
        prompt_T, known = request.prompt_tokens, len(self._context_T)
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
        """`step` returned."""
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
        """`step` of an `EnvironmentService` returned."""
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
        """The environment raised."""
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
                f"{trajectory.num_tokens}, {trajectory.num_response_tokens} of them trained, {samples}",
            )
            if not trajectory.stop_reason.trainable:
                self._line(
                    "",
                    f"nothing is trained on an episode that ends with {trajectory.stop_reason}",
                    "yellow",
                )
            elif trajectory.turns:
                self._console.print(self._masked(trajectory))

    def _masked(self, trajectory: Trajectory) -> Text:
        """All tokens as text, those that are trained marked."""
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
            self._line("", f"ids {_ids(tokens_T)}", "dim")

    def _line(self, name: str, text: str, style: str = "") -> None:
        """A label, and a text whose lines stand below each other."""
        line = Text(f"{name:<{LABEL}} ", style="dim")
        line.append(text.replace("\n", "\n" + " " * (LABEL + 1)), style=style or "not dim")
        self._console.print(line, soft_wrap=True)


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _ids(tokens_T: IntArray) -> str:
    ids = [str(token) for token in tokens_T]
    half = MAX_IDS // 2
    return " ".join(ids if len(ids) <= MAX_IDS else [*ids[:half], "...", *ids[-half:]])
