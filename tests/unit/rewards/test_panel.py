"""What judges say becomes reward, and what they fail to say never does."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from typing import Any

import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.envs.loop_watch import LoopWatch
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.rewards import JudgedEpisode, JudgeFailed, Judgement, JudgePanel
from agenticrun_workers.types import StopReason, Trajectory
from judging import FakeJudge, episode, spec, trajectory


def panel(judge: FakeJudge, *, deterministic: bool = False, **changes: Any) -> JudgePanel:
    return JudgePanel([(spec(**changes), judge)], deterministic=deterministic)


def rewards(judged: Trajectory) -> list[float]:
    return [turn.reward for turn in judged.turns]


def error_of(judged: Trajectory) -> str:
    assert judged.stop_reason is StopReason.ENV_ERROR
    return judged.error


async def test_weight_times_score_is_added_to_the_last_turn_alone() -> None:
    judged = await panel(FakeJudge(), weight=0.5).apply(trajectory(1.0, 2.0), episode("four"))
    assert rewards(judged) == [1.0, 4.0]
    assert judged.metrics["reward/style"] == 4.0
    assert judged.metrics["success"] == 1.0
    assert judged.stop_reason is StopReason.COMPLETED


async def test_judges_add_up() -> None:
    both = JudgePanel(
        [(spec(name="a"), FakeJudge()), (spec(name="b", weight=-2), FakeJudge(lambda e: 10.0))]
    )
    judged = await both.apply(trajectory(0.0), episode("abc"))
    assert rewards(judged) == [3.0 - 20.0]
    assert {name: judged.metrics[name] for name in ("reward/a", "reward/b")} == {
        "reward/a": 3.0,
        "reward/b": 10.0,
    }


async def test_a_judge_looks_only_at_its_tags() -> None:
    some = panel(FakeJudge(), tags=["B"])
    assert [some.judges("A"), some.judges("B")] == [False, True]
    assert rewards(await some.apply(trajectory(1.0), episode())) == [1.0]


async def test_an_episode_without_turns_is_left_as_it_is() -> None:
    empty = trajectory()
    assert await panel(FakeJudge()).apply(empty, JudgedEpisode("A", ())) is empty


async def test_episodes_that_finish_together_share_calls_of_at_most_the_batch_size() -> None:
    judge = FakeJudge()
    together = panel(judge, maxBatchSize=4)
    await asyncio.gather(
        *(together.apply(trajectory(0.0, member=m), episode(f"answer {m}")) for m in range(10))
    )
    assert sorted(len(call) for call in judge.calls) == [2, 4, 4]


async def test_deterministic_runs_judge_each_episode_alone() -> None:
    judge = FakeJudge()
    alone = panel(judge, maxBatchSize=4, deterministic=True)
    await asyncio.gather(*(alone.apply(trajectory(0.0), episode(f"answer {m}")) for m in range(3)))
    assert [len(call) for call in judge.calls] == [1, 1, 1]


async def test_a_judge_is_never_asked_more_often_at_once_than_it_allows() -> None:
    judge = FakeJudge(seconds=0.01)
    judge.calls_at_once = 2
    limited = panel(judge, maxBatchSize=1)
    await asyncio.gather(*(limited.apply(trajectory(0.0), episode(str(m))) for m in range(7)))
    assert judge.most_at_once == 2


async def test_waiting_for_a_place_does_not_count_as_being_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock[0])

    class Slow(FakeJudge):
        """Takes half a second of the loop's time."""

        calls_at_once = 1

        async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
            for _ in range(5):
                clock[0] += 0.1
                await asyncio.sleep(0)
            return await super().judge(episodes)

    slow = panel(Slow(), maxBatchSize=1, timeoutSeconds=1.5)
    judged = await asyncio.gather(*(slow.apply(trajectory(0.0), episode(str(m))) for m in range(5)))
    assert {j.stop_reason for j in judged} == {StopReason.COMPLETED}


async def test_equal_episodes_are_judged_once_also_at_the_same_time() -> None:
    judge = FakeJudge(seconds=0.01)
    remembering = panel(judge)
    first = await asyncio.gather(
        *(remembering.apply(trajectory(0.0, member=m), episode("same")) for m in range(5))
    )
    later = await remembering.apply(trajectory(0.0), episode("same"))
    assert judge.calls == [["same"]]
    assert sorted(j.metrics["judge/style/cached"] for j in [*first, later]) == [0, 1, 1, 1, 1, 1]
    assert {tuple(rewards(j)) for j in [*first, later]} == {(4.0,)}


async def test_episodes_about_different_items_are_not_equal() -> None:
    judge = FakeJudge()
    remembering = panel(judge)
    for number in range(2):
        await remembering.apply(trajectory(0.0), episode("same", item={"number": number}))
    assert len(judge.calls) == 2


async def test_without_cache_every_episode_is_judged() -> None:
    judge = FakeJudge()
    forgetful = panel(judge, cache=False)
    for _ in range(2):
        await forgetful.apply(trajectory(0.0), episode("same"))
    assert len(judge.calls) == 2


async def test_a_failure_costs_its_own_episode_and_is_not_remembered() -> None:
    moods: dict[str, list[Judgement]] = {"bad": [JudgeFailed("no opinion"), 7.0]}

    def score(episode: JudgedEpisode) -> Judgement:
        return moods["bad"].pop(0) if episode.answer == "bad" else 1.0

    moody = panel(FakeJudge(score))
    bad, good = await asyncio.gather(
        *(moody.apply(trajectory(0.5), episode(answer)) for answer in ("bad", "good"))
    )
    assert error_of(bad) == "judge style: no opinion"
    assert bad.metrics["judge/style/failures"] == 1.0
    assert "reward/style" not in bad.metrics
    assert rewards(bad) == [0.5]
    assert rewards(good) == [1.5]
    assert rewards(await moody.apply(trajectory(0.5), episode("bad"))) == [7.5]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
async def test_a_score_that_is_no_finite_number_never_becomes_a_reward(score: float) -> None:
    judged = await panel(FakeJudge(lambda e: score)).apply(trajectory(1.0), episode())
    assert error_of(judged) == f"judge style: its score is {score}"
    assert not EpisodeResult.of(judged).trainable


@pytest.mark.parametrize(
    ("score", "weight", "reason"),
    [
        (1e300, 1.0, "its score is 1e+300, which is too large (at most 3.4e38)"),
        (10**400, 1.0, "its score is of type int, which is too large (at most 3.4e38)"),
        (3e38, 2.0, "its weighted score is 6e+38, which is too large (at most 3.4e38)"),
        ("1", 1.0, "its score is '1', which is not a number"),
        (None, 1.0, "its score is of type NoneType, which is not a number"),
    ],
)
async def test_a_score_that_float32_cannot_hold_fails_its_judge(
    score: Any, weight: float, reason: str
) -> None:
    judged = await panel(FakeJudge(lambda e: score), weight=weight).apply(
        trajectory(1.0), episode()
    )
    assert error_of(judged) == f"judge style: {reason}"
    assert judged.metrics["judge/style/failures"] == 1.0


async def test_judges_whose_scores_add_up_to_too_much_cost_the_episode() -> None:
    huge = [(spec(name=name), FakeJudge(lambda e: 3e38)) for name in "ab"]
    judged = await JudgePanel([*huge]).apply(trajectory(1.0), episode())
    result = EpisodeResult.of(judged)
    assert (result.stop_reason, result.score) == (StopReason.ENV_ERROR, 0.0)
    assert "6e+38, which is too large" in result.error


async def test_a_late_judge_fails_its_call() -> None:
    judged = await panel(FakeJudge(seconds=5), timeoutSeconds=0.05).apply(
        trajectory(1.0), episode()
    )
    assert error_of(judged) == "judge style: it took more than 0.05 s"


def _raise(error: BaseException) -> Judgement:
    raise error


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (FakeJudge(lambda e: _raise(RuntimeError("boom"))), "RuntimeError: boom"),
        (FakeJudge(lambda e: _raise(JudgeFailed("gone"))), "gone"),
        (FakeJudge(lambda e: _raise(TimeoutError("no route"))), "TimeoutError: no route"),
        (FakeJudge(lambda e: _raise(SystemExit(2))), "SystemExit: 2"),
        (FakeJudge(lambda e: _raise(asyncio.CancelledError("inner"))), "CancelledError: inner"),
        (FakeJudge(lambda e: "high"), "its score is 'high', which is not a number"),  # type: ignore[arg-type,return-value]
    ],
)
async def test_whatever_a_judge_does_wrong_is_told(judge: FakeJudge, message: str) -> None:
    told = error_of(await panel(judge).apply(trajectory(1.0), episode()))
    assert re.sub(r" \(judging\.py:\d+\)$", "", told) == f"judge style: {message}"
    assert ("judging.py" in told) == ("Error: " in message or "Exit: " in message)


async def test_a_judge_with_too_few_scores_fails_the_whole_call() -> None:
    class Lazy(FakeJudge):
        async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
            return (await super().judge(episodes))[:1]

    lazy = panel(Lazy())
    judged = await asyncio.gather(*(lazy.apply(trajectory(0.0), episode(str(m))) for m in range(2)))
    assert {error_of(j) for j in judged} == {"judge style: it gave 1 scores for 2 episodes"}


async def test_each_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    broken = panel(FakeJudge(lambda e: JudgeFailed("no opinion")))
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            await broken.apply(trajectory(0.0), episode(str(number)))
    told = [
        record.getMessage() for record in caplog.records if record.name == JudgePanel.__module__
    ]
    assert told == ["judge style: no opinion"]


def pipeline(*rewards: dict[str, Any]) -> Pipeline:
    return Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": 2,
            "evalSteps": 0,
            "envs": [{"tag": "A", "type": "frozen_lake"}],
            "rewards": list(rewards),
            "trainEnvs": {"groups": 1, "groupSize": 2, "tags": ["A"]},
        }
    )


@pytest.mark.parametrize(
    ("reward", "field", "message"),
    [
        (
            {"type": "applause"},
            "type",
            "no judge is called 'applause' .known: llm_judge, reward_model.*; write module:Class",
        ),
        ({"type": "nowhere:score"}, "type", "importing nowhere failed"),
        ({"type": "llm_judge", "config": {"url": "x"}}, "config", "no config key 'url'"),
        (
            {"type": "llm_judge", "config": {"baseUrl": "judge", "model": "m", "prompt": "?"}},
            "config",
            "does not begin with http",
        ),
        ({"type": "textwrap:dedent", "config": {"colour": 3}}, "config", "refuses its config"),
    ],
)
def test_a_judge_that_cannot_be_built_is_named_by_its_field(
    reward: dict[str, Any], field: str, message: str
) -> None:
    good = {"name": "good", "type": "builtins:len"}
    with pytest.raises(InvalidConfig, match=message) as caught:
        JudgePanel.of(pipeline(good, {"name": "bad", **reward}))
    assert caught.value.path == f"spec.pipeline.rewards[1].{field}"


async def test_a_judge_that_blocks_the_event_loop_is_named() -> None:
    def spin(e: JudgedEpisode) -> float:
        while True:
            pass

    with LoopWatch(4, 0.05):
        judged = await panel(FakeJudge(spin)).apply(trajectory(1.0), episode())
    assert "judge style: EventLoopBlocked: it did not await for 30 s" in error_of(judged)


async def test_judges_are_closed() -> None:
    closed: list[str] = []

    class Closes(FakeJudge):
        async def close(self) -> None:
            closed.append("async")

    class Fails(FakeJudge):
        def close(self) -> None:
            closed.append("sync")
            raise RuntimeError("no")

    judges = [(spec(name=n), j()) for n, j in (("a", Closes), ("b", Fails), ("c", FakeJudge))]
    await JudgePanel([*judges]).close()
    assert closed == ["async", "sync"]


async def test_closing_ends_calls_in_flight_and_those_that_wait_for_others() -> None:
    """A call that outlives its loop would end in another run of the process."""

    class Waits(FakeJudge):
        async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
            self.calls.append([episode.answer for episode in episodes])
            await asyncio.sleep(3600)
            raise AssertionError("unreachable")

    judge = Waits()
    judges = panel(judge, maxBatchSize=2)
    before = asyncio.all_tasks()
    waiting = [
        asyncio.create_task(judges.apply(trajectory(0.0, member=m), episode(f"answer {m}")))
        for m in range(3)
    ]
    while not judge.calls:
        await asyncio.sleep(0)
    await judges.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    await asyncio.sleep(0.02)  # longer than the window
    assert asyncio.all_tasks() == before
    assert len(judge.calls) == 1
