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
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from agenticrun_api import AgenticRunStatus
from agenticrun_api.names import API_VERSION, GROUP, KIND, LABEL_RUN, PLURAL, VERSION
from agenticrun_operator.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    KubeUnavailable,
    NamespaceGone,
    NotFound,
    NotServed,
    Refused,
    RightMissing,
    WatchBroken,
    WatchExpired,
)
from agenticrun_operator.metrics import API_REQUESTS, API_SECONDS
from agenticrun_operator.resources import Event, Manifest

FIELD_MANAGER = "agenticrun-operator"
TIMEOUT_SECONDS = 5.0
"""Limit of a request about one object. One on a connection that is frozen or half open, which shows
no error, is repeated on another connection soon enough that the status is true within 10 s."""
SLOW_SECONDS = 15.0
"""Limit of a page of a list, and of other requests while the apiserver is slow: since one was not
answered in `TIMEOUT_SECONDS`, and until one is."""
IDLE_SECONDS = 2.0
"""Unused connections are closed after this time: all idle ones may be dead since the last use, and
a request that has timed out must not meet another dead one."""
WATCH_SECONDS = 5.0
"""Lifetime of a watch, which the apiserver ends. One that hangs without an error, because its
connection is frozen or half open, is replaced `WATCH_GRACE_SECONDS` later. It goes on from the
version of the last bookmark, so that nothing is missed or listed again."""
WATCH_GRACE_SECONDS = 2.0
WATCHES_PER_SECOND = 10.0
"""With many namespaces, watches live longer, so that no more than this number begins per second."""
KINDS_WATCHED = 3
MAX_LINE_BYTES = 2**21
"""Longest event of a watch. etcd holds no larger objects."""
PAGE = 500
"""Objects in one answer to a list."""

log = logging.getLogger(__name__)

_APPLY = "application/apply-patch+yaml"
_METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
_WATCHED_WHOLE = frozenset({"Pod", "RayCluster"})
"""Kinds that are watched with all their fields; of other kinds, only the metadata is watched."""
_ROOTS = {
    KIND: (f"/apis/{GROUP}/{VERSION}", PLURAL),
    "RayCluster": ("/apis/ray.io/v1", "rayclusters"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Pod": ("/api/v1", "pods"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Secret": ("/api/v1", "secrets"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Event": ("/api/v1", "events"),
}


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
    connector = aiohttp.TCPConnector(
        limit=0, ssl=api.rest_client.ssl_context, keepalive_timeout=IDLE_SECONDS
    )
    api.rest_client.pool_manager = aiohttp.ClientSession(
        connector=connector, trust_env=True, read_bufsize=MAX_LINE_BYTES
    )
    return api


class KubeClient:
    """Implements `protocols.Kube`, and raw requests for leases and the apiserver's proxy."""

    def __init__(self, api: client.ApiClient, namespaces: Sequence[str]):
        self._api = api
        self._namespaces = tuple(namespaces)
        self._told_of_old_crd = False
        self._slow = False
        """True if the latest request was not answered in `TIMEOUT_SECONDS`."""

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
        timeout: float | None = None,
    ) -> Response:
        """Send one request and return the response with any status.

        Args:
            method: GET, for example.
            path: the path of the API.
            query: the query of the URL.
            body: sent as JSON.
            headers: more headers.
            timeout: the limit in seconds; None: that of a request about one object.

        Raises:
            KubeUnavailable: the apiserver did not answer.
        """
        serialized = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", **(headers or {})},
            body=body,
            auth_settings=["BearerToken"],
        )
        began = time.monotonic()
        limit = timeout or (SLOW_SECONDS if self._slow else TIMEOUT_SECONDS)
        try:
            response = await self._api.call_api(*serialized, _request_timeout=limit)
            content = await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            API_REQUESTS.labels(method=method, status="none").inc()
            raise KubeUnavailable(
                f"{method} {path}: {str(error) or type(error).__name__}"
            ) from error
        finally:
            seconds = time.monotonic() - began
            self._slow = seconds >= TIMEOUT_SECONDS
            API_SECONDS.labels(method=method).observe(seconds)
        API_REQUESTS.labels(method=method, status=str(response.status)).inc()
        return Response(response.status, content)

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._request("GET", object_path(kind, namespace, name))
        except NotFound:
            return None

    async def list_run_keys(self) -> list[tuple[str, str]]:
        lists = []
        for namespace in self._namespaces or (None,):
            try:
                lists.append(await self.list_objects(KIND, namespace, None))
            except ClusterError as error:  # one missing namespace must not hide the others
                log.warning("cannot list the runs: %s", error)
        return [
            (item["metadata"]["namespace"], item["metadata"]["name"])
            for items, _ in lists
            for item in items
        ]

    async def list_pods(self, namespace: str, run_name: str) -> list[Manifest]:
        found = await self._request(
            "GET", object_path("Pod", namespace), query={"labelSelector": f"{LABEL_RUN}={run_name}"}
        )
        items: list[Manifest] = found["items"]
        return items

    async def list_pod_warnings(self, namespace: str, pod_uid: str) -> list[Manifest]:
        selector = f"involvedObject.uid={pod_uid},type=Warning"
        found = await self._request(
            "GET", object_path("Event", namespace), query={"fieldSelector": selector}
        )
        items: list[Manifest] = found["items"]
        return items

    async def list_objects(
        self, kind: str, namespace: str | None, label: str | None
    ) -> tuple[list[Manifest], str]:
        """Return all objects of a kind, and the version to watch from.

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
                timeout=SLOW_SECONDS,
            )
            items += found["items"] or []  # null, not []
            if not found["metadata"].get("continue"):
                return items, found["metadata"]["resourceVersion"]
            query["continue"] = found["metadata"]["continue"]

    @asynccontextmanager
    async def watch_objects(
        self, kind: str, namespace: str | None, label: str | None, since: str
    ) -> AsyncIterator[AsyncIterator[tuple[str, Manifest]]]:
        """Watch objects. Entering means that the apiserver serves the watch.

        Yields:
            An iterator over events: the type (ADDED, MODIFIED, DELETED, or BOOKMARK, which carries
            only a version) and the object.

        Raises:
            WatchBroken: go on from the version of the last event.
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
                if response.status == 429 or response.status >= 500:
                    raise WatchBroken(f"watch {path}: status {response.status}")
                if response.status != 200:
                    _read_answer(Response(response.status, await response.read()), f"watch {path}")
                yield _watch_events(response.content)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise WatchBroken(f"watch {path}: {str(error) or type(error).__name__}") from error

    async def create(self, manifest: Manifest) -> None:
        path = object_path(manifest["kind"], manifest["metadata"]["namespace"])
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        await self._request("POST", path, query=query, body=manifest)

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, force: bool = False
    ) -> None:
        options: dict[str, Any] = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        if force:
            options["gracePeriodSeconds"] = 0
        try:
            await self._request("DELETE", object_path(kind, namespace, name), body=options)
        except (NotFound, NotServed, Conflict):
            return

    async def write_status(self, run: Manifest, status: AgenticRunStatus) -> Manifest:
        metadata = run["metadata"]
        keep = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        fields = status.to_dict()
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": keep, "status": fields}
        path = object_path(KIND, metadata["namespace"], metadata["name"])
        while True:
            try:
                return await self._apply(f"{path}/status", body)
            except KubeUnavailable as error:
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
            | {"apiVersion": API_VERSION, "kind": KIND},
            "reason": str(event.reason),
            "message": event.message,
            "type": event.type,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            await self._request("POST", object_path("Event", metadata["namespace"]), body=body)
        except AlreadyExists:
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
        )

    async def _apply(self, path: str, body: Manifest) -> Manifest:
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self._request(
            "PATCH", path, query=query, body=body, headers={"Content-Type": _APPLY}
        )

    async def _request(self, method: str, path: str, **arguments: Any) -> Manifest:
        return _read_answer(await self.raw(method, path, **arguments), f"{method} {path}")


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
            raise KubeUnavailable(f"watch: unusable event: {line[:200]!r}") from error
        if event["type"] == "ERROR":
            status = event["object"]
            if status.get("code") == 410:
                raise WatchExpired(str(status.get("message")))
            raise KubeUnavailable(f"watch: {status.get('message')}")
        yield event["type"], event["object"]


def _read_answer(response: Response, request: str) -> Manifest:
    """Return the object of a response.

    Raises:
        ClusterError: the response is an error, or is not JSON.
    """
    try:
        answer = json.loads(response.body)
    except ValueError as error:
        if response.status == 404 and " /apis/" in request:
            raise NotServed(f"{request}: the apiserver does not serve this resource") from error
        raise KubeUnavailable(
            f"{request}: status {response.status}, and the answer is not JSON"
        ) from error
    if response.status < 300:
        found: Manifest = answer
        return found
    raise _error(response.status, answer, request)


def _forbidden(message: str, *, terminating: bool) -> ClusterError:
    if terminating:
        return NamespaceGone(message)
    # The apiserver's words for what RBAC, or another authorizer, does not allow.
    right = re.search(r"User \S+ cannot \w+ resource", message)
    return RightMissing(message) if right else Denied(message)


def _error(status: int, answer: Any, request: str) -> ClusterError:
    details = answer if isinstance(answer, dict) else {}
    message = str(details.get("message") or f"{request}: status {status}")
    subject = details.get("details") or {}
    causes = {cause.get("reason") for cause in subject.get("causes") or ()}
    match status, details.get("reason"):
        case 404, _:
            missing = {None: NotServed, "namespaces": NamespaceGone}
            return missing.get(subject.get("kind"), NotFound)(message)
        case 405, _:  # also while a CRD is being deleted
            return NotServed(message)
        case 410, _:
            return WatchExpired(message)
        case 409, "AlreadyExists":
            return AlreadyExists(message)
        case 409, _:
            return Conflict(message)
        case 403, _:
            return _forbidden(message, terminating="NamespaceTerminating" in causes)
        case ((400 | 422), _):
            # Admission policies and webhooks may choose these codes; the words are theirs.
            policy = re.search(r"denied (the )?request", message)
            return Denied(message) if policy else Refused(message)
    return KubeUnavailable(f"{request}: status {status}: {message}")
