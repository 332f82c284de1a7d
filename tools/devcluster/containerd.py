"""Talking to our containerd through its own command line."""

from collections.abc import Iterable
from pathlib import Path

from devcluster.settings import Settings
from devcluster.shell import run, succeeds, wait_until

_REMOVE_SECONDS = 60


class Containerd:
    """The node's container runtime; every call is in the namespace that the kubelet uses."""

    def __init__(self, settings: Settings, imagectl: Path) -> None:
        """Starts nothing. `imagectl`: our CRI client."""
        self._cri: list[str | Path] = [imagectl, settings.containerd_socket]
        self._ctr: list[str | Path] = [
            "ctr",
            "--address",
            settings.containerd_socket,
            "--namespace",
            "k8s.io",
        ]

    def answers(self) -> bool:
        """Whether it serves requests."""
        return succeeds([*self._ctr, "version"])

    def images(self) -> set[str]:
        """Names of the images that are unpacked or imported."""
        return set(run([*self._ctr, "images", "list", "--quiet"]).split())

    def images_in_use(self) -> set[str]:
        """Names of the images that containers were made from."""
        lines = run([*self._ctr, "containers", "list"]).splitlines()[1:]
        return {line.split()[1] for line in lines}

    def load(self, archive: Path) -> None:
        """Imports a docker-archive or oci-archive."""
        run([*self._ctr, "images", "import", archive])

    def tag(self, reference: str, name: str) -> None:
        """Gives an image a second name."""
        run([*self._ctr, "images", "tag", "--force", reference, name])

    def pull(self, reference: str) -> None:
        """Pulls an image and unpacks it."""
        run([*self._cri, "pull", reference])

    def remove_images(self, references: Iterable[str]) -> None:
        """Removes images with all their names; layers that nobody needs are dropped."""
        if references := sorted(references):
            run([*self._cri, "remove", *references])

    def remove_containers(self) -> bool:
        """Kills every task and removes every container and its writable layer; images stay. Says whether there were any.

        A request of the kubelet that is still under way may start or remove some meanwhile: so until none is left.
        """
        there_were = bool(self._containers())
        wait_until(
            self._try_to_remove_containers, _REMOVE_SECONDS, "containerd to remove its containers"
        )
        return there_were

    def _containers(self) -> list[str]:
        return run([*self._ctr, "containers", "list", "--quiet"]).split()

    def _try_to_remove_containers(self) -> bool:
        """Says whether none is left."""
        tasks = run([*self._ctr, "tasks", "list", "--quiet"]).split()
        for task in tasks:
            succeeds([*self._ctr, "tasks", "kill", "--signal", "SIGKILL", task])
        for task in tasks:
            succeeds([*self._ctr, "tasks", "remove", "--force", task])
        if containers := self._containers():
            succeeds([*self._ctr, "containers", "remove", *containers])
        return not self._containers()
