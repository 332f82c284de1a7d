"""How SGLang's server is started."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agenticrun_workers.inference.server_process import ServerClient
from agenticrun_workers.inference.sglang.engine import SglangEngine
from agenticrun_workers.inference.sglang.server import OWNED, SglangControl, SglangOptions


def options(gpus: int = 0, **config: Any) -> SglangOptions:
    return SglangOptions(Path("/model"), "bfloat16", 2048, 7, Path("/logs"), config, gpus=gpus)


def parsed(flags: list[str]) -> dict[str, Any]:
    """Flags as argparse reads them: each `--name=value`, or a bare switch."""
    parser = argparse.ArgumentParser()
    for flag in flags:
        name, given, _ = flag.partition("=")
        parser.add_argument(name, **({} if given else {"action": "store_true"}))  # type: ignore[arg-type]
    return vars(parser.parse_args(flags))


def test_the_run_decides_model_precision_context_and_place() -> None:
    flags = parsed(options().flags(port=1234))
    assert (flags["model_path"], flags["dtype"], flags["weight_version"], flags["port"]) == (
        "/model",
        "bfloat16",
        "7",
        "1234",
    )
    assert (flags["host"], flags["device"], flags["skip_tokenizer_init"]) == (
        "127.0.0.1",
        "cpu",
        True,
    )
    assert int(flags["context_length"]) > 2048


def test_a_grammar_and_a_tokenizer_are_loaded_only_to_enforce_formats() -> None:
    flags = parsed(options().flags(port=1))
    assert (flags["grammar_backend"], flags["skip_tokenizer_init"]) == ("none", True)
    flags = parsed(replace(options(), enforces_formats=True).flags(port=1))
    assert flags["grammar_backend"] == "xgrammar"
    assert "skip_tokenizer_init" not in flags


@pytest.mark.parametrize(
    ("config", "enforces"),
    [
        ({}, True),
        ({"max_running_requests": 3}, True),
        ({"grammar_backend": "xgrammar"}, True),
        ({"grammar_backend": None}, True),
        ({"grammar_backend": "none"}, False),
        ({"grammar-backend": "outlines"}, False),
        ({"grammar": "none"}, False),
    ],
)
def test_an_engine_enforces_formats_unless_an_option_of_the_run_prevents_it(
    config: dict[str, Any], *, enforces: bool, tmp_path: Path
) -> None:
    engine = partial(
        SglangEngine, tmp_path, dtype="float32", max_length=64, log_folder=tmp_path, config=config
    )
    assert engine(enforces_formats=True).enforces_formats == enforces
    assert not engine().enforces_formats


def test_without_a_grammar_the_tokenizer_is_not_loaded_either(tmp_path: Path) -> None:
    asked = replace(options(grammar_backend="none"), enforces_formats=True)
    assert "--skip-tokenizer-init" in asked.flags(port=1)


def test_on_gpus_it_spans_all_of_the_engines() -> None:
    flags = parsed(options(gpus=4).flags(port=1))
    assert (flags["device"], flags["tp_size"]) == ("cuda", "4")
    assert not flags.keys() & {"attention_backend", "enable_memory_saver"}


def test_it_can_give_the_memory_of_gpus_back_that_a_trainer_shares() -> None:
    shared = SglangOptions(Path("/model"), "bfloat16", 64, 0, Path("/"), gpus=1, shares_gpus=True)
    assert parsed(shared.flags(port=1))["enable_memory_saver"]


async def test_it_frees_its_memory_only_when_its_schedulers_are_idle(tmp_path: Path) -> None:
    """SGLang ends if one is not: `assert self.is_fully_idle()`."""
    calls: list[str] = []

    class Http:
        async def check(self, path: str) -> bytes:
            calls.append(path)
            return b""

        async def post(self, path: str, body: object, *, seconds: float) -> object:
            calls.append(path)
            return {}

    engine = SglangEngine(
        tmp_path, dtype="bfloat16", max_length=64, log_folder=tmp_path, gpus=1, shares_gpus=True
    )
    http = cast(ServerClient, Http())
    engine._started = cast(Any, SimpleNamespace(http=http, control=SglangControl(http)))
    await engine.sleep()
    assert calls == ["/flush_cache?timeout=30", "/release_memory_occupation"]


def test_the_user_replaces_our_defaults_and_adds_options() -> None:
    flags = parsed(
        options(max_running_requests=3, sleep_on_idle=False, schedule_policy="lpm").flags(port=1)
    )
    assert (flags["max_running_requests"], flags["schedule_policy"]) == ("3", "lpm")
    assert "sleep_on_idle" not in flags


@pytest.mark.parametrize("name", ["schedule_policy", "schedule-policy"])
@pytest.mark.parametrize(("policy", "ranked"), [("lpm", False), ("fcfs", True), ("lof", True)])
def test_policies_that_know_no_priorities_turn_them_off(
    name: str, policy: str, ranked: bool
) -> None:
    """SGLang does not start with `lpm` and priorities."""
    assert (
        any("priority" in flag for flag in options(**cast(Any, {name: policy})).flags(port=1))
        == ranked
    )


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_other_fields_decide_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.config\.{name} cannot be set"):
        options(**{name: 1})


def test_a_precision_that_sglang_does_not_have_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"spec\.model\.dtype is float64, but SGLang computes with float32 or bfloat16",
    ):
        SglangOptions(Path("/model"), "float64", 2048, 7, Path("/logs"))


def test_sizes_are_those_of_the_options_that_count() -> None:
    assert (options().processes, options().max_requests) == (1, 64)
    assert (
        options(tp_size=2, max_running_requests=8).processes,
        options(max_running_requests=8).max_requests,
    ) == (2, 8)
    assert options(gpus=4, pp_size=2).processes == 4
    assert parsed(options(gpus=4, pp_size=2).flags(port=1))["tp_size"] == "2"
