"""docs/model-types.md: what engine and trainer compute for each type of model of transformers.

One type per mechanism is computed again; with AGENTICRUN_MODEL_TYPES=all, as in `make drills`, all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from docs.model_types import page
from model_comparison import Case, all_cases, measure, quiet_transformers

PAGE = (Path(__file__).parents[3] / "docs/model-types.md").read_text()


def entries(text: str) -> dict[str, tuple[str, str]]:
    """Return section and text of the run of each type."""
    found, section = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.partition(":")[0]
        elif match := re.fullmatch(r"- \*\*(.*)\*\*: (.*)", line):
            for each in match[2].split("; "):
                name, bracket, layout = each.partition(" (")
                found[name] = (section, match[1] + bracket + layout)
    return found


ROWS = entries(PAGE)
MECHANISMS = (
    "llama",  # full attention
    "mistral",  # a window in all layers
    "gemma3_text",  # windows in some layers
    "gemma4_text",  # heads of different sizes
    "gemma4_text, shared keys and values",
    "llama4_text, dense",  # chunks
    "bloom",  # ALiBi, eager only
    "gpt2",  # learned positions
    "diffllama",  # two attentions per layer
    "youtu",  # latent attention
    "doge",  # experts in the config, not in the model
    "mamba",  # no attention
    "lfm2, with convolution",
    "qwen3_5_text",  # linear attention
    "dots3_note_text",  # indexed attention
    "trocr",  # positions from the cache
    "openai-gpt",  # no cache
    "gemma2",  # soft-capping
    "modernbert-decoder",  # a layer before the output layer
    "bert-generation",  # not causal
    "qwen3_moe",  # experts
    "qwen2_moe, sliding window",  # a window in the mask only
    "gpt_oss",  # sinks
    "jetmoe",  # experts in another form
    "bart",  # an encoder
    "gemma3",  # pictures
)
CASES = {
    case.name: case
    for case in all_cases()
    if os.environ.get("AGENTICRUN_MODEL_TYPES") == "all" or case.name in MECHANISMS
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_transformers():
        yield


def test_every_type_of_the_pinned_transformers_has_a_row() -> None:
    assert f"transformers {transformers.__version__}," in PAGE, "generate the page again"
    assert [case.name for case in all_cases() if case.name not in ROWS] == []


def test_each_mechanism_exists() -> None:
    assert set(MECHANISMS) <= {case.name for case in all_cases()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own types
def test_a_type_is_computed_as_its_row_says(case: Case) -> None:
    measured = measure(case)
    assert not measured.differs, measured
    section, text = entries(page([measured]))[case.name]
    assert section == ROWS[case.name][0]
    assert _without_numbers(text) == _without_numbers(ROWS[case.name][1])


def _without_numbers(row: str) -> str:
    """Remove differences, which depend on the processor's rounding."""
    return re.sub(r"\d\.?\d*(e-\d+)?(?= nats)|\d+e-\d+", "N", row)
