"""The same work here and in TRL: one GRPO step, and the embedded engine beside `model.generate`.

    python benchmarks/peers.py [--figures NAME ...] [--quick] [--json FILE]

Both sides do the same work in turn, and a figure is the median of the ratios of these pairs, so
that other programs on the machine slow both.

`step_over_trl` is the time of a step (16 prompts with 8 samples of at most 128 tokens, AdamW) by
`agenticrun run` with its defaults, over TRL's time. TRL has an environment of its own, which uv
makes from locks/trl.txt at the first start. `engine_over_generate_*` and `prefill_over_generate`
are tokens per second of 128 responses, over those of `model.generate`, which computes all rows
until the longest one ends: 128 tokens each (`equal`), 8 to 512 (`mixed`), and 32 after prompts of
1,024 (`prefill`). `--quick` has a sixteenth of the rows and an eighth of the prompts, and one pair.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
import torch
from peer_steps.task import ANSWER, SAMPLES
from record import write_record
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.types import GenerationRequest, IntArray, SamplingParams

BENCHMARKS = Path(__file__).parent
LOCK = Path(__file__).parents[1] / "locks" / "trl.txt"
LIMITS = {
    "step_over_trl": "at most 0.85",
    "engine_over_generate_equal": "at least 1.3",
    "engine_over_generate_mixed": "at least 2",
    "prefill_over_generate": "at least 3",
}
POSITIONS = 2048


def make_model(folder: Path) -> None:
    """Write a Llama of 2.7 million random weights with a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>", "<|pad|>")
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=POSITIONS,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trl_python() -> Path:
    """Return the Python of TRL's environment, which is made once for each lock."""
    cache = Path(os.environ.get("AGENTICRUN_CACHE") or Path.home() / ".cache" / "agenticrun")
    folder = cache / "trl" / hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.exists():
        print(f"installing {LOCK.name} into {folder}", file=sys.stderr)
        uv = str(Path(sys.executable).with_name("uv"))
        make = [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "sync", "--quiet", "--python", str(python), "--require-hashes"]
        for command in (make, [*install, str(LOCK)]):
            subprocess.run(command, check=True)
        done.touch()
    return python


class Stepper:
    """A process that trains step by step.

    Args:
        command: the process.
        folders: where it finds modules.
        log: takes its stderr.
    """

    def __init__(self, command: list[str], folders: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            )

    def step(self) -> float:
        """Take one step and return its seconds.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return float(line.removeprefix(ANSWER))
        raise RuntimeError(self._log.read_text()[-4000:])

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):
            self._process.communicate()


@contextmanager
def training(model: Path, prompts: int) -> Iterator[tuple[Stepper, Stepper]]:
    """Start our process and TRL's."""
    scratch, steps = model.parent, BENCHMARKS / "peer_steps"
    ours = [sys.executable, str(steps / "our_steps.py"), str(model), str(prompts)]
    trl = [str(trl_python()), str(steps / "trl_steps.py"), str(model), str(prompts)]
    with (
        closing(Stepper(ours, [str(BENCHMARKS), *sys.path], scratch / "ours.log")) as our,
        closing(Stepper(trl, [str(BENCHMARKS)], scratch / "trl.log")) as peer,
    ):
        yield our, peer


def noted(ours: float, peer: float) -> tuple[float, float]:
    """Show one pair: on a busy machine the next one may take minutes."""
    print(f"  ours {ours:.2f}, peer {peer:.2f}", file=sys.stderr, flush=True)
    return ours, peer


def compare_steps(model: Path, prompts: int, pairs: int) -> tuple[float, list[tuple[float, float]]]:
    """Return `step_over_trl` and the seconds of (ours, TRL's) for each pair."""
    with training(model, prompts) as (our, peer):
        our.step(), peer.step()  # caches grow, threads start
        seconds = [noted(our.step(), peer.step()) for _ in range(pairs)]
    return median(own / other for own, other in seconds), seconds


class Work:
    """Responses that are asked for at once, in groups that have the same prompt."""

    def __init__(self, kind: str, rows: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        size = 1024 if kind == "prefill" else 64
        prompts = random.integers(256, size=(rows // SAMPLES, size)).astype(np.int32)
        self.prompts_BT: IntArray = np.repeat(prompts, SAMPLES, 0)
        lengths = {"equal": [128] * rows, "prefill": [32] * rows}
        mixed = np.linspace(8, 512, rows).astype(int)
        self.lengths: list[int] = lengths.get(kind) or random.permutation(mixed).tolist()
        self.name = f"{kind}-{seed}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


async def ask_engine(engine: TransformersEngine, work: Work) -> float:
    """Return the engine's tokens per second."""
    requests = [
        GenerationRequest(
            f"{work.name}-{row}", f"{work.name}-{row}", ids_T, SamplingParams(new), row
        )
        for row, (ids_T, new) in enumerate(zip(work.prompts_BT, work.lengths, strict=True))
    ]
    began = time.perf_counter()
    answers = await asyncio.gather(*map(engine.generate, requests))
    seconds = time.perf_counter() - began
    assert sum(len(answer.tokens_T) for answer in answers) == work.tokens
    return work.tokens / seconds


@torch.inference_mode()
def ask_generate(model: PreTrainedModel, work: Work) -> float:
    """Return the tokens per second of `model.generate`, without those after a row's length."""
    ids_BT = torch.from_numpy(work.prompts_BT).long()
    began = time.perf_counter()
    model.generate(
        input_ids=ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=max(work.lengths),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return work.tokens / (time.perf_counter() - began)


async def compare_engine(
    folder: Path, kind: str, rows: int, pairs: int
) -> tuple[float, list[tuple[float, float]]]:
    """Return the ratio, and the tokens per second of (engine, generate) for each pair."""
    model = load_model(str(folder))
    model.generation_config.eos_token_id = None
    engine = TransformersEngine(lambda: load_model(str(folder)), max_length=POSITIONS)
    await engine.start()
    speeds = []
    try:
        await ask_engine(engine, Work(kind, rows, 0))  # the cache grows
        for seed in range(1, pairs + 1):
            work = Work(kind, rows, seed)
            speeds.append(noted(await ask_engine(engine, work), ask_generate(model, work)))
    finally:
        await engine.stop()
    return median(own / other for own, other in speeds), speeds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="*", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a result")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    rows, prompts, pairs = (8, 2, 1) if arguments.quick else (128, 16, 5)
    figures: dict[str, float] = {}
    samples: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        print(f"{'figure':30}{'ours':>10}{'peer':>10}{'ratio':>8}")
        for name in arguments.figures:
            if name == "step_over_trl":
                figures[name], samples[name] = compare_steps(model, prompts, pairs)
            else:
                kind = "prefill" if name.startswith("prefill") else name.rpartition("_")[2]
                figures[name], samples[name] = asyncio.run(compare_engine(model, kind, rows, pairs))
            ours, peer = (median(side) for side in zip(*samples[name], strict=True))
            print(
                f"{name:30}{ours:10.2f}{peer:10.2f}{figures[name]:8.2f}  ({LIMITS[name]})",
                flush=True,
            )
    if arguments.json:
        write_record(arguments.json, figures, samples=samples)


if __name__ == "__main__":
    main()
