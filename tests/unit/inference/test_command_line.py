"""`strategy.config` as the command line of a server."""

from __future__ import annotations

from typing import Any

import pytest

from agenticrun_workers.inference.server_process import command_line

OWNED = {
    "port": "the engine",
    "dtype": "spec.model.dtype",
    "context_length": "spec.pipeline.sequenceLength",
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, []),
        ({"tp_size": 2}, ["--tp-size=2"]),
        ({"tp-size": 2}, ["--tp-size=2"]),
        ({"mem_fraction_static": 0.8}, ["--mem-fraction-static=0.8"]),
        ({"enable_metrics": True}, ["--enable-metrics"]),
        ({"enable_metrics": False}, []),
        ({"quantization": None}, []),
        ({"cuda_graph_bs": [1, 2, 4]}, ["--cuda-graph-bs", "1", "2", "4"]),
        ({"override": {"a": [1, None]}}, ['--override={"a": [1, null]}']),
        ({"name": "--port=80"}, ["--name=--port=80"]),
    ],
)
def test_options_become_flags_under_their_own_names(
    config: dict[str, Any], words: list[str]
) -> None:
    assert command_line(config, OWNED) == words


def test_switches_can_be_turned_off_where_the_server_has_a_flag_for_it() -> None:
    assert command_line({"enable_prefix_caching": False}, OWNED, negatable=True) == [
        "--no-enable-prefix-caching"
    ]


def test_what_the_user_sets_replaces_our_default() -> None:
    assert command_line(
        {"sleep_on_idle": False, "seed": 3}, OWNED, {"sleep_on_idle": True, "seed": 1, "x": 2}
    ) == ["--seed=3", "--x=2"]


@pytest.mark.parametrize("name", ["dtype", "context_length", "context-length", "--context-length"])
def test_an_option_that_another_field_decides_is_refused_and_the_field_is_named(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"config\.{name.strip('-').replace('-', '_')} cannot be set: "
        rf"{OWNED[name.strip('-').replace('-', '_')]}",
    ):
        command_line({name: 1}, OWNED)


def test_an_abbreviation_of_an_owned_option_is_refused_because_argparse_would_take_it() -> None:
    with pytest.raises(ValueError, match=r"config\.context_len is short for context_length"):
        command_line({"context_len": 8}, OWNED)


@pytest.mark.parametrize("value", [["a", "--port=1"], object()])
def test_values_that_cannot_stand_on_a_command_line_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"spec\.pipeline\.actorInfer\.strategy\.config\.names"):
        command_line({"names": value}, OWNED)
