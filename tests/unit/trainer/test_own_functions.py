"""Losses and estimators of the user's: found by name, tried before a run starts, and trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms import assign_credit
from agenticrun_workers.algorithms.losses import Ppo, policy_loss
from agenticrun_workers.driver.credit import credit_spec
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.trainer.config_translation import loss_spec, token_spec
from agenticrun_workers.trainer.own_functions import _episodes, _tokens, check_own_functions

Write = Callable[[str], None]

HEAD = "import numpy as np\nimport torch\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that makes a text the module `mine`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(text: str) -> None:
        monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
        (tmp_path / "mine.py").write_text(HEAD + text)

    return written


def pipeline(**algorithm: Any) -> Pipeline:
    return Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": 4,
            "evalSteps": 0,
            "envs": [{"tag": "A", "type": "frozen_lake"}],
            "trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A"]},
            "algorithm": algorithm,
        }
    )


def refusal(**algorithm: Any) -> str:
    with pytest.raises(InvalidConfig) as caught:
        check_own_functions(pipeline(**algorithm))
    return str(caught.value)


LOSS = "spec.pipeline.algorithm.pgVariant: "
ESTIMATOR = "spec.pipeline.algorithm.name: "


def test_a_loss_of_the_users_computes_what_the_same_formula_here_computes(write: Write) -> None:
    write(
        "def loss(tokens, ratio_N, clip_low=0.5, clip_high=0.5):\n"
        "    a_N = tokens.advantages_N\n"
        "    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)\n"
        "    return torch.maximum(-ratio_N * a_N, -bounded_N * a_N)\n"
    )
    own = pipeline(
        pgVariant="mine:loss", lossConfig={"clipLow": 0.1, "clipHigh": 0.3}, ratioType="segment"
    )
    check_own_functions(own)
    spec = loss_spec(own)
    found = policy_loss(spec.variant, spec.ratio, _tokens(6))
    expected = policy_loss(Ppo(0.1, 0.3), "segment", _tokens(6))
    assert found.loss_N.tolist() == expected.loss_N.tolist()
    assert not found.clipped_N.any()


def test_a_loss_may_say_which_tokens_it_clips(write: Write) -> None:
    write("def loss(tokens, ratio_N):\n    return -ratio_N * tokens.advantages_N, ratio_N > 1.1\n")
    own = pipeline(pgVariant="mine:loss")
    check_own_functions(own)
    found = policy_loss(loss_spec(own).variant, "token", _tokens(6))
    assert found.clipped_N.tolist() == (found.ratio_N > 1.1).tolist()


def test_an_estimator_of_the_users_gives_every_token_of_a_turn_its_number(write: Write) -> None:
    write(
        "def ranks(episodes, rewards_K, scale=1.0):\n"
        "    return scale * rewards_K - episodes.groups_N[\n"
        "        np.repeat(np.arange(len(episodes.groups_N)), np.diff(episodes.cu_turns_N1))\n"
        "    ]\n"
    )
    own = pipeline(name="mine:ranks", estimatorConfig={"scale": 2}, rewardPlacement="turn")
    check_own_functions(own)
    credit = assign_credit(credit_spec(own), _episodes())
    assert credit.per_turn_K.tolist() == [-4.0, -2.0, -4.0, -8.5, -9.0, -8.0, -9.0]
    assert credit.metrics["critic/rewards/max"] == -2.0
    spec = token_spec(own)
    assert (spec.estimator, spec.row.kind) == ("mine:ranks", "advantage")
    assert (spec.row.whitens, spec.row.critic) == (False, False)


def test_without_placement_the_users_estimator_gets_the_score_on_the_last_turn(
    write: Write,
) -> None:
    write("def same(episodes, rewards_K):\n    return rewards_K\n")
    credit = assign_credit(credit_spec(pipeline(name="mine:same")), _episodes())
    assert credit.per_turn_K.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return tokens.logprobs_N.mean()", "mine:loss returned a loss of shape () for 6 tokens"),
        ("return tokens.logprobs_N.detach()", "mine:loss has no gradient: compute the loss"),
        ("return 0 * tokens.logprobs_N", "no gradient with respect to tokens.logprobs_N"),
        ("return ratio_N / 0", "return finite floats"),
        ("return (ratio_N - ratio_N.detach()).sqrt()", "has the gradient [inf"),
        ("return tokens.logits_N", "mine:loss raised AttributeError: "),
        ("return ratio_N.tolist()", "returned a loss of shape list"),
        ("return ratio_N, ratio_N.max() > 1", "returned a clip of shape ()"),
        ("return ratio_N - ratio_N.max()", "(on a synthetic batch of 0 tokens)"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_with_the_field_and_the_remedy(
    write: Write, body: str, problem: str
) -> None:
    write(f"def loss(tokens, ratio_N):\n    {body}\n")
    message = refusal(pgVariant="mine:loss")
    assert message.startswith(LOSS)
    assert problem in message


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return rewards_K.mean()", "mine:ranks returned float64 of shape (): return an array"),
        ("return episodes.groups_N", "of shape (4,): return an array of one number per turn"),
        ("return rewards_K / 0", "mine:ranks returned nan for turn 0 of the batch"),
        ("return [str(r) for r in rewards_K]", "mine:ranks returned <U"),
        ("return episodes.nothing", "mine:ranks raised AttributeError"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
def test_an_estimator_without_a_number_per_turn_is_refused(
    write: Write, body: str, problem: str
) -> None:
    write(f"def ranks(episodes, rewards_K):\n    {body}\n")
    message = refusal(name="mine:ranks")
    assert message.startswith(ESTIMATOR)
    assert problem in message


def test_a_name_or_a_key_that_does_not_exist_is_refused(write: Write) -> None:
    write("def loss(tokens, ratio_N, tau):\n    return tau * ratio_N\n\n\nnumber = 3\n")
    assert "importing absent failed" in refusal(pgVariant="absent:loss")
    assert "mine has no absent" in refusal(name="mine:absent")
    assert "mine:number is a int, not a function" in refusal(name="mine:number")
    assert "missing a required argument: 'tau'" in refusal(pgVariant="mine:loss")
    unknown = refusal(pgVariant="mine:loss", lossConfig={"tau": 1, "upperBound": 2})
    assert "mine:loss(tokens, ratio_N, tau)" in unknown
    assert "unexpected keyword argument 'upper_bound'" in unknown


def test_in_a_batch_with_nothing_to_train_on_the_estimator_is_not_called(write: Write) -> None:
    write("def ranks(episodes, rewards_K):\n    raise RuntimeError\n")
    nothing = _episodes()
    nothing = type(nothing)(
        **{
            name: getattr(nothing, name)
            for name in nothing.__dataclass_fields__
            if name != "trainable_N"
        },
        trainable_N=np.zeros(4, np.bool_),
    )
    credit = assign_credit(credit_spec(pipeline(name="mine:ranks")), nothing)
    assert not credit.per_turn_K.any()
