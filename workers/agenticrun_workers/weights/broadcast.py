"""Transport Broadcast: one collective of the first trainer rank and all engines.

This is the driver's side: it makes the group, calls both ends, and repeats the broadcast without
engines that die. The ends themselves are `collective.WeightGroup`s. The group lasts from sync to
sync, until its members change or a broadcast fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from agenticrun_workers.launch import ActorDied, ActorHandle
from agenticrun_workers.weights.buckets import TensorSpec
from agenticrun_workers.weights.protocols import EngineReceiver, WeightExporter
from agenticrun_workers.weights.transports import Receiver

log = logging.getLogger(__name__)


class BroadcastFailed(Exception):
    """A collective broke off: a member has died, or was late."""


class BroadcastSync:
    """Broadcasts the policy's weights to engines.

    Args:
        trainers: the policy's ranks.
        tensors: what they export.
    """

    def __init__(
        self, trainers: Sequence[ActorHandle[WeightExporter]], tensors: Sequence[TensorSpec]
    ) -> None:
        self._trainers = trainers
        self._tensors = tuple(tensors)
        self._members: frozenset[str] = frozenset()
        """Engines of the group."""

    async def update(
        self, receivers: Mapping[str, Receiver[EngineReceiver]], version: int
    ) -> dict[str, BaseException]:
        """Load the trainers' current weights into all engines.

        When an engine dies during it, the others get the weights in another attempt.

        Returns:
            The engines that did not load them, and why.

        Raises:
            InvalidConfig: an engine supports no broadcasts.
        """
        failed: dict[str, BaseException] = {}
        while remaining := {
            name: receiver for name, receiver in receivers.items() if name not in failed
        }:
            sent, outcomes = await self._attempt(remaining, version)
            broken = {
                name: error for name, error in outcomes.items() if isinstance(error, BaseException)
            }
            if not broken and sent is None:
                break
            if sent is not None and not isinstance(sent, BroadcastFailed):
                # Not a lost member: a mistake of the trainers, which another attempt would repeat.
                raise sent
            # A group that has lost a member is useless to all others.
            self._members = frozenset()
            dead = {name: error for name, error in broken.items() if isinstance(error, ActorDied)}
            # While an engine died, the others failed because of it: only the dead are given up.
            failed |= dead or broken
            if not dead:
                break
            log.warning(
                "%s died in mid-broadcast: the others get version %d in another one",
                ", ".join(dead),
                version,
            )
        return failed

    async def _attempt(
        self, receivers: Mapping[str, Receiver[EngineReceiver]], version: int
    ) -> tuple[BaseException | None, dict[str, BaseException | None]]:
        """Broadcast once. Returns the errors of the trainer and of each engine."""
        first, *others = self._trainers
        if self._members != receivers.keys():
            joined = await self._make_group(receivers)
            # The trainer's send would wait for members that never come.
            if any(isinstance(error, BaseException) for error in joined.values()):
                return BroadcastFailed("the engines did not meet"), joined
            self._members = frozenset(receivers)
        calls = [
            receiver.handle.call(
                lambda engine: engine.update_from_broadcast(self._tensors, version)
            )
            for receiver in receivers.values()
        ]
        # Before the trainer's call is awaited: the export is collective over the ranks.
        assisting = [other.call(lambda rank: rank.assist_export()) for other in others]
        sent, *outcomes = await asyncio.gather(
            first.call(lambda rank: rank.broadcast_weights()), *calls, return_exceptions=True
        )
        await asyncio.gather(*assisting)
        return sent, dict(zip(receivers, outcomes, strict=True))

    async def _make_group(
        self, receivers: Mapping[str, Receiver[EngineReceiver]]
    ) -> dict[str, BaseException | None]:
        """Make the group. Returns the error of each engine."""
        first = self._trainers[0]
        answers = await asyncio.gather(
            *(r.handle.call(lambda engine: engine.broadcast_ranks()) for r in receivers.values()),
            return_exceptions=True,
        )
        sizes = [answer for answer in answers if isinstance(answer, int)]
        # The world's size must be known before the first rank listens.
        if len(sizes) < len(answers):
            for answer in answers:
                if not isinstance(answer, int | ActorDied):
                    raise answer
            return {
                name: None if isinstance(answer, int) else answer
                for name, answer in zip(receivers, answers, strict=True)
            }
        host, port = await first.call(lambda trainer: trainer.rendezvous())
        world = 1 + sum(sizes)
        # Rank 0 is the trainer; an engine with several processes takes as many ranks.
        ranks = [1 + sum(sizes[:number]) for number in range(len(sizes))]
        joins = [
            r.handle.call(lambda engine: engine.join_broadcast(host, port, rank, world))
            for r, rank in zip(receivers.values(), ranks, strict=True)
        ]
        hosted, *outcomes = await asyncio.gather(
            first.call(lambda trainer: trainer.host_broadcast(host, port, world)),
            *joins,
            return_exceptions=True,
        )
        if isinstance(hosted, BaseException) and not isinstance(hosted, BroadcastFailed):
            raise hosted
        return dict(zip(receivers, outcomes, strict=True))
