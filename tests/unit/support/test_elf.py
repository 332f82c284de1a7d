"""The reader of shared libraries agrees with what is known of some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from elf import needs


def test_a_library_of_torch_needs_the_system_and_names_the_folder_of_its_neighbours() -> None:
    found = needs(Path(torch.__file__).parent / "lib/libtorch_python.so")
    assert {"libc.so.6", "libtorch_cpu.so"} <= {*found.libraries}
    assert "$ORIGIN" in found.folders


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        needs(tmp_path / "a.json")
