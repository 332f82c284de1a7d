"""`agenticrun debug`, as a user types it: one episode on this thread, printed call by call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app

OWN = """
import threading

import numpy as np

from agenticrun_workers.agents import ScoredSequence
from agenticrun_workers.envs import EnvironmentService, StepResult


class Own:
    instruction = "Say the word."

    def __init__(self, does=""):
        self.does = does

    def reset(self, seed, split):
        assert threading.current_thread() is threading.main_thread()
        self.seed = seed
        return f"hot {seed}"

    def step(self, action):
        if self.does == "raise":
            raise RuntimeError("the door is stuck")
        if self.does == "break":
            breakpoint()
        return StepResult("over", 1.5, action == "cold", metrics={
            "success": 1.0, "action_is_valid": float(action == "cold")})

    def vocabulary(self):
        return ["hot", "cold", "over", " ", *"0123456789"]


class Draws(Own):
    def valid_actions(self):
        return ["cold"]

    def render(self):
        return np.full((40, 40, 3), self.seed, np.uint8)


class Async(Draws):
    async def step(self, action):
        return super().step(action)


class Judge(EnvironmentService):
    async def reset(self, seed=None, options=None):
        return self.item["prompt"]

    async def step(self, action):
        qid, answers = action
        rewards = [float(answer == ["cold"]) for answer in answers]
        return None, rewards, True, False, {"judged": len(answers)}

    def vocabulary(self):
        return ["hot", "cold"]


class Asks:
    def __init__(self, gconfig, tokenizer):
        self.gconfig, self.tokenizer = gconfig.new(n=2), tokenizer

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await obs_queue.put((prompt.qid, prompt.token_ids, self.gconfig))
        bundle = await act_queue.get()
        decode = self.tokenizer.batch_decode
        answers = [decode([ids], skip_special_tokens=True) for ids in bundle.output_ids]
        _, rewards, *_ = await env.step((prompt.qid, answers))
        return [ScoredSequence(seq, reward) for seq, reward in zip(bundle.seqs, rewards)]
"""

RUN = """
apiVersion: agenticrun.dev/v1alpha1
kind: AgenticRun
metadata: {name: own}
spec:
  model: {initialize: {hiddenSize: 16, layers: 1, heads: 2, intermediateSize: 32}}
  pipeline:
    seed: 5
    maxSteps: 1
    rolloutBatchSize: 8
    evalSteps: 0
    sequenceLength: 128
    envs:
      - {tag: A, type: "own_debug:Own", maxSteps: 2, maxTokensPerStep: 3}
      - {tag: B, type: "own_debug:Draws", maxSteps: 2, maxTokensPerStep: 3,
         agent: {type: step_wise}}
    trainEnvs: {groups: 4, groupSize: 2, tags: [A, B]}
"""


SERVICE = (
    "pipeline.envs[0].type=own_debug:Judge",
    "pipeline.envs[0].agent={type: 'own_debug:Asks'}",
    "pipeline.envs[0].dataset={path: words.jsonl, valSplit: train}",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "so-long-a-name-that-a-line-with-a-path-is-wider-than-the-page"
    folder.mkdir()
    (folder / "own_debug.py").write_text(OWN)
    (folder / "run.yaml").write_text(RUN)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    yield folder
    sys.modules.pop("own_debug", None)


def debug(*arguments: str, typed: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["debug", "-f", "run.yaml", *arguments], input=typed)
    return result.exit_code, result.output


def test_every_call_of_the_episode_is_told_and_what_is_trained() -> None:
    code, output = debug("--policy", "human", "--seed", "7", typed="hot\ncold\n")
    assert code == 0
    assert "A: own_debug:Own, agent multi_turn, policy human, seed 7" in output
    turns = output.split("turn 1 ")[1]
    for told in (
        "<|system|>Say the word.<|end|><|user|>hot 7<|end|><|assistant|>",
        "action       'hot'",
        "reward       1.5\n",
        "metrics      success 1, action_is_valid 0",
        "observation  over",
        "4 tokens after",
        "reward       1.5, terminated",
        "stop reason  completed",
        "score        3",
        "«hot<|end|>»<|user|>over<|end|><|assistant|>«cold<|end|>»",
        "4 of them trained, one sample",
    ):
        assert told in turns, told


def test_the_end_of_the_input_ends_the_episode_and_unknown_words_are_asked_again() -> None:
    code, output = debug("--policy", "human", typed="nowhere\n")
    assert code == 0
    assert "use only texts of the environment's vocabulary()" in output
    assert "stop reason  aborted" in output
    assert "an episode that ends with aborted is not trained on" in output


def test_random_play_is_the_same_for_the_same_seed_and_is_filmed(folder: Path) -> None:
    shown = [debug("--tag", "B", "--seed", "9", "--render", "b.gif") for _ in range(2)]
    assert shown[0] == shown[1]
    assert "b.gif: 2 images" in shown[0][1]
    assert "one sample per turn" in shown[0][1]
    with Image.open(folder / "b.gif") as film:
        assert film.format == "GIF"


def test_async_environments_play_too() -> None:
    assert (
        "reward       1.5, terminated"
        in debug("--tag", "B", "--set", "pipeline.envs[1].type=own_debug:Async")[1]
    )


def test_a_service_plays_with_its_agent_and_its_data_lies_beside_the_yaml(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "words.jsonl").write_text('{"prompt": "hot"}\n')
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    changes = [word for change in SERVICE for word in ("--set", change)]
    result = CliRunner().invoke(
        app, ["debug", "-f", "../run.yaml", "--policy", "human", *changes], input="hot\ncold\n"
    )
    assert result.exit_code == 0, result.output
    for told in (
        "<|user|>hot<|end|>",
        "[['hot'], ['cold']])",
        "reward       [0.0, 1.0], terminated",
        "info         {'judged': 2}",
    ):
        assert told in result.output, told
    first, second = result.output.split("end, trajectory")[1:]
    assert "score        0" in first
    assert "score        1" in second


def test_the_model_of_the_run_answers() -> None:
    code, output = debug("--policy", "model", "--seed", "1")
    assert code == 0
    assert "random weights; the run's warm-up is not part of `agenticrun debug`" in output
    assert "stop reason  max_turns" in output
    assert output == debug("--policy", "model", "--seed", "1")[1]


def test_what_the_environment_raises_is_shown_with_its_traceback(folder: Path) -> None:
    code, output = debug("--tag", "B", "--set", "pipeline.envs[1].config.does=raise")
    assert code == 0
    assert f'File "{folder / "own_debug.py"}", line' in output
    assert "error        RuntimeError: the door is stuck (own_debug.py:" in output
    assert "stop reason  env_error" in output


def test_a_breakpoint_opens_the_debugger_here() -> None:
    arguments = [
        "debug",
        "-f",
        "run.yaml",
        "--tag",
        "B",
        "--set",
        "pipeline.envs[1].config.does=break",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"
    }  # Ray sets it where it runs
    ended = subprocess.run(
        [sys.executable, "-m", "agenticrun_workers.cli", *arguments],
        env=environment,
        input="p 'seed', self.seed\ncontinue\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "(Pdb) ('seed', " in ended.stdout
    assert "stop reason  completed" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tag", "C"), "has no environment 'C'; it has A, B"),
        ((), "Own has no valid_actions(), which a random policy needs"),
        (("--render", "a.gif"), "Own has no render(): leave out --render"),
        (("--set", "pipeline.envs[0].config.size=3"), "has no config key 'size'"),
        (("--policy", "model", "--model", "./nowhere"), "./nowhere"),
    ],
)
def test_what_cannot_be_played_is_told(arguments: tuple[str, ...], message: str) -> None:
    code, output = debug(*arguments)
    assert (code, message in output) == (ExitCode.INVALID_CONFIG, True), output
