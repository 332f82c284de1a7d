"""The base of the policy's ranks: what engines get from them.

torch is imported inside methods, because the driver imports this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agenticrun_api import Pipeline
from agenticrun_workers.launch import packed
from agenticrun_workers.tracing import traced
from agenticrun_workers.trainer.rank import RankModel, ReferenceUpdateMixin
from agenticrun_workers.weights.broadcast import BroadcastFailed
from agenticrun_workers.weights.buckets import Bucket, MergePlan, TensorSpec, WrittenBucket

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from agenticrun_workers.inference.parity import Parity, ParityProbe, ProbeSample
    from agenticrun_workers.models.lora import Adapters
    from agenticrun_workers.trainer.rank_models import RankModels
    from agenticrun_workers.trainer.reference import ReferencePolicy
    from agenticrun_workers.weights.collective import WeightGroup
    from agenticrun_workers.weights.export import BucketWriter


class ServedPolicy(ReferenceUpdateMixin):
    """A rank of the policy with its models: it sends weights to engines, and is compared with them.

    `WeightSync` and `ParityCheck` call these methods.
    """

    def __init__(self, rank: int, world_size: int, pipeline: Pipeline) -> None:
        super().__init__(rank, world_size, pipeline)
        self._loaded: RankModels | None = None
        """None until `setup`."""
        self._writers: dict[bool, BucketWriter] = {}
        """On rank 0: that of adapters (True), and that of whole weights (False)."""
        self._group: WeightGroup | None = None

    @property
    def _models(self) -> RankModels:
        assert self._loaded is not None, "setup comes first"
        return self._loaded

    def merge_plan(self) -> MergePlan | str | None:
        """Describe how nodes merge adapters into whole weights. Collective over all ranks.

        Returns:
            on rank 0: the plan, or the reason why nodes cannot merge.
        """
        from agenticrun_workers.weights.lora_merge import plan_merge

        adapters = self._adapters()
        if self._rank == 0:
            return plan_merge(adapters, self._models.source)
        deque(adapters.base(), maxlen=0)
        return None

    def tensor_specs(self, adapters: bool = False) -> list[TensorSpec]:
        """Return the parameters that `export_weights` writes, on rank 0. Collective."""
        from agenticrun_workers.weights.export import tensor_specs

        return tensor_specs(self._exported(adapters))

    def open_buckets(
        self, buckets: tuple[Bucket, ...], folder: str, deltas: bool, adapters: bool = False
    ) -> None:
        """Open the buckets that `export_weights` fills, on rank 0; see `BucketWriter`.

        Whole weights and adapters have separate buckets.
        """
        from agenticrun_workers.weights.export import BucketWriter

        self._writers[adapters] = BucketWriter(Path(folder), buckets, deltas=deltas)

    def close_whole_buckets(self) -> None:
        """Free the memory of whole weights, on rank 0."""
        del self._writers[False]

    def export_weights(self, adapters: bool = False) -> Iterator[WrittenBucket]:
        """Write all parameters, or the adapters, into their buckets, on rank 0.

        Yields each bucket once it is written. Collective with `assist_export`.
        """
        with self.recorder.span("export_weights"):
            for written in self._writers[adapters].write(self._exported(adapters)):
                yield replace(written, policy_version=self._models.policy.policy_version)

    def host_broadcast(self, host: str, port: int, world: int) -> None:
        """Form a process group with the engines, on rank 0, at its last `rendezvous`.

        Raises:
            BroadcastFailed: the group could not be formed.
        """
        from agenticrun_workers.models.devices import compute_device
        from agenticrun_workers.weights.collective import WeightGroup

        self._group = None
        try:
            self._group = WeightGroup(
                host, port, 0, world, compute_device(), self._taken_listener()
            )
        except RuntimeError as error:
            raise BroadcastFailed(str(error)) from error

    @traced
    def broadcast_weights(self) -> None:
        """Send all parameters to the engines, on rank 0. Collective with `assist_export`.

        Raises:
            BroadcastFailed: an engine did not take part to the end.
        """
        group = self._group
        broken: RuntimeError | None = None
        assert group is not None, "host_broadcast comes first"
        # Export to the end even after a failure: it is collective.
        for _, tensor in self._models.policy.export_weights():
            if broken is None:
                try:
                    group.send(tensor)
                except RuntimeError as error:
                    broken = error
                    group.close()
        if broken is not None:
            self._group = None
            raise BroadcastFailed(str(broken)) from broken

    @traced
    def assist_export(self, adapters: bool = False) -> None:
        """Take part in an export of rank 0, on the other ranks."""
        deque(self._exported(adapters), maxlen=0)

    def parity_probe(self) -> ParityProbe:
        """Return prompts that show if engines compute this model."""
        from agenticrun_workers.trainer import config_translation as specs
        from agenticrun_workers.trainer.parity import make_probe

        pipeline = self._pipeline
        return make_probe(
            self._config(), pipeline.sequence_length, specs.loss_temperature(pipeline)
        )

    @packed
    @traced
    def parity(self, engines: Mapping[str, Sequence[ProbeSample]]) -> dict[str, Parity]:
        """Compare what engines sampled with this model. Collective; equal on every rank.

        Args:
            engines: the conversations of each engine.
        """
        import torch

        from agenticrun_workers.models.devices import compute_device
        from agenticrun_workers.trainer.parity import compare, precision_of, quantizes

        precision = precision_of(
            getattr(torch, self._models.source.dtype),
            compute_device(),
            quantized=quantizes(self._pipeline.actor_infer.strategy.config),
        )
        layers = self._config().get_text_config(decoder=True).num_hidden_layers
        return compare(self._models.policy, engines, layers, precision)

    def _config(self) -> PretrainedConfig:
        from agenticrun_workers.models.pretrained import load_config

        source = self._models.source
        with source.folder() as folder:
            return load_config(folder, trust_remote_code=source.trust_remote_code)

    def _exported(self, adapters: bool) -> Iterator[tuple[str, Tensor]]:
        return self._adapters().weights() if adapters else self._models.policy.export_weights()

    def _adapters(self) -> Adapters:
        adapters = self._models.policy.adapters
        assert adapters is not None, "the run trains adapters"
        return adapters

    def _part(self, name: str) -> RankModel:
        return self._models.by_name[name]

    def _reference_model(self) -> ReferencePolicy:
        assert self._models.reference is not None, "the reference lives on other pods"
        return self._models.reference
