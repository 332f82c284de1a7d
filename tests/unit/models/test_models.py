"""Tiny models and task tokenizers as normal Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma2Config

from agenticrun_workers.envs import FrozenLake
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.heads import UnsupportedModel, split_model
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.pretrained import ModelLoadError, load_model
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.models.tokenizer import (
    build_task_tokenizer,
    load_tokenizer,
    words_of,
)
from agenticrun_workers.trainer.modules import ValueModule
from agenticrun_workers.types import Stream

WORDS = ("P", "_", "O", "G", "\n", "Left", "Down", "Right", "Up")
TINY: dict[str, Any] = {"words": WORDS, "hidden_size": 16, "intermediate_size": 32, "heads": 2}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_folder_loads_with_transformers_own_auto_classes(
    tmp_path: Path, architecture: str
) -> None:
    initialize_model(tmp_path, InitializeSpec(architecture=architecture, **TINY))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "P_\n_G"}], add_generation_prompt=True
    )["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|user|>",
        "P",
        "_",
        "\n",
        "_",
        "G",
        "<|end|>",
        "<|assistant|>",
    ]
    assert model(torch.tensor([ids])).logits.shape == (1, 8, len(tokenizer))
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_same_spec_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        initialize_model(tmp_path / name, InitializeSpec(seed=seed, **TINY))
    a, b, c = (load_model(str(tmp_path / name)).state_dict() for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_making_a_model_leaves_the_global_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    initialize_model(tmp_path, InitializeSpec(**TINY))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt5"}, "architecture"),
        ({"heads": 3}, "heads"),
        ({"key_value_heads": 3}, "keyValueHeads"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        initialize_model(tmp_path, InitializeSpec(**{**TINY, **change}))


@given(st.lists(st.sampled_from(WORDS)))
def test_text_made_of_words_survives_encoding_and_decoding(words: list[str]) -> None:
    tokenizer = build_task_tokenizer(WORDS, 100)
    text = "".join(words)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids) == words


@pytest.mark.parametrize("text", ["Pig", "P O", "?"])
def test_text_with_an_unknown_piece_is_an_error_and_never_an_unknown_token(text: str) -> None:
    with pytest.raises(Exception, match="Missing"):
        build_task_tokenizer(WORDS, 100).encode(text)


def test_tools_calls_and_results_are_written_in_few_words() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
    add: dict[str, Any] = {"name": "add", "parameters": parameters}
    now: dict[str, Any] = {"name": "now"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    tools = [{"type": "function", "function": each} for each in (add, now)]
    assert build_task_tokenizer(["a"], 100).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    ) == (
        "<|system|>add(a, b)\nnow()\n<|end|><|user|>1 + 2<|end|>"
        '<|assistant|><tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        "<|end|><|user|>3<|end|><|assistant|>"
    )


def test_every_text_of_frozen_lake_is_covered_by_its_vocabulary() -> None:
    env = FrozenLake(size=5)
    tokenizer = build_task_tokenizer([*env.vocabulary(), *words_of(env.instruction)], 100)
    assert tokenizer.decode(tokenizer.encode(env.instruction)) == env.instruction
    for seed in range(50):
        texts = [
            env.reset(seed, Stream.TRAIN),
            *(env.step(a).observation for a in ("Right", "Down", "Down", "Right")),
        ]
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


@pytest.mark.parametrize("size", [2, 4, 5])
def test_with_words_of_rows_every_row_during_an_episode_is_one_token(size: int) -> None:
    env = FrozenLake(size=size, words="rows")
    tokenizer = build_task_tokenizer(env.vocabulary(), 100)
    for seed in range(100):
        result, text = None, env.reset(seed, Stream.TRAIN)
        for action in np.random.default_rng(seed).choice(env.actions, 12):
            tokens = tokenizer.encode(text)
            assert tokenizer.decode(tokens) == text
            if result is None or not result.terminated:
                assert len(tokens) == size
            result = env.step(str(action))
            text = result.observation
            if result.terminated:
                break


def test_words_of_a_text_join_to_the_text() -> None:
    assert words_of("Go on, go.\n") == ["Go", " on", ",", " go", ".", "\n"]


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_model(str(tmp_path))
    with pytest.raises(InvalidConfig, match=str(tmp_path)):
        load_tokenizer(TokenizerSource(str(tmp_path)))


def test_damaged_files_are_told_as_what_they_are(tmp_path: Path) -> None:
    initialize_model(tmp_path, InitializeSpec(("a", "b"), hidden_size=16, heads=2, layers=1))
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=f"no tokenizer could be loaded from {tmp_path}"):
        load_tokenizer(TokenizerSource(str(tmp_path)))


def test_a_tokenizer_without_chat_template_is_refused(tmp_path: Path) -> None:
    tokenizer = build_task_tokenizer(WORDS, 100)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="chat template"):
        load_tokenizer(TokenizerSource(str(tmp_path)))


def tiny_gemma2(soft_capping: float | None) -> Any:
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=soft_capping,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("soft_capping", [0.01, 30.0, 1000.0])
def test_soft_capping_is_found_although_it_hardly_changes_small_logits(soft_capping: float) -> None:
    model = tiny_gemma2(soft_capping)
    with pytest.raises(UnsupportedModel, match="soft-capping"):
        split_model(model)
    with pytest.raises(UnsupportedModel, match="soft-capping"):
        split_model(model.bfloat16())
    split_model(tiny_gemma2(None).bfloat16())


def test_a_layer_between_decoder_and_output_layer_is_refused() -> None:
    config = AutoConfig.for_model(
        "modernbert-decoder",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    with pytest.raises(UnsupportedModel, match="between its decoder and its output layer"):
        split_model(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_whose_tokens_see_later_ones_is_refused() -> None:
    config = AutoConfig.for_model(
        "bert-generation",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for use in (split_model, lambda model: ValueModule(model).check(torch.device("cpu"))):
        with pytest.raises(UnsupportedModel, match="attend to later ones"):
            use(model)
    config.is_decoder = True
    split_model(AutoModelForCausalLM.from_config(config).eval())
