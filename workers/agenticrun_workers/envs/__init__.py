"""Environments: gym-like, text in and text out."""

from agenticrun_workers.envs.calls import EnvCalls, Start
from agenticrun_workers.envs.env import (
    Closes,
    Env,
    EnvConfigError,
    EnvFault,
    EnvImportError,
    EnvNotFound,
    HasVocabulary,
    MetricMode,
    NoColumn,
    Renders,
    Row,
    StepResult,
    TakesItem,
    make_env,
    register_env,
)
from agenticrun_workers.envs.frozen_lake import FrozenLake
from agenticrun_workers.envs.gym import GymnasiumEnv
from agenticrun_workers.envs.math import MathEnv, MathSingleStep
from agenticrun_workers.envs.mcp import McpTools
from agenticrun_workers.envs.openenv import make_openenv
from agenticrun_workers.envs.python_tool import PythonTool
from agenticrun_workers.envs.reasoning_gym import ReasoningGym
from agenticrun_workers.envs.service import EnvironmentService
from agenticrun_workers.envs.sokoban import Sokoban
from agenticrun_workers.envs.textarena import TextArena
from agenticrun_workers.envs.webshop import WebShop

__all__ = [
    "Closes",
    "Env",
    "EnvCalls",
    "EnvConfigError",
    "EnvFault",
    "EnvImportError",
    "EnvNotFound",
    "EnvironmentService",
    "FrozenLake",
    "GymnasiumEnv",
    "HasVocabulary",
    "MathEnv",
    "MathSingleStep",
    "McpTools",
    "MetricMode",
    "NoColumn",
    "PythonTool",
    "ReasoningGym",
    "Renders",
    "Row",
    "Sokoban",
    "Start",
    "StepResult",
    "TakesItem",
    "TextArena",
    "WebShop",
    "make_env",
    "make_openenv",
    "register_env",
]
