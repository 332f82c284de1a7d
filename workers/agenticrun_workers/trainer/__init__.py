"""Trainers: samples in, better weights out."""

from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.strategy import (
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
from agenticrun_workers.trainer.torch_critic import TorchCritic
from agenticrun_workers.trainer.torch_policy import TorchPolicy
from agenticrun_workers.trainer.torch_reference import TorchReference

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
