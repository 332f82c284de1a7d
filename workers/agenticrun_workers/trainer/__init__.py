"""Trainers: samples in, better weights out."""

from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.checkpoint import CheckpointMismatch
from agenticrun_workers.trainer.critic import CriticTrainer, ValueLossSpec, Values
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import NonFiniteGradient, OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.samples import Sample

__all__ = [
    "CheckpointMismatch",
    "CriticTrainer",
    "LossSpec",
    "NonFiniteGradient",
    "OptimizerSpec",
    "PolicyTrainer",
    "ReferencePolicy",
    "Sample",
    "ValueLossSpec",
    "Values",
    "fsdp2_policy",
]
