"""Markers by folder, and the cluster.

A test that needs a cluster fails without one: nothing is skipped.

`make test` runs two processes of pytest side by side (pytest-xdist). Tests of one file stay
together, because they share fixtures. So do all tests that change what a cluster has only one of:
its definitions and its rights.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

from testcluster import Cluster, running_cluster

# `make test` gives the same answer twice, from few examples: more were most of its CPU time.
# HYPOTHESIS_PROFILE=nightly looks for new counterexamples (`make drills`), explore for longer.
# Machines are shared and busy: no deadline per example. A fixture may serve all examples of a test.
shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("repeatable", shared, derandomize=True, max_examples=25)
settings.register_profile("nightly", shared, derandomize=False, max_examples=200)
settings.register_profile("explore", shared, derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
if settings.get_current_profile_name() == "repeatable":
    # Otherwise examples also use constants of the modules that this process has already imported.
    providers._get_local_constants = lambda: providers._local_constants


# Failed assertions of shared suites show their values. Here, because it must precede their imports.
SUPPORT = Path(__file__).parent / "support"
pytest.register_assert_rewrite(*({file.stem for file in SUPPORT.glob("*.py")} - sys.modules.keys()))


# Tests send Ctrl-C to programs that they start, and those inherit what is blocked here. Who started
# us may have blocked it: a process that waits for signals in one thread does so in all others.
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


# One thread for each operation of torch: two processes of two threads each on two cores wait for
# each other inside every operation, which makes tests of tiny models ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# The runs of tests have no GPUs. Ray hides the machine's from their actors (`names.RAY_ENV`), this
# from the tests' own processes, in which torch would initialise them.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


ON_THE_CLUSTER = ("api", "chart", "devcluster", "operator")
"""Folders of integration tests that follow each other. They have the marker `cluster`, too."""


DURATIONS = Path(__file__).parent / "data" / "durations.json"
"""Seconds that each file took, written by `pytest --record-durations`."""

CPU_SECONDS = Path(__file__).parent / "data" / "cpu_seconds.json"
"""CPU seconds of each file's tests and their child processes, written at the same time."""
CPU = "cpu seconds"
"""Property of a report."""


class StaysTogether(LoadScopeScheduling):
    """Gives one process all tests of a file, or of the cluster."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        tier, folder = file.split("/")[-3:-1]
        return "cluster" if tier == "integration" and folder in ON_THE_CLUSTER else file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make reports of tests about text in any bytes fit for the connection between processes."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


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
        help="keep the seconds of each file that runs in tests/data/durations.json, so that the "
        "next run starts with the slowest one, and its CPU seconds in "
        "tests/data/cpu_seconds.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record durations, if asked: measured where tests run, kept where all are heard of."""
    if config.getoption("--record-durations"):
        config.pluginmanager.register(CpuClock())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(RecordedDurations())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no folder of integration tests of which `-m` excludes every test."""
    if collection_path.parent.name != "integration" or not collection_path.is_dir():
        return None
    on_cluster = collection_path.name in ON_THE_CLUSTER
    left_out = {"cluster": not on_cluster, "not cluster": on_cluster}
    return left_out.get(config.option.markexpr) or None


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the modules of all tests without the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Let the garbage collector ignore what imports have made, here and in forks of this process.

    It is most of the heap, and would be looked at again and again: up to a fifth of the CPU time.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give everything back to the collector, or libraries complain of leaks at the end."""
    gc.unfreeze()


class CpuClock:
    """Notes the CPU seconds of each phase of a test, child processes that have ended included."""

    def pytest_collection_finish(self) -> None:
        """Start the clock: imports count for no test."""
        self._before = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the seconds since the last report."""
        report = yield
        now = _cpu_seconds()
        report.user_properties.append((CPU, now - self._before))
        self._before = now
        return report


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


class RecordedDurations:
    """Sums up the seconds and the CPU seconds of each file, and keeps them."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu_seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the set-up, call or teardown of one test."""
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        self._seconds[file] += report.duration
        cpu_seconds: Any = dict(report.user_properties)[CPU]
        self._cpu_seconds[file] += cpu_seconds

    def pytest_sessionfinish(self) -> None:
        """Write what takes a second or more."""
        _keep(DURATIONS, self._seconds)
        _keep(CPU_SECONDS, self._cpu_seconds)


def _keep(file: Path, measured: Mapping[str, float]) -> None:
    """Write seconds by path. Paths that did not run keep theirs, deleted ones go."""
    seconds = json.loads(file.read_text()) | measured
    kept = {
        path: round(seconds[path])
        for path in sorted(seconds)
        if seconds[path] >= 1 and (Path(__file__).parent / path).exists()
    }
    file.write_text(json.dumps(kept, indent=0) + "\n")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The development cluster, brought up if it is down."""
    with running_cluster() as found:
        yield found


@pytest.fixture(scope="session")
def kubeconfig(cluster: Cluster) -> Path:
    """The kubeconfig of the development cluster."""
    return Path(cluster.env["KUBECONFIG"])
