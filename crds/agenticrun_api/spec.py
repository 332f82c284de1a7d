"""`spec` of an AgenticRun."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from agenticrun_api.base import Count, Model, Name, Quantity, Rule
from agenticrun_api.names import Role
from agenticrun_api.pipeline import Pipeline
from agenticrun_api.roles import Roles

RAY_VERSION = "2.60.0"
"""The Ray of the worker image that this release builds."""


class InitializeModel(Model):
    """A tiny causal LM with random weights and a word-level tokenizer, for demos and tests: no download."""

    RULES = (
        Rule(
            "self.hiddenSize % self.heads == 0",
            "hiddenSize must be a multiple of heads",
            ".hiddenSize",
            lambda m: m.hidden_size % m.heads == 0,
        ),
    )

    architecture: Literal["llama", "qwen3"] = "llama"
    hidden_size: Annotated[int, Field(ge=8, le=8192)] = 128
    layers: Annotated[int, Field(ge=1, le=128)] = 2
    heads: Annotated[int, Field(ge=1, le=128)] = 4
    intermediate_size: Annotated[int, Field(ge=8, le=32_768)] = 256
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=4096)
    ] = []
    """Words of the vocabulary beside those that the run's environments declare."""


class ModelSpec(Model):
    """The policy to train."""

    RULES = (
        Rule(
            "has(self.path) != has(self.initialize)",
            "set exactly one of path (a Hugging Face name or folder) and initialize",
            ".path",
            lambda m: (m.path is None) != (m.initialize is None),
        ),
        Rule(
            "self.attnImplementation != 'flash_attention_2' || self.dtype == 'bfloat16'",
            "flash_attention_2 computes in bfloat16: set dtype to it, or choose sdpa",
            ".attnImplementation",
            lambda m: m.attn_implementation != "flash_attention_2" or m.dtype == "bfloat16",
        ),
    )

    path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Name on the hub, or a folder that every pod sees."""
    initialize: InitializeModel | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What trainers compute with and engines serve. Trained weights and optimizer state are float32 in any case."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """The trainer's attention, by its name in transformers. flash_attention_2 needs a GPU, bfloat16 and an image with flash-attn."""
    trust_remote_code: bool = False


class CodeSpec(Model):
    """The user's own modules."""

    config_map: Name
    """A ConfigMap whose keys are file names; its folder is on PYTHONPATH in every Ray container."""


class VolumeClaim(Model):
    """Storage for checkpoints, mounted at /checkpoints in the head and trainer pods."""

    RULES = (
        Rule(
            "has(self.claimName) != has(self.size)",
            "set exactly one of claimName (an existing claim, kept) and size (a claim made and deleted with the run)",
            ".claimName",
            lambda v: (v.claim_name is None) != (v.size is None),
        ),
    )

    claim_name: Name | None = None
    size: Quantity | None = None
    storage_class_name: Name | None = None
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """Pods on several nodes need ReadWriteMany."""


class Checkpoint(Model):
    """Where training state goes, and what to go on from."""

    uri: Annotated[str, Field(min_length=1, max_length=1024)] = "/checkpoints"
    """A folder that head and trainer pods share, or object storage (s3://bucket/prefix). Each run writes below <uri>/<name>-<uid>."""
    volume_claim: VolumeClaim | None = None
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest checkpoints that are kept."""
    resume: Annotated[str, Field(min_length=1, max_length=1024)] = "Auto"
    """Auto: the newest complete checkpoint of this run. Never. Or the folder of a checkpoint, of any run."""


class Wandb(Model):
    """Weights & Biases. The key comes from WANDB_API_KEY in roles.driver.env or envFrom, never from here."""

    project: Annotated[str, Field(min_length=1, max_length=253)]
    entity: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    group: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    tags: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=32)
    ] = []
    mode: Literal["online", "offline"] = "online"
    """offline: written beside metrics.jsonl, to be sent later with `wandb sync`."""


class Tracking(Model):
    """Where metrics and samples go beside .status and Prometheus. metrics.jsonl is always written."""

    tensorboard: bool = True
    wandb: Wandb | None = None
    console: bool = True
    """One line per step in the driver's log."""
    sample_logs: Annotated[int, Field(ge=0, le=64)] = 1
    """Whole episodes written as readable text to samples/step-N.txt, every pipeline.loggingSteps steps and at each validation."""
    render_dir: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Folder for pictures of these episodes (one GIF each), of environments that can render; relative to the run's output folder."""


class FailurePolicy(Model):
    """What happens when the driver fails in a way that may pass."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    backoff_seconds: Annotated[int, Field(ge=0, le=3600)] = 10
    """Wait before the first restart; doubles each time, at most 10 minutes."""


class Cleanup(Model):
    """What happens to the RayCluster (never to the run) at the end."""

    on_success: Literal["Delete", "Keep"] = "Delete"
    on_failure: Literal["Delete", "Keep"] = "Delete"


def _immutable(field: str, required: bool) -> Rule:
    same = f"self.{field} == oldSelf.{field}"
    present = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return Rule(
        same if required else present,
        f"{field} cannot change once the run exists: delete the run and apply it again",
        f".{field}",
        None,
    )


class AgenticRunSpec(Model):
    """One RL run."""

    RULES = (
        *(
            _immutable(field, required=True)
            for field in (
                "model",
                "roles",
                "pipeline",
                "rayVersion",
                "imagePullPolicy",
                "imagePullSecrets",
                "placement",
                "tracking",
            )
        ),
        *(_immutable(field, required=False) for field in ("image", "code", "checkpoint")),
        Rule(
            "!has(self.roles) || !has(self.roles.critic) || has(self.pipeline.critic)",
            "roles.critic is for pipeline.critic: leave it out",
            ".roles.critic",
            lambda s: s.roles.critic is None or s.pipeline.critic is not None,
        ),
        Rule(
            "!has(self.roles) || !has(self.roles.reference) || "
            "(has(self.pipeline.algorithm) && (has(self.pipeline.algorithm.rewardKl) || has(self.pipeline.algorithm.lossKl)))",
            "roles.reference is for KL penalties: set pipeline.algorithm.rewardKl or lossKl, or leave it out",
            ".roles.reference",
            lambda s: s.roles.reference is None or s.pipeline.uses_reference,
        ),
        Rule(
            "!has(self.checkpoint) || !has(self.checkpoint.volumeClaim) || self.checkpoint.uri.startsWith('/checkpoints')",
            "checkpoint.uri must lie below /checkpoints, where checkpoint.volumeClaim is mounted",
            ".checkpoint.uri",
            lambda s: (
                s.checkpoint is None
                or s.checkpoint.volume_claim is None
                or s.checkpoint.uri.startswith("/checkpoints")
            ),
        ),
        Rule(
            "self.placement != 'Colocated' || !has(self.roles) || !has(self.roles.inference)",
            "Colocated engines live on the trainer's pods: leave roles.inference out",
            ".roles.inference",
            lambda s: s.placement != "Colocated" or s.roles.inference is None,
        ),
        Rule(
            "self.model.attnImplementation == 'sdpa' || self.pipeline.actorTrain.strategy.name != 'megatron'",
            "megatron has an attention of its own: leave attnImplementation out",
            ".model.attnImplementation",
            lambda s: (
                s.model.attn_implementation == "sdpa"
                or s.pipeline.actor_train.strategy.name != "megatron"
            ),
        ),
        Rule(
            "self.placement != 'Colocated' || self.pipeline.staleness.max == 0.0",
            "Colocated engines and trainers take turns, so that no rollout runs ahead: leave staleness.max at 0",
            ".pipeline.staleness.max",
            lambda s: s.placement != "Colocated" or s.pipeline.staleness.max == 0,
        ),
        Rule(
            "self.placement != 'Colocated' || self.pipeline.weightSync.transport != 'Broadcast'",
            "no collective can have two members on one GPU: Colocated weights go by transport Auto, SharedMemory, ObjectStore or Disk",
            ".pipeline.weightSync.transport",
            lambda s: s.placement != "Colocated" or s.pipeline.weight_sync.transport != "Broadcast",
        ),
    )

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image of all pods; default: the operator's for the engine that the run samples with (chart values images)."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = []
    ray_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=16)] = (
        RAY_VERSION
    )
    """The Ray inside the image; at least 2.52 for token authentication."""
    model: ModelSpec
    code: CodeSpec | None = None
    roles: Roles = Roles()
    placement: Literal["Disaggregated", "Colocated"] = "Disaggregated"
    """Disaggregated: engines have pods and GPUs of their own. Colocated: they take turns with the trainers on the trainers' GPUs."""
    pipeline: Pipeline
    checkpoint: Checkpoint | None = None
    tracking: Tracking = Tracking()
    failure_policy: FailurePolicy = FailurePolicy()
    cleanup: Cleanup = Cleanup()
    ttl_seconds_after_finished: Count | None = None
    """Delete the run this long after it finished."""

    @property
    def colocated(self) -> bool:
        return self.placement == "Colocated"

    @property
    def engine_role(self) -> Role:
        """Whose pods carry the engines."""
        return Role.TRAINER if self.colocated else Role.INFERENCE

    def actors_per_pod(self, role: Role) -> dict[Role, int]:
        """What a pod of the role carries: ranks one per GPU, engines as many as find GPUs, and one of each without GPUs."""
        gpus = self.roles.of(role).gpus
        carried: dict[Role, int] = {} if role is Role.INFERENCE else {role: max(1, gpus)}
        if role is self.engine_role:
            carried[Role.INFERENCE] = max(1, gpus // self.pipeline.actor_infer.strategy.gpus)
        return carried

    def actors(self, role: Role) -> int:
        """How many actors of the role the run has."""
        pods = self.engine_role if role is Role.INFERENCE else role
        return self.roles.replicas(pods) * self.actors_per_pod(pods)[role]

    @model_validator(mode="before")
    @classmethod
    def _has_inference_pods(cls, data: Any) -> Any:
        """Where nothing is said about them. A default in the schema could not tell it from pods that a Colocated run asks for."""
        if not isinstance(data, dict) or data.get("placement", "Disaggregated") != "Disaggregated":
            return data
        roles = data.get("roles", {})
        asks = not isinstance(roles, dict) or "inference" in roles
        return data if asks else {**data, "roles": {**roles, "inference": {}}}

    @model_validator(mode="after")
    def _engines_fit_their_pods(self) -> Self:
        """Not a rule of the schema: the schema leaves an engine's options open, so that CEL cannot read them."""
        try:
            needed = self.pipeline.actor_infer.strategy.gpus
        except ValueError as error:
            raise _refused(".pipeline.actorInfer.strategy.config", str(error)) from error
        gpus = self.roles.of(self.engine_role).gpus
        if gpus % needed:
            message = f"an engine takes {needed} GPUs (actorInfer.strategy.config), and {gpus} of a pod are not a multiple of that"
            raise _refused(f".roles.{self.engine_role}.gpus", message)
        return self


def _refused(path: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{message}", {"message": message, "path": path})
