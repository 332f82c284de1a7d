"""The reporter: a small HTTP server in the head pod that outlives the driver and its attempts.

The driver posts snapshots to it on localhost; each answer holds the pending commands. The operator
reads the snapshots, requests a stop or a checkpoint, and sends changed settings. A head or trainer
pod that is being removed requests a stop, too (`leave`). Every path but the probe and the challenge
needs the reporter's token; `/leave` takes Ray's token, which all Ray containers of the run have.

Run it with `python -m agenticrun_workers.reporting.sidecar`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from agenticrun_api import Commands, LiveConfig, Progress
from agenticrun_api.base import Model
from agenticrun_api.challenge import Challenge, Proof, prove
from agenticrun_api.names import (
    DRIVER_HEADER,
    ENV_POD_IP,
    ENV_POD_UID,
    ENV_RAY_TOKEN,
    REPORTER_PORT,
    REPORTER_TOKEN_FILE,
    TOKEN_HEADER,
    WORK_DIR,
)
from agenticrun_api.progress import (
    BEAT_SECONDS,
    MAX_PROGRESS_BYTES,
    QUIET_SECONDS,
    LeaveAnswer,
    Leaving,
    ProgressQuery,
)

log = logging.getLogger(__name__)

LOST_SECONDS = 3.0
"""A driver without a connection is dead after this time. It posts every second."""
FROZEN_SECONDS = 60.0
"""A driver with a connection that posts nothing for this long is frozen, and saves nothing."""
_WITHOUT_TOKEN = ("/healthz", "/challenge")
STATE_FILE = Path(WORK_DIR) / "reporter" / "state.json"


class Reporter:
    """HTTP handlers on one `ReporterState`."""

    def __init__(
        self,
        token: str,
        file: StateFile,
        clock: Callable[[], float] = time.monotonic,
        ray_token: str = "",
        pod_uid: str = "",
        pod_ip: str = "",
    ) -> None:
        self._token = token
        self._pod = pod_uid, pod_ip
        self._bearer = f"Bearer {token}".encode()
        self._ray_bearer = f"Bearer {ray_token}".encode() if ray_token else self._bearer
        self._file = file
        self._state = file.read()
        self._writes = True
        """False after a write that failed."""
        self._clock = clock
        self._heard_at = self._news_at = clock()
        """When the driver last posted, and when that last brought news. The clock of this process
        decides: those of the driver's node and the operator's may differ."""
        self._connection: asyncio.Transport | None = None
        """The connection of the driver's last post. It closes when the driver's process ends."""
        self._news = asyncio.Event()
        """Set when a post has brought news, and then replaced by another one; and at the end."""
        self._report_read = False
        """True if the operator has read the newest snapshot, which may have a final report."""

    def app(self) -> web.Application:
        """Build the web application."""
        app = web.Application(client_max_size=MAX_PROGRESS_BYTES, middlewares=[self._authorize])
        app.on_shutdown.append(self._answer_all)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.post("/challenge", self._challenge),
                web.get("/progress", self._get_progress),
                web.post("/progress", self._post_progress),
                web.get("/metrics", self._metrics),
                web.post("/stop", self._stop),
                web.post("/leave", self._leave),
                web.post("/checkpoint", self._checkpoint),
                web.put("/config", self._put_config),
            ]
        )
        return app

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get(TOKEN_HEADER, "").encode(errors="replace")
        # Other pods have Ray's token only, and may do nothing but ask to leave.
        allowed = self._ray_bearer if request.path == "/leave" else self._bearer
        # In constant time: user code of any pod can reach this port.
        if request.path not in _WITHOUT_TOKEN and not hmac.compare_digest(given, allowed):
            raise web.HTTPUnauthorized(text=f"{TOKEN_HEADER}: Bearer <token> is missing or wrong")
        return await handler(request)

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _challenge(self, request: web.Request) -> web.Response:
        """Prove to the operator, before it sends a token, that this pod is the head."""
        try:
            nonce = Challenge.model_validate_json(await request.read()).nonce
        except ValidationError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        # The proof names pod and address: without them it would hold anywhere.
        if not all(self._pod):
            raise web.HTTPServiceUnavailable(text=f"{ENV_POD_UID} or {ENV_POD_IP} is not set")
        return _json(Proof(proof=prove(self._token, nonce, *self._pod)))

    async def _get_progress(self, request: web.Request) -> web.StreamResponse:
        """Answer with the newest snapshot; to a query of one who knows it, when there is news.

        The latter (a long poll) does not count as read: its asker may be gone, or no longer lead.
        """
        query = None
        if request.query:
            try:
                query = ProgressQuery.model_validate_strings(dict(request.query), extra="ignore")
            except ValidationError as error:
                raise web.HTTPUnprocessableEntity(text=str(error)) from error
        if self._state.progress is None:
            return web.Response(status=204)
        if query:
            return await self._hold(request, query)
        # A pod that leaves waits until the final report has been read.
        self._report_read = True
        return _json(self._newest())

    async def _hold(self, request: web.Request, query: ProgressQuery) -> web.StreamResponse:
        """Answer when there is news. A space now and then shows that this process is alive."""
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        end, news = self._clock() + query.wait_seconds, self._news
        with contextlib.suppress(ConnectionError):  # the asker has gone
            await answer.prepare(request)
            while (left := self._seconds_to_hold(query, end)) > 0 and not news.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, BEAT_SECONDS)):
                        await news.wait()
                await answer.write(b" ")  # JSON may begin with spaces
            await answer.write(_dump(self._newest()).encode())
        return answer

    def _seconds_to_hold(self, query: ProgressQuery, end: float) -> float:
        """Return how long a question may still wait for news: not if the driver has fallen silent.

        Args:
            query: the question.
            end: when it has to be answered.
        """
        held = self._state.progress
        assert held is not None
        if (held.submission_id, held.sequence) != (query.submission_id, query.sequence):
            return 0.0
        # The driver posts again and again, also without news.
        return min(end, self._heard_at + QUIET_SECONDS) - self._clock()

    def _newest(self) -> Progress:
        """Return the newest snapshot."""
        assert self._state.progress is not None
        now = self._clock()
        # Computed when asked: the operator must see a silent driver grow older.
        ages = {"silent_seconds": now - self._heard_at, "idle_seconds": now - self._news_at}
        return self._state.progress.model_copy(update=ages)

    async def _answer_all(self, _: web.Application) -> None:
        """Answer all held questions: this process is about to end, and waits for them."""
        self._news.set()

    async def _post_progress(self, request: web.Request) -> web.Response:
        try:
            progress = Progress.model_validate_json(await request.read())
        except ValidationError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        before, now = self._state, self._clock()
        poster = hashlib.sha256(request.headers.get(DRIVER_HEADER, "").encode()).hexdigest()
        # Lapsed: the process that sent the newest snapshot has ended, or is frozen.
        silent = now - self._heard_at
        if self._connection is None:  # this process has just started
            lapsed = silent >= LOST_SECONDS
        else:
            lapsed = self._connection.is_closing() or silent >= FROZEN_SECONDS
        try:
            # An attempt belongs to the process that posts for it: user code knows the token, too.
            self._become(before.with_progress(progress, poster, lapsed=lapsed))
        except NotTheDriver as error:
            raise web.HTTPConflict(text=str(error)) from error
        # A repeated snapshot shows that the driver is alive, but not that it makes progress.
        if self._state is not before:
            self._news_at = now
            self._report_read = False
            self._news.set()
            self._news = asyncio.Event()
        newest = self._state.progress
        assert newest is not None
        # Refused or outdated posts are no sign of life of the driver.
        if (newest.submission_id, newest.sequence) == (progress.submission_id, progress.sequence):
            self._heard_at = now
            self._connection = request.transport
        return _json(self._state.commands)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=exposition(self._state.progress),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _stop(self, _: web.Request) -> web.Response:
        self._become(self._state.asked_to_stop())
        return _json(self._state.commands)

    async def _leave(self, request: web.Request) -> web.Response:
        """Stop the driver because a pod is being removed. The pod asks again until it may go."""
        try:
            leaving = Leaving.model_validate_json(await request.read())
        except ValidationError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        progress = self._state.progress
        reported = progress is not None and progress.final is not None
        connected = self._connection is None or not self._connection.is_closing()
        longest = FROZEN_SECONDS if connected else LOST_SECONDS
        silent = self._clock() - self._heard_at
        # Only a driver that can still save and report is asked to stop.
        runs = progress is not None and not reported and silent < longest
        if runs:  # otherwise the request would end the next attempt
            self._become(self._state.asked_to_stop(leaving.pod))
        return _json(
            LeaveAnswer(driver_runs=runs, report_unread=reported and not self._report_read)
        )

    async def _checkpoint(self, _: web.Request) -> web.Response:
        self._become(self._state.asked_for_checkpoint())
        return _json(self._state.commands)

    async def _put_config(self, request: web.Request) -> web.Response:
        try:
            config = LiveConfig.model_validate_json(await request.read(), extra="ignore")
        except ValidationError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        self._become(self._state.configured(config))
        return _json(self._state.commands)

    def _become(self, state: ReporterState) -> None:
        """Take a state over. On a disk that takes nothing it lives in memory alone."""
        if state is self._state:
            return
        self._state = state
        try:
            self._file.write(state)
        except OSError as error:
            if self._writes:
                log.warning("the state is lost when this process ends: %s", error)
            self._writes = False
        else:
            self._writes = True


def _json(model: Model) -> web.Response:
    return web.Response(text=_dump(model), content_type="application/json")


def _dump(model: Model) -> str:
    return model.model_dump_json(by_alias=True, exclude_none=True)


def main() -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    token = (
        Path(os.environ.get("AGENTICRUN_REPORTER_TOKEN_FILE", REPORTER_TOKEN_FILE))
        .read_text()
        .strip()
    )
    if not token:
        raise SystemExit("the token file of the reporter is empty")
    file = StateFile(Path(os.environ.get("AGENTICRUN_REPORTER_STATE_FILE", STATE_FILE)))
    port = int(os.environ.get("AGENTICRUN_REPORTER_PORT", REPORTER_PORT))
    reporter = Reporter(
        token,
        file,
        ray_token=os.environ.get(ENV_RAY_TOKEN, ""),
        pod_uid=os.environ.get(ENV_POD_UID, ""),
        pod_ip=os.environ.get(ENV_POD_IP, ""),
    )
    web.run_app(reporter.app(), port=port, access_log=None, print=None)


MAX_JUMP = 10_000
"""Changes of a snapshot that a driver may have failed to post."""


class NotTheDriver(Exception):
    """A snapshot is refused, because the driver of the attempt reports something else."""


class ReporterState(Model):
    """The newest snapshot of the newest attempt, and the commands for that attempt.

    User code in the pod can read the token and post, too. One post of it with a high sequence or
    attempt must not hide all later posts of the driver. So an attempt belongs to the process that
    posts first for it, until that one has ended or is frozen.
    """

    progress: Progress | None = None
    driver: str = ""
    """Hash of the secret of the process that sent `progress`."""
    commands: Commands = Commands()

    def with_progress(self, progress: Progress, driver: str, *, lapsed: bool) -> ReporterState:
        """Return the state after a snapshot.

        Snapshots of an older attempt and repeated snapshots change nothing.
        The first one of a new attempt clears the stop command.

        Args:
            progress: the snapshot.
            driver: hash of the secret of the process that sent it.
            lapsed: True if the process that sent the newest one has ended or is frozen.

        Raises:
            NotTheDriver: another process than the one that reports the attempt has sent it.
        """
        held = self.progress
        mine = {"progress": progress, "driver": driver}
        if held is None:
            return self.model_copy(update=mine)
        if progress.submission_id != held.submission_id:
            # A late post of an attempt that was replaced.
            if held.run_uid == progress.run_uid and progress.attempt < held.attempt and not lapsed:
                return self
            if held.final is None and not lapsed:
                raise NotTheDriver(f"the driver of attempt {held.attempt} still reports")
            # The stop was meant for the attempt that has ended.
            commands = self.commands.model_copy(update={"stop": False, "leaving_pod": None})
            return ReporterState(commands=commands, **mine)
        # Nothing can follow the final report.
        if held.final is not None:
            return self
        if not lapsed:
            if driver != self.driver:
                raise NotTheDriver(f"another process reports attempt {held.attempt}")
            if progress.sequence > held.sequence + MAX_JUMP:
                raise NotTheDriver(f"sequence {progress.sequence} comes after {held.sequence}")
            if progress.sequence < held.sequence:
                return self
        return self if progress.sequence == held.sequence else self.model_copy(update=mine)

    def asked_to_stop(self, leaving_pod: str | None = None) -> ReporterState:
        """Return the state with the stop command set. The first cause stays.

        Args:
            leaving_pod: the pod that is being removed, if that is the cause.
        """
        if self.commands.stop:
            return self
        stop = {"stop": True, "leaving_pod": leaving_pod}
        return self.model_copy(update={"commands": self.commands.model_copy(update=stop)})

    def configured(self, config: LiveConfig) -> ReporterState:
        """Return the state with these settings, unless newer ones are known."""
        held = self.commands.config
        if held is not None and held.generation >= config.generation:
            return self
        return self.model_copy(
            update={"commands": self.commands.model_copy(update={"config": config})}
        )

    def asked_for_checkpoint(self) -> ReporterState:
        """Return the state with one more checkpoint requested."""
        count = self.commands.checkpoint + 1
        return self.model_copy(
            update={"commands": self.commands.model_copy(update={"checkpoint": count})}
        )


class StateFile:
    """A `ReporterState` on disk, which survives a restart of the sidecar. Writes are atomic."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> ReporterState:
        """Return the stored state, or a fresh one if there is none or another release wrote it."""
        try:
            return ReporterState.model_validate_json(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return ReporterState()

    def write(self, state: ReporterState) -> None:
        """Replace the stored state."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".tmp")
        with aside.open("w") as file:
            file.write(state.model_dump_json(by_alias=True, exclude_none=True))
            file.flush()
            # A node that fails must not bring back an older state, with commands that were done.
            os.fsync(file.fileno())
        aside.replace(self._path)


def exposition(progress: Progress | None) -> str:
    """Format a snapshot as Prometheus text.

    Args:
        progress: None before the first snapshot, which gives an empty text.
    """
    if progress is None:
        return ""
    gauges: dict[str, tuple[str, float | None]] = {
        "agenticrun_step": ("Completed training steps.", progress.step),
        "agenticrun_max_steps": ("Training steps of the whole run.", progress.max_steps),
        "agenticrun_attempt": ("Number of the driver's attempt.", progress.attempt),
        "agenticrun_policy_version": ("Version of the newest weights.", progress.policy_version),
        "agenticrun_reward": ("Mean score of the newest step's trajectories.", progress.reward),
        "agenticrun_tokens_per_second": (
            "Tokens of trained trajectories per second.",
            progress.tokens_per_second,
        ),
        "agenticrun_staleness": (
            "Mean age of the newest batch in policy versions.",
            progress.staleness,
        ),
        "agenticrun_seconds_per_step": (
            "Median seconds of the newest steps.",
            progress.seconds_per_step,
        ),
    }
    lines: list[str] = []
    for name, (text, value) in gauges.items():
        if value is not None:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {value}"]
    lines += [
        "# HELP agenticrun_metric The newest step's metrics.",
        "# TYPE agenticrun_metric gauge",
    ]
    lines += [
        f'agenticrun_metric{{name="{name}"}} {value}'
        for name, value in sorted(progress.metrics.items())
    ]
    lines += [
        "# HELP agenticrun_activity What the driver does now.",
        "# TYPE agenticrun_activity gauge",
    ]
    lines.append(f'agenticrun_activity{{activity="{progress.activity}"}} 1')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
