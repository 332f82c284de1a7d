"""Many runs on a real apiserver, with the operator's own process, KubeRay and KWOK's kubelet.

The heads are in this process: Ray's job API, reporters and drivers. Each one listens on the
loopback address that KWOK has given its pod. It proves itself, takes a driver and reports a step
now and then. When the status of a run shows a step, the time since the step is kept.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from agenticrun_api import FinalReport, Outcome, Role
from agenticrun_api.challenge import prove
from agenticrun_api.names import (
    DASHBOARD_PORT,
    ENV_ATTEMPT,
    KIND,
    LABEL_ROLE,
    LABEL_RUN,
    LABEL_RUN_UID,
    REPORTER_PORT,
    ExitCode,
)
from agenticrun_api.progress import BEAT_SECONDS
from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.cluster.kube import object_path
from agenticrun_operator.errors import WatchBroken
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest, OperatorKey
from control_plane import control_plane
from fake_ray import FakeJob
from operator_process import OperatorProcess, Release
from operator_world import copied
from runs import run_with
from testcluster import Cluster
from waiting import eventually_in_loop

METRICS = {f"some/metric/of/a/step/number_{number}": number / 7 for number in range(40)}
NAMESPACE, SYSTEM = "runs", "default"
RELEASE = Release("agenticrun", SYSTEM, (NAMESPACE,))
RAY_JOBS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"
MAX_STEPS = 1_000_000
CLIENTS = 16
"""Objects that are created at the same time."""
SECONDS = 900.0
"""Longest wait."""
MAX_LINE = 2**20
BACKLOG = 64


async def read_request(reader: StreamReader) -> tuple[str, str, Any]:
    """Return method, target and body of the next request of a connection.

    Raises:
        IncompleteReadError: the client has closed the connection.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    method, target, _ = head.decode().split(" ", 2)
    length = int((head.lower().partition(b"content-length:")[2].split() or [b"0"])[0])
    return method, target, json.loads(await reader.readexactly(length)) if length else {}


def answer_bytes(status: int, body: bytes) -> bytes:
    """Return the answer to a request, as it is sent."""
    return b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def chunk(body: bytes) -> bytes:
    """Return a chunk of an answer that is sent in pieces; the last one is empty."""
    return b"%x\r\n%s\r\n" % (len(body), body)


class StubHead:
    """One head pod: Ray's job API, the reporter and the driver."""

    def __init__(self, pod: Manifest, key: OperatorKey, step_seconds: float):
        labels = pod["metadata"]["labels"]
        self.run: str = labels[LABEL_RUN]
        self.ip: str = pod["status"]["podIP"]
        self.steps: dict[int, float] = {}
        """When each step was made, of the monotonic clock."""
        self.submissions: list[str] = []
        self._run_uid: str = labels[LABEL_RUN_UID]
        self.uid: str = pod["metadata"]["uid"]
        self._token = key.reporter_token(self._run_uid)
        self._step_seconds = step_seconds
        self._job: FakeJob | None = None
        self._report = b""
        """The newest snapshot, as JSON."""
        self._known = ("", 0)
        """Submission and sequence of the newest snapshot."""
        self._news = asyncio.Event()
        """Set, and replaced by another event, with each snapshot."""
        self._driver: asyncio.Task[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._connections: set[StreamWriter] = set()

    async def start(self) -> None:
        """Listen at the ports of Ray and of the reporter."""
        for port in (DASHBOARD_PORT, REPORTER_PORT):
            server = await asyncio.start_server(self._serve, self.ip, port, backlog=BACKLOG)
            self._servers.append(server)

    def stop(self) -> None:
        """The pod's processes end."""
        if self._driver:
            self._driver.cancel()
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.close()

    def make_step(self, final: FinalReport | None = None) -> None:
        """Report the next step or, with a final report, the end of the driver."""
        if self._job is None or self._job.exit_code is not None:
            return
        step = len(self.steps)
        if final is None:
            step += 1
            self.steps[step] = time.monotonic()
        self._known = self._job.submission_id, self._known[1] + 1
        progress = self._job.progress(
            self._run_uid,
            datetime.now(UTC),
            step,
            max_steps=MAX_STEPS,
            seconds_per_step=self._step_seconds,
            metrics=METRICS,
            final=final,
        ).model_copy(update={"sequence": self._known[1]})
        self._report = progress.model_dump_json(by_alias=True, exclude_none=True).encode()
        self._news.set()
        self._news = asyncio.Event()

    async def _drive(self) -> None:
        """The driver: a step now and then, at another time than the other runs."""
        await asyncio.sleep(random.uniform(0, self._step_seconds))
        while True:
            self.make_step()
            await asyncio.sleep(self._step_seconds)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                method, target, body = await read_request(reader)
                if target.startswith("/progress?") and self._report:
                    await self._hold(dict(parse_qsl(urlsplit(target).query)), writer)
                else:
                    writer.write(answer_bytes(*self._answer(method, target, body)))
        # Python 3.11 prints the cancellation of a handler, at the end of the loop, as an error.
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            self._connections.discard(writer)
            writer.close()

    def _answer(self, method: str, target: str, body: Any) -> tuple[int, bytes]:
        """Return status and body of the answer to a request at either port."""
        url = urlsplit(target)
        match method, url.path:
            case "POST", "/challenge":
                proof = prove(self._token, body["nonce"], self.uid, self.ip)
                return 200, json.dumps({"proof": proof}).encode()
            case "GET", "/progress":
                return self._progress()
            case "PUT", "/config":
                return 200, b"{}"
            case "POST", "/stop":
                self._end()
                return 200, b"{}"
            case "POST", "/api/jobs/":
                self.submissions.append(body["submission_id"])
                attempt = int(body["runtime_env"]["env_vars"][ENV_ATTEMPT])
                self._job = FakeJob(body["submission_id"], attempt, self.uid, status="RUNNING")
                self._driver = asyncio.create_task(self._drive())
                return 200, json.dumps({"submission_id": body["submission_id"]}).encode()
        job = self._job
        if job is None or not url.path.startswith(f"/api/jobs/{job.submission_id}"):
            return 404, b"{}"
        return 200, json.dumps(job.details() if method == "GET" else {"stopped": True}).encode()

    async def _hold(self, query: dict[str, str], writer: StreamWriter) -> None:
        """Answer the question for news, and show until then that the head is alive."""
        writer.write(b"HTTP/1.1 200 -\r\nTransfer-Encoding: chunked\r\n\r\n")
        known, end = self._known, time.monotonic() + float(query["waitSeconds"])
        if known == (query["submissionId"], int(query["sequence"])):
            while known == self._known and (left := end - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, BEAT_SECONDS)):
                        await self._news.wait()
                writer.write(chunk(b" "))
        writer.write(chunk(self._progress()[1]) + chunk(b""))

    def _progress(self) -> tuple[int, bytes]:
        if not self._report:
            return 204, b""
        idle = time.monotonic() - self.steps[len(self.steps)]
        ages = b',"silentSeconds":0.5,"idleSeconds":%.1f}' % idle
        return 200, self._report[:-1] + ages

    def _end(self) -> None:
        """The driver: save and end, as it was asked to."""
        if self._driver:
            self._driver.cancel()
        words = {"reason": "Stopped", "message": "stopped", "time": format_time(datetime.now(UTC))}
        self.make_step(FinalReport(outcome=Outcome.STOPPED, retryable=True, **words))
        if self._job:
            self._job.status, self._job.exit_code = "FAILED", ExitCode.STOPPED


@dataclass(frozen=True)
class Lag:
    """A step of a run, and how long its status took to show it."""

    made: float
    """When it was made, of the monotonic clock."""
    seconds: float


class KwokFleet:
    """The runs of a namespace: their heads, and what their status says of the steps."""

    def __init__(self, kube: KubeClient, cluster: Cluster, folder: Path, step_seconds: float):
        """Create it.

        Args:
            kube: the apiserver, with all rights.
            cluster: the same.
            folder: for the operator's kubeconfig and log.
            step_seconds: time of a step of each run.
        """
        self._kube = kube
        self._cluster = cluster
        self._folder = folder
        self._step_seconds = step_seconds
        self._key = OperatorKey("k" * 32)
        self.heads: dict[str, StubHead] = {}
        """By the run's name."""
        self.clusters: dict[str, Manifest] = {}
        """The RayClusters, by name."""
        self.pods: set[str] = set()
        """Uids of all pods."""
        self.lags: list[Lag] = []
        self.shown: dict[str, int] = {}
        """The step that the status of each run shows, by the run's name."""

    def start_operator(self) -> OperatorProcess:
        """Start the operator as the chart does."""
        return OperatorProcess.start(
            self._folder,
            RELEASE.kubeconfig(self._cluster),
            AGENTICRUN_NAMESPACES=NAMESPACE,
            AGENTICRUN_NETWORK_POLICY_NAMESPACE=SYSTEM,
            **RELEASE.lease(self._cluster),
        )

    @asynccontextmanager
    async def work(self) -> AsyncIterator[KwokFleet]:
        """Work until the end of the block, in the background; an error there ends it."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._follow("Pod", self._see_pod)),
                group.create_task(self._follow("RayCluster", self._see_cluster)),
                group.create_task(self._follow_runs()),
            ]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                for head in self.heads.values():
                    head.stop()

    async def create_runs(self, names: Sequence[str]) -> None:
        """Create runs with one pod of each role."""
        await self._create(object_path(KIND, NAMESPACE), [a_run(name) for name in names])

    async def create_ray_jobs(self, names: Sequence[str], spec: Manifest) -> None:
        """Create jobs of KubeRay that make RayClusters of a run's spec."""
        spec = copied(spec)
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            del group["template"]["metadata"]["labels"][LABEL_RUN]  # the pods are of no run
        kind = {"apiVersion": "ray.io/v1", "kind": "RayJob"}
        job = {"entrypoint": "true", "shutdownAfterJobFinishes": True, "rayClusterSpec": spec}
        jobs = [kind | {"metadata": {"name": name}, "spec": job} for name in names]
        await self._create(RAY_JOBS, jobs)

    async def _create(self, path: str, documents: Iterable[Manifest]) -> None:
        """Create objects as fast as a few clients can."""
        left = iter(documents)

        async def client() -> None:
            for document in left:
                await self._send("POST", path, body=document)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def delete_all(self) -> None:
        """Delete the runs and jobs, and wait until nothing is left of them."""
        for path in (object_path(KIND, NAMESPACE), RAY_JOBS):
            await self._send("DELETE", path)
        # KubeRay does not let go of a job that it cannot stop, and there is none.
        for job in (await self._send("GET", RAY_JOBS))["items"]:
            await self._send(
                "PATCH",
                f"{RAY_JOBS}/{job['metadata']['name']}",
                body={"metadata": {"finalizers": None}},
                headers={"Content-Type": "application/merge-patch+json"},
            )
        await self.until(lambda: not (self.shown or self.clusters or self.pods), "all are gone")

    async def _send(self, method: str, path: str, **arguments: Any) -> Manifest:
        answer = await self._kube.raw(method, path, timeout=SECONDS, **arguments)
        assert answer.status < 300, (path, answer)
        found: Manifest = json.loads(answer.body)
        return found

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for what the watches show."""
        await eventually_in_loop(condition, SECONDS, what, interval=0.05)

    def make_steps(self) -> dict[str, int]:
        """Make a step of each run now. Returns the steps, by the names of the runs."""
        for head in self.heads.values():
            head.make_step()
        return {name: len(head.steps) for name, head in self.heads.items()}

    def shows(self, steps: Mapping[str, int]) -> bool:
        """Return True if the status of each run shows this step or a later one."""
        return all(self.shown.get(name, 0) >= step for name, step in steps.items())

    def lags_between(self, began: float, ended: float) -> list[float]:
        """Return the lag of each step of a time, in seconds; until now of those not shown yet."""
        now = time.monotonic()
        lags = self.lags + [
            Lag(made, now - made)
            for name, head in self.heads.items()
            for step, made in head.steps.items()
            if step > self.shown.get(name, 0)
        ]
        return [lag.seconds for lag in lags if began <= lag.made < ended]

    async def _follow(self, kind: str, see: Callable[[Manifest, bool], Awaitable[None]]) -> None:
        """Call `see` with each version of the objects of a kind, and whether the object is gone."""
        items, version = await self._kube.list_objects(kind, NAMESPACE, None)
        for item in items:
            await see(item, False)
        while True:
            with suppress(WatchBroken):
                async with self._kube.watch_objects(kind, NAMESPACE, None, version) as events:
                    async for event, item in events:
                        version = item["metadata"]["resourceVersion"]
                        if event != "BOOKMARK":
                            await see(item, event == "DELETED")

    async def _see_cluster(self, cluster: Manifest, gone: bool) -> None:
        name = cluster["metadata"]["name"]
        if gone:
            del self.clusters[name]
        else:
            self.clusters[name] = cluster

    async def _see_pod(self, pod: Manifest, gone: bool) -> None:
        uid, labels = pod["metadata"]["uid"], pod["metadata"]["labels"]
        known = self.heads.get(name := labels.get(LABEL_RUN, ""))
        if gone:
            self.pods.discard(uid)
            if known and known.uid == uid:
                self.heads.pop(name).stop()
            return
        self.pods.add(uid)
        ip = pod.get("status", {}).get("podIP")
        if (
            not (ip and name)
            or labels.get(LABEL_ROLE) != Role.DRIVER.value
            or (known and known.uid == uid)
        ):
            return
        # KWOK gives an address away before it tells that the pod that had it is gone.
        for other in [head for head in self.heads.values() if ip == head.ip or head is known]:
            self.heads.pop(other.run).stop()
        self.heads[name] = StubHead(pod, self._key, self._step_seconds)
        await self.heads[name].start()

    async def _follow_runs(self) -> None:
        """Read the status of the runs as a user does."""
        words = ("get", "agenticruns", "--watch", "--output-watch-events", "-o", "json")
        process = await asyncio.create_subprocess_exec(
            *("kubectl", "--namespace", NAMESPACE, *words),
            env=self._cluster.env,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
        )
        assert process.stdout
        try:
            async for line in process.stdout:
                event = json.loads(line)
                self._see_run(event["object"], gone=event["type"] == "DELETED")
        finally:
            process.terminate()
            await process.wait()

    def _see_run(self, run: Manifest, gone: bool) -> None:
        name, step = run["metadata"]["name"], run.get("status", {}).get("step") or 0
        before = self.shown.pop(name, 0)
        if gone:
            return
        self.shown[name] = step
        if head := self.heads.get(name):
            now = time.monotonic()
            made = [head.steps[number] for number in range(before + 1, step + 1)]
            self.lags += [Lag(one, now - one) for one in made]


@asynccontextmanager
async def kwok_fleet(folder: Path, step_seconds: float) -> AsyncIterator[KwokFleet]:
    """Yield a fleet without runs and without an operator, on a control plane of its own."""
    # Loopback addresses that the tests that run at the same time do not use.
    with control_plane(folder, f"127.{2 + os.getpid() % 98}.0.0/16") as cluster:
        RELEASE.set_up(cluster)
        cluster.apply(*RELEASE.cluster_rights(cluster))
        kube = KubeClient(await connect(Path(cluster.env["KUBECONFIG"])), [NAMESPACE])
        try:
            async with KwokFleet(kube, cluster, folder, step_seconds).work() as fleet:
                yield fleet
        finally:
            await kube.close()


def a_run(name: str) -> Manifest:
    """Return a run with one pod of each role, which has steps for longer than any test."""
    return run_with(
        ("spec.pipeline.maxSteps", MAX_STEPS),
        ("spec.pipeline.saveSteps", MAX_STEPS),
        ("spec.checkpoint.uri", "s3://bucket/prefix"),
        ("spec.roles.trainer", {"gpus": 1}),
        name=name,
    )
