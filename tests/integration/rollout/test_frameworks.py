"""The examples of agent frameworks: the real framework trains a model for one step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from agenticrun_api import load_run
from agenticrun_workers.types import GenerationRequest
from outside_agents import CHAT, Says, check_token_for_token, play
from preloaded import executable

EXAMPLES = Path(__file__).parents[3] / "examples"
LOG, SAMPLES = "run.log", "samples/step-1.txt"


@pytest.mark.parametrize(
    ("name", "module", "shown"),
    [
        ("langgraph", "langgraph", {LOG: "/v1/chat/completions"}),
        ("mini-swe-agent", "minisweagent", {LOG: "/v1/chat/completions"}),
        # A model that has learned nothing leaves the format of its answers, so they have drafts.
        ("openai-agents", "agents", {LOG: "/v1/responses", SAMPLES: "not valid"}),
        ("pydantic-ai", "pydantic_ai", {LOG: "/v1/chat/completions"}),
        ("smolagents", "smolagents", {LOG: "/v1/chat/completions"}),
    ],
)
def test_the_example_trains_a_step(
    name: str,
    module: str,
    shown: dict[str, str],
    tmp_path: Path,
) -> None:
    """A package that our environment does not have lies behind it, as `code.pip` installs it."""
    example = EXAMPLES / name
    (env,) = load_run(example / "agenticrun.yaml").spec.pipeline.envs
    path = [str(example), *filter(None, sys.path)]
    if find_spec(module) is None:
        python = uv_python(example / "requirements.txt")
        found = subprocess.run(
            [*python, "-W", "ignore", "-c", f"import {module}; print({module}.__path__[0])"],
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        path.append(str(Path(found.stdout.splitlines()[-1]).parent))
    changes = {
        "maxSteps": 1,
        "warmup.steps": 1,
        "warmup.batchSize": 2,
        "rolloutBatchSize": 4,
        "trainEnvs": f"{{groups: 1, groupSize: 4, tags: [{env.tag}]}}",
        "valEnvs": f"{{groups: 1, tags: [{env.tag}]}}",
        "valBatchSize": 1,
        "actorTrain.training.miniBatchSize": 4,
    }
    command = [*executable(), "-m", "agenticrun_workers.cli", "run", "--in-process"]
    command += ["-f", str(example / "agenticrun.yaml"), "-o", str(tmp_path / "out")]
    for field, value in changes.items():
        command += ["--set", f"spec.pipeline.{field}={value}"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "system/tps" in line]
    assert step["stop/completed"] == 1, step
    assert step["engine/logprob_gap"] < 1e-4
    for file, text in shown.items():
        assert text in (tmp_path / "out" / file).read_text()


def uv_python(requirements: Path) -> list[str]:
    """The command that runs Python in an environment of these packages, which uv caches."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv is not None, "uv is a dependency of the extra dev: run make setup"
    python = [uv, "run", "--quiet", "--no-project", "--python", sys.executable]
    return [*python, "--with-requirements", str(requirements), "python"]


PLAYS_THE_GRAPH = """
import asyncio, json, os
from types import SimpleNamespace
import graph
task = SimpleNamespace(**json.loads(os.environ["AGENTICRUN_TASK"]))
asyncio.run(graph.play(os.environ["OPENAI_BASE_URL"], task))
"""


def test_a_graph_of_langgraph_works_with_a_tool_and_answers_as_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LangGraph has an environment of its own, which uv makes and keeps in its cache."""
    example = EXAMPLES / "langgraph"
    python = uv_python(example / "requirements.txt")
    made = subprocess.run([*python, "-c", "import langgraph"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    monkeypatch.setenv("PYTHONPATH", str(example))
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    answer = '{"weather": "rain"}'

    def says(request: GenerationRequest) -> str:
        return answer if "<tool_response>" in CHAT.shown(request.prompt_tokens) else call

    policy = Says(says)
    program = [*python, "-c", PLAYS_THE_GRAPH]
    (trajectory,) = play(policy, command=program, reward="environment")
    assert trajectory.error == ""
    check_token_for_token([trajectory], policy.asked)
    assert [turn.action for turn in trajectory.turns] == [call, answer]
    assert re.search(
        "<tool_response>\n(sun|rain|snow)\n</tool_response>", CHAT.shown(trajectory.tokens_T)
    )
    assert trajectory.score == pytest.approx(len(answer) / 10)
