"""The preStop hook against a reporter over real HTTP, with a client in place of the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from agenticrun_api import Activity, Commands, FinalReport, Outcome, Progress
from agenticrun_api.names import LEAVE_COMMAND, REPORTER_PORT, TOKEN_HEADER
from agenticrun_workers.driver.outcome import report_of
from agenticrun_workers.driver.progress import (
    AttemptId,
    ProgressReporter,
    Requests,
    StopRequested,
)
from agenticrun_workers.reporting import leave
from agenticrun_workers.reporting.client import ReporterClient
from agenticrun_workers.reporting.sidecar import (
    FROZEN_SECONDS,
    LOST_SECONDS,
    Reporter,
    StateFile,
)

TOKEN = {TOKEN_HEADER: "Bearer secret"}
REPORT = FinalReport(
    outcome=Outcome.STOPPED,
    reason="Disrupted",
    message="stopped",
    retryable=True,
    time="2026-01-01T00:00:00Z",
)


class Head:
    """A reporter, and a driver that posts to it."""

    def __init__(self, folder: Path) -> None:
        self.later = 0.0
        self._sequence = 0
        reporter = Reporter(
            "secret",
            StateFile(folder / "state.json"),
            clock=lambda: time.monotonic() + self.later,
            ray_token="ray-secret",
        )
        self._server = TestServer(reporter.app())

    async def start(self) -> None:
        await self._server.start_server()
        assert self._server.port is not None
        self.port = self._server.port
        self.driver_begins()

    async def close(self) -> None:
        await self._driver.close()
        await self._server.close()

    async def post(self, *, attempt: int = 1, final: FinalReport | None = None) -> Commands:
        self._sequence += 1
        progress = Progress(
            run_uid="uid",
            submission_id=f"lake-{attempt}",
            attempt=attempt,
            sequence=self._sequence,
            activity=Activity.ROLLOUT,
            step=3,
            max_steps=10,
            policy_version=3,
            time="2026-01-01T00:00:00Z",
            final=final,
        )
        body = progress.model_dump_json(by_alias=True)
        async with self._driver.post("/progress", data=body) as answer:
            return Commands.model_validate_json(await answer.text())

    async def read(self) -> None:
        """Read the snapshot as the operator does."""
        async with self._driver.get("/progress") as answer:
            assert answer.status == 200

    def driver_begins(self) -> None:
        self._driver = aiohttp.ClientSession(str(self._server.make_url("")), headers=TOKEN)

    async def driver_dies(self) -> None:
        await self._driver.close()

    async def hook(
        self, seconds: float = 30, *, pod: str = "lake-head", token: str = "ray-secret"
    ) -> asyncio.subprocess.Process:
        """Start the hook as the kubelet starts it."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *LEAVE_COMMAND[1:],
            str(seconds),
            env=os.environ
            | {
                "RAY_ADDRESS": "127.0.0.1:6379",
                "RAY_AUTH_TOKEN": token,
                "POD_NAME": pod,
                "AGENTICRUN_REPORTER_PORT": str(self.port),
                "HTTP_PROXY": "http://127.0.0.1:9",
            },
            stderr=asyncio.subprocess.PIPE,
        )


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    running = Head(tmp_path)
    await running.start()
    yield running
    await running.close()


async def seconds_of(hook: asyncio.subprocess.Process) -> float:
    """Return the time until the hook succeeds."""
    begin = time.monotonic()
    assert await asyncio.wait_for(hook.wait(), 60) == 0
    return time.monotonic() - begin


async def asked(head: Head, attempt: int = 1) -> Commands:
    """Post as the driver until the hook's request arrives."""
    async with asyncio.timeout(60):
        while not (commands := await head.post(attempt=attempt)).stop:
            await asyncio.sleep(0.05)
    return commands


def test_the_hook_knows_the_reporter_and_starts_without_heavy_modules() -> None:
    assert (leave.REPORTER_PORT, leave.TOKEN_HEADER) == (REPORTER_PORT, TOKEN_HEADER)
    code = (
        "import sys, agenticrun_workers.reporting.leave; "
        "print([m for m in ('pydantic', 'agenticrun_api', 'aiohttp', 'ray') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


async def test_a_leaving_pod_stops_the_driver_and_goes_when_the_operator_has_its_report(
    head: Head,
) -> None:
    await head.post()
    hook = await head.hook(pod="lake-trainer-0")
    commands = await asked(head)
    assert (commands.stop, commands.leaving_pod) == (True, "lake-trainer-0")
    await head.post(final=REPORT)
    await asyncio.sleep(2)
    assert hook.returncode is None, "the operator has not read the report"
    await head.read()
    await seconds_of(hook)
    assert await head.post(attempt=2) == Commands()


async def test_a_report_that_no_operator_reads_holds_the_pod_for_some_seconds_only(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leave, "READ_SECONDS", 0.2)
    await head.post(final=REPORT)
    assert await asyncio.to_thread(
        leave.leave, "127.0.0.1", head.port, "ray-secret", "lake-head", 30
    )


async def test_a_pod_without_a_driver_goes_at_once_and_stops_no_later_attempt(head: Head) -> None:
    assert await seconds_of(await head.hook()) < 10
    assert not (await head.post()).stop
    await head.post(final=REPORT)
    await head.read()
    assert await seconds_of(await head.hook()) < 10
    assert not (await head.post(attempt=2)).stop


async def test_a_pod_that_leaves_stops_the_attempt_that_begins_on_it_too(head: Head) -> None:
    await head.post()
    hook = await head.hook()
    await asked(head)
    await head.driver_dies()
    head.driver_begins()
    assert (await asked(head, attempt=2)).leaving_pod == "lake-head"
    await head.post(attempt=2, final=REPORT)
    await head.read()
    await seconds_of(hook)


async def test_a_frozen_driver_holds_the_pod_until_its_time_is_over(head: Head) -> None:
    await head.post()
    begin = time.monotonic()
    hook = await head.hook(seconds=3)
    _, said = await hook.communicate()
    assert hook.returncode == 1
    assert said.decode().strip() == "the driver has not stopped within 3 s"
    assert 3 <= time.monotonic() - begin < 15


async def test_a_driver_that_is_frozen_for_a_minute_holds_no_pod(head: Head) -> None:
    await head.post()
    head.later = FROZEN_SECONDS - 5
    hook = await head.hook()
    await asyncio.sleep(2)
    assert hook.returncode is None
    head.later = FROZEN_SECONDS
    await seconds_of(hook)


async def test_a_driver_that_died_without_a_report_holds_no_pod(head: Head) -> None:
    await head.post()
    await head.driver_dies()
    head.later = LOST_SECONDS
    assert await seconds_of(await head.hook()) < 10


async def test_a_pod_goes_when_the_head_is_gone(head: Head) -> None:
    await head.close()
    assert await seconds_of(await head.hook()) < 20


async def test_a_stop_that_the_operator_requested_before_keeps_its_cause(head: Head) -> None:
    await head.post()
    async with head._driver.post("/stop") as answer:
        assert answer.status == 200
    hook = await head.hook()
    await asyncio.sleep(1)
    commands = await head.post()
    assert (commands.stop, commands.leaving_pod) == (True, None)
    await head.post(final=REPORT)
    await head.read()
    await seconds_of(hook)


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/leave", "ray-secret", 200),
        ("/leave", "secret", 401),
        ("/leave", "", 401),
        ("/stop", "ray-secret", 401),
        ("/progress", "ray-secret", 401),
    ],
)
async def test_rays_token_allows_nothing_but_to_leave(
    head: Head, path: str, token: str, status: int
) -> None:
    url = f"http://127.0.0.1:{head.port}{path}"
    headers = {TOKEN_HEADER: f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, headers=headers, json={"pod": "lake-head"}) as answer,
    ):
        assert answer.status == status


@pytest.mark.parametrize("body", ["", "{}", '{"pod": "a\\nb"}', '{"pod": "a", "more": 1}'])
async def test_a_request_without_the_name_of_a_pod_is_refused(head: Head, body: str) -> None:
    url = f"http://127.0.0.1:{head.port}/leave"
    headers = {TOKEN_HEADER: "Bearer ray-secret"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, headers=headers, data=body) as answer,
    ):
        assert answer.status == 422


async def test_a_driver_learns_of_it_within_two_seconds_while_it_does_other_work(
    head: Head,
) -> None:
    """The driver's own client, which also keeps the connection that shows that it is alive."""
    requests = Requests()
    client = ReporterClient(f"http://127.0.0.1:{head.port}", "secret", requests.apply)
    await client.start()
    reporter = ProgressReporter(client, AttemptId("uid", "lake-1", 1), max_steps=10)
    reporter.activity(Activity.ROLLOUT)
    await asyncio.sleep(0.5)
    hook = asyncio.create_task(
        asyncio.to_thread(leave.leave, "127.0.0.1", head.port, "ray-secret", "lake-head", 30)
    )
    async with asyncio.timeout(2):
        with pytest.raises(StopRequested) as stopped:
            await requests.unless_stopped(asyncio.sleep(1000))
    await asyncio.sleep(LOST_SECONDS + 1)
    assert not hook.done(), "the driver saves"
    await reporter.finish(report_of(stopped.value, step=3))
    await head.read()
    assert await asyncio.wait_for(hook, 10)


@pytest.mark.parametrize("obeys", [True, False])
def test_a_raylet_ends_in_order_or_is_killed(tmp_path: Path, obeys: bool) -> None:
    code = "import signal, time\n"
    code += "" if obeys else "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "print(1, flush=True)\ntime.sleep(60)"
    words = [f"{tmp_path}/raylet", "-c", code]
    with subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout is not None
        raylet.stdout.readline()
        (tmp_path / str(raylet.pid)).symlink_to(f"/proc/{raylet.pid}")
        (tmp_path / "1").symlink_to("/proc/self")  # another program
        leave.end_raylets(tmp_path, seconds=0.3)
        assert raylet.wait(10) == -(signal.SIGTERM if obeys else signal.SIGKILL)
