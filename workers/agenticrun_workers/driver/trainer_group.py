"""The ranks of policy, reference and critic as one object."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from agenticrun_api import Pipeline
from agenticrun_workers.driver.batch_plan import plan_batch
from agenticrun_workers.driver.checkpoints import IsDurable, LoadModule, SaveModule
from agenticrun_workers.errors import ScheduleEnded
from agenticrun_workers.launch import ActorHandle, Launcher, Result
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.trainer.batch import (
    ScoredBatch,
    TurnCredits,
    ValueTargets,
    optimizer_steps_per_batch,
)
from agenticrun_workers.trainer.rank import (
    ACTOR,
    CRITIC,
    REFERENCE,
    Metrics,
    RankActor,
    ReferenceUpdateMixin,
)
from agenticrun_workers.types import EpisodeKey
from agenticrun_workers.weights.sync import Receiver, WeightSync

if TYPE_CHECKING:
    from agenticrun_workers.inference.parity import Parity, ParityProbe, ProbeSample
    from agenticrun_workers.trainer.policy_rank import TrainerActor
    from agenticrun_workers.trainer.reference_and_critic import CriticActor, ReferenceActor

log = logging.getLogger(__name__)

NEARLY_ENDED = 0.1
"""Share of the peak below which a learning rate is too low for a run that is made longer."""


@dataclass(frozen=True)
class Advantages:
    """The driver's handle of a batch with advantages; the advantages stay on the ranks."""

    metrics: Metrics
    value_targets: Sequence[Result[ValueTargets]]
    """Targets from the policy's ranks; they go straight to the critic."""


class TrainerGroup:
    """All ranks, called together. A rank that dies fails the call, and with it the attempt.

    A call may take any time. One that hangs is found by the operator's stall detection: see
    `launch.liveness`.

    Args:
        trainers: ranks of the policy.
        parts: the share of each batch that each of them gets; ranks that split one model get the
            same share.
        references: ranks of the reference, if it has pods of its own.
        critics: ranks of the critic, if it has pods of its own.
        weights: copies the policy's weights to others.
    """

    def __init__(
        self,
        launcher: Launcher,
        pipeline: Pipeline,
        trainers: Sequence[ActorHandle[TrainerActor]],
        parts: Sequence[int],
        references: Sequence[ActorHandle[ReferenceActor]],
        critics: Sequence[ActorHandle[CriticActor]],
        weights: WeightSync,
    ) -> None:
        self._launcher = launcher
        self._pipeline = pipeline
        self._trainers = trainers
        self._part_of = parts
        self._references = references
        self._critics = critics
        self.weights = weights

    @property
    def parts(self) -> int:
        """Number of shares that a batch is split into."""
        return max(self._part_of) + 1

    @property
    def savers(self) -> dict[str, SaveModule]:
        """One function per module of a checkpoint that saves it."""
        return {module: partial(self._save, module) for module in self._modules()}

    async def reserve_snapshots(self) -> None:
        """Allocate the memory that the first save needs, in the background."""
        await asyncio.gather(
            *(
                actor.call(lambda rank: rank.reserve_snapshot(module))
                for module in self._modules()
                for actor in self._ranks_of(module)
            )
        )

    @property
    def loaders(self) -> dict[str, LoadModule]:
        """One function per module that loads it."""
        return {module: partial(self._load, module) for module in self._modules()}

    async def warm_up(self, keys: list[list[tuple[EpisodeKey, int]]]) -> Metrics:
        """Take a supervised step.

        Args:
            keys: key and store number of the trajectories of each share.
        """
        calls = [
            actor.call(lambda rank: rank.warm_up(keys[part]))
            for actor, part in zip(self._trainers, self._part_of, strict=True)
        ]
        answers = await asyncio.gather(*calls)
        return answers[0]

    async def end_warm_up(self) -> None:
        """Forget the optimizer's state, after the last supervised step."""
        await asyncio.gather(
            *(actor.call(lambda rank: rank.end_warm_up()) for actor in self._trainers)
        )

    async def freeze_reference(self) -> None:
        """Copy the current policy into the reference, unless the run has none or names its own."""
        if REFERENCE in self._modules():
            # A reference without pods of its own lives on the trainers' ranks.
            ranks: Sequence[ActorHandle[ReferenceUpdateMixin]] = self._references or self._trainers
            places = await asyncio.gather(
                *(actor.call(lambda rank: rank.placement()) for actor in ranks)
            )
            receivers = {
                place.actor: Receiver(actor, place.node_id)
                for actor, place in zip(ranks, places, strict=True)
            }
            await self.weights.copy_to(receivers)

    async def score(self, groups: tuple[Group, ...], version: int) -> ScoredBatch:
        """Give every rank its share of a batch and compute old and reference log-probs and values.

        Args:
            version: the policy version that this step makes.
        """
        scores: list[Result[ScoredBatch]] = []
        scoring: list[Sequence[ActorHandle[ReferenceActor] | ActorHandle[CriticActor]]] = [
            self._references,
            self._critics,
        ]
        for actors in scoring:
            # Called first, so that they compute while the policy's ranks do.
            if actors:
                shares = plan_batch(self._pipeline, groups, len(actors), version)
                scores += [
                    actor.call(lambda rank: rank.score(plan))
                    for actor, plan in zip(actors, shares, strict=True)
                ]
        plans = plan_batch(self._pipeline, groups, self.parts, version)
        calls = [
            # Scores travel from rank to rank as references: the driver never holds a token.
            actor.call(lambda rank: rank.score(plans[part], *(one.as_argument() for one in scores)))
            for actor, part in zip(self._trainers, self._part_of, strict=True)
        ]
        # Ranks that split one model return the same share; one answer of each is enough.
        by_part = dict(zip(self._part_of, await asyncio.gather(*calls), strict=True))
        return ScoredBatch.merge([*by_part.values()])

    async def parity_probe(self) -> ParityProbe:
        """Return prompts that show if engines compute the policy's model."""
        return await self._trainers[0].call(lambda rank: rank.parity_probe())

    async def parity(self, engines: Mapping[str, Sequence[ProbeSample]]) -> dict[str, Parity]:
        """Compare what engines sampled with the policy. The weights must be those of the engines.

        Args:
            engines: the conversations of each engine.
        """
        # Put once: as plain arguments the samples would be copied for each rank.
        samples = self._launcher.put(dict(engines))
        calls = [
            actor.call(lambda rank: rank.parity(samples.as_argument())) for actor in self._trainers
        ]
        return (await asyncio.gather(*calls))[0]

    async def compute_advantages(self, credits: TurnCredits, kl_coef: float) -> Advantages:
        """Turn the credits of the turns into an advantage per token, on the policy's ranks."""
        kept = self._launcher.put(credits)
        calls = [
            actor.call_pair(lambda rank: rank.compute_advantages(kept.as_argument(), kl_coef))
            for actor in self._trainers
        ]
        answers = await asyncio.gather(*(metrics for metrics, _ in calls))
        # The targets stay where they are: only the critic's ranks fetch them.
        return Advantages(answers[0], [targets for _, targets in calls])

    async def train_critic(self, targets: Sequence[Result[ValueTargets]]) -> Metrics:
        """Take all optimizer steps of the batch with the critic; no metrics without one."""
        if not self._pipeline.uses_critic:
            return {}
        if self._critics:
            calls = [
                actor.call(lambda rank: rank.train_critic(*(one.as_argument() for one in targets)))
                for actor in self._critics
            ]
        else:
            calls = [actor.call(lambda rank: rank.train_critic()) for actor in self._trainers]
        answers = await asyncio.gather(*calls)
        return answers[0]

    async def train_actor(self, version: int, *, update: bool) -> Metrics:
        """Take all optimizer steps of the batch with the policy, which becomes `version`.

        Args:
            update: False leaves the weights alone, while the critic warms up.
        """
        calls = [
            actor.call(lambda rank: rank.train_actor(version, update)) for actor in self._trainers
        ]
        answers = await asyncio.gather(*calls)
        return answers[0]

    async def stretch_schedules(self, step: int, max_steps: int) -> None:
        """Let the learning rates reach zero at another `maxSteps`, without a jump now.

        Warns where one has nearly fallen to zero, because it does not rise again.

        Args:
            step: completed training steps.

        Raises:
            ScheduleEnded: more steps would follow, but a rate is zero already. None has changed.
        """
        per_batch = optimizer_steps_per_batch(self._pipeline)
        # The policy's schedule begins after the critic's warm-up, in which it takes no steps.
        starts = {ACTOR: max(step, self._pipeline.critic_warmup), CRITIC: step}
        steps_left = {
            module: (max_steps - start) * per_batch
            for module, start in starts.items()
            if module in self._modules()
        }
        # All rates are checked before the first schedule changes: both change, or none.
        for module in (module for module, left in steps_left.items() if left > 0):
            first = self._ranks_of(module)[0]
            rate = await first.call(lambda rank: rank.rate_falls_from(module))
            if not rate:
                raise ScheduleEnded(f"{module}: the schedule has brought the learning rate to 0")
            of = self._pipeline.critic if module == CRITIC else self._pipeline.actor_train
            assert of is not None, "there is a critic"
            if rate < NEARLY_ENDED * (peak := of.training.learning_rate):
                log.warning(
                    "%s: maxSteps has changed to %d when the learning rate had fallen to %.3g, "
                    "%.1f %% of its peak. The steps that are left get no more than that",
                    module,
                    max_steps,
                    rate,
                    100 * rate / peak,
                )
        await asyncio.gather(
            *(
                actor.call(lambda rank: rank.stretch_schedule(module, left))
                for module, left in steps_left.items()
                for actor in self._ranks_of(module)
            )
        )

    async def offload(self) -> None:
        """Free the devices: the policy, and models on its pods, move to host memory."""
        await asyncio.gather(*(actor.call(lambda rank: rank.offload()) for actor in self._trainers))

    async def onload(self) -> None:
        """Move the models back to the devices."""
        await asyncio.gather(*(actor.call(lambda rank: rank.onload()) for actor in self._trainers))

    def _modules(self) -> list[str]:
        """Return the modules of a checkpoint.

        The reference is one where it is the run's own policy at step 0: no path could restore it.
        """
        own_reference = self._pipeline.uses_reference and not (
            self._pipeline.reference and self._pipeline.reference.path
        )
        return [
            ACTOR,
            *([CRITIC] if self._pipeline.uses_critic else []),
            *([REFERENCE] if own_reference else []),
        ]

    def _ranks_of(self, module: str) -> Sequence[ActorHandle[RankActor]]:
        elsewhere: dict[str, Sequence[ActorHandle[RankActor]]] = {
            REFERENCE: self._references,
            CRITIC: self._critics,
        }
        return elsewhere.get(module) or self._trainers

    async def _save(self, module: str, folder: str) -> IsDurable:
        ranks = self._ranks_of(module)
        await asyncio.gather(
            *(actor.call(lambda rank: rank.save(module, folder)) for actor in ranks)
        )

        async def is_durable() -> bool:
            # All are asked: of several errors the first rank's is raised.
            calls = [actor.call(lambda rank: rank.is_durable(module)) for actor in ranks]
            return all(await asyncio.gather(*calls))

        return is_durable

    async def _load(self, module: str, folder: str) -> None:
        await asyncio.gather(
            *(
                actor.call(lambda rank: rank.load(module, folder))
                for actor in self._ranks_of(module)
            )
        )
