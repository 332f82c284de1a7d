"""AdamW with a learning-rate schedule, which never takes a step that would break the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from agenticrun_workers.trainer.ranks import Ranks, local, whole


class NonFiniteGradient(Exception):
    """Too many optimizer steps in a row were skipped; names the first parameter that broke."""


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
    max_skipped_steps: int = 10
    """Steps in a row that may be skipped for a gradient that is not finite; the next one raises `NonFiniteGradient`."""

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
        return self.learning_rate * (
            left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        )


class StepCounts:
    """Counts optimizer steps, taken and skipped, whatever optimizer takes them."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.steps = 0
        """Steps taken, which the schedule follows."""
        self.skipped = 0
        """Steps not taken: gradient not finite, or nothing to learn from."""
        self._broken = 0
        """Gradients in a row that were not finite."""

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return self.spec.rate(self.steps)

    @property
    def skip_budget_exhausted(self) -> bool:
        """Whether one more gradient that is not finite ends the run."""
        return self._broken >= self.spec.max_skipped_steps

    def skip(self) -> None:
        """Count a step that is not taken."""
        self.skipped += 1

    def record_step(self, norm: float, *, scheduled: bool, first_broken: str | None) -> None:
        """Count a step whose gradient had this norm: taken if it was finite, else skipped. `scheduled`: it moves the schedule on.

        Args:
            first_broken: under `skip_budget_exhausted` the first parameter whose gradient was not finite.

        Raises:
            NonFiniteGradient: more than `max_skipped_steps` times in a row.
        """
        if math.isfinite(norm):
            self.steps += scheduled
            self._broken = 0
            return
        self.skip()
        self._broken += 1
        if first_broken is not None:
            raise NonFiniteGradient(
                f"{self._broken} gradients in a row were not finite; in the last, that of {first_broken} is the first"
            )

    def counts(self) -> dict[str, int]:
        """What a checkpoint keeps beside the optimizer's state."""
        return {"steps": self.steps, "skipped": self.skipped, "broken": self._broken}

    def restore(self, counts: dict[str, int]) -> None:
        self.steps, self.skipped, self._broken = (
            counts["steps"],
            counts["skipped"],
            counts["broken"],
        )


class Optimizer(StepCounts):
    """Takes the optimizer steps of one module, and counts them."""

    def __init__(self, module: nn.Module, spec: OptimizerSpec, ranks: Ranks) -> None:
        super().__init__(spec)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.adamw = torch.optim.AdamW(
            trained,
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
        )
        self._module = module
        self._ranks = ranks

    def step(self, rate: float, *, scheduled: bool = True) -> float:
        """Clip the gradients, take a step at this rate and clear them. Collective. Returns the norm before clipping.

        A gradient that is not finite changes nothing but the count. `scheduled`: the step moves the schedule on.

        Raises:
            NonFiniteGradient: more than `max_skipped_steps` times in a row.
        """
        first_broken = self._first_broken() if self.skip_budget_exhausted else None
        norm = float(
            whole(nn.utils.clip_grad_norm_(self._module.parameters(), self.spec.max_grad_norm))
        )
        if math.isfinite(norm):
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        self.adamw.zero_grad()
        self.record_step(norm, scheduled=scheduled, first_broken=first_broken)
        return norm

    def move(self, device: torch.device) -> None:
        """The optimizer's moments go to this device. Step counters stay where AdamW wants them."""
        for state in self.adamw.state.values():
            for name, value in state.items():
                if value.dim():
                    state[name] = value.to(device)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients so far, whole, by parameter name; they are cleared. Collective."""
        found = {
            name: whole(p.grad).clone()
            for name, p in self._module.named_parameters()
            if p.grad is not None
        }
        self.adamw.zero_grad()
        return found

    def _first_broken(self) -> str:
        """The first parameter with a gradient that is not finite on any rank."""
        named = [
            (name, parameter.grad)
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None
        ]
        broken = self._ranks.max(
            [float(not local(gradient).isfinite().all()) for _, gradient in named]
        )
        return next(
            (name for (name, _), flag in zip(named, broken, strict=True) if flag),
            "their joint norm",
        )
