"""Creates the run's missing children."""

from __future__ import annotations

from agenticrun_api import ConditionType, Phase, Reason
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.plan import TokenToMake
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import (
    Child,
    WorkerImages,
    desired_children,
    is_retained,
    made_by,
    token_secrets,
)


def provision(draft: Draft, observed: Observed, images: WorkerImages) -> None:
    """Create missing children.

    Existing ones stay as they are: no field that may change in a run reaches them, and what others
    changed (an expanded claim) or what a newer operator would write (an image) must not reach
    pods that are training.
    """
    run = draft.run
    for secret, key in token_secrets(run):
        if _is_missing(observed, secret):
            draft.tokens.append(TokenToMake(secret.name, key))
    if any(found is None for found in observed.children.values()):
        draft.create += [
            manifest
            for manifest in desired_children(run, images)
            if _is_missing(observed, Child.of(manifest))
        ]
    if run.status.start_time is None:
        _report_reused_claim(draft, observed)
        draft.set(
            start_time=format_time(draft.now),
            max_steps=run.spec.pipeline.max_steps,
            progress=f"0/{run.spec.pipeline.max_steps}",
        )
        draft.condition(ConditionType.COMPLETE, "False", Reason.NOT_FINISHED)
        draft.condition(ConditionType.FAILED, "False", Reason.NOT_FINISHED)
    if draft.status.phase is Phase.PENDING:
        draft.phase(Phase.STARTING)
    _report_cluster(draft, observed)


def _report_reused_claim(draft: Draft, observed: Observed) -> None:
    checkpoint = draft.run.spec.checkpoint
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
