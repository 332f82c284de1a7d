"""Trainers: samples in, better weights out."""

from agenticrun_workers.trainer.critic import TorchCritic
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import TorchPolicy
from agenticrun_workers.trainer.reference import TorchReference
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
