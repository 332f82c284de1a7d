"""Processes are found, replaced and stopped by pid and start time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.processes import ProcessSpec, ProcessTable, start_ticks
from devcluster.shell import DevclusterError

_SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")
_STUBBORN = (
    sys.executable,
    "-c",
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('deaf', flush=True); time.sleep(60)",
)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ProcessTable]:
    """A table of its own; whatever a test starts ends with it."""
    table = ProcessTable(tmp_path / "processes", tmp_path / "logs", tmp_path / "no-netns")
    yield table
    table.stop(table.names(), grace_seconds=0)


def sleeper(*, argv: tuple[str, ...] = _SLEEP, files: dict[Path, str] | None = None) -> ProcessSpec:
    """A harmless process in the host's network namespace."""
    return ProcessSpec("sleeper", argv, files or {}, in_netns=False)


def test_a_started_process_is_alive_and_a_second_start_leaves_it_alone(table: ProcessTable) -> None:
    assert table.start(sleeper())
    first = table.record("sleeper")
    assert not table.start(sleeper())
    assert table.record("sleeper") == first


def test_a_process_whose_flags_changed_is_replaced(table: ProcessTable) -> None:
    table.start(sleeper())
    first = table.record("sleeper")
    assert first is not None
    assert table.start(sleeper(argv=(*_SLEEP, "another flag")))
    second = table.record("sleeper")
    assert second is not None
    assert second.pid != first.pid
    assert start_ticks(first.pid) != first.start_ticks


def test_no_zombie_is_left_of_a_process_that_was_stopped_or_that_ended(
    table: ProcessTable,
) -> None:
    pids = []
    for _ in range(2):
        table.start(sleeper())
        record = table.record("sleeper")
        assert record is not None
        pids.append(record.pid)
        os.kill(record.pid, signal.SIGKILL)
        while table.alive("sleeper"):
            pass
    table.stop(["sleeper"])
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False, False]


def test_a_process_whose_configuration_changed_is_replaced_and_sees_the_new_file(
    table: ProcessTable, tmp_path: Path
) -> None:
    config = tmp_path / "etc" / "config"
    table.start(sleeper(files={config: "old"}))
    assert table.start(sleeper(files={config: "new"}))
    assert config.read_text() == "new"


def test_a_recycled_pid_is_neither_alive_nor_stopped(table: ProcessTable, tmp_path: Path) -> None:
    stranger = subprocess.Popen(_SLEEP)
    try:
        record = {
            "pid": stranger.pid,
            "start_ticks": (start_ticks(stranger.pid) or 0) - 1,
            "digest": sleeper().digest,
        }
        (tmp_path / "processes").mkdir()
        (tmp_path / "processes" / "sleeper.json").write_text(json.dumps(record))
        assert not table.alive("sleeper")
        table.stop(["sleeper"])
        assert stranger.poll() is None
        assert table.names() == []
    finally:
        stranger.kill()
        stranger.wait()


def test_a_record_cut_short_by_a_crash_counts_as_dead(table: ProcessTable, tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "sleeper.json").write_text('{"pid": 1')
    assert not table.alive("sleeper")
    assert table.start(sleeper())


def test_a_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    while (
        child.returncode is None and Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "Z"
    ):
        pass
    assert start_ticks(child.pid) is None
    child.wait()


def test_a_process_that_ignores_sigterm_is_killed(table: ProcessTable) -> None:
    table.start(sleeper(argv=_STUBBORN))
    while "deaf" not in table.log("sleeper").read_text():
        pass
    table.stop(["sleeper"], grace_seconds=0.2)
    assert not table.alive("sleeper")


def test_a_program_that_cannot_run_is_an_error_that_names_its_log(
    table: ProcessTable, tmp_path: Path
) -> None:
    with pytest.raises((DevclusterError, FileNotFoundError)):
        table.start(sleeper(argv=(str(tmp_path / "missing"),)))


def test_start_ticks_reads_past_a_command_name_with_spaces_and_parentheses(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = ["S", *(str(number) for number in range(1, 50))]
    (tmp_path / "7" / "stat").write_text(f"7 (a (b) c) {' '.join(fields)}\n")
    assert start_ticks(7, tmp_path) == 19


@pytest.mark.parametrize(("threads", "ticks"), [(1, None), (2, 19)])
def test_a_killed_process_is_gone_with_its_last_thread_and_not_with_its_first(
    tmp_path: Path, threads: int, ticks: int | None
) -> None:
    (tmp_path / "7").mkdir()
    fields = ["Z", *(str(number) for number in range(1, 50))]
    fields[17] = str(threads)
    (tmp_path / "7" / "stat").write_text(f"7 (kubelet) {' '.join(fields)}\n")
    assert start_ticks(7, tmp_path) == ticks
