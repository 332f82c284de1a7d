"""Init containers of a run's pods: they bring the user's modules and packages (spec.code)."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from agenticrun_api.base import clean_text
from agenticrun_api.load import parse
from agenticrun_api.names import ENV_CODE
from agenticrun_api.spec import CodeSpec

TERMINATION_LOG = Path("/dev/termination-log")
"""The termination message: it is in the status of the pod, where the operator reads it."""


class CodeError(Exception):
    """The code cannot be brought. The first line of the message says what is wrong."""


def bring(action: Callable[[CodeSpec], str], log: Path = TERMINATION_LOG) -> int:
    """Do the work of an init container, and return its exit code.

    Args:
        action: what it does for spec.code; returns what it has brought.
        log: the file for that, or for the reason of a failure.
    """
    try:
        said, code = action(parse(CodeSpec, json.loads(os.environ[ENV_CODE]))), 0
    except CodeError as error:
        said, code = str(error), 1
    said = clean_text(said)
    print(said, file=sys.stderr if code else sys.stdout)
    # Kubernetes makes it; outside a pod there is none.
    if log.exists():
        log.write_text(said)
    return code


def clear(folder: Path) -> None:
    """Delete what an earlier try has left in a folder. The folder itself is a mount and stays."""
    for item in folder.iterdir():
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()


def program(name: str) -> str:
    """Return the path of a program of the image.

    Raises:
        CodeError: the image lacks it.
    """
    found = shutil.which(name)
    if found is None:
        raise CodeError(
            f"the image has no program {name}: use one made FROM the worker image of this version"
        )
    return found
