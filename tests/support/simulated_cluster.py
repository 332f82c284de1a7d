"""KubeRay, kubelet, Ray's job API, reporters and drivers, simulated on a real apiserver.

Pods are real objects whose status is written here. Each head has an address of its own on the
loopback interface, where the job API and the reporter answer HTTP. A driver makes a step a second.
What happens is kept in `History`, to compare the operator's statements with it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from agenticrun_api import (
    Activity,
    FinalReport,
    LiveConfig,
    Outcome,
    PoolStatus,
    Progress,
    Role,
)
from agenticrun_api.challenge import prove
from agenticrun_api.load import parse_served
from agenticrun_api.metrics import STEP_METRICS
from agenticrun_api.names import (
    DASHBOARD_PORT,
    ENV_ATTEMPT,
    ENV_REPLICAS,
    KIND,
    LABEL_ROLE,
    LABEL_RUN,
    REPORTER_PORT,
    TOKEN_HEADER,
    ExitCode,
)
from agenticrun_api.placement import HOSTNAME
from agenticrun_api.status import CheckpointStatus
from agenticrun_operator.cluster import KubeClient
from agenticrun_operator.cluster.kube import object_path
from agenticrun_operator.planning.times import format_time, parse_time
from agenticrun_operator.resources import Manifest, secret_of
from drills import is_ready
from fake_ray import FakeJob, missing_roles, pod_of, ready_condition, surplus_pods
from operator_world import gpus_of

STEP_SECONDS = 1.0
START_SECONDS = 2.0
"""Time until a pod is ready, and until a driver makes its first step."""
REJOIN_SECONDS = 3.0
"""Time in which the workers of a lost head notice it and start again."""
ANSWER_SECONDS = 60.0
"""The simulation waits so long for the apiserver, on a busy machine."""
NODE = "simulated"


@dataclass
class History:
    """Everything that happened to one run."""

    submissions: list[tuple[str, str]] = field(default_factory=list)
    """Submission id and incarnation of the head, of each job that Ray accepted."""
    drivers: set[str] = field(default_factory=set)
    """Submission id and incarnation of each driver that lives now."""
    overlaps: list[str] = field(default_factory=list)
    """Drivers that began while another one lived."""
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, attempt and number of each step that was made and reported."""
    lost: list[str] = field(default_factory=list)
    """Steps that were made again although a checkpoint held them."""
    checkpoint: int = 0
    faults: int = 0
    """Faults of its own, each of which ends a driver."""
    stops: int = 0
    """Requests to stop a driver that lived."""

    @property
    def step(self) -> int | None:
        return self.steps[-1][2] if self.steps else None


class SimulatedHead:
    """One incarnation of a head pod: Ray's job API, the reporter and the driver."""

    def __init__(self, pod: Manifest, run: Manifest, tokens: dict[str, str], history: History):
        self.ip = pod["status"]["podIP"]
        self._incarnation = f"{pod['metadata']['uid']}/0"
        self._run = parse_served(run)
        self._tokens = tokens
        self._uid = pod["metadata"]["uid"]
        self._history = history
        self._jobs: dict[str, FakeJob] = {}
        self._driver: asyncio.Task[None] | None = None
        self._report: Progress | None = None
        self._reported_at = 0.0
        self._config: LiveConfig | None = None
        self._stop_requested = False
        self._runners: list[web.AppRunner] = []

    async def start(self) -> None:
        """Answer on the ports of Ray and of the reporter."""
        ray, reporter = web.Application(), web.Application()
        ray.router.add_get("/api/jobs/{id}", self._get_job)
        ray.router.add_post("/api/jobs/", self._submit)
        ray.router.add_post("/api/jobs/{id}/stop", self._stop)
        ray.router.add_get("/api/v0/logs/file", self._log)
        reporter.router.add_get("/progress", self._progress)
        reporter.router.add_put("/config", self._configure)
        reporter.router.add_post("/challenge", self._challenge)
        reporter.router.add_post("/stop", self._request_stop)
        for app, port, key in (
            (ray, DASHBOARD_PORT, "auth_token"),
            (reporter, REPORTER_PORT, "token"),
        ):
            app.middlewares.append(self._authorized(self._tokens[key]))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, self.ip, port).start()
            self._runners.append(runner)

    async def stop(self) -> None:
        """The pod's processes end."""
        await self.kill_driver()
        for runner in self._runners:
            await runner.cleanup()

    async def kill_driver(self) -> bool:
        """Kill the driver; returns False if there is none."""
        if self._driver is None or self._driver.done():
            return False
        self._driver.cancel()
        with suppress(asyncio.CancelledError):
            await self._driver
        return True

    @staticmethod
    def _authorized(token: str) -> Callable[..., Awaitable[web.StreamResponse]]:
        @web.middleware
        async def check(request: web.Request, handler: Any) -> web.StreamResponse:
            given = request.headers.get(TOKEN_HEADER)
            if given != f"Bearer {token}" and request.path != "/challenge":
                return web.Response(status=401)
            answer: web.StreamResponse = await handler(request)
            return answer

        return check

    async def _challenge(self, request: web.Request) -> web.Response:
        nonce = (await request.json())["nonce"]
        proof = prove(self._tokens["token"], nonce, self._uid, self.ip)
        return web.json_response({"proof": proof})

    async def _get_job(self, request: web.Request) -> web.Response:
        job = self._jobs.get(request.match_info["id"])
        return web.json_response(job.details()) if job else web.Response(status=404)

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        variables = body["runtime_env"]["env_vars"]
        name, attempt = body["submission_id"], int(variables[ENV_ATTEMPT])
        if name in self._jobs:
            return web.Response(status=500, text=f"Job with submission_id {name} already exists")
        self._history.submissions.append((name, self._incarnation))
        self._stop_requested = False
        job = self._jobs[name] = FakeJob(
            name,
            attempt,
            self._incarnation,
            replicas=json.loads(variables.get(ENV_REPLICAS, "{}")),
            start_time=time.time(),
        )
        self._driver = asyncio.create_task(self._drive(job))
        return web.json_response({"submission_id": name})

    async def _stop(self, _: web.Request) -> web.Response:
        self._history.stops += await self.kill_driver()
        return web.json_response({"stopped": True})

    async def _log(self, _: web.Request) -> web.Response:
        return web.Response(text="the last line\n")

    async def _progress(self, _: web.Request) -> web.Response:
        if self._report is None:
            return web.Response(status=204)
        silent = time.monotonic() - self._reported_at
        return web.json_response(
            self._report.model_copy(update={"silent_seconds": silent}).to_dict()
        )

    async def _configure(self, request: web.Request) -> web.Response:
        self._config = LiveConfig.model_validate(await request.json())
        return web.Response()

    async def _request_stop(self, _: web.Request) -> web.Response:
        self._stop_requested = True
        return web.Response()

    async def _drive(self, job: FakeJob) -> None:
        """The driver: continue from the newest checkpoint, until the last step or a request."""
        history, me = self._history, f"{job.submission_id} on {self._incarnation}"
        history.overlaps += [f"{me} beside {other}" for other in history.drivers]
        history.drivers.add(me)
        pipeline = self._run.spec.pipeline
        try:
            await asyncio.sleep(START_SECONDS)
            job.status, step = "RUNNING", history.checkpoint
            # Read before each step, as the driver does: it may change.
            while step < (self._config or pipeline).max_steps:
                await asyncio.sleep(STEP_SECONDS)
                step += 1
                if step <= history.checkpoint:
                    history.lost.append(f"{me}: step {step}")
                if step % pipeline.save_steps == 0:
                    history.checkpoint = step
                history.steps.append((time.monotonic(), job.attempt, step))
                self._tell(job, step)
                if self._stop_requested:
                    await self._save_and_stop(job, step)
                    return
            words = {"reason": "Completed", "message": f"{step} steps"}
            final = FinalReport(
                outcome=Outcome.SUCCEEDED, retryable=False, time=format_time(utc_now()), **words
            )
            self._tell(job, step, final=final)
            job.status, job.exit_code = "SUCCEEDED", 0
        except asyncio.CancelledError:
            job.status, job.exit_code = "FAILED", 137
            job.message = "Job entrypoint command failed"
            raise
        finally:
            history.drivers.discard(me)

    async def _save_and_stop(self, job: FakeJob, step: int) -> None:
        """The driver: do as the reporter was asked, after the end of a step."""
        self._tell(job, step, activity=Activity.STOPPING)
        await asyncio.sleep(STEP_SECONDS)
        self._history.checkpoint = step
        words = {"reason": "Stopped", "message": f"stopped after step {step}"}
        final = FinalReport(
            outcome=Outcome.STOPPED, retryable=True, time=format_time(utc_now()), **words
        )
        self._tell(job, step, final=final)
        job.status, job.exit_code = "FAILED", ExitCode.STOPPED

    def _tell(self, job: FakeJob, step: int, **fields: Any) -> None:
        now, saved = utc_now(), self._history.checkpoint
        pipeline, config = self._run.spec.pipeline, self._config
        numbers = self._run.spec.roles.elastic | job.replicas | (config.replicas if config else {})
        if saved:
            fields["checkpoint"] = CheckpointStatus(
                step=saved, uri=f"s3://bucket/step-{saved}", time=format_time(now)
            )
        self._report = job.progress(
            self._run.metadata.uid,
            now,
            step,
            max_steps=pipeline.max_steps,
            observed_generation=(config or self._run.metadata).generation,
            pools={
                Role(role): PoolStatus(replicas=number, serving=number)
                for role, number in numbers.items()
            },
            seconds_per_step=STEP_SECONDS,
            tokens_per_second=100.0,
            staleness=0.0,
            metrics=dict.fromkeys(STEP_METRICS, 0.25),
            **fields,
        )
        self._reported_at = time.monotonic()


def utc_now() -> datetime:
    return datetime.now(UTC)


def _container(restarts: int) -> Manifest:
    """The status of a Ray container that starts now."""
    return {
        "name": "ray",
        "restartCount": restarts,
        "image": "worker:1",
        "imageID": "i",
        "containerID": "c://1",
        "state": {"running": {"startedAt": format_time(utc_now())}},
    }


def _lost_head(pod: Manifest, other: Manifest) -> bool:
    """Return True if the pod is a worker of an earlier head than the other pod, and knows it."""
    if pod["metadata"]["labels"][LABEL_ROLE] == Role.DRIVER.value:
        return False
    if other["metadata"]["labels"][LABEL_ROLE] != Role.DRIVER.value:
        return False
    starts = [
        parse_time(item["state"]["running"]["startedAt"])
        for one in (pod, other)
        for item in one.get("status", {}).get("containerStatuses", ())
    ]
    if len(starts) < 2 or starts[0] >= starts[1]:
        return False
    return (utc_now() - starts[1]).total_seconds() > REJOIN_SECONDS


class SimulatedCluster:
    """Everything of a Kubernetes cluster that is not its control plane, in one namespace."""

    def __init__(self, kube: KubeClient, namespace: str, gpus: int | None = None):
        """Create it.

        Args:
            kube: has all rights, and does not go through a proxy.
            namespace: of the runs.
            gpus: of the node; None: enough.
        """
        self._kube = kube
        self._gpus = gpus
        self._namespace = namespace
        self.histories: dict[str, History] = defaultdict(History)
        """By the run's name."""
        self.heads: dict[str, SimulatedHead] = {}
        """By the pod's uid."""
        self.runs: dict[str, Manifest] = {}
        """As the apiserver has them, by name."""
        self.pods: list[Manifest] = []
        self._numbers = itertools.count(1)
        self._began: dict[str, float] = {}
        """When a pod got its address, by uid."""
        self._addresses = itertools.count(1)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[SimulatedCluster]:
        """Work until the end of the block, in the background; an error there ends it."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._work())
            try:
                yield self
            finally:
                task.cancel()
                for head in self.heads.values():
                    await head.stop()

    async def _work(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(0.4)

    async def _look(self) -> None:
        runs, clusters, pods = await asyncio.gather(
            *(self.objects(kind) for kind in (KIND, "RayCluster", "Pod"))
        )
        self.runs = {run["metadata"]["name"]: run for run in runs}
        self.pods = [pod for pod in pods if LABEL_RUN in pod["metadata"].get("labels", {})]
        for cluster in clusters:
            uid = cluster["metadata"]["uid"]
            own = [pod for pod in self.pods if pod["metadata"]["ownerReferences"][0]["uid"] == uid]
            if "deletionTimestamp" not in cluster["metadata"]:
                for role in missing_roles(cluster, own):
                    name = f"{cluster['metadata']['name']}-{role}-{next(self._numbers)}"
                    await self._send(
                        "POST",
                        object_path("Pod", self._namespace),
                        body=pod_of(cluster, role, name),
                    )
                for pod in surplus_pods(cluster, own):
                    await self.delete("Pod", pod["metadata"]["name"])
            await self._place(own)
            for pod in own:
                await self._run_pod(cluster, pod, own)
        known = {cluster["metadata"]["uid"] for cluster in clusters}
        for pod in self.pods:
            if pod["metadata"]["ownerReferences"][0]["uid"] not in known:
                await self._end_deleted(pod)
        await self._end_removed()

    async def _place(self, own: list[Manifest]) -> None:
        """The scheduler: place the pods of a RayCluster for which there is room.

        Runs take turns: each look places one pod with GPUs of each.
        """
        turns = 1
        for pod in own:
            name, gpus = pod["metadata"]["name"], gpus_of(pod)
            if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
                continue
            if pod["spec"].get("schedulingGates"):
                continue
            held = sum(gpus_of(item) for item in self.pods if "nodeName" in item["spec"])
            if self._gpus is not None and gpus and (held + gpus > self._gpus or not turns):
                said = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
                unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                await self._patch_pod(name, {"conditions": [unplaced | {"message": said}]})
                continue
            turns -= bool(gpus)
            node = pod["spec"].get("nodeSelector", {}).get(HOSTNAME, NODE)
            pod["spec"]["nodeName"] = node
            await self._send(
                "POST",
                f"{object_path('Pod', self._namespace, name)}/binding",
                body={
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": {"name": name},
                    "target": {"apiVersion": "v1", "kind": "Node", "name": node},
                },
            )

    async def _run_pod(self, cluster: Manifest, pod: Manifest, own: list[Manifest]) -> None:
        """The kubelet: start a pod, restart a worker that lost its head, end what is deleted."""
        if await self._end_deleted(pod) or "nodeName" not in pod["spec"]:
            return
        uid, status = pod["metadata"]["uid"], pod.get("status", {})
        if "podIP" not in status:
            secret = await self._send(
                "GET", object_path("Secret", self._namespace, secret_of(cluster))
            )
            if "data" not in secret:  # there is none yet
                return
            self._began[uid] = time.monotonic()
            number = next(self._addresses)
            ip = f"127.{100 + os.getpid() % 100}.{number // 250}.{number % 250 + 1}"
            status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
            await self._write_pod(pod, status, ready=False, container=_container(0))
            name = pod["metadata"]["labels"][LABEL_RUN]
            if pod["metadata"]["labels"][LABEL_ROLE] == Role.DRIVER.value and name in self.runs:
                tokens = {key: b64decode(value).decode() for key, value in secret["data"].items()}
                pod = pod | {"status": status}
                head = SimulatedHead(pod, self.runs[name], tokens, self.histories[name])
                await head.start()
                self.heads[uid] = head
            return
        (container,) = status["containerStatuses"]
        if any(_lost_head(pod, other) for other in own):
            self._began[uid] = time.monotonic()
            container = _container(container["restartCount"] + 1)
            await self._write_pod(pod, status, ready=False, container=container)
        elif not is_ready(pod) and time.monotonic() > self._began[uid] + START_SECONDS:
            await self._write_pod(pod, status, ready=True, container=container)

    async def _write_pod(
        self, pod: Manifest, status: Manifest, ready: bool, container: Manifest
    ) -> None:
        container = container | {"ready": ready}
        status = status | {
            "conditions": [ready_condition(ready, utc_now())],
            "containerStatuses": [container],
        }
        await self._patch_pod(pod["metadata"]["name"], status)

    async def _patch_pod(self, name: str, status: Manifest) -> None:
        path = object_path("Pod", self._namespace, name)
        await self._send(
            "PATCH",
            f"{path}/status",
            body={"status": status},
            headers={"Content-Type": "application/merge-patch+json"},
        )

    async def _end_deleted(self, pod: Manifest) -> bool:
        if "deletionTimestamp" not in pod["metadata"]:
            return False
        if head := self.heads.pop(pod["metadata"]["uid"], None):
            await head.stop()
        await self.delete("Pod", pod["metadata"]["name"], gracePeriodSeconds=0)
        return True

    async def _end_removed(self) -> None:
        uids = {pod["metadata"]["uid"] for pod in self.pods}
        for uid in [uid for uid in self.heads if uid not in uids]:
            await self.heads.pop(uid).stop()

    # -- the user, and faults of a run's own -------------------------------------------------------

    async def objects(self, kind: str) -> list[Manifest]:
        """The objects of a kind in the namespace."""
        found = await self._send("GET", object_path(kind, self._namespace))
        items: list[Manifest] = found["items"]
        return items

    async def create_run(self, document: Manifest) -> None:
        await self._send("POST", object_path(KIND, self._namespace), body=document)

    async def suspend(self, name: str, suspend: bool) -> None:
        await self._send(
            "PATCH",
            object_path(KIND, self._namespace, name),
            body={"spec": {"suspend": suspend}},
            headers={"Content-Type": "application/merge-patch+json"},
        )

    async def delete(self, kind: str, name: str, **options: Any) -> None:
        path = object_path(kind, self._namespace, name)
        await self._send("DELETE", path, body={"propagationPolicy": "Background", **options})

    async def kill_driver(self, run: str) -> None:
        """The driver dies, and its head stays."""
        for pod in self._heads_of(run):
            self.histories[run].faults += await self.heads[pod["metadata"]["uid"]].kill_driver()

    async def delete_head(self, run: str) -> None:
        """The head pod is deleted, for example by `kubectl drain`."""
        for pod in self._heads_of(run):
            self.histories[run].faults += 1
            await self.delete("Pod", pod["metadata"]["name"])

    async def delete_trainer(self, run: str) -> None:
        """A pod of the trainers is deleted; this driver does not need it."""
        for pod in self.pods:
            labels = pod["metadata"]["labels"]
            if (labels[LABEL_RUN], labels[LABEL_ROLE]) == (run, Role.TRAINER.value):
                await self.delete("Pod", pod["metadata"]["name"])

    def _heads_of(self, run: str) -> list[Manifest]:
        return [
            pod
            for pod in self.pods
            if pod["metadata"]["labels"][LABEL_RUN] == run and pod["metadata"]["uid"] in self.heads
        ]

    async def _send(self, method: str, path: str, **arguments: Any) -> Manifest:
        """Send a request; another client may have been faster."""
        answer = await self._kube.raw(method, path, timeout=ANSWER_SECONDS, **arguments)
        assert answer.status < 300 or answer.status in (404, 409), (path, answer)
        found: Manifest = json.loads(answer.body)
        return found
