"""The example's own environment keeps the promises of the protocol."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import load_run
from agenticrun_workers.envs import make_env
from agenticrun_workers.types import Stream

FOLDER = Path(__file__).parents[3] / "examples/opposites"


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Made as the run makes it: by module and class, with the config of the YAML."""
    monkeypatch.syspath_prepend(str(FOLDER))
    (spec,) = load_run(FOLDER / "agenticrun.yaml").spec.pipeline.envs
    yield make_env(spec.type, spec.config)
    del sys.modules["opposites"]


def episode(env: Any, seed: int, split: Stream) -> list[str]:
    """Observations of an episode answered with the first valid action."""
    shown = [env.reset(seed, split)]
    while not (result := env.step(env.valid_actions()[0])).terminated:
        shown.append(result.observation)
    return shown


def test_an_episode_depends_on_seed_and_split_only(env: Any) -> None:
    assert episode(env, 7, Stream.TRAIN) == episode(env, 7, Stream.TRAIN)


def test_training_and_validation_share_no_level(env: Any) -> None:
    levels = {
        split: {tuple(episode(env, seed, split)) for seed in range(300)}
        for split in (Stream.TRAIN, Stream.VALIDATION)
    }
    assert not levels[Stream.TRAIN] & levels[Stream.VALIDATION]


def test_answering_with_the_opposites_earns_one(env: Any) -> None:
    opposites = dict(zip(env.valid_actions()[::2], env.valid_actions()[1::2], strict=True))
    opposites |= {answer: word for word, answer in opposites.items()}
    word, total, success = env.reset(3, Stream.TRAIN), 0.0, 0.0
    for _ in range(4):
        result = env.step(opposites[str(word)])
        word, total, success = result.observation, total + result.reward, result.metrics["success"]
    assert (total, success, result.terminated) == (1.0, 1.0, True)
