"""The container runtime of the node, and images of single static files for it."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from devcluster.settings import Settings
from devcluster.shell import run, succeeds
from devcluster.waiting import wait_for

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


_REMOVE_SECONDS = 60


class Containerd:
    """The container runtime of the node; every call is in the namespace that the kubelet uses."""

    def __init__(self, settings: Settings, imagectl: Path) -> None:
        """Start nothing. `imagectl` is our CRI client."""
        self._cri: list[str | Path] = [imagectl, settings.containerd_socket]
        self._ctr: list[str | Path] = [
            "ctr",
            "--address",
            settings.containerd_socket,
            "--namespace",
            "k8s.io",
        ]

    def answers(self) -> bool:
        """Return True if it serves requests."""
        return succeeds([*self._ctr, "version"])

    def images(self) -> set[str]:
        """Return the names of all images that are unpacked or imported."""
        return set(run([*self._ctr, "images", "list", "--quiet"]).split())

    def images_in_use(self) -> set[str]:
        """Return the names of the images that containers were made from."""
        lines = run([*self._ctr, "containers", "list"]).splitlines()[1:]
        return {line.split()[1] for line in lines}

    def load(self, archive: Path) -> None:
        """Import a docker-archive or oci-archive."""
        run([*self._ctr, "images", "import", archive])

    def tag(self, reference: str, name: str) -> None:
        """Give an image a second name."""
        run([*self._ctr, "images", "tag", "--force", reference, name])

    def pull(self, reference: str) -> None:
        """Pull an image and unpack it."""
        run([*self._cri, "pull", reference])

    def remove_images(self, references: Iterable[str]) -> None:
        """Remove images with all their names, and layers that nothing needs."""
        if references := sorted(references):
            run([*self._cri, "remove", *references])

    def remove_containers(self) -> bool:
        """Kill every task, remove every container with its writable layer, and keep images.

        It repeats this until none is left: a request of the kubelet that is still under way may
        start or remove some at the same time.

        Returns:
            True if there were containers.
        """
        there_were = bool(self._containers())
        wait_for(
            "containerd to remove its containers",
            self._try_to_remove_containers,
            seconds=_REMOVE_SECONDS,
        )
        return there_were

    def _containers(self) -> list[str]:
        return run([*self._ctr, "containers", "list", "--quiet"]).split()

    def _try_to_remove_containers(self) -> bool:
        """Return True if none is left."""
        tasks = run([*self._ctr, "tasks", "list", "--quiet"]).split()
        for task in tasks:
            succeeds([*self._ctr, "tasks", "kill", "--signal", "SIGKILL", task])
        for task in tasks:
            succeeds([*self._ctr, "tasks", "remove", "--force", task])
        if containers := self._containers():
            succeeds([*self._ctr, "containers", "remove", *containers])
        return not self._containers()


def write_image(
    target: Path, reference: str, files: Mapping[str, Path], entrypoint: list[str]
) -> None:
    """Write an image of one layer as a docker-archive, without a build tool.

    Args:
        files: path in the image to path here; all belong to root and are executable.
    """
    layer = _tar({name: path.read_bytes() for name, path in files.items()}, mode=0o755)
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": ["layer.tar"]}]
    parts = {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_bytes(_tar(parts, mode=0o644))
    partial.replace(target)


def _tar(contents: Mapping[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
