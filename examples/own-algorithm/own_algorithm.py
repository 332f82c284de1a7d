"""A loss and an advantage estimator that AgenticRun does not have."""

import numpy as np
import torch

from agenticrun_workers.algorithms import Episodes
from agenticrun_workers.algorithms.losses import LossTokens
from agenticrun_workers.algorithms.segments import owners, segment_sums


def sapo(
    tokens: LossTokens, ratio_N: torch.Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> torch.Tensor:
    """-4/tau sigmoid(tau (rho - 1)) A: a soft gate instead of PPO's clip.

    tau depends on the sign of A. Source: SAPO, Gao et al. 2025, arXiv 2511.20347.

    Args:
        tokens: of a micro-batch; every array is [N].
        ratio_N: rho, with gradient.

    Returns:
        the loss of each token, [N].
    """
    a_N = tokens.advantages_N
    tau_N = torch.where(a_N > 0, tau_positive, tau_negative)
    return -4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)) * a_N


def over_median(episodes: Episodes, rewards_K: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Score minus the median of the group, which one lucky episode does not move.

    Args:
        episodes: N trajectories with K turns.
        rewards_K: after penalties, clip and KL; without rewardPlacement turn, the score is on the
            last turn.

    Returns:
        the advantage of each turn's tokens, [K].
    """
    scores_N = segment_sums(rewards_K, episodes.cu_turns_N1)
    medians_N = np.empty_like(scores_N)
    for group in np.unique(episodes.groups_N):
        members_N = episodes.groups_N == group
        medians_N[members_N] = np.median(scores_N[members_N])
    return scale * (scores_N - medians_N)[owners(episodes.cu_turns_N1)]
