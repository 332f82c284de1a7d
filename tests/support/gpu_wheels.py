"""Files of the wheels for GPUs that locks/*.txt name, on machines that install none of them.

A wheel is a zip file, so its table of contents and single files of it can be read from the package
index without the rest. They are kept in ~/.cache/agenticrun/gpu-wheels.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
import urllib.request
import zipfile
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from elf import Needs, needs

LOCKS = Path(__file__).parents[2] / "locks"
CACHE = Path.home() / ".cache" / "agenticrun" / "gpu-wheels"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
SIMPLE = {"Accept": "application/vnd.pypi.simple.v1+json"}
SECONDS = 60.0
BLOCK = 1 << 20


class NoIndex(Exception):
    """The package index cannot be read, and the cache does not have the file."""


@dataclass(frozen=True)
class Wheel:
    """A wheel of a lock, for Linux on x86-64 and Python 3.11."""

    filename: str
    url: str
    size: int

    @property
    def _folder(self) -> Path:
        return CACHE / self.filename.removesuffix(".whl")

    @cached_property
    def names(self) -> list[str]:
        """Paths of its files, relative to site-packages."""
        kept = self._folder / "names.json"
        if not kept.exists():
            _write(kept, json.dumps(self._zip.namelist()).encode())
        found: list[str] = json.loads(kept.read_text())
        return found

    def file(self, name: str) -> Path:
        """Return a copy of one of its files."""
        kept = self._folder / "files" / name
        if not kept.exists():
            _write(kept, self._zip.read(name))
        return kept

    def needs(self, name: str) -> Needs:
        """Return the needs of one of its libraries. Only they are kept: some have a gigabyte."""
        kept = self._folder / "needs" / f"{name}.json"
        if not kept.exists():
            with tempfile.NamedTemporaryFile() as whole:
                with self._zip.open(name) as packed:
                    shutil.copyfileobj(packed, whole, BLOCK)
                whole.flush()
                _write(kept, json.dumps(asdict(needs(Path(whole.name)))).encode())
        found = json.loads(kept.read_text())
        return Needs(tuple(found["libraries"]), tuple(found["folders"]))

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        """The wheel at the index. zipfile compares each file that it reads with its CRC."""
        return zipfile.ZipFile(io.BufferedReader(_Remote(self.url, self.size), BLOCK))


class _Remote(io.RawIOBase):
    """A file at a web server that answers requests for ranges."""

    def __init__(self, url: str, size: int) -> None:
        super().__init__()
        self._url, self._size, self._at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if self._at >= end:
            return 0
        data = _get(self._url, {"Range": f"bytes={self._at}-{end - 1}"})
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def locked_versions(lock: str) -> dict[str, str]:
    """Return the versions of all packages in locks/<lock>.txt."""
    text = (LOCKS / f"{lock}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", text, re.MULTILINE))


@cache
def locked_wheel(lock: str, package: str) -> Wheel:
    """Return the wheel of a package that locks/<lock>.txt installs on machines with GPUs."""
    version, hashes = _pin(lock, package)
    kept = CACHE / f"{package}-{version}.json"
    if not kept.exists():
        _write(kept, _get(f"{INDEX}/{package}/", SIMPLE))
    for file in json.loads(kept.read_text())["files"]:
        name = file["filename"]
        fits = re.search(r"-(cp311|py3|cp3\d+-abi3)-.*(x86_64|any)\.whl$", name)
        if file["hashes"].get("sha256") in hashes and fits:
            return Wheel(name, file["url"], file["size"])
    raise LookupError(f"locks/{lock}.txt has no wheel of {package} {version} for x86-64")


def _pin(lock: str, package: str) -> tuple[str, set[str]]:
    """Return version and hashes of a package in a lock."""
    text = (LOCKS / f"{lock}.txt").read_text()
    found = re.search(rf"^{package}==([^\s;]+)(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"locks/{lock}.txt has no {package}"
    return found[1], set(re.findall(r"sha256:([0-9a-f]{64})", found[2]))


def _get(url: str, headers: dict[str, str]) -> bytes:
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            data: bytes = answer.read()
    except OSError as error:
        raise NoIndex(
            f"{url} cannot be read ({error}), and {CACHE} does not have what this test needs: run "
            "it once where the package index can be reached (PIP_INDEX_URL names another one)"
        ) from error
    return data


def _write(path: Path, data: bytes) -> None:
    """Write a file whole: another process may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)
