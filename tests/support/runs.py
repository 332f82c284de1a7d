"""Run documents for tests, and cases of the API's rules: a refused and an accepted change each."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from agenticrun_api.algorithm import (
    Algorithm,
    RatioFilter,
    RewardKl,
    TrainInferCorrection,
    Truncated,
)
from agenticrun_api.base import Model
from agenticrun_api.environments import EnvGroups
from agenticrun_api.network import Network, NetworkPeer
from agenticrun_api.pipeline import Pipeline, Record, Staleness
from agenticrun_api.roles import ElasticRole, PodTemplate, Resources, Topology, WorkerRole
from agenticrun_api.run import AgenticRun
from agenticrun_api.spec import (
    AgenticRunSpec,
    Checkpoint,
    CodeSpec,
    GitCode,
    InitializeModel,
    ModelSpec,
    PipCode,
    Tracking,
    VolumeClaim,
)
from agenticrun_api.training import ActorTrain, Critic, Eval, Generating, Warmup, WeightSync

Change = tuple[str, Any]
"""(path, value): `("spec.pipeline.trainEnvs.groupSize", 4)`; the value REMOVE removes the field."""
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
_TRAINER = "spec.roles.trainer"
_DRIVER = "spec.roles.driver"
_TEMPLATE = f"{_TRAINER}.podTemplate"
_SAVED = ("spec.checkpoint.uri", "s3://bucket/prefix")
_AGG = f"{_P}.algorithm.lossAggMode"
_NORM = f"{_P}.rewardNormalization"
_CRITIC: tuple[Change, ...] = ((f"{_P}.critic", {}),)
_ALL_TRAINED = {
    "tag": "Lake",
    "type": "frozen_lake",
    "dataset": {"path": "items.jsonl", "valShare": 0},
}
_VAL = {"groups": 2, "groupSize": 2, "tags": ["Lake"]}
_TWO = [{"tag": "Lake", "type": "frozen_lake"}, {"tag": "Pond", "type": "frozen_lake"}]
_BOTH = ["Lake", "Pond"]
_MINI = f"{_P}.actorTrain.training.miniBatchSize"


def _indexed(url: str) -> Change:
    return "spec.code", {"pip": {"requirements": ["emoji"], "indexUrl": url}}


RULE_CASES: tuple[RuleCase, ...] = (
    RuleCase(
        Algorithm,
        "name is one of gae,",
        f"{_P}.algorithm.name",
        ((f"{_P}.algorithm", {"name": "gppo"}),),
        ((f"{_P}.algorithm", {"name": "mine:ranks", "rewardPlacement": "turn"}),),
    ),
    RuleCase(
        Algorithm,
        "pgVariant is one of vanilla,",
        f"{_P}.algorithm.pgVariant",
        ((f"{_P}.algorithm", {"pgVariant": "pp:o:"}),),
        ((f"{_P}.algorithm", {"pgVariant": "mine:squared"}),),
    ),
    *(
        RuleCase(
            Algorithm,
            f"{field} is read by {reader}",
            f"{_P}.algorithm.{field}",
            ((f"{_P}.algorithm", {**wrong, field: value}), *more_wrong),
            ((f"{_P}.algorithm", {**right, field: value}), *more_right),
        )
        for field, value, reader, wrong, more_wrong, right, more_right in (
            ("gamma", 0.9, "algorithm gae", {"name": "grpo"}, (), {"name": "reinforce"}, ()),
            ("lambd", 0.9, "algorithm gae", {"name": "reinforce"}, (), {"name": "gae"}, _CRITIC),
            (
                "turnLevel",
                True,
                "algorithm gae",
                {"name": "reinforce"},
                (),
                {"name": "gae"},
                _CRITIC,
            ),
            (
                "bootstrapTruncated",
                True,
                "algorithm gae",
                {"name": "reinforce"},
                (),
                {"name": "gae"},
                _CRITIC,
            ),
            (
                "rewardPlacement",
                "turn",
                "algorithm gae",
                {"name": "grpo"},
                (),
                {"name": "reinforce"},
                (),
            ),
            (
                "whitenRewards",
                True,
                "algorithm gae",
                {"name": "grpo"},
                (),
                {"name": "reinforce"},
                (),
            ),
            (
                "stepRewardGamma",
                0.5,
                "algorithm step_reinforce",
                {"name": "grpo"},
                (),
                {"name": "gigpo"},
                (),
            ),
            (
                "episodeRewardWeight",
                0.5,
                "algorithm gigpo",
                {"name": "grpo"},
                (),
                {"name": "gigpo"},
                (),
            ),
            (
                "stepRewardWeight",
                0.5,
                "algorithm gigpo",
                {"name": "grpo"},
                (),
                {"name": "gigpo"},
                (),
            ),
            (
                "normMeanType",
                "batch",
                "algorithm gigpo",
                {"name": "grpo"},
                (),
                {"name": "gigpo"},
                (),
            ),
            (
                "estimatorConfig",
                {"share": 0.5},
                "algorithm module:function",
                {"name": "grpo"},
                (),
                {"name": "mine:ranks"},
                (),
            ),
            (
                "lossConfig",
                {"share": 0.5},
                "pgVariant module:function",
                {"pgVariant": "ppo"},
                (),
                {"pgVariant": "mine.losses:squared", "ratioType": "sequence"},
                (),
            ),
            ("normStdType", "batch", "algorithm grpo", {"name": "rloo"}, (), {"name": "grpo"}, ()),
            (
                "ratioType",
                "sequence",
                "pgVariant ppo",
                {"pgVariant": "kimi15"},
                (),
                {"pgVariant": "ppo"},
                (),
            ),
            (
                "pgClipLow",
                0.1,
                "pgVariant ppo",
                {"pgVariant": "tis"},
                (),
                {"pgVariant": "decoupled"},
                (),
            ),
            (
                "pgClipHigh",
                0.1,
                "pgVariant ppo",
                {"pgVariant": "tis"},
                (),
                {"pgVariant": "decoupled"},
                (),
            ),
            ("dualClip", 3.0, "pgVariant ppo", {"pgVariant": "tis"}, (), {"pgVariant": "ppo"}, ()),
            ("tis", {}, "pgVariant tis", {"pgVariant": "ppo"}, (), {"pgVariant": "tis"}, ()),
            ("topr", {}, "pgVariant topr", {"pgVariant": "ppo"}, (), {"pgVariant": "topr"}, ()),
            ("cispo", {}, "pgVariant cispo", {"pgVariant": "ppo"}, (), {"pgVariant": "cispo"}, ()),
            (
                "kimi15",
                {},
                "pgVariant kimi15",
                {"pgVariant": "ppo"},
                (),
                {"pgVariant": "kimi15"},
                (),
            ),
            (
                "decoupled",
                {},
                "pgVariant decoupled",
                {"pgVariant": "ppo"},
                (),
                {"pgVariant": "decoupled"},
                (),
            ),
        )
    ),
    RuleCase(
        Algorithm,
        "lossAggMode seq-mean-token-sum-norm needs lossAggNorm",
        _AGG,
        ((_AGG, "seq-mean-token-sum-norm"),),
        ((_AGG, "seq-mean-token-sum-norm"), (f"{_P}.algorithm.lossAggNorm", 512)),
    ),
    RuleCase(
        Algorithm,
        "lossAggNorm is read by",
        f"{_P}.algorithm.lossAggNorm",
        ((f"{_P}.algorithm.lossAggNorm", 512),),
        ((_AGG, "seq-mean-token-sum-norm"), (f"{_P}.algorithm.lossAggNorm", 512)),
    ),
    RuleCase(
        Algorithm,
        "dr_grpo divides by a constant",
        _AGG,
        ((f"{_P}.algorithm", {"name": "dr_grpo"}),),
        (
            (
                f"{_P}.algorithm",
                {"name": "dr_grpo", "lossAggMode": "seq-mean-token-sum-norm", "lossAggNorm": 512},
            ),
        ),
    ),
    RuleCase(
        RewardKl,
        "horizon belongs to the adaptive controller",
        f"{_P}.algorithm.rewardKl.horizon",
        ((f"{_P}.algorithm.rewardKl", {"horizon": 100}),),
        ((f"{_P}.algorithm.rewardKl", {"horizon": 100, "targetKl": 0.1}),),
    ),
    RuleCase(
        Truncated,
        "penalty is read by mode soft_penalty",
        f"{_P}.algorithm.truncated.penalty",
        ((f"{_P}.algorithm.truncated", {"penalty": 0.5}),),
        (
            (
                f"{_P}.algorithm.truncated",
                {"mode": "soft_penalty", "limit": 64, "buffer": 16, "penalty": 0.5},
            ),
        ),
    ),
    RuleCase(
        Truncated,
        "mode soft_penalty needs limit",
        f"{_P}.algorithm.truncated.mode",
        ((f"{_P}.algorithm.truncated", {"mode": "soft_penalty", "limit": 16, "buffer": 64}),),
        ((f"{_P}.algorithm.truncated", {"mode": "soft_penalty", "limit": 64, "buffer": 16}),),
    ),
    RuleCase(
        Truncated,
        "limit and buffer are read by mode soft_penalty",
        f"{_P}.algorithm.truncated.limit",
        ((f"{_P}.algorithm.truncated", {"limit": 64}),),
        ((f"{_P}.algorithm.truncated", {"mode": "soft_penalty", "limit": 64, "buffer": 16}),),
    ),
    RuleCase(
        RatioFilter,
        "a filter needs at least one bound",
        f"{_P}.trainInferCorrection.filters[0]",
        ((f"{_P}.trainInferCorrection", {"filters": [{"level": "sequence"}]}),),
        ((f"{_P}.trainInferCorrection", {"filters": [{"level": "sequence", "ratioHigh": 2}]}),),
    ),
    RuleCase(
        RatioFilter,
        "diffLow and diffHigh must be between -1 and 1",
        f"{_P}.trainInferCorrection.filters[0]",
        ((f"{_P}.trainInferCorrection", {"filters": [{"level": "token", "diffLow": -1.5}]}),),
        ((f"{_P}.trainInferCorrection", {"filters": [{"level": "sequence", "diffLow": -1.5}]}),),
    ),
    RuleCase(
        TrainInferCorrection,
        "set isWeight or filters",
        f"{_P}.trainInferCorrection.isWeight",
        ((f"{_P}.trainInferCorrection", {}),),
        ((f"{_P}.trainInferCorrection", {"isWeight": {}}),),
    ),
    RuleCase(
        Staleness,
        "partialRollout has no effect",
        f"{_P}.staleness.partialRollout",
        ((f"{_P}.staleness", {"partialRollout": False}),),
        ((f"{_P}.staleness", {"max": 0.5, "partialRollout": False, "offPolicy": "Ignore"}),),
    ),
    RuleCase(
        Record,
        "set exactly one of to",
        f"{_P}.record.to",
        ((f"{_P}.record", {"to": "/a", "replay": "/b"}),),
        ((f"{_P}.record", {"replay": "/b"}),),
    ),
    RuleCase(
        Critic,
        "the critic trains on the actor's mini-batches",
        f"{_P}.critic.training.miniBatchSize",
        ((f"{_P}.algorithm.name", "gae"), (f"{_P}.critic", {"training": {"miniBatchSize": 4}})),
        ((f"{_P}.algorithm.name", "gae"), (f"{_P}.critic", {"training": {"learningRate": 1e-3}})),
    ),
    RuleCase(
        ActorTrain,
        "lora needs the strategy fsdp2 or deepspeed",
        f"{_P}.actorTrain.lora",
        ((f"{_P}.actorTrain", {"strategy": {"name": "megatron"}, "lora": {"rank": 4}}),),
        ((f"{_P}.actorTrain", {"strategy": {"name": "deepspeed"}, "lora": {"rank": 4}}),),
    ),
    RuleCase(
        Tracking,
        "custom is module:Class",
        "spec.tracking.custom",
        (("spec.tracking", {"custom": "mlflow"}),),
        (("spec.tracking", {"custom": "trackers:Mlflow", "customConfig": {"uri": "x"}}),),
    ),
    RuleCase(
        Tracking,
        "customConfig is for custom",
        "spec.tracking.customConfig",
        (("spec.tracking", {"customConfig": {}}),),
        (("spec.tracking", {"custom": "my.trackers:Mlflow"}),),
    ),
    RuleCase(
        WeightSync,
        "set uri exactly when transport is Disk",
        f"{_P}.weightSync.uri",
        ((f"{_P}.weightSync", {"transport": "Disk"}),),
        ((f"{_P}.weightSync", {"transport": "Disk", "uri": "/shared/weights"}),),
    ),
    RuleCase(
        WeightSync,
        "a collective moves whole tensors",
        f"{_P}.weightSync.delta",
        ((f"{_P}.weightSync", {"transport": "Broadcast", "delta": True}),),
        ((f"{_P}.weightSync", {"transport": "ObjectStore", "delta": True}),),
    ),
    RuleCase(
        Generating,
        "topP, topK and minP sample from another distribution",
        f"{_P}.actorInfer.generating.allowTruncatedSampling",
        ((f"{_P}.actorInfer.generating", {"topP": 0.9}),),
        ((f"{_P}.actorInfer.generating", {"topP": 0.9, "allowTruncatedSampling": True}),),
    ),
    RuleCase(
        Warmup,
        "set dataset exactly when source is Dataset",
        f"{_P}.warmup.dataset",
        ((f"{_P}.warmup", {"steps": 1, "source": "Dataset"}),),
        ((f"{_P}.warmup", {"steps": 1, "source": "Dataset", "dataset": {"path": "a.jsonl"}}),),
    ),
    RuleCase(
        Warmup,
        "observationWeight is about environments",
        f"{_P}.warmup.observationWeight",
        (
            (
                f"{_P}.warmup",
                {
                    "steps": 1,
                    "source": "Dataset",
                    "dataset": {"path": "a.jsonl"},
                    "observationWeight": 0.5,
                },
            ),
        ),
        ((f"{_P}.warmup", {"steps": 1, "observationWeight": 0.5}),),
    ),
    RuleCase(
        Eval,
        "pass@k needs at least k samples",
        f"{_P}.eval.passAt",
        ((f"{_P}.eval", {"samples": 2, "passAt": [1, 4]}),),
        ((f"{_P}.eval", {"samples": 4, "passAt": [1, 4]}),),
    ),
    RuleCase(
        Pipeline,
        "each entry of envs needs a tag",
        f"{_P}.envs",
        ((f"{_P}.envs", [_TWO[0], _TWO[0]]),),
        ((f"{_P}.envs", _TWO),),
    ),
    RuleCase(
        Pipeline,
        "each entry of rewards needs a name",
        f"{_P}.rewards",
        ((f"{_P}.rewards", [{"name": "judge", "type": type_} for type_ in ("m:f", "m:g")]),),
        ((f"{_P}.rewards", [{"name": name, "type": "m:f"} for name in ("judge", "other")]),),
    ),
    RuleCase(
        EnvGroups,
        "tags names a tag twice",
        f"{_P}.trainEnvs.tags",
        ((f"{_P}.trainEnvs.tags", ["Lake", "Lake"]),),
        ((f"{_P}.envs", _TWO), (f"{_P}.trainEnvs.tags", _BOTH)),
    ),
    RuleCase(
        Pipeline,
        "tags of an entry of rewards names a tag",
        f"{_P}.rewards",
        ((f"{_P}.rewards", [{"name": "judge", "type": "m:f", "tags": ["Pond"]}]),),
        (
            (
                f"{_P}.rewards",
                [
                    {"name": "judge", "type": "m:f", "tags": ["Lake"]},
                    {"name": "all", "type": "m:f"},
                ],
            ),
        ),
    ),
    RuleCase(
        Pipeline,
        "rewardNormalization over groups of one",
        f"{_P}.rewardNormalization.grouping",
        (
            (f"{_P}.algorithm.name", "reinforce"),
            (f"{_P}.trainEnvs.groupSize", 1),
            (_NORM, {"grouping": "group", "normMeanType": "group"}),
        ),
        (
            (f"{_P}.algorithm.name", "reinforce"),
            (_NORM, {"grouping": "group", "normMeanType": "group"}),
        ),
    ),
    RuleCase(
        Pipeline,
        "running means and deviations are those of trajectories",
        f"{_P}.rewardNormalization.grouping",
        (
            (f"{_P}.algorithm.name", "reinforce"),
            (_NORM, {"grouping": "group", "normStdType": "running"}),
        ),
        (
            (f"{_P}.algorithm.name", "reinforce"),
            (_NORM, {"grouping": "tag", "normMeanType": "running"}),
        ),
    ),
    RuleCase(
        Pipeline,
        "rewardNormalization.grouping state compares turns",
        f"{_P}.rewardNormalization.grouping",
        ((f"{_P}.algorithm.name", "reinforce"), (_NORM, {"grouping": "state"})),
        ((f"{_P}.algorithm.name", "step_reinforce"), (_NORM, {"grouping": "state"})),
    ),
    RuleCase(
        Pipeline,
        "whitening needs at least two trajectories",
        f"{_P}.rolloutBatchSize",
        (
            (f"{_P}.algorithm", {"name": "reinforce_plus_plus"}),
            (f"{_P}.rolloutBatchSize", 1),
            (f"{_P}.trainEnvs.groupSize", 1),
        ),
        (
            (f"{_P}.algorithm", {"name": "reinforce_plus_plus"}),
            (f"{_P}.rolloutBatchSize", 2),
            (f"{_P}.trainEnvs.groupSize", 1),
        ),
    ),
    RuleCase(
        Pipeline,
        "algorithm gae needs critic",
        f"{_P}.critic",
        ((f"{_P}.algorithm.name", "gae"),),
        ((f"{_P}.algorithm.name", "gae"), *_CRITIC),
    ),
    RuleCase(
        Pipeline,
        "criticWarmup needs algorithm gae",
        f"{_P}.criticWarmup",
        ((f"{_P}.criticWarmup", 1),),
        ((f"{_P}.criticWarmup", 1), (f"{_P}.algorithm.name", "gae"), *_CRITIC),
    ),
    RuleCase(
        Pipeline,
        "nothing reads reference",
        f"{_P}.reference",
        ((f"{_P}.reference", {}),),
        ((f"{_P}.reference", {}), (f"{_P}.algorithm.lossKl", {})),
    ),
    RuleCase(
        Pipeline,
        "rollouts of older policies bias the gradient",
        f"{_P}.staleness.offPolicy",
        ((f"{_P}.staleness", {"max": 1}),),
        ((f"{_P}.staleness", {"max": 1}), (f"{_P}.algorithm.pgVariant", "decoupled")),
    ),
    RuleCase(
        Pipeline,
        "with modelUpdateFrequency N",
        f"{_P}.modelUpdateFrequency",
        (
            (f"{_P}.modelUpdateFrequency", 3),
            (f"{_P}.staleness", {"max": 1.5, "offPolicy": "Ignore"}),
        ),
        ((f"{_P}.modelUpdateFrequency", 3), (f"{_P}.staleness", {"max": 2, "offPolicy": "Ignore"})),
    ),
    RuleCase(
        Pipeline,
        "pgVariant decoupled already contains the weight",
        f"{_P}.trainInferCorrection.isWeight",
        (
            (f"{_P}.algorithm.pgVariant", "decoupled"),
            (f"{_P}.trainInferCorrection", {"isWeight": {}}),
        ),
        (
            (f"{_P}.algorithm.pgVariant", "decoupled"),
            (f"{_P}.trainInferCorrection", {"filters": [{"ratioHigh": 2}]}),
        ),
    ),
    RuleCase(
        Pipeline,
        "oldLogProbs Rollout needs a loss",
        f"{_P}.oldLogProbs",
        ((f"{_P}.oldLogProbs", "Rollout"), (f"{_P}.algorithm.pgVariant", "vanilla")),
        ((f"{_P}.oldLogProbs", "Rollout"), (f"{_P}.algorithm.pgVariant", "kimi15")),
    ),
    RuleCase(
        Pipeline,
        "trainInferCorrection compares recomputed log-probs",
        f"{_P}.oldLogProbs",
        (
            (f"{_P}.oldLogProbs", "Rollout"),
            (f"{_P}.trainInferCorrection", {"filters": [{"ratioHigh": 2}]}),
        ),
        ((f"{_P}.trainInferCorrection", {"filters": [{"ratioHigh": 2}]}),),
    ),
    RuleCase(
        Pipeline,
        "with truncated sampling, the recorded log-probs",
        f"{_P}.actorInfer.generating.allowTruncatedSampling",
        (
            (f"{_P}.actorInfer.generating.allowTruncatedSampling", True),
            (f"{_P}.trainInferCorrection", {"isWeight": {}}),
        ),
        ((f"{_P}.trainInferCorrection", {"isWeight": {}}),),
    ),
    RuleCase(
        Pipeline,
        "deterministic runs are synchronous",
        f"{_P}.staleness.max",
        ((f"{_P}.deterministic", True), (f"{_P}.staleness", {"max": 1, "offPolicy": "Ignore"})),
        ((f"{_P}.deterministic", True),),
    ),
    RuleCase(
        Pipeline,
        "deterministic runs need groupSizeRedundancy 0",
        f"{_P}.trainEnvs.groupSizeRedundancy",
        ((f"{_P}.deterministic", True), (f"{_P}.trainEnvs.groupSizeRedundancy", 1)),
        ((f"{_P}.trainEnvs.groupSizeRedundancy", 1),),
    ),
    RuleCase(
        Pipeline,
        "deterministic runs must not depend on the clock",
        f"{_P}.envs",
        (
            (f"{_P}.deterministic", True),
            (f"{_P}.envs", [{"tag": "Lake", "type": "frozen_lake", "stepTimeoutSeconds": 5}]),
        ),
        ((f"{_P}.envs", [{"tag": "Lake", "type": "frozen_lake", "stepTimeoutSeconds": 5}]),),
    ),
    RuleCase(
        Pipeline,
        "deterministic runs need the engine transformers",
        f"{_P}.actorInfer.strategy.name",
        ((f"{_P}.deterministic", True), (f"{_P}.actorInfer.strategy", {"name": "sglang"})),
        ((f"{_P}.deterministic", True), (f"{_P}.actorInfer.strategy", {"name": "transformers"})),
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
        (
            (f"{_P}.envs", _TWO),
            (f"{_P}.trainEnvs", {"groups": 4, "groupSize": 4, "tags": _BOTH, "partition": [1, 2]}),
        ),
        (
            (f"{_P}.envs", _TWO),
            (f"{_P}.trainEnvs", {"groups": 4, "groupSize": 4, "tags": _BOTH, "partition": [1, 3]}),
        ),
    ),
    RuleCase(
        EnvGroups,
        "groups is not a multiple of the number of tags",
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
        "valEnvs has an environment of whose data set nothing is held out",
        f"{_P}.envs",
        ((f"{_P}.valEnvs", _VAL), (f"{_P}.envs", [_ALL_TRAINED])),
        ((f"{_P}.envs", [_ALL_TRAINED]),),
    ),
    RuleCase(
        Pipeline,
        "groupFilter zero_variance rejects each group of one",
        f"{_P}.trainEnvs.groupFilter",
        (
            (f"{_P}.trainEnvs.groupSize", 1),
            (f"{_P}.algorithm.name", "reinforce"),
            (f"{_P}.trainEnvs.groupFilter", {}),
        ),
        (
            (f"{_P}.trainEnvs.groupSize", 1),
            (f"{_P}.algorithm.name", "reinforce"),
            (f"{_P}.trainEnvs.groupFilter", {"type": "my_filters:picky"}),
        ),
    ),
    RuleCase(
        Pipeline,
        "maxZeroVarianceShare counts each group of one",
        f"{_P}.guards.maxZeroVarianceShare",
        (
            (f"{_P}.trainEnvs.groupSize", 1),
            (f"{_P}.algorithm.name", "reinforce"),
            (f"{_P}.guards", {"maxZeroVarianceShare": 0.9}),
        ),
        ((f"{_P}.guards", {"maxZeroVarianceShare": 0.9}),),
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
        "reinforce_plus_plus_baseline, grpo, rloo, dr_grpo, gigpo "
        "compare the trajectories of a group",
        f"{_P}.trainEnvs.groupSize",
        ((f"{_P}.trainEnvs.groupSize", 1),),
        ((f"{_P}.trainEnvs.groupSize", 1), (f"{_P}.algorithm.name", "reinforce")),
    ),
    RuleCase(
        Pipeline,
        "reinforce_plus_plus_baseline, grpo, rloo, dr_grpo, gigpo and functions of your own have",
        f"{_P}.rewardNormalization",
        ((f"{_P}.rewardNormalization", {"grouping": "tag"}),),
        ((f"{_P}.rewardNormalization", {"grouping": "tag"}), (f"{_P}.algorithm.name", "reinforce")),
    ),
    RuleCase(
        Pipeline,
        "step-wise agents see no observation after an answer",
        f"{_P}.warmup.observationWeight",
        (
            (f"{_P}.warmup", {"steps": 1, "observationWeight": 0.5}),
            (
                f"{_P}.envs",
                [{"tag": "Lake", "type": "frozen_lake", "agent": {"type": "step_wise"}}],
            ),
        ),
        ((f"{_P}.warmup", {"steps": 1, "observationWeight": 0.5}),),
    ),
    RuleCase(
        Pipeline,
        "a replay samples no episodes: set evalSteps",
        f"{_P}.evalSteps",
        ((f"{_P}.record", {"replay": "/b"}), (f"{_P}.valEnvs", _VAL), (f"{_P}.evalSteps", 1)),
        ((f"{_P}.record", {"to": "/b"}), (f"{_P}.valEnvs", _VAL), (f"{_P}.evalSteps", 1)),
    ),
    RuleCase(
        Pipeline,
        "a replay samples no episodes: leave warmup out",
        f"{_P}.warmup",
        ((f"{_P}.record", {"replay": "/b"}), (f"{_P}.warmup", {"steps": 1})),
        ((f"{_P}.record", {"to": "/b"}), (f"{_P}.warmup", {"steps": 1})),
    ),
    RuleCase(
        InitializeModel,
        "hiddenSize must be a multiple of heads",
        "spec.model.initialize.hiddenSize",
        (("spec.model.initialize.heads", 3),),
        (("spec.model.initialize.heads", 8),),
    ),
    RuleCase(
        InitializeModel,
        "set experts and expertsPerToken",
        "spec.model.initialize.experts",
        (("spec.model.initialize.architecture", "qwen3_moe"),),
        (
            ("spec.model.initialize.architecture", "qwen3_moe"),
            ("spec.model.initialize.experts", 4),
            ("spec.model.initialize.expertsPerToken", 2),
        ),
    ),
    RuleCase(
        InitializeModel,
        "expertsPerToken must not exceed",
        "spec.model.initialize.expertsPerToken",
        (
            ("spec.model.initialize.architecture", "qwen3_moe"),
            ("spec.model.initialize.experts", 2),
            ("spec.model.initialize.expertsPerToken", 3),
        ),
        (
            ("spec.model.initialize.architecture", "qwen3_moe"),
            ("spec.model.initialize.experts", 2),
            ("spec.model.initialize.expertsPerToken", 2),
        ),
    ),
    RuleCase(
        ModelSpec,
        "set exactly one of path",
        "spec.model.path",
        (("spec.model.path", "org/model"),),
        (("spec.model", {"path": "org/model"}), _SAVED),
    ),
    RuleCase(
        CodeSpec,
        "set only one of configMap, git and image",
        "spec.code",
        (("spec.code", {"configMap": "mine", "image": {"reference": "mine:1"}}),),
        (("spec.code", {"image": {"reference": "mine:1"}}),),
    ),
    RuleCase(
        CodeSpec,
        "set configMap, git, image or pip",
        "spec.code",
        (("spec.code", {}),),
        (("spec.code", {"pip": {"requirements": ["emoji"]}}),),
    ),
    RuleCase(
        CodeSpec,
        "requirementsFile is a file of the code",
        "spec.code.pip",
        (("spec.code", {"pip": {"requirementsFile": "requirements.txt"}}),),
        (("spec.code", {"configMap": "mine", "pip": {"requirementsFile": "requirements.txt"}}),),
    ),
    RuleCase(
        PipCode,
        "set requirements, requirementsFile or both",
        "spec.code.pip.requirements",
        (("spec.code", {"configMap": "mine", "pip": {}}),),
        (
            (
                "spec.code",
                {
                    "configMap": "mine",
                    "pip": {"requirements": ["emoji"], "requirementsFile": "a/b.txt"},
                },
            ),
        ),
    ),
    RuleCase(
        PipCode,
        "indexUrl must not contain a user",
        "spec.code.pip.indexUrl",
        (_indexed("https://me:token@host.example/simple"),),
        (_indexed("https://host.example/simple/me@here"),),
    ),
    RuleCase(
        PipCode,
        "requirementsFile must be below",
        "spec.code.pip.requirementsFile",
        (
            (
                "spec.code",
                {"configMap": "mine", "pip": {"requirementsFile": "../requirements.txt"}},
            ),
        ),
        (("spec.code", {"configMap": "mine", "pip": {"requirementsFile": "..requirements.txt"}}),),
    ),
    RuleCase(
        GitCode,
        "url must not contain a user",
        "spec.code.git.url",
        (("spec.code", {"git": {"url": "https://token@github.com/me/mine"}}),),
        (("spec.code", {"git": {"url": "ssh://git@github.com/me/mine", "secretName": "key"}}),),
    ),
    RuleCase(
        GitCode,
        "the password of secretName would travel unencrypted",
        "spec.code.git.url",
        (("spec.code", {"git": {"url": "http://git.tools.svc.example/me", "secretName": "t"}}),),
        (("spec.code", {"git": {"url": "http://git.tools.svc:80/me", "secretName": "t"}}),),
    ),
    RuleCase(
        GitCode,
        "path must be below",
        "spec.code.git.path",
        (("spec.code", {"git": {"url": "https://github.com/me/mine", "path": "a/.."}}),),
        (("spec.code", {"git": {"url": "git@github.com:me/mine", "path": ".a/b..c"}}),),
    ),
    RuleCase(
        VolumeClaim,
        "set exactly one of claimName",
        "spec.checkpoint.volumeClaim.claimName",
        (("spec.checkpoint.volumeClaim", {"claimName": "data", "size": "1Gi"}),),
        (("spec.checkpoint.volumeClaim", {"claimName": "data"}),),
    ),
    RuleCase(
        VolumeClaim,
        "retain is about a claim that the operator creates",
        "spec.checkpoint.volumeClaim.retain",
        (("spec.checkpoint.volumeClaim", {"claimName": "data", "retain": False}),),
        (("spec.checkpoint.volumeClaim", {"size": "1Gi", "retain": False}),),
    ),
    RuleCase(
        Checkpoint,
        "none: true saves nothing",
        "spec.checkpoint.none",
        (("spec.checkpoint", {"none": True, "keep": 3}),),
        (("spec.checkpoint", {"none": True}),),
    ),
    RuleCase(
        AgenticRunSpec,
        "the size of a checkpoint of model.path is not known",
        "spec.checkpoint",
        (("spec.model", {"path": "org/model"}),),
        (("spec.model", {"path": "org/model"}), ("spec.checkpoint.none", True)),
    ),
    *(
        RuleCase(
            PodTemplate,
            message,
            f"{_TEMPLATE}.{path}",
            ((f"{_TEMPLATE}.spec", wrong),),
            ((f"{_TEMPLATE}.spec", right),),
        )
        for message, path, wrong, right in (
            (
                "every container needs its name",
                "spec.containers",
                {"initContainers": [{"image": "busybox"}]},
                {"initContainers": [{"name": "warm", "image": "busybox"}]},
            ),
            (
                "command and args of container ray",
                "spec.containers",
                {"containers": [{"name": "ray", "command": ["bash"]}]},
                {"containers": [{"name": "side", "command": ["bash"], "image": "busybox"}]},
            ),
            (
                "container reporter is the operator's own",
                "spec.initContainers",
                {"containers": [{"name": "reporter"}]},
                {"containers": [{"name": "reporter-2"}]},
            ),
            (
                "/etc/agenticrun holds the run's own files",
                "spec.containers",
                {
                    "containers": [
                        {
                            "name": "ray",
                            "volumeMounts": [{"name": "x", "mountPath": "/etc/agenticrun/run"}],
                        }
                    ]
                },
                {
                    "containers": [
                        {"name": "ray", "volumeMounts": [{"name": "x", "mountPath": "/data"}]}
                    ]
                },
            ),
            (
                "every volume needs a name",
                "spec.volumes",
                {"volumes": [{"name": "run", "emptyDir": {}}]},
                {"volumes": [{"name": "work", "emptyDir": {"medium": "Memory"}}]},
            ),
            (
                "no pod of a run gets the token",
                "spec.automountServiceAccountToken",
                {"automountServiceAccountToken": True},
                {"automountServiceAccountToken": True, "serviceAccountName": "training"},
            ),
            (
                "restartPolicy is set by the operator",
                "spec.restartPolicy",
                {"restartPolicy": "Never"},
                {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"},
            ),
        )
    ),
    RuleCase(
        AgenticRunSpec,
        "labels of agenticrun.dev, ray.io",
        "spec.labels",
        (("spec.labels", {"kueue.x-k8s.io/queue-name": "gpus"}),),
        (("spec.labels", {"team": "lake", "ray.io/gang-scheduling-enabled": "true"}),),
    ),
    RuleCase(
        NetworkPeer,
        "cidr names addresses, namespace and podLabels name pods",
        "spec.network.allowFrom[0].cidr",
        (("spec.network", {"allowFrom": [{"cidr": "10.0.0.0/8", "namespace": "tools"}]}),),
        (("spec.network", {"allowFrom": [{"cidr": "10.0.0.0/8"}, {"namespace": "tools"}]}),),
    ),
    RuleCase(
        NetworkPeer,
        "set podLabels, namespace or cidr",
        "spec.network.egress[0].to[0].podLabels",
        (("spec.network", {"egress": [{"role": "env", "to": [{"ports": [443]}]}]}),),
        (("spec.network", {"egress": [{"role": "env", "to": [{"cidr": "::/0"}]}]}),),
    ),
    RuleCase(
        Network,
        "egress names a role twice",
        "spec.network.egress",
        (("spec.network", {"egress": [{"role": "env"}, {"role": "env"}]}),),
        (("spec.network", {"egress": [{"role": "env"}, {"role": "driver"}]}),),
    ),
    RuleCase(
        AgenticRunSpec,
        "ReadWriteOnce allows one node, and several trainer pods with GPUs",
        "spec.checkpoint.volumeClaim.accessMode",
        ((_TRAINER, {"replicas": 2, "gpus": 8}),),
        (
            (_TRAINER, {"replicas": 2, "gpus": 8}),
            ("spec.checkpoint.volumeClaim", {"size": "1Gi", "accessMode": "ReadWriteMany"}),
        ),
    ),
    RuleCase(
        AgenticRunSpec,
        "ReadWriteOnce allows one node, and nodeSelector",
        "spec.checkpoint.volumeClaim.accessMode",
        ((f"{_TRAINER}.nodeSelector", {"pool": "a"}), (f"{_DRIVER}.nodeSelector", {"pool": "b"})),
        ((f"{_TRAINER}.nodeSelector", {"pool": "a"}), (f"{_DRIVER}.nodeSelector", {"disk": "b"})),
    ),
    RuleCase(
        AgenticRunSpec,
        "ReadWriteOnce allows one node, which Kueue does not know",
        "spec.checkpoint.volumeClaim.accessMode",
        (("spec.queue", {"name": "gpus"}), (_TRAINER, {"topology": {"required": "rack"}})),
        (
            ("spec.queue", {"name": "gpus"}),
            (_TRAINER, {"topology": {"required": "rack"}}),
            ("spec.checkpoint.uri", "s3://bucket/prefix"),
        ),
    ),
    RuleCase(
        AgenticRunSpec,
        "topology is for Kueue",
        "spec.roles",
        (("spec.roles", {"env": {"topology": {"required": "rack"}}}),),
        (
            ("spec.roles", {"env": {"topology": {"required": "rack"}}}),
            ("spec.queue", {"name": "gpus"}),
        ),
    ),
    RuleCase(
        Topology,
        "set either required or preferred",
        "spec.roles.env.topology",
        (
            ("spec.roles", {"env": {"topology": {"required": "rack", "preferred": "rack"}}}),
            ("spec.queue", {"name": "gpus"}),
        ),
        (
            ("spec.roles", {"env": {"topology": {"preferred": "rack"}}}),
            ("spec.queue", {"name": "gpus"}),
        ),
    ),
    RuleCase(
        ElasticRole,
        "minReplicas is larger than replicas",
        "spec.roles.env.minReplicas",
        (("spec.roles", {"env": {"replicas": 2, "minReplicas": 3}}),),
        (("spec.roles", {"env": {"replicas": 3, "minReplicas": 3}}),),
    ),
    *(
        RuleCase(
            WorkerRole,
            message,
            f"spec.roles.trainer.{field}",
            ((_TRAINER, {"resources": {part: {name: amount}}, **wrong}),),
            ((_TRAINER, {"resources": {part: {name: amount}}, **right}),),
        )
        for message, field, part, name, amount, wrong, right in (
            ("cpu is in resources", "cpus", "requests", "cpu", "4", {"cpus": 2}, {}),
            ("memory is in resources", "memory", "limits", "memory", "4Gi", {"memory": "8Gi"}, {}),
            (
                "write GPUs as gpus",
                "resources",
                "limits",
                "nvidia.com/gpu",
                "4",
                {},
                {"gpuResourceName": "example.com/gpu"},
            ),
        )
    ),
    *(
        RuleCase(
            WorkerRole,
            f"{field} {what}",
            f"{_TRAINER}.{field}",
            ((_TRAINER, {field: wrong}),),
            ((_TRAINER, {field: right}),),
        )
        for field, what, wrong, right in (
            ("cpus", "is a number of processors", "2.85Gi", "2850m"),
            ("memory", "must be more than 0", "0", "100u"),
            ("shmSize", "must be more than 0", 0, "0.5E9"),
        )
    ),
    *(
        RuleCase(
            Resources,
            f"{name} in {part} {what}",
            f"{_TRAINER}.resources.{part}",
            ((_TRAINER, {"resources": {part: {name: wrong}}}),),
            ((_TRAINER, {"resources": {part: {name: right}}}),),
        )
        for part in ("requests", "limits")
        for name, what, wrong, right in (
            ("cpu", "is a number of processors", "4Gi", "4"),
            ("memory", "must be more than 0", "0.0Gi", "4Gi"),
        )
    ),
    RuleCase(
        VolumeClaim,
        "size must be more than 0",
        "spec.checkpoint.volumeClaim.size",
        (("spec.checkpoint", {"volumeClaim": {"size": "0e3"}}),),
        (("spec.checkpoint", {"volumeClaim": {"size": "1.5e9"}}),),
    ),
    RuleCase(
        Checkpoint,
        "resume must be Auto, Never, FromPreviousRun",
        "spec.checkpoint.resume",
        (("spec.checkpoint.resume", "FromPreviousrun"),),
        (("spec.checkpoint.resume", "FromPreviousRun"),),
    ),
    RuleCase(
        AgenticRunSpec,
        "roles.critic is for pipeline.critic",
        "spec.roles.critic",
        (("spec.roles", {"critic": {}}),),
        (("spec.roles", {"critic": {}}), (f"{_P}.algorithm.name", "gae"), *_CRITIC),
    ),
    RuleCase(
        AgenticRunSpec,
        "roles.reference is for KL penalties",
        "spec.roles.reference",
        (("spec.roles", {"reference": {}}),),
        (("spec.roles", {"reference": {}}), (f"{_P}.algorithm.lossKl", {})),
    ),
    RuleCase(
        AgenticRunSpec,
        "checkpoint.uri must lie below /checkpoints",
        "spec.checkpoint.uri",
        (("spec.checkpoint", {"uri": "/data", "volumeClaim": {"size": "1Gi"}}),),
        (("spec.checkpoint", {"uri": "/data"}),),
    ),
    RuleCase(
        ModelSpec,
        "a model of initialize has a chat template of its own",
        "spec.model.chatTemplate",
        (("spec.model", {"initialize": {}, "chatTemplate": "{{ messages }}"}), _SAVED),
        (_SAVED, ("spec.model", {"path": "Qwen/Qwen3-0.6B", "chatTemplate": "{{ messages }}"})),
    ),
    RuleCase(
        AgenticRunSpec,
        "megatron has an attention of its own",
        "spec.model.attnImplementation",
        (
            ("spec.model.attnImplementation", "eager"),
            (f"{_P}.actorTrain", {"strategy": {"name": "megatron"}}),
        ),
        (
            ("spec.model.attnImplementation", "eager"),
            (f"{_P}.actorTrain", {"strategy": {"name": "deepspeed"}}),
        ),
    ),
    RuleCase(
        AgenticRunSpec,
        "Colocated engines live on the trainer's pods",
        "spec.roles.inference",
        (("spec.placement", "Colocated"), ("spec.roles", {"inference": {}})),
        (("spec.placement", "Colocated"),),
    ),
    RuleCase(
        AgenticRunSpec,
        "Colocated engines and trainers take turns",
        "spec.pipeline.staleness.max",
        (("spec.placement", "Colocated"), (f"{_P}.staleness", {"max": 1, "offPolicy": "Ignore"})),
        (("spec.placement", "Colocated"), (f"{_P}.staleness", {"max": 0})),
    ),
    RuleCase(
        AgenticRunSpec,
        "Broadcast needs a GPU for each engine and trainer",
        "spec.pipeline.weightSync.transport",
        (("spec.placement", "Colocated"), (f"{_P}.weightSync", {"transport": "Broadcast"})),
        (("spec.placement", "Colocated"), (f"{_P}.weightSync", {"transport": "SharedMemory"})),
    ),
    RuleCase(
        AgenticRun,
        "must be at most 45 lower-case letters",
        "metadata.name",
        (("metadata.name", "a" * 46),),
        (("metadata.name", "a" * 45),),
    ),
)
"""One case per rule.

`test_every_rule_has_a_case` keeps it complete; the apiserver gets the same cases."""
