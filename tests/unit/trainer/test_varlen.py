"""Attention over packed rows: what it computes, and that no mask of whole rows exists."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.trainer import varlen
from agenticrun_workers.trainer.fsdp2 import Fsdp2Strategy, fsdp2_policy
from agenticrun_workers.trainer.modules import try_varlen
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.varlen import Rows, attention
from ragged_samples import LOSSES, batch

Load = Callable[[], PreTrainedModel]

CPU = torch.device("cpu")
BOUNDS = ((0, 0, 5), (0, 5, 7), (1, 0, 6))
"""Two rows of eight tokens; one and two of them are padding."""
LAYER: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)


def dense(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Return the same with a mask of whole rows."""
    sequence = torch.tensor([[0] * 5 + [1] * 2 + [2], [3] * 6 + [4] * 2])
    distance = torch.arange(8)[:, None] - torch.arange(8)
    mask = (distance >= 0) & (distance < window) & (sequence[:, :, None] == sequence[:, None])
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, mask[:, None]).transpose(1, 2)


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Stand in for torch.nn.attention.varlen.varlen_attn, as its documentation describes it."""
    assert enable_gqa
    assert cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert window_size[1] == 0
    parts = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
        parts.append(
            functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        )
    return torch.cat(parts, 1).transpose(0, 1)


def kernel_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return kernel(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window_size=window_size,
        enable_gqa=True,
    )


class Written(TorchDispatchMode):
    """Counts the elements of all results that are not views of the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count += sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


@pytest.mark.parametrize("with_kernel", [None, kernel, kernel_of_torch_2_11])
@pytest.mark.parametrize("window", [None, 3, 8])
def test_each_token_attends_to_its_own_sequence(
    window: int | None,
    with_kernel: Callable[..., Tensor] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values and gradients."""
    monkeypatch.setattr(varlen, "has_kernel", lambda _: with_kernel is not None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", with_kernel)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 8, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    rows = Rows.of(BOUNDS, (2, 8), CPU)
    results = []
    for compute in (
        lambda q, k, v: attention(LAYER, q, k, v, None, rows=rows, sliding_window=window)[0],
        lambda q, k, v: dense(q, k, v, window or 8),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = compute(*leaves)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 3, 6])
def test_sequences_continue_the_first_tokens_of_another_one(window: int | None) -> None:
    """Values and gradients are those of whole sequences."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 13, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    bounds = ((0, 0, 6), (0, 6, 8), (0, 8, 9), (0, 9, 13))
    shared = Rows.of(bounds, (1, 13), CPU, prefixes={6: (0, 4), 8: (0, 4)})
    assert shared.longest == 6
    whole = torch.tensor([*range(6), *range(4), 6, 7, *range(4), 8, *range(9, 13)])
    alone = Rows.of(((0, 0, 6), (0, 6, 12), (0, 12, 17), (0, 17, 21)), (1, 21), CPU)
    own = torch.tensor([*range(6), 10, 11, 16, *range(17, 21)])
    results = []
    for compute in (
        lambda q, k, v: attention(LAYER, q, k, v, None, rows=shared, sliding_window=window)[0],
        lambda q, k, v: attention(
            LAYER,
            q[:, :, whole],
            k[:, :, whole],
            v[:, :, whole],
            None,
            rows=alone,
            sliding_window=window,
        )[0][:, own],
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = compute(*leaves)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_the_backward_pass_writes_no_more_for_many_sequences_than_for_few(
    window: int | None,
) -> None:
    def written(length: int) -> int:
        rows = Rows.of(tuple((0, n, n + length) for n in range(0, 256, length)), (1, 256), CPU)
        q, k, v = (torch.randn(1, heads, 256, 4, requires_grad=True) for heads in (4, 2, 2))
        out, _ = attention(LAYER, q, k, v, None, rows=rows, sliding_window=window)
        with (elements := Written()):
            out.sum().backward()
        return elements.count

    # Padding inside kernels and scores of attention do not grow with the number of sequences.
    assert written(4) < 2 * written(64)


def test_padding_is_a_sequence_of_its_own() -> None:
    rows = Rows.of(BOUNDS, (2, 8), CPU)
    assert rows.bounds == ((0, 0, 5), (0, 5, 7), (0, 7, 8), (1, 0, 6), (1, 6, 8))
    assert rows.starts_N.tolist() == [0, 5, 7, 8, 14, 16]
    assert rows.longest == 6
    assert not rows.whole
    assert Rows.of(((0, 0, 8), (1, 0, 8)), (2, 8), CPU).whole


@pytest.mark.parametrize("name", ["position_bias", "softcap", "s_aux"])
def test_layers_that_change_scores_are_refused(name: str) -> None:
    x = torch.zeros(1, 2, 3, 4)
    rows = Rows.of(((0, 0, 3),), (1, 3), CPU)
    with pytest.raises(UnsupportedModel, match="changes the scores of its attention"):
        attention(nn.Identity(), x, x, x, None, rows=rows, **{name: 1.0})  # type: ignore[arg-type]


def test_packed_rows_make_no_mask_and_no_scores_between_sequences(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = fsdp2_policy(load, OptimizerSpec(1e-2), packing=True)
    assert isinstance(policy.strategy, Fsdp2Strategy)
    assert policy.strategy.batcher.packed
    samples = batch(load(), LOSSES["ppo"], count=20)
    calls: list[tuple[int, bool]] = []
    original = functional.scaled_dot_product_attention

    def record(query: Tensor, *args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        calls.append((query.shape[2], attn_mask is None))
        return original(query, *args, attn_mask=attn_mask, **kwargs)  # type: ignore[misc]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    policy.train_step(samples, LOSSES["ppo"])
    assert len(calls) > len(samples)
    assert all(unmasked for _, unmasked in calls)
    assert max(length for length, _ in calls) <= max(len(sample.tokens_T) for sample in samples)


def small(name: str, **changes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(
        name,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **changes,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3", "mistral", "qwen2_moe"])
def test_models_that_hand_arguments_to_their_attention_use_it(name: str) -> None:
    decoder = small(name).get_decoder()
    assert try_varlen(decoder, CPU)
    assert decoder.config._attn_implementation == varlen.NAME
    ids = torch.arange(1, 10)[None]
    rows = Rows.of(((0, 0, 6), (0, 6, 9)), (1, 9), CPU, prefixes={6: (0, 4)})
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5, 6]])
    shared = decoder(input_ids=ids, position_ids=positions, use_cache=False, rows=rows)
    rows = Rows.of(((0, 0, 7),), (1, 7), CPU)
    alone = decoder(input_ids=ids[:, [0, 1, 2, 3, 6, 7, 8]], use_cache=False, rows=rows)
    torch.testing.assert_close(shared.last_hidden_state[:, 6:], alone.last_hidden_state[:, 4:])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 1}),
        ("phimoe", {}),
    ],
)
def test_windows_that_a_model_has_in_its_masks_only_count(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence of the probe is longer than the window."""
    decoder = small(name, sliding_window=4, **changes).get_decoder()
    assert try_varlen(decoder, CPU)
    monkeypatch.setattr(varlen, "_window_of_mask", lambda _: None)
    assert not try_varlen(small(name, sliding_window=4, **changes).get_decoder(), CPU)


@pytest.mark.parametrize(
    "model",
    [
        lambda: AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", vocab_size=32, n_embd=16, n_layer=2, n_head=2),
            attn_implementation="eager",
        ).eval(),
        lambda: small("bloom"),
        lambda: small("nemotron"),
    ],
    ids=["eager", "bloom", "bounds do not reach its layers"],
)
def test_other_models_keep_their_own_attention(model: Callable[[], PreTrainedModel]) -> None:
    decoder = model().get_decoder()
    before = decoder.config._attn_implementation
    assert not try_varlen(decoder, CPU)
    assert decoder.config._attn_implementation == before
