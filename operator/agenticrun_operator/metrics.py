"""Prometheus metrics of the operator itself, and the HTTP pages of the operator."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

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

MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")

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
SLOTS = Gauge(
    "agenticrun_operator_slots", "Runs whose objects may be read at the same time (workers)."
)
SLOTS_USED = Gauge(
    "agenticrun_operator_used_slots", "Runs whose objects are read, or wait for a slot."
)
FOLLOWED_RUNS = Gauge(
    "agenticrun_operator_followed_runs", "Runs that the operator knows, including ended runs."
)
MEMORY_LIMIT = Gauge(
    "agenticrun_operator_memory_limit_bytes",
    "Memory limit of the operator's container; +Inf if it has none.",
)
HEAD_REQUESTS = Counter(
    "agenticrun_operator_head_requests_total",
    "Requests to head pods, by port: 8265 is Ray's job API, 8787 the reporter. The status of one "
    "without an answer is none.",
    ["port", "status"],
)
HEAD_SECONDS = Histogram(
    "agenticrun_operator_head_request_seconds",
    "Duration of a request to a head pod; long polls are not counted.",
    ["port"],
    buckets=SECONDS,
)
WRITE_FAILURES = Counter(
    "agenticrun_operator_write_failures_total",
    "Creations, changes and deletions of a run's objects that the apiserver refused, by error.",
    ["error"],
)
STATUS_WRITES = Counter("agenticrun_operator_status_writes_total", "Writes of a run's status.")
REFUSED_STATUS_WRITES = Counter(
    "agenticrun_operator_refused_status_writes_total",
    "Writes of a run's status that the apiserver refused, also without what the pods report.",
)
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
SHARDS = Gauge("agenticrun_operator_shards", "Parts of all runs, each with a lease of its own.")
LEADER = Gauge(
    "agenticrun_operator_leader", "1 while this process holds the lease, else 0.", ["lease"]
)
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


def memory_limit(file: Path = MEMORY_MAX) -> float:
    """Return the memory limit of this container in bytes; infinite if there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return math.inf
    return float(text) if text.isdigit() else math.inf


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
