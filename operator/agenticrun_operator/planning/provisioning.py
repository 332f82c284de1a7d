"""Creates the run's missing children."""

from __future__ import annotations

from agenticrun_api import ConditionType, Phase, Reason
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import (
    Child,
    OperatorKey,
    WorkerImages,
    checkpoint_claim_name,
    desired_children,
    is_retained,
    key_id_of,
    made_by,
    storage_of,
    tokens_name,
    tokens_secret,
)

TOKENS_SECONDS = 30.0
"""Minimum interval between two creations of the Secret with a run's tokens."""


def provision(draft: Draft, observed: Observed, images: WorkerImages, key: OperatorKey) -> None:
    """Create missing children.

    Existing ones stay as they are: no field that may change in a run reaches them, and what others
    changed (an expanded claim) or what a newer operator would write (an image) must not reach
    pods that are training.
    """
    run = draft.run
    if _needs_tokens(draft, observed, key):
        draft.tokens = tokens_secret(run, key)
    if any(found is None for found in observed.children.values()):
        draft.create += [
            manifest
            for manifest in desired_children(run, images, tokens_name(run, key.id))
            if _is_missing(observed, Child.of(manifest))
        ]
    if draft.status.start_time is None:
        draft.set(start_time=format_time(draft.now))
        if run.status.job is None:
            _begin(draft, observed)
    if draft.status.phase is Phase.PENDING:
        draft.phase(Phase.STARTING)
    _report_cluster(draft, observed)


def _begin(draft: Draft, observed: Observed) -> None:
    """Report what is known of a run that has no attempt yet."""
    _report_reused_claim(draft, observed)
    steps = draft.run.spec.pipeline.max_steps
    draft.set(max_steps=steps, progress=f"0/{steps}", volume_claim=checkpoint_claim_name(draft.run))
    draft.condition(ConditionType.COMPLETE, "False", Reason.NOT_FINISHED)
    draft.condition(ConditionType.FAILED, "False", Reason.NOT_FINISHED)


def _report_reused_claim(draft: Draft, observed: Observed) -> None:
    checkpoint = storage_of(draft.run)
    for child, manifest in observed.children.items():
        if checkpoint is None or manifest is None or not is_retained(draft.run, manifest):
            continue
        if made_by(draft.run, manifest):
            continue
        fresh = checkpoint.resume in ("Auto", "Never")
        start = (
            "starts at step 0 (checkpoint.resume: FromPreviousRun goes on from their newest one)"
            if fresh
            else f"resumes: {checkpoint.resume}"
        )
        draft.event(
            Reason.CLAIM_REUSED,
            f"{child.kind} {child.name} holds checkpoints of earlier runs of this name; this run "
            f"has a folder of its own there and {start}",
        )


def _needs_tokens(draft: Draft, observed: Observed, key: OperatorKey) -> bool:
    """Return True if the Secret with the tokens may be missing.

    The operator cannot read it. Pods that need a Secret that was deleted wait for it.
    """
    run = draft.run
    cluster = observed.child("RayCluster", run.metadata.name)
    if cluster is None:
        return observed.tokens_sent_at is None
    waits = any(
        not pod.ready
        and not pod.deleting
        and (pod.problem is None or pod.problem.reason is Reason.CONTAINER_CRASHED)
        for pod in observed.own_pods(run.metadata.uid)
    )
    sent = observed.tokens_sent_at
    due = sent is None or (draft.now - sent).total_seconds() >= TOKENS_SECONDS
    return waits and due and key_id_of(run, cluster) == key.id


def _report_cluster(draft: Draft, observed: Observed) -> None:
    name, before = draft.run.metadata.name, draft.find(ConditionType.CLUSTER_PROVISIONED)
    if before and before.status == "False" and before.message == draft.status.message:
        draft.set(message=None)  # the obstacle that it names is gone
    if observed.child("RayCluster", name) is None:
        draft.condition(
            ConditionType.CLUSTER_PROVISIONED,
            "False",
            Reason.CLUSTER_CREATING,
            f"creating RayCluster {name}",
        )
        draft.look_again(5.0)
        return
    if not draft.is_true(ConditionType.CLUSTER_PROVISIONED):
        draft.event(Reason.CLUSTER_CREATED, f"created RayCluster {name}")
    draft.condition(
        ConditionType.CLUSTER_PROVISIONED,
        "True",
        Reason.CLUSTER_CREATED,
        f"RayCluster {name} exists",
    )


def _is_missing(observed: Observed, child: Child) -> bool:
    return child in observed.children and observed.children[child] is None
