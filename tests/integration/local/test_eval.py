"""`agenticrun export`, `eval` and `serve` as a user types them, on a real checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from agenticrun_api import parse_run
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.driver.checkpoints import CheckpointStore, DriverState
from agenticrun_workers.driver.export import first_model
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.strategies import build_strategy
from fake_hub import TOKEN, fake_hub
from module_savers import save_whole
from preloaded import environment, executable
from tiny_runs import tiny_document

SAMPLED = (
    "--set",
    "pipeline.eval={samples: 3, passAt: [1, 3], generating: {temperature: 1.0}}",
    "--set",
    "pipeline.deterministic=true",
)


class Trained:
    """A run, and a checkpoint of it whose weights differ from the first ones."""

    def __init__(self, folder: Path) -> None:
        document = tiny_document()
        del document["metadata"]["uid"]
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump(document))
        run = parse_run(document)
        self.strategy: PolicyTrainer = build_strategy(run.spec.pipeline, first_model(run))
        self.first = {name: weight.clone() for name, weight in self.strategy.export_weights()}
        tokens_T = np.arange(8, dtype=np.int32)
        weight_T = np.ones(8, np.float32)
        for _ in range(3):
            self.strategy.supervised_step(
                [Sample(tokens_T, weight_T, np.zeros(8, np.float32), np.zeros(8, np.int32))]
            )
        self.checkpoints = folder / "checkpoints"
        store = CheckpointStore(self.checkpoints, "local", 2)

        async def save(module: str) -> None:
            checkpoint.save(module, self.strategy.snapshot())

        for step in (2, 5):
            asyncio.run(save_whole(store, DriverState(step, 0, ()), {"actor_train": save}))

    def export(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of `agenticrun export`, in this process."""
        result = CliRunner().invoke(app, ["export", "-f", str(self.file), *arguments])
        return result.exit_code, result.output

    def command(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of an `agenticrun` command on the run's file.

        Its actors are preloaded processes.
        """
        command = [
            *executable(),
            "-m",
            "agenticrun_workers.cli",
            arguments[0],
            "-f",
            str(self.file),
            *arguments[1:],
        ]
        found = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment(),
            text=True,
            timeout=300,
        )
        return found.returncode, found.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def test_an_exported_folder_is_pushed_to_the_hub(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    options = ("--checkpoint", str(trained.checkpoints), "-o", str(tmp_path / "exported"))
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        code, output = trained.export(*options, "--push", "other/lake")
        assert (code, (tmp_path / "exported").exists()) == (1, False)
        assert "--push: " in output
        assert "403" in output
        code, output = trained.export(*options, "--push", "me/lake")
        assert code == 0, output
        assert hub.files["me/lake"].keys() >= {"config.json", "model.safetensors"}
        assert hub.messages == ["tiny: the policy after 5 steps"]


def test_a_checkpoint_and_an_exported_folder_are_served_alike(
    trained: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    trained.export("--checkpoint", str(trained.checkpoints), "-o", str(folder))
    greedy = {"prompt": [3, 1, 4], "max_tokens": 6, "temperature": 0}
    answers = []
    for arguments, name in (
        ((str(trained.checkpoints), "-f", str(trained.file)), "tiny"),
        ((str(folder), "--name", "lake"), "lake"),
    ):
        with served(*arguments) as url:
            answers.append(asked(f"{url}/completions", {"model": name, **greedy}))
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[0]["usage"]["prompt_tokens"] == 3


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run `agenticrun serve` at a free port. It ends well when it is asked to."""
    command = [*executable(), "-m", "agenticrun_workers.cli", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | environment(), text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().partition(" answers at ")[2].split()[0]
        finally:
            process.terminate()
        assert process.wait(30) == 0


def asked(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_an_exported_folder_holds_the_checkpoint_s_policy(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    code, output = trained.export("--checkpoint", str(trained.checkpoints), "-o", str(folder))
    assert (code, output) == (0, f"{folder}: the policy after 5 steps\n")
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    for name, weights in trained.strategy.export_weights():
        np.testing.assert_array_equal(loaded[name].detach().numpy(), weights.numpy())
    assert any((loaded[name].detach() != weights).any() for name, weights in trained.first.items())
    assert AutoTokenizer.from_pretrained(folder).chat_template
    code, output = trained.export("--checkpoint", str(trained.checkpoints), "-o", str(folder))
    assert code == 2
    assert "is not empty: choose a new folder" in output


def test_export_refuses_what_is_no_checkpoint_or_another_model_s(
    trained: Trained, tmp_path: Path
) -> None:
    code, output = trained.export("--checkpoint", str(tmp_path), "-o", str(tmp_path / "out"))
    assert code == ExitCode.INVALID_CONFIG
    assert f"{tmp_path} holds no complete checkpoint" in output
    other = ("--set", "model.initialize.layers=2")
    code, output = trained.export(
        "--checkpoint", str(trained.checkpoints), "-o", str(tmp_path / "out"), *other
    )
    assert code == ExitCode.INVALID_CONFIG
    assert "no such parameter" in output


def test_a_checkpoint_and_the_folder_exported_from_it_play_alike(
    trained: Trained, tmp_path: Path
) -> None:
    folder, first, second = tmp_path / "exported", tmp_path / "first.json", tmp_path / "second.json"
    code, output = trained.command(
        "export", "--checkpoint", str(trained.checkpoints / "step-2"), "-o", str(folder)
    )
    code, output = trained.command(
        "eval", "--checkpoint", str(trained.checkpoints), "--json", str(first), *SAMPLED
    )
    assert code == 0, output
    assert "pass@3" in output
    code, output = trained.command("eval", "--model", str(folder), "--json", str(second), *SAMPLED)
    assert code == 0, output
    figures: list[dict[str, Any]] = [
        json.loads(file.read_text())["tags"]["Lake"] for file in (first, second)
    ]
    assert figures[0] == figures[1]
    assert (figures[0]["levels"], figures[0]["episodes"]) == (8, 24)
    assert set(figures[0]["pass_at"]) == {"1", "3"}


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(
    trained: Trained, tmp_path: Path
) -> None:
    code, output = trained.command("eval", "--model", str(tmp_path / "nothing"))
    assert code == ExitCode.INVALID_CONFIG
    assert output.strip().startswith("spec.model.path: ")
    assert "nothing is no folder here" in output
    assert "Traceback" not in output


def test_random_weights_are_not_evaluated(trained: Trained) -> None:
    code, output = trained.command("eval")
    assert code == ExitCode.INVALID_CONFIG
    assert "spec.model.initialize: has random weights" in output
