"""The reporter over real HTTP on the loopback: who may ask, what it remembers, what it refuses."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from agenticrun_api import Activity, FinalReport, LiveConfig, Outcome, Progress
from agenticrun_api.algorithm import Guards
from agenticrun_api.names import (
    DRIVER_HEADER,
    REPORTER_PORT,
    REPORTER_TOKEN_FILE,
    TOKEN_HEADER,
)
from agenticrun_api.progress import BEAT_SECONDS, QUIET_SECONDS
from agenticrun_workers.cli.source import ASK_CHECKPOINT
from agenticrun_workers.reporting.sidecar import (
    FROZEN_SECONDS,
    Reporter,
    StateFile,
)
from waiting import eventually

TOKEN = {TOKEN_HEADER: "Bearer secret"}


def progress(
    sequence: int = 1, *, attempt: int = 1, step: int = 3, final: FinalReport | None = None
) -> Progress:
    return Progress(
        run_uid="uid",
        submission_id=f"lake-uid-{attempt}",
        attempt=attempt,
        sequence=sequence,
        activity=Activity.ROLLOUT,
        step=step,
        max_steps=10,
        policy_version=step,
        time="2026-01-01T00:00:00Z",
        reward=0.25,
        metrics={"val/FrozenLake/success": 0.5},
        final=final,
    )


REPORT = FinalReport(
    outcome=Outcome.SUCCEEDED,
    reason="RunSucceeded",
    message="done",
    retryable=False,
    time="2026-01-01T00:00:00Z",
)


class Sidecar:
    """A running reporter that can be restarted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.clock: Callable[[], float] = lambda: self.now

    async def start(self) -> None:
        reporter = Reporter("secret", StateFile(self.path), clock=self.clock)
        self.http = TestClient(TestServer(reporter.app()))
        await self.http.start_server()

    async def restart(self) -> None:
        await self.http.close()
        await self.start()

    async def post(
        self,
        snapshot: Progress,
        secret: str = "driver's",
        status: int = 200,
        *,
        last: bool = False,
    ) -> dict[str, Any]:
        """Post a snapshot. The process that does so ends after the last one."""
        response = await self.http.post(
            "/progress",
            data=snapshot.model_dump_json(by_alias=True),
            headers={
                **TOKEN,
                DRIVER_HEADER: secret,
                "Connection": "close" if last else "keep-alive",
            },
        )
        assert response.status == status, await response.text()
        answer: dict[str, Any] = await response.json() if status == 200 else {}
        return answer

    async def get(self) -> Progress:
        response = await self.http.get("/progress", headers=TOKEN)
        return Progress.model_validate_json(await response.text())


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Sidecar]:
    running = Sidecar(tmp_path / "reporter" / "state.json")
    await running.start()
    yield running
    await running.http.close()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {TOKEN_HEADER: "Bearer wrong"},
        {TOKEN_HEADER: "secret"},
        {"Authorization": "Bearer secret"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/progress"), ("POST", "/progress"), ("GET", "/metrics"), ("POST", "/stop")],
)
async def test_nothing_but_the_probe_answers_without_the_token(
    sidecar: Sidecar, given: dict[str, str], method: str, path: str
) -> None:
    assert (await sidecar.http.request(method, path, headers=given)).status == 401
    assert (await sidecar.http.get("/healthz")).status == 200


async def test_there_is_no_progress_before_a_driver_reported(sidecar: Sidecar) -> None:
    assert (await sidecar.http.get("/progress", headers=TOKEN)).status == 204


async def test_the_newest_snapshot_is_served(sidecar: Sidecar) -> None:
    await sidecar.post(progress(2, step=4))
    await sidecar.post(progress(1, step=3))
    assert (await sidecar.get()).step == 4


async def test_it_tells_how_long_ago_the_driver_was_heard_and_had_news(sidecar: Sidecar) -> None:
    async def ages() -> tuple[float | None, float | None]:
        found = await sidecar.get()
        return found.silent_seconds, found.idle_seconds

    await sidecar.post(progress(1))
    sidecar.now += 10
    assert await ages() == (10, 10)
    await sidecar.post(progress(1))
    sidecar.now += 5
    assert await ages() == (5, 15), "the same snapshot again is no news"
    await sidecar.post(progress(2))
    assert await ages() == (0, 0)
    await sidecar.post(progress(3), last=True)
    await sidecar.post(progress(1, attempt=2))
    sidecar.now += 2
    await sidecar.post(progress(4, attempt=1))
    assert await ages() == (2, 2), "an older attempt is not this one's driver"
    await sidecar.restart()
    assert await ages() == (0, 0)


async def test_a_late_snapshot_of_an_older_attempt_changes_nothing(sidecar: Sidecar) -> None:
    await sidecar.post(progress(1, attempt=2))
    await sidecar.post(progress(9, attempt=1))
    assert (await sidecar.get()).attempt == 2


@pytest.mark.parametrize(
    "hostile",
    [
        progress(2**52, step=9),
        progress(2, step=9),
        progress(2, step=9, final=REPORT),
        progress(1, attempt=2, step=9),
        progress(1, attempt=2**52, step=9),
        progress(1, step=9).model_copy(update={"run_uid": "other", "submission_id": "other-1"}),
    ],
    ids=lambda hostile: f"attempt {hostile.attempt} sequence {hostile.sequence}",
)
async def test_other_processes_of_the_pod_cannot_hide_the_driver(
    sidecar: Sidecar, hostile: Progress
) -> None:
    await sidecar.post(progress(1, step=3))
    await sidecar.post(hostile, secret="", status=409)
    await sidecar.restart()
    await sidecar.post(hostile, secret="guess", status=409)
    await sidecar.post(progress(2, step=4))
    assert (await sidecar.get()).step == 4


async def test_a_driver_without_a_secret_is_not_hidden_by_a_high_sequence(
    sidecar: Sidecar,
) -> None:
    await sidecar.post(progress(1, step=3), secret="")
    await sidecar.post(progress(2**52, step=9), secret="", status=409)
    await sidecar.post(progress(10_001, step=4), secret="")
    assert (await sidecar.get()).step == 4


@pytest.mark.parametrize("hostile", [progress(2**52, step=9), progress(1, attempt=2**52, step=9)])
async def test_a_process_that_reports_while_there_is_no_driver_gives_way(
    sidecar: Sidecar, hostile: Progress
) -> None:
    await sidecar.post(progress(1), last=True)
    await sidecar.post(hostile, secret="", last=True)
    await sidecar.post(progress(1, attempt=2, step=4))
    assert (await sidecar.get()).step == 4
    await sidecar.post(progress(2, attempt=2, step=5))
    assert (await sidecar.get()).step == 5


async def test_a_driver_that_is_connected_may_be_silent_for_a_minute(sidecar: Sidecar) -> None:
    await sidecar.post(progress(1))
    sidecar.now = FROZEN_SECONDS - 1
    await sidecar.post(progress(2, step=9), secret="", status=409)
    await sidecar.post(progress(1, attempt=2, step=9), secret="", status=409)
    sidecar.now = FROZEN_SECONDS
    await sidecar.post(progress(1, attempt=2, step=4))
    assert (await sidecar.get()).step == 4


async def test_the_final_report_is_the_last_snapshot_of_an_attempt(sidecar: Sidecar) -> None:
    await sidecar.post(progress(3, final=REPORT))
    sidecar.now += 60
    await sidecar.post(progress(2))
    await sidecar.post(progress(4), secret="")
    assert (await sidecar.get()).final == REPORT
    await sidecar.post(progress(1, attempt=2))
    assert (await sidecar.get()).attempt == 2


async def test_a_restarted_sidecar_remembers_snapshot_report_and_commands(sidecar: Sidecar) -> None:
    await sidecar.post(progress(5, final=REPORT))
    await sidecar.http.post("/stop", headers=TOKEN)
    await sidecar.http.post("/checkpoint", headers=TOKEN)
    await sidecar.restart()
    assert (await sidecar.get()).final == REPORT
    assert await sidecar.post(progress(6)) == {"stop": True, "checkpoint": 1}


async def test_a_new_attempt_is_not_stopped_by_the_command_to_the_last_one(
    sidecar: Sidecar,
) -> None:
    await sidecar.post(progress(1))
    await sidecar.http.post("/stop", headers=TOKEN)
    assert (await sidecar.post(progress(2), last=True))["stop"] is True
    assert (await sidecar.post(progress(1, attempt=2)))["stop"] is False


def live_config(generation: int, max_steps: int) -> str:
    config = LiveConfig(
        generation=generation, max_steps=max_steps, eval_steps=1, save_steps=1, guards=Guards()
    )
    return config.model_dump_json(by_alias=True)


async def test_changed_settings_reach_every_later_attempt_and_the_newest_win(
    sidecar: Sidecar,
) -> None:
    for generation, max_steps in ((2, 20), (4, 40), (3, 30)):
        body = live_config(generation, max_steps)
        assert (await sidecar.http.put("/config", data=body, headers=TOKEN)).status == 200
    await sidecar.restart()
    for attempt in (1, 2):
        config = (await sidecar.post(progress(1, attempt=attempt), last=True))["config"]
        assert (config["generation"], config["maxSteps"]) == (4, 40)


async def test_settings_are_checked_and_need_the_token(sidecar: Sidecar) -> None:
    invalid = live_config(2, 5).replace('"maxSteps":5', '"maxSteps":-5')
    assert (await sidecar.http.put("/config", data=invalid, headers=TOKEN)).status == 422
    assert (await sidecar.http.put("/config", data=live_config(2, 5))).status == 401
    newer = live_config(2, 5).replace("{", '{"later": 1, ', 1)
    assert (await sidecar.http.put("/config", data=newer, headers=TOKEN)).status == 200


async def test_a_stop_asked_for_before_the_first_snapshot_is_not_lost(sidecar: Sidecar) -> None:
    await sidecar.http.post("/stop", headers=TOKEN)
    assert (await sidecar.post(progress(1)))["stop"] is True


async def test_what_is_not_a_snapshot_is_refused(sidecar: Sidecar) -> None:
    assert (await sidecar.http.post("/progress", data=b'{"step": -1}', headers=TOKEN)).status == 422
    assert (await sidecar.http.post("/progress", data=b"x" * 70_000, headers=TOKEN)).status == 413
    assert (await sidecar.http.get("/progress", headers=TOKEN)).status == 204


async def test_prometheus_reads_gauges(sidecar: Sidecar) -> None:
    await sidecar.post(progress())
    text = await (await sidecar.http.get("/metrics", headers=TOKEN)).text()
    assert "agenticrun_step 3\n" in text
    assert "agenticrun_reward 0.25\n" in text
    assert 'agenticrun_metric{name="val/FrozenLake/success"} 0.5\n' in text


async def test_on_a_full_disk_snapshots_and_commands_still_pass(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: StateFile, state: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StateFile, "write", full)
    await sidecar.post(progress(1, step=4))
    assert (await sidecar.get()).step == 4
    assert (await sidecar.http.post("/stop", headers=TOKEN)).status == 200
    assert (await sidecar.post(progress(2, step=5)))["stop"]
    monkeypatch.undo()
    await sidecar.post(progress(3, step=6))
    await sidecar.restart()
    assert (await sidecar.get()).step == 6


async def test_half_a_state_file_is_a_fresh_start(sidecar: Sidecar) -> None:
    await sidecar.post(progress())
    sidecar.path.write_text('{"progress": {"ru')
    await sidecar.restart()
    assert (await sidecar.http.get("/progress", headers=TOKEN)).status == 204


def test_the_sidecar_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, agenticrun_workers.reporting.sidecar; "
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_it_starts_as_the_pod_starts_it(tmp_path: Path) -> None:
    """Start it as a program: an import does not run its last lines."""
    (tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {
        "AGENTICRUN_REPORTER_TOKEN_FILE": str(tmp_path / "token"),
        "AGENTICRUN_REPORTER_STATE_FILE": str(tmp_path / "state.json"),
        "AGENTICRUN_REPORTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "agenticrun_workers.reporting.sidecar"]
    with subprocess.Popen(command, env=environment) as process:
        try:
            eventually(
                lambda: process.poll() is not None or _answers(port), 60, "the reporter answers"
            )
            assert process.poll() is None
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def test_the_command_line_requests_a_checkpoint_in_the_head_pod(
    sidecar: Sidecar, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    program = ASK_CHECKPOINT.replace(REPORTER_TOKEN_FILE, str(token))
    program = program.replace(f":{REPORTER_PORT}/", f":{sidecar.http.port}/")
    before = await sidecar.post(progress(1))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0
    after = await sidecar.post(progress(2))
    assert (before["checkpoint"], after["checkpoint"]) == (0, 1)
    token.write_text("wrong")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() != 0


# -- long polls ------------------------------------------------------------------------------------


KNOWN = {"submissionId": "lake-uid-1", "sequence": "1", "waitSeconds": "20"}


@pytest.fixture
async def living(tmp_path: Path) -> AsyncIterator[Sidecar]:
    """A reporter on the real clock, whose driver has posted one snapshot."""
    running = Sidecar(tmp_path / "state.json")
    running.clock = time.monotonic
    await running.start()
    await running.post(progress())
    yield running
    await running.http.close()


async def ask(sidecar: Sidecar, **query: str) -> tuple[Progress, float]:
    """Ask for news. Returns the answer, and the seconds until it came."""
    began = time.monotonic()
    response = await sidecar.http.get("/progress", headers=TOKEN, params=KNOWN | query)
    assert response.status == 200, await response.text()
    return Progress.model_validate_json(await response.text()), time.monotonic() - began


@pytest.mark.parametrize(
    "query", [{"sequence": "0"}, {"submissionId": "lake-uid-0"}, {"sequence": "0", "newer": "x"}]
)
async def test_one_who_does_not_know_the_newest_snapshot_gets_it_at_once(
    living: Sidecar, query: dict[str, str]
) -> None:
    answer, seconds = await ask(living, **query)
    assert (answer.sequence, seconds < 1) == (1, True)


async def test_a_question_is_held_until_there_is_news(living: Sidecar) -> None:
    question = asyncio.create_task(ask(living))
    await asyncio.sleep(0.2)
    await living.post(progress())
    await asyncio.sleep(0.2)
    assert not question.done(), "a repeated snapshot is no news"
    await living.post(progress(2, step=4))
    answer, seconds = await question
    assert (answer.sequence, seconds < 1.5) == (2, True)


async def test_a_held_question_shows_that_the_reporter_is_alive(living: Sidecar) -> None:
    async with living.http.get("/progress", headers=TOKEN, params=KNOWN) as answer:
        began = time.monotonic()
        piece = asyncio.create_task(answer.content.readany())
        while not piece.done():
            assert time.monotonic() < began + BEAT_SECONDS + 2
            await asyncio.sleep(0.5)
            await living.post(progress())
        assert (piece.result(), answer.status) == (b" ", 200)
        await living.post(progress(2))
        assert Progress.model_validate_json(await answer.read()).sequence == 2


async def test_an_asker_that_goes_away_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter("secret", StateFile(tmp_path / "state.json"))
    # As `main` does: handlers are not cancelled.
    runner = web.AppRunner(reporter.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}/progress".format(*runner.addresses[0][:2])
    async with aiohttp.ClientSession(headers=TOKEN) as session:
        snapshot = progress().model_dump_json(by_alias=True)
        async with session.post(url, data=snapshot, headers={DRIVER_HEADER: "driver's"}) as posted:
            assert posted.status == 200
        async with session.get(url, params=KNOWN):
            pass
    await asyncio.sleep(QUIET_SECONDS + 0.5)
    await runner.cleanup()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_question_is_held_until_its_time_is_over(living: Sidecar) -> None:
    answer, seconds = await ask(living, waitSeconds="0.3")
    assert (answer.sequence, 0.3 <= seconds < 2) == (1, True)


async def test_a_question_is_answered_when_the_driver_falls_silent(living: Sidecar) -> None:
    answer, seconds = await ask(living)
    assert QUIET_SECONDS - 0.5 <= seconds < QUIET_SECONDS + 2
    assert answer.silent_seconds is not None
    assert answer.silent_seconds >= QUIET_SECONDS


async def test_a_final_report_that_was_waited_for_is_not_read_yet(living: Sidecar) -> None:
    """Its asker may be gone, or no longer lead. The next question reads it."""
    question = asyncio.create_task(ask(living))
    await asyncio.sleep(0.2)
    await living.post(progress(2, final=REPORT), last=True)
    answer, _ = await question
    assert answer.final == REPORT
    for unread in (True, False):
        response = await living.http.post("/leave", headers=TOKEN, json={"pod": "lake-head"})
        assert (await response.json())["reportUnread"] is unread
        assert (await living.get()).final == REPORT


async def test_a_reporter_that_ends_does_not_wait_for_held_questions(living: Sidecar) -> None:
    question = asyncio.create_task(ask(living))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await living.http.server.close()
    await asyncio.wait([question])
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize(
    "query",
    [
        {"waitSeconds": "nan"},
        {"waitSeconds": "31"},
        {"waitSeconds": "-1"},
        {"sequence": "x"},
    ],
)
async def test_a_question_that_cannot_be_read_is_refused(
    living: Sidecar, query: dict[str, str]
) -> None:
    response = await living.http.get("/progress", headers=TOKEN, params=KNOWN | query)
    assert response.status == 422
    assert next(iter(query)) in await response.text()
