"""Environments: gym-like, text in and text out."""

from agenticrun_workers.envs.calls import EnvCalls, EnvFault, Start
from agenticrun_workers.envs.env import Env, HasVocabulary, MetricMode, Renders, StepResult, TakesItem
from agenticrun_workers.envs.frozen_lake import FrozenLake
from agenticrun_workers.envs.registry import EnvConfigError, EnvImportError, EnvNotFound, make_env, register_env
from agenticrun_workers.envs.sokoban import Sokoban

__all__ = [
    "Env",
    "EnvCalls",
    "EnvConfigError",
    "EnvFault",
    "EnvImportError",
    "EnvNotFound",
    "FrozenLake",
    "HasVocabulary",
    "MetricMode",
    "Renders",
    "Sokoban",
    "Start",
    "StepResult",
    "TakesItem",
    "make_env",
    "register_env",
]
