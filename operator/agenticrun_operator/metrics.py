"""Prometheus metrics of the operator itself. A run's own metrics are served by its reporter."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

RECONCILES = Counter(
    "agenticrun_operator_reconciles_total", "Reconciliations, by result.", ["result"]
)
RECONCILE_SECONDS = Histogram(
    "agenticrun_operator_reconcile_seconds",
    "Duration of a reconciliation.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
API_REQUESTS = Counter(
    "agenticrun_operator_api_requests_total",
    "Requests to the kube-apiserver, without watches.",
    ["method", "status"],
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
HEADS_UNREACHABLE = Gauge(
    "agenticrun_operator_unreachable_heads", "Runs whose head did not answer the last request."
)
LEADER = Gauge("agenticrun_operator_leader", "1 while this process holds the lease, else 0.")
WATCHES_DOWN = Gauge(
    "agenticrun_operator_watch_down",
    "1 while a watch fails: its namespace or CRD is missing, or the rights to it.",
    ["kind", "namespace"],
)
LAST_EVENT = Gauge(
    "agenticrun_operator_last_event_timestamp_seconds", "Time of the newest watch event."
)


async def serve_metrics(port: int) -> web.AppRunner:
    """Serve GET /metrics on `port`. Call `cleanup()` on the result to stop."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
