"""Losses and advantage estimators of the user's, as `module:function`.

    algorithm.pgVariant   loss(tokens: LossTokens, ratio_N: Tensor, **lossConfig) -> Tensor [N]
    algorithm.name        estimator(episodes: Episodes, rewards_K: Floats, **estimatorConfig)
                          -> Floats [K]

Both are tried on a small synthetic batch before a run starts its actors: an error in the loss
would otherwise show after the first batch of episodes.

torch is imported inside functions, because the driver imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_api.algorithm import Algorithm
from agenticrun_workers.algorithms.credit import (
    ESTIMATORS,
    CreditSpec,
    Episodes,
    OwnEstimator,
    assign_credit,
)
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.plugins import PluginError, bound

if TYPE_CHECKING:
    import torch

    from agenticrun_workers.algorithms.losses import LossTokens, OwnLoss

LOSS_FIELD = "spec.pipeline.algorithm.pgVariant"
ESTIMATOR_FIELD = "spec.pipeline.algorithm.name"


def own_loss(algorithm: Algorithm) -> OwnLoss:
    """Return the user's loss. Raises `InvalidConfig` if it cannot be found or called."""
    try:
        function = bound(algorithm.pg_variant, algorithm.loss_config or {}, arguments=2)
    except PluginError as error:
        raise InvalidConfig(LOSS_FIELD, str(error)) from error
    from agenticrun_workers.algorithms.losses import OwnLoss

    return OwnLoss(algorithm.pg_variant, function)


def own_estimator(algorithm: Algorithm) -> OwnEstimator:
    """Return the user's estimator. Raises `InvalidConfig` if it cannot be found or called."""
    try:
        return bound(algorithm.name, algorithm.estimator_config or {}, arguments=2)
    except PluginError as error:
        raise InvalidConfig(ESTIMATOR_FIELD, str(error)) from error


def check_own_functions(pipeline: Pipeline) -> None:
    """Try the user's loss and estimator on synthetic batches, one of them empty.

    Raises:
        InvalidConfig: names the field, and what the function must return.
    """
    algorithm = pipeline.algorithm
    if ":" in algorithm.pg_variant:
        from agenticrun_workers.algorithms.losses import policy_loss

        loss = own_loss(algorithm)
        for count in (6, 0):  # a rank without samples computes the loss of no tokens
            tokens = _tokens(count)
            try:
                loss_N = policy_loss(loss, algorithm.ratio_type, tokens).loss_N
            except Exception as error:
                said = f"{_said(loss.name, error)} (on a synthetic batch of {count} tokens)"
                raise InvalidConfig(LOSS_FIELD, said) from error
            if problem := _problem_of(loss_N, tokens.logprobs_N):
                raise InvalidConfig(LOSS_FIELD, f"{loss.name} {problem}")
    if algorithm.name not in ESTIMATORS:
        function = own_estimator(algorithm)
        spec = CreditSpec(algorithm.name, algorithm.reward_placement, function=function)
        try:
            assign_credit(spec, _episodes())
        except Exception as error:
            said = f"{_said(algorithm.name, error)} (on a synthetic batch of 4 trajectories)"
            raise InvalidConfig(ESTIMATOR_FIELD, said) from error


def _problem_of(loss_N: torch.Tensor, logprobs_N: torch.Tensor) -> str | None:
    """Return the reason why the losses cannot be trained on, None without one."""
    if not loss_N.is_floating_point() or not loss_N.isfinite().all():
        return (
            f"returned {loss_N.detach().tolist()} for a synthetic batch: return finite floats, "
            "and clamp ratios and differences of log-probs before exp"
        )
    if not loss_N.requires_grad:
        return (
            "has no gradient: compute the loss from tokens.logprobs_N or ratio_N with torch, "
            "without detach, item or numpy"
        )
    import torch

    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N, allow_unused=True)
    if gradient_N is None or (len(gradient_N) and not gradient_N.any()):
        return (
            "has no gradient with respect to tokens.logprobs_N, so that nothing would be learnt: "
            "detach fixed factors only"
        )
    if not gradient_N.isfinite().all():
        return (
            f"has the gradient {gradient_N.tolist()} with respect to tokens.logprobs_N: it must "
            "be finite. torch.where does not hide the gradient of the other branch"
        )
    return None


def _tokens(count: int) -> LossTokens:
    """Return the first tokens of two sequences with three turns, as on the CPU and in float32."""
    import torch

    from agenticrun_workers.algorithms.losses import LossTokens

    old_N = torch.tensor([-0.5, -1.5, -2.5, -0.1, -3.0, -1.0])
    change_N = torch.tensor([0.1, -0.3, 0.6, 0.0, -1.2, 0.25])
    return LossTokens(
        logprobs_N=(old_N + change_N)[:count].requires_grad_(),
        old_logprobs_N=old_N[:count],
        advantages_N=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, 0.25])[:count],
        sequence_N=torch.tensor([0, 0, 0, 1, 1, 1])[:count],
        turn_N=torch.tensor([0, 0, 1, 0, 0, 0])[:count],
        score_N=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])[:count],
        engine_logprobs_N=(old_N - 0.05)[:count],
    )


def _episodes() -> Episodes:
    """Return two groups of two trajectories with one to three turns."""
    return Episodes(
        cu_turns_N1=np.array([0, 2, 3, 6, 7]),
        rewards_K=np.array([0.0, 1.0, 0.0, 0.25, 0.0, 0.5, 0.0]),
        invalid_K=np.array([False, False, True, False, False, False, False]),
        response_tokens_K=np.array([3, 4, 1, 2, 2, 5, 3]),
        groups_N=np.array([4, 4, 9, 9]),
        tags_N=np.zeros(4, np.int64),
        format_penalty_N=np.zeros(4),
        truncated_N=np.array([False, True, False, False]),
        trainable_N=np.ones(4, np.bool_),
        states_K=np.arange(7 * 32, dtype=np.uint8).reshape(7, 32),
        kl_K=np.zeros(7),
    )


def _said(name: str, error: Exception) -> str:
    """Return the message of an error of a user's function, with its type unless we raised it."""
    text = str(error)
    return text if text.startswith(name) else f"{name} raised {type(error).__name__}: {text}"
