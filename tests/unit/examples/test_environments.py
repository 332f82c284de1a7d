"""Examples start as they stand.

Random valid answers fit the limits of the YAML, or every episode could overflow. Examples with
packages of their own name each of them, and the commands to type.
"""

from __future__ import annotations

import ast
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest

from agenticrun_api import load_run
from agenticrun_workers.cli.local_code import find_local_code
from agenticrun_workers.cli.package import required_names
from agenticrun_workers.envs import HasVocabulary, StepResult, make_env
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.types import Stream

EXAMPLES = Path(__file__).parents[3] / "examples"
CHAT_TOKENS = 4
"""Around a message and its answer: roles and ends of turns."""


@pytest.mark.parametrize("name", ["sokoban", "webshop", "gymnasium", "python-tool", "mixed"])
def test_answers_and_episodes_fit(name: str) -> None:
    pipeline = load_run(EXAMPLES / f"{name}.yaml").spec.pipeline
    for spec in pipeline.envs:
        env = make_env(spec.type, spec.config)
        assert isinstance(env, HasVocabulary)
        tokenizer = build_task_tokenizer([*env.vocabulary(), *words_of(env.instruction)], 4096)
        rng = np.random.default_rng(0)
        for seed in range(5):
            observation, length = env.reset(seed, Stream.TRAIN), 0
            for _ in range(spec.max_steps):
                actions = env.valid_actions()
                assert isinstance(actions, list)
                answer = str(rng.choice(actions))
                prompt, answered = (
                    len(tokenizer.encode(str(observation))),
                    len(tokenizer.encode(answer)),
                )
                assert answered + 1 <= spec.max_tokens_per_step, answer
                turn = prompt + answered + CHAT_TOKENS
                length = turn if spec.agent.type == "step_wise" else length + turn
                assert length <= pipeline.sequence_length
                result = env.step(answer)
                assert isinstance(result, StepResult)
                if result.terminated:
                    break
                observation = result.observation


WITH_PACKAGES = sorted(
    file
    for requirements in EXAMPLES.glob("*/requirements.txt")
    for file in requirements.parent.glob("*.yaml")
)


MODULES = {"mini-swe-agent": "minisweagent", "pydantic-ai-slim[openai]": "pydantic_ai"}
"""Distributions whose module has another name, which nothing says before they are installed."""


@pytest.mark.parametrize("file", WITH_PACKAGES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_an_example_with_packages_names_them_and_the_commands_to_type(file: Path) -> None:
    run = load_run(file)
    name, folder = run.metadata.name, f"examples/{file.parent.name}"
    assert run.spec.code is not None
    assert run.spec.code.config_map == name
    assert run.spec.code.pip is not None
    assert run.spec.code.pip.requirements_file == "requirements.txt"
    lines = (file.parent / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines)
    for package, pin in pins.items():
        try:
            assert version(package) == pin
        except PackageNotFoundError:  # tests/integration/rollout installs and imports it
            assert re.fullmatch(r"[\d.]+", pin)
    code = find_local_code(run, file.parent, required_names("\n".join(lines)))
    assert code.not_in_image.keys() <= {MODULES[package] for package in pins if package in MODULES}
    assert re.findall(r"^#  +((?:pip|agenticrun|kubectl) .*)$", file.read_text(), re.MULTILINE) == [
        f"pip install -r {folder}/requirements.txt",
        f"agenticrun run -f {folder}/{file.name}",
        f"agenticrun package -f {folder}/{file.name}",
        f"kubectl apply --server-side -f {name}-code.yaml",
        f"kubectl apply -f {folder}/{file.name}",
        f"agenticrun watch {name}",
    ]


def test_the_table_of_frameworks_counts_the_lines_of_play() -> None:
    page = (EXAMPLES.parent / "docs/outside-agents.md").read_text()
    rows = re.findall(r"^\| .* \| \[.*\]\(\.\./examples/([\w-]+)\) \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) >= 6
    for name, lines in rows:
        functions = (
            node
            for file in (EXAMPLES / name).glob("*.py")
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "play"
        )
        (play,) = functions
        assert play.end_lineno is not None
        assert play.end_lineno - play.lineno + 1 == int(lines), name
