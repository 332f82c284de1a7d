"""Which images there are and what decides their content. Pure but for reading the files it hashes."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TAG_CHARACTERS = 12

ENGINES = ("sglang", "vllm")
"""Engines that have a variant of the worker image."""


@dataclass(frozen=True)
class Recipe:
    """One image.

    Attributes:
        name: "operator", "worker" or "worker-<engine>"; the image is agenticrun/<name>.
        folder: where its Dockerfile lies, below images/.
        inputs: files and folders, relative to the repository, that its Dockerfile copies; the Dockerfile itself with them.
        arguments: build arguments beside the base.
    """

    name: str
    folder: str
    inputs: tuple[str, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def repository(self) -> str:
        """Image name without registry and tag."""
        return f"agenticrun/{self.name}"

    @property
    def dockerfile(self) -> str:
        """Path relative to the repository."""
        return f"images/{self.folder}/Dockerfile"

    def build_arguments(self, **more: str) -> list[str]:
        """Flags that docker and buildah share."""
        return [f"--build-arg={name}={value}" for name, value in {**self.arguments, **more}.items()]

    def tag(self, root: Path, base: str) -> str:
        """A tag that changes exactly when the image would: it hashes the inputs' paths, modes and bytes, the arguments and the base."""
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


RECIPES = (Recipe("operator", "operator", _OPERATOR), Recipe("worker", "worker", _WORKER))
"""The images that every installation needs."""


def variants(engines: Collection[str], *, gpus: bool) -> tuple[Recipe, ...]:
    """The worker image with an inference engine, for each of these engines.

    Args:
        gpus: the engines are those for GPUs, not those for machines that have none.
    """
    return tuple(
        Recipe(
            f"worker-{engine}",
            "worker",
            _WORKER,
            {"ENGINE": engine, "ENGINE_LOCK": engine if gpus else f"{engine}-cpu"},
        )
        for engine in engines
    )
