"""A Hugging Face sequence classifier as a judge."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from typing_extensions import override

from agenticrun_workers.rollout.rewards.judge import (
    Judge,
    JudgedEpisode,
    Judgement,
    check_template,
    register_judge,
)


@register_judge("reward_model")
class RewardModelJudge(Judge):
    """Judge that scores the text of an episode with a classifier.

    It needs torch on the env pods, and each env worker holds one model. The score is the logit of a
    model with one label, else the probability of `label`.

    Args:
        path: folder or hub name of the model and its tokenizer.
        template: text to score; see `JudgedEpisode.fill`.
        label: index of the class to score, for models with several labels.
        max_length: token limit of a text. A longer one loses its beginning, because the end
            decides.
        device: torch device, such as cuda:0.
        trust_remote_code: allow the model's own code.
    """

    episodes_per_call: int | None = None
    calls_at_once = 1

    def __init__(
        self,
        *,
        path: str,
        template: str = "{transcript}",
        label: int | None = None,
        max_length: int = 4096,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        from safetensors import SafetensorError
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from agenticrun_workers.models.folder import ModelLoadError
        from agenticrun_workers.models.pretrained import check_report

        check_template(template, "template")
        self._template = template
        self._label = label
        self._max_length = max_length
        self._device = device
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                path, truncation_side="left", trust_remote_code=trust_remote_code
            )
            model: Any
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # they are in the report, which names them
                output_loading_info=True,
            )
            check_report(path, report)
            self._model = model.to(device).eval()
        except (OSError, RuntimeError, SafetensorError, ModelLoadError) as error:
            raise ValueError(
                f"{path} cannot be loaded as a sequence classifier: {error}"
            ) from error
        labels = self._model.config.num_labels
        if (labels == 1) != (label is None) or (label is not None and not 0 <= label < labels):
            raise ValueError(
                f"label: {path} has {labels} label(s); "
                f"name one from 0 to {labels - 1} if there are several, else none"
            )
        # Padding is masked: any token does.
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    @override
    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        """Runs one forward pass in a thread."""
        texts = [episode.fill(self._template) for episode in episodes]
        return list(
            await asyncio.get_running_loop().run_in_executor(self._thread, self._score, texts)
        )

    def _score(self, texts: list[str]) -> list[float]:
        import torch

        batch = self._tokenizer(
            texts, return_tensors="pt", padding=True, truncation=True, max_length=self._max_length
        )
        with torch.inference_mode():
            logits_BL = self._model(**batch.to(self._device)).logits.float()
        scores_B = logits_BL[:, 0] if self._label is None else logits_BL.softmax(-1)[:, self._label]
        scores: list[float] = scores_B.tolist()
        return scores
