"""Ranks that train and save a small sharded module, and resume from other numbers of ranks.

As a program it is one rank. Its arguments are tasks: `train=FOLDER`, `resume=FOLDER`,
`damage=FOLDER` or `other=FOLDER`. It returns the result of each task.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from agenticrun_workers.storage import Folder
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.checkpoint import HostBuffers, Snapshot, SnapshotWriter
from agenticrun_workers.trainer.ranks import Ranks, whole
from agenticrun_workers.trainer.sharded_module import FsdpOptions, shard
from rank_programs import take_part
from waiting import eventually

STEPS = 6
SAVED_AT = 3


@dataclass
class Seen:
    """Result of a training: whole weights, the next random numbers and the error, if any.

    `next_weights` are those after the first step since the checkpoint.
    """

    next_weights: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    draws: list[float]
    progress: dict[str, int]
    error: str = ""


class Trainer:
    """AdamW on a module with sizes that no number of ranks divides.

    All ranks share the batch of a step.
    """

    def __init__(self, width: int = 7) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
        self._ranks = Ranks(torch.device("cpu"))
        device = torch.device("cpu")
        layers = [self.module[0], self.module[2]]
        shard(self.module, layers, self._ranks, device, torch.float32, FsdpOptions())
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.05, weight_decay=0.1)
        torch.manual_seed(1000 + self._ranks.rank)
        self.progress = {"steps": 0}
        self.buffers = HostBuffers()

    def step(self) -> None:
        draw = torch.Generator().manual_seed(self.progress["steps"])
        inputs, targets = torch.randn(8, 5, generator=draw), torch.randn(8, 3, generator=draw)
        loss = (self.module(inputs) - targets).square().mean() / self._ranks.size
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["steps"] += 1

    def snapshot(self) -> Snapshot:
        return checkpoint.snapshot(self.module, self.optimizer, self.progress, self.buffers)

    def reserve_snapshot(self) -> Callable[[], None]:
        return checkpoint.reserve(self.module, self.optimizer, self.buffers)

    def save(self, folder: str) -> None:
        checkpoint.save(folder, self.snapshot())

    def load(self, folder: str) -> None:
        self.progress = checkpoint.load(folder, self.module, self.optimizer, self.progress)

    def weights(self) -> dict[str, np.ndarray]:
        return {
            name: whole(parameter.detach()).numpy().copy()
            for name, parameter in self.module.named_parameters()
        }

    def finish(self) -> Seen:
        """Train from the checkpoint's step to the end."""
        progress = dict(self.progress)
        draws = torch.rand(2).tolist()
        self.step()
        next_weights = self.weights()
        while self.progress["steps"] < STEPS:
            self.step()
        return Seen(next_weights, self.weights(), draws, progress)


def run(task: str, folder: str) -> Seen:
    """One task on this rank."""
    trainer = Trainer(width=9 if task == "other" else 7)
    if task == "train":
        while trainer.progress["steps"] < SAVED_AT:
            trainer.step()
        torch.rand(3)
        with closing(SnapshotWriter()) as writer, patch.object(checkpoint, "save", slow_save):
            writer.reserve(trainer)
            writer.write("module", trainer, folder)
            seen = trainer.finish()
            assert not writer.is_durable("module")
            eventually(lambda: writer.is_durable("module"), 60, "it is written")
        return seen
    if task == "damage":
        trainer.save(folder)
        if dist.get_rank() == 0:
            shard = Folder(folder).read("__1_0.distcp")
            Folder(folder).write("__1_0.distcp", shard[:-1] + bytes([shard[-1] ^ 1]))
        dist.barrier()
    before = trainer.weights()
    try:
        trainer.load(folder)
    except Exception as error:
        return Seen(before, trainer.weights(), [], {}, f"{type(error).__name__}: {error}")
    return trainer.finish()


def slow_save(*arguments: Any, save: Callable[..., None] = checkpoint.save) -> None:
    """Write, while the ranks train on."""
    time.sleep(1.0)
    save(*arguments)


def main(*tasks: str) -> dict[str, dict[str, Any]]:
    """Do the tasks together with the other ranks."""
    return {task: vars(run(*task.split("=", 1))) for task in tasks}


if __name__ == "__main__":
    take_part(main)
