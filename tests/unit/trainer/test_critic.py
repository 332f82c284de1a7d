"""The critic on one rank, against plain autograd on one unpadded sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.checkpoint import CheckpointMismatch
from agenticrun_workers.trainer.critic import CriticTrainer, ValueLossSpec
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.varlen import Rows
from ragged_samples import LOSSES, VALUE_LOSSES, batch, largest_difference

SPEC = OptimizerSpec(1e-2, max_grad_norm=1e9)

Load = Callable[[], PreTrainedModel]


@pytest.fixture
def samples(load: Load) -> list[Sample]:
    return batch(load(), LOSSES["ppo"])


@pytest.fixture
def critic(load: Load, samples: list[Sample]) -> CriticTrainer:
    """A critic that has learned a little, so that its head is not zero."""
    critic = CriticTrainer(load, OptimizerSpec(5e-2), max_tokens=30)
    for _ in range(3):
        critic.train_step(samples, ValueLossSpec())
    return critic


def plain_values(critic: CriticTrainer, sample: Sample) -> Tensor:
    """Value after each prefix, [T + 1]; the empty one has none."""
    module = critic._model.module
    ids_1T = torch.from_numpy(sample.tokens_T).long()[None]
    rows = Rows.of(((0, 0, ids_1T.shape[1]),), (1, ids_1T.shape[1]), ids_1T.device)
    hidden_TH = module.decoder(input_ids=ids_1T, rows=rows).last_hidden_state[0]
    values_T: Tensor = module.head(hidden_TH)[:, 0]
    return torch.cat([values_T.new_zeros(1), values_T])


def slow_loss(critic: CriticTrainer, samples: list[Sample], spec: ValueLossSpec) -> Tensor:
    live = [s for s in samples if s.weight_T[1:].any()]
    total = sum(int(s.weight_T[1:].sum()) for s in live)
    loss = torch.zeros((), dtype=torch.float64)
    for s in live:
        assert s.returns_T is not None
        assert s.old_values_T is not None
        values = plain_values(critic, s)
        counted = [t for t in range(1, len(s.tokens_T)) if s.weight_T[t]]
        for t in counted:
            squares = [(values[t] - float(s.returns_T[t])) ** 2]
            if spec.clip is not None:
                old = float(s.old_values_T[t])
                squares.append(
                    (
                        torch.clamp(values[t], old - spec.clip, old + spec.clip)
                        - float(s.returns_T[t])
                    )
                    ** 2
                )
            share = 1 / total if spec.aggregation == "token-mean" else 1 / len(counted) / len(live)
            loss = loss + share * torch.stack(squares).max() / 2
    return loss


@pytest.mark.parametrize("name", VALUE_LOSSES)
def test_the_gradient_is_that_of_the_formulas(
    critic: CriticTrainer, samples: list[Sample], name: str
) -> None:
    found = critic.gradients(samples, VALUE_LOSSES[name])
    module: nn.Module = critic._model.module
    slow_loss(critic, samples, VALUE_LOSSES[name]).backward()
    expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert largest_difference(found, expected) < 1e-10


def test_at_first_every_text_is_worth_nothing(load: Load, samples: list[Sample]) -> None:
    for values in CriticTrainer(load, SPEC).compute_values(samples):
        assert not values.any()


@pytest.mark.parametrize("packing", [False, True])
def test_values_are_read_before_each_response_token_and_at_the_end(
    load: Load, critic: CriticTrainer, samples: list[Sample], packing: bool
) -> None:
    other = CriticTrainer(load, SPEC, packing=packing)
    other._model.module.load_state_dict(critic._model.module.state_dict())
    for sample, values in zip(samples, other.compute_values(samples), strict=True):
        expected = plain_values(critic, sample).detach().numpy()
        read = np.append(sample.turns_T >= 0, True)
        np.testing.assert_allclose(values, expected * read, atol=1e-6)


def test_a_sample_without_response_tokens_still_has_a_final_value(
    critic: CriticTrainer, samples: list[Sample]
) -> None:
    silent = replace(samples[0], turns_T=np.full_like(samples[0].turns_T, -1))
    [values] = critic.compute_values([silent])
    assert not values[:-1].any()
    assert values[-1] == pytest.approx(plain_values(critic, silent)[-1].item(), abs=1e-6)


def test_metrics_say_what_the_step_did(critic: CriticTrainer, samples: list[Sample]) -> None:
    spec = VALUE_LOSSES["clipped"]
    expected_loss = slow_loss(critic, samples, spec).item()
    pairs = []
    for s in samples:
        assert s.returns_T is not None
        values = plain_values(critic, s).detach()
        pairs += [
            (values[t].item(), float(s.returns_T[t])) for t in np.flatnonzero(s.weight_T[1:]) + 1
        ]
    metrics = critic.train_step(samples, spec)
    assert metrics["critic/loss"] == pytest.approx(expected_loss)
    assert metrics["critic/value"] == pytest.approx(np.mean([target for _, target in pairs]))
    assert metrics["critic/vpred"] == pytest.approx(np.mean([value for value, _ in pairs]))
    assert metrics["critic/error"] == pytest.approx(
        np.mean([(value - target) ** 2 for value, target in pairs])
    )
    assert 0 < metrics["critic/clipfrac"] < 1
    assert metrics["critic/grad_norm"] > 0
    assert metrics["critic/lr"] == 5e-2


def test_the_critic_learns_what_it_is_shown(load: Load, samples: list[Sample]) -> None:
    critic = CriticTrainer(load, OptimizerSpec(1e-2))
    errors = [critic.train_step(samples, ValueLossSpec())["critic/error"] for _ in range(60)]
    assert errors[-1] < 0.05 * errors[0]


def test_a_batch_without_any_weight_or_with_returns_that_are_not_finite_changes_no_weight(
    critic: CriticTrainer, samples: list[Sample]
) -> None:
    before = {name: p.detach().clone() for name, p in critic._model.module.named_parameters()}
    empty = [replace(s, weight_T=np.zeros_like(s.weight_T)) for s in samples]
    broken = [replace(s, returns_T=np.full_like(s.weight_T, np.inf)) for s in samples]
    assert critic.train_step(empty, ValueLossSpec()) == {"critic/skipped_steps": 0}
    assert critic.train_step(broken, ValueLossSpec())["critic/skipped_steps"] == 1
    for name, parameter in critic._model.module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_loss_says_which_array_it_lacks(critic: CriticTrainer, samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="lacks returns_T"):
        critic.train_step([replace(s, returns_T=None) for s in samples], ValueLossSpec())
    with pytest.raises(ValueError, match="lacks old_values_T"):
        critic.train_step([replace(s, old_values_T=None) for s in samples], ValueLossSpec(0.2))


def test_a_resumed_critic_goes_on_as_if_it_had_never_stopped(
    load: Load, samples: list[Sample], tmp_path: Path
) -> None:
    straight, resumed = (
        CriticTrainer(load, OptimizerSpec(1e-2, "linear", total_steps=9)) for _ in range(2)
    )
    straight.train_step(samples, ValueLossSpec())
    checkpoint.save(str(tmp_path), straight.snapshot())
    resumed.load(str(tmp_path))
    for _ in range(2):
        assert straight.train_step(samples, ValueLossSpec()) == resumed.train_step(
            samples, ValueLossSpec()
        )


def test_a_policy_s_checkpoint_is_no_critic_s(load: Load, tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), fsdp2_policy(load, SPEC).snapshot())
    with pytest.raises(CheckpointMismatch):
        CriticTrainer(load, SPEC).load(str(tmp_path))
