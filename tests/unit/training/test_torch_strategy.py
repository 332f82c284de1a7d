"""The torch strategy on one rank, against plain autograd on one unpadded sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agenticrun_workers.models import InitializeSpec, initialize_model, load_model
from agenticrun_workers.training import CheckpointMismatch, LossSpec, OptimizerSpec, Sample, TorchStrategy
from agenticrun_workers.training import policy as policy_module

VOCABULARY = 21
SPEC = OptimizerSpec(1e-2, max_grad_norm=1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    spec = InitializeSpec(tuple("abcdefghijklmnop"), hidden_size=16, intermediate_size=32, heads=2, initializer_range=0.3)
    initialize_model(path, spec)
    return path


@pytest.fixture
def load(folder: Path) -> Callable[[], PreTrainedModel]:
    return lambda: load_model(str(folder), torch.float64)


def batch(seed: int = 0, count: int = 9) -> list[Sample]:
    """Ragged samples, one of them without any weight."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        length = int(rng.integers(3, 14))
        weight_T = (rng.random(length) < 0.5).astype(np.float32) * (number != 4)
        weight_T[0] = 0
        values = [(rng.normal(size=length) * weight_T).astype(np.float32) for _ in range(3)]
        samples.append(Sample(rng.integers(VOCABULARY, size=length).astype(np.int32), weight_T, values[0], values[1] - weight_T, values[2]))
    return samples


def reference_loss(model: PreTrainedModel, samples: list[Sample], spec: LossSpec, old: bool) -> torch.Tensor:
    """The loss written from the formulas, sequence by sequence."""
    live = [s for s in samples if s.weight_T[1:].any()]
    total_weight = sum(float(s.weight_T[1:].sum()) for s in live)
    total = torch.zeros((), dtype=torch.float64)
    for s in live:
        ids = torch.from_numpy(s.tokens_T).long()
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1] / spec.temperature, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        new = logp.gather(-1, ids[1:, None])[:, 0]
        before = torch.from_numpy(s.old_logprobs_T[1:]).double() if old else new.detach()
        advantage = torch.from_numpy(s.advantages_T[1:]).double()
        weight = torch.from_numpy(s.weight_T[1:]).double()
        ratio = (new - before).exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage)
        difference = torch.from_numpy(s.ref_logprobs_T[1:]).double() - new  # type: ignore[index]
        token = policy - spec.entropy_coef * entropy + spec.kl_coef * (difference.exp() - difference - 1)
        match spec.aggregation:
            case "token-mean":
                total = total + (weight * token).sum() / total_weight
            case "seq-mean-token-sum":
                total = total + (weight * token).sum() / len(live)
            case "seq-mean-token-mean":
                total = total + (weight * token).sum() / weight.sum() / len(live)
            case _:
                total = total + (weight * token).sum() / len(live) / spec.aggregation_norm
    return total


def gradients(strategy: TorchStrategy, step: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Gradients as they are when the optimizer would use them."""
    seen: dict[str, torch.Tensor] = {}

    def capture(*_: object) -> None:
        seen.update({n: p.grad.clone() for n, p in strategy._policy.model.named_parameters() if p.grad is not None})

    handle = strategy._optimizer.register_step_pre_hook(capture)
    step()
    handle.remove()
    return seen


LOSSES = [
    LossSpec(aggregation=name, aggregation_norm=7.0, entropy_coef=0.03, kl_coef=0.05, temperature=0.8)
    for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
]


@pytest.mark.parametrize("with_old", [False, True], ids=["detached", "given"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.aggregation)
def test_the_gradient_is_that_of_the_formulas_however_the_batch_is_cut(load, loss: LossSpec, with_old: bool) -> None:
    samples = batch()
    model = load()
    reference_loss(model, samples, loss, with_old).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    old = [s.old_logprobs_T for s in samples] if with_old else None
    for max_tokens in (1, 40, 10_000):
        strategy = TorchStrategy(load, SPEC, max_tokens=max_tokens)
        found = gradients(strategy, lambda s=strategy: s.train_step(samples, loss, old))
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-8)


def test_recomputing_in_chunks_changes_no_gradient(load, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TorchStrategy(load, SPEC)
    expected = gradients(whole, lambda: whole.train_step(batch(), LOSSES[0]))
    monkeypatch.setattr(policy_module, "CHUNK_TOKENS", 5)
    chunked = TorchStrategy(load, SPEC)
    found = gradients(chunked, lambda: chunked.train_step(batch(), LOSSES[0]))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-12, rtol=1e-10)


def test_log_probs_equal_a_plain_forward_pass(load) -> None:
    samples = batch()
    model = load()
    results = TorchStrategy(load, SPEC, max_tokens=30, temperature=0.7).compute_log_probs(samples)
    for sample, result in zip(samples, results, strict=True):
        ids = torch.from_numpy(sample.tokens_T).long()
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0, :-1] / 0.7, -1).gather(-1, ids[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(result[1:], logp * (sample.weight_T[1:] != 0), atol=1e-6)
        assert result[0] == 0


def test_the_supervised_gradient_is_the_mean_cross_entropy_of_weighted_tokens(load) -> None:
    samples = batch()
    model = load()
    loss = torch.zeros((), dtype=torch.float64)
    for s in samples:
        ids = torch.from_numpy(s.tokens_T).long()
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        loss = loss - (torch.from_numpy(s.weight_T[1:]).double() * logp).sum()
    loss = loss / sum(float(s.weight_T[1:].sum()) for s in samples)
    loss.backward()
    strategy = TorchStrategy(load, SPEC, max_tokens=40)
    metrics: dict[str, float] = {}
    found = gradients(strategy, lambda: metrics.update(strategy.supervised_step(samples)))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-10, rtol=1e-8)
    assert metrics["warmup/loss"] == pytest.approx(loss.item())


def test_metrics_say_what_the_step_did(load) -> None:
    samples = batch()
    strategy = TorchStrategy(load, OptimizerSpec(1e-2, warmup_steps=4))
    old = [s.old_logprobs_T for s in samples]
    metrics = strategy.train_step(samples, LossSpec(aggregation="token-mean", entropy_coef=0.1), old)
    model = load()
    expected = reference_loss(model, samples, LossSpec(aggregation="token-mean"), old=True)
    assert metrics["actor/pg_loss"] == pytest.approx(expected.item())
    assert metrics["actor/lr"] == 2.5e-3
    assert 0 < metrics["actor/clipfrac"] < 1
    assert metrics["actor/ratio_max"] > 1
    assert metrics["actor/skipped_steps"] == 0


def test_the_gradient_is_clipped_to_its_norm(load) -> None:
    strategy = TorchStrategy(load, replace(SPEC, max_grad_norm=1e-3))
    metrics: dict[str, float] = {}
    found = gradients(strategy, lambda: metrics.update(strategy.train_step(batch(), LossSpec())))
    norm = torch.sqrt(sum((g**2).sum() for g in found.values()))  # type: ignore[arg-type]
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)
    assert metrics["actor/grad_norm"] > 1e-2


def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_counted(load) -> None:
    samples = batch()
    strategy = TorchStrategy(load, SPEC)
    before = dict(strategy.export_weights())
    broken = [replace(samples[0], advantages_T=np.full_like(samples[0].advantages_T, np.nan)), *samples[1:]]
    assert strategy.train_step(broken, LossSpec())["actor/skipped_steps"] == 1
    for name, weight in strategy.export_weights():
        np.testing.assert_array_equal(weight, before[name])
    assert strategy.train_step(samples, LossSpec())["actor/skipped_steps"] == 1
    assert any((weight != before[name]).any() for name, weight in strategy.export_weights())


def test_a_batch_without_any_weight_is_a_step_without_gradient(load) -> None:
    empty = [replace(s, weight_T=np.zeros_like(s.weight_T)) for s in batch()]
    strategy = TorchStrategy(load, SPEC)
    before = dict(strategy.export_weights())
    strategy.train_step(empty, LossSpec())
    for name, weight in strategy.export_weights():
        np.testing.assert_array_equal(weight, before[name])


def test_exported_weights_have_the_model_s_names_and_values(load) -> None:
    exported = dict(TorchStrategy(load, SPEC).export_weights())
    expected = dict(load().named_parameters())
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        assert weight.dtype == np.float32
        np.testing.assert_allclose(weight, expected[name].detach().numpy(), rtol=1e-6)


def test_a_resumed_trainer_goes_on_as_if_it_had_never_stopped(load, tmp_path: Path) -> None:
    spec = OptimizerSpec(1e-2, "linear", warmup_steps=2, total_steps=9)
    straight = TorchStrategy(load, spec)
    for step in range(3):
        straight.train_step(batch(step), LOSSES[0])
    straight.policy_version = 3
    straight.save(tmp_path)
    resumed = TorchStrategy(load, spec)
    resumed.load(tmp_path)
    assert resumed.policy_version == 3
    for step in range(3, 6):
        assert straight.train_step(batch(step), LOSSES[0]) == resumed.train_step(batch(step), LOSSES[0])
    for (name, a), (_, b) in zip(straight.export_weights(), resumed.export_weights(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_a_checkpoint_of_another_model_is_refused_by_parameter(load, tmp_path: Path) -> None:
    TorchStrategy(load, SPEC).save(tmp_path / "checkpoint")
    initialize_model(tmp_path / "other", InitializeSpec(tuple("abcdefghijklmnop"), hidden_size=32, heads=2))
    other = TorchStrategy(lambda: load_model(str(tmp_path / "other")), SPEC)
    with pytest.raises(CheckpointMismatch, match=r"embed_tokens.weight: the model has shape \[21, 32\].*shape \[21, 16\]"):
        other.load(tmp_path / "checkpoint")
    with pytest.raises(CheckpointMismatch, match="no trainer checkpoint"):
        other.load(tmp_path / "nothing")
