"""Wheels of pure Python packages, made in the test."""

from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(index: Path, name: str, version: str, *needs: str) -> Path:
    """Add a package with one module to a folder that can be served as a package index."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}"
    kind = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/WHEEL", kind)
        file.writestr(f"{info}/RECORD", "")
    return path
