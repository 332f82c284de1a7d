"""Check docs/math.md and docs/agents.md.

Their code is in the examples, or runs as printed; their YAML is valid.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from agenticrun_api import load_run
from agenticrun_api.environments import EnvSpec
from agenticrun_workers.agents import AgentLimits, ChatFormat, Episode, make_agent
from agenticrun_workers.envs import MathEnv, MathSingleStep, make_env
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    Stream,
    Trajectory,
)

ROOT = Path(__file__).parents[3]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("math", "agents")}
GUIDE = ROOT / "examples/math/guide.py"
SPEC = load_run(ROOT / "examples/math/agenticrun.yaml").spec

SAID = (
    "Congratulations! You are correct!",
    "Unfortunately your answer is wrong. Let's try again.",
    "Can you do better?",
)
WORDS = [*map(str, range(11)), "+", "=", "\n", *(word for text in SAID for word in words_of(text))]
TOKENIZER = build_task_tokenizer(WORDS, 1000)
CHAT = ChatFormat(TOKENIZER)
LIMITS = AgentLimits(max_turns=4, max_tokens_per_step=4, sequence_length=200)
EPISODE = Episode(
    EpisodeKey(Stream.TRAIN, 0, 0), "Math", 1, 2, {"question": "3+4=", "answer": "#### 7"}
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "text"), [(page, text) for page in PAGES for text in blocks(page, "yaml")]
)
def test_the_yaml_of_the_pages_is_valid(page: str, text: str) -> None:
    for env in yaml.safe_load(text)["envs"]:
        spec = EnvSpec.model_validate(env)
        if ":" not in spec.type:
            make_env(spec.type, spec.config)
        if ":" not in spec.agent.type:
            make_agent(spec.agent.type, spec.agent.config, tokenizer=TOKENIZER, limits=LIMITS)


class Says:
    """A policy of these answers."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    async def __call__(self, request: GenerationRequest) -> Generation:
        tokens = CHAT.answer(self.answers.pop(0))
        return Generation(
            tokens,
            np.zeros(len(tokens), np.float32),
            np.zeros(len(tokens), np.int32),
            FinishReason.STOP,
        )


def play(type: str, env: Any, policy: Says, **config: Any) -> list[Trajectory]:
    agent = make_agent(type, config, tokenizer=TOKENIZER, limits=LIMITS)
    made = asyncio.run(agent.collect_trajectory(EPISODE, env, policy))
    return [made] if isinstance(made, Trajectory) else list(made)


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The modules of the pages, as `spec.code` puts them on the path."""
    for text in blocks("agents", "python"):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None
        (tmp_path / name[1]).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(GUIDE.parent))
    before: dict[str, ModuleType] = dict(sys.modules)
    yield
    for module in set(sys.modules) - set(before):
        if module in ("best_of", "one_word", "guide"):
            del sys.modules[module]


@pytest.mark.usefixtures("on_path")
def test_the_agent_and_the_environment_of_the_guide_play_together() -> None:
    first, second = play(
        "guide:MathMultiTurnAgent",
        make_env("guide:MathCodeSingleStepEnv", {}),
        Says("8", "7"),
        myParam=5.0,
    )
    assert [(t.score, t.metrics) for t in (first, second)] == [
        (0.0, {"success": 0.0}),
        (5.0, {"success": 1.0}),
    ]
    assert TOKENIZER.decode(second.tokens_T.tolist()) == (
        "<|user|>3+4=<|end|><|assistant|>8<|end|>\n"
        "<|user|>Unfortunately your answer is wrong. Let's try again.<|end|><|assistant|>7<|end|>"
    )
    registered = play("math-multi-turn", make_env("math-code-single-step", {}), Says("7", "7"))
    assert [t.score for t in registered] == [1.0, 1.0]


@pytest.mark.usefixtures("on_path")
def test_the_agent_with_queues_makes_a_trajectory_of_each_sample() -> None:
    env = MathSingleStep(instruction="")
    made = play("best_of:BestOf", env, Says("1", "7", "2", "7", "4"), gconfig={"n": 3}, bonus=0.5)
    assert [t.score for t in made] == [0.5, 1.5, 0.5, 1.5, 0.5]
    assert [len(t.turns) for t in made] == [1, 1, 1, 2, 2]
    assert TOKENIZER.decode(made[3].tokens_T.tolist()).endswith(
        "<|assistant|>7<|end|><|user|>Can you do better?<|end|><|assistant|>7<|end|>"
    )


@pytest.mark.usefixtures("on_path")
def test_the_agent_by_hand_plays_an_episode() -> None:
    (trajectory,) = play("one_word:OneWord", MathEnv(instruction=""), Says("7"))
    assert (trajectory.score, trajectory.stop_reason, trajectory.metrics["success"]) == (
        1.0,
        "completed",
        1.0,
    )


def test_the_words_of_the_example_are_those_of_its_data() -> None:
    assert SPEC.model.initialize is not None
    (env,) = SPEC.pipeline.envs
    items = [
        yaml.safe_load(line) for line in (GUIDE.parent / "sums.jsonl").read_text().splitlines()
    ]
    answers = {item["answer"].rpartition("#### ")[2] for item in items}
    assert answers == set(env.config["randomAnswers"])
    build_task_tokenizer(SPEC.model.initialize.words, 100).encode(
        "".join(item["question"] for item in items)
    )
