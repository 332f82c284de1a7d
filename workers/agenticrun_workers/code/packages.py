"""Installs spec.code.pip: `python -m agenticrun_workers.code.packages`, in an init container.

Only what the image lacks is installed, into a folder on PYTHONPATH. uv takes the metadata of the
image's packages for packages of that folder, and constraints keep their versions.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agenticrun_api.names import PACKAGE_CACHE_DIR, PACKAGES_DIR
from agenticrun_api.spec import CodeSpec, PipCode
from agenticrun_workers.code import CodeError, bring, clear, program

IN_THE_IMAGE = "image"
"""The installer, by its name in the metadata, of packages that the image has."""


def install(pip: PipCode, target: Path, code: Path, cache: Path) -> list[str]:
    """Install packages that this Python lacks, and return their names and versions.

    Args:
        pip: what to install.
        target: an existing folder; what it contains is deleted.
        code: the folder of the modules, in which `pip.requirements_file` is.
        cache: the folder of uv's cache. If it does not exist, nothing is kept.

    Raises:
        CodeError: a requirement cannot be met or installed.
    """
    file = code / pip.requirements_file if pip.requirements_file else None
    if file and not file.is_file():
        raise CodeError(
            f"the code has no file {pip.requirements_file} (spec.code.pip.requirementsFile)"
        )
    clear(target)
    # uv must see what the image has, or it would install torch again beside it.
    versions = dict(_stand_ins(target))
    # On the volume: the root file system may be read-only.
    with tempfile.TemporaryDirectory(dir=target, prefix=".") as temporary:
        lines, fixed = Path(temporary, "spec.code.pip.requirements"), Path(temporary, "the image")
        lines.write_text("\n".join(pip.requirements))
        # As constraints: a package that needs another version is refused by name.
        fixed.write_text("\n".join(f"{name}=={version}" for name, version in versions.items()))
        command = [
            *(program("uv"), "pip", "install", "--quiet", "--compile-bytecode"),
            *("--python", sys.executable, "--target", str(target), "--constraint", str(fixed)),
            *("--requirement", str(lines)),
            *(("--requirement", str(file)) if file else ()),
        ]
        environment = {
            # First, so that the run's own variables may change it.
            "UV_PYTHON_DOWNLOADS": "never",
            **os.environ,
            "UV_CACHE_DIR": str(cache if cache.is_dir() else Path(temporary, "cache")),
            "TMPDIR": temporary,
            "HOME": temporary,
            # The cache is another volume, to which no hard link leads.
            **({"UV_LINK_MODE": "copy"} if cache.is_dir() else {}),
            **({"UV_DEFAULT_INDEX": pip.index_url} if pip.index_url else {}),
        }
        done = subprocess.run(
            command,
            cwd=code if code.is_dir() else target,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode:
        # uv's own words name the requirement and the conflict.
        raise CodeError(re.sub(r"^error: ", "", done.stdout.strip()) or "uv failed")
    return sorted(_remove_stand_ins(target))


def _stand_ins(target: Path) -> Iterator[tuple[str, str]]:
    """Write the metadata of each package of this Python, and yield its name and version."""
    for package in importlib.metadata.distributions():
        metadata = package.read_text("METADATA") or package.read_text("PKG-INFO")
        name = re.sub(r"[-_.]+", "_", package.metadata["Name"] or "").lower()
        folder = target / f"{name}-{package.version}.dist-info"
        # The first one found is the one that is imported.
        if not metadata or not name or any(target.glob(f"{name}-*.dist-info")):
            continue
        folder.mkdir()
        (folder / "METADATA").write_text(metadata)
        (folder / "INSTALLER").write_text(IN_THE_IMAGE)
        (folder / "RECORD").write_text("")
        yield name, package.version


def _remove_stand_ins(target: Path) -> Iterator[str]:
    """Remove what `_stand_ins` has written, and yield the packages that were installed."""
    for folder in target.glob("*.dist-info"):
        if (folder / "INSTALLER").read_text().strip() == IN_THE_IMAGE:
            shutil.rmtree(folder)
        else:
            yield folder.name.removesuffix(".dist-info").replace("-", "==", 1)


def _main(code: CodeSpec) -> str:
    assert code.pip is not None
    installed = install(
        code.pip, Path(PACKAGES_DIR), Path(code.folder), cache=Path(PACKAGE_CACHE_DIR)
    )
    return f"installed {', '.join(installed) or 'nothing: the image has all of it'}"


if __name__ == "__main__":
    sys.exit(bring(_main))
