"""`spec.pipeline.envs`: environments, their data sets, judges and groups."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agenticrun_api.base import Model, Open, PlugIn, Rule, Tag, unique

Path = Annotated[str, Field(min_length=1, max_length=1024)]


class DatasetSpec(Model):
    """A data set with one item per episode: JSONL, Parquet or CSV files, a folder saved by Hugging
    Face datasets, or a name on the Hugging Face Hub. JSON values are those of the file, and fields
    of CSV files are text.
    """

    path: Path
    """A file, glob or folder on every env pod, or a name on the Hugging Face Hub. JSON and CSV
    files may end with .gz or .zst."""
    split: Annotated[str, Field(min_length=1, max_length=253)] = "train"
    """Split for training."""
    val_split: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Split for validation. Default: `valShare` of `split` is held out."""
    val_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of `split` that is held out for validation without `valSplit`. Nothing is held out if
    valEnvs does not have the tag, or of a warm-up without valEnvs."""
    shuffle: bool = True
    """Shuffle in each epoch, with a seed from pipeline.seed."""
    columns: Annotated[dict[str, Annotated[str, Field(max_length=253)]], Field(max_length=64)] = {}
    """Map from new names to columns of the data, for environments that expect other names."""
    types: Annotated[dict[str, Literal["int", "float", "bool"]], Field(max_length=64)] = {}
    """Types of columns of CSV files, which are text otherwise. An empty field becomes None."""


class AgentSpec(Model):
    """The agent that acts in an environment."""

    type: PlugIn = "multi_turn"
    """multi_turn: one growing conversation (StarPO). step_wise: a new prompt each turn, with the
    newest turns as history (GiGPO). math_multi_turn: AReaL's math agent. outside: any program that
    calls an OpenAI-compatible endpoint. Or module:Class."""
    config: Open = {}
    """Keyword arguments of the agent."""


class ValidationGenerating(Model):
    """Sampling during validation. Temperature 0 is greedy."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability. 1 = off."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """0 = off."""


class EnvSpec(Model):
    """One kind of environment, named by its tag."""

    tag: Tag
    """Name of this entry: in `trainEnvs`, `valEnvs`, `rewards` and metrics (`env/<tag>/...`)."""
    type: PlugIn
    """frozen_lake, sokoban, webshop, math, python_tool, gymnasium, openenv, mcp, reasoning_gym,
    textarena, or `module:Class` from spec.code or the image."""
    config: Open = {}
    """Keyword arguments of the environment."""
    dataset: DatasetSpec | None = None
    """Each episode uses one item: the k-th group of this tag gets item k of the shuffled epochs."""
    max_steps: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Turn limit of an episode."""
    max_tokens_per_step: Annotated[int, Field(ge=1, le=131_072)] = 128
    """Token limit of one response, including the end-of-turn token."""
    step_timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """A longer reset or step ends the episode with stop reason timeout. Default: 60; no limit in
    deterministic mode."""
    isolated: bool = False
    """Run each environment in its own process, so that a crash, a hang in C code or a memory leak
    costs its episode only. Costs 15 ms and some MB per environment, and 0.1 ms per call."""
    max_concurrent: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Concurrent episodes of this environment in one env worker; others wait. A server needs
    maxConcurrent times roles.env.replicas places. Default: as trainEnvs.maxEnvsPerWorker allows."""
    format_penalty: Annotated[float, Field(ge=-1e6, le=0)] = 0.0
    """Added to the reward of each turn without a valid action."""
    agent: AgentSpec = AgentSpec()
    validation_generating: ValidationGenerating | None = None
    """Sampling in this environment's validation. Default: actorInfer.validationGenerating."""


class RewardSpec(Model):
    """A judge of finished episodes. Its score times `weight` is added to the reward of the last
    turn.
    """

    name: Tag
    """Name of the judge, in metrics: `judge/<name>/...`."""
    type: PlugIn
    """llm_judge (an OpenAI-compatible endpoint), reward_model (a Hugging Face sequence classifier)
    or module:function."""
    config: Open = {}
    """Keyword arguments of the judge."""
    tags: Annotated[list[Tag], Field(max_length=64)] = []
    """Tags of the environments to judge; empty: all."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor of the score."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Time limit of one call. If the judge fails or exceeds it, the episode counts as env_error and
    is run again."""
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Episodes judged in one call."""
    cache: bool = True
    """Judge equal episodes only once."""


class GroupFilter(Model):
    """Filter of finished groups. Rejected groups are not trained on; others are run instead."""

    type: PlugIn = "zero_variance"
    """zero_variance (rejects groups whose rewards are equal up to rounding), or module:function,
    which gets the list of rewards and returns True to reject."""
    max_rejected: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Groups that may be rejected for one batch before the run fails."""


class EnvGroups(Model):
    """Concurrent episodes, and their environments."""

    RULES = (
        unique("tags", message="tags names a tag twice"),
        Rule(
            "!has(self.partition) || size(self.partition) == size(self.tags)",
            "partition needs one number per tag",
            ".partition",
            lambda e: e.partition is None or len(e.partition) == len(e.tags),
        ),
        Rule(
            "!has(self.partition) || self.partition.sum() == self.groups",
            "partition must add up to groups",
            ".partition",
            lambda e: e.partition is None or sum(e.partition) == e.groups,
        ),
        Rule(
            "has(self.partition) || self.groups % size(self.tags) == 0",
            "groups is not a multiple of the number of tags: set partition",
            ".groups",
            lambda e: e.partition is not None or e.groups % len(e.tags) == 0,
        ),
    )

    groups: Annotated[int, Field(ge=1, le=65_536)]
    """Groups that run at the same time."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """Episodes in a group, all of the same level."""
    tags: Annotated[list[Tag], Field(min_length=1, max_length=64)]
    """Tags of the environments to play."""
    partition: (
        Annotated[list[Annotated[int, Field(ge=0, le=65_536)]], Field(max_length=64)] | None
    ) = None
    """Groups of each tag. Default: divided evenly."""

    def shares(self) -> dict[str, int]:
        """Return the number of groups of each tag."""
        parts = self.partition or [self.groups // len(self.tags)] * len(self.tags)
        return dict(zip(self.tags, parts, strict=True))


class TrainEnvGroups(EnvGroups):
    """Groups of training episodes."""

    group_size_redundancy: Annotated[int, Field(ge=0, le=4096)] = 0
    """Additional episodes per group: the first groupSize to finish form the group. This favours
    short episodes (metric group/length_bias)."""
    max_rerolls: Annotated[int, Field(ge=0, le=100)] = 2
    """Maximum reruns of an episode that cannot be trained on (env_error, timeout, aborted)."""
    max_envs_per_worker: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Maximum number of episodes that one env worker process runs at a time."""
    group_filter: GroupFilter | None = None
