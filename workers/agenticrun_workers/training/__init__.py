"""Trainers: samples in, better weights out."""

from agenticrun_workers.training.optimizer import OptimizerSpec
from agenticrun_workers.training.strategy import (
    Checkpointed,
    CheckpointMismatch,
    CriticStrategy,
    LossSpec,
    NonFiniteGradient,
    ReferenceStrategy,
    Sample,
    TrainStrategy,
    ValueLossSpec,
    Values,
)
from agenticrun_workers.training.torch_critic import TorchCritic
from agenticrun_workers.training.torch_policy import TorchPolicy
from agenticrun_workers.training.torch_reference import TorchReference

__all__ = [
    "CheckpointMismatch",
    "Checkpointed",
    "CriticStrategy",
    "LossSpec",
    "NonFiniteGradient",
    "OptimizerSpec",
    "ReferenceStrategy",
    "Sample",
    "TorchCritic",
    "TorchPolicy",
    "TorchReference",
    "TrainStrategy",
    "ValueLossSpec",
    "Values",
]
