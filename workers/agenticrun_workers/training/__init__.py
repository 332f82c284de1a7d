"""Trainers: samples in, better weights out."""

from agenticrun_workers.training.optimizer import OptimizerSpec
from agenticrun_workers.training.strategy import CheckpointMismatch, LossSpec, Sample, TrainStrategy
from agenticrun_workers.training.torch_strategy import TorchStrategy

__all__ = ["CheckpointMismatch", "LossSpec", "OptimizerSpec", "Sample", "TorchStrategy", "TrainStrategy"]
