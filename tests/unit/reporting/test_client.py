"""The driver's side of the reporter: prompt, patient, and never in the way of training."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from agenticrun_api import Activity, Commands, FinalReport, Outcome, Progress
from agenticrun_workers.reporting import client as reporting_client
from agenticrun_workers.reporting.client import ReporterClient
from agenticrun_workers.reporting.sidecar import Reporter, StateFile


def progress(step: int, final: FinalReport | None = None) -> Progress:
    return Progress(
        run_uid="uid",
        submission_id="lake-1",
        attempt=1,
        sequence=step,
        activity=Activity.ROLLOUT,
        step=step,
        max_steps=10,
        policy_version=step,
        time="2026-01-01T00:00:00Z",
        final=final,
    )


REPORT = FinalReport(
    outcome=Outcome.FAILED,
    reason="WorkerLost",
    message="gone",
    retryable=True,
    time="2026-01-01T00:00:00Z",
)


async def test_a_change_is_posted_at_once_and_commands_come_back(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    file.write(file.read().asked_to_stop())
    answers: list[Commands] = []
    async with TestServer(Reporter("secret", file).app()) as server:
        client = ReporterClient(str(server.make_url("")), "secret", answers.append)
        await client.start()
        client.update(progress(1))
        async with asyncio.timeout(60):
            while (newest := file.read().progress) is None or not answers:
                await asyncio.sleep(0.01)
        assert newest.step == 1
        assert answers[0].stop
        await client.finish(progress(2, REPORT))
        last = file.read().progress
        assert last is not None
        assert last.final == REPORT


async def test_progress_that_cannot_be_written_does_not_end_the_posts(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    async with TestServer(Reporter("secret", file).app()) as server:
        client = ReporterClient(str(server.make_url("")), "secret", lambda _: None)
        await client.start()
        client.update(progress(1).model_copy(update={"run_uid": "\udce9"}))
        await asyncio.sleep(0.1)
        client.update(progress(2))
        async with asyncio.timeout(60):
            while (newest := file.read().progress) is None or newest.step < 2:
                await asyncio.sleep(0.01)
        await client.finish(progress(3, REPORT))


async def test_without_a_reporter_updates_return_at_once(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ReporterClient(f"http://127.0.0.1:{unused_tcp_port}", "secret", lambda _: None)
    await client.start()
    begin = time.perf_counter()
    for step in range(1000):
        client.update(progress(step))
    took = time.perf_counter() - begin
    monkeypatch.setattr(reporting_client, "FINAL_TRIES", 1)
    monkeypatch.setattr(reporting_client, "INTERVAL_SECONDS", 0.0)
    await client.finish(progress(1000, REPORT))
    assert took < 10.0  # one that waited for a connection each time would take minutes


async def test_the_final_report_waits_for_a_reporter_that_restarts(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    held = socket.socket()  # refuses until it listens, and nobody else gets its port
    held.bind(("127.0.0.1", 0))
    client = ReporterClient(f"http://127.0.0.1:{held.getsockname()[1]}", "secret", lambda _: None)
    await client.start()
    finishing = asyncio.create_task(client.finish(progress(3, REPORT)))
    await asyncio.sleep(0.2)
    async with TestServer(Reporter("secret", file).app(), socket_factory=lambda *_: held):
        await asyncio.wait_for(finishing, 60)
    last = file.read().progress
    assert last is not None
    assert last.final == REPORT


async def test_finishing_right_after_a_change_ends(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    async with TestServer(Reporter("secret", file).app()) as server:
        client = ReporterClient(str(server.make_url("")), "secret", lambda _: None)
        await client.start()
        await asyncio.sleep(0.1)
        client.update(progress(4, REPORT))
        finishing = asyncio.create_task(client.finish(progress(4, REPORT)))
        done, _ = await asyncio.wait([finishing], timeout=30)
        assert done
