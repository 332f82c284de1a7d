"""The parts of the Megatron trainer that need no other process.

Scores, pieces, options, and the models that it refuses. Tests import what imports Megatron-Core: at
the top, each process of `make test` would spend seconds on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.trainer.megatron.architecture import Architecture, padded_vocabulary
from agenticrun_workers.trainer.megatron.options import OWNED, MegatronOptions
from agenticrun_workers.trainer.ranks import join_alone

SHAPE: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 2,
}
LAYER_PARAMETERS = [
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process; an earlier test may have made it."""
    made = not dist.is_initialized()
    if made:
        join_alone(torch.device("cpu"))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if made:
        dist.destroy_process_group()


def inputs(tokens: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(tokens, 5, dtype=torch.float64),
        torch.randn(11, 5, dtype=torch.float64),
    )
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(11, (tokens,))


def test_scores_are_log_softmax_and_its_entropy(group: dist.ProcessGroup) -> None:
    from agenticrun_workers.trainer.megatron import model

    hidden_NH, weight_VH, targets_N = inputs()
    logprobs_N, entropies_N = model.score(hidden_NH, weight_VH, targets_N, 0, 0.7, group)
    distribution = torch.distributions.Categorical(logits=hidden_NH @ weight_VH.T / 0.7)
    torch.testing.assert_close(logprobs_N, distribution.log_prob(targets_N))
    torch.testing.assert_close(entropies_N, distribution.entropy())


@pytest.mark.parametrize("chunk", [3 * 11, 10**6], ids=["chunks of three tokens", "one chunk"])
def test_gradients_of_scores_are_those_of_finite_differences(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    from agenticrun_workers.trainer.megatron import model

    monkeypatch.setattr(model, "CHUNK_ELEMENTS", chunk)
    hidden_NH, weight_VH, targets_N = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: model.score(h, w, targets_N, 0, 0.7, group),
        (hidden_NH, weight_VH),
    )


def test_no_token_has_no_score(group: dist.ProcessGroup) -> None:
    from agenticrun_workers.trainer.megatron import model

    hidden_NH, weight_VH, targets_N = inputs(0)
    logprobs_N, entropies_N = model.score(hidden_NH, weight_VH, targets_N, 0, 1.0, group)
    assert logprobs_N.shape == entropies_N.shape == (0,)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_the_pieces_of_all_ranks_cover_every_weight_of_the_model_once(
    tensor_size: int, tied: bool
) -> None:
    from agenticrun_workers.trainer.megatron.weights import LAYER, pieces_of

    model = Architecture.of(Qwen2Config(**{**SHAPE, "hidden_size": 16}, tie_word_embeddings=tied))
    names = [f"{LAYER}0.{part}" for part in LAYER_PARAMETERS]
    names += ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"] + [
        "output_layer.weight"
    ] * (not tied)
    covered: dict[str, Tensor] = {}
    for rank in range(tensor_size):
        for piece in (
            piece for name in names for piece in pieces_of(name, model, rank, tensor_size)
        ):
            counts = covered.setdefault(piece.name, torch.zeros(piece.shape))
            counts[piece.slices()] += 1 / tensor_size if piece.replicated else 1
    assert all(bool((counts == 1).all()) for counts in covered.values())
    assert len(covered) == 15 - tied


@given(tensor_size=st.sampled_from([1, 2, 4]), rank=st.integers(0, 3))
def test_queries_keys_and_values_lie_by_key_value_head(tensor_size: int, rank: int) -> None:
    """The reference is written out head by head, as Megatron's attention splits them."""
    from agenticrun_workers.trainer.megatron.weights import LAYER, pieces_of

    model = Architecture.of(LlamaConfig(**SHAPE))
    rank %= tensor_size
    heads = {"q": 8, "k": 4, "v": 4}
    whole = {
        letter: torch.arange(count * 16.0).view(count * 2, 8) + 1000 * count
        for letter, count in heads.items()
    }
    whole["v"] = -whole["v"]
    groups = [
        (
            whole["q"][g * 4 : g * 4 + 4],
            whole["k"][g * 2 : g * 2 + 2],
            whole["v"][g * 2 : g * 2 + 2],
        )
        for g in range(4)
    ]
    mine = groups[rank * 4 // tensor_size : (rank + 1) * 4 // tensor_size]
    expected = torch.cat([part for parts in mine for part in parts])
    local = torch.zeros_like(expected)
    for piece in pieces_of(f"{LAYER}0.self_attention.linear_qkv.weight", model, rank, tensor_size):
        tensor = whole[piece.name.split(".")[4][0]]
        piece.write(local, tensor[piece.slices()])
        assert torch.equal(piece.read(expected), tensor[piece.slices()])
    assert torch.equal(local, expected)


@given(st.integers(1, 50), st.integers(1, 8))
def test_every_rank_has_as_many_rows_of_the_vocabulary(vocabulary: int, tensor_size: int) -> None:
    from agenticrun_workers.trainer.megatron.weights import pieces_of

    model = Architecture.of(LlamaConfig(**{**SHAPE, "vocab_size": vocabulary}, pad_token_id=None))
    assert padded_vocabulary(model, tensor_size) % tensor_size == 0
    rows = [
        pieces_of("output_layer.weight", model, rank, tensor_size)[0].sizes[0]
        for rank in range(tensor_size)
    ]
    assert sum(rows) == vocabulary
    assert max(rows) * tensor_size == padded_vocabulary(model, tensor_size)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen3MoeConfig(), "not qwen3_moe"),
        (MistralConfig(), "not mistral"),
        (LlamaConfig(**SHAPE, attention_bias=True), "attention_bias"),
        (LlamaConfig(**SHAPE, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), "hidden_act gelu"),
        (
            Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=0),
            "sliding-window",
        ),
        (
            Qwen3Config(
                **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "not dynamic",
        ),
    ],
)
def test_models_that_would_be_computed_differently_are_refused(
    config: PretrainedConfig, message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Architecture.of(config)


@pytest.mark.parametrize("name", sorted(OWNED))
def test_options_that_something_else_decides_are_refused_with_what_decides_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"strategy.config.{name} is decided by {OWNED[name]}"):
        MegatronOptions.parse({name: 1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size is not offered for megatron; "
            "there are .*tensor_model_parallel_size",
        ),
        ({"num_moe_experts": 8}, "num_moe_experts is not offered"),
        ({"pipeline_model_parallel_size": 0}, "whole number from 1, not 0"),
        ({"context_parallel_size": "2"}, "whole number from 1, not '2'"),
        (
            {"sequence_parallel": True},
            "sequence_parallel needs a tensor_model_parallel_size above 1",
        ),
    ],
)
def test_wrong_options_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronOptions.parse(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "3 must divide the model's 8 attention heads"),
        ({"tensor_model_parallel_size": 8}, "8 must divide the model's 4 key-value heads"),
        ({"pipeline_model_parallel_size": 2}, "2 must divide the model's 5 layers"),
        ({"pipeline_model_parallel_size": 6}, "6 must divide the model's 5 layers"),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 5},
            "2 must divide the model's 5 layers",
        ),
        (
            {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 2},
            "3 must divide the model's 5 layers",
        ),
    ],
)
def test_sizes_that_a_model_cannot_be_cut_into_are_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Architecture.of(LlamaConfig(**{**SHAPE, "num_hidden_layers": 5})).check_divisible(
            MegatronOptions.parse(config)
        )


def test_the_ends_of_a_pipeline_may_have_fewer_layers() -> None:
    options = MegatronOptions.parse(
        {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 1}
    )
    Architecture.of(LlamaConfig(**{**SHAPE, "num_hidden_layers": 5})).check_divisible(options)


def test_options_go_to_the_part_of_megatron_that_knows_them() -> None:
    options = MegatronOptions.parse(
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
        }
    )
    assert (
        options.tensor,
        options.pipeline,
        options.context,
        options.model_ranks,
        options.row_multiple,
    ) == (2, 1, 1, 2, 2)
    assert options.transformer == {"sequence_parallel": True}
    assert options.data_parallel == {"use_distributed_optimizer": True}


def test_parked_tensors_have_no_memory_and_come_back_as_views_of_one_another() -> None:
    from agenticrun_workers.trainer.megatron.strategy import Parked

    whole = torch.arange(6.0)
    view = whole[2:4]
    parked = Parked()
    for added in (0, 5, 5):
        view += added
        parked.park([whole, view])
        assert whole.untyped_storage().nbytes() == 0
        parked.restore()
        parked.restore()
        assert whole.tolist()[:2] == [0, 1]
    assert whole.tolist() == [0, 1, 12, 13, 4, 5]
