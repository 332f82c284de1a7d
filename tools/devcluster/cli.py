"""The command line of the development cluster, for users and the Makefile.

stdout carries only what a caller reads (a path, JSON, exports); progress goes to stderr.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from devcluster.binaries import PARTS, Binaries
from devcluster.clusters import Cluster, choose
from devcluster.console import say
from devcluster.recipes import ENGINES, RECIPES, own, variants
from devcluster.settings import Settings
from devcluster.shell import DevclusterError, NoClusterPossible

_EXIT_FAILED = 1
_EXIT_DOWN = 1
_EXIT_IMPOSSIBLE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done; 1 failed, or `status` of a cluster that is not up; 2 wrong usage; 3 this machine can
        have no cluster.
    """
    options = _parser().parse_args(arguments)
    settings = Settings.from_environment()
    if getattr(options, "source", None):
        settings = replace(settings, repository=options.source.resolve())
    try:
        if options.command == "build":
            Binaries(settings).build()
            return 0
        return _run(options, settings, choose(settings))
    except NoClusterPossible as error:
        print(error, file=sys.stderr)
        return _EXIT_IMPOSSIBLE
    except DevclusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return _EXIT_FAILED


def _run(options: argparse.Namespace, settings: Settings, cluster: Cluster) -> int:
    match options.command:
        case "up":
            cluster.up(options.parts)
            say(
                f'up: {cluster.name}; for kubectl and helm:  eval "$(python3 tools/devcluster env)"'
            )
        case "down":
            cluster.down(purge=options.purge)
        case "status":
            problems = problems_that_stay(cluster, options.wait)
            print(f"{cluster.name}: {'; '.join(problems) or 'up'}")
            return _EXIT_DOWN if problems else 0
        case "kubeconfig":
            print(cluster.kubeconfig())
        case "env":
            print(f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig()))}")
            print(f'export PATH={shlex.quote(str(Binaries(settings).current))}:"$PATH"')
        case "images":
            base = [recipe for recipe in RECIPES if options.name in ("", recipe.name)]
            recipes = [*base, *variants(options.engines, gpus=options.gpus)]
            if options.build_only:
                cluster.build(recipes)
            else:
                print(json.dumps(cluster.publish(recipes)))
        case "image":
            recipe = own(settings.repository)
            references = cluster.publish([recipe])
            if recipe.name not in references:
                raise DevclusterError("set IMAGE_REGISTRY to a registry that the cluster reads")
            print(references[recipe.name])
        case "load":
            cluster.load(options.archive)
    return 0


def problems_that_stay(cluster: Cluster, seconds: float) -> list[str]:
    """Return the problems of the cluster that are still there after `seconds`.

    A cluster that is down is not waited for.
    """
    end = time.monotonic() + seconds
    while (problems := cluster.problems()) not in ([], ["down"]) and time.monotonic() < end:
        time.sleep(1)
    return problems


def _with_dockerfile(text: str) -> Path:
    folder = Path(text)
    if not (folder / "Dockerfile").is_file():
        raise argparse.ArgumentTypeError(f"there is no file {folder / 'Dockerfile'}")
    return folder


def _engines(text: str) -> tuple[str, ...]:
    return _known("engine", ENGINES, text)


def _parts(text: str) -> tuple[str, ...]:
    return _known("part", PARTS, text)


def _known(what: str, names: Collection[str], text: str) -> tuple[str, ...]:
    """Return the names in a list with commas; all of them must be known."""
    found = tuple(text.split(","))
    unknown = [name for name in found if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {what} {unknown[0]!r}: there are {', '.join(names)}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devcluster", description="A real Kubernetes with KubeRay for tests and the demo."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring the cluster up, or do nothing when it is")
    up.add_argument(
        "--with",
        dest="parts",
        type=_parts,
        default=(),
        metavar=",".join(PARTS),
        help="also these parts, which are built once",
    )
    down = commands.add_parser("down", help="remove the cluster; built programs and images stay")
    down.add_argument("--purge", action="store_true", help="remove the cache too")
    status = commands.add_parser(
        "status", help="say whether the cluster is up, and if not why; exit code 0 or 1"
    )
    status.add_argument(
        "--wait",
        type=float,
        default=0,
        metavar="SECONDS",
        help="for one that is there but not yet, or just not, usable",
    )
    commands.add_parser("kubeconfig", help="print the path of the cluster's kubeconfig")
    commands.add_parser(
        "env", help="print shell exports of KUBECONFIG and of a PATH with kubectl and helm"
    )
    commands.add_parser("build", help="build the cluster's programs (part of `up`)")
    images = commands.add_parser(
        "images", help="build changed images, make them available, print their references as JSON"
    )
    images.add_argument(
        "name",
        nargs="?",
        default="",
        choices=("", "operator", "worker"),
        help="only this one of the two",
    )
    images.add_argument(
        "--engines",
        type=_engines,
        default=(),
        metavar=",".join(ENGINES),
        help="also the worker images with these inference engines (6 GB each): worker-<engine>",
    )
    images.add_argument(
        "--gpus", action="store_true", help="engines for GPUs; else those for machines without"
    )
    images.add_argument(
        "--build-only",
        action="store_true",
        help="build what changed and stop there; needs no cluster",
    )
    images.add_argument(
        "--source",
        type=Path,
        metavar="FOLDER",
        help="the source tree that they are built from, of another release, instead of this one",
    )
    image = commands.add_parser(
        "image",
        help="build the Dockerfile of a folder of yours, make it available, print its reference",
    )
    image.add_argument("source", type=_with_dockerfile, metavar="FOLDER")
    load = commands.add_parser("load", help="load a docker-archive or oci-archive into the cluster")
    load.add_argument("archive", type=Path)
    return parser
