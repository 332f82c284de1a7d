"""Load of the experts of a mixture by the tokens that it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from agenticrun_workers.trainer.ranks import Ranks


class RouterLoad:
    """Counts the tokens of each expert, and the entropy of the routers' distributions.

    Attributes:
        exists: the decoder has experts.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        # transformers gives all classes of experts this attribute.
        layers = [part for part in decoder.modules() if hasattr(part, "is_concatenated")]
        self.exists = bool(layers)
        self._sizes = [len(next(experts.parameters())) for experts in layers]
        self._real_T: Tensor | None = None
        for layer, experts in enumerate(layers):
            experts.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)
        recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
        if isinstance(recorder, OutputRecorder) and recorder.target_class is not None:
            for part in decoder.modules():
                if isinstance(part, recorder.target_class):
                    part.register_forward_hook(partial(self._measure, recorder.index))
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._tokens_E: list[Tensor | None] = [None] * len(self._sizes)
        self._entropy: Tensor | float = 0.0
        self._routed: Tensor | float = 0.0

    @contextmanager
    def counting(self, real_T: Tensor | None) -> Iterator[None]:
        """Count the tokens of the forward pass in the `with` block.

        Args:
            real_T: number of samples that have each token, 0 for padding; None counts nothing.
        """
        self._real_T = real_T
        try:
            yield
        finally:
            self._real_T = None  # the backward pass may compute layers again

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return `router/...` of the tokens since `reset`, equal on every rank. Collective.

        Empty for a dense model.
        """
        if not self.exists:
            return {}
        mine = [float(self._entropy), float(self._routed)]
        for tokens_E, size in zip(self._tokens_E, self._sizes, strict=True):
            mine += [0.0] * size if tokens_E is None else tokens_E.tolist()
        entropy, routed, *tokens = ranks.sum_all(mine)
        found = {"router/entropy": entropy / routed} if routed else {}
        loads = []
        for size in self._sizes:
            layer, tokens = tokens[:size], tokens[size:]
            if total := sum(layer):
                loads.append(max(layer) * size / total)
        return found | ({"router/load_max_over_mean": sum(loads) / len(loads)} if loads else {})

    @torch.no_grad()
    def _count(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._real_T is None:
            return
        chosen_Tk: Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
        tokens_E = self._tokens_E[layer]
        if tokens_E is None:
            tokens_E = self._tokens_E[layer] = self._real_T.new_zeros(self._sizes[layer])
        tokens_E.index_add_(
            0, chosen_Tk.flatten(), self._real_T.repeat_interleave(chosen_Tk.shape[-1])
        )

    @torch.no_grad()
    def _measure(self, index: int, _: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if self._real_T is None:
            return
        logits_TE: Tensor = output[index] if isinstance(output, tuple) else output
        log_TE = logits_TE.float().log_softmax(-1)
        entropy_T = -(log_TE.exp() * log_TE).sum(-1)
        self._entropy = self._entropy + (entropy_T * self._real_T).sum()
        self._routed = self._routed + self._real_T.sum()
