"""The built-in agent: what it shows, records, and how episodes end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from agenticrun_workers.agents import (
    AgentConfigError,
    AgentLimits,
    Episode,
    MultiTurnAgent,
    make_agent,
    random_valid_policy,
)
from agenticrun_workers.envs import FrozenLake, StepResult
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    StopReason,
    Stream,
    Trajectory,
)

ENV = FrozenLake()
TOKENIZER = build_task_tokenizer(
    [*ENV.vocabulary(), *words_of(ENV.instruction), *"<>/ 0123456789", "answer"], 1000
)
EPISODE = Episode(EpisodeKey(Stream.TRAIN, 3, 1), "lake", env_seed=5, sampling_seed=9)
LIMITS = AgentLimits(max_turns=4, max_tokens_per_step=8, sequence_length=500)


class Corridor:
    """Walk right `length` times; sync."""

    instruction = ""

    def __init__(self, length: int = 3) -> None:
        self.length = length

    def reset(self, seed: int, split: Stream) -> str:
        self.place = 0
        return "P"

    def step(self, action: str) -> StepResult:
        self.place += action == "Right"
        done = self.place == self.length
        return StepResult(
            "_" * self.place,
            float(done),
            done,
            metrics={"num_actions": 1.0, "success": float(done)},
        )

    def valid_actions(self) -> list[str]:
        return ["Left", "Right"]


class AsyncCorridor(Corridor):
    async def reset(self, seed: int, split: Stream) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(seed, split)

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)


class Script:
    """A policy that says these texts, each as (text, ends with the end of turn)."""

    def __init__(self, agent: MultiTurnAgent, *answers: str | tuple[str, bool] | None) -> None:
        self.agent = agent
        self.answers = list(answers)
        self.requests: list[GenerationRequest] = []

    async def __call__(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if answer is None:
            nothing = np.zeros(0, np.int32)
            return Generation(nothing, nothing.astype(np.float32), nothing, FinishReason.ABORT)
        text, ended = answer if isinstance(answer, tuple) else (answer, True)
        tokens = self.agent.chat.answer(text)
        tokens = tokens if ended else tokens[:-1]
        number = len(self.requests)
        finish = FinishReason.STOP if ended else FinishReason.LENGTH
        return Generation(
            tokens,
            np.full(len(tokens), -number, np.float32),
            np.full(len(tokens), number, np.int32),
            finish,
        )


def agent(limits: AgentLimits = LIMITS, **config: Any) -> MultiTurnAgent:
    made = make_agent("multi_turn", config, tokenizer=TOKENIZER, limits=limits)
    assert isinstance(made, MultiTurnAgent)
    return made


def play(
    player: MultiTurnAgent, env: Any, *answers: str | tuple[str, bool] | None
) -> tuple[Trajectory, Script]:
    script = Script(player, *answers)
    return asyncio.run(player.collect_trajectory(EPISODE, env, script)), script


@pytest.mark.parametrize("make_env", [Corridor, AsyncCorridor])
def test_an_episode_records_every_token_and_where_it_came_from(make_env: Callable[[], Any]) -> None:
    trajectory, _ = play(agent(), make_env(), "Right", "Left", "Right", "Right")
    text = TOKENIZER.decode(trajectory.tokens_T.tolist())
    assert text == (
        "<|user|>P<|end|><|assistant|>Right<|end|><|user|>_<|end|><|assistant|>Left<|end|>"
        "<|user|>_<|end|><|assistant|>Right<|end|><|user|>__<|end|><|assistant|>Right<|end|>"
    )
    responses = TOKENIZER.convert_ids_to_tokens(
        trajectory.tokens_T[trajectory.response_mask_T].tolist()
    )
    assert responses == [
        "Right",
        "<|end|>",
        "Left",
        "<|end|>",
        "Right",
        "<|end|>",
        "Right",
        "<|end|>",
    ]
    assert trajectory.logprobs_T[trajectory.response_mask_T].tolist() == [
        -1,
        -1,
        -2,
        -2,
        -3,
        -3,
        -4,
        -4,
    ]
    assert trajectory.versions_T[trajectory.response_mask_T].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert (trajectory.stop_reason, trajectory.score) == (StopReason.COMPLETED, 1.0)
    assert trajectory.metrics == {"num_actions": 4.0, "success": 1.0}


def test_each_prompt_extends_the_one_before_by_its_response() -> None:
    trajectory, script = play(agent(), Corridor(9), "Right", "Left", "Right", "Right")
    for request, turn in zip(script.requests, range(4), strict=True):
        length = len(request.prompt_tokens)
        assert request.prompt_tokens.tolist() == trajectory.tokens_T[:length].tolist()
        assert request.request_id == f"train-3-1-{turn + 1}"
    assert {request.session for request in script.requests} == {"train-3-1"}
    assert len({request.seed for request in script.requests}) == 4


def test_the_turn_limit_ends_an_episode() -> None:
    trajectory, _ = play(agent(), Corridor(9), *["Right"] * 4)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == 4


def test_a_prompt_that_does_not_fit_ends_an_episode_also_at_the_first_turn() -> None:
    short = AgentLimits(max_turns=4, max_tokens_per_step=8, sequence_length=12)
    trajectory, script = play(agent(short), Corridor(9), "Right", "Right")
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert script.requests[1].sampling.max_new_tokens == 12 - len(script.requests[1].prompt_tokens)
    trajectory, script = play(agent(AgentLimits(4, 8, 4)), Corridor(9))
    assert (trajectory.stop_reason, trajectory.num_tokens) == (StopReason.CONTEXT_OVERFLOW, 0)


def test_a_cut_answer_is_played_and_the_end_of_turn_belongs_to_the_prompt() -> None:
    trajectory, _ = play(agent(), Corridor(2), ("Right", False), "Right")
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.response_mask_T.sum() == 3
    assert "Right<|end|><|user|>" in TOKENIZER.decode(trajectory.tokens_T.tolist())


def test_a_cut_answer_can_end_the_episode() -> None:
    trajectory, _ = play(agent(onCutAnswer="stop"), Corridor(2), ("Right", False))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


def test_the_action_is_the_pattern_s_last_group() -> None:
    player = agent(actionPattern="<answer>(.*?)</answer>")
    assert player.action("so <answer> Right </answer> and <answer>Left</answer>") == "Right"
    assert player.action("Right") is None


@pytest.mark.parametrize(
    ("policy", "reason", "turns"), [("continue", "max_turns", 4), ("stop", "parse_error", 1)]
)
def test_an_answer_that_does_not_parse_is_invalid_or_the_end(
    policy: str, reason: str, turns: int
) -> None:
    player = agent(actionPattern="<answer>(.*?)</answer>", onParseError=policy)
    trajectory, _ = play(player, FrozenLake(), *["Right"] * 4)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (reason, turns)
    if policy == "continue":
        assert [turn.valid for turn in trajectory.turns] == [False] * 4
        assert trajectory.metrics["action_is_valid"] == 0.0


def test_templates_show_instruction_observation_and_turns() -> None:
    player = agent(agentTemplate="{turn} {turns_left}{observation}")
    trajectory, _ = play(player, ENV, "Left", "Left", "Left", "Left")
    text = TOKENIZER.decode(trajectory.tokens_T.tolist())
    assert text.startswith(f"<|system|>{ENV.instruction}<|end|><|user|>1 4P")
    assert "<|user|>4 1P" in text


class Broken(Corridor):
    def __init__(
        self, step: Callable[[], StepResult], reset: Callable[[], str] = lambda: "P"
    ) -> None:
        super().__init__()
        self._step, self._reset = step, reset

    def reset(self, seed: int, split: Stream) -> str:
        return self._reset()

    def step(self, action: str) -> StepResult:
        return self._step()


def fail() -> NoReturn:
    raise RuntimeError("the emulator is gone")


@pytest.mark.parametrize(
    ("env", "error"),
    [
        (Broken(fail), "RuntimeError: the emulator is gone"),
        (Broken(fail, reset=fail), "RuntimeError: the emulator is gone"),
        (
            Broken(lambda: ("P", 1.0)),  # type: ignore[arg-type, return-value]
            "step returned tuple, neither a StepResult nor a tuple of five",
        ),
        (Broken(lambda: StepResult("P", float("nan"), False)), "step returned the reward nan"),
        (Broken(fail, reset=lambda: None), "reset returned NoneType, not text"),  # type: ignore[arg-type, return-value]
        (Broken(lambda: StepResult("?", 0.0, False)), "cannot be tokenised"),
        (
            Broken(lambda: StepResult("P?", 0.0, False)),
            "'?' is not in the vocabulary: add it to Broken.vocabulary() or "
            "spec.model.initialize.words",
        ),
    ],
)
def test_what_an_environment_does_wrong_ends_its_own_episode_with_a_reason(
    env: Any, error: str
) -> None:
    trajectory, _ = play(agent(), env, "Right")
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert not trajectory.stop_reason.trainable
    assert error in trajectory.error


class Hanging(Corridor):
    """Only its step takes long: `reset` needs no thread."""

    blocking = False

    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        await asyncio.sleep(60)
        raise AssertionError


class Blocking(Corridor):
    """As `Hanging`, in the thread that its step needs."""

    blocking = False

    def reset(self, seed: int, split: Stream) -> str:
        self.blocking = True
        return super().reset(seed, split)

    def step(self, action: str) -> StepResult:
        time.sleep(3.0)
        return super().step(action)


@pytest.mark.parametrize("env", [Hanging(), Blocking()])
def test_a_step_that_takes_too_long_is_a_timeout(env: Any) -> None:
    trajectory, _ = play(agent(AgentLimits(4, 8, 500, step_timeout=0.5)), env, "Right")
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert "step took more than 0.5 s" in trajectory.error
    assert len(trajectory.turns) == 1


class WhichThread(Corridor):
    seen: set[str]

    def step(self, action: str) -> StepResult:
        self.seen = {threading.current_thread().name.split("_")[0]}
        return super().step(action)


def test_a_sync_environment_runs_in_a_thread_unless_it_says_that_it_does_not_block() -> None:
    slow, quick = WhichThread(1), WhichThread(1)
    quick.blocking = False  # type: ignore[attr-defined]
    play(agent(), slow, "Right")
    play(agent(), quick, "Right")
    assert (slow.seen, quick.seen) == ({"env"}, {"MainThread"})


def test_an_aborted_generation_ends_the_episode() -> None:
    trajectory, _ = play(agent(), Corridor(), "Right", None)
    assert trajectory.stop_reason is StopReason.ABORTED


def test_truncation_by_the_environment_counts_as_its_turn_limit() -> None:
    trajectory, _ = play(
        agent(), Broken(lambda: StepResult("P", 0.0, False, truncated=True)), "Right"
    )
    assert trajectory.stop_reason is StopReason.MAX_TURNS


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"agentTemplate": "{state}"}, "state.*known fields"),
        ({"actionPattern": "("}, "actionPattern"),
        ({"tokenizer": 1}, "no config key 'tokenizer'"),
        ({"histories": 1}, "no config key 'histories'"),
        ({"onCutAnswer": "explode"}, "onCutAnswer"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentConfigError, match=message):
        agent(**config)


def test_the_random_policy_plays_every_valid_action_equally_often() -> None:
    player = agent()
    env = Corridor(99)
    counts = {"Left": 0, "Right": 0}
    policy = random_valid_policy(env, player.chat)

    async def sample() -> None:
        for seed in range(1000):
            tokens = (
                await policy(
                    GenerationRequest("r", "s", np.zeros(1, np.int32), SamplingParams(8), seed)
                )
            ).tokens_T
            counts[player.chat.text(tokens)] += 1

    asyncio.run(sample())
    assert 440 < counts["Left"] < 560


def test_a_random_episode_is_the_same_for_the_same_seed() -> None:
    def run() -> list[int]:
        env = FrozenLake()
        trajectory = asyncio.run(
            agent().collect_trajectory(EPISODE, env, random_valid_policy(env, agent().chat))
        )
        return [int(token) for token in trajectory.tokens_T]

    assert run() == run()
