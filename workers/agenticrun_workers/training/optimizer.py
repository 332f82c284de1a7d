"""AdamW with a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Numbers of the optimizer; steps count optimizer steps of `train_step`."""

    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    """When linear and cosine have fallen to zero; they need it."""
    supervised_learning_rate: float | None = None
    """For `supervised_step`, without a schedule; default: `learning_rate`."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule != "constant" and not self.total_steps:
            raise ValueError(f"the schedule {self.schedule} needs total_steps")

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step number `step` (from 0)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.learning_rate
        left = max(0.0, (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps))
        return self.learning_rate * (left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def build_optimizer(parameters: Iterable[Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW on these parameters."""
    return torch.optim.AdamW(
        list(parameters),
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.epsilon,
        weight_decay=spec.weight_decay,
    )
