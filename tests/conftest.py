"""Markers by folder, and the cluster.

A test that needs a cluster fails without one: nothing is skipped.

`make test` runs two processes of pytest side by side (pytest-xdist). Tests of one file stay
together, because they share fixtures. So do all tests that change what a cluster has only one of:
its definitions and its rights.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

from testcluster import Cluster, running_cluster

# `make test` gives the same answer twice; HYPOTHESIS_PROFILE=explore looks for new counterexamples.
# Machines are shared and busy: no deadline per example. A fixture may serve all examples of a test.
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("repeatable", shared, derandomize=True)
settings.register_profile("explore", shared, derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
if settings.get_current_profile_name() == "repeatable":
    # Otherwise examples also use constants of the modules that this process has already imported.
    providers._get_local_constants = lambda: providers._local_constants


# Tests send Ctrl-C to programs that they start, and those inherit what is blocked here. Who started
# us may have blocked it: a process that waits for signals in one thread does so in all others.
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


# One thread for each operation of torch: two processes of two threads each on two cores wait for
# each other inside every operation, which makes tests of tiny models ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


ON_THE_CLUSTER = ("api", "chart", "devcluster", "operator")
"""Folders of integration tests that follow each other. They have the marker `cluster`, too."""


DURATIONS = Path(__file__).parent / "data" / "durations.json"
"""Seconds that each file took, written by `pytest --record-durations`."""


class StaysTogether(LoadScopeScheduling):
    """Gives one process all tests of a file, or of the cluster."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        tier, folder = file.split("/")[-3:-1]
        return "cluster" if tier == "integration" and folder in ON_THE_CLUSTER else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> StaysTogether:
    """Return the scheduler that assigns tests to the processes of `pytest -n 2`.

    The groups of pytest-xdist 3.8 do nothing under pytest 9.2.
    """
    return StaysTogether(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--record-durations`."""
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="keep the seconds of each file that runs in tests/data/durations.json; the next run "
        "starts with the slowest file",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record durations, if asked, in the process that hears of all tests."""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RecordedDurations())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the folder below tests/ that holds it; slow files first.

    A slow file that starts last would run alone at the end. A unit test that leaves a socket, file
    or process open fails, or the one that runs when the collector finds it.
    """
    root = Path(__file__).parent
    seconds = json.loads(DURATIONS.read_text())
    for item in items:
        tier = item.path.relative_to(root).parts[0]
        item.add_marker(tier)
        if tier == "integration" and item.path.parent.name in ON_THE_CLUSTER:
            item.add_marker("cluster")
        if tier == "unit":
            item.add_marker(pytest.mark.filterwarnings("error::ResourceWarning"))
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(root).as_posix(), 0.0))


class RecordedDurations:
    """Sums up the seconds of each file and keeps those of the files that take long."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the set-up, call or teardown of one test."""
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the file. Files that did not run keep their seconds, deleted ones go."""
        seconds = json.loads(DURATIONS.read_text()) | self._seconds
        kept = {
            file: round(seconds[file])
            for file in sorted(seconds)
            if seconds[file] >= 1 and (Path(__file__).parent / file).exists()
        }
        DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The development cluster, brought up if it is down."""
    with running_cluster() as found:
        yield found


@pytest.fixture(scope="session")
def kubeconfig(cluster: Cluster) -> Path:
    """The kubeconfig of the development cluster."""
    return Path(cluster.env["KUBECONFIG"])
