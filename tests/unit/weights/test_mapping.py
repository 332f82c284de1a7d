"""Verified files, while others are mapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from agenticrun_workers.weights.buckets import Verifier


def test_files_are_forgotten_while_a_thread_still_checks_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, first, second = Verifier(), tmp_path / "first", tmp_path / "second"
    for file in (first, second):
        file.write_bytes(b"weights")
    checksum = xxhash.xxh3_64_intdigest(b"weights")
    verifier.check(first, checksum)

    def meanwhile(path: Path) -> bool:
        """Another thread's turn."""
        verifier.check(second, checksum)
        return True

    monkeypatch.setattr(Path, "exists", meanwhile)
    verifier.forget()
    verifier.check(first, checksum)
