"""Stages, their figures, and the machine that they run on."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from agenticrun_workers.models.devices import claim_device


class Verdict(StrEnum):
    """Result of a stage."""

    PASSED = "passed"
    FAILED = "failed"
    NEEDS_GPU = "needs a GPU"
    """It ran to its end on a CPU, at tiny size. That proves nothing about a GPU."""


@dataclass(frozen=True)
class Figure:
    """One measured number, and the bounds within which it must be."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def within(self) -> bool:
        """False also for NaN."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("at least", self.at_least), ("at most", self.at_most))
            if bound is not None
        ]
        wanted = f" ({', '.join(bounds)})" if bounds else ""
        return f"{self.name}: {self.value:.4g}{f' {self.unit}' if self.unit else ''}{wanted}"


@dataclass
class Bench:
    """The device of a stage, and its report.

    Attributes:
        device: the GPU, or the CPU in a dry run.
        folder: for files; it is removed afterwards.
        figures: in the order in which they were measured.
        notes: texts for the report, such as versions.
    """

    device: torch.device
    folder: Path
    figures: list[Figure] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, real: int, tiny: int) -> int:
        """Return a size for a GPU, or the one that a CPU computes in a moment."""
        return real if self.gpu else tiny

    def exact(self, name: str, value: float, unit: str = "", *, at_most: float) -> None:
        """Report an error, which has the same bound on every device."""
        self.figures.append(Figure(name, float(value), unit, at_most=at_most))

    def measure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Report a time, rate or size. A CPU need not keep its bounds."""
        bounds = (at_least, at_most) if self.gpu else (None, None)
        self.figures.append(Figure(name, float(value), unit, *bounds))

    def seconds(self, work: Callable[[], object], repeat: int = 3) -> float:
        """Return the shortest time of a call, after a first one that warms up."""
        work()
        times = []
        for _ in range(self.size(repeat, 1)):
            self.wait()
            begun = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - begun)
        return min(times)

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Return the bytes of all tensors on the GPU; 0 on a CPU."""
        gc.collect()
        return torch.cuda.memory_allocated() if self.gpu else 0

    def peak(self) -> int:
        """Return the most bytes on the GPU since `forget_peak`; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() if self.gpu else 0

    def forget_peak(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


Stage = Callable[[Bench], None]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, in float64."""
    expected = expected.detach().double()
    difference = found.detach().to(expected.device).double() - expected
    return float(difference.norm() / expected.norm().clamp(min=1e-300))


@dataclass(frozen=True)
class Outcome:
    """The result of a stage, which outlives its process."""

    stage: str
    verdict: Verdict
    seconds: float
    device: str
    figures: tuple[Figure, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """Traceback, or why there is no result."""

    @property
    def outside(self) -> list[Figure]:
        """Return the figures that are not within their bounds."""
        return [figure for figure in self.figures if not figure.within]

    def write(self, file: Path) -> None:
        """Write it whole or not at all: the process may be killed."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1))
        os.replace(part, file)

    @staticmethod
    def read(file: Path) -> Outcome:
        value = json.loads(file.read_text())
        figures = tuple(Figure(**figure) for figure in value.pop("figures"))
        return Outcome(**{**value, "verdict": Verdict(value["verdict"]), "figures": figures})


def run_stage(name: str, stage: Stage, folder: Path, *, gpu: bool) -> Outcome:
    """Run a stage in this process. An exception makes it fail.

    Args:
        name: of the stage.
        stage: the stage.
        folder: for its files.
        gpu: False runs it on the CPU, at tiny size.
    """
    begun, error = time.monotonic(), ""
    bench = Bench(torch.device("cpu"), folder)
    try:
        bench.device = claim_device("gpu-check", ["0"] if gpu else [])
        stage(bench)
    except Exception:  # one stage must not hide the others
        error = traceback.format_exc()
    failed = error or not bench.figures or not all(figure.within for figure in bench.figures)
    whole = Verdict.PASSED if bench.gpu else Verdict.NEEDS_GPU
    return Outcome(
        name,
        Verdict.FAILED if failed else whole,
        round(time.monotonic() - begun, 1),
        torch.cuda.get_device_name(bench.device) if bench.gpu else "CPU",
        tuple(bench.figures),
        bench.notes,
        error,
    )
