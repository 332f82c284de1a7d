"""Containers are removed while a request that the kubelet has left behind still changes them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from devcluster import containerd
from devcluster.containerd import Containerd
from devcluster.settings import Settings


class Runtime:
    """The runtime behind `ctr`.

    Each removal of containers triggers the next concurrent event.
    """

    def __init__(self, containers: set[str]) -> None:
        self.containers = containers
        self.comes_late: list[str] = []
        self.goes_early: list[str] = []

    def run(self, argv: Sequence[str | Path]) -> str:
        """`ctr tasks list` and `ctr containers list`."""
        return "\n".join(sorted(self.containers)) if "containers" in argv else ""

    def succeeds(self, argv: Sequence[str | Path]) -> bool:
        """`ctr containers remove`, which ends at the first container that is not there."""
        if self.goes_early:
            self.containers.remove(self.goes_early.pop())
        for name in map(str, argv[argv.index("remove") + 1 :]):
            if name not in self.containers:
                return False
            self.containers.remove(name)
        if self.comes_late:
            self.containers.add(self.comes_late.pop())
        return True


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Two containers, without tasks."""
    runtime = Runtime({"a", "b"})
    monkeypatch.setattr(containerd, "run", runtime.run)
    monkeypatch.setattr(containerd, "succeeds", runtime.succeeds)
    return runtime


def test_all_containers_are_removed_and_it_is_said_that_there_were_some(
    runtime: Runtime, settings: Settings
) -> None:
    assert Containerd(settings, Path("imagectl")).remove_containers()
    assert runtime.containers == set()
    assert not Containerd(settings, Path("imagectl")).remove_containers()


def test_a_container_that_comes_meanwhile_is_removed_and_one_that_goes_meanwhile_is_no_error(
    runtime: Runtime, settings: Settings
) -> None:
    runtime.comes_late, runtime.goes_early = ["c"], ["a"]
    assert Containerd(settings, Path("imagectl")).remove_containers()
    assert runtime.containers == set()
