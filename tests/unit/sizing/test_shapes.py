"""Shapes that plans compute with are those of the real models, sharded by the real FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PreTrainedModel

from agenticrun_workers.models.heads import decoder_of
from agenticrun_workers.models.pretrained import make_without_data
from agenticrun_workers.models.shape import check_experts, fsdp_units, read_shape
from agenticrun_workers.sizing.published import PUBLISHED, published_config
from agenticrun_workers.trainer.ranks import Ranks
from agenticrun_workers.trainer.sharded_module import FsdpOptions, shard

PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}
"""As their model cards say."""


@contextmanager
def rank_of(ranks: int, rank: int) -> Iterator[None]:
    """Be one rank of many; the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_all(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    units = fsdp_units(decoder_of(model), model.get_output_embeddings())
    for unit in (*units.layers, *units.ends, model):
        fully_shard(unit, mesh=mesh)


def test_every_published_shape_has_the_parameters_of_its_model() -> None:
    assert {name: read_shape(published_config(name)).parameters for name in PUBLISHED} == PARAMETERS


@pytest.mark.parametrize("last", [False, True], ids=["first rank", "last rank"])
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_local_sizes_are_those_of_fully_shard(name: str, ranks: int, last: bool) -> None:
    config = published_config(name)
    rank = ranks - 1 if last else 0
    with rank_of(ranks, rank):
        model = make_without_data(config, trust_remote_code=False)
        mesh = init_device_mesh("cpu", (ranks,))
        shard_all(model, mesh)
        real = {path: weight.to_local().numel() for path, weight in model.named_parameters()}
    shape = read_shape(config)
    assert {weight.name: weight.local(ranks, rank) for weight in shape.weights} == real
    assert shape.local(ranks) >= sum(real.values())


@pytest.mark.parametrize("last", [False, True], ids=["first rank", "last rank"])
@pytest.mark.parametrize(("ranks", "size"), [(8, 8), (16, 8), (16, 2)])
def test_local_sizes_of_divided_experts_are_those_of_the_trainer(
    ranks: int, size: int, last: bool
) -> None:
    config = published_config("Qwen/Qwen3-30B-A3B")
    rank = ranks - 1 if last else 0
    cpu = torch.device("cpu")
    with rank_of(ranks, rank):
        model = make_without_data(config, trust_remote_code=False)
        units = fsdp_units(decoder_of(model), model.get_output_embeddings())
        options = FsdpOptions(expert_parallel_size=size)
        parts = (*units.layers, *units.ends)
        shard(model, parts, Ranks(cpu), cpu, torch.bfloat16, options)
        real = {path: weight.to_local().numel() for path, weight in model.named_parameters()}
    weights = read_shape(config).weights
    assert {w.name: w.local(ranks, rank, expert_parallel=size) for w in weights} == real


@pytest.mark.parametrize(
    ("experts", "ranks", "copies", "size", "message"),
    [
        (5, 2, 1, 1, ""),
        (8, 8, 1, 8, ""),
        (8, 16, 2, 8, ""),
        (0, 8, 1, 1, ""),
        (0, 8, 1, 2, "the model has no experts: leave it out"),
        (3, 4, 1, 1, "3 experts of a layer cannot be spread over 4 ranks.*set fsdp_size to 2"),
        (6, 4, 1, 1, "6 experts of a layer cannot be spread over 4.*expert_parallel_size to 2"),
        (6, 4, 1, 4, "size 4 does not divide the 6 experts.*set expert_parallel_size to 2"),
        (8, 6, 1, 4, "size 4 does not divide the 6 ranks.*fsdp_size to 3, and leave"),
        (8, 8, 2, 8, "size 8 does not divide the 4 ranks that share a copy.* to 1 or 2 or 4"),
        (4, 16, 1, 2, r"the 2 experts \(4 / expert_parallel_size 2\) of a layer.*fsdp_size to 4"),
    ],
)
def test_ranks_that_would_get_no_expert_are_refused_with_the_remedy(
    experts: int, ranks: int, copies: int, size: int, message: str
) -> None:
    if not message:
        check_experts(experts, ranks, copies=copies, expert_parallel=size)
        return
    with pytest.raises(ValueError, match=message):
        check_experts(experts, ranks, copies=copies, expert_parallel=size)


def test_rows_that_do_not_divide_evenly_are_those_of_fully_shard() -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
    )
    for rank in range(7):
        with rank_of(7, rank):
            model = make_without_data(config, trust_remote_code=False)
            mesh = init_device_mesh("cpu", (7,))
            shard_all(model, mesh)
            real = {path: p.to_local().numel() for path, p in model.named_parameters()}
        weights = read_shape(config).weights
        assert {weight.name: weight.local(7, rank) for weight in weights} == real


def test_units_are_layers_embedding_output_layer_and_the_norm() -> None:
    shape = read_shape(published_config("Qwen/Qwen3-8B"))
    embedding = 151_936 * 4096
    assert shape.units[0] == "model.layers.0"
    assert shape.units[-3:] == ("model.embed_tokens", "lm_head", "root")
    assert len(shape.units) == 36 + 3
    assert (shape.embedding_unit, shape.head_units) == (embedding, embedding + 4096)
    assert shape.parameters == shape.embedding_unit + 36 * shape.largest_layer + shape.head_units


def test_a_tied_embedding_is_in_the_root() -> None:
    shape = read_shape(published_config("Qwen/Qwen2.5-0.5B-Instruct"))
    assert (shape.embedding_unit, shape.head_units) == (0, 151_936 * 896 + 896)
    assert len(shape.units) == 24 + 1
    assert shape.multiplied == shape.parameters


def test_a_token_uses_eight_of_the_128_experts() -> None:
    shape = read_shape(published_config("Qwen/Qwen3-30B-A3B"))
    assert round(shape.active_parameters / 1e9, 2) == 3.35
    assert (shape.experts, shape.experts_used, shape.mlp) == (128, 8, 8 * 768)


def test_adapters_are_those_of_peft() -> None:
    from agenticrun_workers.models.lora import LoraSpec, add_lora

    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=50,
    )
    shape = read_shape(config)
    for targets in ((), ("q_proj", "mlp.up_proj")):
        model = add_lora(
            make_without_data(config, trust_remote_code=False),
            LoraSpec(rank=4, target_modules=targets),
        )
        trained = sorted(
            tuple(weight.shape) for weight in model.parameters() if weight.requires_grad
        )
        assert sorted(weight.shape for weight in shape.adapters(4, targets)) == trained
