"""Broadcasting: a weight sync by a collective of the first trainer rank and all engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray.exceptions

from agenticrun_workers.weights.buckets import Shape
from agenticrun_workers.weights.written import BroadcastFailed

if TYPE_CHECKING:
    from agenticrun_workers.weights.sync import Receiver

log = logging.getLogger(__name__)


class Broadcasting:
    """The group is made anew when its members change, and after a failure.

    Args:
        trainers: the policy's ranks.
        shapes: what they export.
    """

    def __init__(self, trainers: Sequence[Any], shapes: Sequence[Shape]) -> None:
        self._trainers = trainers
        self._shapes = tuple(shapes)
        self._members: frozenset[str] = frozenset()
        """Engines of the group."""

    async def update(
        self, receivers: Mapping[str, Receiver], version: int
    ) -> dict[str, BaseException]:
        """Give all engines the trainers' weights as they are now. When one dies meanwhile, the others get them in another attempt.

        Returns:
            the engines that did not take them, and why.

        Raises:
            InvalidConfig: an engine takes no broadcasts.
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
                raise sent
            self._members = frozenset()
            gone = {
                name: error
                for name, error in broken.items()
                if isinstance(error, ray.exceptions.RayActorError)
            }
            failed |= gone or broken
            if not gone:
                break
            log.warning(
                "%s died in mid-broadcast: the others get version %d in another one",
                ", ".join(gone),
                version,
            )
        return failed

    async def _attempt(
        self, receivers: Mapping[str, Receiver], version: int
    ) -> tuple[BaseException | None, dict[str, BaseException | None]]:
        """What the sender and each engine raised."""
        first, *others = self._trainers
        if self._members != receivers.keys():
            met = await self._meet(receivers)
            if any(isinstance(error, BaseException) for error in met.values()):
                return BroadcastFailed("the engines did not meet"), met
            self._members = frozenset(receivers)
        calls = [
            receiver.handle.update_from_broadcast.remote(self._shapes, version)
            for receiver in receivers.values()
        ]
        assisting = [other.assist_export.remote() for other in others]
        sent, *outcomes = await asyncio.gather(
            first.broadcast_weights.remote(), *calls, return_exceptions=True
        )
        await asyncio.gather(*assisting)
        return sent, dict(zip(receivers, outcomes, strict=True))

    async def _meet(self, receivers: Mapping[str, Receiver]) -> dict[str, BaseException | None]:
        """Make the group; what each engine raised."""
        first = self._trainers[0]
        answers = await asyncio.gather(
            *(r.handle.broadcast_ranks.remote() for r in receivers.values()), return_exceptions=True
        )
        sizes = [answer for answer in answers if isinstance(answer, int)]
        if len(sizes) < len(answers):
            for answer in answers:
                if not isinstance(answer, int | ray.exceptions.RayActorError):
                    raise answer
            return {
                name: None if isinstance(answer, int) else answer
                for name, answer in zip(receivers, answers, strict=True)
            }
        host, port = await first.rendezvous.remote()
        world = 1 + sum(sizes)
        ranks = [1 + sum(sizes[:number]) for number in range(len(sizes))]
        joins = [
            r.handle.join_broadcast.remote(host, port, rank, world)
            for r, rank in zip(receivers.values(), ranks, strict=True)
        ]
        hosted, *outcomes = await asyncio.gather(
            first.host_broadcast.remote(host, port, world), *joins, return_exceptions=True
        )
        if isinstance(hosted, BaseException) and not isinstance(hosted, BroadcastFailed):
            raise hosted
        return dict(zip(receivers, outcomes, strict=True))
