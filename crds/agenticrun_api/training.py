"""`spec.pipeline.{actorTrain,actorInfer,reference,critic,warmup,eval}`: the models of a run, how they train and how they sample."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agenticrun_api.base import Coefficient, Count, Model, Positive, Rule, Share
from agenticrun_api.environments import DatasetSpec, Path, ValidationGenerating


class Training(Model):
    """Optimizer and batches of a trained model."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After `warmupSteps` of linear warm-up: stay, or fall to zero at maxSteps."""
    warmup_steps: Count = 0
    """In optimizer steps."""
    weight_decay: Coefficient = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    max_grad_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    mini_batch_size: Positive | None = None
    """Trajectories of one optimizer step, groups kept whole; default: the whole batch."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1, le=16_777_216)] = 16_384
    """Tokens of one forward and backward pass."""
    sequence_packing: bool = False
    """Several samples in one row, without padding. A probe at the start checks that the model supports it; else rows are padded."""


class TrainStrategySpec(Model):
    name: Literal["fsdp2"] = "fsdp2"


class ActorTrain(Model):
    """The policy under training."""

    strategy: TrainStrategySpec = TrainStrategySpec()
    training: Training = Training()


class Reference(Model):
    """The frozen policy that KL penalties measure the distance to."""

    path: Path | None = None
    """Name on the hub or a folder; default: the policy as it is at step 0, after the warm-up."""


class Critic(Model):
    """The value model of gae."""

    path: Path | None = None
    """Name on the hub or a folder of a causal language model; default: the actor's first weights. The value head starts at zero."""
    training: Training = Training()
    """miniBatchSize must be left out: the critic trains on the actor's mini-batches."""
    value_clip: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """The value moves at most this far from the one at the batch's start."""

    RULES = (
        Rule(
            "!has(self.training) || !has(self.training.miniBatchSize)",
            "the critic trains on the actor's mini-batches: leave miniBatchSize out",
            ".training.miniBatchSize",
            lambda c: c.training.mini_batch_size is None,
        ),
    )


class InferStrategySpec(Model):
    name: Literal["transformers"] = "transformers"


class Generating(Model):
    """Sampling during training: the full distribution, so that recorded log-probs are those of the sampling distribution."""

    RULES = (
        Rule(
            "self.allowTruncatedSampling || (self.topP == 1.0 && self.topK == 0 && self.minP == 0.0)",
            "topP, topK and minP sample from another distribution than the one that is trained: leave them out, or set "
            "allowTruncatedSampling: true to accept the bias",
            ".allowTruncatedSampling",
            lambda g: g.allow_truncated_sampling or (g.top_p == 1.0 and g.top_k == 0 and g.min_p == 0.0),
        ),
    )

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """0 = off."""
    min_p: Share = 0.0
    """Smallest probability of a token, relative to the likeliest one's."""
    allow_truncated_sampling: bool = False
    """Allow topP, topK and minP. Log-probs are then recorded and trained at temperature 1 over the full vocabulary, and the
    gradient is biased (metric rollout/truncated_sampling)."""


class ActorInfer(Model):
    """The engines that sample."""

    strategy: InferStrategySpec = InferStrategySpec()
    generating: Generating = Generating()
    validation_generating: ValidationGenerating = ValidationGenerating()


class WarmupDataset(DatasetSpec):
    """Prompts with the answers to imitate."""

    prompt_column: Annotated[str, Field(min_length=1, max_length=253)] = "prompt"
    """A text, or a list of chat messages."""
    answer_column: Annotated[str, Field(min_length=1, max_length=253)] = "answer"


class Warmup(Model):
    """Supervised warm-up before the first RL step."""

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
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Episodes or items of one step."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Default: actorTrain's."""
    observation_weight: Share = 0.0
    """Weight of the loss on what the environment says after an answer: the policy learns to foresee what actions do. 0 = answers only."""
    source: Literal["RandomValidActions", "Dataset"] = "RandomValidActions"
    """Episodes of the training environments answered with uniformly random valid actions (the format, never the way), or a data set."""
    dataset: WarmupDataset | None = None


class Eval(Model):
    """What `agenticrun eval` plays: the validation set, without training."""

    samples: Annotated[int, Field(ge=1, le=4096)] = 1
    """Episodes of each level."""
    pass_at: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=16)] = [1]
    """The k of pass@k (Chen et al. 2021, arXiv 2107.03374); each at most `samples`."""
    generating: ValidationGenerating | None = None
    """Sampling; default: actorInfer.validationGenerating."""

    RULES = (
        Rule(
            "self.passAt.all(k, k <= self.samples)",
            "pass@k needs at least k samples: raise samples",
            ".passAt",
            lambda e: max(e.pass_at) <= e.samples,
        ),
    )
