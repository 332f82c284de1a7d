"""Requests to the apiserver: their texts, their limits, and the errors that answers become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes.aio import client

from agenticrun_api import AgenticRunStatus, Reason
from agenticrun_operator.cluster import KubeClient
from agenticrun_operator.cluster import kube as kube_client
from agenticrun_operator.cluster.kube import utf8_json
from agenticrun_operator.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    KubeUnavailable,
    NotFound,
    Refused,
    RightMissing,
    TooLarge,
    Unanswered,
    WebhookUnavailable,
)
from agenticrun_operator.resources import Event, Manifest

RUN = {"metadata": {"name": "lake", "namespace": "team", "uid": "u", "resourceVersion": "7"}}
CLUSTER = {"kind": "RayCluster", "metadata": {"name": "lake", "namespace": "team"}}
ANY_TEXT = st.text(st.characters())
"""Surrogates, control characters and characters beyond U+FFFF included."""


class SlowApiserver:
    """Keeps the requests, and answers each after `seconds` with `answer`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        """Method, content type and body."""
        self.seconds = 0.0
        self.answer: tuple[int, Any] = 200, {"kind": "x"}

    async def handle(self, request: web.Request) -> web.Response:
        content = await request.read()
        self.requests.append((request.method, request.headers.get("Content-Type", ""), content))
        await asyncio.sleep(self.seconds)
        status, body = self.answer
        text = "<html>" if body is None else json.dumps(body)
        return web.Response(text=text, status=status)


@pytest.fixture
def apiserver() -> SlowApiserver:
    return SlowApiserver()


@pytest.fixture
async def kube(apiserver: SlowApiserver) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", apiserver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    kube = KubeClient(client.ApiClient(configuration=client.Configuration(host=host)), [])
    yield kube
    await kube.close()
    await runner.cleanup()


def whole(text: str) -> str:
    """Return the text with surrogates joined, or replaced if they are alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# -- texts -----------------------------------------------------------------------------------------


@given(ANY_TEXT, ANY_TEXT)
@example("\U0001f917", "\ud83e\udd17")
@example("Ca\udce9 \ud83e!", "\x00\x1b[31m\x7f\x85\x9f\u2028\u2029\ufeff\ufffe\uffff")
@example("\\\ud83e\\ud83e", '"\\"')
def test_any_text_is_sent_as_utf_8_that_json_and_yaml_read_alike(key: str, text: str) -> None:
    sent = utf8_json({"status": {"message": text, "texts": [{key: text}]}})
    expected = {"status": {"message": whole(text), "texts": [{whole(key): whole(text)}]}}
    assert json.loads(sent.decode()) == expected
    assert yaml.load(sent, yaml.BaseLoader) == expected


async def test_the_status_is_sent_in_utf_8_and_so_is_every_other_text(
    apiserver: SlowApiserver, kube: KubeClient
) -> None:
    text, sent = "\U0001f6ab \ud83e\udd17 Ca\udce9 \x00", "\U0001f6ab \U0001f917 Ca\ufffd \x00"
    await kube.write_status(RUN, AgenticRunStatus().model_copy(update={"message": text}))
    await kube.create(CLUSTER | {"note": text})
    await kube.put(CLUSTER | {"note": text})
    await kube.post_event(RUN, Event(Reason.DENIED, text, "Warning"))
    bodies = [json.loads(content.decode()) for _, _, content in apiserver.requests]
    assert bodies[0]["status"]["message"] == sent
    assert [body.get("note") or body["message"] for body in bodies[1:]] == [sent] * 3
    method, content_type, content = apiserver.requests[0]
    assert (method, content_type.partition(";")[0]) == ("PATCH", "application/apply-patch+yaml")
    assert "\U0001f6ab".encode() in content, "the apiserver reads no escaped surrogates"


async def test_a_position_in_a_queue_counts_from_one(
    apiserver: SlowApiserver, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = {"positionInClusterQueue": 4, "positionInLocalQueue": 0}
    apiserver.answer = 200, {"items": [waiting | {"metadata": {"name": "agenticrun-lake-1"}}]}
    assert await kube.queue_positions("team", "research") == {"agenticrun-lake-1": 5}
    monkeypatch.setattr(kube_client, "POSITIONS_SECONDS", 0.2)
    apiserver.seconds = 0.7
    apiserver.requests.clear()
    with pytest.raises(Unanswered):
        await kube.queue_positions("team", "research")
    assert len(apiserver.requests) == 1, "a second try would delay other queues"


# -- limits ----------------------------------------------------------------------------------------


async def test_a_creation_and_a_change_wait_for_slow_webhooks(
    apiserver: SlowApiserver, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "_REPEATED_READ", (0.2, 0.2))
    apiserver.seconds = 0.7
    with pytest.raises(Unanswered):
        await kube.get("Pod", "team", "lake")
    apiserver.requests.clear()
    await kube.create(CLUSTER)
    await kube.put(CLUSTER)
    assert [method for method, _, _ in apiserver.requests] == ["POST", "PUT"], "each was sent once"


async def test_a_status_and_a_deletion_that_are_not_answered_are_sent_again_with_more_time(
    apiserver: SlowApiserver, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "_REPEATED_WRITE", (0.2, 15.0))
    apiserver.seconds = 0.7
    await kube.write_status(RUN, AgenticRunStatus())
    await kube.delete("RayCluster", "team", "lake", "u")
    assert [method for method, _, _ in apiserver.requests] == ["PATCH", "PATCH"] + ["DELETE"] * 2


def test_the_limits_outlast_the_slowest_webhook_and_a_dead_connection_is_left_in_time() -> None:
    assert kube_client.ADMISSION_SECONDS > 34, "the apiserver ends a write after 34 s"
    for first, last in (kube_client._REPEATED_READ, kube_client._REPEATED_WRITE):
        assert first <= 5
        assert last > 10
    assert kube_client._write_seconds("RayCluster") == kube_client.ADMISSION_SECONDS
    assert kube_client._write_seconds("Lease") <= 5


async def test_a_deletion_is_in_the_background_unless_asked_for(
    apiserver: SlowApiserver, kube: KubeClient
) -> None:
    await kube.delete("RayCluster", "team", "lake", "u")
    await kube.delete("RayCluster", "team", "lake", "u", propagation="Foreground")
    policies = [json.loads(body)["propagationPolicy"] for _, _, body in apiserver.requests]
    assert policies == ["Background", "Foreground"]


# -- errors ----------------------------------------------------------------------------------------

WEBHOOK = (
    'Internal error occurred: failed calling webhook "mraycluster.kb.io": failed to call webhook: '
    'Post "https://kueue-webhook-service.kueue-system.svc:443/mutate?timeout=10s": '
)


def answer(status: int, message: str, reason: str = "", **details: Any) -> tuple[int, Manifest]:
    body = {"kind": "Status", "code": status, "message": message, "reason": reason}
    return status, body | ({"details": details} if details else {})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (answer(500, WEBHOOK + "no endpoints available", "InternalError"), WebhookUnavailable),
        (answer(500, WEBHOOK + "context deadline exceeded", "InternalError"), WebhookUnavailable),
        (answer(503, WEBHOOK + "an error on the server", "ServiceUnavailable"), WebhookUnavailable),
        (
            answer(500, "conversion webhook for ray.io/v1, Kind=RayCluster failed: EOF"),
            WebhookUnavailable,
        ),
        (answer(413, "limit is 3145728", "RequestEntityTooLarge"), TooLarge),
        (answer(500, "etcdserver: request is too large"), TooLarge),
        (
            answer(
                500,
                "rpc error: code = ResourceExhausted desc = trying to send message larger "
                "than max (2097152 vs. 2097152)",
            ),
            TooLarge,
        ),
        (answer(429, "too many requests", "TooManyRequests"), KubeUnavailable),
        (answer(500, "etcdserver: leader changed"), KubeUnavailable),
        (answer(503, "apiserver is shutting down"), KubeUnavailable),
        (answer(504, "Timeout: request did not complete", "Timeout"), KubeUnavailable),
        (answer(500, 'admission webhook "w" denied the request: no'), Denied),
        (answer(400, 'admission webhook "w" denied the request: no'), Denied),
        (answer(403, 'pods is forbidden: User "x" cannot create resource "pods"'), RightMissing),
        (answer(422, "status.checkpoint.time: Invalid value", "Invalid"), Refused),
        (
            answer(400, "error decoding YAML: yaml: found invalid Unicode character escape code"),
            Refused,
        ),
        (answer(500, "failed to create typed patch object: .status.step: expected"), Refused),
        (answer(404, "not found", "NotFound", kind="rayclusters"), NotFound),
        (answer(409, "exists", "AlreadyExists"), AlreadyExists),
        (answer(409, "modified", "Conflict"), Conflict),
    ],
)
async def test_each_answer_becomes_the_error_that_callers_handle(
    apiserver: SlowApiserver, kube: KubeClient, given: tuple[int, Any], error: type[ClusterError]
) -> None:
    apiserver.answer = given
    with pytest.raises(ClusterError) as raised:
        await kube.create(CLUSTER)
    assert type(raised.value) is error
    assert given[1]["message"] in str(raised.value)


async def test_a_413_of_a_proxy_is_too_large_as_well(
    apiserver: SlowApiserver, kube: KubeClient
) -> None:
    apiserver.answer = 413, None  # a page of the proxy's
    with pytest.raises(TooLarge):
        await kube.create(CLUSTER)


async def test_the_words_of_a_webhook_stay_whole_and_act_on_no_terminal(
    apiserver: SlowApiserver, kube: KubeClient
) -> None:
    words = 'admission webhook "w" denied the request: '
    apiserver.answer = answer(403, f"{words}🚫 \x1b[31mnot\x00 today 你好 \ud83e")
    with pytest.raises(Denied) as raised:
        await kube.create(CLUSTER)
    assert str(raised.value) == f"{words}🚫 not\ufffd today 你好 \\ud83e"
