"""Entry point of `python3 tools/devcluster`, and of `python3 -m devcluster` in tools/."""

import sys
from pathlib import Path

if (
    not __package__
):  # run as a folder: Python then puts the package itself on the path instead of its parent
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from devcluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
