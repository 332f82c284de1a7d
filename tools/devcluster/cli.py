"""The command line."""

import argparse
import sys
from collections.abc import Sequence

from devcluster.binaries import Binaries
from devcluster.errors import DevclusterError, NoClusterPossible
from devcluster.node import Node
from devcluster.prerequisites import install_packages, require_host
from devcluster.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 failed, 2 wrong usage, 3 no cluster can be had here."""
    parser = argparse.ArgumentParser(prog="devcluster", description=__doc__)
    parser.add_argument("command")
    parser.add_argument("--purge", action="store_true")
    options = parser.parse_args(arguments)
    settings = Settings.from_environment()
    node = Node(settings, Binaries(settings))
    try:
        if options.command == "up":
            require_host()
            install_packages(settings)
            Binaries(settings).build()
            node.up()
        elif options.command == "down":
            node.down(purge=options.purge)
    except NoClusterPossible as error:
        print(error, file=sys.stderr)
        return 3
    except DevclusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1
    return 0
