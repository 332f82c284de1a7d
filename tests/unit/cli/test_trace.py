"""`agenticrun trace`: how it asks a run, waits for it, and sums up what it got."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api.names import RAY_CONTAINER
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.cli.source import ClusterSource, FolderSource
from agenticrun_workers.cli.trace import summary_lines, wait_for_trace
from agenticrun_workers.reporting.run_folder import RunFolder
from tiny_runs import tiny_document


def test_the_summary_says_what_each_kind_of_process_did() -> None:
    facts = {
        "first_step": 12,
        "whole_steps": 1,
        "seconds": 61.2,
        "shares": {"driver": {"rollout": 0.9, "train": 0.1}, "engine": {"idle: env": 0.9999}},
        "clock_error_ms": {"engine-0": 0.4, "engine-1": 1.6},
        "incomplete": ["engine-1: died"],
    }
    assert summary_lines(facts) == [
        "recorded     1 whole step from step 12, 61.2 s",
        "driver       rollout 90%, train 10%",
        "engine       idle: env 100%",
        "clocks       within 1.6 ms of the driver's",
        "incomplete   engine-1: died",
    ]


class Recording:
    """A source of a run that records."""

    trace_poll_seconds = 0.0

    def __init__(self, answers: list[bytes | BaseException | None]) -> None:
        self.answers = answers
        self.ended: list[str] = []

    def trace(self, name: str) -> bytes | None:
        del name
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end_trace(self, name: str) -> None:
        self.ended.append(name)


def test_ctrl_c_asks_for_what_there_is() -> None:
    run: Any = Recording([None, KeyboardInterrupt(), None, b"trace"])
    assert wait_for_trace(run, "a") == b"trace"
    assert run.ended == ["a"]


def test_a_second_ctrl_c_ends_the_command() -> None:
    run: Any = Recording([KeyboardInterrupt(), None, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        wait_for_trace(run, "a")


def test_a_folder_in_which_nothing_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no process of this machine trains"):
        FolderSource(RunFolder(tmp_path)).ask_for_trace("a", 3)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SourceError, match="has ended without a trace"):
        FolderSource(RunFolder(tmp_path)).trace("a")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterSource:
    """A run on a cluster of which the head pod is this machine."""
    monkeypatch.setattr(
        "agenticrun_workers.driver.checkpoints.cluster_folders", lambda _: (tmp_path / "out", "")
    )

    class Here(Kubectl):
        def run(self, *words: str, timeout: float = 60.0) -> bytes:
            command = words[words.index("--") + 1 :]
            assert words[:4] == ("exec", "head", "-c", RAY_CONTAINER)
            done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
            if done.returncode:
                raise SourceError(done.stderr.decode())
            return done.stdout

        def json(self, *words: str) -> dict[str, Any]:
            if words[0] == "pods":
                return {"items": [{"metadata": {"name": "head"}, "status": {"phase": "Running"}}]}
            document = tiny_document()
            document["spec"]["checkpoint"] = {"none": True}
            return document

    return ClusterSource(Here(), "lake")


def test_a_run_on_a_cluster_is_asked_in_its_head_pod(
    cluster: ClusterSource, tmp_path: Path
) -> None:
    cluster.ask_for_trace("a", 5)
    (request,) = RunFolder(tmp_path / "out").trace_requests()
    assert (request.steps, cluster.trace("a")) == (5, None)
    content = gzip.compress(json.dumps({"traceEvents": []}).encode())
    request.answer.write_bytes(content)
    assert cluster.trace("a") == content
    cluster.end_trace("a")
    assert not RunFolder(tmp_path / "out").trace_requests()


def test_a_trace_that_failed_ends_the_wait(cluster: ClusterSource, tmp_path: Path) -> None:
    cluster.ask_for_trace("a", 5)
    (request,) = RunFolder(tmp_path / "out").trace_requests()
    request.fail("no space left")
    for run in (cluster, FolderSource(RunFolder(tmp_path / "out"))):
        with pytest.raises(SourceError, match="no trace: no space left"):
            run.trace("a")
