"""Many runs on one reconciler: an apiserver in memory, and heads on real sockets.

Each run is a copy of the one of an `operator_world`, with a namespace and uids of its own. Its head
listens on a loopback address of its own, so that the operator's real client asks it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from agenticrun_api import AgenticRunStatus, Outcome, Role
from agenticrun_api.challenge import prove
from agenticrun_api.names import DASHBOARD_PORT, KIND, LABEL_ROLE, LABEL_RUN, REPORTER_PORT
from agenticrun_operator.cluster import DirectTransport, RunHead, head_session
from agenticrun_operator.cluster.kube import Propagation, Response
from agenticrun_operator.cluster.transports import PodAddress
from agenticrun_operator.errors import AlreadyExists, Conflict, WebhookUnavailable
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.reconciler import Reconciler
from agenticrun_operator.resources import Event, Manifest
from agenticrun_operator.slow_writes import SlowWrites
from agenticrun_operator.watch_cache import WatchCache, WatchedObjects
from agenticrun_operator.workqueue import Item, Key, WorkQueue
from operator_world import IMAGES, KEY, NAME, NAMESPACE, Operator, World, copied, training

PORTS = (DASHBOARD_PORT, REPORTER_PORT)


def own_time() -> float:
    """Return a time in seconds that stands still while other processes have the CPU.

    A gap between two looks is then that of an operator with a CPU of its own.
    """
    waited = int(Path("/proc/self/schedstat").read_text().split()[1])
    return time.monotonic() - waited / 1e9


class Fleet:
    """The apiserver and the heads of many runs. Implements `protocols.Kube`."""

    def __init__(self, *changes: tuple[str, Any]) -> None:
        """Create a fleet without runs.

        Args:
            changes: changes of the spec of each run, as paths and values.
        """
        self._changes = changes
        self.watched = WatchedObjects(lambda _: None, lambda _: None)
        self.hung: set[str] = set()
        """Addresses of the heads that accept connections and never answer."""
        self.blocked_seconds = 10.0
        """Time after which a webhook fails that each creation of a RayCluster waits for."""
        self.looks: dict[Key, list[float]] = {}
        """Times of the finished looks at each run, of `own_time`."""
        self._objects: dict[str, dict[tuple[str, str], Manifest]] = {}
        """By namespace, then by kind and name."""
        self._answers: dict[str, dict[int, bytes]] = {}
        """Of each head, by its address and port."""
        self._proofs: dict[str, Callable[[str], str]] = {}
        """Returns the proof of each head for a nonce, by its address."""
        self._versions = itertools.count(10**6)
        for cache in (self.watched.runs, self.watched.clusters, self.watched.pods):
            cache.resumed(None)

    async def add_training(self, count: int) -> list[Key]:
        """Add runs that train."""
        world = World(now=datetime.now(UTC) - timedelta(seconds=60))
        world.apply_run(*self._changes)
        await training(Operator(world))
        return [self._add_training(world, len(self._objects)) for _ in range(count)]

    def _add_training(self, world: World, number: int) -> Key:
        address = f"127.1.{number // 200}.{number % 200 + 1}"
        own = partial(_renamed, number=number)
        for pod in (objects := own(list(world.objects.values()))):
            if pod["metadata"].get("labels", {}).get(LABEL_ROLE) == Role.DRIVER.value:
                pod["status"]["podIP"] = address
                uid = pod["metadata"]["uid"]
        (job,), (report,) = world.live_jobs(), world.reports.values()
        token = KEY.reporter_token(objects[0]["metadata"]["uid"])
        self._proofs[address] = lambda nonce: prove(token, nonce, uid, address)
        self._answers[address] = {
            DASHBOARD_PORT: json.dumps(own(job.details())).encode(),
            REPORTER_PORT: json.dumps(
                own(json.loads(report.model_dump_json(by_alias=True)))
            ).encode(),
        }
        return self._add(objects)

    def add_blocked(self, count: int) -> list[Key]:
        """Add runs whose RayCluster cannot be created, because a webhook does not answer."""
        world = World(now=datetime.now(UTC))
        world.apply_run(*self._changes)
        return [self._add([_renamed(world.run, len(self._objects))]) for _ in range(count)]

    async def add_ended(self, count: int) -> list[Key]:
        """Add runs that have succeeded, and whose RayCluster and pods are gone."""
        world = World(now=datetime.now(UTC) - timedelta(seconds=60))
        world.apply_run(*self._changes)
        operator = Operator(world)
        await training(operator)
        world.end_driver(Outcome.SUCCEEDED)
        await operator.settle(20)
        assert not world.pods()
        objects = list(world.objects.values())
        return [self._add(_renamed(objects, len(self._objects))) for _ in range(count)]

    async def bytes_per_run(self, runs: Sequence[Key]) -> float:
        """Return the memory that an operator needs per run, its watches included."""
        first, *others = runs
        async with self._operator(WorkQueue()) as (reconciler, _):
            await self._see_and_reconcile(reconciler, first)  # what is needed once
            tracemalloc.start()
            for run in others:
                await self._see_and_reconcile(reconciler, run)
            gc.collect()
            needed, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return needed / len(others)

    async def _see_and_reconcile(self, reconciler: Reconciler, run: Key) -> None:
        for item in self._objects[run[0]].values():
            self._show(item)
        await reconciler.reconcile(Item(run, changed=True))

    def _add(self, objects: list[Manifest]) -> Key:
        namespace = objects[0]["metadata"]["namespace"]
        for item in objects:
            self._objects.setdefault(namespace, {})[item["kind"], item["metadata"]["name"]] = item
        self.looks[namespace, NAME] = []
        return namespace, NAME

    def address(self, run: Key) -> str:
        """Return the address of a run's head."""
        pods = (item for (kind, _), item in self._objects[run[0]].items() if kind == "Pod")
        head = next(pod for pod in pods if pod["metadata"]["labels"][LABEL_ROLE] == "driver")
        address: str = head["status"]["podIP"]
        return address

    def longest_gap(self, runs: Iterable[Key], began: float, ended: float) -> float:
        """Return the longest time between two looks at one of the runs, in seconds."""
        times = ([began, *(t for t in self.looks[run] if t > began), ended] for run in runs)
        return max(late - early for ts in times for early, late in itertools.pairwise(ts))

    @asynccontextmanager
    async def reconciled(self) -> AsyncIterator[None]:
        """Reconcile all runs with the operator's own parts."""
        queue, leading = WorkQueue(), asyncio.Event()
        leading.set()
        for run in self.looks:
            for item in self._objects[run[0]].values():
                self._show(item)
            queue.add(run)
        async with self._operator(queue) as (reconciler, slots):

            async def reconcile(item: Item) -> float | None:
                try:
                    return await reconciler.reconcile(item)
                finally:
                    self.looks[item.key].append(own_time())

            workers = ReconcileWorkers(queue, reconcile, leading, slots)
            workers.start()
            yield
            await workers.stop()

    @asynccontextmanager
    async def _operator(
        self, queue: WorkQueue
    ) -> AsyncIterator[tuple[Reconciler, asyncio.Semaphore]]:
        slots, writes = asyncio.Semaphore(16), SlowWrites(queue.add)
        async with self._served() as ports, head_session() as session:
            head = RunHead(_PortsTransport(session, ports))
            yield Reconciler(self, head, self.watched, IMAGES, KEY, 20.0, slots, writes), slots
            await writes.stop()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[dict[int, int]]:
        """Serve the heads. Yields the port in place of each port of a head."""
        servers = {
            port: await asyncio.start_server(
                partial(self._serve, port=port), "0.0.0.0", 0, backlog=4096
            )
            for port in PORTS
        }
        yield {port: server.sockets[0].getsockname()[1] for port, server in servers.items()}
        for server in servers.values():
            server.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        address = writer.get_extra_info("sockname")[0]
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if address in self.hung:
                    await reader.read()  # until the client gives up
                    return
                body = self._answers[address][port]
                if head.startswith(b"POST /challenge "):
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    nonce = json.loads(await reader.readexactly(length))["nonce"]
                    body = json.dumps({"proof": self._proofs[address](nonce)}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    # -- protocols.Kube ----------------------------------------------------------------------------

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return copied(self._objects[namespace].get((kind, name)))

    async def list_run_keys(self) -> list[Key]:
        return list(self.looks)

    async def list_pods(
        self, namespace: str, run_name: str, label: str = LABEL_RUN
    ) -> list[Manifest]:
        objects = self._objects[namespace].items()
        return copied([item for (kind, _), item in objects if kind == "Pod"])

    async def list_policies(self, namespace: str, run_name: str) -> list[Manifest]:
        return []

    async def list_pod_warnings(self, namespace: str, pod_uid: str) -> list[Manifest]:
        return []

    async def queue_positions(self, namespace: str, queue: str) -> dict[str, int]:
        raise AssertionError("no run waits in a queue")

    async def create(self, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        if manifest["kind"] == "RayCluster":
            await asyncio.sleep(self.blocked_seconds)
            raise WebhookUnavailable("failed calling webhook: context deadline exceeded")
        if (manifest["kind"], metadata["name"]) in self._objects[metadata["namespace"]]:
            raise AlreadyExists(metadata["name"])
        uid = f"{metadata['namespace']}-{manifest['kind']}"
        self._store(copied({**manifest, "metadata": {**metadata, "uid": uid}}))

    async def put(self, manifest: Manifest) -> Manifest:
        raise AssertionError("nothing is changed")

    async def put_status(self, manifest: Manifest) -> Manifest:
        raise AssertionError("no run waits in a queue")

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        uid: str,
        force: bool = False,
        propagation: Propagation = "Background",
    ) -> None:
        raise AssertionError("nothing is deleted")

    async def write_status(self, run: Manifest, status: AgenticRunStatus) -> Manifest:
        metadata = run["metadata"]
        stored = self._objects[metadata["namespace"]][KIND, metadata["name"]]
        if stored["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Conflict(metadata["name"])
        stored["status"] = status.to_dict()
        self._store(stored)
        return copied(stored)

    async def post_event(self, run: Manifest, event: Event) -> None:
        return

    def _store(self, item: Manifest) -> None:
        metadata = item["metadata"]
        metadata["resourceVersion"] = str(next(self._versions))
        objects = self._objects[metadata["namespace"]]
        objects[item["kind"], metadata["name"]] = item
        self._show(item)

    def _show(self, item: Manifest) -> None:
        """Let the watches see an object."""
        caches: dict[str, WatchCache[Any]] = {
            KIND: self.watched.runs,
            "RayCluster": self.watched.clusters,
            "Pod": self.watched.pods,
        }
        if cache := caches.get(item["kind"]):
            cache.put(copied(item))


class _PortsTransport(DirectTransport):
    def __init__(self, session: Any, ports: Mapping[int, int]):
        super().__init__(session)
        self._ports = ports

    async def request(
        self, method: str, pod: PodAddress, port: int, path: str, **arguments: Any
    ) -> Response:
        return await super().request(method, pod, self._ports[port], path, **arguments)


def _renamed(content: Any, number: int) -> Any:
    """Return a copy of JSON in the namespace and with the uids of another run."""
    uids = re.compile(r"(?<=\d)-uid")  # not the label that ends so
    text = uids.sub(f"-uid-{number}", json.dumps(content))
    return json.loads(
        text.replace(f'"namespace": "{NAMESPACE}"', f'"namespace": "{NAMESPACE}-{number}"')
    )
