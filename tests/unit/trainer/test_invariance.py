"""The gradient of an optimizer step does not depend on the cut, packing, padding or order.

Integration tests do the same for ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agenticrun_workers.trainer.critic import CriticTrainer
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.micro_batch import weighted
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.samples import Sample
from ragged_samples import LOSSES, VALUE_LOSSES, Cut, batch, largest_difference

SPEC = OptimizerSpec(1e-2)
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
CUTS: dict[str, Cut] = {
    "one sequence at a time": {"max_tokens": 1},
    "a few sequences at a time": {"max_tokens": 25},
    "all in one, packed": {"max_tokens": 10_000, "packing": True},
    "a few rows at a time, packed": {"max_tokens": 40, "packing": True},
}

Load = Callable[[], PreTrainedModel]


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loaded(dtype: str, load: Load, load_float32: Load) -> Load:
    return load if dtype == "float64" else load_float32


def shuffled(samples: list[Sample]) -> list[Sample]:
    return [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]


# No loss looks at the dtype: one of them shows that single precision changes only the rounding.
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in LOSSES), ("ppo", "float32")]
)
def test_the_policy_s_gradient_is_the_same_however_the_batch_is_cut(
    name: str, dtype: str, loaded: Load
) -> None:
    loss = LOSSES[name]
    samples = batch(loaded(), loss)
    expected = fsdp2_policy(loaded, SPEC, max_tokens=10_000).gradients(samples, loss)
    assert all(gradient.norm() > 0 for gradient in expected.values())
    for arguments in CUTS.values():
        for ordered in (samples, shuffled(samples)):
            found = fsdp2_policy(loaded, SPEC, **arguments).gradients(ordered, loss)
            assert largest_difference(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", VALUE_LOSSES)
def test_the_critic_s_gradient_is_the_same_however_the_batch_is_cut(
    name: str, dtype: str, loaded: Load
) -> None:
    loss = VALUE_LOSSES[name]
    samples = batch(loaded(), LOSSES["ppo"])
    expected = trained_critic(loaded, samples, max_tokens=10_000).gradients(samples, loss)
    assert all(gradient.norm() > 0 for gradient in expected.values())
    for arguments in CUTS.values():
        for ordered in (samples, shuffled(samples)):
            found = trained_critic(loaded, samples, **arguments).gradients(ordered, loss)
            assert largest_difference(found, expected) < TOLERANCE[dtype]


def trained_critic(loaded: Load, samples: list[Sample], **arguments: Unpack[Cut]) -> CriticTrainer:
    """Return a critic with a head that is not zero, so that gradients reach the decoder.

    Weights are the same at each call.
    """
    critic = CriticTrainer(loaded, SPEC, **arguments)
    with torch.no_grad():
        head = critic._model.module.head
        head.weight.copy_(torch.linspace(-1, 1, head.weight.numel()).reshape(head.weight.shape))
    return critic


@pytest.mark.parametrize("name", ["ppo", "decoupled segment"])
def test_metrics_are_the_same_however_the_batch_is_cut(name: str, load: Load) -> None:
    loss = LOSSES[name]
    samples = batch(load(), loss)
    expected = dict(fsdp2_policy(load, SPEC, max_tokens=10_000).train_step(samples, loss))
    waste = expected.pop("train/padding_waste")
    for arguments in CUTS.values():
        found = dict(fsdp2_policy(load, SPEC, **arguments).train_step(shuffled(samples), loss))
        assert found.pop("train/padding_waste") < waste
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("packing", [False, True])
def test_equal_first_tokens_are_computed_once_and_change_neither_gradient_nor_metrics(
    packing: bool, dtype: str, loaded: Load
) -> None:
    loss = LOSSES["ppo"]
    samples = batch(loaded(), loss, common=20)
    alone = fsdp2_policy(loaded, SPEC, max_tokens=1)
    expected = alone.gradients(samples, loss)
    scores = alone.compute_log_probs(samples)
    metrics = dict(alone.train_step(samples, loss))
    for max_tokens in (10_000, 60):
        policy = fsdp2_policy(loaded, SPEC, max_tokens=max_tokens, packing=packing)
        [*_, fullest] = sorted(
            policy.strategy.batcher.split(samples, weighted), key=lambda cut: len(cut.prefixes)
        )
        assert len(fullest.prefixes) == (4 if max_tokens == 10_000 else 2)
        found = policy.gradients(shuffled(samples), loss)
        # The model's norms round gradients to float32, here after they are summed over samples.
        assert largest_difference(found, expected) < max(1e-7, TOLERANCE[dtype])
        for score, alone_T in zip(policy.compute_log_probs(samples), scores, strict=True):
            np.testing.assert_allclose(score, alone_T, atol=1e-5)
        balance = {"train/padding_waste": 0.0}
        assert dict(policy.train_step(samples, loss)) == pytest.approx(
            metrics | balance, rel=1e-7 if dtype == "float64" else 1e-3, abs=1e-6
        )


def test_the_critic_reads_values_after_equal_first_tokens(load: Load) -> None:
    samples = batch(load(), LOSSES["ppo"], common=20)
    alone, critic = (trained_critic(load, samples, max_tokens=n) for n in (1, 10_000))
    loss = VALUE_LOSSES["clipped"]
    expected = alone.gradients(samples, loss)
    assert largest_difference(critic.gradients(samples, loss), expected) < 1e-7
    for found, values in zip(
        critic.compute_values(samples), alone.compute_values(samples), strict=True
    ):
        np.testing.assert_allclose(found, values, atol=1e-6)


def test_what_stands_behind_the_last_weighted_token_changes_nothing(load: Load) -> None:
    loss = LOSSES["ppo"]
    samples = batch(load(), loss)
    longer = [longer_by(sample, 6) for sample in samples]
    expected = fsdp2_policy(load, SPEC).gradients(samples, loss)
    assert (
        largest_difference(fsdp2_policy(load, SPEC, packing=True).gradients(longer, loss), expected)
        < 1e-12
    )


def longer_by(sample: Sample, tokens: int) -> Sample:
    """The same sample before so many tokens of an observation."""
    arrays: dict[str, Any] = {
        name: getattr(sample, name) for name in Sample.__slots__ if name.endswith("_T")
    }
    fills = {"turns_T": -1, "tokens_T": 3, "weight_T": 0}
    grown: dict[str, Any] = {
        name: None
        if values is None
        else np.append(values, np.full(tokens, fills.get(name, 9), values.dtype))
        for name, values in arrays.items()
    }
    return Sample(**grown, score=sample.score)
