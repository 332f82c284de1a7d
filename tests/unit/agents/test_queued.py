"""Agents with queues: their inputs, the use of their results, and the cost of their mistakes."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.agents import (
    AgentConfigError,
    AgentLimits,
    AgentNotFound,
    BundledGenerationOutputs,
    ChatFormat,
    Episode,
    EpisodeEnded,
    GenerationConfig,
    QueuedAgent,
    ScoredSequence,
    make_agent,
    register_agent,
)
from agenticrun_workers.envs import EnvFault, EnvironmentService, StepResult
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    StopReason,
    Stream,
    Trajectory,
)

WORDS = "abcdefgh"
TOKENIZER = build_task_tokenizer([*WORDS, "?", "\n", "again"], 1000)
CHAT = ChatFormat(TOKENIZER)
EPISODE = Episode(
    EpisodeKey(Stream.TRAIN, 3, 1), "maths", env_seed=5, sampling_seed=9, item={"prompt": "a?"}
)
LIMITS = AgentLimits(max_turns=8, max_tokens_per_step=4, sequence_length=500, temperature=0.8)
ASK = GenerationConfig()

Collect = Callable[..., Awaitable[Any]]


class Letters(EnvironmentService):
    """A stateless service: the reward of an answer is its number of `a`."""

    async def step(self, action: tuple[str, Sequence[str]]) -> Any:
        _, answers = action
        return None, [float(answer.count("a")) for answer in answers], True, False, {}


class Policy:
    """Generate random words of 1 to 3 letters as a function of the request's seed.

    The log-probs are unique to each response.
    """

    def __init__(self, delays: Callable[[int], float] = lambda number: 0.0) -> None:
        self.requests: list[GenerationRequest] = []
        self.said: dict[str, Generation] = {}
        self._delays = delays

    async def __call__(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        number = len(self.requests)
        await asyncio.sleep(self._delays(number))
        rng = random.Random(request.seed)
        text = "".join(
            rng.choices(WORDS, k=min(rng.randint(1, 3), request.sampling.max_new_tokens))
        )
        tokens = CHAT.answer(text)[: request.sampling.max_new_tokens]
        size = len(tokens)
        finish = FinishReason.STOP if tokens[-1] == CHAT.end_of_turn else FinishReason.LENGTH
        logprobs = -np.arange(1, size + 1, dtype=np.float32) - 100 * number
        made = Generation(
            tokens, logprobs, np.full(size, number, np.int32), finish, engine=f"e{number}"
        )
        self.said[request.request_id] = made
        return made


def agent(collect: Collect, limits: AgentLimits = LIMITS) -> QueuedAgent:
    class User:
        async def collect_trajectory(
            self, prompt: Any, env: Any, obs_queue: Any, act_queue: Any
        ) -> Any:
            return await collect(prompt, env, obs_queue, act_queue)

    return QueuedAgent(User(), tokenizer=TOKENIZER, limits=limits)


def play(
    collect: Collect, env: Any = None, policy: Policy | None = None, limits: AgentLimits = LIMITS
) -> list[Trajectory]:
    made = agent(collect, limits).collect_trajectory(EPISODE, env or Letters(), policy or Policy())
    return asyncio.run(asyncio.wait_for(made, 60))


async def ask(
    obs_queue: Any, act_queue: Any, tokens: list[int], config: GenerationConfig = ASK
) -> BundledGenerationOutputs:
    await obs_queue.put(("q", tokens, config))
    answer: BundledGenerationOutputs = await act_queue.get()
    return answer


async def twice(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> list[ScoredSequence]:
    """Two samples of the first answer; the second one is asked again."""
    act = await ask(obs_queue, act_queue, prompt.token_ids, ASK.new(n=2))
    _, rewards, *_ = await env.step(
        (prompt.qid, [CHAT.text(np.array(ids, np.int32)) for ids in act.output_ids])
    )
    more = await ask(
        obs_queue, act_queue, act.seqs[1] + CHAT.next("again", ended=not act.no_eos[1]).tolist()
    )
    return [
        ScoredSequence(act.seqs[0], rewards[0], metrics={"first": 1.0}),
        ScoredSequence(more.seqs[0], [rewards[1], 0.5], valid=False),
    ]


def test_samples_and_turns_become_trajectories_token_for_token() -> None:
    policy = Policy()
    first, second = play(twice, policy=policy)
    (one, other, third) = policy.said.values()
    prompt_T = CHAT.first("", "a?")
    assert [request.request_id for request in policy.requests] == [
        "train-3-1-1-0",
        "train-3-1-1-1",
        "train-3-1-2-0",
    ]
    assert {request.session for request in policy.requests} == {"train-3-1"}
    assert first.tokens_T.tolist() == [*prompt_T, *one.tokens_T]
    assert first.logprobs_T[first.response_mask_T].tolist() == one.logprobs_T.tolist()
    again = CHAT.next("again", ended=other.finish is FinishReason.STOP)
    assert second.tokens_T.tolist() == [*prompt_T, *other.tokens_T, *again, *third.tokens_T]
    assert second.logprobs_T[second.response_mask_T].tolist() == [
        *other.logprobs_T,
        *third.logprobs_T,
    ]
    assert second.versions_T[second.response_mask_T].tolist() == [
        *other.versions_T,
        *third.versions_T,
    ]
    assert [turn.engine for turn in second.turns] == ["e2", "e3"]
    assert [turn.reward for turn in second.turns] == [CHAT.text(other.tokens_T).count("a"), 0.5]
    assert [turn.valid for turn in second.turns] == [True, False]
    assert (first.metrics, first.stop_reason, first.stepwise) == (
        {"first": 1.0},
        StopReason.COMPLETED,
        False,
    )


@given(st.data())
def test_whatever_an_agent_asks_each_response_keeps_its_own_numbers(data: st.DataObject) -> None:
    """Extend any sampled sequence, cut into it, or begin a new one.

    Masks and log-probs are those of the generations on the path.
    """
    policy = Policy()
    made: list[
        tuple[list[int], list[float], list[int]]
    ] = []  # tokens, log-probs (0 on prompts), mask; by the definition

    async def collect(
        prompt: Any, env: Any, obs_queue: Any, act_queue: Any
    ) -> list[ScoredSequence]:
        for _ in range(data.draw(st.integers(1, 5))):
            base = data.draw(st.sampled_from([[], *(tokens for tokens, _, _ in made)]))
            if data.draw(st.booleans()):
                base = base[:-1]  # no extension of its last response any more
            new = base + data.draw(st.lists(st.integers(5, 12), min_size=1, max_size=3))
            fitting = max(
                (m for m in made if new[: len(m[0])] == m[0]),
                key=lambda m: len(m[0]),
                default=([], [], []),
            )
            n = data.draw(st.integers(1, 3))
            before = len(policy.requests)
            act = await ask(obs_queue, act_queue, list(new), GenerationConfig(n=n))
            pad = len(new) - len(fitting[0])
            for sample, seq in enumerate(act.seqs):
                said = policy.said[policy.requests[before + sample].request_id]
                if any(m[0] == seq for m in made):
                    continue  # equal sequences are told apart in a test of their own
                made.append(
                    (
                        seq,
                        fitting[1] + [0.0] * pad + said.logprobs_T.tolist(),
                        fitting[2] + [0] * pad + [1] * len(said.tokens_T),
                    )
                )
        return [ScoredSequence(tokens, 1.0) for tokens, _, _ in made]

    trajectories = play(collect, policy=policy)
    assert len(trajectories) == len(made)
    for trajectory, (tokens, logprobs, mask) in zip(trajectories, made, strict=True):
        assert trajectory.tokens_T.tolist() == tokens
        assert trajectory.response_mask_T.tolist() == [bool(m) for m in mask]
        assert trajectory.logprobs_T.tolist() == logprobs


def test_equal_samples_are_told_apart_by_their_order() -> None:
    class Parrot(Policy):
        async def __call__(self, request: GenerationRequest) -> Generation:
            made = await super().__call__(request)
            version_T = made.versions_T[:1].repeat(2)
            return Generation(
                CHAT.answer("a"), made.logprobs_T[:1].repeat(2), version_T, FinishReason.STOP
            )

    async def collect(
        prompt: Any, env: Any, obs_queue: Any, act_queue: Any
    ) -> list[ScoredSequence]:
        act = await ask(obs_queue, act_queue, prompt.token_ids, ASK.new(n=3))
        assert act.seqs[0] == act.seqs[1] == act.seqs[2]
        return [
            ScoredSequence(seq, reward) for seq, reward in zip(act.seqs, [1, 2, 3], strict=True)
        ]

    trajectories = play(collect, policy=Parrot())
    assert [(t.score, t.oldest_version) for t in trajectories] == [(1, 1), (2, 2), (3, 3)]


def test_the_last_turn_alone_can_be_trained_on() -> None:
    async def collect(*arguments: Any) -> ScoredSequence:
        _, second = await twice(*arguments)
        return ScoredSequence(second.tokens, 2.0, trained="last")

    policy = Policy()
    (trajectory,) = play(collect, policy=policy)
    last = list(policy.said.values())[-1]
    assert trajectory.response_mask_T.sum() == len(last.tokens_T)
    assert trajectory.tokens_T[trajectory.response_mask_T].tolist() == last.tokens_T.tolist()
    assert (trajectory.score, len(trajectory.turns)) == (2.0, 1)


def test_every_member_turn_and_sample_has_a_seed_of_its_own_the_same_each_time() -> None:
    def seeds() -> list[int]:
        policy = Policy()
        play(twice, policy=policy)
        return [request.seed for request in policy.requests]

    assert seeds() == seeds()
    assert len(set(seeds())) == 3


def test_requests_under_way_at_once_are_answered_in_their_order() -> None:
    async def collect(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> ScoredSequence:
        for name in "xyz":
            await obs_queue.put((name, prompt.token_ids, ASK))
        acts = [await act_queue.get() for _ in "xyz"]
        assert [act.qid for act in acts] == ["x", "y", "z"]
        return ScoredSequence(acts[0].seqs[0], 0.0)

    policy = Policy(delays=lambda number: 0.03 / number)
    assert play(collect, policy=policy)[0].stop_reason is StopReason.COMPLETED
    assert len(policy.requests) == 3


def test_what_the_bundle_says_is_what_was_sampled() -> None:
    async def collect(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> ScoredSequence:
        act = await ask(obs_queue, act_queue, prompt.token_ids, ASK.new(n=2, max_new_tokens=1))
        assert (act.qid, act.prompt_ids, act.no_eos) == ("q", prompt.token_ids, [True, True])
        assert act.seqs == [prompt.token_ids + output for output in act.output_ids]
        assert (act.versions, act.version_start, act.version_end) == ([[1], [2]], [1, 2], [1, 2])
        assert act.logprobs == [[-101.0], [-201.0]]
        act.seqs[0].append(5)  # lists of one's own: extending one changes nothing that was sampled
        return ScoredSequence(act.seqs[0], 0.0)

    assert play(collect)[0].error == ""


class Walk:
    """A text environment: `a` ends it; it measures."""

    instruction = "b"
    blocking = False

    def set_item(self, item: Any) -> None: ...

    def reset(self, seed: int, split: Stream) -> str:
        self.steps = 0
        return "a?"

    def step(self, action: str) -> StepResult:
        self.steps += 1
        if action == "h":
            raise RuntimeError("no h")
        return StepResult(
            "again", 0.5, action == "a", metrics={"steps": 1.0, "success": float(action == "a")}
        )


def test_a_text_environment_is_a_service_for_such_an_agent() -> None:
    async def collect(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> ScoredSequence:
        assert (prompt.text, prompt.instruction, await env.reset()) == ("a?", "b", "a?")
        act = await ask(obs_queue, act_queue, prompt.token_ids)
        observation, reward, terminated, truncated, _ = await env.step("b")
        assert (observation, terminated, truncated) == ("again", False, False)
        await env.step("a")
        return ScoredSequence(act.seqs[0], reward, metrics={"own": 2.0})

    (trajectory,) = play(collect, env=Walk())
    assert trajectory.metrics == {"steps": 2.0, "success": 1.0, "own": 2.0}
    assert (
        trajectory.tokens_T[: len(CHAT.first("b", "a?"))].tolist() == CHAT.first("b", "a?").tolist()
    )


async def no_room(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> Any:
    tokens, act = prompt.token_ids, None
    while True:
        try:
            act = await ask(obs_queue, act_queue, tokens)
        except EpisodeEnded:
            assert act is not None
            return ScoredSequence(act.seqs[0], 1.0)
        tokens = act.seqs[0] + CHAT.next("again", ended=not act.no_eos[0]).tolist()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (
            AgentLimits(max_turns=2, max_tokens_per_step=4, sequence_length=500),
            StopReason.MAX_TURNS,
        ),
        (
            AgentLimits(max_turns=99, max_tokens_per_step=4, sequence_length=30),
            StopReason.CONTEXT_OVERFLOW,
        ),
    ],
)
def test_an_agent_that_runs_out_of_room_may_return_what_it_has(
    limits: AgentLimits, reason: StopReason
) -> None:
    (trajectory,) = play(no_room, limits=limits)
    assert (trajectory.stop_reason, trajectory.score) == (reason, 1.0)
    assert trajectory.num_tokens <= limits.sequence_length


async def asks_for_ever(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> Any:
    while True:
        await ask(obs_queue, act_queue, prompt.token_ids)


async def raises(*arguments: Any) -> Any:
    raise KeyError("oops")


async def exits(*arguments: Any) -> Any:
    sys.exit(3)


async def sleeps(*arguments: Any) -> Any:
    await asyncio.sleep(1000)


async def sleeps_through_a_cancellation(*arguments: Any) -> Any:
    for _ in range(2):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)


async def waits_for_no_answer(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> Any:
    await act_queue.get()


async def catches_the_fault(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> Any:
    act = await ask(obs_queue, act_queue, prompt.token_ids)
    try:
        await env.step("h")
    except EnvFault:
        return ScoredSequence(act.seqs[0], 1.0)


async def other_seed(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> Any:
    await env.reset(seed=1234)


def puts(*things: Any) -> Collect:
    async def collect(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> Any:
        for thing in things:
            await obs_queue.put(thing)
        await act_queue.get()

    return collect


def returns(made: Callable[[BundledGenerationOutputs], Any]) -> Collect:
    async def collect(prompt: Any, env: Any, obs_queue: Any, act_queue: Any) -> Any:
        return made(await ask(obs_queue, act_queue, prompt.token_ids))

    return collect


@pytest.mark.parametrize(
    ("collect", "reason", "message"),
    [
        (raises, "env_error", "KeyError: 'oops'"),
        (exits, "env_error", "SystemExit: 3"),
        (sleeps, "timeout", "the agent neither asked for a response nor returned within 0.1 s"),
        (sleeps_through_a_cancellation, "timeout", "neither asked"),
        (waits_for_no_answer, "timeout", "neither asked"),
        (asks_for_ever, "max_turns", ""),
        (catches_the_fault, "env_error", "RuntimeError: no h"),
        (other_seed, "env_error", "call env.reset() without them"),
        (puts("garbage"), "env_error", "obs_queue takes (qid, token_ids, gconfig), not 'garbage'"),
        (puts(("q", [5], None)), "env_error", "obs_queue takes"),
        (
            puts(("q", ["a"], ASK)),
            "env_error",
            "token_ids must be whole numbers, at least one, not ['a']",
        ),
        (puts(("q", [], ASK)), "env_error", "at least one, not []"),
        (puts(("q", [5.5], ASK)), "env_error", "whole numbers"),
        (puts(("q", [-1], ASK)), "env_error", "outside of the vocabulary of 16"),
        (puts(("q", [16], ASK)), "env_error", "outside of the vocabulary of 16"),
        (
            puts(("q", [5], ASK.new(temperature=2.0))),
            "env_error",
            "gconfig.temperature is 2.0, and the run samples with 0.8",
        ),
        (puts(("q", [5], ASK.new(n=0))), "env_error", "gconfig.n must be"),
        (
            returns(lambda act: None),
            "env_error",
            "must return one ScoredSequence or several, not None",
        ),
        (returns(lambda act: []), "env_error", "must return one ScoredSequence or several, not []"),
        (returns(lambda act: [act]), "env_error", "must return one ScoredSequence or several"),
        (
            returns(lambda act: ScoredSequence(act.prompt_ids, 1.0)),
            "env_error",
            "tokens that were not sampled",
        ),
        (
            returns(lambda act: ScoredSequence([*act.seqs[0], 5], 1.0)),
            "env_error",
            "tokens that were not sampled",
        ),
        (
            returns(lambda act: ScoredSequence(act.seqs[0], [1.0, 2.0])),
            "env_error",
            "2 rewards, and its trained turns are 1",
        ),
        (returns(lambda act: ScoredSequence("abc", 1.0)), "env_error", "tokens"),  # type: ignore[arg-type]
        (returns(lambda act: ScoredSequence(act.seqs[0], "high")), "env_error", "rewards"),  # type: ignore[arg-type]
        (returns(lambda act: ScoredSequence(act.seqs[0], None)), "env_error", "rewards"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_of_an_agent_is_one_lost_trajectory(
    collect: Collect, reason: str, message: str
) -> None:
    step_timeout = 0.1 if reason == "timeout" else 30.0
    limits = AgentLimits(
        max_turns=3,
        max_tokens_per_step=4,
        sequence_length=500,
        temperature=0.8,
        step_timeout=step_timeout,
    )
    (trajectory,) = play(collect, env=Walk(), limits=limits)
    assert (trajectory.stop_reason, trajectory.turns) == (reason, ())
    assert message in trajectory.error
    assert len(trajectory.error.splitlines()) <= 1


class Raising(Letters):
    async def step(self, action: Any) -> Any:
        raise OSError("no network")


class Hanging(Letters):
    async def step(self, action: Any) -> Any:
        await asyncio.sleep(1000)


class Shapeless(Letters):
    async def step(self, action: Any) -> Any:
        return 1.0


class Mute(EnvironmentService):
    async def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return 7

    async def step(self, action: Any) -> Any: ...


@pytest.mark.parametrize(
    ("env", "reason", "message"),
    [
        (Raising(), "env_error", "OSError: no network"),
        (Hanging(), "timeout", "step took more than 3.0 s"),
        (Shapeless(), "env_error", "Shapeless.step returned float, not (observation, reward"),
        (Mute(), "env_error", "Mute.reset returned int"),
    ],
)
def test_a_mistake_of_a_service_is_one_lost_trajectory(
    env: EnvironmentService, reason: str, message: str
) -> None:
    step_timeout = 3.0 if reason == "timeout" else 30.0  # of `reset`, too
    limits = AgentLimits(
        max_turns=3, max_tokens_per_step=4, sequence_length=500, step_timeout=step_timeout
    )
    (trajectory,) = play(twice, env=env, limits=limits)
    assert (trajectory.stop_reason, trajectory.turns) == (reason, ())
    assert message in trajectory.error


def test_an_engine_that_gives_up_ends_the_episode() -> None:
    class Aborting(Policy):
        async def __call__(self, request: GenerationRequest) -> Generation:
            nothing = np.zeros(0, np.int32)
            return Generation(nothing, nothing.astype(np.float32), nothing, FinishReason.ABORT)

    (trajectory,) = play(twice, policy=Aborting())
    assert trajectory.stop_reason is StopReason.ABORTED


def test_a_stopped_episode_stops_its_agent() -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def collect(*arguments: Any) -> Any:
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()

    async def abort() -> None:
        before = asyncio.all_tasks()
        running = asyncio.create_task(
            agent(collect).collect_trajectory(EPISODE, Letters(), Policy())
        )
        await asyncio.wait_for(begun.wait(), 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert stopped.is_set()
        assert asyncio.all_tasks() == before

    asyncio.run(abort())


class Configured:
    """An agent in the style of the guide, with settings of its own."""

    def __init__(self, gconfig: GenerationConfig, tokenizer: Any, my_param: float = 1.0) -> None:
        self.gconfig, self.tokenizer, self.my_param = gconfig, tokenizer, my_param

    async def collect_trajectory(
        self, prompt: Any, env: Any, obs_queue: Any, act_queue: Any
    ) -> Any: ...


def test_an_agent_of_that_kind_is_known_by_its_signature_and_gets_what_it_names() -> None:
    register_agent("configured", Configured)
    made = make_agent(
        "configured",
        {"myParam": 5, "gconfig": {"n": 4, "maxNewTokens": 99}},
        tokenizer=TOKENIZER,
        limits=LIMITS,
    )
    assert isinstance(made, QueuedAgent)
    user = made.user
    assert isinstance(user, Configured)
    assert (user.my_param, user.tokenizer) == (5, TOKENIZER)
    assert (user.gconfig.n, user.gconfig.max_new_tokens, user.gconfig.temperature) == (4, 4, 0.8)


@pytest.mark.parametrize(
    ("gconfig", "message"),
    [
        ({"n": 0}, "gconfig.n must be a whole number of at least 1, not 0"),
        ({"n": 257}, "gconfig.n must be at most 256"),
        ({"n": True}, "gconfig.n must be a whole number"),
        ({"maxNewTokens": 1.5}, "gconfig.maxNewTokens must be a whole number"),
        (
            {"topP": 0.9},
            r"gconfig.topP is 0.9, and the run samples with 1.0: "
            r"leave it out, and set actorInfer.generating.topP",
        ),
        ({"beams": 4}, "gconfig has no key 'beams'"),
        (4, "gconfig must be a mapping, not 4"),
    ],
)
def test_what_the_run_owns_or_nobody_knows_is_refused(gconfig: Any, message: str) -> None:
    register_agent("configured", Configured)
    with pytest.raises(AgentConfigError, match=message):
        make_agent("configured", {"gconfig": gconfig}, tokenizer=TOKENIZER, limits=LIMITS)


class Sync:
    def collect_trajectory(self, episode: Any, env: Any, generate: Any) -> Any: ...


class TwoArguments:
    async def collect_trajectory(self, prompt: Any, env: Any) -> Any: ...


class NoMethod:
    pass


@pytest.mark.parametrize("kind", [Sync, TwoArguments, NoMethod])
def test_what_is_no_agent_of_either_kind_is_told_how_to_become_one(kind: type) -> None:
    register_agent("neither")(kind)
    with pytest.raises(AgentNotFound, match=r"prompt, env, obs_queue, act_queue"):
        make_agent("neither", {}, tokenizer=TOKENIZER, limits=LIMITS)
