"""Build the images for a registry of your own, and list the images that an installation pulls.

    tools/images.py build registry.example.org/agenticrun --push
    tools/images.py list --digests

The development cluster has images of its own (tools/devcluster), which no registry outside needs.
Needs docker, except for a list without digests. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import release  # noqa: E402
from devcluster.recipes import ENGINES, RECIPES, Recipe, variants  # noqa: E402

KUBERAY_MODULE = ROOT / "tools/devcluster/go/kuberay-operator/go.mod"
KUBERAY = "quay.io/kuberay/operator"

Command = Callable[[Sequence[str]], str]
"""Runs a command in the repository and returns its output."""


class Refused(Exception):
    """The request cannot be met; the message says what to do."""


def recipes(engines: Sequence[str]) -> list[Recipe]:
    """Return what an installation needs for these engines, with their builds for GPUs."""
    return [*RECIPES, *variants(engines, gpus=True)]


def reference(registry: str, name: str, tag: str) -> str:
    """Return the reference of an image, by the rule that the chart has, too."""
    return f"{registry}/{name}:{tag}"


def kuberay() -> str:
    """Return KubeRay's image of the version that AgenticRun is tested with."""
    found = re.search(r"/kuberay/ray-operator (v[0-9.]+)", KUBERAY_MODULE.read_text())
    assert found, f"{KUBERAY_MODULE}: no version of KubeRay"
    return f"{KUBERAY}:{found[1]}"


def build(
    registry: str, tag: str, engines: Sequence[str], run: Command, *, push: bool
) -> list[str]:
    """Build the images, and push them if asked to; return their references."""
    built = []
    for recipe in recipes(engines):
        name = reference(registry, recipe.name, tag)
        arguments = recipe.build_arguments()
        run(["docker", "build", "--file", recipe.dockerfile, *arguments, "--tag", name, "."])
        if push:
            run(["docker", "push", name])
        built.append(name)
    return built


def pinned(reference: str, run: Command) -> str:
    """Return the reference with the digest that its registry has now."""
    inspect = ["docker", "buildx", "imagetools", "inspect", reference]
    digest = json.loads(run([*inspect, "--format", "{{json .Manifest}}"]))["digest"]
    return f"{reference}@{digest}"


def _run(command: Sequence[str]) -> str:
    try:
        # A build's progress goes to stderr; only `inspect` is read.
        kept = subprocess.PIPE if "inspect" in command else 2
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=kept, text=True)
    except FileNotFoundError as error:
        raise Refused(f"{command[0]} is not installed: it builds, pushes and inspects") from error
    except subprocess.CalledProcessError as error:
        raise Refused(f"{' '.join(command)} failed with {error.returncode}") from error
    return done.stdout or ""


def main(arguments: Sequence[str] | None = None, run: Command = _run) -> int:
    """Run one command; 1 when it cannot be done."""
    options = _parser().parse_args(arguments)
    registry = (options.registry or release.registry()).rstrip("/")
    try:
        if not registry:
            raise Refused("name the registry: a source tree has none of its own")
        tag, engines = options.tag or release.version(), options.engines
        if options.command == "build":
            built = build(registry, tag, engines, run, push=options.push)
            print("\n".join(built))
            tagged = "" if tag == release.version() else f" --set-string tag={tag}"
            print(f"for helm: --set registry={registry}{tagged}", file=sys.stderr)
        else:
            names = [reference(registry, recipe.name, tag) for recipe in recipes(engines)]
            names.append(kuberay())
            print("\n".join(pinned(n, run) for n in names) if options.digests else "\n".join(names))
    except Refused as problem:
        print(f"images: {problem}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="build operator, worker and worker-<engine>")
    making.add_argument("--push", action="store_true", help="push each image when it is built")
    listing = commands.add_parser("list", help="print what an installation pulls, a line each")
    listing.add_argument("--digests", action="store_true", help="with the registries' digests")
    for command in (making, listing):
        command.add_argument("registry", nargs="?", help="host and path; default: the release's")
        command.add_argument("--tag", help="default: the version of this source tree")
        command.add_argument(
            "--engines",
            type=lambda text: [name for name in text.split(",") if name],
            default=list(ENGINES),
            help=f"default: {','.join(ENGINES)}",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
