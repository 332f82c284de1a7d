"""Each kind of model folder that cannot be trained is refused before training, with its cause."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from agenticrun_api import parse_run
from agenticrun_api.spec import ModelSpec
from agenticrun_api.training import Critic, Reference
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.builder import build_engine
from agenticrun_workers.inference.engine import EngineStartError, UnusableModel
from agenticrun_workers.inference.model_files import RequestLimits
from agenticrun_workers.models.folder import ModelLoadError, check_folder
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.source import ModelSource, ModelSources, TokenizerSource
from agenticrun_workers.models.tokenizer import build_task_tokenizer, load_tokenizer
from agenticrun_workers.trainer.strategies import build_critic, build_reference, build_strategy
from tiny_runs import tiny_document

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
WORDS = ("a", "b", "c")
PIPELINE = parse_run(tiny_document()).spec.pipeline


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    initialize_model(
        folder,
        InitializeSpec(
            WORDS, hidden_size=16, intermediate_size=32, heads=2, tie_word_embeddings=False
        ),
    )
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of a good folder, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def as_pickle(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def shard(folder: Path) -> None:
    """Write an index that names a second shard, which is missing."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {NORM: "model-00001-of-00002.safetensors", UP: "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def lose_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def lose_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def put_adapter(folder: Path, *gone: str) -> None:
    """Add an adapter, and remove other files."""
    described = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for name in gone:
        (folder / name).unlink()


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"model has no config\.json: name"),
    "config pointer": (
        lambda f: (f / "config.json").write_bytes(POINTER),
        r"config\.json is a Git LFS pointer, not the file itself: run git lfs pull",
    ),
    "config cut off": (lambda f: cut(f / "config.json"), r"config\.json cannot be read .*download"),
    "config of another kind": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        r"model has no weights \(model\.safetensors, .*: download them",
    ),
    "weights pointer": (
        lambda f: (f / "model.safetensors").write_bytes(POINTER),
        r"model\.safetensors is a Git LFS pointer, not the file itself: run git lfs pull",
    ),
    "weights empty": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        r"model\.safetensors is empty: download",
    ),
    "weights cut off": (
        lambda f: cut(f / "model.safetensors"),
        r"model\.safetensors is cut off at \d+ of \d+ bytes: download it again",
    ),
    "a page instead of weights": (
        lambda f: (f / "model.safetensors").write_text("<html>not found</html>"),
        r"model\.safetensors is no safetensors file",
    ),
    "pickle pointer": (
        lambda f: as_pickle(f).write_bytes(POINTER),
        r"pytorch_model\.bin is a Git LFS pointer, not the file itself: run git lfs pull",
    ),
    "pickle cut off": (lambda f: cut(as_pickle(f)), r"pytorch_model\.bin is cut off"),
    "a page instead of a pickle": (
        lambda f: as_pickle(f).write_text("<html>"),
        r"pytorch_model\.bin is no file of weights",
    ),
    "missing shard": (
        shard,
        r"lacks model-00002-of-00002\.safetensors, which model\.safetensors\.index\.json names",
    ),
    "missing index": (
        lose_index,
        r"has model-00001-of-00001\.safetensors but no model\.safetensors\.index\.json",
    ),
    "index without shards": (
        lose_shards,
        r"model\.safetensors\.index\.json has no weight_map",
    ),
    "adapter alone": (
        lambda f: put_adapter(f, "model.safetensors"),
        "model is a LoRA adapter of org/base: merge it into that model first",
    ),
    "adapter without a config": (
        lambda f: put_adapter(f, "model.safetensors", "config.json"),
        "model is a LoRA adapter of org/base: merge it into that model first",
    ),
    "adapter beside a model": (
        put_adapter,
        r"model holds a LoRA adapter \(adapter_config\.json\) beside the model: merge it into",
    ),
    "code of its own": (
        lambda f: change_config(f, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        r"code of its own \(auto_map in config\.json\): .*set spec\.model\.trustRemoteCode: true",
    ),
}
"""Folders by what is wrong with their files: the change to a good folder, and the message."""


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_missing_or_damaged_is_named_before_anything_is_loaded(
    kind: str, folder: Path
) -> None:
    change, message = FILES[kind]
    change(folder)
    for look in (check_folder, load_model):
        with pytest.raises(ModelLoadError, match=message):
            look(str(folder))


def test_a_good_folder_passes_and_so_do_files_that_no_loader_reads(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(POINTER)
    (folder / "original.safetensors").write_bytes(POINTER)
    change_config(folder, auto_map={"AutoConfig": "mine.Config"})  # transformers has its own llama
    check_folder(str(folder))
    load_model(str(folder))


def test_pickled_and_sharded_weights_pass(folder: Path) -> None:
    expected = load_model(str(folder))
    expected.save_pretrained(folder / "sharded", max_shard_size="4KB")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 1
    as_pickle(folder)
    for found in (load_model(str(folder)), load_model(str(folder / "sharded"))):
        assert all(map(torch.equal, expected.state_dict().values(), found.state_dict().values()))


WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one is missing": (
        lambda f: change_weights(f, lambda weights: weights.pop(UP)),
        rf"model lacks 1 of its weights, {UP} among them: download it again",
    ),
    "no output layer": (
        lambda f: change_weights(f, lambda weights: weights.pop("lm_head.weight")),
        r"model lacks 1 of its weights, lm_head\.weight among them",
    ),
    "config with more layers": (
        lambda f: change_config(f, num_hidden_layers=3),
        r"model lacks 9 of its weights, model\.layers\.2\..* among them",
    ),
    "another shape": (
        lambda f: change_weights(f, lambda weights: weights.update({NORM: torch.ones(8)})),
        rf"the weight {NORM} of .*model has shape \(8,\), config\.json asks for \(16,\)",
    ),
    "config of another shape": (
        lambda f: change_config(f, intermediate_size=48),
        r"the weight model\.layers\.0\.mlp\.\w+\.weight .* has shape .*, config\.json asks for",
    ),
    "NaN": (
        lambda f: change_weights(f, lambda weights: weights[NORM].fill_(torch.nan)),
        rf"the weights of .*model hold NaN \({NORM}\): the training that wrote them has diverged",
    ),
    "one infinity": (
        lambda f: change_weights(f, lambda weights: weights[UP].view(-1)[3:4].fill_(-torch.inf)),
        rf"the weights of .*model hold infinity \({UP}\)",
    ),
}
"""Folders by what is wrong with their weights: the change to a good folder, and the message."""


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_do_not_make_the_model_are_refused(kind: str, folder: Path) -> None:
    change, message = WEIGHTS[kind]
    change(folder)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("role", "path", "field"),
    [
        ("policy", None, "spec.model.path"),
        ("reference", None, "spec.model.path"),
        ("critic", None, "spec.model.path"),
        ("reference", "set", "spec.pipeline.reference.path"),
        ("critic", "set", "spec.pipeline.critic.path"),
    ],
)
def test_each_role_names_the_field_of_its_model(
    role: str, path: str | None, field: str, folder: Path
) -> None:
    change_weights(folder, lambda weights: weights.pop(UP))
    source, set_path = ModelSource(str(folder)), str(folder) if path else None
    pipeline = PIPELINE.model_copy(
        update={"reference": Reference(path=set_path), "critic": Critic(path=set_path)}
    )
    build: dict[str, Callable[..., Any]] = {
        "policy": build_strategy,
        "reference": partial(build_reference, shared=True),
        "critic": partial(build_critic, shared=True),
    }
    with pytest.raises(InvalidConfig, match=rf"^{field}: .* lacks 1 of its weights, {UP}"):
        build[role](pipeline, source)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_with_a_server_names_the_file_before_it_starts_the_server(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    cut(folder / "model.safetensors")
    infer = PIPELINE.actor_infer
    strategy = infer.strategy.model_copy(update={"name": engine})
    pipeline = PIPELINE.model_copy(
        update={"actor_infer": infer.model_copy(update={"strategy": strategy})}
    )
    with pytest.raises(UnusableModel, match="is cut off"):
        build_engine(
            pipeline,
            ModelSource(str(folder)),
            str(folder),
            owner="inference engine engine-0",
            gpus=(),
            threads=1,
            logs=tmp_path,
        )


@pytest.mark.parametrize("error", [TypeError, AttributeError, EOFError, KeyError, RuntimeError])
def test_any_error_of_a_load_names_the_folder(
    error: type[Exception], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error("of the file")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelLoadError, match=f"from {folder}: {error.__name__}: .*of the file"):
        load_model(str(folder))


def test_a_lack_of_memory_is_no_fault_of_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(RuntimeError, match="allocate"):
        load_model(str(folder))


def test_surplus_weights_are_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_weights(folder, lambda weights: weights.update({"score.weight": torch.ones(1, 16)}))
    with caplog.at_level(logging.WARNING):
        load_model(str(folder))
    assert "holds 1 weights that its model does not use, score.weight among them" in caplog.text


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    initialize_model(tmp_path, InitializeSpec(WORDS, hidden_size=16, heads=2, layers=1))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_model(str(tmp_path))


def test_a_critic_needs_no_output_layer_but_all_other_weights(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    load_model(str(folder), output_layer=False)
    change_weights(folder, lambda weights: weights.pop(UP))
    with pytest.raises(ModelLoadError, match=rf"lacks 1 of its weights, {UP}"):
        load_model(str(folder), output_layer=False)


TOKENIZERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda f: (f / "tokenizer.json").unlink(),
        r"model has no tokenizer\.json and no other tokenizer",
    ),
    "pointer": (
        lambda f: (f / "tokenizer.json").write_bytes(POINTER),
        r"tokenizer\.json is a Git LFS pointer, not the file itself: run git lfs pull",
    ),
    "cut off": (lambda f: cut(f / "tokenizer.json"), r"tokenizer\.json cannot be read"),
    "settings pointer": (
        lambda f: (f / "tokenizer_config.json").write_bytes(POINTER),
        r"tokenizer_config\.json is a Git LFS pointer",
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_that_is_missing_or_damaged_is_named(kind: str, folder: Path) -> None:
    change, message = TOKENIZERS[kind]
    change(folder)
    with pytest.raises(InvalidConfig, match=f"spec.model.path: .*{message}"):
        load_tokenizer(TokenizerSource(str(folder)))
    with pytest.raises(ModelLoadError, match=message):
        check_folder(str(folder))


@pytest.mark.parametrize(
    ("token", "refused"), [("<|extra|>", True), ("<image_soft_token>", False), ("[PAD]", False)]
)
def test_a_tokenizer_that_is_larger_than_the_embedding_is_refused_unless_no_text_has_its_tokens(
    token: str, refused: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = build_task_tokenizer(WORDS, 64)
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    if token == "[PAD]":
        tokenizer.pad_token = token
    tokenizer.save_pretrained(folder)
    source = TokenizerSource(str(folder))
    if refused:
        with pytest.raises(
            InvalidConfig,
            match=r"spec\.model\.path: the tokenizer of .* knows 9 tokens, '<\|extra\|>' among "
            "them, the model 8: resize",
        ):
            load_tokenizer(source)
    else:
        load_tokenizer(source)
        assert f"does not know {token}" in caplog.text


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (GPT2Config(n_positions=64, vocab_size=9), 64),
        (LlamaConfig(max_position_embeddings=48, vocab_size=9), 48),
        ({"model_type": "mpt", "max_seq_len": 32, "vocab_size": 9}, 32),
    ],
)
def test_the_context_is_read_under_the_name_that_the_model_uses(
    config: Any, longest: int, tmp_path: Path
) -> None:
    described = config if isinstance(config, dict) else config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert RequestLimits.of_model(tmp_path, longest).max_length == longest
    with pytest.raises(EngineStartError, match=f"do not fit into the model's context of {longest}"):
        RequestLimits.of_model(tmp_path, longest + 1)


def test_the_home_folder_is_expanded_for_every_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    policy = ModelSource.of(ModelSpec(path="~/model"))
    pipeline = PIPELINE.model_copy(
        update={"reference": Reference(path="~/reference"), "critic": Critic(path="~/critic")}
    )
    sources = ModelSources.of(policy, pipeline)
    assert [source.path for source in (sources.policy, sources.reference, sources.critic)] == [
        "/home/me/model",
        "/home/me/reference",
        "/home/me/critic",
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("${HOME}/model", r"\$ is not expanded: write the whole path"),
        ("/no/such/model", "is no folder here"),
        ("./model", "is no folder here"),
        ("a/b/c", "is no folder here"),
    ],
)
def test_a_path_that_can_be_no_name_on_the_hub_is_refused_as_a_path(
    path: str, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(path)
    with pytest.raises(InvalidConfig, match=message):
        load_tokenizer(TokenizerSource(path))
