"""The adapters of a policy, and the base that they belong to, out of any sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from agenticrun_workers.models.lora import adapter_weights, base_weights, merge_rules
from agenticrun_workers.models.merging import MergeRule


class Adapters:
    """Of a policy of which nothing else trains. `merge` makes its weights of what this gives.

    Args:
        whole: gives a parameter's whole value; collective.
    """

    def __init__(
        self, model: nn.Module, whole: Callable[[nn.Parameter], Tensor], rank: int
    ) -> None:
        self._model = model
        self._whole = whole
        self._rank = rank

    @classmethod
    def of(
        cls, model: nn.Module, whole: Callable[[nn.Parameter], Tensor], rank: int
    ) -> Adapters | None:
        """None for a model without adapters."""
        return cls(model, whole, rank) if merge_rules(model) else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """A and B of each layer (`adapter_names`), in the dtype that they are computed with. Collective; yields on rank 0 only."""
        return self._on_first(adapter_weights(self._model, self._whole))

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """All other parameters, which never change, in the order and under the names of `TrainStrategy.export_weights`.

        In the dtype that they are computed with, before adapters are added. Collective; yields on rank 0 only.
        """
        return self._on_first(base_weights(self._model, self._whole))

    def rules(self) -> dict[str, MergeRule]:
        """How to merge, by the name of the weight."""
        return merge_rules(self._model)

    def _on_first(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in weights:
            if self._rank == 0:
                yield named
