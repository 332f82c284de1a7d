"""Which images there are and what decides their content. Pure but for reading the files it hashes."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TAG_CHARACTERS = 12


@dataclass(frozen=True)
class Recipe:
    """One image.

    Attributes:
        name: "operator" or "worker"; the image is agenticrun/<name>.
        inputs: files and folders, relative to the repository, that its Dockerfile copies; the Dockerfile itself with them.
    """

    name: str
    inputs: tuple[str, ...]

    @property
    def repository(self) -> str:
        """Image name without registry and tag."""
        return f"agenticrun/{self.name}"

    @property
    def dockerfile(self) -> str:
        """Path relative to the repository."""
        return f"images/{self.name}/Dockerfile"

    def tag(self, root: Path, base: str) -> str:
        """A tag that changes exactly when the image would: it hashes the inputs' paths, modes and bytes, and the base."""
        digest = hashlib.sha256(base.encode())
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
            yield from sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


RECIPES = tuple(
    Recipe(name, (f"images/{name}", "images/build-tools.txt", f"locks/{lock}.txt", "crds/agenticrun_api", source))
    for name, lock, source in (
        ("operator", "operator", "operator/agenticrun_operator"),
        ("worker", "workers", "workers/agenticrun_workers"),
    )
)
