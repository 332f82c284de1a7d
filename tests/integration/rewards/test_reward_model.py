"""reward_model on tiny random classifiers made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.rollout.rewards import (
    JudgeConfigError,
    JudgedEpisode,
    JudgedTurn,
    JudgePanel,
    make_judge,
)
from judging import spec, trajectory

WORDS = ["really?", "yes", "no", "maybe", " "]


def make_classifier(folder: Path, labels: int) -> str:
    tokenizer = build_task_tokenizer(WORDS, 64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.5,
    }
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=len(tokenizer), num_labels=labels, **sizes)
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_classifier(tmp_path_factory.mktemp("scorer"), labels=1)


def episode(answer: str) -> JudgedEpisode:
    return JudgedEpisode("A", (JudgedTurn("really?", answer, 0.0),))


def logits(path: str, text: str) -> Any:
    """The classifier asked directly, one text at a time and without padding."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits[0]


async def test_texts_of_different_lengths_score_in_a_batch_as_they_do_alone(scorer: str) -> None:
    answers = ["yes", "no maybe no", "maybe"]
    scores = await make_judge("reward_model", {"path": scorer}).judge(
        [episode(answer) for answer in answers]
    )
    expected = [float(logits(scorer, f"really?{answer}")[0]) for answer in answers]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(set(scores)) == 3


async def test_a_long_text_loses_its_beginning(scorer: str) -> None:
    judge = make_judge("reward_model", {"path": scorer, "maxLength": 2, "template": "{answer}"})
    long, short = await judge.judge([episode("no" * 50 + "maybeyes"), episode("maybeyes")])
    assert long == pytest.approx(short, abs=1e-6)


async def test_of_several_labels_the_probability_of_one_counts(tmp_path: Path) -> None:
    path = make_classifier(tmp_path, labels=3)
    (score,) = await make_judge("reward_model", {"path": path, "label": 2}).judge([episode("yes")])
    assert score == pytest.approx(float(logits(path, "really?yes").softmax(-1)[2]), abs=1e-6)


async def test_its_score_becomes_reward(scorer: str) -> None:
    panel = JudgePanel([(spec(weight=3.0), make_judge("reward_model", {"path": scorer}))])
    judged = await panel.apply(trajectory(0.5), episode("yes"))
    assert judged.turns[-1].reward == pytest.approx(
        0.5 + 3 * float(logits(scorer, "really?yes")[0]), abs=1e-4
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"label": 0}, r"has 1 label\(s\)"),
        ({"template": "{question}"}, "known fields are"),
        ({"path": "/nowhere"}, "cannot be loaded as a sequence classifier"),
    ],
)
def test_a_config_that_cannot_work_is_refused(
    scorer: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(JudgeConfigError, match=message):
        make_judge("reward_model", {"path": scorer, **config})


@pytest.mark.parametrize("name", ["score.weight", "model.norm.weight"])
def test_a_classifier_without_one_of_its_weights_is_refused(name: str, tmp_path: Path) -> None:
    path = make_classifier(tmp_path, labels=1)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(JudgeConfigError, match=f"lacks 1 of its weights, {name} among them"):
        make_judge("reward_model", {"path": path})
