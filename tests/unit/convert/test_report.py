"""The report is true: fields that it calls mapped change the run, dropped ones do not."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_workers.convert import Conversion, Fate, Line, compose, convert
from agenticrun_workers.convert.converter import Composition

EXAMPLES = sorted((Path(__file__).parents[2] / "data/roll/agentic").glob("*.yaml"))
OTHER_TEXTS = {
    "grouping": ("batch", "tags"),
    "method": ("mean",),
    "norm_mean_type": ("batch", "group"),
    "norm_std_type": ("batch", "group"),
    "kl_penalty": ("abs",),
    "lr_scheduler_type": ("linear", "cosine"),
    "dtype": ("bf16", "fp32"),
    "pg_variant": ("tis",),
    "device_mapping": ("[0]",),
    "adv_estimator": ("reinforce", "gae"),
    "loss_agg_mode": ("seq-mean-token-sum",),
    "ratio_type": ("token",),
    "track_with": ("wandb", "tensorboard"),
    "env_manager_cls": ("StepEnvManager", "TrajEnvManager"),
    "mode": ("mock", "online"),
    "output_dir": ("/elsewhere",),
    "weight_type": ("token",),
    "agg_type": ("sequence",),
    "attn_implementation": ("fa2", "eager"),
}
ONE_CHOICE = (
    "strategy_name",
    "worker_cls",
    "group_filter_cls",
    "proxy_type",
    "pipeline_cls",
    "type",
)
"""Fields of which we support one value only, so that the run does not contain them."""
CONDITIONAL = re.compile(
    "no effect at this value|not set|a variable|only|does not read|no env manager|"
    "takes? its place|is off|is normalised|validation waits|same way"
)
"""Dropped because of other fields or of this value."""


def others(line: Line) -> list[Any]:
    """Return other values that the field may have."""
    name = line.field.rsplit(".", 1)[-1]
    match line.value:
        case bool():
            return [not line.value]
        case int():
            return [line.value * 2 or 1, line.value // 2, abs(line.value) + 1]
        case float():
            return [line.value / 2 or 0.5]
        case str():
            return [
                text for text in OTHER_TEXTS.get(name, (f"{line.value}x",)) if text != line.value
            ]
    return []


def scalars(conversion: Conversion, fate: Fate) -> Iterator[Line]:
    """Yield the lines of one fate about a single number, text or switch."""
    for line in conversion.lines:
        if (
            line.fate is fate
            and others(line)
            and line.field.rsplit(".", 1)[-1] not in ONE_CHOICE
            and " " not in line.field
        ):
            yield line


def changed(composition: Composition, field: str, value: Any) -> Composition:
    """Return the configuration with another value of one field."""
    config = copy.deepcopy(composition.config)
    *path, last = [
        int(key) if key.isdigit() else key for key in re.split(r"[.\[\]]+", field) if key
    ]
    node: Any = config
    for key in path:
        node = node[key]
    node[last] = value
    return Composition(config, composition.variables)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_mapped_changes_the_run(example: Path) -> None:
    composition = compose(example)
    conversion = convert(composition, "x")
    silent = [
        (line.field, line.value)
        for line in scalars(conversion, Fate.MAPPED)
        if all(
            convert(changed(composition, line.field, value), "x").document == conversion.document
            for value in others(line)
        )
    ]
    assert silent == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_dropped_does_not(example: Path) -> None:
    composition = compose(example)
    conversion = convert(composition, "x")
    speaking = [
        (line.field, value)
        for line in scalars(conversion, Fate.DROPPED)
        if not CONDITIONAL.search(line.note)
        for value in others(line)
        if convert(changed(composition, line.field, value), "x").document != conversion.document
    ]
    assert speaking == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_field_of_the_file_has_a_line(example: Path) -> None:
    composition = compose(example)
    fields = {line.field for line in convert(composition, "x").lines}
    for key, value in composition.config.items():
        assert key in fields or any(field.startswith((f"{key}.", f"{key}[")) for field in fields), (
            key,
            value,
        )


def test_a_typo_is_told_with_the_likely_field() -> None:
    composition = compose(EXAMPLES[0])
    composition.config["adv_estimater"] = composition.config.pop("adv_estimator")
    composition.config["actor_train"]["training_args"]["flash_attn"] = True
    lines = {
        line.field: line for line in convert(composition, "x").lines if line.fate is Fate.UNKNOWN
    }
    assert (
        lines["adv_estimater"].note
        == "ROLL has no such field and ignores it: did you mean adv_estimator?"
    )
    assert (
        lines["actor_train.training_args.flash_attn"].note
        == "ROLL has no such field and ignores it"
    )


def test_secrets_are_neither_shown_nor_written() -> None:
    for example in EXAMPLES:
        conversion = convert(compose(example), "x")
        assert "not-a-real" not in str(conversion)
    text = str([convert(compose(example), "x").lines for example in EXAMPLES])
    assert "system_envs.HF_TOKEN" in text
    assert "tracker_kwargs.api_key" in text
