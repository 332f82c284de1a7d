"""`spec.pipeline.envs` and how many of them play side by side: environments, their data, their judges, and groups."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agenticrun_api.base import Model, Open, PlugIn, Rule, Tag

Path = Annotated[str, Field(min_length=1, max_length=1024)]


class DatasetSpec(Model):
    """Items that episodes are about: JSONL, Parquet or CSV files, a folder saved by Hugging Face datasets, or a name on the hub."""

    path: Path
    """A file, a glob, a folder or a hub name, that every env pod can read."""
    split: Annotated[str, Field(min_length=1, max_length=253)] = "train"
    val_split: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Split that validation plays; without it `valShare` of `split` is held out for validation."""
    val_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    shuffle: bool = True
    """A new order in each epoch, drawn from pipeline.seed."""
    columns: Annotated[dict[str, Annotated[str, Field(max_length=253)]], Field(max_length=64)] = {}
    """New name -> column of the data, for environments that expect other names."""


class AgentSpec(Model):
    """Who drives an environment."""

    type: PlugIn = "multi_turn"
    """multi_turn: one growing conversation (StarPO). step_wise: a new prompt each turn, with the newest turns as history (GiGPO).
    math_multi_turn: AReaL's math agent. outside: a program of any framework, through an OpenAI-compatible endpoint. Or module:Class."""
    config: Open = {}
    """Keyword arguments of the agent."""


class ValidationGenerating(Model):
    """Sampling during validation. Temperature 0 is greedy."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """0 = off."""


class EnvSpec(Model):
    """One kind of environment, named by its tag."""

    tag: Tag
    type: PlugIn
    """frozen_lake, sokoban, webshop, math, python_tool, gymnasium, or `module:Class` from spec.code or the image."""
    config: Open = {}
    """Keyword arguments of the environment."""
    dataset: DatasetSpec | None = None
    """Each episode is about one item: the k-th group of this tag plays item k of the shuffled epochs."""
    max_steps: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Turn limit of an episode."""
    max_tokens_per_step: Annotated[int, Field(ge=1, le=131_072)] = 128
    """Token limit of one response, end-of-turn token included."""
    step_timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """A reset or step that takes longer ends the episode with stop reason timeout. Default: 60, none in deterministic mode."""
    isolated: bool = False
    """Each environment in a process of its own: one that crashes, hangs in C code or leaks costs its own episode, and not the env worker
    with all that it plays. Costs 15 ms and some MB per environment, and 0.1 ms per call."""
    format_penalty: Annotated[float, Field(ge=-1e6, le=0)] = 0.0
    """Added to the reward of each turn whose answer holds no valid action."""
    agent: AgentSpec = AgentSpec()
    validation_generating: ValidationGenerating | None = None
    """Sampling of this environment's validation episodes; default: actorInfer.validationGenerating."""


class RewardSpec(Model):
    """A judge of finished episodes. What it says, times `weight`, is added to the reward of the last turn."""

    name: Tag
    type: PlugIn
    """llm_judge (an OpenAI-compatible endpoint), reward_model (a Hugging Face sequence classifier), or module:function."""
    config: Open = {}
    """Keyword arguments of the judge."""
    tags: Annotated[list[Tag], Field(max_length=64)] = []
    """Environments that it judges; empty: all."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """For one call. An episode whose judge fails or is late counts as env_error and is played again."""
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Episodes judged in one call."""
    cache: bool = True
    """Equal episodes are judged once."""


class GroupFilter(Model):
    """Finished groups that it refuses are not trained on; others are played instead."""

    type: PlugIn = "zero_variance"
    """zero_variance (all rewards of the group equal), or module:function of a list of rewards, True to refuse."""
    max_rejected: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Groups that may be refused for one batch, before the run fails."""


class EnvGroups(Model):
    """How many episodes run side by side, and of which environments."""

    RULES = (
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
            "groups does not divide evenly over the tags: set partition",
            ".groups",
            lambda e: e.partition is not None or e.groups % len(e.tags) == 0,
        ),
    )

    groups: Annotated[int, Field(ge=1, le=65_536)]
    """Groups that run at the same time."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """Episodes of the same level in a group."""
    tags: Annotated[list[Tag], Field(min_length=1, max_length=64)]
    partition: (
        Annotated[list[Annotated[int, Field(ge=0, le=65_536)]], Field(max_length=64)] | None
    ) = None
    """Groups of each tag; without it they are divided evenly."""

    def shares(self) -> dict[str, int]:
        """Groups of each tag."""
        parts = self.partition or [self.groups // len(self.tags)] * len(self.tags)
        return dict(zip(self.tags, parts, strict=True))


class TrainEnvGroups(EnvGroups):
    """Groups of training episodes."""

    group_size_redundancy: Annotated[int, Field(ge=0, le=4096)] = 0
    """Members beyond groupSize: the first groupSize to finish make the group. This prefers short episodes (metric group/length_bias)."""
    max_rerolls: Annotated[int, Field(ge=0, le=100)] = 2
    """How often an episode that cannot be trained on (env_error, timeout, aborted) is played again."""
    max_envs_per_worker: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Episodes that one env worker process runs at a time."""
    group_filter: GroupFilter | None = None
