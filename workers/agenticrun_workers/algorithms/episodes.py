"""Scalars of a batch: all that the driver knows about its trajectories."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.algorithms.segments import Booleans, Floats, Integers, owners, take_segments


@dataclass(frozen=True, slots=True)
class Episodes:
    """N trajectories with K turns, in trajectory order."""

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

    The ADVANTAGE_ESTIMATORS need it for a KL in the reward.
    """

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
                    f"{name} of trajectory {trajectory} holds {values_K[turn]}: "
                    "count it out as env_error"
                )
