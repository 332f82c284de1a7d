"""What the operator's safety rests on, asked of the real apiserver."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from agenticrun_api import AgenticRunStatus, Phase, parse_run
from agenticrun_api.names import KIND
from agenticrun_api.status import JobStatus, Metric, RoleStatus
from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.errors import (
    AlreadyExists,
    Conflict,
    Denied,
    NotFound,
    Refused,
    RightMissing,
)
from agenticrun_operator.lease import Leadership
from agenticrun_operator.resources import (
    Event,
    OperatorKey,
    WorkerImages,
    controller_uid,
    desired_children,
    is_retained,
    mounted_children,
    ray_cluster,
    tokens_secret,
    unsuitable,
)
from testcluster import Cluster, CommandFailed
from waiting import eventually

KEY = OperatorKey("k" * 32)
EMPTY = AgenticRunStatus(conditions=[], metrics=[], roles=[])


def status(**fields: Any) -> AgenticRunStatus:
    return EMPTY.model_copy(update=fields)


async def fresh(kube: KubeClient, document: dict[str, Any]) -> dict[str, Any]:
    found = await kube.get(KIND, document["metadata"]["namespace"], document["metadata"]["name"])
    assert found is not None
    return found


async def test_of_two_writes_on_one_read_the_second_is_refused(
    kube: KubeClient, run_document: dict[str, Any]
) -> None:
    read = await fresh(kube, run_document)
    attempt = JobStatus(attempt=1, submission_id="s-1")
    stored = await kube.write_status(read, status(phase=Phase.STARTING, job=attempt))
    assert parse_run(stored).status.job == attempt
    with pytest.raises(Conflict):
        await kube.write_status(
            read, status(phase=Phase.STARTING, job=JobStatus(attempt=2, submission_id="s-2"))
        )
    assert parse_run(await fresh(kube, run_document)).status.job == attempt


async def test_a_status_that_was_written_is_replaced_and_not_merged(
    kube: KubeClient, run_document: dict[str, Any]
) -> None:
    read = await fresh(kube, run_document)
    metrics = [Metric(name="a", value="1"), Metric(name="b", value="2")]
    stored = await kube.write_status(read, status(step=3, reward="0.5", metrics=metrics))
    again = await kube.write_status(stored, status(step=4, metrics=metrics[:1]))
    now = parse_run(again).status
    assert (now.step, now.reward, now.metrics) == (4, None, metrics[:1])


async def test_writing_the_same_status_changes_nothing(
    kube: KubeClient, run_document: dict[str, Any]
) -> None:
    stored = await kube.write_status(await fresh(kube, run_document), status(step=3))
    again = await kube.write_status(stored, status(step=3))
    assert again["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]


async def test_the_status_of_a_run_of_the_same_name_is_not_touched(
    kube: KubeClient, run_document: dict[str, Any], place: Cluster
) -> None:
    read = await fresh(kube, run_document)
    name = read["metadata"]["name"]
    place.kubectl("delete", "agenticrun", name)
    with pytest.raises(NotFound):
        await kube.write_status(read, status(step=1))
    place.apply(
        {key: value for key, value in run_document.items() if key != "metadata"}
        | {"metadata": {"name": name}}
    )
    with pytest.raises(Conflict):
        await kube.write_status(read, status(step=1))


async def test_the_apiserver_stores_the_status_as_it_is_written(
    kube: KubeClient, run_document: dict[str, Any]
) -> None:
    written = status(
        phase=Phase.RUNNING,
        step=1,
        max_steps=2,
        progress="1/2",
        last_step_time="2026-01-01T00:00:00Z",
        policy_version=1,
        message="x" * 4096,
    )
    stored = await kube.write_status(await fresh(kube, run_document), written)
    assert parse_run(stored).status == written


class NewerJob(JobStatus):
    brand_new: str = "x"


class NewerRole(RoleStatus):
    brand_new: str = "x"


class NewerStatus(AgenticRunStatus):
    """The status of an operator whose CRD was not applied."""

    brand_new: int = 1
    job: NewerJob | None = None
    roles: list[NewerRole] = Field(default_factory=list)  # type: ignore[assignment]


async def test_a_status_field_that_the_crd_does_not_have_costs_only_that_field(
    kube: KubeClient, run_document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    job = NewerJob(attempt=1, submission_id="s")
    roles = [NewerRole(name=name, desired=1, ready=1, gpus=0) for name in ("driver", "env")]
    newer = NewerStatus(phase=Phase.RUNNING, step=3, job=job, roles=roles)
    stored = await kube.write_status(await fresh(kube, run_document), newer)
    assert parse_run(stored).status == status(
        phase=Phase.RUNNING,
        step=3,
        job=JobStatus(attempt=1, submission_id="s"),
        roles=[RoleStatus(name=name, desired=1, ready=1, gpus=0) for name in ("driver", "env")],
    )
    assert caplog.text.count("the CRD is older than this operator") == 1


async def test_a_child_is_created_once(kube: KubeClient, run_document: dict[str, Any]) -> None:
    secret = tokens_secret(parse_run(run_document), KEY)
    await kube.create(secret)
    with pytest.raises(AlreadyExists):
        await kube.create(secret)
    stored = await kube.get("Secret", secret["metadata"]["namespace"], secret["metadata"]["name"])
    assert stored is not None
    assert controller_uid(stored) == run_document["metadata"]["uid"]


async def test_children_go_with_their_run_and_nothing_else_does(
    kube: KubeClient, run_document: dict[str, Any], place: Cluster
) -> None:
    run = parse_run(run_document)
    name = run.metadata.name
    mine = tokens_secret(run, KEY)
    await kube.create(mine)
    place.kubectl("create", "secret", "generic", f"{name}-theirs")
    await kube.delete(KIND, *run.key, "00000000-0000-0000-0000-000000000000")
    assert place.get("agenticrun", name), "another uid is another run"
    await kube.delete(KIND, *run.key, run.metadata.uid)
    eventually(
        lambda: place.get("secret", mine["metadata"]["name"]) is None,
        120,
        "garbage collection of the run's secret",
        interval=0.5,
    )
    assert place.get("secret", f"{name}-theirs")
    await kube.delete(KIND, *run.key, run.metadata.uid)


@pytest.mark.parametrize("retain", [True, False])
async def test_a_claim_outlives_its_run_unless_the_run_says_otherwise(
    kube: KubeClient, run_document: dict[str, Any], place: Cluster, retain: bool
) -> None:
    name = run_document["metadata"]["name"]
    claim = {"size": "1Mi", "storageClassName": "none", "retain": retain}
    run = parse_run(
        run_document | {"spec": run_document["spec"] | {"checkpoint": {"volumeClaim": claim}}}
    )
    children = mounted_children(run)
    (manifest,) = [child for child in children if child["kind"] == "PersistentVolumeClaim"]
    await kube.create(manifest)
    secret = tokens_secret(run, KEY)
    await kube.create(secret)
    await kube.delete(KIND, *run.key, run.metadata.uid)
    eventually(
        lambda: place.get("secret", secret["metadata"]["name"]) is None,
        120,
        "garbage collection",
        interval=0.5,
    )
    if retain:
        found = place.get("persistentvolumeclaim", f"{name}-checkpoints")
        assert found is not None
        assert is_retained(run, found)
        assert unsuitable(run, found) is None
        place.kubectl("delete", "persistentvolumeclaim", f"{name}-checkpoints")
    else:
        eventually(
            lambda: place.get("persistentvolumeclaim", f"{name}-checkpoints") is None,
            120,
            "garbage collection of the claim",
            interval=0.5,
        )


async def test_kuberays_schema_takes_our_cluster_strictly_and_names_what_it_does_not(
    kube: KubeClient, run_document: dict[str, Any], place: Cluster
) -> None:
    run = parse_run(run_document)
    for child in desired_children(run, WorkerImages("worker:1"), "tokens"):
        place.apply(child, options=("--dry-run=server", "--validate=strict"))
    broken = ray_cluster(run, WorkerImages("worker:1"), "tokens")
    broken["metadata"]["name"] += "-broken"
    broken["spec"]["headGroupSpec"]["template"]["spec"]["tolerations"] = [{"kee": "x"}]
    with pytest.raises(Refused, match=r"tolerations\[0\]\.kee"):
        await kube.create(broken)


async def test_a_missing_right_is_told_from_a_quota(
    place: Cluster, kube: KubeClient, kubeconfig: Path, tmp_path: Path
) -> None:
    metadata = {"name": "too-much", "namespace": place.namespace}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": spec,
    }
    config = yaml.safe_load(kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": place.kubectl("create", "token", "default").strip()}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    anyone = KubeClient(await connect(tmp_path / "kubeconfig"), [place.namespace])
    with pytest.raises(RightMissing, match='cannot create resource "persistentvolumeclaims"'):
        await anyone.create(claim)
    await anyone.close()
    quota = {"hard": {"persistentvolumeclaims": "0"}}
    place.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota}
    )

    def counts() -> bool:
        """Return True once the apiserver, which reads quotas by a watch, has seen this one."""
        try:
            place.apply(claim, options=("--dry-run=server",))
        except CommandFailed as refusal:
            return "exceeded quota" in refusal.stderr
        return False

    try:
        eventually(counts, 60, "the quota to count", interval=0.2)
        with pytest.raises(Denied) as denied:
            await kube.create(claim)
        assert not isinstance(denied.value, RightMissing)
    finally:
        place.kubectl("delete", "resourcequota", "none")


async def test_an_event_shows_on_the_run(
    kube: KubeClient, run_document: dict[str, Any], place: Cluster
) -> None:
    await kube.post_event(run_document, Event("Tested", "seen by describe", "Warning"))
    described = place.kubectl("describe", "agenticrun", run_document["metadata"]["name"])
    assert "Tested" in described
    assert "seen by describe" in described


async def test_only_runs_of_the_served_namespaces_are_listed(
    kube: KubeClient, run_document: dict[str, Any]
) -> None:
    keys = await kube.list_run_keys()
    assert parse_run(run_document).key in keys
    assert {namespace for namespace, _ in keys} == {run_document["metadata"]["namespace"]}


async def test_one_of_many_candidates_leads(kube: KubeClient, place: Cluster) -> None:
    candidates = [
        Leadership(kube, place.namespace, "lease-test", f"candidate-{index}") for index in range(5)
    ]
    won = await asyncio.gather(*(candidate.attempt(datetime.now(UTC)) for candidate in candidates))
    assert sum(won) == 1
    leader = candidates[won.index(True)]
    assert await leader.attempt(datetime.now(UTC)), "it renews"
    await leader.release()
    others = [candidate for candidate in candidates if candidate is not leader]
    assert await others[0].attempt(datetime.now(UTC))
