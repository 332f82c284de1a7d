"""The images and what decides their content. Pure, but it reads the files that it hashes."""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TAG_CHARACTERS = 12

ENGINES = ("sglang", "vllm")
"""Engines that have a variant of the worker image."""


@dataclass(frozen=True)
class Recipe:
    """An image and what it is built from.

    Attributes:
        name: "operator", "worker", "worker-<engine>" or "own-<folder>"; the image is
            agenticrun/<name>.
        dockerfile: its path, relative to the source tree.
        inputs: the Dockerfile and what it copies, as paths relative to the source tree.
        arguments: build arguments other than the base.
    """

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def repository(self) -> str:
        """Image name without registry and tag."""
        return f"agenticrun/{self.name}"

    def build_arguments(self, **more: str) -> list[str]:
        """Return the build arguments as flags of docker and buildah."""
        return [f"--build-arg={name}={value}" for name, value in {**self.arguments, **more}.items()]

    def tag(self, root: Path, base: str) -> str:
        """Return a tag that changes exactly when the image would.

        It hashes paths, modes and bytes of the inputs, the arguments and the base.
        """
        digest = hashlib.sha256("\0".join([base, *self.build_arguments()]).encode())
        for path in self._files(root):
            digest.update(f"\0{path.relative_to(root)}\0{path.stat().st_mode & 0o111:o}\0".encode())
            digest.update(path.read_bytes())
        return f"dev-{digest.hexdigest()[:_TAG_CHARACTERS]}"

    def _files(self, root: Path) -> Iterator[Path]:
        for name in self.inputs:
            path = root / name
            if path.is_file():
                yield path
                continue
            yield from sorted(
                file
                for file in path.rglob("*")
                if file.is_file() and "__pycache__" not in file.parts
            )


_OPERATOR = (
    "images/operator",
    "images/build-tools.txt",
    "locks/operator.txt",
    "crds/agenticrun_api",
    "operator/agenticrun_operator",
)
_ENGINE_LOCKS = tuple(f"locks/{engine}{kind}.txt" for engine in ENGINES for kind in ("", "-cpu"))
_WORKER = (
    *(
        "images/worker",
        "images/build-tools.txt",
        "locks/workers.txt",
        "uv.toml",
        "crds/agenticrun_api",
        "workers/agenticrun_workers",
    ),
    *_ENGINE_LOCKS,
)


_WORKER_DOCKERFILE = "images/worker/Dockerfile"

RECIPES = (
    Recipe("operator", "images/operator/Dockerfile", _OPERATOR),
    Recipe("worker", _WORKER_DOCKERFILE, _WORKER),
)
"""The images that every installation needs."""


def variants(engines: Collection[str], *, gpus: bool) -> tuple[Recipe, ...]:
    """Return the worker image with an inference engine, for each of these engines.

    Args:
        gpus: the engines for GPUs instead of those for machines without.
    """
    return tuple(
        Recipe(
            f"worker-{engine}",
            _WORKER_DOCKERFILE,
            _WORKER,
            {"ENGINE": engine, "ENGINE_LOCK": engine if gpus else f"{engine}-cpu"},
        )
        for engine in engines
    )


def own(folder: Path) -> Recipe:
    """Return the image that a user's folder with a Dockerfile is the source tree of."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")
    return Recipe(f"own-{name}".rstrip("-"), "Dockerfile", (".",))
