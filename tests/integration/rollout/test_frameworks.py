"""The examples of agent frameworks: the real framework trains a model for one step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agenticrun_workers.types import GenerationRequest
from outside_agents import CHAT, Says, check_token_for_token, play
from preloaded import executable

EXAMPLES = Path(__file__).parents[3] / "examples"
CHANGES: dict[str, Any] = {
    "maxSteps": 1,
    "warmup.steps": 1,
    "rolloutBatchSize": 4,
    "trainEnvs": "{groups: 1, groupSize: 4, tags: [Sums]}",
    "valEnvs": "{groups: 1, tags: [Sums]}",
    "valBatchSize": 1,
    "actorTrain.training.miniBatchSize": 4,
}
"""Changes of `spec.pipeline` that make one short step of an example."""


def test_openai_agents_trains_with_a_tool_structured_output_and_streams(
    tmp_path: Path,
) -> None:
    """A model that has learned nothing leaves the format of its answers, so they have drafts."""
    example = EXAMPLES / "openai-agents"
    command = [*executable(), "-m", "agenticrun_workers.cli", "run", "--in-process"]
    command += ["-f", str(example / "agenticrun.yaml"), "-o", str(tmp_path / "out")]
    command += [
        word
        for name, value in CHANGES.items()
        for word in ("--set", f"spec.pipeline.{name}={value}")
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(example), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "system/tps" in line]
    assert step["stop/completed"] == 1, step
    assert step["engine/logprob_gap"] < 1e-4
    assert "/v1/responses" in (tmp_path / "out/run.log").read_text()
    assert "not valid" in (tmp_path / "out/samples/step-1.txt").read_text()


def test_a_graph_of_langgraph_works_with_a_tool_and_answers_as_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LangGraph has an environment of its own, which uv makes and keeps in its cache."""
    example = EXAMPLES / "langgraph"
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv is not None, "uv is a dependency of the extra dev: run make setup"
    python = [uv, "run", "--quiet", "--no-project", "--python", sys.executable]
    python += ["--with-requirements", str(example / "requirements.txt"), "python"]
    made = subprocess.run([*python, "-c", "import langgraph"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    monkeypatch.setenv("PYTHONPATH", str(example))

    def says(request: GenerationRequest) -> str:
        prompt = CHAT.shown(request.prompt_tokens)
        if "Give the total" in prompt:
            return '{"total": 2}'
        if "<tool_response>" in prompt:
            return "It is 2."
        return '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'

    policy = Says(says)
    trajectories = play(policy, command=[*python, "-m", "graph"], reward="environment")
    assert [trajectory.error for trajectory in trajectories] == ["", ""]
    check_token_for_token(trajectories, policy.asked)
    worked, answered = trajectories
    assert "<tool_response>\n2\n</tool_response>" in CHAT.shown(worked.tokens_T)
    assert [turn.action for turn in answered.turns] == ['{"total": 2}']
    assert worked.score == answered.score == pytest.approx(len('{"total": 2}') / 10)
