"""How ranks of the reference take the policy's weights: as engines do, from the memory of their node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from agenticrun_workers.trainer.rank import REFERENCE, RankActor
from agenticrun_workers.weights.mapping import Verifier

if TYPE_CHECKING:
    from torch import Tensor


class TakesReference(RankActor):
    """The calls of `WeightSync` on an actor that holds a rank of the reference."""

    def begin_update(self, _version: int) -> None:
        """Buckets of a policy version follow."""
        self._arrived: list[Path] = []

    def take_bucket(self, path: str, checksum: int) -> None:
        """A file with some of the weights. Raises `CorruptBucket`."""
        Verifier().check(Path(path), checksum)
        self._arrived.append(Path(path))

    def finish_update(self) -> None:
        """The reference becomes the policy with these weights. Collective."""
        self._part(REFERENCE).load_weights(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        from agenticrun_workers.weights.reading import PartReader

        for path in self._arrived:
            yield from PartReader().parameters(path)
