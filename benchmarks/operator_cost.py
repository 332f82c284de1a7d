"""Cost of the operator: CPU of a look at a run, and requests and writes per minute.

    python benchmarks/operator_cost.py [--quick] [--json FILE]

Against the fake cluster of the operator's tests (tests/support/operator_world.py), with the run
document of examples/gpu/eight-plus-eight.yaml as the apiserver serves it, and heads that answer
with the bytes of Ray's job API and of a reporter with 40 metrics. CPU is that of one process
without the fake apiserver's own, on a fake clock:

- `cpu_ms_per_look`: a Running run without a new step, the reads every 20 s included; the best of
  several rounds, because other processes disturb the slower ones.
- `looks_per_second`: its inverse, for one core. A run that is polled is looked at every 2 s.
- `cpu_ms_per_look_with_a_step`: each look finds a new step; the status writes included.
- `cpu_ms_per_look_with_http`: in real time, with the two HTTP requests to the head, from a head
  in another process.
- `operator_cores_1000`: that of 1,000 runs that are polled, as through the apiserver's proxy, by
  the CPU of one with a step a minute, with its requests to the head and its NetworkPolicies.
  Without what the apiserver's client does for a status write. many_runs.py has that of long polls.
- `look_ms_1000_pods`: a look after an event of one of 1,000 pods, its reading included.

Requests go to the apiserver, without watches: per look, per pod event, and per minute for a
Running run without a new step and for one that waits for a worker image (NoEngineImage).
`status_writes_per_minute` is of a run with a new step each second, `refused_submissions_per_hour`
of a run whose driver Ray does not take, `conflicts_per_minute` of one whose children the apiserver
answers with 409, as under contention for a quota.

Memory is what Python has allocated, the watches included: `mb_per_1000_finished` for runs that
have ended and have no pods, `kb_per_training_run` for runs with 11 pods and their connections.

The other figures are measured in real time, on the operator's own workers, reconciler and client of
heads, with the heads on real sockets (tests/support/fleet.py). A gap is the longest time between
two looks at one of five healthy runs. Time in which other processes have the CPU does not count.

- `healthy_gap_s_with_50_blocked`: beside 50 runs whose creations a webhook blocks for 10 s.
- `healthy_gap_s_with_500_hung`: beside 500 runs that were healthy until their heads stopped
  answering, all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from record import write_record

from agenticrun_api import Role, load_run
from agenticrun_api.challenge import prove
from agenticrun_api.names import DASHBOARD_PORT
from agenticrun_operator.cluster import DirectTransport, HeadAddress, HeadTransport, RunHead
from agenticrun_operator.cluster.kube import Response
from agenticrun_operator.cluster.transports import PodAddress, allow_many_connections
from agenticrun_operator.errors import Conflict
from agenticrun_operator.workqueue import Item

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from fleet import Fleet, own_time
from operator_world import KEY, NAME, NAMESPACE, Operator, World, copied

EXAMPLE = Path(__file__).parents[1] / "examples/gpu/eight-plus-eight.yaml"
APISERVER = ("get ", "list ", "create ", "delete ", "write status", "post event")
METRICS = {f"some/metric/of/a/step/number_{number}": number / 7 for number in range(40)}
HEALTHY, BLOCKED, HUNG = 5, 50, 500
LONG_STEP_SECONDS = 60.0
"""Time of a step of a large model."""
SETTLED_SECONDS = 4.0
"""Time in which all heads are well."""


def spec_of_the_example() -> list[tuple[str, Any]]:
    """Return the fields of the example's spec, as paths and values."""
    spec = json.loads(json.dumps(load_run(EXAMPLE).to_dict()))["spec"]
    return [(f"spec.{name}", value) for name, value in spec.items()]


class CountingWorld(World):
    """Counts requests to the apiserver, and the CPU time of the fake itself."""

    fake_seconds = 0.0
    steps = 1000
    max_requests = 0

    def start(self, *changes: tuple[str, Any]) -> Operator:
        """Apply the example with these changes."""
        self.apply_run(*spec_of_the_example(), *changes)
        return Operator(self)

    def seconds(self) -> float:
        """The clock of the world."""
        return self.now.timestamp()

    def let_watches_catch_up(self) -> None:
        began = time.process_time()
        super().let_watches_catch_up()
        self.fake_seconds += time.process_time() - began

    def apiserver_requests(self) -> int:
        return sum(
            request.startswith(APISERVER) and request not in ("get job", "get progress")
            for request in self.requests
        )


def _timed(name: str) -> Callable[..., Awaitable[Any]]:
    inner = getattr(World, name)

    @functools.wraps(inner)
    async def outer(self: CountingWorld, *arguments: Any) -> Any:
        began = time.process_time()
        try:
            return await inner(self, *arguments)
        finally:
            self.fake_seconds += time.process_time() - began

    return outer


for _name in ("get", "list_pods", "create", "delete", "write_status", "post_event"):
    setattr(CountingWorld, _name, _timed(_name))


class WorldTransport:
    """Answers like the head of the world's run, in bytes."""

    def __init__(self, world: CountingWorld):
        self.world = world

    async def request(self, *arguments: Any, **options: Any) -> Response:
        began = time.process_time()
        if arguments[3] == "/challenge":
            content = Response(200, _proof(_secrets(self.world), options["body"]["nonce"]))
        else:
            content = _answer(self.world, port=arguments[2])
        self.world.fake_seconds += time.process_time() - began
        return content


def _secrets(world: World) -> tuple[str, str, str]:
    """Return what the reporter proves itself with: its token, its pod's uid and IP."""
    (head,) = world.pods(Role.DRIVER)
    token = KEY.reporter_token(world.run["metadata"]["uid"])
    return token, head["metadata"]["uid"], head["status"]["podIP"]


def _proof(secrets: tuple[str, str, str], nonce: str) -> bytes:
    token, uid, ip = secrets
    return json.dumps({"proof": prove(token, nonce, uid, ip)}).encode()


def _answer(world: World, port: int) -> Response:
    jobs = world.live_jobs()
    if port != DASHBOARD_PORT:
        reports = list(world.reports.values())
        return (
            Response(200, reports[-1].model_dump_json(by_alias=True).encode())
            if reports
            else Response(204, b"")
        )
    if not jobs:
        return Response(404, b"{}")
    return Response(200, json.dumps(jobs[-1].details()).encode())


class BytesHead(RunHead):
    """The real client of heads; submissions go to the world."""

    def __init__(self, world: CountingWorld, transport: HeadTransport):
        super().__init__(transport, world.seconds)
        self.world = world

    async def submit(self, head: HeadAddress, *arguments: Any) -> None:
        await self.world.submit(head, *arguments)


def bytes_operator(world: CountingWorld, *changes: tuple[str, Any]) -> Operator:
    """Return an operator that reads the head's answers from bytes, like the real one."""
    operator = world.start(*changes)
    # Runs get NetworkPolicies, as by default.
    operator.upgrade(replace(operator.images, operator_namespace="agenticrun-system"))
    head = BytesHead(world, WorldTransport(world))
    operator.use_head(head)
    return operator


def report(world: CountingWorld, step: int, seconds: float = 4.0) -> None:
    """The driver reports a step."""
    world.drive(step, max_steps=100_000, seconds_per_step=seconds, metrics=METRICS)


async def running(world: CountingWorld, operator: Operator) -> None:
    """Bring the run to phase Running."""
    await operator.settle()
    report(world, 1)
    await operator.settle(2)
    assert world.status.phase.value == "Running", world.status
    world.now += timedelta(seconds=60)
    await operator.reconcile(changed=False)
    await operator.reconcile(changed=False)
    world.requests.clear()


async def follow(
    world: CountingWorld, operator: Operator, seconds: float, step_seconds: float | None = None
) -> tuple[int, float]:
    """Look at the run whenever the operator asks for it.

    Returns:
        Number of looks, and CPU seconds without those of the fake.
    """
    end, looks, step = world.now + timedelta(seconds=seconds), 0, 1
    next_step = world.now
    spent = 0.0
    while world.now < end:
        while step_seconds and next_step <= world.now:
            step, next_step = step + 1, next_step + timedelta(seconds=step_seconds)
            report(world, step, step_seconds)
        began, fake = time.process_time(), world.fake_seconds
        delay = await operator.reconcile(changed=False)
        spent += time.process_time() - began - (world.fake_seconds - fake)
        looks += 1
        assert delay is not None
        world.now += timedelta(seconds=delay)
    return looks, spent


async def measure_looks(figures: dict[str, float], seconds: float, rounds: int) -> None:
    """Measure looks at a Running run: idle, with steps, after a pod event."""
    world = CountingWorld()
    operator = bytes_operator(world)
    await running(world, operator)
    costs = []
    looks = 0
    for _ in range(rounds):
        count, spent = await follow(world, operator, seconds)
        costs.append(1000 * spent / count)
        looks += count
    figures["cpu_ms_per_look"] = min(costs)
    figures["looks_per_second"] = 1000 / min(costs)
    figures["requests_per_look"] = world.apiserver_requests() / looks
    figures["requests_per_minute_running"] = world.apiserver_requests() / (rounds * seconds / 60)
    world.requests.clear()
    for _ in range(10):
        await operator.reconcile(changed=True)
        world.now += timedelta(seconds=1)
    figures["requests_per_pod_event"] = world.apiserver_requests() / 10
    costs = []
    writes = world.status_writes
    for _ in range(rounds):
        count, spent = await follow(world, operator, seconds, step_seconds=1.0)
        costs.append(1000 * spent / count)
    figures["cpu_ms_per_look_with_a_step"] = min(costs)
    figures["status_writes_per_minute"] = (world.status_writes - writes) / (rounds * seconds / 60)


async def measure_waits(figures: dict[str, float]) -> None:
    """Measure runs that cannot continue."""
    minute = 60.0
    world = CountingWorld()
    operator = world.start()
    world.run["spec"]["pipeline"]["actorInfer"]["strategy"]["name"] = "vllm"  # has no image
    await operator.settle(2)
    world.requests.clear()
    looks, _ = await follow(world, operator, 10 * minute)
    figures["requests_per_minute_no_engine_image"] = world.apiserver_requests() / 10
    figures["looks_per_minute_no_engine_image"] = looks / 10

    world = CountingWorld()
    operator = world.start()
    world.submit_down = True
    await operator.settle()
    world.requests.clear()
    await follow(world, operator, 20 * minute)
    figures["refused_submissions_per_hour"] = 3.0 * world.requests.count("submit")

    world = CountingWorld()
    operator = world.start()
    world.create_errors["RayCluster"] = Conflict("resourcequotas: please apply your changes again")
    looks, _ = await follow(world, operator, 10 * minute)
    figures["conflicts_per_minute"] = looks / 10


# -- with HTTP -------------------------------------------------------------------------------------


def serve_head(
    answers: tuple[bytes, bytes], secrets: tuple[str, str, str], ports: Connection
) -> None:
    """Serve a head's job API and reporter until killed."""

    async def challenge(request: web.Request) -> web.Response:
        return web.Response(body=_proof(secrets, (await request.json())["nonce"]))

    async def serve() -> None:
        numbers = []
        for content in answers:

            async def handle(_: web.Request, content: bytes = content) -> web.Response:
                return web.Response(body=content, content_type="application/json")

            app = web.Application()
            app.router.add_post("/challenge", challenge)
            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            assert site._server is not None
            numbers.append(site._server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]
        ports.send(numbers)
        await asyncio.Event().wait()

    asyncio.run(serve())


class LocalTransport(DirectTransport):
    """Connects to the head in the other process, whatever the pod's address.

    That head always says the same. The operator reads the answer of the world, which has new steps.
    """

    def __init__(self, session: aiohttp.ClientSession, ports: list[int], world: CountingWorld):
        super().__init__(session)
        self.ports = ports
        self.in_world = WorldTransport(world)

    async def request(
        self, method: str, pod: PodAddress, port: int, path: str, **arguments: Any
    ) -> Response:
        here = PodAddress(pod.namespace, pod.name, "127.0.0.1")
        there = self.ports[0 if port == DASHBOARD_PORT else 1]
        await super().request(method, here, there, path, **arguments)
        return await self.in_world.request(method, pod, port, path, **arguments)


async def measure_http(figures: dict[str, float], seconds: float, rounds: int) -> None:
    """Measure looks with a head in another process."""
    world = CountingWorld()
    operator = bytes_operator(world)
    await running(world, operator)
    answers = (_answer(world, DASHBOARD_PORT).body, _answer(world, 0).body)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    spawn = multiprocessing.get_context("spawn")
    head = spawn.Process(target=serve_head, args=(answers, _secrets(world), sending), daemon=True)
    head.start()
    try:
        ports = receiving.recv()
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            local = LocalTransport(session, ports, world)
            operator.use_head(RunHead(local, world.seconds))
            await follow(world, operator, 60)
            costs = []
            for _ in range(rounds):
                looks, spent = await follow(world, operator, seconds)
                costs.append(1000 * spent / looks)
            figures["cpu_ms_per_look_with_http"] = min(costs)
            costs = []
            for _ in range(rounds):
                _, spent = await follow(world, operator, seconds, LONG_STEP_SECONDS)
                costs.append(1000 * spent / seconds)
            figures["operator_cores_1000"] = min(costs)
    finally:
        head.terminate()
        head.join()


# -- many runs -------------------------------------------------------------------------------------


async def measure_pods(figures: dict[str, float], looks: int, rounds: int) -> None:
    """Measure looks after an event of one of 1,000 pods."""
    world = CountingWorld()
    operator = bytes_operator(world, ("spec.roles.env.replicas", 997))
    await running(world, operator)
    world.let_watches_catch_up()
    pod = copied(world.pods(Role.ENV)[0])
    costs: list[float] = []
    for _ in range(rounds):
        began, fake = time.process_time(), world.fake_seconds
        for number in range(looks):
            pod["metadata"]["resourceVersion"] = f"changed-{len(costs)}-{number}"
            world.watched.pods.put(pod)
            await operator.reconciler.reconcile(Item((NAMESPACE, NAME), changed=True))
            world.now += timedelta(seconds=1)
        spent = time.process_time() - began - (world.fake_seconds - fake)
        costs.append(1000 * spent / looks)
    assert len(world.pods()) == 1000
    figures["look_ms_1000_pods"] = min(costs)


async def measure_memory(figures: dict[str, float], runs: int) -> None:
    """Measure the memory per run."""
    fleet = Fleet(*spec_of_the_example())
    ended = await fleet.bytes_per_run(await fleet.add_ended(runs))
    figures["mb_per_1000_finished"] = 1000 * ended / 1e6
    fleet = Fleet(*spec_of_the_example())
    figures["kb_per_training_run"] = await fleet.bytes_per_run(await fleet.add_training(runs)) / 1e3


async def measure_blocked(figures: dict[str, float], seconds: float) -> None:
    """Measure how often healthy runs are looked at beside runs whose creations hang."""
    fleet = Fleet()
    healthy = await fleet.add_training(HEALTHY)
    fleet.add_blocked(BLOCKED)
    async with fleet.reconciled():
        began = own_time()
        await asyncio.sleep(seconds)
        figures["healthy_gap_s_with_50_blocked"] = fleet.longest_gap(healthy, began, own_time())


async def measure_hung(figures: dict[str, float], seconds: float) -> None:
    """Measure how often healthy runs are looked at beside heads that hang all at once."""
    allow_many_connections()
    fleet = Fleet()
    healthy, others = await fleet.add_training(HEALTHY), await fleet.add_training(HUNG)
    async with fleet.reconciled():
        await asyncio.sleep(SETTLED_SECONDS)
        fleet.hung = {fleet.address(run) for run in others}
        began = own_time()
        await asyncio.sleep(seconds)
        ended = own_time()
    figures["healthy_gap_s_with_500_hung"] = fleet.longest_gap(healthy, began, ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of the refused submissions
    figures: dict[str, float] = {}
    seconds, rounds = (60.0, 3) if options.quick else (200.0, 7)
    asyncio.run(measure_looks(figures, seconds, rounds))
    asyncio.run(measure_waits(figures))
    asyncio.run(measure_http(figures, seconds, rounds))
    asyncio.run(measure_pods(figures, 20, rounds))
    asyncio.run(measure_memory(figures, 50))
    asyncio.run(measure_blocked(figures, 11.0 if options.quick else 60.0))
    asyncio.run(measure_hung(figures, 11.0 if options.quick else 90.0))
    figures = {name: round(value, 3) for name, value in figures.items()}
    for name, value in figures.items():
        print(f"{name:45} {value:10.3f}")
    if options.json:
        write_record(options.json, figures)


if __name__ == "__main__":
    main()
