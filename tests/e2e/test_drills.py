"""Fault drills: a run trains, something breaks, and the run completes or says why.

After each: no step is lost beyond the last checkpoint, the status was never untrue for more than
10 s, and a deleted run leaves nothing behind. `make drills` runs them (AGENTICRUN_E2E_DRILLS=all)
and keeps a table of what happened in the file that AGENTICRUN_DRILLS_TABLE names. In `make test` a
run of test_failures.py loses its head pod.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import faults
from agenticrun_api import Role
from agenticrun_operator.lease import DURATION_SECONDS
from drills import ENDED, TRUE_WITHIN_SECONDS, Recorder, Report, Row, broken_promises, with_row
from faults import Fault, Site
from installation import ALL_DRILLS, Images, Operator, objects
from lake import behind_gate, small_lake
from testcluster import Cluster
from waiting import eventually

TABLE = os.environ.get("AGENTICRUN_DRILLS_TABLE")
MINUTES = 60.0


@dataclass(frozen=True)
class Drill:
    """One fault, and what must be true of it."""

    name: str
    fault: Fault
    lasts: float = 0.0
    """Seconds until the fault is undone."""
    steps: int = 12
    """Of the run, each a second or more."""
    after_step: int = 3
    """The fault begins after this step."""
    says: str = ""
    """What the status must show while the fault lasts."""
    trains_on: bool = False
    """The driver must run all the time."""
    untouched: bool = False
    """The run must not notice: it trains on, and no container starts."""
    end: str = "Succeeded"
    why: str = ""
    """What the message of a run that fails must say."""
    place: Fault = field(default=lambda _: nullcontext())
    """Surroundings that are there before the run begins."""
    spec: dict[str, Any] = field(default_factory=dict)
    save_steps: int = 1
    """With more than the steps of the run, only what the driver saves on request is kept."""
    step_seconds: float = 1.0
    """Shortest time of a step."""
    grace: int | None = 5
    """Grace period of the pods in seconds; None: the default."""
    env_pods: int = 1
    cpu_limit: str = ""
    """Limit of the pods of all roles."""
    true_within: float = TRUE_WITHIN_SECONDS
    """The status may be untrue for so long."""
    disruptions: int | None = None
    """Disruptions that the status must count at the end, beside 0 restarts."""
    shows: str = ""
    """Text that the status must have had in a message."""
    known: str = ""
    """A defect of today's product: the drill is expected to fail."""

    @property
    def slug(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in self.name.lower()).split())


_LEADER_LOST: dict[str, Any] = {
    "lasts": 15,
    "steps": 60,
    "place": faults.two_operators,
    "untouched": True,
    "true_within": DURATION_SECONDS + TRUE_WITHIN_SECONDS,
}
"""A leader that could not release its Lease keeps it; no status is written until it expires."""

_SAVED_ON_REQUEST: dict[str, Any] = {"save_steps": 50, "grace": None, "steps": 25}
"""A run that saves only when a pod is about to go."""

DRILLS = (
    Drill("driver killed", faults.driver_killed),
    Drill("driver frozen", faults.driver_frozen, lasts=80, says="Training Unknown DriverSilent"),
    Drill("reporter frozen", faults.reporter_frozen, lasts=40, steps=60),
    Drill("head pod deleted", faults.pod_deleted(Role.DRIVER), disruptions=1),
    Drill("trainer pod deleted", faults.pod_deleted(Role.TRAINER), disruptions=1),
    Drill("inference pod deleted", faults.pod_deleted(Role.INFERENCE), steps=20, disruptions=0),
    Drill("env pod deleted", faults.pod_deleted(Role.ENV), steps=20, disruptions=0),
    Drill(
        "head pod evicted, saveSteps 50",
        faults.evicted(Role.DRIVER),
        **_SAVED_ON_REQUEST,
        disruptions=1,
        says="Training False Disrupted",
    ),
    Drill(
        "trainer pod evicted, saveSteps 50",
        faults.evicted(Role.TRAINER),
        **_SAVED_ON_REQUEST,
        disruptions=1,
        says="Training False Disrupted",
    ),
    Drill(
        "inference pod evicted, saveSteps 50",
        faults.evicted(Role.INFERENCE),
        **_SAVED_ON_REQUEST,
        disruptions=0,
    ),
    Drill(
        "env pod evicted, saveSteps 50",
        faults.evicted(Role.ENV),
        **_SAVED_ON_REQUEST,
        disruptions=0,
    ),
    Drill(
        "head pod evicted four times, steps of 5 s",
        faults.evicted(Role.DRIVER, times=4),
        **_SAVED_ON_REQUEST | {"steps": 14, "step_seconds": 5.0},
        disruptions=4,
    ),
    Drill("RayCluster deleted", faults.ray_cluster_deleted, disruptions=1),
    Drill(
        "RayCluster suspended by another controller",
        faults.ray_cluster_suspended,
        lasts=10 * MINUTES,
        **_SAVED_ON_REQUEST,
        says="Suspended True ClusterSuspended",
    ),
    Drill(
        "RayCluster's env group edited",
        faults.ray_cluster_edited,
        steps=20,
        trains_on=True,
        disruptions=0,
    ),
    Drill(
        "phase Failed written into the status",
        faults.phase_written,
        untouched=True,
        disruptions=0,
    ),
    Drill(
        "webhook answers 500, RayCluster deleted",
        faults.webhook_called,
        lasts=30,
        place=faults.webhook_server(code=500),
        says="ClusterProvisioned False WebhookUnavailable",
        disruptions=1,
    ),
    Drill(
        "webhook takes 8 s, RayCluster deleted",
        faults.webhook_called,
        lasts=60,
        place=faults.webhook_server(seconds=8),
        disruptions=1,
    ),
    Drill(
        "webhook denies with an emoji, RayCluster deleted",
        faults.webhook_called,
        lasts=30,
        place=faults.webhook_server(denial=faults.EMOJI),
        says="ClusterProvisioned False Denied",
        shows=faults.EMOJI,
        disruptions=1,
    ),
    Drill(
        "20 other runs wait for a webhook of 8 s",
        faults.runs_wait_for_webhook(20),
        lasts=MINUTES,
        steps=90,
        place=faults.webhook_server(seconds=8, denial="no"),
        untouched=True,
    ),
    Drill(
        "60 other runs have hung heads", faults.hung_heads(60), lasts=90, steps=240, untouched=True
    ),
    Drill("emoji in an exception", faults.exception_raised, shows=faults.EMOJI),
    Drill(
        "emoji and odd bytes in the driver's log",
        faults.odd_log_written,
        end="Failed",
        spec={"failurePolicy": {"maxRestarts": 0}},
        shows=faults.EMOJI,
    ),
    Drill(
        "malformed snapshots from the head, then suspended",
        faults.hostile_snapshots_and_suspended,
        lasts=10,
        steps=30,
    ),
    Drill(
        "checkpoint claim deleted, then suspended",
        faults.claim_deleted_and_suspended,
        after_step=25,
        lasts=40,
        steps=80,
        untouched=True,
        says="ClusterProvisioned False CheckpointsLost",
    ),
    Drill(
        "env pod of two not placed at a restart",
        faults.env_pod_not_placed,
        steps=30,
        env_pods=2,
    ),
    Drill(
        "quota on limits.cpu",
        faults.nothing,
        place=faults.limits_quota,
        cpu_limit="2",
        grace=None,
        untouched=True,
    ),
    Drill("ConfigMap and Secrets deleted", faults.mounted_objects_deleted, lasts=25, steps=30),
    Drill("ConfigMap, Secrets and head pod deleted", faults.mounted_objects_and_head_deleted),
    Drill("driver exits with 0 early", faults.exit_zero),
    Drill("KubeRay stopped, head pod deleted", faults.kuberay_stopped, lasts=2 * MINUTES),
    Drill(
        "KubeRay's CRD removed",
        faults.kuberay_crd_removed,
        lasts=30,
        says="ClusterProvisioned False KubeRayMissing",
    ),
    Drill("apiserver killed", faults.component_killed("kube-apiserver"), lasts=MINUTES, steps=90),
    Drill("kubelet stopped", faults.component_killed("kubelet"), lasts=2 * MINUTES, steps=150),
    Drill("node tainted NoExecute", faults.node_tainted, lasts=20),
    Drill(
        "ResourceQuota 0, inference pod deleted",
        faults.denied_by(faults.QUOTA, Role.INFERENCE),
        lasts=30,
        says="RolesReady False PodsDenied",
    ),
    Drill(
        "LimitRange, env pod deleted",
        faults.denied_by(faults.LIMIT_RANGE, Role.ENV),
        lasts=30,
        says="RolesReady False PodsDenied",
    ),
    Drill("PodSecurity restricted, head pod deleted", faults.restricted_head_deleted),
    Drill("stray pods with the run's labels", faults.stray_pods, lasts=20, steps=25),
    Drill(
        "another watched namespace deleted",
        faults.namespace_deleted,
        lasts=20,
        steps=25,
        place=faults.two_namespaces,
    ),
    Drill(
        "checkpoint volume full",
        faults.volume_full,
        end="Failed",
        why="No space left",
        place=faults.small_volume,
        spec={
            "checkpoint": {
                "uri": "/checkpoints",
                "volumeClaim": {"claimName": faults.SMALL_CLAIM},
            },
            "failurePolicy": {"backoffSeconds": 1, "maxRestarts": 1},
        },
    ),
    Drill("claim expanded, then TTL changed", faults.claim_expanded, lasts=15, steps=20),
    Drill(
        "a second env pod asked for", faults.replicas_changed(Role.ENV), steps=90, trains_on=True
    ),
    Drill(
        "a second inference pod asked for",
        faults.replicas_changed(Role.INFERENCE),
        lasts=10,
        steps=120,
        trains_on=True,
    ),
    Drill("Ray's processes on the head frozen", faults.head_processes_frozen, lasts=30, steps=60),
    Drill(
        "helm upgrade: a value, then the image",
        faults.helm_upgraded,
        lasts=15,
        steps=110,
        untouched=True,
    ),
    Drill("helm rollback", faults.helm_rolled_back, lasts=15, steps=80, untouched=True),
    Drill(
        "helm uninstall, helm install", faults.helm_reinstalled, lasts=20, steps=80, untouched=True
    ),
    Drill(
        "the chart's manifests applied again",
        faults.manifests_applied_again,
        lasts=15,
        steps=80,
        untouched=True,
    ),
    Drill("the leader of two operators killed", faults.leader_lost(signal.SIGKILL), **_LEADER_LOST),
    Drill("the leader of two operators frozen", faults.leader_lost(signal.SIGSTOP), **_LEADER_LOST),
)


@pytest.mark.skipif(not ALL_DRILLS, reason="AGENTICRUN_E2E_DRILLS=all")
@pytest.mark.parametrize(
    "drill",
    [
        pytest.param(
            drill,
            id=drill.slug,
            marks=[pytest.mark.xfail(reason=drill.known, strict=True)] if drill.known else [],
        )
        for drill in DRILLS
    ],
)
@pytest.mark.timeout(1200, func_only=True)
def test_a_drill(drill: Drill, runs: Cluster, operator: Operator, images: Images) -> None:
    site = Site(runs, operator, images, f"drill-{drill.slug}"[:45].rstrip("-"))
    with drill.place(site):
        before = objects(runs)
        code, document = _paced_run(site.name, drill)
        with Recorder(runs, site.name) as recorder:
            runs.apply(code, document)
            ready = recorder.wait(lambda seen: seen.step >= drill.after_step and seen.trains, 300)
            assert ready, (
                f"the run does not train\n{Report(recorder.samples, time.time()).timeline()}"
            )
            injected = time.time()
            with drill.fault(site):
                _let_pass(recorder, drill.lasts)
            recorder.wait(lambda seen: seen.phase in ENDED, 240)
            ended = recorder.samples
        report = Report(ended, injected)
        runs.kubectl("delete", "agenticrun", site.name, "--wait=false")
        runs.kubectl("delete", "configmap", code["metadata"]["name"])
        problems = [*_problems(drill, report), *_left_over(runs, before)]
    print(f"--- {drill.name}\n{report.timeline()}")
    row = Row.of(drill.name, report, problems)
    print(row.line())
    if TABLE:
        page = Path(TABLE)
        page.write_text(with_row(page.read_text(), row, [item.name for item in DRILLS]))
    assert not problems, "\n".join(problems)


def _paced_run(name: str, drill: Drill) -> tuple[dict[str, Any], dict[str, Any]]:
    """A small run, usually with a checkpoint after each step, and the ConfigMap of its code."""
    spec: dict[str, Any] = {
        "checkpoint": {"uri": "/checkpoints", "volumeClaim": {"size": "1Gi", "retain": False}},
        "failurePolicy": {"backoffSeconds": 1},
    } | drill.spec
    document = small_lake(name, max_steps=drill.steps, save_steps=drill.save_steps, **spec)
    roles = document["spec"]["roles"]
    for role in roles.values():
        role["terminationGracePeriodSeconds"] = drill.grace
        if drill.cpu_limit:
            cpu = {"requests": {"cpu": role.pop("cpus")}, "limits": {"cpu": drill.cpu_limit}}
            role["resources"] = cpu
    roles["env"]["replicas"] = drill.env_pods
    pipeline = document["spec"]["pipeline"]
    pipeline.pop("warmup")
    pipeline["envs"][0]["maxSteps"] = 3
    pipeline["trainEnvs"]["groupFilter"] = {"type": "breaking:keep_all"}
    code = behind_gate(document, steps=1_000_000, seconds=drill.step_seconds)
    code["data"]["breaking.py"] = faults.BREAKING_CODE
    return code, document


def _let_pass(recorder: Recorder, seconds: float) -> None:
    """Wait so long, or until the run has ended."""
    if seconds:
        recorder.wait(lambda seen: seen.phase in ENDED, seconds)


def _problems(drill: Drill, report: Report) -> Iterator[str]:
    yield from broken_promises(report, drill.end, drill.true_within)
    end = report.end()
    if end and end.phase == drill.end and (drill.why not in end.message or "\n" in end.message):
        yield f"the message does not say {drill.why!r} in one line"
    if end and drill.disruptions is not None:
        counted = tuple((end.status or {}).get(name, 0) for name in ("disruptions", "restarts"))
        if counted != (drill.disruptions, 0):
            yield f"{counted[0]} disruptions and {counted[1]} restarts were counted"
    if drill.save_steps > drill.steps and report.lost():
        yield f"{report.lost()} steps were lost"
    if not report.showed(drill.shows):
        yield f"no message had {drill.shows!r}"
    if (drill.trains_on or drill.untouched) and not report.trained_on():
        yield "the driver was stopped"
    if drill.untouched and report.new_containers():
        yield f"the run was touched: {report.new_containers()} containers were started"
    if drill.says and drill.says not in [word for _, word in report.said()]:
        yield f"the status never said {drill.says!r}"


def _left_over(runs: Cluster, before: set[tuple[str, str]]) -> list[str]:
    """What is left of the deleted run after a minute."""
    try:
        eventually(lambda: not objects(runs) - before, 60, "the run is gone", interval=0.5)
    except AssertionError:
        return [f"left over: {sorted(objects(runs) - before)}"]
    return []
