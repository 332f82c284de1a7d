"""AdapterNode: what `NodeWeights` is where adapters travel: it makes whole weights of them, once for all engines of its node."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.weights.buckets import Bucket, buckets_of
from agenticrun_workers.weights.mapping import Verifier
from agenticrun_workers.weights.merge_plan import Expansion
from agenticrun_workers.weights.node_weights import NodeWeights
from agenticrun_workers.weights.written import Part

if TYPE_CHECKING:
    from torch import Tensor

    from agenticrun_workers.weights.lora_merge import Expander
    from agenticrun_workers.weights.sender import Sender


class AdapterNode(NodeWeights):
    """Adapters arrive in `buckets`. What engines read lies in a folder below: whole weights, in buckets of their own.

    Args:
        run: as of `NodeWeights`.
        source: the model that the trainers have loaded; its files, if it has any, are kept in shared memory too.
        bucket_bytes: of whole weights.
        threads: to compute with, on a CPU.
    """

    def __init__(
        self,
        run: str,
        buckets: tuple[Bucket, ...],
        expansion: Expansion,
        source: ModelSource,
        bucket_bytes: int,
        threads: int,
    ) -> None:
        super().__init__(run, buckets)
        self._expansion = expansion
        self._source = source
        self._bucket_bytes = bucket_bytes
        self._threads = threads
        self._verifier = Verifier()

    def expand(self, checksums: list[int]) -> Iterator[Part]:
        """Overwrite the whole weights by those of the adapters that are here, and tell each file when it is written.

        Nobody may be reading them, and only one call at a time is allowed.

        Args:
            checksums: of all buckets, as the trainers wrote them.

        Raises:
            CorruptBucket: other adapters are here. Nothing was told then.
            InvalidConfig: the model's files are not here.
        """
        import torch

        for bucket, checksum in zip(self._buckets, checksums, strict=True):
            self._verifier.check(self._shared.path / bucket.file, checksum)
        torch.set_num_threads(self._threads)
        for written in self._sender.send(self._expander.weights(self._adapters())):
            yield Part(str(self._whole / written.bucket.file), written.checksum)

    def _adapters(self) -> dict[str, Tensor]:
        """Views of what is here."""
        from agenticrun_workers.weights.reading import PartReader

        reader = PartReader()
        return {
            name: value
            for bucket in self._buckets
            for name, value in reader.parameters(self._shared.path / bucket.file)
        }

    @property
    def _whole(self) -> Path:
        return self._shared.path / "whole"

    @cached_property
    def _sender(self) -> Sender:
        from agenticrun_workers.weights.sender import Sender

        self._whole.mkdir(exist_ok=True)
        return Sender(
            self._whole, buckets_of(self._expansion.shapes, self._bucket_bytes), deltas=False
        )

    @cached_property
    def _expander(self) -> Expander:
        from agenticrun_workers.weights.lora_merge import Expander

        if self._source.path is not None:
            return Expander(self._expansion, self._source.path)
        folder = self._shared.path / "base"
        folder.mkdir(exist_ok=True)
        self._source.write(folder)
        return Expander(self._expansion, str(folder))
