"""Log-probs and entropies by chunks, against the whole softmax and plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agenticrun_workers.trainer.log_probs import score

Scored = tuple[Tensor, Tensor]
TEMPERATURE = 0.7


def naive(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
) -> Scored:
    """From all logits at once."""
    logits_NV = hidden_NH @ weight_VH.T if bias_V is None else hidden_NH @ weight_VH.T + bias_V
    distribution = torch.distributions.Categorical(
        logits=logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    )
    return distribution.log_prob(targets_N), distribution.entropy()


def inputs(
    tokens: int, vocabulary: int, dtype: torch.dtype, *, bias: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    targets_N = torch.randint(vocabulary, (tokens,), generator=generator)
    return noise(tokens, 6), noise(vocabulary, 6), noise(vocabulary) if bias else None, targets_N


def gradients(
    scored: Callable[[], Scored], trained: list[Tensor], reads: tuple[bool, bool]
) -> list[Tensor]:
    """Of an arbitrary function of the log-probs, the entropies, or both."""
    parts = [
        (values_N * torch.linspace(-1, 2, len(values_N), dtype=values_N.dtype)).sum()
        for values_N in scored()
    ]
    loss = sum(part for part, read in zip(parts, reads, strict=True) if read)
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, trained))


@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(1, 7),
    chunk_elements=st.integers(1, 70),
    bias=st.booleans(),
    reads=st.sampled_from([(True, False), (False, True), (True, True)]),
)
def test_values_and_gradients_are_those_of_the_whole_softmax(
    tokens: int, vocabulary: int, chunk_elements: int, bias: bool, reads: tuple[bool, bool]
) -> None:
    given_inputs = inputs(tokens, vocabulary, torch.float64, bias=bias)
    trained = [tensor for tensor in given_inputs[:3] if tensor is not None]
    for found_N, expected_N in zip(
        score(*given_inputs, TEMPERATURE, chunk_elements),
        naive(*given_inputs, TEMPERATURE),
        strict=True,
    ):
        torch.testing.assert_close(found_N, expected_N, atol=1e-10, rtol=1e-10)
    found = gradients(lambda: score(*given_inputs, TEMPERATURE, chunk_elements), trained, reads)
    expected = gradients(lambda: naive(*given_inputs, TEMPERATURE), trained, reads)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_gradients_are_those_of_finite_differences() -> None:
    hidden_NH, weight_VH, bias_V, targets_N = inputs(4, 5, torch.float64, bias=True)
    assert bias_V is not None
    assert torch.autograd.gradcheck(
        lambda h, w, b: score(h, w, b, targets_N, TEMPERATURE, 10),
        (hidden_NH, weight_VH, bias_V),
        atol=1e-8,
    )


def test_bfloat16_is_scored_in_float32_and_its_gradient_summed_in_it() -> None:
    hidden_NH, weight_VH, _, targets_N = inputs(600, 8, torch.bfloat16, bias=False)
    logprobs_N, entropies_N = score(hidden_NH, weight_VH, None, targets_N, 1.0, 16)
    assert logprobs_N.dtype == entropies_N.dtype == torch.float32
    expected_N, _ = naive(hidden_NH, weight_VH, None, targets_N, 1.0)
    torch.testing.assert_close(logprobs_N, expected_N)
    wide = [
        hidden_NH.detach().double().requires_grad_(),
        weight_VH.detach().double().requires_grad_(),
    ]
    [exact_VH] = torch.autograd.grad(
        naive(wide[0], wide[1], None, targets_N, 1.0)[0].sum(), wide[1]
    )
    [found_VH] = torch.autograd.grad(logprobs_N.sum(), weight_VH)
    assert found_VH.dtype == torch.bfloat16
    torch.testing.assert_close(
        found_VH.double(), exact_VH, rtol=2e-2, atol=2e-3 * float(exact_VH.abs().max())
    )


def test_frozen_weights_get_no_gradient() -> None:
    hidden_NH, weight_VH, bias_V, targets_N = inputs(3, 5, torch.float64, bias=True)
    assert bias_V is not None
    logprobs_N, _ = score(hidden_NH, weight_VH.detach(), bias_V.detach(), targets_N, 1.0, 5)
    logprobs_N.sum().backward()
    expected = torch.autograd.grad(
        naive(hidden_NH, weight_VH, bias_V, targets_N, 1.0)[0].sum(), hidden_NH
    )
    torch.testing.assert_close(hidden_NH.grad, expected[0])


@pytest.mark.parametrize("chunk_elements", [1, 1_000])
def test_no_token_is_a_score_too(chunk_elements: int) -> None:
    hidden_NH, weight_VH, _, targets_N = inputs(0, 5, torch.float64, bias=False)
    logprobs_N, entropies_N = score(hidden_NH, weight_VH, None, targets_N, 1.0, chunk_elements)
    (logprobs_N.sum() + entropies_N.sum()).backward()
    assert logprobs_N.shape == entropies_N.shape == (0,)
    assert weight_VH.grad is not None
    assert not weight_VH.grad.any()
