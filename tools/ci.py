"""`make check` and `make test`: the stages that must pass, in order, with the minutes each took.

`python3 tools/ci.py check` is the inner loop: lint, types, unit tests and one tiny run on this
machine. Without an argument all stages run. They share one cluster. A cluster that was already up
is used and left up. One that this program started is stopped at the end, whatever happened in
between. SIGTERM is treated like Ctrl-C, also for the stages. Standard library only: it runs before
anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [str(ROOT / ".venv/bin/pytest"), "-q", "--durations=5"]
VERBOSE_PYTEST = [str(ROOT / ".venv/bin/pytest"), "-v", "--durations=5"]
"""One line for each test, by which a stage beside others shows a failure at once."""
SIDE_BY_SIDE = ["-n", "2", "--no-loadscope-reorder"]
"""Tests mostly wait for processes to start, so two at a time end sooner on two cores."""
RUN = [str(ROOT / ".venv/bin/agenticrun"), "run", "-f", str(ROOT / "examples/frozen-lake.yaml")]
TINY = {
    "pipeline.maxSteps": 2,
    "pipeline.rolloutBatchSize": 16,
    "pipeline.valBatchSize": 8,
    "pipeline.evalSteps": 2,
    "pipeline.warmup.steps": 2,
    "pipeline.trainEnvs.groups": 2,
}
"""Settings that make the demo's run one of seconds: every part of it still runs."""
DEVCLUSTER = [sys.executable, str(ROOT / "tools/devcluster")]
DEMO = [str(ROOT / ".venv/bin/python"), str(ROOT / "tools/demo.py")]


PATIENCE_SECONDS = 60.0
"""Time for a stage to clean up after an interrupt."""
LOOK_SECONDS = 1.0
"""Time between two looks at the output of a stage that runs beside others."""
FAILURE = re.compile(rb"^\S.* (?:FAILED|ERROR)(?: .*)?$", re.MULTILINE)
"""The line of `pytest -v` about a test that has failed."""


class Stages:
    """Run commands and remember how long each took."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self.took: list[tuple[str, float, bool]] = []
        self._began = time.monotonic()

    def run(self, name: str, command: list[str], env: dict[str, str] | None = None) -> bool:
        """Run one stage in the foreground; return True if it succeeded."""
        print(_title(name, command), flush=True)
        start = time.monotonic()
        ok = self._end_of(subprocess.Popen(command, **_options(env))) == 0
        self.took.append((name, time.monotonic() - start, ok))
        return ok

    @contextmanager
    def beside(
        self, stages: list[tuple[str, list[str]]], env: dict[str, str] | None = None
    ) -> Iterator[None]:
        """Run stages, one after the other, while the body runs others.

        Print each test that fails as soon as it has, and all output of a stage when it has ended.
        After an error of the body no further one begins.
        """
        cancelled = threading.Event()

        def run_all() -> None:
            for name, command in stages:
                if cancelled.is_set():
                    return
                start = time.monotonic()
                # A file and no pipe: what a stage leaves running may hold its output open.
                with tempfile.TemporaryFile() as file:
                    output = _Output(name, file.fileno())
                    stage = subprocess.Popen(
                        command, **_options(env), stdout=file, stderr=subprocess.STDOUT
                    )
                    status = self._end_of(stage, output.print_failures)
                    output.print_all(_title(name, command))
                self.took.append((name, time.monotonic() - start, status == 0))

        thread = threading.Thread(target=run_all)
        thread.start()
        try:
            yield
        except BaseException:
            cancelled.set()
            raise
        finally:
            if thread.is_alive():
                names = ", ".join(name for name, _ in stages)
                print(f"\n=== {names}: running beside it, not yet at the end", flush=True)
            thread.join()

    def take_signals(self) -> None:
        """Raise KeyboardInterrupt on SIGTERM, after an interrupt of all stages, and on Ctrl-C.

        A terminal interrupts the stages itself. They do not inherit that the signal is ignored, as
        it is in the background of a shell.
        """

        def terminated(*_: object) -> None:
            for stage in list(self._running):
                stage.send_signal(signal.SIGINT)
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, terminated)

    def _end_of(
        self, stage: subprocess.Popen[bytes], look: Callable[[], None] | None = None
    ) -> int:
        """Return the exit status of a stage. One that is interrupted has time to clean up.

        Args:
            stage: the stage.
            look: called from time to time until it has ended.
        """
        self._running.append(stage)
        try:
            if look is not None:
                while stage.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        stage.wait(LOOK_SECONDS)
                    look()
            return stage.wait()
        except BaseException:
            with suppress(subprocess.TimeoutExpired):
                stage.wait(PATIENCE_SECONDS)
            stage.kill()
            stage.wait()
            raise
        finally:
            self._running.remove(stage)

    def report(self) -> bool:
        """Print the table; return True if every stage succeeded."""
        print("\n=== stages")
        for name, seconds, ok in self.took:
            print(f"{name:<15} {seconds / 60:6.1f} min  {'ok' if ok else 'FAILED'}")
        print(f"{'all':<15} {(time.monotonic() - self._began) / 60:6.1f} min", flush=True)
        return all(ok for _, _, ok in self.took)


class _Output:
    """The output of a stage that runs beside others, which share the terminal or log.

    Args:
        name: of the stage.
        descriptor: of the file that the stage writes to.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._seen = 0
        """Bytes that were looked at: whole lines."""

    def print_failures(self) -> None:
        """Print the failures since the last call, each in a line with the name of the stage."""
        new = self._read(self._seen)
        new = new[: new.rfind(b"\n") + 1]
        self._seen += len(new)
        for line in FAILURE.findall(new):
            # Begins with an end of line, because the dots of another stage may stand before it.
            print(f"\n{self._name}: {line.decode(errors='replace')}", flush=True)

    def print_all(self, title: str) -> None:
        """Print everything as one block, so that no line of another stage comes between."""
        text = self._read(0).decode(errors="replace")
        print(f"{title}\n{text}", flush=True)

    def _read(self, start: int) -> bytes:
        # The stage's place in the file is ours, too: a seek would move where it writes.
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size - start, start)


def _title(name: str, command: list[str]) -> str:
    return f"\n=== {name}: " + " ".join(Path(x).name if "/" in x else x for x in command)


def _options(env: dict[str, str] | None) -> dict[str, Any]:
    return {"cwd": ROOT, "env": {**os.environ, **(env or {})}, "stdin": subprocess.DEVNULL}


def check(stages: Stages) -> None:
    """Run the inner loop."""
    if not stages.run("environment", ["make", "--no-print-directory", "setup"]):
        return
    stages.run("lint", ["make", "--no-print-directory", "lint"])
    stages.run("unit", [*PYTEST, *SIDE_BY_SIDE, "tests/unit"])
    settings = [word for path, value in TINY.items() for word in ("--set", f"{path}={value}")]
    with tempfile.TemporaryDirectory(prefix="agenticrun-check-") as output:
        stages.run("local run", [*RUN, *settings, "-o", output])


def test(stages: Stages, *, own_cluster: bool) -> None:
    """Run the stages, but none that needs an earlier one which failed.

    Tests on the cluster mostly wait, so they run beside tests that mostly compute. Ray gives up if
    it takes half a minute to start: e2e and integration tests together would starve it.

    Args:
        stages: what runs them.
        own_cluster: no cluster is up, so it will be one of ours. Then the demo's operator, which
            serves all namespaces, is installed as well: the tests must pass on a cluster that has
            one. A user's cluster stays without.
    """
    if not stages.run("set-up", [sys.executable, str(ROOT / "tools/prepare.py"), "--engines"]):
        return
    unit = [*PYTEST, *SIDE_BY_SIDE, "tests/unit"]
    with stages.beside([("lint", ["make", "--no-print-directory", "lint"])]):
        cluster = stages.run("cluster up", [*DEVCLUSTER, "up"]) and stages.run(
            "images", [*DEVCLUSTER, "images"]
        )
        if cluster and own_cluster:
            cluster = stages.run("demo's operator", [*DEMO, "--operator-only"])
    if not cluster:
        stages.run("unit", unit)
        return
    kubeconfig = subprocess.run(
        [*DEVCLUSTER, "kubeconfig"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    env = {"KUBECONFIG": kubeconfig}
    integration = ["tests/integration", "-m"]
    on_cluster = [
        ("e2e", [*VERBOSE_PYTEST, "tests/e2e"]),
        ("cluster", [*VERBOSE_PYTEST, *integration, "cluster"]),
    ]
    with stages.beside(on_cluster, env):
        stages.run("unit", unit)
        stages.run("integration", [*PYTEST, *integration, "not cluster", *SIDE_BY_SIDE], env)


def main() -> int:
    """Run the tier that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the project's checks.")
    parser.add_argument("tier", nargs="?", choices=("check", "test"), default="test")
    stages = Stages()
    stages.take_signals()
    if parser.parse_args().tier == "check":
        check(stages)
        return 0 if stages.report() else 1
    was_up = (
        subprocess.run(
            [*DEVCLUSTER, "status", "--wait", "30"], cwd=ROOT, capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        test(stages, own_cluster=not was_up)
    finally:
        if not was_up:
            stages.run("down", [*DEVCLUSTER, "down"])
        ok = stages.report()
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
