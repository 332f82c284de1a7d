"""What a Hugging Face folder says about its model, without loading it: read by engines that load it in another process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from agenticrun_workers.inference.engine import EngineError, EngineStartError

Shapes = dict[str, tuple[int, ...]]


class WeightChecker:
    """Whether safetensors files hold the parameters of a model between them, each in its shape."""

    def __init__(self, folder: Path) -> None:
        self._shapes = shapes_of(sorted(folder.glob("*.safetensors")))

    def check(self, files: Iterable[Path]) -> None:
        """Raises `EngineError` for a missing, unknown or misshapen parameter, or a file that is none."""
        given = shapes_of(files)
        for name, shape in given.items():
            held = self._shapes.get(name)
            if held != shape:
                raise EngineError(f"weights for {name} have shape {shape}, the model has {held}")
        if missing := self._shapes.keys() - given.keys():
            raise EngineError(f"{len(missing)} parameters got no weights, among them {min(missing)}")


def shapes_of(files: Iterable[Path]) -> Shapes:
    """Parameters in safetensors files, by their names. Raises `EngineError` for a file that is none."""
    shapes: Shapes = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
            raise EngineError(f"{file} is not a safetensors file: {error}") from error
    return shapes


def read_limits(folder: Path) -> tuple[int, int | None]:
    """Size of the vocabulary, and the longest sequence that the model knows. Raises `EngineStartError`."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config["vocab_size"]), config.get("max_position_embeddings")
    except (OSError, ValueError, KeyError) as error:
        raise EngineStartError(f"{folder} is not a folder of a causal language model: {error!r}") from error
