"""AdamW with a learning-rate schedule, which skips steps that would break the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from agenticrun_workers.errors import ScheduleEnded
from agenticrun_workers.models.devices import HostCopies
from agenticrun_workers.trainer.ranks import Ranks, local, whole


class NonFiniteGradient(Exception):
    """Too many optimizer steps in a row were skipped; names the first parameter that broke."""


@dataclass(frozen=True, slots=True)
class Decay:
    """The falling part of a linear or cosine schedule; steps are optimizer steps."""

    start: int
    end: int
    """Step at which the rate is zero."""
    left: Fraction = Fraction(1)
    """Share of the whole fall that is left at `start`."""

    def at(self, step: int) -> Fraction:
        """Return the share of the fall that is left at a step: 1 before the fall, 0 after it."""
        if step <= self.start:
            return self.left
        return self.left * max(0, self.end - step) / max(1, self.end - self.start)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Settings of the optimizer; steps are optimizer steps of `train_step`."""

    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    """Step at which the linear and cosine schedules reach zero; these schedules require it."""
    supervised_learning_rate: float | None = None
    """Learning rate of `supervised_step`, without a schedule; default: `learning_rate`."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 10
    """Steps in a row that may be skipped because the gradient is not finite.

    The next such step raises `NonFiniteGradient`.
    """

    def __post_init__(self) -> None:
        if self.schedule != "constant" and not self.total_steps:
            raise ValueError(f"the schedule {self.schedule} needs total_steps")

    @property
    def decay(self) -> Decay | None:
        """The fall of the rate as it is planned at the start; None for a constant rate."""
        if self.schedule == "constant" or self.total_steps is None:
            return None
        return Decay(self.warmup_steps, self.total_steps)

    def rate(self, step: int, decay: Decay | None = None) -> float:
        """Return the learning rate of optimizer step number `step` (from 0).

        Args:
            decay: default: the one planned at the start.
        """
        decay = decay or self.decay
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if decay is None:
            return self.learning_rate
        left = float(decay.at(step))
        return self.learning_rate * (
            left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        )


class StepCounts:
    """Counter of optimizer steps, taken and skipped; independent of the optimizer."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.steps = 0
        """Steps of the schedule so far: those taken, and those without anything to learn from."""
        self.skipped = 0
        """Steps skipped because the gradient was not finite."""
        self._broken = 0
        """Number of the latest gradients in a row that were not finite."""
        self._decay = spec.decay

    @property
    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return self.spec.rate(self.steps, self._decay)

    @property
    def falls_from(self) -> float:
        """Return the rate from which the schedule falls on: its peak until the fall begins."""
        return self.spec.rate(max(self.steps, self.spec.warmup_steps), self._decay)

    def stretch(self, steps_left: int) -> None:
        """Plan the rest of the schedule again: the rate falls from here to zero in that many steps.

        Args:
            steps_left: number of steps until the rate is zero; without any nothing changes.

        Raises:
            ScheduleEnded: the rate is zero already.
        """
        if self._decay is None or steps_left <= 0:
            return
        if not (left := self._decay.at(self.steps)):
            raise ScheduleEnded(
                f"the {self.spec.schedule} schedule has brought the learning rate to 0"
            )
        self._decay = Decay(max(self.steps, self._decay.start), self.steps + steps_left, left)

    @property
    def skip_budget_exhausted(self) -> bool:
        """True if one more gradient that is not finite ends the run."""
        return self._broken >= self.spec.max_skipped_steps

    def pass_over(self) -> None:
        """Move the schedule past a step that has nothing to learn from.

        So the learning rate reaches zero with the last step of the run.
        """
        self.steps += 1

    def record_step(self, norm: float, *, scheduled: bool, first_broken: str | None) -> None:
        """Count a step as taken if its gradient was finite, else as skipped.

        Args:
            norm: of the gradient.
            scheduled: the step moves the schedule on.
            first_broken: the first parameter with a gradient that is not finite; needed only under
                `skip_budget_exhausted`.

        Raises:
            NonFiniteGradient: more than `max_skipped_steps` times in a row.
        """
        if math.isfinite(norm):
            self.steps += scheduled
            self._broken = 0
            return
        self.skipped += 1
        self._broken += 1
        if first_broken is not None:
            raise NonFiniteGradient(
                f"{self._broken} gradients in a row were not finite; "
                f"in the last, that of {first_broken} is the first. Lower the learning rate, or "
                "train in float32"
            )

    def counts(self) -> dict[str, int]:
        """Return the counters that a checkpoint stores besides the optimizer's state."""
        counts = {"steps": self.steps, "skipped": self.skipped, "broken": self._broken}
        if self._decay is None:
            return counts
        return counts | {
            "decay_start": self._decay.start,
            "decay_end": self._decay.end,
            "decay_left": self._decay.left.numerator,
            "decay_left_of": self._decay.left.denominator,
        }

    def restore(self, counts: dict[str, int]) -> None:
        """Set the counters; a schedule that does not fall stays constant."""
        self.steps, self.skipped, self._broken = (
            counts["steps"],
            counts["skipped"],
            counts["broken"],
        )
        if self._decay is not None:
            left = Fraction(counts["decay_left"], counts["decay_left_of"])
            self._decay = Decay(counts["decay_start"], counts["decay_end"], left)


class Optimizer(StepCounts):
    """Optimizer of one module, which also counts its steps."""

    def __init__(self, module: nn.Module, spec: OptimizerSpec, ranks: Ranks) -> None:
        super().__init__(spec)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.adamw = torch.optim.AdamW(
            trained,
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
            fused=True,  # without temporary tensors of the size of the model, on the CPU too
        )
        self._module = module
        self._ranks = ranks
        self._host_copies = HostCopies()

    def step(self, rate: float, *, scheduled: bool = True) -> float:
        """Clip the gradients, take a step at this rate and clear the gradients. Collective.

        A gradient that is not finite changes only the count of steps.

        Args:
            rate: learning rate.
            scheduled: the step moves the schedule on.

        Returns:
            the norm of the gradient before clipping.

        Raises:
            NonFiniteGradient: more than `max_skipped_steps` times in a row.
        """
        first_broken = self._first_broken() if self.skip_budget_exhausted else None
        norm = float(self._clip())
        if math.isfinite(norm):
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        self.adamw.zero_grad()
        self.record_step(norm, scheduled=scheduled, first_broken=first_broken)
        return norm

    def _clip(self) -> Tensor:
        """Clip the gradients and return their norm before. Collective."""
        of_meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
                of_meshes.setdefault(mesh, []).append(parameter)
        largest = self.spec.max_grad_norm
        if len(of_meshes) < 2:
            return whole(nn.utils.clip_grad_norm_(self._module.parameters(), largest))
        # Divided experts are on a mesh of their own, and torch adds norms of one mesh only.
        square = torch.zeros((), dtype=torch.float64)
        for mesh, part in of_meshes.items():
            gradients = [parameter.grad for parameter in part if parameter.grad is not None]
            mine = nn.utils.get_total_norm([local(each) for each in gradients]).double() ** 2
            assert isinstance(gradients[0], DTensor)
            placements = [
                Replicate() if placement.is_replicate() else Partial()
                for placement in gradients[0].placements
            ]
            square = square.to(mine.device) + whole(DTensor.from_local(mine, mesh, placements))
        norm = square.sqrt()
        for part in of_meshes.values():
            nn.utils.clip_grads_with_norm_(part, largest, norm)
        return norm

    def offload(self) -> None:
        """Move the optimizer's moments to host memory; step counters stay."""
        self._move(self._host_copies.filling())

    def onload(self, device: torch.device) -> None:
        """Move the optimizer's moments to a device."""
        self._move(lambda tensor: tensor.to(device))

    def _move(self, moved: Callable[[Tensor], Tensor]) -> None:
        for state in self.adamw.state.values():
            for name, value in state.items():
                if value.dim():
                    state[name] = moved(value)

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradients so far, by parameter name, and clear them. Collective."""
        found = {
            name: whole(p.grad).clone()
            for name, p in self._module.named_parameters()
            if p.grad is not None
        }
        self.adamw.zero_grad()
        return found

    def _first_broken(self) -> str:
        """Return the first parameter with a gradient that is not finite on any rank."""
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
