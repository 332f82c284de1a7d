"""Checks of a model's folder before anything loads it.

Errors of transformers do not name the file that is wrong. Every loader of a run, and `agenticrun
doctor`, looks at the folder first. Only names, sizes and headers are read, so the checks take
milliseconds for a model of any size. `pretrained` checks what a load reports.

Imports neither torch nor transformers: env workers and the actors of engine servers use it.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LFS = b"version https://git-lfs.github.com/spec/"
"""First bytes of a Git LFS pointer."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of weights in one file, in the order in which transformers looks for them."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "vocab.bpe",
    "tekken.json",
)
PICKLE = b"\x80"
"""First byte of weights that an old torch has written."""
ZIP = b"PK\x03\x04"
OTHER_INPUTS = ("image", "audio", "video", "vision", "boi", "eoi")
"""Parts of the names of tokens that stand for inputs that a language model does not take."""


class ModelLoadError(Exception):
    """The folder holds no usable model; the message says which folder and why."""


def check_folder(path: str, *, trust_remote_code: bool = False) -> None:
    """Check everything that a policy needs: config, weights and tokenizer.

    Raises:
        ModelLoadError: names the file that is missing, damaged or of another kind.
    """
    check_config(path, trust_remote_code=trust_remote_code)
    check_weights(path)
    check_tokenizer(path)


def check_config(path: str, *, trust_remote_code: bool = False) -> None:
    """Check that a folder describes a whole model. Names on the hub are not checked.

    Raises:
        ModelLoadError: it has no usable config.json, is an adapter, or needs code of its own.
    """
    folder = _folder(path)
    if folder is None:
        return
    adapter, config = folder / "adapter_config.json", folder / "config.json"
    whole = any((folder / name).exists() for name in _weight_names())
    if adapter.exists():
        described = _read_json(adapter)
        kind = f"a {'LoRA' if described.get('peft_type') == 'LORA' else 'PEFT'} adapter"
        if whole:
            raise ModelLoadError(
                f"{folder} holds {kind} (adapter_config.json) beside the model: merge it into the "
                "model, or take the adapter's files away"
            )
        base = described.get("base_model_name_or_path") or "another model"
        raise ModelLoadError(f"{folder} is {kind} of {base}: merge it into that model first")
    if not config.exists():
        raise ModelLoadError(
            f"{folder} has no config.json: name the folder of a Hugging Face model"
        )
    described = _read_json(config)
    remote = described.get("auto_map")
    if remote and not trust_remote_code and not _is_known(described.get("model_type")):
        raise ModelLoadError(
            f"{folder} is a model with code of its own (auto_map in config.json): read the code, "
            "then set spec.model.trustRemoteCode: true"
        )


def check_weights(path: str) -> None:
    """Check that the files that hold the weights are there and whole. The data is not read.

    Raises:
        ModelLoadError: names the file.
    """
    folder = _folder(path)
    if folder is None or "transformers_weights" in _read_json(folder / "config.json"):
        return
    for name in _weight_names():
        file = folder / name
        if not file.exists():
            continue
        if file.suffix != ".json":
            _check_file(file)
            return
        shards = _read_json(file).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelLoadError(f"{file} has no weight_map: download it again")
        for shard in sorted(set(map(str, shards.values()))):
            if not (folder / shard).exists():
                raise ModelLoadError(f"{folder} lacks {shard}, which {name} names: download it")
            _check_file(folder / shard)
        return
    if shards := sorted([*folder.glob("model-*.safetensors"), *folder.glob("pytorch_model-*.bin")]):
        index = "model.safetensors" if shards[0].suffix == ".safetensors" else "pytorch_model.bin"
        raise ModelLoadError(
            f"{folder} has {shards[0].name} but no {index}.index.json: download it"
        )
    raise ModelLoadError(
        f"{folder} has no weights (model.safetensors, or shards and their index): download them"
    )


def stored_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in the safetensors files of a folder that was checked.

    Empty for other files and for names on the hub.
    """
    folder = _folder(path)
    if folder is None:
        return {}
    whole, index = (folder / WEIGHTS[0], folder / f"{WEIGHTS[0]}.index.json")
    files = [whole] if whole.exists() else []
    if not files and index.exists():
        files = [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        shapes |= {name: tuple(described["shape"]) for name, described in header.items()}
    return shapes


def check_tokenizer(path: str) -> None:
    """Check that a folder holds a tokenizer.

    Raises:
        ModelLoadError: it has none, or its tokenizer.json is no JSON.
    """
    folder = _folder(path)
    if folder is None:
        return
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    found += folder.glob("*.tiktoken")
    settings = folder / "tokenizer_config.json"
    described = _read_json(settings) if settings.exists() else {}
    if found and found[0].suffix == ".json":
        _read_json(found[0])
    elif found:
        _refuse_pointer(found[0])
    elif "auto_map" not in described:
        raise ModelLoadError(f"{folder} has no tokenizer.json and no other tokenizer: download it")


def check_vocabulary(
    path: str, ids: Mapping[str, int], used: str, padding: str | None
) -> list[str]:
    """Compare a tokenizer with the embedding of its model.

    Args:
        ids: id of each token.
        used: text that holds the tokens of every prompt: the chat template and the end of a text.
        padding: the token that pads batches, which no model reads.

    Returns:
        tokens that the model does not know and that texts of a run do not hold: padding, and
        placeholders of images and sounds.

    Raises:
        ModelLoadError: the model does not know other tokens.
    """
    folder = _folder(path)
    if folder is None or not (folder / "config.json").exists():
        return []
    described = _read_json(folder / "config.json")
    known = described.get("vocab_size")
    if not isinstance(known, int):
        return []
    surplus = sorted((number, token) for token, number in ids.items() if number >= known)
    unused = [
        token
        for _, token in surplus
        if token not in used
        and (token == padding or any(part in token.lower() for part in OTHER_INPUTS))
    ]
    if len(unused) < len(surplus):
        last = surplus[-1][0] + 1
        token = next(token for _, token in surplus if token not in unused)
        raise ModelLoadError(
            f"the tokenizer of {path} knows {last} tokens, {token!r} among them, the model "
            f"{known}: resize the model's embedding, or take the tokenizer that belongs to it"
        )
    return unused


def _folder(path: str) -> Path | None:
    """Return the folder, or None if `path` is a name on the hub.

    Raises:
        ModelLoadError: it can only be a folder, and there is none.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelLoadError(f"{path} is a file: name the folder of a Hugging Face model")
    if "$" in path:
        raise ModelLoadError(
            f"{path} is no folder here, and $ is not expanded: write the whole path"
        )
    if path.startswith(("~", "/", ".")) or path.count("/") > 1:
        raise ModelLoadError(f"{path} is no folder here: write the whole path of a model's folder")
    return None


def _weight_names() -> list[str]:
    return [name for whole in WEIGHTS for name in (whole, f"{whole}.index.json")]


def _is_known(model_type: object) -> bool:
    """Return True if transformers has a model of this type, whose code is preferred."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _read_json(file: Path) -> dict[str, Any]:
    _refuse_pointer(file)
    try:
        described = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read ({error}): download it again") from error
    if not isinstance(described, dict):
        raise ModelLoadError(f"{file} is no JSON object: download it again")
    return described


def _refuse_pointer(file: Path) -> bytes:
    """Return the first bytes of a file. Raises `ModelLoadError` if it is a Git LFS pointer."""
    try:
        with file.open("rb") as stream:
            first = stream.read(len(LFS))
    except OSError as error:
        raise ModelLoadError(
            f"{file} cannot be read ({error}): correct its permissions, or download it again"
        ) from error
    if first == LFS:
        raise ModelLoadError(
            f"{file} is a Git LFS pointer, not the file itself: run git lfs pull in its folder"
        )
    if not first:
        raise ModelLoadError(f"{file} is empty: download it again")
    return first


def _check_file(file: Path) -> None:
    """Check a file of weights by its first bytes and its size."""
    first = _refuse_pointer(file)
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    elif first.startswith(ZIP):
        if not zipfile.is_zipfile(file):  # the list of its parts is at its end
            raise ModelLoadError(f"{file} is cut off: download it again")
    elif not first.startswith(PICKLE):
        raise ModelLoadError(f"{file} is no file of weights: download it again")


def _check_safetensors(file: Path) -> None:
    """Compare the header of a safetensors file with its size."""
    try:
        size = os.path.getsize(file)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            whole = 8 + length
            if whole <= size:
                header = json.loads(stream.read(length))
                header.pop("__metadata__", None)
                whole += max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelLoadError(f"{file} is no safetensors file ({error!r}): download it") from error
    if size < whole < 2**50:
        raise ModelLoadError(f"{file} is cut off at {size} of {whole} bytes: download it again")
    if size != whole:
        raise ModelLoadError(f"{file} is no safetensors file: download it again")
