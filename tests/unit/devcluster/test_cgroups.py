"""Our parent cgroup is made in every hierarchy, in both versions of cgroups."""

import errno
import os
from pathlib import Path

import pytest

from devcluster import cgroups


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    """Folders as cgroup v1 with systemd's unified hierarchy beside it has them."""
    for name in ("cpu,cpuacct", "cpuset", "memory", "unified"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    (tmp_path / "cpuset" / "cpuset.cpus").write_text("0-1\n")
    (tmp_path / "cpuset" / "cpuset.mems").write_text("0\n")
    return tmp_path


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    """The unified hierarchy's root."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    return tmp_path


def test_v1_has_a_parent_in_each_hierarchy_once(v1: Path) -> None:
    cgroups.create("ours", v1)
    assert sorted(str(path.relative_to(v1)) for path in v1.rglob("ours")) == [
        "cpu,cpuacct/ours",
        "cpuset/ours",
        "memory/ours",
        "unified/ours",
    ]


def test_v1_cpuset_gets_the_roots_cpus_and_memory_nodes_else_no_process_fits_in(v1: Path) -> None:
    cgroups.create("ours", v1)
    assert (v1 / "cpuset/ours/cpuset.cpus").read_text() == "0-1\n"
    assert (v1 / "cpuset/ours/cpuset.mems").read_text() == "0\n"


def test_pods_do_not_starve_beside_other_work_in_v1(v1: Path) -> None:
    shares = v1 / "cpu,cpuacct/ours/cpu.shares"
    shares.parent.mkdir()
    shares.write_text("1024")  # the kernel makes the file with the folder
    cgroups.create("ours", v1)
    assert shares.read_text() == "20480"


def test_pods_do_not_starve_beside_other_work_in_v2(v2: Path) -> None:
    weight = v2 / "ours/cpu.weight"
    weight.parent.mkdir()
    weight.write_text("100")
    cgroups.create("ours", v2)
    assert weight.read_text() == "2000"


def test_v2_has_one_parent_with_the_controllers_delegated(v2: Path) -> None:
    cgroups.create("ours", v2)
    assert (v2 / "ours").is_dir()
    assert (
        v2 / "cgroup.subtree_control"
    ).read_text() == "+memory"  # the kernel would add up what a plain file keeps the last of


def test_processes_are_found_at_any_depth(v1: Path) -> None:
    pod = v1 / "memory" / "ours" / "kubepods" / "pod1"
    pod.mkdir(parents=True)
    (pod / "cgroup.procs").write_text("12\n13\n")
    (v1 / "memory" / "ours" / "cgroup.procs").write_text("")
    (v1 / "memory" / "cgroup.procs").write_text("1\n")
    assert cgroups.processes("ours", v1) == {12, 13}


def test_a_cgroup_that_vanishes_while_processes_are_looked_for_has_none(v1: Path) -> None:
    pod = v1 / "memory" / "ours" / "pod1"
    pod.mkdir(parents=True)
    (pod / "cgroup.procs").symlink_to("gone")  # listed, and not there when it is read
    assert cgroups.processes("ours", v1) == set()


def test_removal_waits_for_a_cgroup_whose_last_thread_is_still_on_its_way_out(
    v1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = v1 / "memory" / "ours" / "pod1"
    busy.mkdir(parents=True)
    refusals = iter(range(2))
    rmdir = os.rmdir

    def refuse_twice(path: str | Path) -> None:
        if Path(path) == busy and next(refusals, None) is not None:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", refuse_twice)
    cgroups.remove("ours", v1)
    assert not (v1 / "memory" / "ours").exists()


def test_removal_takes_the_tree_and_nothing_else(v1: Path) -> None:
    (v1 / "memory" / "ours" / "kubepods" / "pod1").mkdir(parents=True)
    (v1 / "memory" / "others").mkdir()
    cgroups.remove("ours", v1)
    assert not (v1 / "memory" / "ours").exists()
    assert (v1 / "memory" / "others").is_dir()
