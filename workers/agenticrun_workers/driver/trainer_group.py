"""TrainerGroup: all ranks of policy, reference and critic, called together. A rank that dies fails the call, and with it the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray

from agenticrun_api import Pipeline
from agenticrun_workers.driver.batch_plan import plan_batch
from agenticrun_workers.driver.checkpoints import LoadModule, SaveModule
from agenticrun_workers.driver.step import TurnCredits
from agenticrun_workers.rollout.groups import Group
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.trainer.policy_rank import Prepared, summed_gaps
from agenticrun_workers.trainer.rank import ACTOR, CRITIC, REFERENCE, Metrics
from agenticrun_workers.types import EpisodeKey
from agenticrun_workers.weights.sync import Receiver, WeightSync


class TrainerGroup:
    """What the driver asks of the models that train and score.

    Args:
        trainers: ranks of the policy.
        parts: the part of each batch that each of them gets; ranks that share a model get the same.
        others: ranks of the reference and of the critic by name, where they have pods of their own.
        weights: brings these trainers' weights to others.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        trainers: list[Any],
        parts: Sequence[int],
        others: Mapping[str, list[Any]],
        weights: WeightSync,
    ) -> None:
        self._pipeline = pipeline
        self._trainers = trainers
        self._part_of = parts
        self._others = others
        self.weights = weights

    @property
    def parts(self) -> int:
        """Parts that a batch is split into."""
        return max(self._part_of) + 1

    @property
    def savers(self) -> dict[str, SaveModule]:
        """How to save each module of a checkpoint."""
        return {part: partial(self._call, part, "save") for part in self._modules()}

    @property
    def loaders(self) -> dict[str, LoadModule]:
        """How to load each module. They raise `CheckpointMismatch`."""
        return {part: partial(self._call, part, "load") for part in self._modules()}

    async def warm_up(self, keys: list[list[tuple[EpisodeKey, int]]]) -> Metrics:
        """A supervised step; one list of (key, store) per part."""
        calls = [
            actor.warm_up.remote(keys[part])
            for actor, part in zip(self._trainers, self._part_of, strict=True)
        ]
        answers: list[Metrics] = await asyncio.gather(*calls)
        return answers[0]

    async def freeze_reference(self) -> None:
        """The policy as it is now becomes the reference, where the run has one and names no other."""
        if REFERENCE in self._modules():
            ranks = self._ranks_of(REFERENCE)
            places = await asyncio.gather(*(actor.placement.remote() for actor in ranks))
            receivers = {
                place.actor: Receiver(actor, place.node_id)
                for actor, place in zip(ranks, places, strict=True)
            }
            await self.weights.copy_to(receivers)

    async def prepare(self, groups: tuple[Group, ...], version: int) -> Prepared:
        """Give every rank its part of a batch; old and reference log-probs and values. `version` is the one that this step makes."""
        said = [
            actor.score.remote(pack(plan))
            for actors in self._others.values()
            for actor, plan in zip(
                actors, plan_batch(self._pipeline, groups, len(actors), version), strict=True
            )
        ]
        plans = plan_batch(self._pipeline, groups, self.parts, version)
        calls = [
            actor.prepare.remote(pack(plans[part]), *said)
            for actor, part in zip(self._trainers, self._part_of, strict=True)
        ]
        by_part = dict(zip(self._part_of, await asyncio.gather(*calls), strict=True))
        answers: list[Prepared] = [unpack(answer) for answer in by_part.values()]
        kls = [answer.kl for answer in answers if answer.kl is not None]
        return Prepared(
            {key: values for kl in kls for key, values in kl.items()} if kls else None,
            summed_gaps([answer.gaps for answer in answers]),
        )

    async def train(self, credits: TurnCredits, version: int, *, train_actor: bool) -> Metrics:
        """Advantages and all optimizer steps of the prepared batch. The policy becomes `version`."""
        packed = ray.put(pack(credits))
        credited = [actor.credit.options(num_returns=2).remote(packed) for actor in self._trainers]
        targets = [found for _, found in credited]
        calls = [*(metrics for metrics, _ in credited)]
        calls += [critic.train.remote(*targets) for critic in self._others.get(CRITIC, [])]
        calls += [actor.train.remote(version, train_actor) for actor in self._trainers]
        combined: Metrics = {}
        for metrics in await asyncio.gather(*calls):
            combined |= metrics
        return combined

    async def offload(self) -> None:
        """Leave the devices to engines: the policy, and what shares its pods, go to host memory."""
        await asyncio.gather(*(actor.offload.remote() for actor in self._trainers))

    async def onload(self) -> None:
        """Come back to the devices."""
        await asyncio.gather(*(actor.onload.remote() for actor in self._trainers))

    def _modules(self) -> list[str]:
        """What a checkpoint must hold: the reference too where it is the run's own policy at step 0, which no path could bring back."""
        own_reference = self._pipeline.uses_reference and not (
            self._pipeline.reference and self._pipeline.reference.path
        )
        return [
            ACTOR,
            *([CRITIC] if self._pipeline.uses_critic else []),
            *([REFERENCE] if own_reference else []),
        ]

    def _ranks_of(self, part: str) -> list[Any]:
        return self._others.get(part, self._trainers)

    async def _call(self, part: str, method: str, folder: str) -> None:
        await asyncio.gather(
            *(getattr(actor, method).remote(part, folder) for actor in self._ranks_of(part))
        )
