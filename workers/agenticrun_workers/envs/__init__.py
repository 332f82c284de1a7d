"""Environments: gym-like, text in and text out."""

from agenticrun_workers.envs.env import Env, HasVocabulary, Renders, StepResult, TakesItem
from agenticrun_workers.envs.frozen_lake import FrozenLake
from agenticrun_workers.envs.registry import EnvConfigError, EnvImportError, EnvNotFound, make_env, register_env

__all__ = [
    "Env",
    "EnvConfigError",
    "EnvImportError",
    "EnvNotFound",
    "FrozenLake",
    "HasVocabulary",
    "Renders",
    "StepResult",
    "TakesItem",
    "make_env",
    "register_env",
]
