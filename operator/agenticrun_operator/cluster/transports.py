"""HTTP requests to a head pod: at its IP, or through the apiserver's proxy."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from agenticrun_operator import errors
from agenticrun_operator.cluster.kube import KubeClient, Response

TIMEOUT_SECONDS = 10.0
"""Timeout of a whole request."""
CONNECT_SECONDS = 3.0
CONNECTIONS_PER_PORT = 4
"""Connections to one head: a look needs one, an action and a log file another."""
KEEPALIVE_SECONDS = 30.0
"""Unused connections are closed after this time. A run that trains is looked at more often."""


@dataclass(frozen=True)
class PodAddress:
    """Namespace, name and IP of a pod."""

    namespace: str
    name: str
    ip: str


class HeadTransport(Protocol):
    """Sends an HTTP request to a port of a pod.

    Raises `HeadUnreachable` if the pod does not answer within `timeout` seconds, sends nothing for
    `silence` seconds or more than `limit` bytes.
    """

    async def request(
        self,
        method: str,
        pod: PodAddress,
        port: int,
        path: str,
        *,
        headers: Mapping[str, str],
        body: Any = None,
        limit: int,
        timeout: float = TIMEOUT_SECONDS,
        silence: float | None = None,
    ) -> Response: ...


def allow_many_connections() -> None:
    """Raise the process's limit of open files as far as it may: each run needs two connections.

    Prometheus shows the limit and the use as process_max_fds and process_open_fds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def head_session() -> aiohttp.ClientSession:
    """Return a session for requests to head pods.

    It has as many connections as heads need: one that accepts connections and never answers keeps
    two until they time out, and with a limit, enough of them would make healthy heads unreachable.
    """
    connector = aiohttp.TCPConnector(
        limit=0,
        limit_per_host=CONNECTIONS_PER_PORT,
        keepalive_timeout=KEEPALIVE_SECONDS,
        use_dns_cache=False,
    )
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


class DirectTransport:
    """Connects to the pod's IP, from inside the Kubernetes cluster's network."""

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session

    async def request(
        self,
        method: str,
        pod: PodAddress,
        port: int,
        path: str,
        *,
        headers: Mapping[str, str],
        body: Any = None,
        limit: int,
        timeout: float = TIMEOUT_SECONDS,
        silence: float | None = None,
    ) -> Response:
        # An IPv6 address needs brackets in a URL.
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{port}{path}"
        limits = aiohttp.ClientTimeout(timeout, CONNECT_SECONDS, sock_read=silence)
        try:
            async with self._session.request(
                # `allow_redirects=False`: a head could send the operator, and the run's token,
                # elsewhere.
                method,
                url,
                json=body,
                headers=headers,
                timeout=limits,
                allow_redirects=False,
            ) as answer:
                content = b""
                async for chunk in answer.content.iter_chunked(65_536):
                    content += chunk
                    # The head runs user code: it must not fill the operator's memory.
                    if len(content) > limit:
                        raise errors.HeadUnreachable(
                            f"{path} of pod {pod.name} answers more than {limit} bytes"
                        )
                return Response(answer.status, content)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise errors.HeadUnreachable(
                f"pod {pod.name}, port {port}: {str(error) or type(error).__name__}"
            ) from error


class ProxyTransport:
    """Connects through the apiserver's proxy. Needs the right to pods/proxy."""

    def __init__(self, kube: KubeClient):
        self._kube = kube

    async def request(
        self,
        method: str,
        pod: PodAddress,
        port: int,
        path: str,
        *,
        headers: Mapping[str, str],
        body: Any = None,
        limit: int,
        timeout: float = TIMEOUT_SECONDS,
        silence: float | None = None,  # noqa: ARG002  # no question is held through the proxy
    ) -> Response:
        proxied = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}:{port}/proxy{path}"
        try:
            answer = await self._kube.raw(
                method, proxied, headers=headers, body=body, timeout=timeout, limit=limit
            )
        except errors.AnswerTooLong as error:
            raise errors.HeadUnreachable(
                f"{path} of pod {pod.name} answers more than {limit} bytes"
            ) from error
        except errors.KubeUnavailable as error:
            raise errors.HeadUnreachable(f"pod {pod.name}, port {port}: {error}") from error
        # A Status is the apiserver's own answer, and not the pod's.
        if answer.status in (401, 403) and b'"kind":"Status"' in answer.body:
            raise errors.HeadUnreachable(
                f"pod {pod.name}, port {port}: the apiserver refuses the operator's request: "
                "give it the right to pods/proxy"
            )
        if answer.status == 503:
            raise errors.HeadUnreachable(
                f"pod {pod.name}, port {port}: the apiserver cannot reach it"
            )
        return answer
