"""Client of a run's head pod: Ray's job API and the reporter. All answers are untrusted input.

Tokens go only to a head that has proved itself a moment ago (`agenticrun_api.challenge`): the
address of a pod that has ended may belong to another pod before the watches report it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, ValidationError

from agenticrun_api import LiveConfig, Progress, Reason, names
from agenticrun_api.base import CLEAN, clean_text, one_line
from agenticrun_api.challenge import Challenge, Proof, prove
from agenticrun_api.masking import mask_secrets
from agenticrun_api.progress import BEAT_SECONDS, MAX_PROGRESS_BYTES, ProgressQuery
from agenticrun_api.version import __version__
from agenticrun_operator import errors, metrics
from agenticrun_operator.cluster.kube import KubeClient, Response, connect
from agenticrun_operator.cluster.transports import (
    TIMEOUT_SECONDS,
    DirectTransport,
    HeadTransport,
    PodAddress,
    ProxyTransport,
    allow_many_connections,
    head_session,
)
from agenticrun_operator.observed import Job, NoJob, NoReport, Unreachable
from agenticrun_operator.shard import ALL_RUNS, Shard

REPORTER_SECONDS = 4.0
"""Timeout of a question to the reporter, which answers from memory."""
HOLD_SECONDS = 20.0
"""Time for which the reporter may hold a question without news. It sends a space now and then, so
the status shows within 10 s that a head hangs."""
RAY_SECONDS = 8.0
"""Timeout of a question to Ray's dashboard, which may be busy. The status shows within 10 s that a
head is silent."""
PROOF_SECONDS = 30.0
"""Time for which a proof holds, unless the head fails to answer before. It costs one request."""
SHARED_SECONDS = 1.0
"""Time for which a head that has not proved itself is not challenged again: both of its parts are
asked at the same time."""
MAX_PROOF_BYTES = 4096
MAX_JOB_BYTES = 1024 * 1024
MAX_LOG_BYTES = 1024 * 1024
LOG_LINES = 80
LOG_IN_MESSAGE = ", last available logs"
"""Separator in Ray's job message between the error and the quoted log."""
LOG_TAIL_CHARACTERS = 4096


@dataclass(frozen=True)
class HeadAddress:
    """The address of a head pod and the tokens for its APIs."""

    pod: PodAddress
    run_uid: str
    ray_token: str
    reporter_token: str
    pod_uid: str
    incarnation: str
    """The newest start of the pod's Ray container."""
    proves_itself: bool = True
    """False for a head whose reporter cannot answer a challenge, because an earlier version of the
    operator made its RayCluster."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """The scope of a proof: one start of one pod at one address."""
        return self.pod_uid, self.pod.ip, self.incarnation


@dataclass
class _ProvedHead:
    """The last challenge of a head."""

    holds_until: float = 0.0
    refusal: errors.HeadUnreachable | None = None
    """Set if it has not proved itself."""
    refused_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _RayJob(BaseModel):
    """The part of Ray's JobDetails that we read."""

    model_config = ConfigDict(extra="ignore")

    status: Annotated[str, CLEAN]
    message: Annotated[str, CLEAN] | None = None
    driver_exit_code: int | None = None
    start_time: float | None = None
    """In milliseconds since the epoch."""


class RunHead:
    """Implements `protocols.Head` over a transport."""

    def __init__(self, transport: HeadTransport, clock: Callable[[], float] = time.monotonic):
        self._transport = transport
        self._clock = clock
        self._proved: dict[tuple[str, str, str], _ProvedHead] = {}
        """By identity, the most recently asked last."""

    async def job(self, head: HeadAddress, submission_id: str) -> Job | NoJob | Unreachable:
        try:
            answer = await self._ray(head, "GET", f"/api/jobs/{submission_id}")
            # Never submitted, or forgotten when Ray restarted: the caller knows which.
            if answer.status == 404:
                return NoJob()
            found = _RayJob.model_validate(_json(_ok(answer, "the job API")))
        except errors.TokenRefused as error:
            return Unreachable(str(error), Reason.TOKENS_REFUSED)
        except errors.HeadUnproved as error:
            return Unreachable(str(error), Reason.HEAD_UNPROVED)
        except (errors.HeadUnreachable, ValidationError) as error:
            return Unreachable(f"Ray's job API: {_brief(error)}")
        ended_badly = found.status in ("FAILED", "STOPPED")
        # Ray appends the log to the message, which would fill the condition.
        message, _, quoted_log = (found.message or "").partition(LOG_IN_MESSAGE)
        return Job(
            status=one_line(found.status, 32),
            message=one_line(message, 1024),
            exit_code=found.driver_exit_code,
            log_tail=await self._log_tail(head, submission_id, quoted_log) if ended_badly else "",
            start_time=None if found.start_time is None else found.start_time / 1000,
        )

    async def submit(
        self, head: HeadAddress, submission_id: str, attempt: int, replicas: Mapping[str, int]
    ) -> None:
        variables = {names.ENV_ATTEMPT: str(attempt), names.ENV_SUBMISSION_ID: submission_id}
        if replicas:
            variables[names.ENV_REPLICAS] = json.dumps(dict(replicas))
        body = {
            "entrypoint": names.DRIVER_COMMAND,
            "submission_id": submission_id,
            "runtime_env": {"env_vars": variables},
            "metadata": {"agenticrun.dev/run-uid": head.run_uid},
        }
        answer = await self._ray(head, "POST", "/api/jobs/", body)
        if answer.status < 300:
            return
        # The first answer may have been lost after Ray had taken the job.
        known = await self._ray(head, "GET", f"/api/jobs/{submission_id}")
        if known.status != 200:
            raise errors.HeadUnreachable(
                f"Ray did not accept the job: status {answer.status}: {_last_line(answer.body)}"
            )

    async def stop(self, head: HeadAddress, submission_id: str) -> None:
        answer = await self._ray(head, "POST", f"/api/jobs/{submission_id}/stop")
        # 404: Ray has forgotten the job, so there is nothing left to stop.
        if answer.status not in (200, 404):
            raise errors.HeadUnreachable(
                f"Ray did not stop the job: status {answer.status}: {_last_line(answer.body)}"
            )

    async def configure(self, head: HeadAddress, config: LiveConfig) -> None:
        answer = await self._reporter(head, "PUT", "/config", config.to_dict())
        if answer.status not in (200, 404, 405):  # an older reporter does not know the path
            raise errors.HeadUnreachable(
                f"the reporter does not accept settings: status {answer.status}: "
                f"{_last_line(answer.body)}"
            )

    async def request_stop(self, head: HeadAddress) -> None:
        _ok(await self._reporter(head, "POST", "/stop"), "the reporter")

    async def progress(
        self, head: HeadAddress, after: Progress | None = None
    ) -> Progress | NoReport | Unreachable:
        path, hold = "/progress", 0.0
        if after:
            hold = HOLD_SECONDS
            query = ProgressQuery(
                submission_id=after.submission_id, sequence=after.sequence, wait_seconds=hold
            )
            path = f"/progress?{urlencode(query.to_dict())}"
        try:
            answer = await self._reporter(head, "GET", path, hold=hold)
            if answer.status == 204:
                return NoReport()
            snapshot = _ok(answer, "the reporter")
            # A newer driver may report more than this operator knows.
            return Progress.model_validate_json(snapshot, strict=True, extra="ignore")
        except errors.TokenRefused as error:
            return Unreachable(str(error), Reason.TOKENS_REFUSED)
        except errors.HeadUnproved as error:
            return Unreachable(str(error), Reason.HEAD_UNPROVED)
        except (errors.HeadUnreachable, ValidationError) as error:
            return Unreachable(_brief(error))

    async def _log_tail(self, head: HeadAddress, submission_id: str, quoted_log: str) -> str:
        """Return the last lines of the driver's log, or `quoted_log` if there is no log."""
        query = (
            f"submission_id={submission_id}&node_ip={head.pod.ip}"
            f"&lines={LOG_LINES}&filter_ansi_code=true"
        )
        try:
            answer = await self._ray(head, "GET", f"/api/v0/logs/file?{query}", limit=MAX_LOG_BYTES)
            text = _ok(answer, "the log").decode(errors="replace")
        # The log file is on the head's disk; the quote in the job's message is all that is left.
        except errors.HeadUnreachable:
            text = quoted_log
        # Masked before it is cut, or half a secret could stay at the beginning.
        return mask_secrets(clean_text(text[-4 * LOG_TAIL_CHARACTERS :]))[-LOG_TAIL_CHARACTERS:]

    async def _reporter(
        self, head: HeadAddress, method: str, path: str, body: Any = None, hold: float = 0.0
    ) -> Response:
        timeout = REPORTER_SECONDS if method == "GET" else TIMEOUT_SECONDS
        return await self._request(
            (head, "the reporter", head.reporter_token, names.REPORTER_PORT),
            method,
            path,
            body=body,
            limit=MAX_PROGRESS_BYTES,
            timeout=hold + timeout,
            silence=BEAT_SECONDS + timeout if hold else None,
        )

    async def _ray(
        self,
        head: HeadAddress,
        method: str,
        path: str,
        body: Any = None,
        limit: int = MAX_JOB_BYTES,
    ) -> Response:
        timeout = RAY_SECONDS if method == "GET" else TIMEOUT_SECONDS
        return await self._request(
            (head, "Ray", head.ray_token, names.DASHBOARD_PORT),
            method,
            path,
            body=body,
            limit=limit,
            timeout=timeout,
        )

    async def _request(
        self, to: tuple[HeadAddress, str, str, int], method: str, path: str, **arguments: Any
    ) -> Response:
        """Send a request with a token to a part of a head that has proved itself."""
        head, who, token, port = to
        # An IP may belong to another pod by now: a token goes only to a head that proves to have
        # it.
        if head.proves_itself:
            await self._require_proof(head)
        headers = {names.TOKEN_HEADER: f"Bearer {token}"}
        try:
            answer = await self._send(method, head, port, path, headers=headers, **arguments)
        except errors.HeadUnreachable:
            self._proved.pop(head.identity, None)  # the next one there may be another pod
            raise
        if answer.status in (401, 403):
            raise errors.TokenRefused(
                f"{who} in pod {head.pod.name} refuses the operator's token "
                f"(status {answer.status})"
            )
        return answer

    async def _send(
        self,
        method: str,
        head: HeadAddress,
        port: int,
        path: str,
        *,
        silence: float | None = None,
        **arguments: Any,
    ) -> Response:
        """Send a request, and count it. One that the head holds says nothing about its latency."""
        began, status = time.monotonic(), ""
        try:
            answer = await self._transport.request(
                method, head.pod, port, path, silence=silence, **arguments
            )
            status = str(answer.status)
            return answer
        except errors.HeadUnreachable:
            status = "none"
            raise
        finally:
            if status:  # else it was cancelled
                metrics.HEAD_REQUESTS.labels(port=port, status=status).inc()
            if status and silence is None:
                metrics.HEAD_SECONDS.labels(port=port).observe(time.monotonic() - began)

    async def _require_proof(self, head: HeadAddress) -> None:
        """Challenge the head, unless its last proof still holds.

        Raises:
            HeadUnproved: it does not know how.
            TokenRefused: its proof is wrong.
            HeadUnreachable: there is no answer.
        """
        # Put back at the end, so that `_drop_old` finds the oldest first.
        known = self._proved.pop(head.identity, None) or _ProvedHead()
        self._proved[head.identity] = known
        # Job and progress are asked together: one challenge serves both.
        async with known.lock:
            now = self._clock()
            if now < known.holds_until:
                return
            if not known.refusal or now >= known.refused_at + SHARED_SECONDS:
                self._drop_old(now)
                try:
                    await self._challenge(head)
                except errors.HeadUnreachable as error:
                    known.refusal, known.refused_at = error, self._clock()
                else:
                    # Counted from before the challenge: counted from the answer, the proof would
                    # hold longer than PROOF_SECONDS.
                    known.refusal, known.holds_until = None, now + PROOF_SECONDS
            if known.refusal:
                raise type(known.refusal)(*known.refusal.args)

    async def _challenge(self, head: HeadAddress) -> None:
        challenge = Challenge(nonce=secrets.token_hex(32))
        answer = await self._send(
            "POST",
            head,
            names.REPORTER_PORT,
            "/challenge",
            headers={},
            body=challenge.to_dict(),
            limit=MAX_PROOF_BYTES,
            timeout=REPORTER_SECONDS,
        )
        if answer.status >= 500:
            raise errors.HeadUnreachable(f"the reporter answers with status {answer.status}")
        if answer.status != 200:
            raise errors.HeadUnproved(
                f"the reporter in pod {head.pod.name} does not know how to prove that it is the "
                f"head (status {answer.status}), so it gets no token: the worker image must be of "
                f"version {__version__}"
            )
        wanted = prove(head.reporter_token, challenge.nonce, head.pod_uid, head.pod.ip)
        try:
            given = Proof.model_validate_json(answer.body).proof
        except ValidationError:
            given = ""
        # In constant time: the answer may come from an attacker's pod.
        if not hmac.compare_digest(given, wanted):
            raise errors.TokenRefused(
                f"what answers for pod {head.pod.name} does not have the operator's token: it has "
                "another one, or is another pod"
            )

    def _drop_old(self, now: float) -> None:
        """Forget heads that were not asked for a long time, the oldest first."""
        while self._proved:
            identity, known = next(iter(self._proved.items()))
            newest = max(known.holds_until, known.refused_at)
            if known.lock.locked() or now < newest + PROOF_SECONDS:
                return
            del self._proved[identity]


def _ok(answer: Response, who: str) -> bytes:
    if answer.status != 200:
        raise errors.HeadUnreachable(f"{who} answers with status {answer.status}")
    return answer.body


def _json(body: bytes) -> Any:
    """Parse JSON in which a text may have lone surrogates, which pydantic refuses."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise errors.HeadUnreachable(f"unusable answer: {type(error).__name__}") from error


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"unusable answer: {'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]
    return one_line(str(error), 300)


def _last_line(body: bytes) -> str:
    lines = body.decode(errors="replace").strip().splitlines()
    return one_line(lines[-1], 300) if lines else ""


@asynccontextmanager
async def open_clients(
    namespaces: Sequence[str], *, heads_by_proxy: bool, shard: Shard = ALL_RUNS
) -> AsyncIterator[tuple[KubeClient, RunHead]]:
    """Open the clients of the apiserver and of head pods until the `with` block ends.

    Args:
        namespaces: the namespaces to watch; empty: the whole Kubernetes cluster.
        heads_by_proxy: True to reach head pods through the apiserver's proxy, not at their IPs.
        shard: the part of all runs that is listed and watched.
    """
    kube = KubeClient(await connect(), namespaces, shard)
    try:
        allow_many_connections()
        async with head_session() as session:
            direct = DirectTransport(session)
            yield kube, RunHead(ProxyTransport(kube) if heads_by_proxy else direct)
    finally:
        await kube.close()
