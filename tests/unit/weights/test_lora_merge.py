"""Nodes merge adapters into the trainer's whole weights, bit for bit, or refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.lora import Adapters, LoraSpec, add_lora, merge, whole_weights
from agenticrun_workers.models.pretrained import load_model, write_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.weights.buckets import (
    CorruptBucket,
    MergePlan,
    SafetensorsReader,
    WeightFile,
    buckets_of,
)
from agenticrun_workers.weights.export import BucketWriter, tensor_specs
from agenticrun_workers.weights.lora_merge import AdapterMerger, plan_merge
from agenticrun_workers.weights.node import AdapterNode

FILE = "model.safetensors"
LORA = LoraSpec(rank=3, alpha=6.0)
SIZES = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1}
CONFIGS = {
    "llama": LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_bias=True,
        **SIZES,
    ),
    "tied": LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        **SIZES,
    ),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, **SIZES),
}
BUCKET_BYTES = 4096
CLOSE = 1e-5
"""For sums in float32; inputs in bfloat16 are exact in it."""

Weights = dict[str, Tensor]
Edit = Callable[[Weights], Weights]


def written(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Write a model into `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype)
    write_model(folder, model, dict(model.named_parameters()))
    return folder


def trained(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 7) -> PreTrainedModel:
    """Load a model with nonzero adapters, all of it in `dtype`."""
    model = add_lora(load_model(str(folder), torch.promote_types(dtype, torch.float32)), LORA).to(
        dtype
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def as_it_is(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.detach()


def adapters_of(model: PreTrainedModel, rank: int = 0) -> Adapters:
    found = Adapters.of(model, as_it_is, rank)
    assert found is not None
    return found


def described(model: PreTrainedModel, folder: Path, served: str = "float32") -> MergePlan:
    found = plan_merge(adapters_of(model), ModelSource(str(folder), dtype=served))
    assert isinstance(found, MergePlan), found
    return found


def edit(folder: Path, change: Edit) -> Path:
    save_file(change(load_file(folder / FILE)), folder / FILE, {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("stored", "held"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float64"),
    ],
)
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_merged_weights_are_the_trainers_bit_for_bit(
    tmp_path: Path, kind: str, stored: str, held: str, served: str
) -> None:
    """DeepSpeed holds bfloat16, FSDP2 float32 masters."""
    folder = written(tmp_path, kind, getattr(torch, stored))
    model = trained(folder, getattr(torch, held))
    expected = {
        name: value.to(getattr(torch, served)) for name, value in whole_weights(model, as_it_is)
    }
    found = dict(
        AdapterMerger(described(model, folder, served), str(folder)).weights(
            dict(adapters_of(model).weights())
        )
    )
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    plain = {
        name: value.to(getattr(torch, held))
        for name, value in load_model(str(folder)).named_parameters()
    }
    changed = {
        name for name, value in found.items() if not torch.equal(value, plain[name].to(value.dtype))
    }
    assert len(changed) == {"llama": 14, "tied": 14, "gpt2": 8}[kind]


def test_adapters_are_small_and_come_from_the_first_rank_alone(tmp_path: Path) -> None:
    model = trained(written(tmp_path))
    weights = dict(adapters_of(model).weights())
    assert sorted(weights)[:2] == [
        "model.layers.0.mlp.down_proj.lora_A.weight",
        "model.layers.0.mlp.down_proj.lora_B.weight",
    ]
    assert sum(value.numel() for value in weights.values()) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    other = adapters_of(model, rank=1)
    assert (list(other.weights()), list(other.base())) == ([], [])
    assert Adapters.of(load_model(str(tmp_path)), as_it_is, 0) is None


def test_the_files_of_a_large_model_are_found_by_their_index(tmp_path: Path) -> None:
    folder = written(tmp_path)
    model = trained(folder)
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    save_torch_state_dict(weights, folder, max_shard_size=4000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    expected = dict(whole_weights(model, as_it_is))
    found = dict(
        AdapterMerger(described(model, folder), str(folder)).weights(
            dict(adapters_of(model).weights())
        )
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda w: {name.removeprefix("model."): value for name, value in w.items()},
            "files have no parameter model.embed_tokens.weight",
        ),
        (
            lambda w: {**w, "lm_head.weight": w["lm_head.weight"].T.contiguous()},
            "lm_head.weight is not what the model's files hold",
        ),
        (
            lambda w: {**w, "model.norm.weight": w["model.norm.weight"] + 1e-6},
            "model.norm.weight is not what the model's files hold",
        ),
    ],
    ids=["names", "shape", "values"],
)
def test_files_that_do_not_hold_the_base_as_the_trainer_has_it_are_refused(
    tmp_path: Path, change: Edit, reason: str
) -> None:
    model = trained(written(tmp_path))
    found = plan_merge(adapters_of(model), ModelSource(str(edit(tmp_path, change))))
    assert isinstance(found, str)
    assert reason in found


def test_a_folder_without_safetensors_files_is_refused_after_all_parameters_were_gathered(
    tmp_path: Path,
) -> None:
    """The other ranks take part in the gathering, and would wait forever."""
    model = trained(written(tmp_path))
    gathered: list[str] = []

    class Counting(Adapters):
        def base(self) -> Iterator[tuple[str, Tensor]]:
            for name, value in super().base():
                gathered.append(name)
                yield name, value

    (tmp_path / FILE).unlink()
    found = plan_merge(Counting(model, as_it_is, 0), ModelSource(str(tmp_path)))
    assert isinstance(found, str)
    assert "holds no safetensors files that can be read" in found
    assert gathered == [name for name, _ in whole_weights(model, as_it_is)]


def test_a_node_with_other_files_than_the_trainers_is_refused(tmp_path: Path) -> None:
    here, there = written(tmp_path / "here"), written(tmp_path / "there")
    model = trained(here)
    plan = described(model, here)
    edit(there, lambda w: {**w, "model.norm.weight": w["model.norm.weight"] + 1})
    weights = dict(adapters_of(model).weights())
    with pytest.raises(
        InvalidConfig,
        match=r"spec.model.path: .*there holds another model.norm.weight here "
        r"than where the trainers run",
    ):
        list(AdapterMerger(plan, str(there)).weights(weights))
    (there / FILE).unlink()
    with pytest.raises(InvalidConfig, match=r"spec.model.path: .*there holds no safetensors files"):
        AdapterMerger(plan, str(there))


MakeNode = Callable[
    [PreTrainedModel, ModelSource], tuple[AdapterNode, Callable[[PreTrainedModel], list[int]]]
]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    """Make a node of a model, and a function that writes adapters and returns checksums."""
    nodes: list[AdapterNode] = []
    threads = torch.get_num_threads()  # a node sets them for its whole process

    def make(
        model: PreTrainedModel, source: ModelSource
    ) -> tuple[AdapterNode, Callable[[PreTrainedModel], list[int]]]:
        plan = plan_merge(adapters_of(model), source)
        assert isinstance(plan, MergePlan), plan
        buckets = buckets_of(tensor_specs(adapters_of(model).weights()), 1024)
        nodes.append(AdapterNode("unit", buckets, plan, source, BUCKET_BYTES, 1))
        writer = BucketWriter(Path(nodes[-1].folder()), buckets, deltas=False)
        return nodes[-1], lambda newer: [
            one.checksum for one in writer.write(adapters_of(newer).weights())
        ]

    yield make
    for one in nodes:
        one.release()
    torch.set_num_threads(threads)


def read(parts: list[WeightFile]) -> Weights:
    return {
        name: value.clone()
        for part in parts
        for name, value in SafetensorsReader().parameters(Path(part.path))
    }


@pytest.mark.parametrize("by", ["path", "files"])
def test_a_node_overwrites_its_whole_weights_at_each_sync(
    tmp_path: Path, node: MakeNode, by: str
) -> None:
    folder = written(tmp_path)
    model = trained(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    source = ModelSource(str(folder)) if by == "path" else ModelSource(files=files)
    made, send = node(model, source)
    inodes = []
    for seed in (1, 2):
        newer = trained(folder, seed=seed)
        parts = list(made.merge(send(newer)))
        found = read(parts)
        assert all(
            torch.equal(found[name], value) for name, value in whole_weights(newer, as_it_is)
        )
        assert len(parts) > 3
        inodes.append([Path(part.path).stat().st_ino for part in parts])
    assert inodes[0] == inodes[1]
    largest = max(value.nbytes for value in found.values())
    assert all(Path(part.path).stat().st_size < max(BUCKET_BYTES, largest) + 2000 for part in parts)


def test_damaged_adapters_are_not_merged(tmp_path: Path, node: MakeNode) -> None:
    folder = written(tmp_path)
    model = trained(folder)
    made, send = node(model, ModelSource(str(folder)))
    checksums = send(model)
    last = sorted(Path(made.folder()).glob("bucket-*.safetensors"))[-1]
    with last.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    with pytest.raises(CorruptBucket, match=f"{last} is not what the trainer wrote"):
        next(made.merge(checksums))
    assert not (Path(made.folder()) / "whole").exists()


def test_parameters_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second model lies in memory."""
    folder = written(tmp_path)
    model = trained(folder)
    merger = AdapterMerger(described(model, folder), str(folder))
    asked: list[str] = []
    get = merger._files.get

    def recording(name: str) -> Tensor | None:
        asked.append(name)
        return get(name)

    monkeypatch.setattr(merger._files, "get", recording)
    weights = merger.weights(dict(adapters_of(model).weights()))
    assert [name for name, _ in (next(weights), next(weights))] == asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_merged_weight_is_w_plus_alpha_over_rank_times_b_a(
    dtype: torch.dtype, transposed: bool
) -> None:
    torch.manual_seed(0)
    weight, a, b = (torch.randn(shape).to(dtype) for shape in ((5, 4), (3, 4), (5, 3)))
    expected = weight.double() + 6.0 / 3 * b.double() @ a.double()
    held = weight.T.contiguous() if transposed else weight
    merged = merge(held, a, b, (6.0 / 3, transposed))
    found = (merged.T if transposed else merged).double()
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
