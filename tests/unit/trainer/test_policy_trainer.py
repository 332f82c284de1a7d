"""The policy's trainer on one rank, against plain autograd on one unpadded sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedModel

from agenticrun_workers.algorithms.losses import Decoupled, Ppo, Vanilla
from agenticrun_workers.algorithms.token_advantages import TokenSpec
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.batch import RankBatch
from agenticrun_workers.trainer.checkpoint import CheckpointMismatch
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.optimizer import NonFiniteGradient, OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.rank import combine
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import FsdpOptions
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn
from ragged_samples import LOSSES, VOCABULARY, batch, largest_difference, token_log_probs
from slow_losses import actor_loss

SPEC = OptimizerSpec(1e-2, max_grad_norm=1e9)
LOSS = LossSpec(aggregation="token-mean", entropy_coef=0.1)

Load = Callable[[], PreTrainedModel]


@pytest.fixture
def samples(load: Load) -> list[Sample]:
    return batch(load(), LOSS)


def slow_gradients(
    model: PreTrainedModel, samples: list[Sample], loss: LossSpec
) -> dict[str, torch.Tensor]:
    actor_loss(model, samples, loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def weights(policy: PolicyTrainer) -> dict[str, np.ndarray]:
    return {name: weight.numpy().copy() for name, weight in policy.export_weights()}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_formulas(load: Load, name: str) -> None:
    loss = LOSSES[name]
    samples = batch(load(), loss)
    found = fsdp2_policy(load, SPEC, max_tokens=40).gradients(samples, loss)
    assert largest_difference(found, slow_gradients(load(), samples, loss)) < 1e-10


def test_a_model_of_another_architecture_with_dropout_trains_without_it() -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.5,
        bos_token_id=0,
        eos_token_id=1,
    )

    def gpt2() -> PreTrainedModel:
        torch.manual_seed(0)
        # The trainer sets the attention in the config of its model.
        return AutoModelForCausalLM.from_config(copy.deepcopy(config)).double().eval()

    loss = LOSSES["ppo"]
    samples = batch(gpt2(), loss)
    found = fsdp2_policy(gpt2, SPEC, packing=True).gradients(samples, loss)
    assert largest_difference(found, slow_gradients(gpt2(), samples, loss)) < 1e-10


def test_scoring_in_chunks_changes_no_gradient(load: Load, samples: list[Sample]) -> None:
    expected = fsdp2_policy(load, SPEC).gradients(samples, LOSS)
    chunked = fsdp2_policy(load, SPEC, options=FsdpOptions(logits_chunk_elements=5 * VOCABULARY))
    assert largest_difference(chunked.gradients(samples, LOSS), expected) < 1e-12


def test_without_old_log_probs_the_current_ones_serve(load: Load, samples: list[Sample]) -> None:
    policy = fsdp2_policy(load, SPEC)
    bare = [replace(s, old_logprobs_T=None) for s in samples]
    exact = [
        replace(s, old_logprobs_T=token_log_probs(load(), s.tokens_T, 1.0).detach().numpy())
        for s in samples
    ]
    assert largest_difference(policy.gradients(bare, LOSS), policy.gradients(exact, LOSS)) < 1e-6
    metrics = policy.train_step(bare, LOSS)
    assert metrics["actor/ratio_max"] == metrics["actor/ratio_min"] == metrics["actor/ess"] == 1
    assert metrics["actor/approxkl"] == 0


@pytest.mark.parametrize("strategy", [fsdp2_policy, ReferencePolicy])
def test_log_probs_of_all_response_tokens_equal_a_plain_forward_pass(
    load: Load, samples: list[Sample], strategy: Callable[..., Any]
) -> None:
    arguments = (load, SPEC) if strategy is fsdp2_policy else (load,)
    results = strategy(*arguments, max_tokens=30, temperature=0.7).compute_log_probs(samples)
    for sample, result in zip(samples, results, strict=True):
        logp_T = token_log_probs(load(), sample.tokens_T, 0.7).detach().numpy()
        np.testing.assert_allclose(result, logp_T * (sample.turns_T >= 0), atol=1e-6)


def test_the_supervised_gradient_is_the_mean_cross_entropy_of_weighted_tokens(
    load: Load, samples: list[Sample]
) -> None:
    model = load()
    total = sum(float(s.weight_T[1:].sum()) for s in samples)
    weighted = [
        (torch.from_numpy(s.weight_T).double() * token_log_probs(model, s.tokens_T, 1.0)).sum()
        for s in samples
    ]
    loss = -torch.stack(weighted).sum() / total
    loss.backward()
    # With this epsilon, Adam's first step is g / (|g| + 1).
    policy = fsdp2_policy(load, OptimizerSpec(1.0, epsilon=1.0, max_grad_norm=1e9), max_tokens=40)
    before = weights(policy)
    metrics = policy.supervised_step(samples)
    assert metrics["warmup/loss"] == pytest.approx(loss.item())
    for name, parameter in model.named_parameters():
        step = parameter.grad / (parameter.grad.abs() + 1.0)
        np.testing.assert_allclose(weights(policy)[name], before[name] - step.numpy(), atol=1e-5)


def test_the_first_rl_step_starts_with_a_new_optimizer(
    load: Load, samples: list[Sample], tmp_path: Path
) -> None:
    spec = OptimizerSpec(1e-2, schedule="linear", total_steps=10, max_grad_norm=1e9)

    def after_rl(model: PreTrainedModel | None, folder: Path | None = None) -> PolicyTrainer:
        """Train one step, from this model or from the checkpoint at the end of a warm-up."""
        policy = fsdp2_policy((lambda: model) if model is not None else load, spec)
        if folder is not None:
            policy.load(str(folder))
        policy.train_step(samples, LOSS)
        return policy

    warm = fsdp2_policy(load, spec)
    for _ in range(3):
        warm.supervised_step(samples)
    warm.end_warm_up()
    assert warm.strategy.steps.steps == 0
    start = weights(warm)
    checkpoint.save(str(tmp_path / "end"), warm.snapshot())
    model = load()
    values = {name: torch.from_numpy(value) for name, value in start.items()}
    model.load_state_dict(values, strict=False)  # the second name of a tied parameter is missing
    expected = weights(after_rl(model))
    warm.train_step(samples, LOSS)
    resumed = after_rl(None, tmp_path / "end")
    for name, value in expected.items():
        assert (value != start[name]).any()
        np.testing.assert_allclose(weights(warm)[name], value, atol=1e-12)
        np.testing.assert_allclose(weights(resumed)[name], value, atol=1e-12)


def test_a_reference_that_only_the_reward_reads_is_measured(load: Load) -> None:
    with_kl = replace(LOSSES["ppo"], aggregation="token-mean", entropy_coef=0.0)
    without = replace(with_kl, kl_coef=0.0)
    samples = batch(load(), with_kl)
    pg_loss = actor_loss(load(), samples, without).item()
    kl = actor_loss(load(), samples, replace(with_kl, kl_coef=1.0)).item() - pg_loss
    for given, expected in (
        (samples, kl),
        ([replace(sample, ref_logprobs_T=None) for sample in samples], 0.0),
    ):
        metrics = fsdp2_policy(load, OptimizerSpec(1e-2), max_tokens=30).train_step(given, without)
        assert metrics["actor/kl_loss"] == pytest.approx(expected)
        assert metrics["actor/total_loss"] == pytest.approx(pg_loss)


def test_metrics_say_what_the_step_did(load: Load) -> None:
    loss = replace(LOSSES["ppo"], aggregation="token-mean")
    samples = batch(load(), loss)
    metrics = fsdp2_policy(load, OptimizerSpec(1e-2, warmup_steps=4), max_tokens=30).train_step(
        samples, loss
    )
    changes: list[float] = []
    for s in samples:
        assert s.old_logprobs_T is not None
        new_T = token_log_probs(load(), s.tokens_T, loss.temperature).detach().numpy()
        changes += [
            new_T[t] - float(s.old_logprobs_T[t]) for t in np.flatnonzero(s.weight_T[1:]) + 1
        ]
    ratios = np.exp(changes)
    policy_only = replace(loss, kl_coef=0.0, entropy_coef=0.0)
    pg_loss = actor_loss(load(), samples, policy_only).item()
    expected = {
        "actor/pg_loss": pg_loss,
        "actor/kl_loss": actor_loss(load(), samples, replace(policy_only, kl_coef=1.0)).item()
        - pg_loss,
        "actor/entropy": pg_loss
        - actor_loss(load(), samples, replace(policy_only, entropy_coef=1.0)).item(),
        "actor/total_loss": actor_loss(load(), samples, loss).item(),
        "actor/approxkl": np.mean(np.square(changes)) / 2,
        "actor/policykl": -np.mean(changes),
        "actor/ratio_mean": ratios.mean(),
        "actor/ratio_max": ratios.max(),
        "actor/ratio_min": ratios.min(),
        "actor/ess": ratios.sum() ** 2 / (len(ratios) * np.square(ratios).sum()),
        "actor/lr": 2.5e-3,
        "actor/skipped_steps": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert 0 < metrics["actor/clipfrac"] < 1
    assert metrics["actor/grad_norm"] > 0
    assert 0 < metrics["train/padding_waste"] < 1


@pytest.mark.parametrize("old", ["current", "given"])
def test_the_gap_to_the_engine_is_that_of_the_tokens_of_the_current_weights(
    load: Load, old: str
) -> None:
    loss = replace(LOSSES["ppo"], kl_coef=0.0)
    rng = np.random.default_rng(1)
    samples = [
        replace(s, old_logprobs_T=None if old == "current" else s.old_logprobs_T)
        for s in batch(load(), loss)
    ]
    marked = [replace(s, current_T=rng.random(len(s.tokens_T)) < 0.5) for s in samples]
    gaps: list[float] = []
    for s in marked:
        assert s.engine_logprobs_T is not None
        assert s.current_T is not None
        new_T = token_log_probs(load(), s.tokens_T, loss.temperature).detach().numpy()
        gaps += [
            abs(new_T[t] - float(s.engine_logprobs_T[t]))
            for t in np.flatnonzero((s.weight_T * s.current_T)[1:]) + 1
        ]
    assert gaps
    assert fsdp2_policy(load, SPEC, max_tokens=30).train_step(marked, loss)[
        "engine/logprob_gap"
    ] == pytest.approx(np.mean(gaps))
    none_current = [replace(s, current_T=np.zeros(len(s.tokens_T), np.bool_)) for s in samples]
    for unmeasured in (samples, none_current):
        assert "engine/logprob_gap" not in fsdp2_policy(load, SPEC).train_step(unmeasured, loss)


def sampled_before(model: PreTrainedModel, count: int = 6) -> list[Trajectory]:
    """Trajectories of two turns; version 3 sampled the first, and version 4, `model`, the second.

    The log-probs of the first turns differ from those of `model`.
    """
    rng = np.random.default_rng(0)
    trajectories = []
    for member in range(count):
        turns: list[Turn] = []
        for version in (3, 4):
            prompt_T, response_T = (
                rng.integers(VOCABULARY, size=size).astype(np.int32) for size in (3, 5)
            )
            before = [t for turn in turns for t in (*turn.prompt_T, *turn.response_T)]
            text_T = np.array([*before, *prompt_T, *response_T], np.int32)
            logprobs_T = token_log_probs(model, text_T, 1.0).detach().numpy()[-5:]
            noise_T = rng.normal(size=5) * 0.5 * (version == 3)
            turns.append(
                Turn(
                    prompt_T,
                    response_T,
                    (logprobs_T + noise_T).astype(np.float32),
                    np.full(5, version, np.int32),
                    0.0,
                    engine="engine-0",
                )
            )
        key = EpisodeKey(Stream.TRAIN, 0, member)
        trajectories.append(Trajectory(key, "A", tuple(turns), StopReason.COMPLETED))
    return trajectories


def trained_on(
    policy: PolicyTrainer, trajectories: list[Trajectory], *, rollout: bool, epochs: int = 1
) -> list[dict[str, float]]:
    """Take the optimizer steps of a batch, as a rank does; return the metrics of each."""
    mini_batches = [range(len(trajectories))] * epochs
    batch = RankBatch(trajectories, mini_batches=mini_batches)
    if rollout:
        batch.old_logprobs = batch.rollout_logprobs()
    credits = {t.key: np.full(2, 1.0 - 2 * (t.key.member % 2)) for t in trajectories}
    batch.compute_advantages(TokenSpec("grpo"), credits, 0.0, lambda values: values)
    loss = LossSpec(Ppo(0.2, 0.2), aggregation="token-mean")
    steps = batch.mini_batch_samples(version=4)
    return [dict(policy.train_step(samples, loss)) for samples in steps]


def test_the_clip_acts_on_stale_tokens_where_the_rollouts_log_probs_are_the_old_ones(
    load: Load,
) -> None:
    trajectories = sampled_before(load())
    [found] = trained_on(fsdp2_policy(load, SPEC), trajectories, rollout=True)
    losses, clipped, ratios = [], [], []
    for t in trajectories:
        new_T = token_log_probs(load(), t.tokens_T, 1.0).detach().numpy()
        advantage = 1.0 - 2 * (t.key.member % 2)
        for i in np.flatnonzero(t.response_mask_T):
            ratio = np.exp(new_T[i] - float(t.logprobs_T[i]))
            bounded = min(max(ratio, 0.8), 1.2)
            losses.append(-min(ratio * advantage, bounded * advantage))
            clipped.append(bounded * advantage < ratio * advantage)
            ratios.append(ratio)
    assert 0 < np.mean(clipped) < 0.5
    assert found["actor/clipfrac"] == pytest.approx(np.mean(clipped))
    assert found["actor/pg_loss"] == pytest.approx(np.mean(losses))
    assert found["actor/ratio_max"] == pytest.approx(np.max(ratios))
    [without] = trained_on(fsdp2_policy(load, SPEC), trajectories, rollout=False)
    assert (without["actor/clipfrac"], without["actor/ratio_max"]) == (0.0, 1.0)


@pytest.mark.parametrize("rollout", [False, True])
def test_stale_tokens_are_no_gap_between_trainer_and_engine(load: Load, rollout: bool) -> None:
    first, second = trained_on(
        fsdp2_policy(load, SPEC), sampled_before(load()), rollout=rollout, epochs=2
    )
    assert first["engine/logprob_gap"] < 1e-6
    assert "engine/logprob_gap" not in second, "the weights have changed since"


def test_the_gradient_is_clipped_to_its_norm(load: Load, samples: list[Sample]) -> None:
    """Check the clipping by the size of Adam's first step.

    A large epsilon makes that step proportional to the gradient.
    """
    policy = fsdp2_policy(load, OptimizerSpec(1.0, max_grad_norm=1e-3, epsilon=1.0))
    before = weights(policy)
    metrics = policy.train_step(samples, LOSS)
    step = np.sqrt(sum(np.square(w - before[name]).sum() for name, w in weights(policy).items()))
    assert step == pytest.approx(1e-3, rel=0.01)
    assert metrics["actor/grad_norm"] > 1e-2


def broken(
    samples: list[Sample], name: str = "advantages_T", value: float = np.nan
) -> list[Sample]:
    """The same, but for the first sample's array of this name."""
    array: Any = np.full(len(samples[0].tokens_T), value, np.float32)
    first = replace(samples[0], **{name: array})
    return [first, *samples[1:]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["advantages_T", "old_logprobs_T", "is_weights_T"])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_counted(
    load: Load, samples: list[Sample], name: str, value: float
) -> None:
    policy = fsdp2_policy(load, replace(SPEC, weight_decay=0.1))
    before = weights(policy)
    skipped = policy.train_step(broken(samples, name, value), LOSS)["actor/skipped_steps"]
    changed = any((weight != before[name]).any() for name, weight in weights(policy).items())
    assert changed == (skipped == 0)
    assert skipped == 1 or (name, value) == ("old_logprobs_T", np.inf)  # a ratio of 0 is a number
    assert policy.train_step(samples, LOSS)["actor/skipped_steps"] == skipped
    assert all(np.isfinite(weight).all() for weight in weights(policy).values())
    assert any((weight != before[name]).any() for name, weight in weights(policy).items())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_reference_log_probs_that_are_not_finite_never_reach_the_weights(
    load: Load, samples: list[Sample], value: float
) -> None:
    policy = fsdp2_policy(load, SPEC)
    policy.train_step(broken(samples, "ref_logprobs_T", value), replace(LOSS, kl_coef=0.1))
    assert all(np.isfinite(weight).all() for weight in weights(policy).values())


def test_too_many_gradients_in_a_row_that_are_not_finite_end_the_run_and_name_a_parameter(
    load: Load, samples: list[Sample]
) -> None:
    policy = fsdp2_policy(load, replace(SPEC, max_skipped_steps=2))
    for _ in range(2):
        policy.train_step(broken(samples), LOSS)
    policy.train_step(samples, LOSS)
    for _ in range(2):
        policy.train_step(broken(samples), LOSS)
    with pytest.raises(
        NonFiniteGradient,
        match=r"3 gradients in a row were not finite.*model\.embed_tokens\.weight",
    ):
        policy.train_step(broken(samples), LOSS)


def test_a_number_that_is_not_finite_under_weight_zero_breaks_nothing(
    load: Load, samples: list[Sample]
) -> None:
    outside = [
        replace(s, advantages_T=np.where(s.weight_T > 0, s.advantages_T, np.nan).astype(np.float32))
        for s in samples
    ]
    policy = fsdp2_policy(load, SPEC)
    assert largest_difference(policy.gradients(outside, LOSS), policy.gradients(samples, LOSS)) == 0


@pytest.mark.parametrize("empty_batch", ["weights of zero", "no samples"])
def test_a_batch_without_any_weight_is_no_step_and_not_in_the_metrics(
    load: Load, samples: list[Sample], empty_batch: str
) -> None:
    empty = [
        replace(s, weight_T=np.zeros_like(s.weight_T))
        for s in samples
        if empty_batch == "weights of zero"
    ]
    policy = fsdp2_policy(load, replace(SPEC, weight_decay=0.1))
    first = dict(policy.train_step(samples, LOSS))
    before = weights(policy)
    nothing = dict(policy.train_step(empty, LOSS))
    assert nothing == {"actor/skipped_steps": 0}
    assert combine([nothing, first, nothing]) == first
    policy.supervised_step(empty)
    assert policy.strategy.steps.skipped == 0
    for name, weight in weights(policy).items():
        np.testing.assert_array_equal(weight, before[name])


def test_the_schedule_ends_with_the_run_also_over_batches_without_any_weight(
    load: Load, samples: list[Sample]
) -> None:
    empty = [replace(s, weight_T=np.zeros_like(s.weight_T)) for s in samples]
    policy = fsdp2_policy(load, replace(SPEC, schedule="linear", total_steps=4))
    rates = [policy.train_step(batch, LOSS).get("actor/lr") for batch in (samples, empty, samples)]
    assert rates == [SPEC.learning_rate, None, SPEC.learning_rate / 2]


def test_a_loss_says_which_array_it_lacks(load: Load, samples: list[Sample]) -> None:
    policy = fsdp2_policy(load, SPEC)
    with pytest.raises(ValueError, match="sample 0 lacks ref_logprobs_T"):
        policy.train_step([replace(s, ref_logprobs_T=None) for s in samples], LossSpec(kl_coef=0.1))
    with pytest.raises(ValueError, match="decoupled PPO needs the engine's log-probs"):
        policy.train_step(
            [replace(s, engine_logprobs_T=None, is_weights_T=None) for s in samples],
            LossSpec(Decoupled()),
        )
    with pytest.raises(ValueError, match="sample 1 lacks old_logprobs_T"):
        policy.train_step([samples[0], replace(samples[1], old_logprobs_T=None)], LOSS)


def test_a_ratio_level_is_refused_for_a_loss_without_ratios() -> None:
    with pytest.raises(ValueError, match="Vanilla has no ratio that could be of level segment"):
        LossSpec(Vanilla(), "segment")


def test_exported_weights_have_the_model_s_names_and_values(load: Load) -> None:
    exported = weights(fsdp2_policy(load, SPEC))
    expected = dict(load().named_parameters())
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        np.testing.assert_array_equal(weight, expected[name].detach().numpy(), strict=True)


def test_an_exported_folder_loads_with_transformers_own_classes(
    load: Load, folder: Path, samples: list[Sample], tmp_path: Path
) -> None:
    policy = fsdp2_policy(load, SPEC)
    policy.train_step(samples, LOSS)
    tokenizer_files = {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if "token" in file.name or "template" in file.name
    }
    policy.export_folder(tmp_path / "hf", tokenizer_files)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "hf").get_vocab()
        == AutoTokenizer.from_pretrained(folder).get_vocab()
    )
    [expected] = policy.compute_log_probs(samples[:1])
    found = token_log_probs(model, samples[0].tokens_T, 1.0).detach().numpy()
    np.testing.assert_allclose(found * (samples[0].turns_T >= 0), expected, atol=1e-6)
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_a_reference_becomes_the_policy_whose_weights_it_is_given(
    load: Load, samples: list[Sample], tmp_path: Path
) -> None:
    policy, reference = fsdp2_policy(load, replace(SPEC, learning_rate=0.1)), ReferencePolicy(load)
    policy.train_step(samples, LOSS)
    moved = policy.compute_log_probs(samples)
    assert any(
        np.abs(a - b).max() > 0.01
        for a, b in zip(reference.compute_log_probs(samples), moved, strict=True)
    )
    reference.load_weights(policy.export_weights())
    policy.train_step(samples, LOSS)
    checkpoint.save(str(tmp_path), reference.snapshot())
    restored = ReferencePolicy(load)
    restored.load(str(tmp_path))
    for frozen in (reference, restored):
        for a, b in zip(frozen.compute_log_probs(samples), moved, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_reference_refuses_the_weights_of_another_model(load: Load) -> None:
    other = [(name, weight[:1]) for name, weight in fsdp2_policy(load, SPEC).export_weights()]
    with pytest.raises(CheckpointMismatch, match="embed_tokens"):
        ReferencePolicy(load).load_weights(other)


def test_a_resumed_trainer_goes_on_as_if_it_had_never_stopped(load: Load, tmp_path: Path) -> None:
    spec = OptimizerSpec(1e-2, "linear", warmup_steps=2, total_steps=9)
    loss = LOSSES["ppo"]
    batches = [batch(load(), loss, seed) for seed in range(6)]
    straight = fsdp2_policy(load, spec)
    for step in range(3):
        straight.train_step(batches[step], loss)
    straight.policy_version = 3
    checkpoint.save(str(tmp_path), straight.snapshot())
    resumed = fsdp2_policy(load, spec)
    resumed.load(str(tmp_path))
    assert resumed.policy_version == 3
    for step in range(3, 6):
        assert straight.train_step(batches[step], loss) == resumed.train_step(batches[step], loss)
    for name, weight in weights(straight).items():
        np.testing.assert_array_equal(weight, weights(resumed)[name], err_msg=name)


def test_a_schedule_of_another_length_goes_on_from_the_rate_of_the_checkpoint(
    load: Load, samples: list[Sample], tmp_path: Path
) -> None:
    first = fsdp2_policy(load, OptimizerSpec(1.0, "linear", total_steps=4))
    first.train_step(samples, LOSS)
    checkpoint.save(str(tmp_path), first.snapshot())
    resumed = fsdp2_policy(load, OptimizerSpec(1.0, "linear", total_steps=31))
    resumed.load(str(tmp_path))
    resumed.stretch_schedule(30)
    assert [resumed.train_step(samples, LOSS)["actor/lr"] for _ in range(2)] == [
        0.75,
        pytest.approx(0.725),
    ]


def test_a_checkpoint_of_another_model_is_refused_by_parameter(load: Load, tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path / "checkpoint"), fsdp2_policy(load, SPEC).snapshot())
    initialize_model(
        tmp_path / "other", InitializeSpec(tuple("abcdefghijklmnop"), hidden_size=32, heads=2)
    )
    other = fsdp2_policy(lambda: load_model(str(tmp_path / "other")), SPEC)
    with pytest.raises(
        CheckpointMismatch,
        match=r"embed_tokens.weight: the model has shape \[21, 32\].*shape \[21, 16\]",
    ):
        other.load(str(tmp_path / "checkpoint"))
    with pytest.raises(CheckpointMismatch, match="no trainer checkpoint"):
        other.load(str(tmp_path / "nothing"))
