"""GRPO steps of TRL, in its own environment (locks/trl.txt). See benchmarks/peers.py.

python trl_steps.py MODEL PROMPTS
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from typing import Any

import torch
from datasets import Dataset
from peer_steps.task import (
    LEARNING_RATE,
    NEW_TOKENS,
    SAMPLES,
    StepGate,
    random_prompt,
    score,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

STEPS = 1000
"""More than are asked for."""


class Gated(TrainerCallback):  # type: ignore[misc]
    """Holds the trainer between two steps."""

    def __init__(self) -> None:
        self._gate = StepGate()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._gate.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._gate.end()


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Return the score of each answer."""
    return [score(messages[0]["content"]) for messages in completions]


def main() -> None:
    model, groups = sys.argv[1], int(sys.argv[2])
    prompts = [
        {"prompt": [{"role": "user", "content": random_prompt(seed)}]}
        for seed in range(groups * STEPS)
    ]
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=groups * SAMPLES // 16,
            generation_batch_size=groups * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            learning_rate=LEARNING_RATE,
            beta=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=STEPS,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Gated()],
        )
        with suppress(EOFError):
            trainer.train()


if __name__ == "__main__":
    main()
