"""Client of the kube-apiserver, for plain JSON objects.

Uses the official client for the connection, credentials and token refresh only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import aiohttp
from kubernetes.aio import client, config

from agenticrun_api import AgenticRunStatus, names
from agenticrun_api.base import clean_text
from agenticrun_operator import errors, metrics
from agenticrun_operator.resources import Event, Manifest
from agenticrun_operator.resources.workloads import (
    FLAVOR_KIND,
    KUEUE_GROUP,
    KUEUE_VERSION,
    PRIORITY_KIND,
    WORKLOAD_KIND,
)
from agenticrun_operator.shard import ALL_RUNS, Shard

FIELD_MANAGER = "agenticrun-operator"
TIMEOUT_SECONDS = 5.0
"""Limit of the first try of a request that may be repeated. A connection that is frozen or half
open shows no error, and the status is to be true within 10 s: so the request is sent again, on
another connection, with the longer limit that a slow apiserver needs."""
LIST_SECONDS = 15.0
"""Limit of a page of a list, and of a second try to read."""
ADMISSION_SECONDS = 35.0
"""Limit of a write that admission webhooks may see, and of a second try of one that may be
repeated. A webhook may take 30 s, and the apiserver ends a write after 34 s."""
POSITIONS_SECONDS = 2.0
"""Limit for Kueue's positions, which no run needs: questions about other queues wait for it."""
CONNECT_SECONDS = 5.0
"""Limit for a new connection within any of these."""
IDLE_SECONDS = 2.0
"""Unused connections are closed after this time: all idle ones may be dead since the last use, and
a request that has timed out must not meet another dead one."""
WATCH_SECONDS = 5.0
"""Lifetime of a watch, which the apiserver ends. One that hangs without an error, because its
connection is frozen or half open, is replaced `WATCH_GRACE_SECONDS` later. The new watch continues
from the version of the last bookmark, so that nothing is missed or listed again."""
WATCH_GRACE_SECONDS = 2.0
WATCHES_PER_SECOND = 10.0
"""With many namespaces, watches live longer, so that no more than this number begins per second."""
KINDS_WATCHED = 6
MAX_LINE_BYTES = 2**21
"""Longest event of a watch. etcd holds no larger objects."""
PAGE = 500
"""Objects in one answer to a list."""

log = logging.getLogger(__name__)

_APPLY = "application/apply-patch+yaml; charset=utf-8"
"""The official client serializes the body of the bare type itself, with escapes such as
`\\ud83e\\udd17` that the apiserver's YAML reader refuses. With a parameter, it sends our bytes."""
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON may contain and YAML may not, or that end a line there."""
_METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
_WATCHED_WHOLE = frozenset({"Pod", "RayCluster", "NetworkPolicy", WORKLOAD_KIND})
"""Kinds that are watched with all their fields; of other kinds, only the metadata is watched."""
_KUEUE = f"/apis/{KUEUE_GROUP}/{KUEUE_VERSION}"
_VISIBILITY = f"/apis/visibility.{KUEUE_GROUP}/{KUEUE_VERSION}"
_ROOTS = {
    names.KIND: (f"/apis/{names.GROUP}/{names.VERSION}", names.PLURAL),
    "RayCluster": ("/apis/ray.io/v1", "rayclusters"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Pod": ("/api/v1", "pods"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Secret": ("/api/v1", "secrets"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Event": ("/api/v1", "events"),
    WORKLOAD_KIND: (_KUEUE, "workloads"),
    FLAVOR_KIND: (_KUEUE, "resourceflavors"),
    PRIORITY_KIND: (_KUEUE, "workloadpriorityclasses"),
}
_REPEATED_READ = (TIMEOUT_SECONDS, LIST_SECONDS)
_REPEATED_WRITE = (TIMEOUT_SECONDS, ADMISSION_SECONDS)
"""Limits of the tries of a write whose repetition is safe: an uid or version guards it."""

Propagation = Literal["Background", "Foreground"]
"""Foreground: an object that is deleted stays until its dependents are gone."""


@dataclass(frozen=True)
class Response:
    """A response with any status."""

    status: int
    body: bytes


async def connect(kubeconfig: Path | None = None) -> client.ApiClient:
    """Connect with the pod's own credentials or, outside a Kubernetes cluster, with a kubeconfig.

    Args:
        kubeconfig: path of the kubeconfig; None: the one in KUBECONFIG.
    """
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        await config.load_kube_config(
            config_file=str(kubeconfig) if kubeconfig else None, client_configuration=settings
        )
    api = client.ApiClient(configuration=settings)
    # No limit of connections: the number of looks at once is limited by slots.
    connector = aiohttp.TCPConnector(
        limit=0, ssl=api.rest_client.ssl_context, keepalive_timeout=IDLE_SECONDS
    )
    # The client has no setting for the read buffer, which events of large objects need.
    api.rest_client.pool_manager = aiohttp.ClientSession(
        connector=connector, trust_env=True, read_bufsize=MAX_LINE_BYTES
    )
    return api


class KubeClient:
    """Implements `protocols.Kube`, and raw requests for leases and the apiserver's proxy."""

    def __init__(self, api: client.ApiClient, namespaces: Sequence[str], shard: Shard = ALL_RUNS):
        self._api = api
        self._namespaces = tuple(namespaces)
        self._shard = shard
        self._told_of_old_crd = False

    async def close(self) -> None:
        """Close the connection."""
        await self._api.close()

    async def raw(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        limit: int | None = None,
    ) -> Response:
        """Send one request and return the response with any status.

        Args:
            method: GET, for example.
            path: the path of the API.
            query: the query of the URL.
            body: sent as JSON, in UTF-8.
            headers: more headers.
            timeout: the limit in seconds.
            limit: the longest body, in bytes; None: any, because the apiserver sends it itself.

        Raises:
            AnswerTooLong: the body is longer than `limit`.
            Unanswered: the apiserver did not answer in time.
            KubeUnavailable: the connection cannot be made, or broke.
        """
        if body is not None:
            content = utf8_json(body)
            # The client serializes JSON bodies itself, and cleans no text.
            as_bytes = (headers or {}).get("Content-Type") == _APPLY
            body = content if as_bytes else json.loads(content)
        serialized = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", **(headers or {})},
            body=body,
            auth_settings=["BearerToken"],
        )
        began = time.monotonic()
        # A dead address must not take the time that a slow answer needs.
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        try:
            response = await self._api.call_api(*serialized, _request_timeout=limits)
            content = (
                await response.read() if limit is None else await _read(response.response, limit)
            )
        except (TimeoutError, aiohttp.ClientError) as error:
            metrics.API_REQUESTS.labels(method=method, status="none").inc()
            failure = (
                errors.Unanswered if isinstance(error, TimeoutError) else errors.KubeUnavailable
            )
            raise failure(f"{method} {path}: {str(error) or type(error).__name__}") from error
        finally:
            metrics.API_SECONDS.labels(method=method).observe(time.monotonic() - began)
        metrics.API_REQUESTS.labels(method=method, status=str(response.status)).inc()
        return Response(response.status, content)

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._request("GET", object_path(kind, namespace, name))
        except errors.NotFound:
            return None

    async def list_run_keys(self) -> list[tuple[str, str]]:
        lists = []
        for namespace in self._namespaces or (None,):
            try:
                lists.append(await self.list_objects(names.KIND, namespace, None))
            except errors.ClusterError as error:  # one missing namespace must not hide the others
                log.warning("cannot list the runs: %s", error)
        return [
            (item["metadata"]["namespace"], item["metadata"]["name"])
            for items, _ in lists
            for item in items
        ]

    async def list_pods(
        self, namespace: str, run_name: str, label: str = names.LABEL_RUN
    ) -> list[Manifest]:
        found = await self._request(
            "GET", object_path("Pod", namespace), query={"labelSelector": f"{label}={run_name}"}
        )
        items: list[Manifest] = found["items"]
        return items

    async def list_policies(self, namespace: str, run_name: str) -> list[Manifest]:
        found = await self._request(
            "GET",
            object_path("NetworkPolicy", namespace),
            query={"labelSelector": f"{names.LABEL_RUN}={run_name}"},
        )
        kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
        return [{**kind, **item} for item in found["items"] or []]  # items do not name their kind

    async def list_pod_warnings(self, namespace: str, pod_uid: str) -> list[Manifest]:
        selector = f"involvedObject.uid={pod_uid},type=Warning"
        found = await self._request(
            "GET", object_path("Event", namespace), query={"fieldSelector": selector}
        )
        items: list[Manifest] = found["items"]
        return items

    async def queue_positions(self, namespace: str, queue: str) -> dict[str, int]:
        path = f"{_VISIBILITY}/namespaces/{namespace}/localqueues/{queue}/pendingworkloads"
        found = await self._request("GET", path, limits=(POSITIONS_SECONDS,))
        return {
            item["metadata"]["name"]: item["positionInClusterQueue"] + 1
            for item in found["items"] or []
        }

    async def list_objects(
        self, kind: str, namespace: str | None, label: str | None
    ) -> tuple[list[Manifest], str]:
        """Return all objects of a kind that may be of the shard, and the version to watch from.

        Args:
            kind: the kind; of runs, only the metadata is returned.
            namespace: their namespace; None: all namespaces.
            label: the label that they must have; None: any object.

        Raises:
            WatchExpired: the list took too long; begin again.
        """
        query = {"limit": str(PAGE)} | ({"labelSelector": label} if label else {})
        items: list[Manifest] = []
        while True:
            found = await self._request(
                "GET",
                object_path(kind, namespace),
                query=query,
                headers=_accept(kind, "List"),
                limits=(LIST_SECONDS,),
            )
            listed = found["items"] or []  # null, not []
            items += [item for item in listed if self._shard.sees(kind, item)]
            if not found["metadata"].get("continue"):
                return items, found["metadata"]["resourceVersion"]
            query["continue"] = found["metadata"]["continue"]

    @asynccontextmanager
    async def watch_objects(
        self, kind: str, namespace: str | None, label: str | None, since: str
    ) -> AsyncIterator[AsyncIterator[tuple[str, Manifest]]]:
        """Watch objects that may be of the shard. Entering means that the apiserver serves it.

        Yields:
            An iterator over events: the type (ADDED, MODIFIED, DELETED, or BOOKMARK, which carries
            only a version) and the object.

        Raises:
            WatchBroken: continue from the version of the last event.
            WatchExpired: list the objects again.
        """
        path = object_path(kind, namespace)
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": since}
        watches = KINDS_WATCHED * max(1, len(self._namespaces))
        longest = max(WATCH_SECONDS, watches / WATCHES_PER_SECOND)
        seconds = max(1, int(longest * random.uniform(0.8, 1.0)))  # watches do not end together
        query |= {"timeoutSeconds": str(seconds)} | ({"labelSelector": label} if label else {})
        serialized = await self._api.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params=_accept(kind, ""),
            auth_settings=["BearerToken"],
        )
        timeout = aiohttp.ClientTimeout(total=seconds + WATCH_GRACE_SECONDS)
        try:
            answer = await self._api.call_api(*serialized, _request_timeout=timeout)
            async with answer.response as response:
                # Overload is no reason to list again, which would add to it.
                if response.status == 429 or response.status >= 500:
                    raise errors.WatchBroken(f"watch {path}: status {response.status}")
                if response.status != 200:
                    _read_answer(Response(response.status, await response.read()), f"watch {path}")
                events = _watch_events(response.content)
                # One that has got the label of another shard's run is gone from this shard.
                yield (
                    (
                        type_ if type_ == "BOOKMARK" or self._shard.sees(kind, item) else "DELETED",
                        item,
                    )
                    async for type_, item in events
                )
        except (TimeoutError, aiohttp.ClientError) as error:
            raise errors.WatchBroken(
                f"watch {path}: {str(error) or type(error).__name__}"
            ) from error

    async def create(self, manifest: Manifest) -> None:
        path = object_path(manifest["kind"], manifest["metadata"]["namespace"])
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        limits = (_write_seconds(manifest["kind"]),)
        await self._request("POST", path, query=query, body=manifest, limits=limits)

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        uid: str,
        force: bool = False,
        propagation: Propagation = "Background",
    ) -> None:
        # The uid guards against the deletion of a new object with the old one's name.
        options: dict[str, Any] = {"propagationPolicy": propagation, "preconditions": {"uid": uid}}
        if force:
            options["gracePeriodSeconds"] = 0
        path = object_path(kind, namespace, name)
        try:
            await self._request("DELETE", path, body=options, limits=_REPEATED_WRITE)
        # Gone, or another object by now: either way this one is deleted.
        except (errors.NotFound, errors.NotServed, errors.Conflict):
            return

    async def write_status(self, run: Manifest, status: AgenticRunStatus) -> Manifest:
        metadata = run["metadata"]
        keep = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        fields = status.to_dict()
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": keep,
            "status": fields,
        }
        path = object_path(names.KIND, metadata["namespace"], metadata["name"])
        while True:
            try:
                return await self._apply(f"{path}/status", body)
            except (errors.Refused, errors.KubeUnavailable) as error:
                # Operators are upgraded before CRDs: one field less is better than no status.
                if not _drop_undeclared(fields, str(error)):
                    raise
                if not self._told_of_old_crd:
                    log.warning("the CRD is older than this operator; apply the chart's: %s", error)
                self._told_of_old_crd = True

    async def post_event(self, run: Manifest, event: Event) -> None:
        """Post an event. Its name is a hash of its content, so a repeated event is stored once."""
        metadata = run["metadata"]
        now = datetime.now(UTC)
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        digest = hashlib.sha256(f"{metadata['uid']} {stamp} {event}".encode()).hexdigest()[:16]
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{digest}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")
            }
            | {"apiVersion": names.API_VERSION, "kind": names.KIND},
            "reason": str(event.reason),
            "message": event.message,
            "type": event.type,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        path = object_path("Event", metadata["namespace"])
        try:
            await self._request("POST", path, body=body, limits=(TIMEOUT_SECONDS,))
        except errors.AlreadyExists:
            return

    async def put(self, manifest: Manifest) -> Manifest:
        """Replace an object at its resourceVersion.

        Raises:
            Conflict: the object has changed since it was read.
            NotFound: the object does not exist.
        """
        metadata = manifest["metadata"]
        return await self._request(
            "PUT",
            object_path(manifest["kind"], metadata["namespace"], metadata["name"]),
            body=manifest,
            limits=(_write_seconds(manifest["kind"]),),
        )

    async def put_status(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        path = object_path(manifest["kind"], metadata["namespace"], metadata["name"])
        limits = (_write_seconds(manifest["kind"]),)
        return await self._request("PUT", f"{path}/status", body=manifest, limits=limits)

    async def _apply(self, path: str, body: Manifest) -> Manifest:
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self._request(
            "PATCH",
            path,
            query=query,
            body=body,
            headers={"Content-Type": _APPLY},
            limits=_REPEATED_WRITE,
        )

    async def _request(
        self,
        method: str,
        path: str,
        *,
        limits: tuple[float, ...] = (),
        **arguments: Any,
    ) -> Manifest:
        """Send a request and return the object of the answer.

        Args:
            method: GET, for example.
            path: the path of the API.
            limits: the limit in seconds of each try. Another try follows if one is not answered.
                None: those of a request that reads one object.
            arguments: as of `raw`.

        Raises:
            ClusterError: as `_read_answer`.
        """
        *first, last = limits or _REPEATED_READ
        for limit in first:
            try:
                answer = await self.raw(method, path, timeout=limit, **arguments)
                break
            # The connection may be dead without an error; the next try uses another one.
            except errors.Unanswered as error:
                log.info("%s; sent again", error)
        else:
            answer = await self.raw(method, path, timeout=last, **arguments)
        return _read_answer(answer, f"{method} {path}")


def utf8_json(body: Any) -> bytes:
    """Return a body as JSON in UTF-8 that is also YAML with the same content.

    Text may come from anywhere: exceptions, logs, webhooks. Two surrogates that make one character
    are joined, a lone one becomes U+FFFD.
    """
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    text = _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    try:
        return text.encode()
    except UnicodeEncodeError:
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return joined.encode()


def _write_seconds(kind: str) -> float:
    """Return the limit of a write. A renewal of a Lease that takes long is of no use."""
    return TIMEOUT_SECONDS if kind == "Lease" else ADMISSION_SECONDS


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of a response.

    Raises:
        AnswerTooLong: it has more than `limit` bytes. The connection is closed.
    """
    content = bytearray()
    async for chunk in response.content.iter_chunked(65_536):
        content += chunk
        if len(content) > limit:
            # The rest stays unread, so the connection cannot be used again.
            response.close()
            raise errors.AnswerTooLong(f"the answer has more than {limit} bytes")
    return bytes(content)


def object_path(kind: str, namespace: str | None, name: str | None = None) -> str:
    """Return the API path of one object or, without a name, of all objects of a kind."""
    root, plural = _ROOTS[kind]
    path = f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"
    return f"{path}/{name}" if name else path


def _drop_undeclared(status: dict[str, Any], message: str) -> bool:
    """Remove the fields that the message says the CRD does not have, in lists from all items.

    Server-side apply refuses such fields, whatever `fieldValidation` is.

    Returns:
        True if one of them was there.
    """
    dropped = False
    for path in re.findall(r"\.status((?:\.\w+|\[[^]]*])+): field not declared in schema", message):
        *parents, last = re.sub(r"\[[^]]*]", "", path).strip(".").split(".")
        nodes: list[Any] = [status]
        for name in parents:
            below = [node.get(name) for node in nodes]
            nodes = [
                item for found in below for item in (found if type(found) is list else [found])
            ]
            nodes = [node for node in nodes if isinstance(node, dict)]
        for node in nodes:
            dropped |= node.pop(last, None) is not None
    return dropped


def _accept(kind: str, suffix: str) -> dict[str, str]:
    whole = kind in _WATCHED_WHOLE
    return {"Accept": "application/json" if whole else _METADATA.format(suffix)}


async def _watch_events(lines: aiohttp.StreamReader) -> AsyncIterator[tuple[str, Manifest]]:
    async for line in lines:
        try:
            event = json.loads(line)
        except ValueError as error:
            raise errors.KubeUnavailable(f"watch: unusable event: {line[:200]!r}") from error
        if event["type"] == "ERROR":
            status = event["object"]
            if status.get("code") == 410:
                raise errors.WatchExpired(str(status.get("message")))
            raise errors.KubeUnavailable(f"watch: {status.get('message')}")
        yield event["type"], event["object"]


def _read_answer(response: Response, request: str) -> Manifest:
    """Return the object of a response.

    Raises:
        ClusterError: the response is an error, or is not JSON.
    """
    try:
        answer = json.loads(response.body)
    except ValueError as error:
        # The apiserver's own 404 for an unknown path is plain text.
        if response.status == 404 and " /apis/" in request:
            raise errors.NotServed(
                f"{request}: the apiserver does not serve this resource"
            ) from error
        if response.status == 413:
            raise errors.TooLarge(
                f"{request}: the request is larger than a proxy lets pass"
            ) from error
        raise errors.KubeUnavailable(
            f"{request}: status {response.status}, and the answer is not JSON"
        ) from error
    if response.status < 300:
        found: Manifest = answer
        return found
    raise _error(response.status, answer, request)


_BY_STATUS: dict[int, type[errors.ClusterError]] = {
    400: errors.Refused,
    405: errors.NotServed,  # also while a CRD is being deleted
    409: errors.Conflict,
    410: errors.WatchExpired,
    413: errors.TooLarge,
    422: errors.Refused,
}
_BY_POLICY = re.compile(r"denied (the )?request")
"""The words of admission policies and webhooks, which may choose any code."""
_OF_500: tuple[tuple[re.Pattern[str], type[errors.ClusterError]], ...] = (
    (re.compile(r"request is too large|trying to send message larger than max"), errors.TooLarge),
    (
        re.compile(r"failed calling webhook|conversion webhook for .* failed"),
        errors.WebhookUnavailable,
    ),
    (re.compile(r"error decoding|failed to create typed"), errors.Refused),
)
"""The words of etcd and its client, of webhooks, and of server-side apply about values that have
other types than in the CRD."""


def _error(status: int, answer: Any, request: str) -> errors.ClusterError:
    details = answer if isinstance(answer, dict) else {}
    message = clean_text(str(details.get("message") or f"{request}: status {status}"))
    subject = details.get("details") or {}
    # Before the status code, which a policy or webhook chooses.
    if _BY_POLICY.search(message):
        return errors.Denied(message)
    if status == 404:
        # The kind in the details says what is missing: the object, its namespace, or the whole API.
        missing = {None: errors.NotServed, "namespaces": errors.NamespaceGone}
        return missing.get(subject.get("kind"), errors.NotFound)(message)
    if status == 403:
        causes = {cause.get("reason") for cause in subject.get("causes") or ()}
        if "NamespaceTerminating" in causes:
            return errors.NamespaceGone(message)
        # The apiserver's words for what RBAC, or another authorizer, does not allow.
        right = re.search(r"User \S+ cannot \w+ resource", message)
        return errors.RightMissing(message) if right else errors.Denied(message)
    if status == 409 and details.get("reason") == "AlreadyExists":
        return errors.AlreadyExists(message)
    known = _BY_STATUS.get(status)
    # etcd, webhooks and server-side apply answer 500 for what is wrong with the request.
    if status >= 500:
        known = next((error for words, error in _OF_500 if words.search(message)), None)
    return (
        known(message)
        if known
        else errors.KubeUnavailable(f"{request}: status {status}: {message}")
    )
