"""Watches on a stub apiserver: each survives what happens to its own namespace or resource."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from agenticrun_api.names import KIND, LABEL_RUN, LABEL_RUN_UID
from agenticrun_operator import metrics, watches
from agenticrun_operator.cluster import KubeClient
from agenticrun_operator.cluster import kube as kube_client
from agenticrun_operator.errors import NamespaceGone, NotServed
from agenticrun_operator.shard import Shard
from agenticrun_operator.watch_cache import WatchCache
from agenticrun_operator.watches import Watch
from agenticrun_operator.workqueue import Key

GONE_NAMESPACE = {
    "kind": "Status",
    "reason": "NotFound",
    "message": 'namespaces "blue" not found',
    "details": {"kind": "namespaces", "name": "blue"},
}
BLUE = "/apis/agenticrun.dev/v1alpha1/namespaces/blue/agenticruns"
FORBIDDEN = {"kind": "Status", "reason": "Forbidden", "message": "agenticruns is forbidden"}
TERMINATING = FORBIDDEN | {"details": {"causes": [{"reason": "NamespaceTerminating"}]}}


class StubApiserver:
    """Lists and watches two namespaces; each answers with an error on demand."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        """By a part of the path: the status and body to answer instead."""
        self.names: list[tuple[str, str]] = []
        self.version = 7
        self.lists: list[str] = []
        self.watches: list[str] = []
        self.sinces: list[str] = []
        """The version from which each watch began."""
        self.lifetimes: list[tuple[str, int]] = []
        self.watch_answers: dict[str, int] = {}
        """By a part of the path: the status of watches."""
        self.missed: list[tuple[str, str]] = []
        """Names of objects that are new since the last watch."""
        self.frozen = False
        """Watches are accepted and send nothing, not even their end."""
        self._streams: set[tuple[str, web.StreamResponse]] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        for part, (status, body) in self.answers.items():
            if part in request.path:
                text = body if isinstance(body, str) else json.dumps(body)
                return web.Response(status=status, text=text)
        if "watch" in request.query:
            return await self._watch(request)
        self.lists.append(request.path)
        names = [name for name in self.names if f"/{name[0]}/" in request.path]
        start, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        items = [self._item(*name) for name in names[start : start + limit]]
        metadata = {"resourceVersion": "5"}
        if start + limit < len(names):
            metadata["continue"] = str(start + limit)
        # The apiserver writes an empty list of metadata as null.
        return web.json_response({"items": items or None, "metadata": metadata})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        for part, status in self.watch_answers.items():
            if part in request.path:
                return web.Response(status=status)
        self.sinces.append(request.query["resourceVersion"])
        self.lifetimes.append((request.path, int(request.query["timeoutSeconds"])))
        response = web.StreamResponse()
        await response.prepare(request)
        key = (request.path, response)
        self._streams.add(key)
        self.watches.append(request.path)
        try:
            if self.frozen:
                await asyncio.Event().wait()
            for name in self.missed:
                event = {"type": "ADDED", "object": self._item(*name)}
                await response.write(json.dumps(event).encode() + b"\n")
            await asyncio.sleep(int(request.query["timeoutSeconds"]))
        finally:
            self._streams.discard(key)
        return response

    def _item(self, namespace: str, name: str) -> dict[str, Any]:
        labels = {LABEL_RUN: name}
        metadata = {"namespace": namespace, "name": name, "labels": labels}
        metadata["resourceVersion"] = str(self.version)
        return {"metadata": metadata}

    async def say(self, kind: str, item: dict[str, Any], where: str = "") -> None:
        """Send an event to all watches whose path contains `where`."""
        for path, stream in list(self._streams):
            if where in path:
                await stream.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    async def change(self, namespace: str, name: str) -> None:
        self.version += 1
        await self.say("MODIFIED", self._item(namespace, name), f"/{namespace}/")

    def watched(self, where: str) -> int:
        return sum(where in path for path, _ in self._streams)


@pytest.fixture
async def stub() -> StubApiserver:
    return StubApiserver()


@pytest.fixture
async def kube(stub: StubApiserver) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    kube = KubeClient(
        client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{port}")), ["blue", "green"]
    )
    yield kube
    await kube.close()
    await runner.cleanup()


class Seen:
    """Reports of two watches: of runs in blue and of runs in green."""

    def __init__(self) -> None:
        self.names: asyncio.Queue[str] = asyncio.Queue()
        self.cache = WatchCache(self.run_of, lambda item: item, self.changed)

    @staticmethod
    def run_of(item: dict[str, Any]) -> Key:
        return item["metadata"]["namespace"], item["metadata"]["name"]

    def changed(self, run: Key) -> None:
        self.names.put_nowait("/".join(run))

    def known(self, run: str) -> bool | None:
        namespace, name = run.split("/")
        found = self.cache.of_run((namespace, name))
        return None if found is None else bool(found)

    async def next(self) -> str:
        return await asyncio.wait_for(self.names.get(), 30)


@pytest.fixture
async def seen(kube: KubeClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Seen]:
    monkeypatch.setattr(watches, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(watches, "MAX_RETRY_SECONDS", 0.05)
    seen = Seen()
    tasks = [
        asyncio.create_task(Watch(kube, KIND, namespace, None, seen.cache).run())
        for namespace in ("blue", "green")
    ]
    yield seen
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (403, FORBIDDEN),
        (403, TERMINATING),
        (404, GONE_NAMESPACE),
        (404, "404 page not found"),
        (410, {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}),
        (429, {"kind": "Status", "reason": "TooManyRequests", "message": "slow down"}),
        (500, "oops"),
        (503, {"kind": "Status", "message": "not ready"}),
    ],
    ids=["403", "terminating", "404", "no-crd", "410", "429", "500", "503"],
)
async def test_trouble_in_one_namespace_does_not_reach_the_other_and_passes(
    stub: StubApiserver, seen: Seen, status: int, body: Any
) -> None:
    stub.answers["/blue/"] = (status, body)
    await until(lambda: stub.watched("/green/"))
    await stub.change("green", "lake")
    assert await seen.next() == "green/lake"
    stub.names.append(("blue", "river"))
    stub.answers.clear()
    assert await seen.next() == "blue/river", "it is listed when it is there again"
    await until(lambda: stub.watched("/blue/"))
    await stub.change("blue", "river")
    assert await seen.next() == "blue/river"


@pytest.mark.parametrize("code", [410, 500])
async def test_an_error_in_the_stream_begins_the_watch_again(
    stub: StubApiserver, seen: Seen, code: int
) -> None:
    await until(lambda: stub.watched("/blue/") and stub.watched("/green/"))
    stub.names.append(("blue", "missed"))
    await stub.say("ERROR", {"code": code, "message": "too old"}, "/blue/")
    assert await seen.next() == "blue/missed"
    assert stub.lists.count("/apis/agenticrun.dev/v1alpha1/namespaces/green/agenticruns") == 1


async def test_a_bookmark_is_no_change(stub: StubApiserver, seen: Seen) -> None:
    await until(lambda: stub.watched("/blue/"))
    await stub.say("BOOKMARK", {"metadata": {"resourceVersion": "9"}}, "/blue/")
    await stub.change("blue", "lake")
    assert await seen.next() == "blue/lake"


async def test_trouble_is_logged_once_with_what_to_do(
    stub: StubApiserver, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stub.answers["/blue/"] = (403, FORBIDDEN)
    await until(lambda: "namespace blue is missing, create it" in caplog.text)
    await asyncio.sleep(0.3)
    assert caplog.text.count("remove it from watchNamespaces") == 1
    stub.answers.clear()
    await until(lambda: f"watch {KIND}@blue works again" in caplog.text)


async def test_what_was_deleted_in_a_gap_of_the_watch_vanishes(
    stub: StubApiserver, seen: Seen
) -> None:
    stub.names += [("blue", "lake"), ("blue", "river")]
    await until(lambda: stub.watched("/blue/"))
    assert {await seen.next(), await seen.next()} == {"blue/lake", "blue/river"}
    stub.names.remove(("blue", "river"))
    await stub.say("ERROR", {"code": 410, "message": "too old"}, "/blue/")
    assert await seen.next() == "blue/river", "its run is looked at"
    assert (seen.known("blue/lake"), seen.known("blue/river")) == (True, False)


async def test_a_list_reports_only_what_has_changed(stub: StubApiserver, seen: Seen) -> None:
    stub.names += [("blue", "lake")]
    await until(lambda: stub.watched("/blue/"))
    assert await seen.next() == "blue/lake"
    stub.names.append(("blue", "river"))
    await stub.say("ERROR", {"code": 410, "message": "too old"}, "/blue/")
    assert await seen.next() == "blue/river"
    assert seen.known("blue/lake")


async def test_a_deletion_is_a_change(stub: StubApiserver, seen: Seen) -> None:
    stub.names.append(("blue", "lake"))
    assert await seen.next() == "blue/lake"
    await until(lambda: stub.watched("/blue/"))
    await stub.say("DELETED", stub._item("blue", "lake"), "/blue/")
    assert await seen.next() == "blue/lake"
    assert seen.known("blue/lake") is False


async def test_nothing_is_known_of_a_namespace_while_its_watch_is_down(
    stub: StubApiserver, seen: Seen
) -> None:
    stub.names.append(("blue", "lake"))
    await until(lambda: seen.known("blue/lake"))
    stub.answers["/blue/"] = (500, "oops")
    await stub.say("ERROR", {"code": 500, "message": "oops"}, "/blue/")
    await until(lambda: seen.known("blue/lake") is None)
    assert seen.known("green/lake") is False, "the other namespace is still known"
    stub.answers.clear()
    await until(lambda: seen.known("blue/lake"))


async def test_a_frozen_watch_is_replaced_and_goes_on_where_it_was(
    stub: StubApiserver, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.names.append(("blue", "lake"))
    await until(lambda: seen.known("blue/lake") and stub.watched("/blue/"))
    monkeypatch.setattr(kube_client, "WATCH_SECONDS", 1)
    monkeypatch.setattr(kube_client, "WATCH_GRACE_SECONDS", 0.2)
    stub.frozen = True
    await stub.say("ERROR", {"code": 410, "message": "again"}, "/blue/")
    await until(lambda: stub.watches.count(BLUE) == 2)
    lists = stub.lists.count(BLUE)
    stub.missed.append(("blue", "unseen"))
    await until(lambda: stub.watches.count(BLUE) > 2)
    stub.frozen = False
    await until(lambda: seen.known("blue/unseen"))
    assert seen.known("blue/lake"), "what it knew is trusted again"
    assert stub.lists.count(BLUE) == lists
    assert stub.sinces[-1] == "5"


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_watch_that_is_refused_goes_on_without_a_list(
    stub: StubApiserver, seen: Seen, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    await until(lambda: stub.watched("/blue/"))
    monkeypatch.setattr(kube_client, "WATCH_SECONDS", 1)
    stub.watch_answers["/blue/"] = status
    for response in [stream for path, stream in stub._streams if path == BLUE]:
        await response.write_eof()
    await until(lambda: seen.known("blue/lake") is None)
    stub.missed.append(("blue", "unseen"))
    stub.watch_answers.clear()
    await until(lambda: seen.known("blue/unseen"))
    assert stub.lists.count(BLUE) == 1


def test_a_watch_that_hangs_is_replaced_before_its_silence_is_an_untruth() -> None:
    hidden = kube_client.WATCH_SECONDS + kube_client.WATCH_GRACE_SECONDS
    assert hidden + watches.FIRST_RETRY_SECONDS < 10


def test_a_request_on_a_dead_connection_is_repeated_on_another_one_in_time() -> None:
    assert kube_client.IDLE_SECONDS < kube_client.TIMEOUT_SECONDS, "the next one is not as old"
    assert kube_client.IDLE_SECONDS + kube_client.TIMEOUT_SECONDS < 10


async def test_with_many_namespaces_watches_live_longer(
    stub: StubApiserver, kube: KubeClient
) -> None:
    many = KubeClient(kube._api, [f"team-{number}" for number in range(100)])
    async with asyncio.timeout(5):
        async with many.watch_objects(KIND, "blue", None, "5"):
            pass
    ((_, seconds),) = stub.lifetimes
    assert 48 <= seconds <= 60, "600 watches, of which ten begin per second"


async def test_a_watch_that_ends_at_its_time_goes_on_without_a_list(
    stub: StubApiserver, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "WATCH_SECONDS", 1.3)
    await until(lambda: stub.watches.count(BLUE) >= 3)
    assert stub.lists.count(BLUE) == 1


async def test_long_lists_are_read_in_pages(
    stub: StubApiserver, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "PAGE", 2)
    stub.names += [("green", f"run-{number}") for number in range(5)]
    assert await kube.list_run_keys() == stub.names
    assert stub.lists.count("/apis/agenticrun.dev/v1alpha1/namespaces/green/agenticruns") == 3


async def test_an_object_that_gets_the_label_of_another_shards_run_is_gone(
    stub: StubApiserver, kube: KubeClient
) -> None:
    own, other = (next(u for u in map(str, range(99)) if Shard(n, 2).has(u)) for n in range(2))
    kube = KubeClient(kube._api, ["blue"], Shard(0, 2))
    async with kube.watch_objects("Pod", "blue", None, "1") as events:
        for uid in (own, other, own):
            item = stub._item("blue", "pod")
            item["metadata"]["labels"][LABEL_RUN_UID] = uid
            await stub.say("MODIFIED", item)
        assert [(await anext(events))[0] for _ in range(3)] == ["MODIFIED", "DELETED", "MODIFIED"]


async def test_runs_of_the_other_namespaces_are_listed(
    stub: StubApiserver, kube: KubeClient
) -> None:
    stub.names.append(("green", "lake"))
    stub.answers["/blue/"] = (403, FORBIDDEN)
    assert await kube.list_run_keys() == [("green", "lake")]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, "404 page not found", NotServed),
        (405, {"kind": "Status", "reason": "MethodNotAllowed", "message": "x"}, NotServed),
        (404, GONE_NAMESPACE, NamespaceGone),
        (403, TERMINATING, NamespaceGone),
    ],
)
async def test_a_missing_crd_and_a_missing_namespace_are_told_from_a_missing_object(
    stub: StubApiserver, kube: KubeClient, status: int, body: Any, error: type[Exception]
) -> None:
    stub.answers["/rayclusters"] = (status, body)
    manifest = {"kind": "RayCluster", "metadata": {"name": "lake", "namespace": "blue"}}
    with pytest.raises(error):
        await kube.create(manifest)
    details = {"kind": "rayclusters", "name": "lake"}
    stub.answers["/rayclusters"] = (404, {"kind": "Status", "details": details, "message": "x"})
    assert await kube.get("RayCluster", "blue", "lake") is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "404 page not found"),
        (403, FORBIDDEN | {"message": 'User "operator" cannot list resource "workloads"'}),
    ],
    ids=["no-crd", "no-right"],
)
async def test_an_optional_kind_that_is_absent_is_no_trouble_and_is_found_later(
    stub: StubApiserver,
    kube: KubeClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
    body: Any,
) -> None:
    monkeypatch.setattr(watches, "ABSENT_SECONDS", 0.05)
    stub.answers["/workloads"] = (status, body)
    seen = Seen()
    watch = Watch(kube, "Workload", "blue", LABEL_RUN, seen.cache, optional=True)
    down = metrics.WATCHES_DOWN.labels(kind="Workload", namespace="blue")
    down.set(1)  # the apiserver was away
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.3)
    assert seen.known("blue/lake") is None
    assert "retries" not in caplog.text
    assert [sample.value for found in down.collect() for sample in found.samples] == [0]
    stub.names = [("blue", "lake")]
    stub.answers.clear()
    assert await seen.next() == "blue/lake"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
