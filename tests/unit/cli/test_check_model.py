"""`agenticrun check-model`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from typer.testing import CliRunner

from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from byte_level import byte_level_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
RUN = """
apiVersion: agenticrun.dev/v1alpha1
kind: AgenticRun
metadata: {name: own}
spec:
  model: {path: MODEL, chatTemplateArgs: {enable_thinking: false}}
  checkpoint: {none: true}
  pipeline:
    maxSteps: 1
    rolloutBatchSize: 8
    evalSteps: 0
    envs: [{tag: A, type: frozen_lake}]
    trainEnvs: {groups: 2, groupSize: 4, tags: [A], partition: [2]}
"""


def model(folder: Path, config: PretrainedConfig | None = None, template: str = CHATML) -> Path:
    """Write config and tokenizer of a tiny model."""
    made = byte_level_tokenizer("system\nuser\nassistant\n", template)
    made.save_pretrained(folder)
    config = config or Qwen3Config(
        vocab_size=len(made), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def check(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-model", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_config_and_tokenizer_suffice(tmp_path: Path) -> None:
    code, said = check(model(tmp_path))
    assert code == 0, said
    for row in (
        "vocabulary ok",
        "family ok text",
        "two turns ok equal to the whole conversation",
        "system role ok yes",
        "tool calls - the template shows no tools",
        "stop tokens ok <|im_end|>",
        "special tokens ok <|im_start|>, <|im_end|>: one token each",
        "weights - no weights here",
        "tied embeddings ok",
        "engines ok transformers",
        "trainers ok fsdp2, deepspeed, megatron",
    ):
        assert row in said


def test_a_run_checks_its_own_template_and_arguments(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN.replace("MODEL", str(model(tmp_path / "model"))))
    assert check("-f", run)[0] == 0
    code, said = check("-f", run, "--set", "model.chatTemplateArgs={thinking: false}")
    assert code == 1
    assert "does not read it" in said


def test_a_template_that_cannot_work_fails(tmp_path: Path) -> None:
    hides = CHATML.replace("in messages", "in messages if m.role != 'assistant'")
    code, said = check(model(tmp_path, template=hides))
    assert code == 1
    assert "chat template FAILED" in said
    assert "does not write an assistant's message" in said


def test_delimiters_that_are_no_tokens_fail(tmp_path: Path) -> None:
    split = CHATML.replace("'<|im_start|>' + m.role", "'<|role|>' + m.role")
    code, said = check(model(tmp_path, template=split))
    assert code == 1
    assert "special tokens FAILED the template writes <|role|>" in said


def test_a_vocabulary_that_the_model_does_not_know_fails(tmp_path: Path) -> None:
    code, said = check(model(tmp_path, LlamaConfig(vocab_size=10)))
    assert code == 1
    assert "tokenizer FAILED" in said


def test_an_incomplete_index_fails(tmp_path: Path) -> None:
    folder = model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    code, said = check(folder)
    assert code == 1
    assert "weights FAILED" in said


def test_tied_embeddings_beside_an_output_layer_are_a_warning(tmp_path: Path) -> None:
    folder = model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}})
    )
    assert "tied embeddings warning" in check(folder)[1]


def test_a_model_of_a_type_that_is_not_offered_fails(tmp_path: Path) -> None:
    from transformers import T5Config

    code, said = check(model(tmp_path, T5Config(vocab_size=400)))
    assert code == 1
    assert "trainers FAILED" in said


@pytest.mark.parametrize("arguments", [[], ["model", "-f", "run.yaml"]])
def test_one_of_model_and_run_is_named(arguments: list[str], tmp_path: Path) -> None:
    assert check(*arguments)[0] == 2


def test_a_run_that_makes_its_model_has_nothing_to_check(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        RUN.replace("{path: MODEL, chatTemplateArgs: {enable_thinking: false}}", "{initialize: {}}")
    )
    code, said = check("-f", run)
    assert code == ExitCode.INVALID_CONFIG
    assert "initialize" in said
