"""Actors at both ends of a weight sync: trainers with chosen weights, engines that show theirs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agenticrun_api import Pipeline
from agenticrun_api.training import WeightSync as Spec
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.launch import (
    ActorDied,
    ActorHandle,
    ActorOptions,
    ActorUnavailable,
    Launcher,
)
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.lora import LoraSpec, add_lora
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.types import GenerationRequest, SamplingParams
from agenticrun_workers.weights.node import SHARED_MEMORY, AdapterNode, NodeWeights
from agenticrun_workers.weights.sync import Receiver, SyncReport, WeightSync
from waiting import eventually_in_loop

WORDS = tuple("abcdefghijklmnop")
BUCKET_BYTES = 8192


def spawn(
    cls: type, *arguments: Any, calls: int = 100, launcher: Launcher | None = None
) -> ActorHandle[Any]:
    """Start an actor outside of a run, with so many concurrent calls. Default: on Ray."""
    options = ActorOptions(max_concurrency=calls)
    return (launcher or RayLauncher()).start(options, cls, *arguments)


async def killed(actor: Any) -> None:
    """Kill the actor of a node, and wait until it is dead."""
    actor.kill()
    while True:
        try:
            await actor.call(lambda actor: actor.folder())
        except ActorUnavailable:
            pass
        except ActorDied:
            return
        await asyncio.sleep(0.05)


def left_in_memory(run: str) -> list[str]:
    """Return the folders of a run in this machine's shared memory."""
    return [path.name for path in SHARED_MEMORY.glob(f"agenticrun-{run}-*")]


async def all_gone(run: str, left: int = 0) -> None:
    """Wait until only `left` folders of the run are in memory."""
    await eventually_in_loop(
        lambda: len(left_in_memory(run)) == left, 60, f"{left} folders of the run are in memory"
    )


def make_model(folder: Path) -> None:
    """Make a model with about 50 kB of parameters."""
    initialize_model(
        folder,
        InitializeSpec(
            WORDS, "qwen3", hidden_size=32, intermediate_size=64, heads=4, initializer_range=0.4
        ),
    )


def version_of(folder: Path, version: int, share: float = 1.0) -> dict[str, Tensor]:
    """Return the parameters of a version: each version changes `share` of the elements."""
    weights = {name: value.detach() for name, value in load_model(str(folder)).named_parameters()}
    for step in range(1, version + 1):
        random = torch.Generator().manual_seed(step)
        for name, value in weights.items():
            chosen = torch.rand(value.shape, generator=random) < share
            weights[name] = torch.where(
                chosen, value + 0.1 * torch.randn(value.shape, generator=random), value
            )
    return weights


class _Policy:
    """The part of a `PolicyTrainer` that an export needs.

    It sleeps `pause` seconds before each parameter, and makes the file `marker` before the fourth.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.pause = 0.0
        self.marker = Path()
        self.policy_version = 0

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for number, (name, value) in enumerate(self.weights.items()):
            if number == 3 and self.pause:
                self.marker.touch()
            time.sleep(self.pause)
            yield name, value


class Exporter(TrainerActor):
    """A trainer rank that exports `version_of`."""

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        super().__init__(0, 1, pipeline)
        self._folder = folder
        self._policy = _Policy()
        self._loaded: Any = SimpleNamespace(policy=self._policy)

    def become(
        self, version: int, share: float = 1.0, pause: float = 0.0, marker: Path = Path()
    ) -> None:
        """Switch to this version. With a pause, an export makes the file `marker`."""
        self._policy.weights = version_of(self._folder, version, share)
        self._policy.pause, self._policy.marker = pause, marker
        self._policy.policy_version = version


class AdapterTrainer(TrainerActor):
    """A trainer rank with adapters, which are random by version.

    Args:
        files: the folder in which nodes find the base.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, files: Path | None = None) -> None:
        super().__init__(0, 1, pipeline)
        self._policy: Any = fsdp2_policy(
            lambda: add_lora(load_model(str(folder)), LoraSpec(rank=2, alpha=4.0)),
            OptimizerSpec(1e-3),
        )
        source = ModelSource(str(files or folder))
        self._loaded: Any = SimpleNamespace(policy=self._policy, source=source)

    def become(self, version: int) -> None:
        random = torch.Generator().manual_seed(version)
        for _, adapter in self._policy.adapters.weights():
            adapter.normal_(std=0.3, generator=random)
        self._policy.policy_version = version

    def whole(self) -> dict[str, np.ndarray]:
        """Return all weights, merged."""
        return {name: value.numpy().copy() for name, value in self._policy.export_weights()}

    def adapter_bytes(self) -> int:
        return sum(int(value.nbytes) for _, value in self._policy.adapters.weights())


class Engine(EngineActor):
    """The embedded engine, outside of a run."""

    async def serve(self, folder: Path) -> int:
        """Start the engine. Returns the process id."""
        torch.set_num_threads(1)
        engine = self._engine = TransformersEngine(lambda: load_model(str(folder)), max_length=64)
        await engine.start()
        return os.getpid()

    async def held(self) -> dict[str, np.ndarray]:
        """Return its current parameters."""
        model = self._serving.loaded.model  # type: ignore[attr-defined]
        return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}

    async def version_sampled(self) -> int:
        """Sample a token and return its version."""
        request = GenerationRequest(
            str(time.monotonic_ns()), "s", np.arange(5, dtype=np.int32), SamplingParams(1)
        )
        return int((await asyncio.wait_for(self._serving.generate(request), 60)).versions_T[0])


class Lossy:
    """A node that flips one bit of the first bucket it receives."""

    _damaged = False

    def receive(self, index: int, payload: Any, delta: bool) -> None:
        if not self._damaged:
            self._damaged = True
            payload = payload.copy()
            payload[-1] ^= 1
        super().receive(index, payload, delta)  # type: ignore[misc]


class LossyNode(Lossy, NodeWeights):
    """A lossy node of whole weights."""


class LossyAdapterNode(Lossy, AdapterNode):
    """A lossy node of adapters."""


class NamedNode(NodeWeights):
    """A node whose process can be found."""

    def pid(self) -> int:
        return os.getpid()


Spawn = Callable[..., Any]


class Drill:
    """A `WeightSync` between places on this machine, each with shared memory of its own.

    Args:
        trainer: the handle of a rank that can `become` a version.
        node: makes the actor of a place that receives whole weights.
        adapter_node: makes the actor of a place that receives adapters.
        home: the trainer's place.
        spec: fields of `weightSync`.
    """

    def __init__(
        self,
        trainer: Any,
        run: str,
        node: Spawn,
        adapter_node: Spawn | None = None,
        home: str = "home",
        **spec: Any,
    ) -> None:
        self.trainer = trainer
        self.nodes: list[Any] = []
        spec = {"bucket_bytes": BUCKET_BYTES, **spec}
        self.sync = WeightSync(
            Spec(**spec),
            run,
            [trainer],
            home,
            self._kept(node),
            adapter_node and self._kept(adapter_node),
        )

    def _kept(self, make: Spawn) -> Spawn:
        def spawning(*arguments: Any) -> Any:
            self.nodes.append(make(*arguments))
            return self.nodes[-1]

        return spawning

    async def shapes_known(self, version: int) -> None:
        """Ask the trainer, at this version, what it exports: the next update starts to export."""
        await self.trainer.call(lambda actor: actor.become(version))
        await self.sync._whole.tensor_specs()

    async def update(
        self, engines: dict[str, tuple[Any, str]], version: int, *change: Any
    ) -> SyncReport:
        """Sync a version to engines, each with its place.

        Args:
            change: further arguments of the trainer's `become`.
        """
        await self.trainer.call(lambda actor: actor.become(version, *change))
        receivers = {name: Receiver(handle, place) for name, (handle, place) in engines.items()}
        return await asyncio.wait_for(self.sync.update(receivers, version), 120)

    async def stop(self) -> None:
        await self.sync.stop()
        for node in self.nodes:
            node.kill()


@contextmanager
def drills(run: str, make: Callable[..., Drill]) -> Iterator[Callable[..., Drill]]:
    """Make drills, stop them at the end, and check that they leave no memory behind."""
    made: list[Drill] = []

    def making(**options: Any) -> Drill:
        made.append(make(**options))
        return made[-1]

    yield making
    for one in made:
        asyncio.run(one.stop())
    asyncio.run(all_gone(run))


def serving(folder: Path, launcher: Launcher | None = None) -> dict[str, Any]:
    """Start two engines, for the trainer's place and for another one."""
    handles = {name: spawn(Engine, name, launcher=launcher) for name in ("near", "far")}
    starting = [handle.call(lambda engine: engine.serve(folder)) for handle in handles.values()]
    for start in starting:
        start.wait()
    return handles
