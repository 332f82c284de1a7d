"""The head pod's answers are untrusted: limited in size, parsed strictly, never fatal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agenticrun_api import Progress, Reason
from agenticrun_api.progress import BEAT_SECONDS
from agenticrun_operator.cluster import DirectTransport, HeadAddress, RunHead, transports
from agenticrun_operator.cluster.kube import Response
from agenticrun_operator.cluster.transports import PodAddress, head_session
from agenticrun_operator.errors import HeadUnreachable
from agenticrun_operator.observed import Job, NoJob, NoReport, Unreachable

HEAD = HeadAddress(
    PodAddress("team", "lake-head", "127.0.0.1"),
    "run-uid",
    "ray-token",
    "reporter-token",
    "head-uid",
    "head-uid/0",
    proves_itself=False,
)
"""A head that an earlier version has made: test_challenge.py has those that prove themselves."""
PROGRESS: dict[str, Any] = {
    "runUid": "run-uid",
    "submissionId": "lake-1",
    "attempt": 1,
    "sequence": 7,
    "activity": "training",
    "step": 3,
    "maxSteps": 10,
    "policyVersion": 3,
    "time": "2026-01-01T00:00:00Z",
    "metrics": {"val/success": 0.5},
}


class Scripted:
    """A transport that answers as told and remembers what it was asked."""

    def __init__(self, **answers: Response):
        self.answers = answers
        self.asked: list[tuple[str, int, str, Mapping[str, str], Any]] = []

    async def request(
        self,
        method: str,
        pod: PodAddress,
        port: int,
        path: str,
        *,
        headers: Mapping[str, str],
        body: Any = None,
        limit: int,
        timeout: float = 0.0,
        silence: float | None = None,
    ) -> Response:
        self.asked.append((method, port, path, headers, body))
        self.timeout, self.silence = timeout, silence
        for part, answer in self.answers.items():
            if part in path.replace("/", "_"):
                return answer
        raise HeadUnreachable("no answer")


def says(document: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(document).encode())


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_token_is_told_from_a_head_that_does_not_answer(status: int) -> None:
    head = RunHead(Scripted(api_jobs=Response(status, b""), progress=Response(status, b"")))
    for seen in (await head.job(HEAD, "lake-1"), await head.progress(HEAD)):
        assert isinstance(seen, Unreachable)
        assert seen.reason is Reason.TOKENS_REFUSED
        assert f"pod lake-head refuses the operator's token (status {status})" in seen.why
    for action in (head.submit(HEAD, "lake-1", 1, {}), head.stop(HEAD, "lake-1")):
        with pytest.raises(HeadUnreachable, match="refuses the operator's token"):
            await action


async def test_progress_is_read_with_the_reporters_token() -> None:
    transport = Scripted(progress=says(PROGRESS))
    assert await RunHead(transport).progress(HEAD) == Progress.model_validate(PROGRESS)
    ((method, port, path, headers, _),) = transport.asked
    assert (method, port, path, headers) == (
        "GET",
        8787,
        "/progress",
        {"X-Ray-Authorization": "Bearer reporter-token"},
    )


async def test_a_snapshot_that_is_known_is_in_the_question_for_another_one() -> None:
    transport = Scripted(progress=says(PROGRESS | {"sequence": 8}))
    answer = await RunHead(transport).progress(HEAD, after=Progress.model_validate(PROGRESS))
    assert isinstance(answer, Progress)
    assert answer.sequence == 8
    ((_, _, path, _, _),) = transport.asked
    assert path == "/progress?submissionId=lake-1&sequence=7&waitSeconds=20.0"
    assert transport.timeout > 20.0
    assert transport.silence is not None
    assert BEAT_SECONDS < transport.silence < 8.0, "the status shows within 10 s that it hangs"


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_answer_may_take_its_time_while_the_head_shows_that_it_is_alive(
    hangs: bool,
) -> None:
    async def hold(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(6):
            await answer.write(b" ")
            await asyncio.sleep(9.0 if hangs else 0.1)
        await answer.write(b"{}")
        return answer

    app = web.Application()
    app.router.add_get("/progress", hold)
    async with TestServer(app) as server, head_session() as session:
        asked = DirectTransport(session).request(
            "GET",
            replace(HEAD.pod, ip="127.0.0.1"),
            server.port or 0,
            "/progress",
            headers={},
            limit=100,
            silence=0.4,
        )
        if hangs:
            with pytest.raises(HeadUnreachable):
                await asyncio.wait_for(asked, 2)
        else:
            assert json.loads((await asked).body) == {}


async def test_what_a_head_says_shows_no_secrets() -> None:
    """Which forms are known: `tests/unit/api/test_masking.py`."""
    key = "-----BEGIN PRIVATE KEY-----\n" + 50 * f"{'A' * 64}\n"
    transport = Scripted(
        api_jobs=says({"status": "FAILED", "message": "cannot open redis://:pw@host:1"}),
        logs_file=Response(200, f"before HF_TOKEN=abc\n{key}".encode()),
    )
    job = await RunHead(transport).job(HEAD, "lake-1")
    assert isinstance(job, Job)
    assert job.message == "cannot open redis://***@host:1"
    transport = Scripted(
        api_jobs=says({"status": "FAILED", "message": None}),
        logs_file=Response(200, f"{key[28:]}-----END PRIVATE KEY-----\nHF_TOKEN=abc\nend".encode()),
    )
    job = await RunHead(transport).job(HEAD, "lake-1")
    assert isinstance(job, Job)
    assert job.log_tail.endswith("***\nHF_TOKEN=***\nend")
    assert "A" * 64 not in job.log_tail


async def test_the_words_of_an_error_show_no_secrets() -> None:
    refused = Response(500, b"Traceback\nValueError: https://me:pw@host and password=abc")
    with pytest.raises(HeadUnreachable) as raised:
        await RunHead(Scripted(api_jobs=refused)).submit(HEAD, "lake-1", 1, {})
    assert "https://***@host and password=***" in str(raised.value)


@pytest.mark.parametrize("body", [b"[" * 500_000, b"\xff", b"{", b"[]", b'{"status": 1}'])
async def test_an_answer_of_ray_that_is_none_is_an_unreachable_head(body: bytes) -> None:
    job = await RunHead(Scripted(api_jobs=Response(200, body))).job(HEAD, "lake-1")
    assert isinstance(job, Unreachable)


@pytest.mark.parametrize("part", ["a.", "eyJ-", "a-key", "https://a", "key='"])
async def test_a_log_cannot_make_the_search_for_secrets_slow(part: str) -> None:
    transport = Scripted(
        api_jobs=says({"status": "FAILED", "message": None}),
        logs_file=Response(200, part.encode() * 200_000),
    )
    begun = time.process_time()
    await RunHead(transport).job(HEAD, "lake-1")
    assert time.process_time() - begun < 2


async def test_what_a_head_says_is_cleaned() -> None:
    log = "📈 \x1b[32mdone\x1b[0m\r\n".encode() + b"n\xe9\x00 " + "🤗".encode()
    transport = Scripted(
        api_jobs=says({"status": "FAILED", "message": "a\x00b\n\ud83ec 🤗"}),
        logs_file=Response(200, log),
    )
    job = await RunHead(transport).job(HEAD, "lake-1")
    assert isinstance(job, Job)
    assert job.message == "a\ufffdb \\ud83ec 🤗"
    assert job.log_tail == "📈 done\nn\ufffd\ufffd 🤗"


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": 2**60},
        {"reward": "NaN"},
        {"time": "yesterday"},
        {"lastStepTime": "9999-12-31T23:59:59Z"},
        {"activity": "dancing"},
        {"metrics": {"x" * 97: 1.0}},
        {"metrics": {f"m{index}": 1.0 for index in range(65)}},
        {"checkpoint": {"step": 1, "uri": "x" * 2000, "time": "2026-01-01T00:00:00Z"}},
    ],
)
async def test_progress_that_breaks_the_contract_is_unusable(change: dict[str, Any]) -> None:
    answer = await RunHead(Scripted(progress=says(PROGRESS | change))).progress(HEAD)
    assert isinstance(answer, Unreachable)
    assert len(answer.why) <= 300


async def test_what_only_a_newer_driver_reports_is_ignored() -> None:
    answer = await RunHead(Scripted(progress=says(PROGRESS | {"brandNew": 1}))).progress(HEAD)
    assert answer == Progress.model_validate(PROGRESS)


@pytest.mark.parametrize(
    "body", [b"not JSON", b'{"step": NaN}', b"[1]", b"\xff\xfe", b"[" * 20_000]
)
async def test_progress_that_is_no_progress_is_unusable(body: bytes) -> None:
    assert isinstance(
        await RunHead(Scripted(progress=Response(200, body))).progress(HEAD), Unreachable
    )


async def test_a_stop_is_requested_with_the_reporters_token() -> None:
    transport = Scripted(stop=Response(200, b"{}"))
    await RunHead(transport).request_stop(HEAD)
    ((method, port, path, headers, _),) = transport.asked
    assert (method, port, path) == ("POST", 8787, "/stop")
    assert headers["X-Ray-Authorization"] == "Bearer reporter-token"


async def test_no_content_means_that_no_driver_has_reported() -> None:
    assert await RunHead(Scripted(progress=Response(204, b""))).progress(HEAD) == NoReport()


async def test_a_job_is_read_without_what_we_do_not_need() -> None:
    transport = Scripted(
        api_jobs=says(
            {
                "status": "RUNNING",
                "message": "a\n b",
                "runtime_env": {},
                "driver_exit_code": None,
                "start_time": 1767225600500,
            }
        )
    )
    job = await RunHead(transport).job(HEAD, "lake-1")
    assert job == Job("RUNNING", "a b", start_time=1767225600.5)
    assert transport.asked[0][3] == {"X-Ray-Authorization": "Bearer ray-token"}


async def test_a_failed_job_brings_the_end_of_its_log() -> None:
    transport = Scripted(
        api_jobs=says({"status": "FAILED", "driver_exit_code": 1}),
        api_v0_logs=Response(200, b"x" * 9000 + b"the end"),
    )
    job = await RunHead(transport).job(HEAD, "lake-1")
    assert isinstance(job, Job)
    assert (len(job.log_tail), job.log_tail[-7:], job.exit_code) == (4096, "the end", 1)


async def test_a_failed_job_whose_log_is_gone_brings_what_ray_quotes() -> None:
    message = "exit code 137, last available logs (truncated): the end"
    job = await RunHead(Scripted(api_jobs=says({"status": "FAILED", "message": message}))).job(
        HEAD, "lake-1"
    )
    assert job == Job("FAILED", "exit code 137", None, " (truncated): the end")


async def test_unknown_and_unreachable_are_not_the_same() -> None:
    assert (
        await RunHead(Scripted(api_jobs=Response(404, b"Job lake-1 does not exist"))).job(
            HEAD, "lake-1"
        )
        == NoJob()
    )
    assert isinstance(await RunHead(Scripted()).job(HEAD, "lake-1"), Unreachable)
    assert isinstance(
        await RunHead(Scripted(api_jobs=Response(401, b""))).job(HEAD, "lake-1"), Unreachable
    )
    assert isinstance(
        await RunHead(Scripted(api_jobs=says({"no": "status"}))).job(HEAD, "lake-1"), Unreachable
    )


class RefusesTwice(Scripted):
    """Ray, which does not take a submission id twice."""

    async def request(self, method: str, *arguments: Any, **options: Any) -> Response:
        answer = await super().request(method, *arguments, **options)
        return (
            answer
            if method == "GET"
            else Response(400, b"ValueError: Job with submission_id lake-1 already exists.")
        )


async def test_a_submission_that_ray_knows_already_is_settled_by_a_get() -> None:
    await RunHead(RefusesTwice(api_jobs=says({"status": "RUNNING"}))).submit(HEAD, "lake-1", 1, {})
    with pytest.raises(HeadUnreachable, match="already exists"):
        await RunHead(RefusesTwice(api_jobs=Response(404, b""))).submit(HEAD, "lake-1", 1, {})


async def test_a_submission_tells_the_driver_its_attempt() -> None:
    transport = Scripted(api_jobs=says({"submission_id": "lake-1"}))
    await RunHead(transport).submit(HEAD, "lake-1", 3, {"env": 2})
    body = transport.asked[0][4]
    assert body["entrypoint"] == "python -m agenticrun_workers.driver"
    assert body["runtime_env"] == {
        "env_vars": {
            "AGENTICRUN_ATTEMPT": "3",
            "AGENTICRUN_SUBMISSION_ID": "lake-1",
            "AGENTICRUN_REPLICAS": '{"env": 2}',
        }
    }


async def test_an_answer_that_is_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (
        "TIMEOUT_SECONDS",
        "CONNECT_SECONDS",
    ):  # a stalled machine is no answer that is too long
        monkeypatch.setattr(transports, limit, 60.0)

    async def endless(_request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 100_000)

    app = web.Application()
    app.router.add_get("/progress", endless)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        transport, port = DirectTransport(session), int(server.port or 0)
        with pytest.raises(HeadUnreachable, match="more than 65536 bytes"):
            await transport.request("GET", HEAD.pod, port, "/progress", headers={}, limit=65_536)
        answer = await transport.request(
            "GET", HEAD.pod, port, "/progress", headers={}, limit=100_000
        )
        assert len(answer.body) == 100_000


async def test_nobody_there_is_unreachable() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(HeadUnreachable, match="lake-head"):
            await DirectTransport(session).request(
                "GET", HEAD.pod, 9, "/progress", headers={}, limit=10
            )
