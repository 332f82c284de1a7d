"""The operator sends a token only to a head that has proved itself a moment ago."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from yarl import URL

from agenticrun_api import Reason
from agenticrun_api.challenge import prove
from agenticrun_api.load import parse_served
from agenticrun_operator.cluster import DirectTransport, HeadAddress, RunHead
from agenticrun_operator.cluster.kube import Response
from agenticrun_operator.cluster.transports import PodAddress
from agenticrun_operator.errors import HeadUnreachable
from agenticrun_operator.observed import Job, NoReport, Unreachable
from agenticrun_operator.observing import Observer
from agenticrun_operator.resources import answers_challenges
from agenticrun_workers.reporting.sidecar import Reporter, StateFile
from operator_world import KEY, NAME, Operator, World, training

HEAD = HeadAddress(
    PodAddress("team", "lake-head", "10.0.0.1"),
    "run-uid",
    "ray-token",
    "reporter-token",
    "head-uid",
    "head-uid/0",
)


class Peer:
    """What answers at the head's address. It remembers the tokens that it was sent."""

    def __init__(self, uid: str = "head-uid", ip: str = "10.0.0.1", token: str = "reporter-token"):
        self.uid, self.ip, self.token = uid, ip, token
        self.challenges = 0
        self.bearers: list[str] = []
        self.down = False
        self.status = 200
        self.delay = 0.0

    async def request(
        self,
        method: str,
        pod: PodAddress,
        port: int,
        path: str,
        *,
        headers: Mapping[str, str],
        body: Any = None,
        **_: Any,
    ) -> Response:
        if path == "/challenge":
            self.challenges += 1
        self.bearers += [value for value in headers.values() if value.startswith("Bearer")]
        await asyncio.sleep(self.delay)
        if self.down:
            raise HeadUnreachable("no answer")
        if path == "/challenge":
            proof = prove(self.token, body["nonce"], self.uid, self.ip)
            return Response(self.status, json.dumps({"proof": proof}).encode())
        if path == "/progress":
            return Response(204, b"")
        return Response(200, b'{"status": "RUNNING"}')


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def ask(client: RunHead, head: HeadAddress = HEAD) -> tuple[Any, Any]:
    """Ask both parts of a head, as a look does."""
    job, progress = await asyncio.gather(client.job(head, "lake-1"), client.progress(head))
    return job, progress


async def test_a_head_that_proves_itself_gets_the_tokens() -> None:
    peer = Peer()
    assert await ask(RunHead(peer)) == (Job("RUNNING"), NoReport())
    assert peer.challenges == 1
    assert sorted(peer.bearers) == ["Bearer ray-token", "Bearer reporter-token"]


@pytest.mark.parametrize(
    "peer",
    [Peer(token="guess"), Peer(uid="rogue-uid"), Peer(ip="10.0.0.9")],
    ids=["unknown-token", "relay-of-another-pod", "relay-from-another-address"],
)
async def test_a_pod_that_is_not_the_head_gets_no_token(peer: Peer) -> None:
    """A relay passes the challenge on to the real head, which proves itself and not the relay."""
    client = RunHead(peer)
    for answer in await ask(client):
        assert isinstance(answer, Unreachable)
        assert answer.reason is Reason.TOKENS_REFUSED
    for action in (client.request_stop(HEAD), client.stop(HEAD, "lake-1")):
        with pytest.raises(HeadUnreachable, match="does not have the operator's token"):
            await action
    with pytest.raises(HeadUnreachable):
        await client.submit(HEAD, "lake-1", 1, {})
    assert peer.bearers == []


@pytest.mark.parametrize("body", [b"", b"[]", b'{"proof": 1}', b'{"proof": "zz"}', b"\xff"])
async def test_an_answer_that_is_no_proof_is_refused(body: bytes) -> None:
    peer = Peer()

    async def answer(*arguments: Any, **options: Any) -> Response:
        await Peer.request(peer, *arguments, **options)
        return Response(200, body)

    peer.request = answer  # type: ignore[method-assign]
    for found in await ask(RunHead(peer)):
        assert isinstance(found, Unreachable)
    assert peer.bearers == []


@pytest.mark.parametrize("status", [401, 404, 405])
async def test_a_reporter_that_cannot_answer_is_named_with_its_version(status: int) -> None:
    peer = Peer()
    peer.status = status
    for answer in await ask(RunHead(peer)):
        assert isinstance(answer, Unreachable)
        assert answer.reason is Reason.HEAD_UNPROVED
        assert "the worker image must be of version" in answer.why
    assert peer.bearers == []


async def test_the_head_of_an_earlier_version_is_not_challenged() -> None:
    peer = Peer()
    await ask(RunHead(peer), replace(HEAD, proves_itself=False))
    assert (peer.challenges, len(peer.bearers)) == (0, 2)


async def test_looks_at_a_training_run_cost_one_request_more_in_half_a_minute() -> None:
    peer, clock = Peer(), Clock()
    client = RunHead(peer, clock)
    for _ in range(20):
        await ask(client)
        clock.now += 3.0
    assert peer.challenges == 2
    assert len(peer.bearers) == 40


async def test_a_head_that_did_not_answer_proves_itself_again() -> None:
    """Its address may belong to another pod by now."""
    peer = Peer()
    client = RunHead(peer)
    await ask(client)
    peer.down = True
    await ask(client)
    peer.down, peer.token = False, "guess"
    before = len(peer.bearers)
    await ask(client)
    assert len(peer.bearers) == before


@pytest.mark.parametrize(
    "change",
    [
        {"pod_uid": "other"},
        {"incarnation": "head-uid/1"},
        {"pod": PodAddress("team", "lake-head", "10.0.0.2")},
    ],
    ids=["pod", "start", "address"],
)
async def test_a_proof_holds_for_one_start_of_one_pod_at_one_address(
    change: dict[str, Any],
) -> None:
    peer = Peer()
    client = RunHead(peer)
    await ask(client)
    await ask(client, replace(HEAD, **change))
    assert peer.challenges == 2


async def test_a_hung_head_is_challenged_once_by_a_look() -> None:
    peer, clock = Peer(), Clock()
    peer.down, peer.delay = True, 0.01
    client = RunHead(peer, clock)
    answers = await ask(client)
    assert all(isinstance(answer, Unreachable) for answer in answers)
    assert {answer.reason for answer in answers} == {Reason.PROGRESS_UNAVAILABLE}
    assert (peer.challenges, peer.bearers) == (1, [])
    clock.now += 3
    await ask(client)
    assert peer.challenges == 2


async def test_heads_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    client = RunHead(Peer(), clock)
    for number in range(500):
        await client.progress(replace(HEAD, pod_uid=f"uid-{number}"))
        clock.now += 3.0
    assert len(client._proved) <= 40


# -- the reporter and the pods ---------------------------------------------------------------------


class LocalTransport(DirectTransport):
    """Connects to a port of this machine, whatever the pod's address."""

    def __init__(self, session: aiohttp.ClientSession, port: int):
        super().__init__(session)
        self.port = port

    async def request(
        self, method: str, pod: PodAddress, port: int, path: str, **arguments: Any
    ) -> Response:
        here = replace(pod, ip="127.0.0.1")
        return await super().request(method, here, self.port, path, **arguments)


@asynccontextmanager
async def reporter(path: Path, uid: str = "", ip: str = "") -> AsyncIterator[tuple[URL, RunHead]]:
    """Serve a real reporter. Yields its address and a client that takes it for the head."""
    made = Reporter("reporter-token", StateFile(path / "state.json"), pod_uid=uid, pod_ip=ip)
    async with TestServer(made.app()) as server, aiohttp.ClientSession() as session:
        yield server.make_url("/"), RunHead(LocalTransport(session, server.port or 0))


async def test_the_reporter_proves_which_pod_it_is_in(tmp_path: Path) -> None:
    async with reporter(tmp_path, "head-uid", "10.0.0.1") as (_, client):
        assert await client.progress(HEAD) == NoReport()
        other = await client.progress(replace(HEAD, pod_uid="other"))
        assert isinstance(other, Unreachable)
        assert other.reason is Reason.TOKENS_REFUSED


async def test_a_reporter_that_does_not_know_its_pod_proves_nothing(tmp_path: Path) -> None:
    async with reporter(tmp_path) as (_, client):
        answer = await client.progress(HEAD)
        assert isinstance(answer, Unreachable)
        assert answer.reason is Reason.PROGRESS_UNAVAILABLE


@pytest.mark.parametrize("body", [b"", b"{}", b'{"nonce": "a\\nb"}', b'{"nonce": "' + b"a" * 999])
async def test_the_reporter_answers_only_a_nonce(tmp_path: Path, body: bytes) -> None:
    async with (
        reporter(tmp_path, "head-uid", "10.0.0.1") as (url, _),
        aiohttp.ClientSession() as session,
    ):
        async with session.post(url / "challenge", data=body) as answer:
            assert answer.status == 422
        async with session.get(url / "progress") as answer:
            assert answer.status == 401


async def test_a_run_of_this_version_has_a_head_that_proves_itself() -> None:
    world = World()
    world.apply_run()
    await training(Operator(world))
    run = parse_served(world.run)
    world.let_watches_catch_up()
    observer = Observer(world, world, world.watched, KEY, lambda: world.now)
    objects = await observer.read_objects(run, fresh=False)
    address = await observer.head_address(run, objects)
    assert isinstance(address, HeadAddress)
    (head,) = [pod for pod in objects.pods if pod.is_head]
    assert (address.proves_itself, address.pod_uid) == (True, head.uid)
    assert address.incarnation == str(head.incarnation)
    cluster = world.objects["RayCluster", NAME]
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    fields = {item["name"]: item["valueFrom"] for item in pod["initContainers"][-1]["env"]}
    assert fields["AGENTICRUN_POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert fields["AGENTICRUN_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    pod["initContainers"][-1]["env"] = []
    assert not answers_challenges(cluster)
