"""Options of the strategy `fsdp2` (`strategy.config`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from agenticrun_workers.trainer.log_probs import CHUNK_ELEMENTS

DECIDED_ELSEWHERE = {
    "param_dtype": "spec.model.dtype",
    "reduce_dtype": "spec.model.dtype (gradients are always summed in float32 at least)",
    "mp_policy": "spec.model.dtype",
    "mixed_precision": "spec.model.dtype",
    "attn_implementation": "spec.model.attnImplementation",
    "max_grad_norm": "spec.pipeline.actorTrain.training.maxGradNorm",
    "use_remove_padding": "spec.pipeline.actorTrain.training.sequencePacking",
    "fsdp_size": "the number of trainer ranks: the model is sharded over all of them",
}
"""Names that ROLL, verl or torch give to what other fields decide."""


@dataclass(frozen=True, slots=True)
class FsdpOptions:
    """How a model is held and computed; none of them changes what is learned."""

    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass and gather them again for the backward pass (ZeRO-3). False keeps
    them (ZeRO-2): less communication, more memory."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer and compute the layer again in the backward pass."""
    offload_policy: bool = False
    """Parameters, gradients and optimizer state live in host memory; layers visit the GPU while they compute."""
    ulysses_sequence_parallel_size: int = 1
    """So many neighbouring ranks share each sequence (Ulysses, arXiv 2309.14509). Divides the ranks and the attention heads."""
    logits_chunk_elements: int = CHUNK_ELEMENTS
    """Logits (tokens times vocabulary) that exist at a time."""

    @staticmethod
    def parse(config: Mapping[str, Any]) -> FsdpOptions:
        """From `strategy.config`. Raises `ValueError` that names the option that is unknown, wrong, or decided by another field."""
        types = get_type_hints(FsdpOptions)
        for name, value in config.items():
            if name in DECIDED_ELSEWHERE:
                raise ValueError(
                    f"the option {name} of fsdp2 is decided by {DECIDED_ELSEWHERE[name]}: leave it out"
                )
            if name not in types:
                raise ValueError(f"fsdp2 has no option {name}; it has {', '.join(types)}")
            if type(value) is not types[name] or (types[name] is int and value < 1):
                kind = "true or false" if types[name] is bool else "a whole number of at least 1"
                raise ValueError(f"the option {name} of fsdp2 must be {kind}, not {value!r}")
        return FsdpOptions(**config)

    def without_sequence_parallelism(self) -> FsdpOptions:
        """The same, with whole sequences on every rank."""
        return replace(self, ulysses_sequence_parallel_size=1)


DEFAULTS = FsdpOptions()
