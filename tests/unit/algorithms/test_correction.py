"""The train-inference correction against a slow definition by token, compiled and in NumPy."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms import (
    CorrectionSpec,
    FilterSpec,
    TokenAdvantages,
    TokenSpec,
    WeightSpec,
    token_advantages,
)
from agenticrun_workers.algorithms.correction import Level
from ragged_tokens import Token, Trajectory, Turn, batches, of_responses, pack

pytestmark = pytest.mark.usefixtures("both_definitions")

LEVELS: tuple[Level, ...] = ("token", "segment", "geometric", "sequence")
levels = st.sampled_from(LEVELS)
filters = st.builds(
    FilterSpec,
    levels,
    st.none() | st.floats(0.2, 1),
    st.none() | st.floats(1, 4),
    st.none() | st.floats(-1, 0),
    st.none() | st.floats(0, 1),
)
specs = st.builds(
    CorrectionSpec,
    st.none() | st.builds(WeightSpec, levels, st.none() | st.floats(0.5, 3)),
    st.lists(filters, max_size=3),
)


def corrected(spec: CorrectionSpec, batch: list[Trajectory]) -> TokenAdvantages:
    packed, per_turn = pack(batch)
    return token_advantages(
        TokenSpec("grpo", correction=spec), packed, per_turn, 0.0, lambda sums: sums
    )


def slow_levels(trajectory: Trajectory) -> list[dict[Level, tuple[float, float]]]:
    """For each response token and level: ratio and difference of probabilities."""
    rows: list[dict[Level, tuple[float, float]]] = []
    for sequence in trajectory.sequences:
        everything = [token for turn in sequence for token in turn.response]
        for turn in sequence:
            for token in turn.response:
                q = [x.old - x.engine for x in turn.response]
                d = [exp(x.old) - exp(x.engine) for x in turn.response]
                all_q = [x.old - x.engine for x in everything]
                all_d = [exp(x.old) - exp(x.engine) for x in everything]
                rows.append(
                    {
                        "token": (
                            exp(token.old - token.engine),
                            exp(token.old) - exp(token.engine),
                        ),
                        "segment": (exp(sum(q) / len(q)), sum(d) / len(d)),
                        "geometric": (exp(sum(all_q) / len(all_q)), sum(all_d) / len(all_d)),
                        "sequence": (exp(min(20.0, max(-20.0, sum(all_q)))), sum(all_d)),
                    }
                )
    return rows


def near_a_bound(spec: CorrectionSpec, batch: list[Trajectory]) -> bool:
    """Whether rounding could put a token on either side of a bound."""
    for trajectory in batch:
        for row in slow_levels(trajectory):
            for f in spec.filters:
                bounds = ((f.ratio_low, 0), (f.ratio_high, 0), (f.diff_low, 1), (f.diff_high, 1))
                if any(
                    bound is not None and abs(row[f.level][kind] - bound) < 1e-6
                    for bound, kind in bounds
                ):
                    return True
    return False


def slow_kept(spec: CorrectionSpec, row: dict[Level, tuple[float, float]]) -> bool:
    def within(value: float, low: float | None, high: float | None) -> bool:
        return (-inf if low is None else low) <= value <= (inf if high is None else high)

    return all(
        within(row[f.level][0], f.ratio_low, f.ratio_high)
        and within(row[f.level][1], f.diff_low, f.diff_high)
        for f in spec.filters
    )


@given(batches, specs)
def test_filters_keep_a_token_whose_ratios_and_differences_are_all_within_bounds(
    batch: list[Trajectory], spec: CorrectionSpec
) -> None:
    if near_a_bound(spec, batch):
        return
    packed, _ = pack(batch)
    expected = [[t.trains and slow_kept(spec, row) for row in slow_levels(t)] for t in batch]
    result = corrected(spec, batch)
    assert of_responses(packed, result.mask_L) == expected
    assert not result.mask_L[packed.turns_L < 0].any()
    kept = [keep for t, row in zip(batch, expected, strict=True) if t.trains for keep in row]
    assert result.metrics["actor/train_infer_final_mask_mean"] == pytest.approx(
        np.mean(kept) if kept else 0.0
    )


@given(batches, levels, st.none() | st.floats(0.5, 3))
def test_the_weight_is_the_ratio_of_its_level_up_to_its_bound(
    batch: list[Trajectory], level: Level, upper: float | None
) -> None:
    packed, _ = pack(batch)
    expected = [
        [min(row[level][0], inf if upper is None else upper) for row in slow_levels(t)]
        for t in batch
    ]
    weights = corrected(CorrectionSpec(WeightSpec(level, upper)), batch).weights_L
    assert weights is not None
    actual = of_responses(packed, weights)
    np.testing.assert_allclose(
        [x for row in actual for x in row], [x for row in expected for x in row], rtol=1e-5
    )
    np.testing.assert_array_equal(weights[packed.turns_L < 0], 0)


@given(batches)
def test_every_levels_mean_ratio_and_difference_is_reported(batch: list[Trajectory]) -> None:
    metrics = corrected(CorrectionSpec(WeightSpec("token", 1.0)), batch).metrics
    rows = [row for t in batch if t.trains for row in slow_levels(t)]
    for level in LEVELS:
        for kind, name in enumerate(("ratio", "diff")):
            expected = np.mean([row[level][kind] for row in rows]) if rows else 0.0
            assert metrics[f"actor/train_infer_{name}_{level}_mean"] == pytest.approx(
                expected, rel=1e-5, abs=1e-6
            )
    gaps = [abs(x.old - x.engine) for t in batch if t.trains for x in t.response]
    assert metrics["actor/train_infer_logprob_gap"] == pytest.approx(
        np.mean(gaps) if gaps else 0.0, abs=1e-6
    )


@given(batches)
def test_a_filtered_token_leaves_loss_and_whitening_but_not_the_returns(
    batch: list[Trajectory],
) -> None:
    correction = CorrectionSpec(filters=(FilterSpec("token", 0.7, 1.4),))
    packed, per_turn = pack(batch)

    def estimate(spec: TokenSpec) -> TokenAdvantages:
        return token_advantages(spec, packed, per_turn, 0.0, lambda sums: sums)

    plain, filtered = (
        estimate(TokenSpec("reinforce")),
        estimate(TokenSpec("reinforce", correction=correction)),
    )
    white = estimate(TokenSpec("reinforce", correction=correction, whiten_advantages=True))
    np.testing.assert_array_equal(
        filtered.advantages_L, np.where(filtered.mask_L, plain.advantages_L, 0)
    )
    kept = plain.advantages_L[filtered.mask_L].astype(np.float64)
    spread = kept.std(ddof=1) if len(kept) > 1 else 0.0
    expected = (kept - kept.mean()) / (spread if spread > 1e-6 else 1.0) if len(kept) else kept
    np.testing.assert_allclose(white.advantages_L[white.mask_L], expected, atol=1e-5)


def test_the_sum_over_a_long_sequence_stays_a_number() -> None:
    response = (Token(-4.0, -0.5, 0.0, 0.0),) * 500
    batch = [Trajectory(((Turn(1.0, 1, response),),), 0.0, True)]
    result = corrected(CorrectionSpec(WeightSpec("sequence", None)), batch)
    assert result.weights_L is not None
    assert result.weights_L[1] == pytest.approx(exp(20.0))


def test_a_token_that_the_engine_held_impossible_differs_by_the_trainers_probability() -> None:
    response = (Token(-750.0, -1.0, 0.0, 0.0), Token(-750.0, -0.1, 0.0, 0.0))
    batch = [Trajectory(((Turn(1.0, 0, response),),), 0.0, True)]
    result = corrected(CorrectionSpec(filters=(FilterSpec("token", diff_high=0.5),)), batch)
    assert result.mask_L.tolist() == [True, False]
    assert result.metrics["actor/train_infer_diff_token_mean"] == pytest.approx(
        (exp(-1.0) + exp(-0.1)) / 2
    )


def test_the_difference_of_a_sequence_is_a_sum_and_may_have_bounds_above_1() -> None:
    response = (Token(-1.0, -0.1, 0.0, 0.0),) * 5
    batch = [Trajectory(((Turn(1.0, 0, response[:length]),),), 0.0, True) for length in (2, 5)]
    spec = CorrectionSpec(filters=(FilterSpec("sequence", diff_high=1.5),))
    assert corrected(spec, batch).mask_L.tolist() == [True] * 2 + [False] * 5


def test_filters_of_one_level_hold_together() -> None:
    response = (
        Token(-1.0, -1.5, 0.0, 0.0),
        Token(-1.0, -1.0, 0.0, 0.0),
        Token(-1.5, -1.0, 0.0, 0.0),
    )
    batch = [Trajectory(((Turn(1.0, 0, response),),), 0.0, True)]
    spec = CorrectionSpec(
        filters=(FilterSpec("token", ratio_low=0.8), FilterSpec("token", ratio_high=1.2))
    )
    assert corrected(spec, batch).mask_L.tolist() == [False, True, False]


def test_a_weight_without_the_engines_log_probs_is_refused() -> None:
    packed, per_turn = pack([])
    spec = TokenSpec("grpo", correction=CorrectionSpec(WeightSpec()))
    with pytest.raises(ValueError, match="correction needs engine_logprobs_L"):
        token_advantages(
            spec,
            replace(packed, engine_logprobs_L=None),
            per_turn,
            0.0,
            lambda sums: sums,
        )
