"""Run documents for tests, and the rules of the API as cases: what each refuses and what it still accepts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from agenticrun_api.algorithm import Algorithm
from agenticrun_api.base import Model
from agenticrun_api.environments import EnvGroups
from agenticrun_api.pipeline import Pipeline, Staleness
from agenticrun_api.run import AgenticRun
from agenticrun_api.spec import AgenticRunSpec, InitializeModel, ModelSpec, VolumeClaim

Change = tuple[str, Any]
"""(path, value): `("spec.pipeline.trainEnvs.groupSize", 4)`; the value REMOVE takes the field away."""
REMOVE = object()

MINIMAL: dict[str, Any] = {
    "apiVersion": "agenticrun.dev/v1alpha1",
    "kind": "AgenticRun",
    "metadata": {"name": "minimal"},
    "spec": {
        "model": {"initialize": {}},
        "pipeline": {
            "maxSteps": 2,
            "rolloutBatchSize": 8,
            "evalSteps": 0,
            "envs": [{"tag": "Lake", "type": "frozen_lake"}],
            "trainEnvs": {"groups": 2, "groupSize": 4, "tags": ["Lake"]},
        },
    },
}
"""The shortest valid run."""


def run_with(*changes: Change, name: str = "minimal") -> dict[str, Any]:
    """The minimal run with some fields set. Missing mappings on the way are made."""
    document = copy.deepcopy(MINIMAL)
    document["metadata"]["name"] = name
    for path, value in changes:
        *parents, last = path.split(".")
        node = document
        for key in parents:
            node = node.setdefault(key, {})
        if value is REMOVE:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return document


@dataclass(frozen=True)
class RuleCase:
    """One rule of the API, with a run that breaks only this rule and a run on its good side."""

    model: type[Model]
    message: str
    """The beginning of the rule's message."""
    path: str
    """Where the error points."""
    refused: tuple[Change, ...]
    accepted: tuple[Change, ...]

    @property
    def id(self) -> str:
        return f"{self.model.__name__}-{self.message[:32].replace(' ', '_')}"


_P = "spec.pipeline"
_CLIP = f"{_P}.algorithm.lossAggMode"
_VAL = {"groups": 2, "groupSize": 2, "tags": ["Lake"]}
_TWO = [{"tag": "Lake", "type": "frozen_lake"}, {"tag": "Pond", "type": "frozen_lake"}]
_BOTH = ["Lake", "Pond"]
_MINI = f"{_P}.actorTrain.training.miniBatchSize"

RULE_CASES: tuple[RuleCase, ...] = (
    RuleCase(
        Algorithm,
        "normStdType is read by grpo only",
        f"{_P}.algorithm.normStdType",
        ((f"{_P}.algorithm", {"name": "rloo", "normStdType": "batch"}),),
        ((f"{_P}.algorithm", {"name": "grpo", "normStdType": "batch"}),),
    ),
    RuleCase(
        Algorithm,
        "gamma is read by reinforce only",
        f"{_P}.algorithm.gamma",
        ((f"{_P}.algorithm", {"name": "grpo", "gamma": 0.9}),),
        ((f"{_P}.algorithm", {"name": "reinforce", "gamma": 0.9}),),
    ),
    RuleCase(
        Algorithm,
        "lossAggMode seq-mean-token-sum-norm needs lossAggNorm",
        _CLIP,
        ((_CLIP, "seq-mean-token-sum-norm"),),
        ((_CLIP, "seq-mean-token-sum-norm"), (f"{_P}.algorithm.lossAggNorm", 512)),
    ),
    RuleCase(
        Staleness,
        "rollouts of older policies bias the gradient",
        f"{_P}.staleness.offPolicy",
        ((f"{_P}.staleness", {"max": 1}),),
        ((f"{_P}.staleness", {"max": 1, "offPolicy": "Ignore"}),),
    ),
    RuleCase(
        EnvGroups,
        "partition needs one number per tag",
        f"{_P}.trainEnvs.partition",
        ((f"{_P}.trainEnvs.partition", [1, 1]),),
        ((f"{_P}.trainEnvs.partition", [2]),),
    ),
    RuleCase(
        EnvGroups,
        "partition must add up to groups",
        f"{_P}.trainEnvs.partition",
        ((f"{_P}.envs", _TWO), (f"{_P}.trainEnvs", {"groups": 4, "groupSize": 4, "tags": _BOTH, "partition": [1, 2]})),
        ((f"{_P}.envs", _TWO), (f"{_P}.trainEnvs", {"groups": 4, "groupSize": 4, "tags": _BOTH, "partition": [1, 3]})),
    ),
    RuleCase(
        EnvGroups,
        "groups does not divide evenly over the tags",
        f"{_P}.trainEnvs.groups",
        ((f"{_P}.envs", _TWO), (f"{_P}.trainEnvs", {"groups": 3, "groupSize": 4, "tags": _BOTH})),
        ((f"{_P}.envs", _TWO), (f"{_P}.trainEnvs", {"groups": 4, "groupSize": 4, "tags": _BOTH})),
    ),
    RuleCase(
        Pipeline,
        "rolloutBatchSize counts trajectories",
        f"{_P}.rolloutBatchSize",
        ((f"{_P}.rolloutBatchSize", 10),),
        ((f"{_P}.rolloutBatchSize", 12),),
    ),
    RuleCase(
        Pipeline,
        "actorTrain.training.miniBatchSize must be a multiple of trainEnvs.groupSize",
        _MINI,
        ((f"{_P}.rolloutBatchSize", 12), (_MINI, 6)),
        ((f"{_P}.rolloutBatchSize", 12), (_MINI, 4)),
    ),
    RuleCase(
        Pipeline,
        "rolloutBatchSize must be a multiple of actorTrain.training.miniBatchSize",
        _MINI,
        ((f"{_P}.rolloutBatchSize", 12), (_MINI, 8)),
        ((f"{_P}.rolloutBatchSize", 16), (_MINI, 8)),
    ),
    RuleCase(
        Pipeline,
        "trainEnvs.tags names a tag",
        f"{_P}.trainEnvs.tags",
        ((f"{_P}.trainEnvs.tags", ["Pond"]),),
        ((f"{_P}.envs", _TWO), (f"{_P}.trainEnvs.tags", ["Pond"])),
    ),
    RuleCase(
        Pipeline,
        "valEnvs.tags names a tag",
        f"{_P}.valEnvs.tags",
        ((f"{_P}.valEnvs", {**_VAL, "tags": ["Pond"]}),),
        ((f"{_P}.valEnvs", _VAL),),
    ),
    RuleCase(
        Pipeline,
        "evalSteps needs valEnvs",
        f"{_P}.evalSteps",
        ((f"{_P}.evalSteps", 1),),
        ((f"{_P}.evalSteps", 1), (f"{_P}.valEnvs", _VAL)),
    ),
    RuleCase(
        Pipeline,
        "valBatchSize counts trajectories",
        f"{_P}.valBatchSize",
        ((f"{_P}.valEnvs", _VAL), (f"{_P}.valBatchSize", 3)),
        ((f"{_P}.valEnvs", _VAL), (f"{_P}.valBatchSize", 4)),
    ),
    RuleCase(
        Pipeline,
        "grpo, rloo and dr_grpo compare the members of a group",
        f"{_P}.trainEnvs.groupSize",
        ((f"{_P}.trainEnvs.groupSize", 1),),
        ((f"{_P}.trainEnvs.groupSize", 1), (f"{_P}.algorithm.name", "reinforce")),
    ),
    RuleCase(
        Pipeline,
        "grpo, rloo and dr_grpo own their normalisation",
        f"{_P}.rewardNormalization",
        ((f"{_P}.rewardNormalization", {"grouping": "tag"}),),
        ((f"{_P}.rewardNormalization", {"grouping": "tag"}), (f"{_P}.algorithm.name", "reinforce")),
    ),
    RuleCase(
        InitializeModel,
        "hiddenSize must be a multiple of heads",
        "spec.model.initialize.hiddenSize",
        (("spec.model.initialize.heads", 3),),
        (("spec.model.initialize.heads", 8),),
    ),
    RuleCase(
        ModelSpec,
        "set exactly one of path",
        "spec.model.path",
        (("spec.model.path", "org/model"),),
        (("spec.model", {"path": "org/model"}),),
    ),
    RuleCase(
        VolumeClaim,
        "set exactly one of claimName",
        "spec.checkpoint.volumeClaim.claimName",
        (("spec.checkpoint.volumeClaim", {"claimName": "data", "size": "1Gi"}),),
        (("spec.checkpoint.volumeClaim", {"claimName": "data"}),),
    ),
    RuleCase(
        AgenticRunSpec,
        "checkpoint.uri must lie below /checkpoints",
        "spec.checkpoint.uri",
        (("spec.checkpoint", {"uri": "/data", "volumeClaim": {"size": "1Gi"}}),),
        (("spec.checkpoint", {"uri": "/data"}),),
    ),
    RuleCase(
        AgenticRun,
        "metadata.name must be at most 45",
        "",
        (("metadata.name", "a" * 46),),
        (("metadata.name", "a" * 45),),
    ),
)
"""One case per rule. `test_every_rule_has_a_case` keeps it complete; the apiserver gets the same cases."""
