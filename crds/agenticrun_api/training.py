"""`spec.pipeline.{actorTrain,actorInfer,reference,critic,warmup,eval}`: training and sampling."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import Field

from agenticrun_api.base import Coefficient, Count, Model, Open, Positive, Rule, Share
from agenticrun_api.environments import DatasetSpec, Path, ValidationGenerating


class Training(Model):
    """Optimizer and batches of a trained model."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Learning rate of AdamW, after the warm-up of `warmupSteps`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the linear warm-up: constant, or decay to zero at maxSteps. Another maxSteps
    stretches the rest of the decay: the rate never jumps."""
    warmup_steps: Count = 0
    """In optimizer steps."""
    weight_decay: Coefficient = 0.0
    """Weight decay of AdamW."""
    adam_beta1: Share = 0.9
    """First beta of AdamW."""
    adam_beta2: Share = 0.999
    """Second beta of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Gradients with a larger norm are scaled down to it."""
    mini_batch_size: Positive | None = None
    """Trajectories of one optimizer step; groups are not split. Default: the whole batch."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Tokens of one forward and backward pass. Default: 16384 on GPUs; 2048 on CPUs, where larger
    tensors leave the caches."""
    sequence_packing: bool | None = None
    """Put several samples in one row, without padding. Rows are padded if a check at the start
    shows that the model does not support it. Default: true on GPUs, but not with megatron. On CPUs
    padding is faster."""

    def micro_batch_tokens(self, *, on_gpus: bool) -> int:
        """Return `max_tokens_per_micro_batch`, or its default for trainers on GPUs or CPUs."""
        return self.max_tokens_per_micro_batch or (16_384 if on_gpus else 2_048)


class TrainStrategySpec(Model):
    """The training backend: `fsdp2` (PyTorch), `megatron` (Megatron-Core) or `deepspeed` (ZeRO)."""

    name: Literal["fsdp2", "megatron", "deepspeed"] = "fsdp2"
    """The training backend."""
    config: Open = {}
    """The backend's own options under their own names, see docs/trainers.md. Options that other
    fields set are rejected."""


class Lora(Model):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), trained instead of the whole policy.
    Engines serve the merged weights.
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The adapters' product is scaled by alpha / rank."""
    target_modules: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=64)
    ] = []
    """Names of the linear layers that get adapters, as in peft. Default: all except the output
    layer."""


class ActorTrain(Model):
    """The policy under training."""

    RULES = (
        Rule(
            "!has(self.lora) || self.strategy.name != 'megatron'",
            "lora needs the strategy fsdp2 or deepspeed",
            ".lora",
            lambda a: a.lora is None or a.strategy.name != "megatron",
        ),
    )

    strategy: TrainStrategySpec = TrainStrategySpec()
    training: Training = Training()
    lora: Lora | None = None


class WeightSync(Model):
    """Transfer of the trainer's weights to the engines."""

    transport: Literal["Auto", "SharedMemory", "Broadcast", "ObjectStore", "Disk"] = "Auto"
    """SharedMemory: for engines on the trainer's node. Broadcast: a collective (NCCL on GPUs, else
    gloo). ObjectStore: through Ray, to any node. Disk: through the folder `uri`. Auto: SharedMemory
    if all engines are on the first trainer's node, else ObjectStore."""
    uri: Path | None = None
    """Folder that trainer and inference pods share; for transport Disk."""
    bucket_bytes: Annotated[int, Field(ge=1024, le=17_179_869_184)] = 67_108_864
    """Weights are sent in buckets of about this size."""
    delta: bool = False
    """Send only the elements that changed since the last sync; the result is exact. Not for
    Broadcast."""

    RULES = (
        Rule(
            "has(self.uri) == (self.transport == 'Disk')",
            "set uri exactly when transport is Disk",
            ".uri",
            lambda w: (w.uri is not None) == (w.transport == "Disk"),
        ),
        Rule(
            "!self.delta || self.transport != 'Broadcast'",
            "a collective moves whole tensors: leave delta out, or choose another transport",
            ".delta",
            lambda w: not w.delta or w.transport != "Broadcast",
        ),
    )


class Reference(Model):
    """The frozen reference policy of the KL penalties."""

    path: Path | None = None
    """Name on the Hugging Face Hub, or a folder. Default: the policy at step 0, after the
    warm-up."""


class Critic(Model):
    """The value model of gae."""

    path: Path | None = None
    """A causal language model on the Hugging Face Hub, or a folder. Default: the actor's initial
    weights. The value head starts at zero."""
    training: Training = Training()
    """miniBatchSize must be left out: the critic trains on the actor's mini-batches."""
    value_clip: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Maximum change of a value from the one at the start of the batch."""

    RULES = (
        Rule(
            "!has(self.training) || !has(self.training.miniBatchSize)",
            "the critic trains on the actor's mini-batches: leave miniBatchSize out",
            ".training.miniBatchSize",
            lambda c: c.training.mini_batch_size is None,
        ),
    )


_PARALLEL_SIZES: dict[str, tuple[str, ...]] = {
    "transformers": (),
    "sglang": ("tp", "tp_size", "tensor_parallel_size", "pp_size", "pipeline_parallel_size"),
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size"),
}
"""Options of each engine that make it use several GPUs, in all spellings."""


class InferStrategySpec(Model):
    """The inference engine: `transformers` (in the actor's process), or a server of `sglang` or
    `vllm`.
    """

    name: Literal["transformers", "sglang", "vllm"] = "transformers"
    """The inference engine."""
    config: Open = {}
    """The engine's own options under their own names, see docs/engines.md. Options that other
    fields set are rejected."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine: tensor-parallel size times pipeline-parallel size.

        Raises:
            ValueError: a size is not a positive whole number.
        """
        config = {name.replace("-", "_"): value for name, value in self.config.items()}
        sizes = {name: config.get(name, 1) for name in _PARALLEL_SIZES[self.name]}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"{name} must be a whole number of GPUs, at least 1 (got {size!r})"
                )
        return prod(sizes.values())


class Generating(Model):
    """Sampling during training. By default from the full distribution, which the recorded log-probs
    belong to.
    """

    RULES = (
        Rule(
            "self.allowTruncatedSampling || (self.topP == 1.0 && self.topK == 0 && self.minP == "
            "0.0)",
            "topP, topK and minP sample from another distribution than the one that is trained: "
            "leave them out, or set "
            "allowTruncatedSampling: true to accept the bias",
            ".allowTruncatedSampling",
            lambda g: (
                g.allow_truncated_sampling or (g.top_p == 1.0 and g.top_k == 0 and g.min_p == 0.0)
            ),
        ),
    )

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability. 1 = off."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """0 = off."""
    min_p: Share = 0.0
    """Smallest probability of a token, relative to that of the most likely token."""
    allow_truncated_sampling: bool = False
    """Allow topP, topK and minP. Log-probs are recorded and trained at temperature 1 over the full
    vocabulary, which biases the gradient (metric rollout/truncated_sampling)."""


class ActorInfer(Model):
    """The engines that sample from the policy."""

    strategy: InferStrategySpec = InferStrategySpec()
    generating: Generating = Generating()
    validation_generating: ValidationGenerating = ValidationGenerating()


class WarmupDataset(DatasetSpec):
    """Prompts with the answers to imitate."""

    prompt_column: Annotated[str, Field(min_length=1, max_length=253)] = "prompt"
    """Column with the prompt: a text or a list of chat messages."""
    answer_column: Annotated[str, Field(min_length=1, max_length=253)] = "answer"
    """Column with the answer to imitate: a text."""


class Warmup(Model):
    """Supervised warm-up before the first RL step, which starts with a new optimizer state."""

    RULES = (
        Rule(
            "has(self.dataset) == (self.source == 'Dataset')",
            "set dataset exactly when source is Dataset",
            ".dataset",
            lambda w: (w.dataset is not None) == (w.source == "Dataset"),
        ),
        Rule(
            "self.source == 'RandomValidActions' || self.observationWeight == 0.0",
            "observationWeight is about environments: leave it out for source Dataset",
            ".observationWeight",
            lambda w: w.source == "RandomValidActions" or w.observation_weight == 0.0,
        ),
    )

    steps: Annotated[int, Field(ge=1, le=100_000)]
    """Supervised steps."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Episodes or data set items of one step."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Default: actorTrain's."""
    observation_weight: Share = 0.0
    """Weight of the loss on the observation after an answer, which teaches the effect of actions. 0
    = answers only."""
    source: Literal["RandomValidActions", "Dataset"] = "RandomValidActions"
    """RandomValidActions: episodes of the training environments with random valid actions, which
    teach the format but no strategy. Dataset: a data set."""
    dataset: WarmupDataset | None = None


class Eval(Model):
    """Settings of `agenticrun eval`, which runs the validation set without training."""

    samples: Annotated[int, Field(ge=1, le=4096)] = 1
    """Episodes of each level."""
    pass_at: Annotated[
        list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=16)
    ] = [1]
    """The k of pass@k (Chen et al. 2021, arXiv 2107.03374); each at most `samples`."""
    generating: ValidationGenerating | None = None
    """Sampling parameters. Default: actorInfer.validationGenerating."""

    RULES = (
        Rule(
            "self.passAt.all(k, k <= self.samples)",
            "pass@k needs at least k samples: raise samples",
            ".passAt",
            lambda e: max(e.pass_at) <= e.samples,
        ),
    )
