"""Weights as an engine gets them: safetensors files, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file


async def weight_files(weights: Mapping[str, np.ndarray], files: int = 3) -> AsyncIterator[Path]:
    """These parameters in so many files, gone when the iteration ends."""
    names = sorted(weights)
    with TemporaryDirectory() as folder:
        for number in range(files):
            path = Path(folder) / f"{number}.safetensors"
            save_file({name: weights[name] for name in names[number::files]}, path)
            yield path
