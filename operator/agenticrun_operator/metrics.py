"""Prometheus metrics of the operator itself, and the HTTP pages of the operator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from agenticrun_api.version import __version__

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
"""Buckets of durations."""

INFO = Gauge("agenticrun_operator_info", "1, with the operator's version.", ["version"])
INFO.labels(version=__version__).set(1)

RECONCILES = Counter(
    "agenticrun_operator_reconciles_total", "Reconciliations, by result.", ["result"]
)
RECONCILE_SECONDS = Histogram(
    "agenticrun_operator_reconcile_seconds",
    "Duration of a reconciliation.",
    buckets=SECONDS,
)
RECONCILE_LONGEST = Gauge(
    "agenticrun_operator_reconcile_longest_seconds",
    "Time that the longest of the present reconciliations has taken so far; 0 if there is none.",
)
API_REQUESTS = Counter(
    "agenticrun_operator_api_requests_total",
    "Requests to the kube-apiserver, without watches. The status of one without an answer is none.",
    ["method", "status"],
)
API_SECONDS = Histogram(
    "agenticrun_operator_api_request_seconds",
    "Duration of a request to the kube-apiserver, without watches.",
    ["method"],
    buckets=SECONDS,
)
STATUS_WRITES = Counter("agenticrun_operator_status_writes_total", "Writes of a run's status.")
SUBMISSIONS = Counter("agenticrun_operator_submissions_total", "Drivers submitted to Ray.")
REFUSED_SUBMISSIONS = Counter(
    "agenticrun_operator_refused_submissions_total", "Submissions that Ray did not accept."
)
CONFLICTS = Counter(
    "agenticrun_operator_conflicts_total",
    "Writes that the apiserver refused with 409, because of a change or contention for a quota.",
)
QUEUE_LENGTH = Gauge("agenticrun_operator_queue_length", "Runs that wait for a reconcile worker.")
QUEUE_OLDEST = Gauge(
    "agenticrun_operator_queue_oldest_seconds",
    "Time that the first run in the queue has waited for a reconcile worker; 0 if none waits.",
)
UNREADABLE_RUNS = Gauge(
    "agenticrun_operator_unreadable_runs",
    "Runs that the operator cannot read and that have not ended: Accepted is False, or the status "
    "is damaged. They have no other metrics.",
)
HEADS_UNREACHABLE = Gauge(
    "agenticrun_operator_unreachable_heads", "Runs whose head did not answer the last request."
)
LEADER = Gauge("agenticrun_operator_leader", "1 while this process holds the lease, else 0.")
WATCHES_DOWN = Gauge(
    "agenticrun_operator_watch_down",
    "1 while a watch fails: its namespace or CRD is missing, or the rights to it. The namespace of "
    "a watch of all namespaces is *.",
    ["kind", "namespace"],
)
WATCH_CONTACT = Gauge(
    "agenticrun_operator_watch_contact_timestamp_seconds",
    "Time at which the apiserver last answered a watch, or a watch last got an event or bookmark.",
    ["kind", "namespace"],
)
LAST_EVENT = Gauge(
    "agenticrun_operator_last_event_timestamp_seconds", "Time of the newest watch event."
)


async def metrics_page(runs: Callable[[], CollectorRegistry]) -> web.Response:
    """Return the metrics of the operator and of the runs.

    Args:
        runs: returns the metrics of the runs as they are now. They are formatted in a thread: those
            of a thousand runs take half a second.
    """
    body = generate_latest() + await asyncio.to_thread(generate_latest, runs())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def serve_page(
    port: int, path: str, page: Callable[[], Awaitable[web.Response]]
) -> web.AppRunner:
    """Serve GET `path` on `port`. Call `cleanup()` on the result to stop.

    Without a host aiohttp listens on IPv4 and on IPv6: the kubelet and Prometheus reach a pod that
    has only one of them, too.
    """

    async def handle(_request: web.Request) -> web.Response:
        return await page()

    app = web.Application()
    app.router.add_get(path, handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
