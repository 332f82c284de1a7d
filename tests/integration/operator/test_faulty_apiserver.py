"""The operator's own process on a real apiserver, through a proxy that breaks in eleven ways.

A real Prometheus scrapes it, with the chart's rules, and answers the queries of the dashboards.

Runs train meanwhile, on simulated pods, and some of them lose their driver or their head. After
each fault the status must be true again within ten seconds; no step is lost beyond the last
checkpoint, no driver runs twice, and nothing is left of deleted runs.

`make drills` sets the minutes and the number of runs; here a core of it runs, each fault once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import subprocess
import sys
import time
import urllib.error
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api.names import KIND, LABEL_ROLE, LABEL_RUN
from agenticrun_operator.cluster import KubeClient, connect
from control_plane import control_plane
from drills import ENDED, TRUE_WITHIN_SECONDS, Sample, counts_as_ready, untruths
from faulty_proxy import Fault, FaultyProxy
from operator_process import OperatorProcess, Release
from prometheus_server import DASHBOARDS, RULES, Prometheus, panels, prometheus
from runs import run_with
from simulated_cluster import STEP_SECONDS, SimulatedCluster
from testcluster import ROOT, Cluster
from waiting import eventually

SECONDS = float(os.environ.get("AGENTICRUN_PROXY_SECONDS", "0"))
"""Duration of the faults; 0: each fault once, for as short as it can be."""
RUNS = int(os.environ.get("AGENTICRUN_PROXY_RUNS", "5"))
SEED = int(os.environ.get("AGENTICRUN_PROXY_SEED", "1"))
NAMESPACE, SYSTEM = "runs", "default"
RELEASE = Release("agenticrun", SYSTEM, (NAMESPACE,))
SAVE_STEPS = 5
MAY_BE_EMPTY = (
    "run: Conditions that are not true",
    "fleet: Why runs stand still",
    "fleet: Runs that wait in queues",
    "operator: Writes per second",
)
"""Panels with a line for each reason, queue or error, and so without lines if there is none."""
LATE_SECONDS = 2.0
"""A sample that comes so late, a second after the last one began, says nothing about the operator:
the machine is too busy, or the apiserver takes a second to answer without any proxy."""


@dataclass(frozen=True)
class Act:
    """A fault of the proxy, and how long the proxy is healthy after it."""

    fault: Fault
    lasts: float
    pause: float


def acts() -> list[Act]:
    """The faults in the order in which they come."""
    if not SECONDS:
        return [Act(fault, 2.0, 12.0 if fault is Fault.DEAD else 1.0) for fault in Fault]
    chance, found, total = random.Random(SEED), [], 0.0
    faults: list[Fault] = []
    while total < SECONDS:
        faults = faults or chance.sample(list(Fault), len(Fault))
        act = Act(faults.pop(), chance.uniform(3, 20), chance.uniform(12, 18))
        found.append(act)
        total += act.pause + (act.lasts if act.fault is not Fault.DEAD else 0)
    return found


def max_steps() -> int:
    """Steps of a run; each takes a second."""
    return int(SECONDS * 0.45) if SECONDS else 30


def run_document(name: str) -> dict[str, Any]:
    return run_with(
        ("spec.pipeline.maxSteps", max_steps()),
        ("spec.pipeline.saveSteps", SAVE_STEPS),
        ("spec.checkpoint.uri", "s3://bucket/prefix"),
        ("spec.roles.trainer", {"gpus": 1}),
        ("spec.failurePolicy", {"backoffSeconds": 1}),
        name=name,
    )


@dataclass
class Deployment:
    """The operator's process; one that ends or is not healthy is replaced, as Kubernetes does."""

    folder: Path
    config: dict[str, Any]
    settings: dict[str, str]
    restarts: list[str] = field(default_factory=list)
    """Why each one was replaced."""

    async def supervise(self) -> None:
        self.process = self._start()
        failures, started = 0, False  # a start may take long, as for the chart's startup probe
        while True:
            await asyncio.sleep(2)
            try:
                await asyncio.to_thread(self.process.check_alive)
                failures, started = 0, True
            except (AssertionError, OSError, urllib.error.URLError) as error:
                failures += started
                ended = self.process.process.poll() is not None
                if ended or failures == 3:
                    self.restarts.append(f"{'ended' if ended else 'not healthy'}: {error}")
                    await asyncio.to_thread(self.process.stop)
                    self.process, failures, started = self._start(), 0, False

    def _start(self) -> OperatorProcess:
        return OperatorProcess.start(
            self.folder, self.config, AGENTICRUN_NAMESPACES=NAMESPACE, **self.settings
        )


@dataclass
class Recording:
    """A sample of each run and second, with the truth."""

    cluster: SimulatedCluster
    proxy: FaultyProxy
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """By run."""
    starved: int = 0
    """Samples that came late, because the machine had no time for this process."""

    async def record(self) -> None:
        last = time.monotonic()
        while True:
            late = time.monotonic() - last > LATE_SECONDS
            self.starved += late
            last = time.monotonic()
            await self.take(counts=self.proxy.healthy and not late)
            await asyncio.sleep(1)

    async def take(self, counts: bool) -> None:
        runs, pods = await self.cluster.objects(KIND), await self.cluster.objects("Pod")
        for run in runs:
            name = run["metadata"]["name"]
            ready: dict[str, int] = {}
            for pod in pods:
                labels = pod["metadata"].get("labels", {})
                if labels.get(LABEL_RUN) == name and counts_as_ready(pod):
                    role = labels[LABEL_ROLE]
                    ready[role] = ready.get(role, 0) + 1
            history = self.cluster.histories[name]
            sample = Sample(
                at=time.monotonic(),
                status=run.get("status") or {},
                operator=counts,
                driver="running" if history.drivers else "gone",
                ready=ready,
                saved=history.step,
            )
            self.samples.setdefault(name, []).append(sample)

    def newest(self) -> list[Sample]:
        return [samples[-1] for samples in self.samples.values()]


def late(samples: list[Sample], total: int) -> Iterator[str]:
    """Return what the status has not said `TRUE_WITHIN_SECONDS` after it became so."""
    since: dict[str, float] = {}
    for sample in samples:
        trains = sample.driver == "running" and (sample.saved or 0) > 0
        done = sample.driver == "gone" and sample.saved == total
        wrong = {
            "it is not seen": not sample.phase,
            f"{sample.phase} while it trains": trains and sample.phase != "Running",
            f"{sample.phase} after its last step": done and sample.phase != "Succeeded",
        }
        if not sample.operator:
            wrong = {}
        since = {text: since.get(text, sample.at) for text, holds in wrong.items() if holds}
        for text, at in since.items():
            if sample.at - at > TRUE_WITHIN_SECONDS:
                yield f"{text} ({sample.at - at:.0f} s)"


async def play(cluster: SimulatedCluster, proxy: FaultyProxy, log: list[str]) -> None:
    """Go through all acts. In every other one a run may get a fault of its own."""
    chance, began = random.Random(SEED), time.monotonic()
    for number, act in enumerate(acts()):
        names = sorted(name for name, item in cluster.histories.items() if item.drivers)
        before = len(proxy.requests)
        start = time.monotonic()
        proxy.begin(act.fault)
        own = chance.choice(
            (cluster.kill_driver, cluster.delete_head, cluster.delete_trainer, None)
            if SECONDS
            else (cluster.kill_driver, cluster.delete_head)
        )
        if own and names and number % 2:
            await asyncio.sleep(act.lasts / 2 if act.fault is not Fault.DEAD else 0)
            name = chance.choice(names)
            await own(name)
            log.append(f"{time.monotonic() - began:6.1f} {own.__name__} {name}")
        if act.fault is not Fault.DEAD:
            await asyncio.sleep(max(0.0, start + act.lasts - time.monotonic()))
        proxy.end()
        rate = (len(proxy.requests) - before) / max(0.1, time.monotonic() - start)
        log.append(
            f"{start - began:6.1f} {act.fault.name} for {time.monotonic() - start:.1f} s: "
            f"{rate:.1f} requests/s"
        )
        before, start = len(proxy.requests), time.monotonic()
        await asyncio.sleep(act.pause)
        rate = (len(proxy.requests) - before) / (time.monotonic() - start)
        log.append(f"{start - began:6.1f} healthy for {act.pause:.1f} s: {rate:.1f} requests/s")


async def create_runs(cluster: SimulatedCluster) -> None:
    """Create the runs one after the other, some of them during faults."""
    for number in range(RUNS):
        await cluster.create_run(run_document(f"run-{number:02}"))
        await asyncio.sleep(SECONDS * 0.5 / RUNS if SECONDS else 0.5)


async def until(condition: Any, seconds: float) -> bool:
    """Wait until it holds; returns False if it does not in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.5)
            return True
    return False


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane(tmp_path_factory.mktemp("plane")) as cluster:
        RELEASE.set_up(cluster)
        yield cluster


@asynccontextmanager
async def direct(plane: Cluster) -> AsyncIterator[KubeClient]:
    """A client with all rights that does not go through the proxy."""
    client = KubeClient(await connect(Path(plane.env["KUBECONFIG"])), [NAMESPACE])
    yield client
    await client.close()


@pytest.mark.timeout(int(SECONDS) + 1200)
async def test_runs_survive_a_faulty_apiserver(plane: Cluster, tmp_path: Path) -> None:
    log: list[str] = []
    began, stack = time.monotonic(), ExitStack()
    config = RELEASE.kubeconfig(plane)
    (entry,) = config["clusters"]
    authority, server = entry["cluster"]["certificate-authority-data"], entry["cluster"]["server"]
    context = ssl.create_default_context(cadata=b64decode(authority).decode())
    async with (
        direct(plane) as kube,
        FaultyProxy(server, context, SEED).serve() as proxy,
        SimulatedCluster(kube, NAMESPACE).work() as cluster,
        asyncio.TaskGroup() as group,
    ):
        config = RELEASE.kubeconfig(plane, server=proxy.url)
        deployment = Deployment(tmp_path, config, RELEASE.lease(plane))
        recording = Recording(cluster, proxy)
        tasks = [group.create_task(deployment.supervise()), group.create_task(recording.record())]
        try:
            creating = group.create_task(create_runs(cluster))
            assert await until(
                lambda: any(item.step for item in cluster.histories.values()), 180
            ), deployment.process.log.read_text()[-3000:]
            port = deployment.process.metrics_port
            server = await asyncio.to_thread(
                stack.enter_context, prometheus(tmp_path / "prometheus", port, RULES)
            )
            await play(cluster, proxy, log)
            await creating
            ended = await until(
                lambda: (
                    len(recording.samples) == RUNS
                    and all(sample.phase in ENDED for sample in recording.newest())
                ),
                max_steps() * STEP_SECONDS + 90,
            )
            samples = recording.samples
            for name in samples:
                await cluster.delete(KIND, name)
            left = await left_over(cluster)
            seconds = time.monotonic() - began
            left += await asyncio.to_thread(monitoring_problems, server, seconds)
            for file in DASHBOARDS:
                picture = tmp_path / f"{file.stem}.png"
                await asyncio.to_thread(draw, server, file.stem, seconds, picture)
        finally:
            stack.close()
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(deployment.process.stop)  # it still uses the proxy
    for name, history in sorted(cluster.histories.items()):
        last = samples[name][-1]
        log.append(
            f"{name}: {last.phase}, step {last.step}, {len(history.submissions)} attempts, "
            f"{history.faults} own faults"
        )
    hits = ", ".join(f"{fault.name} {proxy.hits[fault]}" for fault in Fault)
    log.append(f"hits: {hits}; {recording.starved} samples were late")
    report = "\n".join(log)
    print(report)
    problems = [*_problems(cluster, samples), *deployment.restarts, *left]
    problems += [f"{fault.name} hit nothing" for fault in Fault if not proxy.hits[fault]]
    if not ended:
        problems.append("not all runs ended")
    assert not problems, f"{report}\n" + "\n".join(problems)


def _problems(cluster: SimulatedCluster, samples: dict[str, list[Sample]]) -> Iterator[str]:
    for name, history in sorted(cluster.histories.items()):
        yield from (f"{name}: {text}" for text in history.overlaps)
        yield from (f"{name}: made again: {text}" for text in history.lost)
        submitted = history.submissions
        if len(set(submitted)) != len(submitted):
            yield f"{name}: submitted twice: {submitted}"
        if len(submitted) > 1 + history.faults:
            yield f"{name}: {len(submitted)} attempts after {history.faults} faults: {submitted}"
        if history.stops:
            yield f"{name}: {history.stops} healthy drivers were stopped"
        last = samples[name][-1]
        if last.phase != "Succeeded":
            yield f"{name}: {last.phase}, {last.message}, {json.dumps(last.status)}"
        for untruth in untruths(samples[name]):
            yield f"{name}: untrue for {untruth.seconds:.0f} s: {untruth.text}"
        worst = list(late(samples[name], max_steps()))
        yield from (f"{name}: {text}" for text in worst[-1:])


def draw(server: Prometheus, dashboard: str, seconds: float, out: Path) -> None:
    """Draw a dashboard, as for docs/monitoring.md."""
    variables = {"namespace": "runs", "run": "run-00", "job": "agenticrun-metrics"}
    words = [word for name, value in variables.items() for word in ("--set", f"{name}={value}")]
    words += ["--minutes", str(seconds / 60)]
    tool = ROOT / "tools/docs/dashboards.py"
    argv = [sys.executable, str(tool), server.url, dashboard, str(out), *words]
    subprocess.run(argv, check=True, timeout=300)


def monitoring_problems(server: Prometheus, seconds: float) -> list[str]:
    """Return panels that showed nothing in the last seconds; wait for the end of deleted runs."""
    found = server.sick_rules()
    found += [
        f"panel {title}: no series of {expression}"
        for title, expressions in panels().items()
        for expression in expressions
        if not server.seen(expression, seconds) and title not in MAY_BE_EMPTY
    ]
    found += [f"not scraped: {item['metric']}" for item in server.query("up == 0")]
    eventually(
        lambda: not server.query('{__name__=~"agenticrun_run_.+"}'),
        60,
        "deleted runs have no series",
        interval=0.5,
    )
    return found


async def left_over(cluster: SimulatedCluster) -> list[str]:
    """Return what is left of the deleted runs after a minute."""
    found: list[str] = []
    for _ in range(60):
        found = [
            f"left over: {kind} {item['metadata']['name']}"
            for kind in (KIND, "RayCluster", "Pod", "Secret", "ConfigMap")
            for item in await cluster.objects(kind)
            if LABEL_RUN in item["metadata"].get("labels", {}) or kind == KIND
        ]
        if not found:
            break
        await asyncio.sleep(1)
    return found
