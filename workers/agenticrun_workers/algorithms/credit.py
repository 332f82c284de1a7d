"""From the scalars of a batch to one number per turn, on the driver.

This is the first half of a step's order of operations:

    scores -> zeroed rewards and penalties -> reward clip -> KL of estimators of kind `advantage` ->
    normalisation or the estimator's own baseline -> turns

The second half, on the ranks, is `token_advantages`. No statistic includes trajectories that are
not trainable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms import baselines
from agenticrun_workers.algorithms.baselines import Compared, state_sets, step_returns
from agenticrun_workers.algorithms.normalization import (
    Grouping,
    Moments,
    Normalization,
    Over,
    RunningOver,
    normalization,
    spread,
    zero_variance_share,
)
from agenticrun_workers.algorithms.rewards import (
    carriers,
    clip,
    format_penalties,
    on_last_turn,
    overlong_penalty,
    zero_rewards,
)
from agenticrun_workers.algorithms.segments import (
    Booleans,
    Floats,
    Integers,
    codes,
    owners,
    segment_sums,
    take_segments,
)

Kind = Literal["reward", "advantage"]
Estimates = tuple[Floats, dict[str, float]]
"""The value of each turn, [K], and metrics."""
Truncated = Literal["train", "mask", "zero_reward", "soft_penalty"]
OwnEstimator: TypeAlias = "Callable[[Episodes, Floats], Any]"
"""`estimator(episodes, rewards_K)` returns the advantage of each turn's tokens, [K]."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """Scalars of a batch: N trajectories with K turns, in trajectory order."""

    cu_turns_N1: Integers
    rewards_K: Floats
    """Reward of each turn from environment and judges."""
    invalid_K: Booleans
    """True if the answer held no valid action."""
    response_tokens_K: Integers
    groups_N: Integers
    tags_N: Integers
    format_penalty_N: Floats
    """Reward added for each invalid turn: 0 or below."""
    truncated_N: Booleans
    """True if a limit ended the trajectory: max_turns, max_tokens or context_overflow."""
    trainable_N: Booleans
    states_K: NDArray[Any] | None = None
    """Raw 32-byte digests of the observation before each turn, `S32`, `V32` or uint8 [K, 32].

    gigpo and the grouping `state` need them.
    """
    kl_K: Floats | None = None
    """Summed token KL of each turn, before its coefficient.

    Estimators of kind `advantage` need it for a KL in the reward.
    """
    sizes_K: Floats | None = None
    """Sum of the absolute values of what was added to the shaped reward of each turn, by which
    float32 rounded it. `assign_credit` sets it."""
    running: Mapping[int, Moments] = field(default_factory=dict)
    """`Credit.running`. `assign_credit` sets it."""

    def take(self, chosen: Integers) -> tuple[Episodes, Integers]:
        """Return the chosen trajectories, and the indices of their turns in the batch."""
        cu, turns = take_segments(self.cu_turns_N1, chosen)
        taken = replace(
            self,
            cu_turns_N1=cu,
            rewards_K=np.asarray(self.rewards_K, np.float64)[turns],
            invalid_K=self.invalid_K[turns],
            response_tokens_K=self.response_tokens_K[turns],
            groups_N=self.groups_N[chosen],
            tags_N=self.tags_N[chosen],
            format_penalty_N=np.asarray(self.format_penalty_N, np.float64)[chosen],
            truncated_N=self.truncated_N[chosen],
            trainable_N=self.trainable_N[chosen],
            states_K=None if self.states_K is None else self.states_K[turns],
            kl_K=None if self.kl_K is None else np.asarray(self.kl_K, np.float64)[turns],
        )
        return taken, turns

    def require_finite(self, numbers_N: Integers) -> None:
        """Check that all rewards and KLs are finite.

        Args:
            numbers_N: number of each trajectory, for the message.

        Raises:
            ValueError: a value is not finite; names the array and the trajectory.
        """
        for name, values_K in (("rewards_K", self.rewards_K), ("kl_K", self.kl_K)):
            if values_K is not None and not np.isfinite(values_K).all():
                turn = int(np.argmin(np.isfinite(values_K)))
                trajectory = int(numbers_N[owners(self.cu_turns_N1)[turn]])
                raise ValueError(
                    f"{name} of trajectory {trajectory} contains {values_K[turn]}; "
                    "report the trajectory with stop reason env_error instead"
                )


@dataclass(frozen=True, slots=True)
class CreditSpec:
    """Choice of the estimator, and its numbers."""

    estimator: str = "grpo"
    """A row of `ESTIMATORS`, or the name of `function`."""
    reward_placement: Literal["trajectory", "turn"] = "trajectory"
    """Place of rewards for estimators of kind `reward` and the user's.

    The score on the last turn, or r_k on turn k.
    """
    reward_clip: float | None = None
    """Bound of the score, or of each r_k if turns are credited by their own rewards."""
    truncated: Truncated = "train"
    """Treatment of a trajectory that a limit ended. soft_penalty depends on length alone (DAPO)."""
    overlong_limit: float = 1.0
    overlong_buffer: float = 1.0
    overlong_penalty: float = 1.0
    norm_grouping: Grouping = "batch"
    norm_mean: RunningOver = "none"
    norm_std: RunningOver = "none"
    """rewardNormalization of gae, reinforce, agentic_reinforce and reinforce_plus_plus.

    step_reinforce applies it to step returns.
    """
    group_mean: Over = "group"
    group_std: Over = "group"
    """Mean and standard deviation of grpo and gigpo."""
    step_reward_gamma: float = 0.95
    """Discount per turn of the step returns of gigpo and step_reinforce."""
    episode_reward_weight: float = 1.0
    step_reward_weight: float = 1.0
    """Weights w_E and w_S of gigpo."""
    function: OwnEstimator | None = None
    """An estimator of the user's, which `estimator` names."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """One row of `ESTIMATORS`: the formula of an estimator, and what the ranks make of it."""

    estimate: Callable[[CreditSpec, Episodes, Floats], Estimates]
    """Gets the trajectories that can be trained on, and the shaped reward of each turn, [K]."""
    kind: Kind = "advantage"
    """Use of a turn's credit.

    reward: it is on the last response token of its turn, and returns over tokens follow.
    advantage: it is the advantage of every response token of the turn.
    """
    compares_group: bool = False
    """Subtracts the group's mean, or may."""
    by_turn: bool = False
    """Credits turns by the turns' own rewards."""
    critic: bool = False
    """Reads the critic's values."""
    discounts_turns: bool = False
    """Discounts per turn, not per token."""
    whitens: bool = False
    """Always whitens the advantages."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit of each turn of a batch."""

    per_turn_K: Floats
    """As `Estimator.kind` says."""
    trains_N: Booleans
    """True if the trajectory's tokens are in the loss."""
    metrics: dict[str, float]
    running: Mapping[int, Moments] = field(default_factory=dict)
    """Moments of the scores of all batches, this one included: by tag with grouping `tag`, else
    those of number 0. Empty unless the normalisation uses them."""


def assign_credit(
    spec: CreditSpec,
    episodes: Episodes,
    kl_coef: float = 0.0,
    running: Mapping[int, Moments] | None = None,
) -> Credit:
    """Return the credit of each turn of a batch.

    Args:
        spec: estimator and its numbers.
        episodes: scalars of the batch.
        kl_coef: coefficient of `kl_K` in the reward for estimators of kind `advantage`; for the
            others the ranks subtract the KL token by token.
        running: `Credit.running` of the batch before; None for the first batch.

    Raises:
        ValueError: a trainable trajectory has a reward (or KL) that is not finite, or an array that
            the estimator needs is missing; a function of the user's returns something else than
            one finite number per turn.
    """
    estimator = estimator_of(spec.estimator)
    chosen = np.flatnonzero(episodes.trainable_N)
    valid, turns = episodes.take(chosen)
    # One NaN would spread over its whole group, or over the batch.
    valid.require_finite(chosen)
    rewards_K, sizes_K, metrics = _shaped_rewards(spec, estimator, valid)
    # With this batch, as the first one would have no moments otherwise.
    running = _running(spec, valid, rewards_K, running or {})
    valid = replace(valid, sizes_K=sizes_K, running=running)
    if _compares_groups(spec):
        metrics["group/zero_variance_share"] = _equal_groups(spec, valid, rewards_K)
    if estimator.kind == "advantage" and kl_coef:
        rewards_K = rewards_K - kl_coef * _given(valid.kl_K, "kl_K", "a KL in the reward")
        # Log-probs of a token have a size of about one nat.
        valid = replace(valid, sizes_K=sizes_K + kl_coef * valid.response_tokens_K)
    values_K, estimator_metrics = estimator.estimate(spec, valid, rewards_K)
    per_turn_K = np.zeros(len(episodes.rewards_K))
    per_turn_K[turns] = values_K
    trains_N = (
        episodes.trainable_N & ~episodes.truncated_N
        if spec.truncated == "mask"
        else episodes.trainable_N
    )
    return Credit(per_turn_K, trains_N, metrics | estimator_metrics, running)


def _running(
    spec: CreditSpec, episodes: Episodes, rewards_K: Floats, before: Mapping[int, Moments]
) -> Mapping[int, Moments]:
    """Return the moments of all scores so far, with those of this batch."""
    if "running" not in (spec.norm_mean, spec.norm_std):
        return {}
    scores_N = segment_sums(rewards_K, episodes.cu_turns_N1)
    sets_N = _running_sets(spec, episodes)
    merged = dict(before)
    for number in map(int, np.unique(sets_N)):
        now = Moments.of(scores_N[sets_N == number])
        merged[number] = before[number].merged(now) if number in before else now
    return merged


def _running_sets(spec: CreditSpec, episodes: Episodes) -> Integers:
    tags_N = episodes.tags_N
    return tags_N if spec.norm_grouping == "tag" else np.zeros_like(tags_N)


def _compares_groups(spec: CreditSpec) -> bool:
    """Return True if a group of equal rewards gives no gradient, or a user's function decides."""
    estimator = estimator_of(spec.estimator)
    if estimator.compares_group:
        return spec.group_mean == "group"
    return not estimator.by_turn and spec.norm_grouping == spec.norm_mean == "group"


def _equal_groups(spec: CreditSpec, episodes: Episodes, rewards_K: Floats) -> float:
    """Return the share of groups that give no gradient, because their rewards are equal."""
    cu, groups_N = episodes.cu_turns_N1, codes(episodes.groups_N)
    scores_N, sizes_N = segment_sums(rewards_K, cu), _sizes(episodes)
    if spec.estimator != "gigpo" or not len(rewards_K):
        return zero_variance_share(scores_N, groups_N, sizes_N)
    # gigpo also compares turns: their returns may differ where the scores are equal.
    owner_K, gamma = owners(cu), spec.step_reward_gamma
    states_K = state_sets(groups_N[owner_K], _given(episodes.states_K, "states_K", "gigpo"))
    returns_K, return_sizes_K = (
        step_returns(values_K, cu, gamma) for values_K in (rewards_K, _sizes_of_turns(episodes))
    )
    differs_K = spread(scores_N, groups_N, sizes_N)[owner_K]
    differs_K = differs_K | spread(returns_K, states_K, return_sizes_K)
    differing = np.bincount(groups_N[owner_K], differs_K, minlength=int(groups_N.max()) + 1)
    return float(np.mean(differing == 0))


def _sizes_of_turns(episodes: Episodes) -> Floats:
    return _given(episodes.sizes_K, "sizes_K", "an estimator")


def _sizes(episodes: Episodes) -> Floats:
    """Return the size of each trajectory's score; see `Episodes.sizes_K`."""
    return segment_sums(_sizes_of_turns(episodes), episodes.cu_turns_N1)


def _shaped_rewards(
    spec: CreditSpec, estimator: Estimator, episodes: Episodes
) -> tuple[Floats, Floats, dict[str, float]]:
    """Return rewards per turn after penalties and clip, their sizes, and metrics.

    The reward of a whole trajectory is on its last turn.
    """
    cu = episodes.cu_turns_N1
    rewards_K, sizes_K = episodes.rewards_K, np.abs(episodes.rewards_K)
    metrics = _range("critic/score", segment_sums(rewards_K, cu))
    # Before penalties, which still apply.
    if spec.truncated == "zero_reward":
        rewards_K = zero_rewards(rewards_K, cu, episodes.truncated_N)
    penalties_K = format_penalties(episodes.invalid_K, episodes.format_penalty_N, cu)
    rewards_K, sizes_K = rewards_K + penalties_K, sizes_K + np.abs(penalties_K)
    if spec.truncated == "soft_penalty":
        tokens_N = segment_sums(episodes.response_tokens_K, cu)
        overlong_N = overlong_penalty(
            tokens_N.astype(np.int64),
            spec.overlong_limit,
            spec.overlong_buffer,
            spec.overlong_penalty,
        )
        rewards_K = rewards_K + on_last_turn(overlong_N, cu)
    placed = estimator.kind == "reward" or spec.function is not None
    by_turn = estimator.by_turn or (placed and spec.reward_placement == "turn")
    unclipped = rewards_K if by_turn else segment_sums(rewards_K, cu)
    sizes = sizes_K if by_turn else segment_sums(sizes_K, cu)
    clipped = clip(unclipped, spec.reward_clip)
    # The clip's bound is exact, so what was rounded before no longer counts.
    sizes = np.where(clipped != unclipped, np.abs(clipped), sizes)
    metrics["critic/reward_clip_frac"] = (
        float(np.mean(clipped != unclipped)) if len(unclipped) else 0.0
    )
    if by_turn:
        return clipped, sizes, metrics
    return on_last_turn(clipped, cu), on_last_turn(sizes, cu), metrics


def _compared(
    compare: Callable[[CreditSpec, Floats, Integers, Floats], Compared],
) -> Callable[[CreditSpec, Episodes, Floats], Estimates]:
    """Return an estimator that compares the scores of a group: one value per trajectory."""

    def estimate(spec: CreditSpec, episodes: Episodes, rewards_K: Floats) -> Estimates:
        cu = episodes.cu_turns_N1
        scores_N, groups_N = segment_sums(rewards_K, cu), codes(episodes.groups_N)
        compared = compare(spec, scores_N, groups_N, _sizes(episodes))
        metrics = {
            "group/degenerate": float(compared.degenerate_N.sum()),
            **_range("critic/rewards", compared.values_N),
        }
        return compared.values_N[owners(cu)], metrics

    return estimate


def _step_reinforce(spec: CreditSpec, episodes: Episodes, rewards_K: Floats) -> Estimates:
    cu = episodes.cu_turns_N1
    returns_K = step_returns(rewards_K, cu, spec.step_reward_gamma)
    step = normalization(
        returns_K,
        _sets(spec, episodes, owners(cu)),
        _of_batch(spec.norm_mean),
        _of_batch(spec.norm_std),
        step_returns(_sizes_of_turns(episodes), cu, spec.step_reward_gamma),
    )
    values_K = step.apply(returns_K)
    return values_K, {
        "group/degenerate": float(step.degenerate_N.sum()),
        **_range("critic/rewards", values_K),
    }


def _normalized(spec: CreditSpec, episodes: Episodes, rewards_K: Floats) -> Estimates:
    scores_N = segment_sums(rewards_K, episodes.cu_turns_N1)
    sets_N, sizes_N = _sets(spec, episodes, None), _sizes(episodes)
    normalized = normalization(
        scores_N, sets_N, _of_batch(spec.norm_mean), _of_batch(spec.norm_std), sizes_N
    )
    if episodes.running and len(scores_N):
        normalized = _by_running_moments(spec, episodes, scores_N, normalized)
    return _rewards_of_turns(episodes, rewards_K, normalized)


def _of_batch(over: RunningOver) -> Over:
    return "none" if over == "running" else over


def _by_running_moments(
    spec: CreditSpec, episodes: Episodes, scores_N: Floats, normalized: Normalization
) -> Normalization:
    """Replace mean or deviation of a normalisation by those of all batches so far."""
    sizes_N = _sizes(episodes)
    moments_N = [episodes.running[int(number)] for number in _running_sets(spec, episodes)]
    differs_N = np.array([m.spreads(size) for m, size in zip(moments_N, sizes_N, strict=True)])
    shift_N, scale_N = normalized.shift_N, normalized.scale_N
    degenerate_N = normalized.degenerate_N
    if spec.norm_mean == "running":
        # Without spread the score itself is the mean, so that rounding is not taken for a
        # difference.
        shift_N = np.where(differs_N, [m.mean for m in moments_N], scores_N)
    if spec.norm_std == "running":
        flat = 1.0 if spec.norm_mean == "running" else 0.0
        std_N = np.where(differs_N, [m.std for m in moments_N], 1.0)
        scale_N = np.where(differs_N, 1.0 / std_N, flat)
        degenerate_N = ~differs_N
    return Normalization(shift_N, scale_N, degenerate_N)


def _less_the_groups_mean(_: CreditSpec, episodes: Episodes, rewards_K: Floats) -> Estimates:
    scores_N = segment_sums(rewards_K, episodes.cu_turns_N1)
    return _rewards_of_turns(
        episodes,
        rewards_K,
        normalization(scores_N, codes(episodes.groups_N), "group", "none", _sizes(episodes)),
    )


def _rewards_of_turns(
    episodes: Episodes, rewards_K: Floats, normalized: Normalization
) -> Estimates:
    """Spread the normalisation of the scores over the turns, for estimators of kind `reward`.

    The scale applies to every reward, the shift only where the trajectory ends.
    """
    cu = episodes.cu_turns_N1
    owner_K = owners(cu)
    values_K = rewards_K * normalized.scale_N[owner_K] - on_last_turn(
        normalized.shift_N * normalized.scale_N, cu
    )
    # A turn without tokens cannot carry its reward, which goes to a neighbour.
    carried_K = np.bincount(
        carriers(episodes.response_tokens_K, cu), values_K, minlength=len(values_K)
    ).astype(np.float64)
    metrics = {
        "group/degenerate": float(normalized.degenerate_N.sum()),
        **_range("critic/rewards", segment_sums(carried_K, cu)),
    }
    return carried_K, metrics


def _gigpo(spec: CreditSpec, episodes: Episodes, rewards_K: Floats) -> Estimates:
    credit = baselines.gigpo(
        rewards_K,
        episodes.cu_turns_N1,
        codes(episodes.groups_N),
        _given(episodes.states_K, "states_K", "gigpo"),
        gamma=spec.step_reward_gamma,
        episode_weight=spec.episode_reward_weight,
        step_weight=spec.step_reward_weight,
        mean=spec.group_mean,
        std=spec.group_std,
        sizes_K=_sizes_of_turns(episodes),
    )
    return credit.values_K, {
        "group/degenerate": float(credit.degenerate_N.sum()),
        "group/degenerate_steps": float(credit.degenerate_K.sum()),
        **_range("critic/rewards", credit.values_K),
        **_range("critic/episode_rewards_norm", credit.episode_N),
        **_range("critic/step_rewards_norm", credit.step_K),
    }


def _own(spec: CreditSpec, episodes: Episodes, rewards_K: Floats) -> Estimates:
    if spec.function is None:
        raise ValueError(f"no estimator is called {spec.estimator}")
    if not len(rewards_K):
        return rewards_K, {}
    found = np.asarray(spec.function(episodes, rewards_K))
    # A scalar would be broadcast to all turns, silently.
    if found.shape != rewards_K.shape or found.dtype.kind not in "fiub":
        raise ValueError(
            f"{spec.estimator} returned {found.dtype} of shape {found.shape}: return an array of "
            f"one number per turn, of shape {rewards_K.shape}"
        )
    values_K = found.astype(np.float64)
    if not np.isfinite(values_K).all():
        turn = int(np.argmin(np.isfinite(values_K)))
        raise ValueError(f"{spec.estimator} returned {values_K[turn]} for turn {turn} of the batch")
    return values_K, _range("critic/rewards", values_K)


def _sets(spec: CreditSpec, episodes: Episodes, owner_K: Integers | None) -> Integers:
    """Return the sets of `rewardNormalization.grouping`.

    Args:
        owner_K: trajectory of each turn, for sets of turns; None for sets of trajectories.
    """
    if spec.norm_grouping == "state":
        if owner_K is None:
            raise ValueError(
                f"rewardNormalization.grouping state compares turns: "
                f"{spec.estimator} has one reward per trajectory"
            )
        return state_sets(
            episodes.groups_N[owner_K], _given(episodes.states_K, "states_K", "grouping state")
        )
    by = {
        "batch": np.zeros_like(episodes.groups_N),
        "group": episodes.groups_N,
        "tag": episodes.tags_N,
    }
    sets_N = codes(by[spec.norm_grouping])
    return sets_N if owner_K is None else sets_N[owner_K]


def _given(array: NDArray[Any] | None, name: str, user: str) -> NDArray[Any]:
    if array is None:
        raise ValueError(f"{user} needs {name}")
    return array


def _range(name: str, values: Floats) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


ESTIMATORS = {
    "gae": Estimator(_normalized, "reward", critic=True),
    "reinforce": Estimator(_normalized, "reward"),
    "agentic_reinforce": Estimator(_normalized, "reward", discounts_turns=True),
    "step_reinforce": Estimator(_step_reinforce, by_turn=True),
    "reinforce_plus_plus": Estimator(_normalized, "reward", whitens=True),
    "reinforce_plus_plus_baseline": Estimator(
        _less_the_groups_mean, "reward", compares_group=True, whitens=True
    ),
    "grpo": Estimator(
        _compared(
            lambda spec, scores_N, groups_N, sizes_N: baselines.grpo(
                scores_N, groups_N, spec.group_mean, spec.group_std, sizes_N
            )
        ),
        compares_group=True,
    ),
    "rloo": Estimator(_compared(lambda _, *scores: baselines.rloo(*scores)), compares_group=True),
    "dr_grpo": Estimator(
        _compared(lambda _, *scores: baselines.dr_grpo(*scores)), compares_group=True
    ),
    "gigpo": Estimator(_gigpo, compares_group=True, by_turn=True),
}
"""By the name in `algorithm.name`."""
_OWN = Estimator(_own, compares_group=True)


def estimator_of(name: str) -> Estimator:
    """Return the row of this name, or that of functions of the user's."""
    return ESTIMATORS.get(name, _OWN)
