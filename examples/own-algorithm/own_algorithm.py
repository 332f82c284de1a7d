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


def blended(episodes: Episodes, rewards_K: np.ndarray, share: float = 0.5) -> np.ndarray:
    """Score minus a baseline between the mean of the group and that of the batch.

    The mean of a small group is noisy; that of the batch does not know how hard the level is.

    Args:
        episodes: N trajectories with K turns.
        rewards_K: after penalties, clip and KL; without rewardPlacement turn, the score is on the
            last turn.
        share: weight of the batch's mean.

    Returns:
        the advantage of each turn's tokens, [K].
    """
    scores_N = segment_sums(rewards_K, episodes.cu_turns_N1)
    means_N = np.empty_like(scores_N)
    for group in np.unique(episodes.groups_N):
        members_N = episodes.groups_N == group
        means_N[members_N] = scores_N[members_N].mean()
    advantages_N = scores_N - share * scores_N.mean() - (1 - share) * means_N
    turns_K: np.ndarray = advantages_N[owners(episodes.cu_turns_N1)]
    return turns_K
