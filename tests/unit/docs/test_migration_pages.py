"""Check the pages about migration: their code runs, their fields exist, their figures add up."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from agenticrun_api.environments import EnvSpec
from agenticrun_workers.agents import AgentLimits, ChatFormat, Episode, make_agent
from agenticrun_workers.convert import convert
from agenticrun_workers.convert.converter import Composition
from agenticrun_workers.convert.fields import Fate
from agenticrun_workers.convert.outcome import ConvertExit, summary
from agenticrun_workers.envs import make_env
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
ROLL, FILES, AREAL = (
    (ROOT / page).read_text()
    for page in (
        "docs/migrate-from-roll.md",
        "benchmarks/results/roll-files.md",
        "docs/migrate-from-areal.md",
    )
)
FEEDBACK = "Unfortunately your answer is wrong. Let's try again."
TOKENIZER = build_task_tokenizer(
    [*map(str, range(10)), "+", "=", "\n", "/", *words_of(FEEDBACK)], 1000
)
CHAT = ChatFormat(TOKENIZER)
LIMITS = AgentLimits(max_turns=5, max_tokens_per_step=4, sequence_length=200)


def block(page: str, language: str, begins: str = "") -> str:
    found = re.findall(rf"^```{language}\n({re.escape(begins)}.*?)^```$", page, re.M | re.S)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The modules of the pages."""
    for page, name in ((ROLL, "gem_env"), (AREAL, "areal_guide")):
        (tmp_path / f"{name}.py").write_text(block(page, "python", f"# {name}.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("gem_env", "areal_guide"):
        sys.modules.pop(name, None)


class Says:
    """A policy of these answers."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    async def __call__(self, request: GenerationRequest) -> Generation:
        tokens = CHAT.answer(self.answers.pop(0))
        zeros = np.zeros(len(tokens))
        return Generation(
            tokens, zeros.astype(np.float32), zeros.astype(np.int32), FinishReason.STOP
        )


def play_the_guide(env: Any, item: dict[str, Any], *answers: str) -> list[Trajectory]:
    spec = EnvSpec.model_validate(yaml.safe_load(block(AREAL, "yaml"))["envs"][0])
    config = {**spec.agent.config, "gconfig": {}}
    agent = make_agent(spec.agent.type, config, tokenizer=TOKENIZER, limits=LIMITS)
    episode = Episode(EpisodeKey(Stream.TRAIN, 0, 0), "Math", 1, 2, item)
    played = asyncio.run(agent.collect_trajectory(episode, env, Says(*answers)))
    assert not isinstance(played, Trajectory)
    return list(played)


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    "answer", [{"answer": "3 + 4 = 7\n#### 7"}, {"solutions": ["\\boxed{8}", "\\boxed{7}"]}]
)
def test_areal_s_guide_looks_its_problem_up_by_the_prompt_s_id(answer: dict[str, Any]) -> None:
    spec = EnvSpec.model_validate(yaml.safe_load(block(AREAL, "yaml"))["envs"][0])
    env = make_env(spec.type, spec.config)
    item = {"prompt": "3+4=", **answer}
    wrong, right = play_the_guide(env, item, "9", "7")
    assert (wrong.score, right.score, wrong.error) == (0.0, 1.0, "")
    text = TOKENIZER.decode(right.tokens_T.tolist())
    assert text.startswith("<|user|>3+4=<|end|><|assistant|>9<|end|>")
    assert text.endswith(f"{FEEDBACK}<|end|><|assistant|>7<|end|>")


@pytest.mark.usefixtures("on_path")
def test_a_problem_without_an_answer_is_told() -> None:
    (lost,) = play_the_guide(
        make_env("areal_guide:MathCodeSingleStepEnv", {}), {"prompt": "3"}, "1"
    )
    assert "has neither answer nor solutions" in lost.error


@pytest.mark.usefixtures("on_path")
def test_an_id2info_of_one_s_own_wins() -> None:
    env = make_env("areal_guide:MathCodeSingleStepEnv", {})
    env.id2info = {"train-0-0": {"answer": "5"}}  # type: ignore[attr-defined]
    (right,) = play_the_guide(env, {"prompt": "3+4=", "answer": "7"}, "5")
    assert right.score == 1.0


class Stub:
    """Stands for what `gem.make` returns."""

    def __init__(self, id: str, **arguments: int) -> None:
        self.made = (id, arguments)
        self.seeds: list[int] = []

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.seeds.append(seed)
        return "guess", {"env_instruction": "Guess."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "right", 1.0, action == "7", False, {"metrics": {"success": 1.0}}


@pytest.mark.usefixtures("on_path")
def test_the_class_for_gem_plays_its_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    gem: Any = SimpleNamespace(make=Stub)
    monkeypatch.setitem(sys.modules, "gem", ModuleType("gem"))
    monkeypatch.setattr(sys.modules["gem"], "make", gem.make, raising=False)
    env: Any = make_env("gem_env:GemEnv", {"id": "game:GuessTheNumber-v0", "maxNumber": 9})
    assert env.env.made == ("game:GuessTheNumber-v0", {"max_number": 9})
    for seed in (1, 2**62):
        for split in ("train", "validation"):
            env.reset(seed, split)
    assert [seed % 2 for seed in env.env.seeds] == [0, 1, 0, 1]
    assert max(env.env.seeds) < 2**31
    assert env.step("7")[1:3] == (1.0, True)


def test_the_screen_of_the_page_is_the_command_s() -> None:
    groups = {"num_env_groups": 16, "group_size": 8, "num_groups_partition": [16]}
    config = {
        "pretrain": "Qwen/Qwen2.5-VL-7B-Instruct",
        "reward_clip": 20,
        "adv_estimator": "reinforce",
        "actor_train": {"training_args": {"learning_rate": 1.0e-6}},
        "actor_infer": {"generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": 0}},
        "custom_envs": {"Lake": {"env_type": "frozen_lake"}},
        "train_env_manager": {**groups, "tags": ["Lake"]},
    }
    conversion = convert(Composition(config, frozenset()), "x")
    assert "\n".join(summary(conversion, "roll.yaml")) in ROLL


def test_the_page_has_every_outcome_and_exit_code() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", ROLL, re.M)}
    assert codes == {int(code) for code in ConvertExit}
    for fate in Fate:
        assert f"| {fate.value.partition(':')[0]} |" in ROLL


def test_the_figures_of_roll_s_files_are_those_of_the_rows() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in FILES.splitlines()
        if re.match(r"\| \S+\.yaml \|", line)
    ]
    valid, steps = sum(row[1] == "yes" for row in rows), sum(row[2] != "no" for row in rows)
    ready, lines = sum(row[4] == "0" for row in rows), sum(int(row[3] or 0) for row in rows)
    undecided, unread = sum(row[4] == "3" for row in rows), sum(row[4] == "64" for row in rows)
    assert (
        f"{len(rows)} files: {valid} validate, {steps} train their first step, {ready} are ready, "
        f"{undecided} have lines to decide ({lines} lines), {unread} cannot be read."
    ) in FILES
    assert len(re.findall(r"^  - ", FILES, re.M)) == lines + unread
    assert f"each of the {len(rows)} agentic files" in ROLL


def test_the_fields_that_areal_s_settings_become_exist() -> None:
    schema = (ROOT / "crds/agenticruns.yaml").read_text()
    fields = set(re.findall(r"^ *(\w+):", schema, re.M)) | {"numTurns", "maxNewTokens"}
    known = {"collect_trajectory", "id2info"}
    right = " ".join(
        line.split("|")[2] for line in AREAL.splitlines() if line.startswith("|") and "`" in line
    )
    named = {
        word
        for code in re.findall(r"`([^`]+)`", right)
        for word in re.findall(r"\b[a-z]+[A-Z]\w*", code)
    }
    assert named - fields - known == set()
    assert len(named) > 40
