"""How low-rank adapters and the weight that they belong to become one. Processes import this that load no model."""

from __future__ import annotations

import torch
from torch import Tensor

MergeRule = tuple[float, bool]
"""alpha / rank, and whether the layer holds its weight transposed."""


def adapter_names(weight: str) -> tuple[str, str]:
    """What A and B are called that belong to this weight: `<layer>.lora_A.weight`, `<layer>.lora_B.weight`."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


@torch.no_grad()
def merge(weight: Tensor, a: Tensor, b: Tensor, rule: MergeRule) -> Tensor:
    """W + alpha / rank * B A, in float32, or in the weight's wider dtype."""
    scale, transposed = rule
    wide = torch.promote_types(weight.dtype, torch.float32)
    product = (b.to(wide) @ a.to(wide)).mul_(
        scale
    )  # in place: a pass over memory costs more than the arithmetic
    return (product.T if transposed else product).add_(weight)
