"""Environments of OpenEnv on a server that speaks its protocol, and in this process.

The fake server breaks on command; tests/integration/rollout/test_foreign_envs.py runs the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agenticrun_workers.envs import Env, EnvCalls, EnvFault, Start, StepResult, make_env
from agenticrun_workers.envs.checking import Verdict, check_env
from agenticrun_workers.envs.env import AtCapacity, EnvConfigError
from agenticrun_workers.envs.openenv import adapter, server
from agenticrun_workers.envs.openenv.actions import ActionForm
from agenticrun_workers.envs.remote import Patience
from agenticrun_workers.envs.tool_calls import Invalid
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import StopReason, Stream
from openenv_server import AsyncLine, Fault, Line, OpenEnvServer

CALLS = EnvCalls(5.0)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second for a server to be there; no answers from another test's server."""
    monkeypatch.setattr(adapter, "_servers", {})
    for module in (adapter, server):
        monkeypatch.setattr(module, "Patience", lambda: Patience(0.3))


@asynccontextmanager
async def opened(url: str, **config: Any) -> AsyncIterator[Env]:
    env = make_env("openenv", {"url": url, "hide": ["ways"], **config})
    try:
        yield env
    finally:
        await CALLS.close(env)


async def begin(env: Env, seed: int = 3, split: Stream = Stream.TRAIN) -> Start:
    return await CALLS.reset(env, seed, split)


async def test_an_episode_over_a_session() -> None:
    async with OpenEnvServer().serve() as lift, opened(lift.url) as env:
        start = await begin(env)
        floor = int(start.observation.removeprefix("floor "))
        assert start.instruction == "Answer with one of: up, down."
        assert await CALLS.valid_actions(env) == ["up", "down"]
        for left in range(floor - 1, -1, -1):
            result = await CALLS.step(env, " DOWN\n")
            assert result.observation == f"floor {left}"
            assert result.terminated is (left == 0)
        assert (result.reward, result.metrics["success"]) == (1.0, 1.0)
        assert lift.resets == [{"seed": 3}]
        assert lift.sessions == 1
        await CALLS.close(env)
        await asyncio.sleep(0.05)
        assert lift.sessions == 0


async def test_an_invalid_action_is_a_step_that_is_not_played() -> None:
    """Also one that only the server refuses."""
    any_way = {"properties": {"way": {"type": "string"}}, "required": ["way"]}
    for schema, asked in ((None, 0), (any_way, 1)):
        made = OpenEnvServer(schema=schema) if schema else OpenEnvServer()
        async with made.serve() as lift, opened(lift.url) as env:
            before = (await begin(env)).observation
            result = await CALLS.step(env, "sideways")
            assert result.observation.endswith(before)
            assert (result.reward, result.terminated) == (0.0, False)
            assert result.metrics["action_is_valid"] == 0.0
            assert "up" in result.info["reason"]
            assert len(lift.actions) == asked
            assert (await CALLS.step(env, "up")).metrics["action_is_valid"] == 1.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.LOST, "ended the session"),
        (Fault.ERROR, "EXECUTION_ERROR: the lift is stuck"),
        (Fault.NO_JSON, "sent '<html>'"),
        (Fault.NO_DATA, "sent '{"),
        (Fault.NAN, "nan"),
    ],
)
async def test_a_broken_server_costs_the_episode_and_keeps_no_session(
    fault: Fault, message: str
) -> None:
    async with OpenEnvServer().serve() as lift:
        async with opened(lift.url) as env:
            await begin(env)
            lift.fault = fault
            with pytest.raises(EnvFault, match=message) as raised:
                await CALLS.step(env, "up")
            assert raised.value.reason is StopReason.ENV_ERROR
        await asyncio.sleep(0.05)
        assert lift.sessions == 0


async def test_a_server_that_never_answers_is_a_timeout_and_can_be_closed() -> None:
    calls = EnvCalls(0.3)
    async with OpenEnvServer().serve() as lift:
        lift.fault = Fault.SILENT
        env = make_env("openenv", {"url": lift.url})
        with pytest.raises(EnvFault) as raised:
            await calls.reset(env, 1, Stream.TRAIN)
        assert raised.value.reason is StopReason.TIMEOUT
        began = time.monotonic()
        await CALLS.close(env)
        assert time.monotonic() - began < server.CLOSE_SECONDS + 1


async def test_a_server_that_is_not_there_is_named() -> None:
    async with opened("http://127.0.0.1:1") as env:
        with pytest.raises(EnvFault, match=r"http://127.0.0.1:1/schema does not answer"):
            await begin(env)


async def test_another_kind_of_server_is_named() -> None:
    async with OpenEnvServer().serve() as lift, opened(f"{lift.url}/other") as env:
        with pytest.raises(EnvFault, match=r"/other/schema does not answer .* 404"):
            await begin(env)


async def test_a_full_server_is_waited_for_and_then_named() -> None:
    async with OpenEnvServer(places=1).serve() as lift, opened(lift.url) as first:
        await begin(first)
        async with opened(lift.url) as second:
            with pytest.raises(AtCapacity, match=r"has 1 places .*maxConcurrent"):
                await begin(second)
            waiting = asyncio.create_task(begin(second))
            await asyncio.sleep(0.05)
            await CALLS.close(first)
            assert (await waiting).observation.startswith("floor")


async def test_long_and_broken_texts_become_readable() -> None:
    async with OpenEnvServer().serve() as lift, opened(lift.url) as env:
        lift.fault = Fault.HUGE
        text = (await begin(env)).observation
        assert "characters left out" in text
        assert adapter.OBSERVATION_CHARACTERS < len(text) < adapter.OBSERVATION_CHARACTERS + 100
        assert text.endswith("\U0001f642")
        lift.fault = Fault.SURROGATE
        assert (await CALLS.step(env, "up")).observation.endswith(r" \ud83d")


async def test_seeds_items_tasks_and_more_arguments_of_reset() -> None:
    splits = {"train": "train", "validation": "test"}
    config = {"splits": splits, "reset": {"level": 2}}
    async with OpenEnvServer().serve() as lift:
        for seed, split in ((25, Stream.TRAIN), (25 + VALIDATION_SEEDS, Stream.VALIDATION)):
            async with opened(lift.url, **config) as env:
                await CALLS.reset(env, seed, split, {"word": "\U0001f642"})
    train, validation = lift.resets
    more = {"level": 2, "word": "\U0001f642"}
    assert train == {"seed": 25, "split": "train", "index": 5, **more}
    assert validation["seed"] == 25 + VALIDATION_SEEDS
    assert (validation["split"], validation["index"]) == ("test", (25 + VALIDATION_SEEDS) % 3)


async def test_templates_words_and_listed_actions() -> None:
    config: dict[str, Any] = {
        "observation": "{message} of {ways[0]}",
        "actions": {"higher": "up", "lower": "down"},
        "validActions": "ways",
        "instruction": "Go to floor 0.",
    }
    async with OpenEnvServer().serve() as lift, opened(lift.url, **config) as env:
        start = await begin(env)
        assert start.observation.endswith("of up")
        assert start.instruction == "Go to floor 0.\nAnswer with one of: higher, lower."
        assert await CALLS.valid_actions(env) == ["higher", "lower"]
        await CALLS.step(env, "lower")
    assert lift.actions == [{"way": "down"}]


async def test_a_template_that_does_not_fit_names_the_fields() -> None:
    async with OpenEnvServer().serve() as lift, opened(lift.url, observation="{text}") as env:
        with pytest.raises(EnvFault, match="the observation has: message, ways"):
            await begin(env)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "either url"),
        ({"url": "localhost:8000"}, "is not an address"),
        ({"url": "http://a", "environment": "a:B"}, "either url"),
        ({"url": "http://a", "success": "win"}, "success must be"),
        ({"url": "http://a", "splits": {"train": "a"}}, "splits must name"),
        ({"url": "http://a", "observation": "{"}, "not a valid template"),
        ({"url": "http://a", "headers": {"A": "${NO_SUCH_NAME}"}}, "NO_SUCH_NAME is not set"),
        ({"environment": "lift"}, "is not module:Class"),
    ],
)
def test_mistakes_in_the_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env("openenv", config)


SERVE = """
import asyncio, sys
from openenv_server import OpenEnvServer
async def main():
    async with OpenEnvServer().serve() as lift:
        print(lift.url, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_is_killed_or_frozen_in_mid_episode(sent: signal.Signals) -> None:
    """A frozen server's kernel still takes what is sent, as on a half-open connection."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    with Popen(
        [sys.executable, "-c", SERVE], env={**os.environ, "PYTHONPATH": path}, stdout=PIPE
    ) as lift:
        try:
            assert lift.stdout is not None
            env = make_env("openenv", {"url": lift.stdout.readline().decode().strip()})
            await CALLS.reset(env, 1, Stream.TRAIN)
            lift.send_signal(sent)
            with pytest.raises(EnvFault) as raised:
                await EnvCalls(0.5).step(env, "up")
            expected = StopReason.ENV_ERROR if sent is signal.SIGKILL else StopReason.TIMEOUT
            assert raised.value.reason is expected
            await CALLS.close(env)
            again = make_env("openenv", {"url": lift_url(env)})
            with pytest.raises(EnvFault):
                await EnvCalls(0.5).reset(again, 1, Stream.TRAIN)
            await CALLS.close(again)
        finally:
            lift.kill()


def lift_url(env: Any) -> str:
    return str(env._server.url)


def test_check_env_finds_nothing_but_how_many_places_there_are() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2] / "support"), *sys.path])
    with Popen(
        [sys.executable, "-c", SERVE], env={**os.environ, "PYTHONPATH": path}, stdout=PIPE
    ) as lift:
        try:
            assert lift.stdout is not None
            url = lift.stdout.readline().decode().strip()
            report = check_env("openenv", {"url": url, "hide": ["ways"]}, seeds=5)
        finally:
            lift.kill()
    assert not report.failed, str(report)
    assert report.findings["interleaved"].verdict is Verdict.WARNING
    assert "has 4 places" in report.findings["interleaved"].found


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(BaseModel):
    width: int
    unit: Literal["cm", "m"] = "cm"


class Paint(Model):
    """Nested, enum and optional fields."""

    colour: Colour
    size: Size
    coats: int | None = Field(default=None, description="how many")
    tags: list[str] = []


def form(properties: dict[str, Any], **more: Any) -> ActionForm:
    return ActionForm({"properties": properties, "required": list(properties)}, **more)


@pytest.mark.parametrize(
    ("field", "answer", "value"),
    [
        ({"type": "integer"}, " -7 ", -7),
        ({"type": "integer"}, '{"x": 3}', 3),
        ({"type": "integer"}, "7.5", None),
        ({"type": "integer"}, "\u0663", 3),
        ({"type": "integer", "minimum": 0, "maximum": 3}, "3", 3),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 3}, "3", None),
        ({"type": "number"}, "2.5e1", 25.0),
        ({"type": "number"}, "1e999", None),
        ({"type": "number"}, "nan", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, " as it is ", " as it is "),
        ({"type": "string"}, '{"y": 1}', '{"y": 1}'),
        ({"type": "string"}, " \n", None),
        ({"enum": [1, 2, "A", "a"]}, "2", 2),
        ({"enum": [1, 2, "A", "a"]}, "a", "a"),
        ({"enum": ["LEFT", "RIGHT"]}, "left", "LEFT"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "1, 2", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "four", "four"),
        ({"type": "object"}, '```json\n{"a": 1}\n```', {"a": 1}),
    ],
)
def test_values_of_one_field(field: dict[str, Any], answer: str, value: Any) -> None:
    parsed = form({"x": field}).parse(answer)
    assert isinstance(parsed, Invalid) if value is None else parsed == {"x": value}


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ('{"colour": "red", "size": {"width": 2}}', {"colour": "red", "size": {"width": 2}}),
        ('I say: {"colour": "red", "coats": 2}!', {"colour": "red", "coats": 2}),
        ('{"colour": "\\ud83d"}', None),
        ('{"coats": NaN}', None),
        ('{"coats": 1e999}', None),
        ('{"clour": "red"}', None),
        ("{" * 5000, None),
        ('{"a":' * 5000, None),
        ("[1]", None),
        ("red", None),
        ("", None),
    ],
)
def test_several_fields_are_a_json_object(answer: str, action: dict[str, Any] | None) -> None:
    parsed = ActionForm(Paint.model_json_schema()).parse(answer)
    assert isinstance(parsed, Invalid) if action is None else parsed == action


def test_the_question_names_fields_types_and_what_is_optional() -> None:
    assert ActionForm(Paint.model_json_schema()).question().splitlines() == [
        "Answer with a JSON object that has these fields:",
        "- colour: one of red, blue",
        "- size: an object {width: a whole number, unit: one of cm, m}",
        "- coats (optional): a whole number (how many)",
        "- tags (optional): a list of text",
    ]


def test_words_for_whole_actions_and_fixed_fields() -> None:
    words = form(
        {"x": {"type": "integer"}, "y": {"type": "integer"}, "game": {"type": "string"}},
        actions={"jump": {"x": 0, "y": 1}},
        fields={"game": "catch"},
    )
    assert words.parse("Jump") == {"x": 0, "y": 1, "game": "catch"}
    assert words.answers() == ["jump"]
    with pytest.raises(ValueError, match="'run' must be an object"):
        form({"x": {}, "y": {}}, actions={"run": 1})
    with pytest.raises(ValueError, match="no field z"):
        form({"x": {}}, fields={"z": 1})


class Move(Model):
    kind: Literal["move"]
    by: int


class Shoot(Model):
    kind: Literal["shoot"]
    at: Size
    by: str = "bow"


def test_several_kinds_of_actions_are_a_json_object_with_the_fields_of_all() -> None:
    union = TypeAdapter(Annotated[Move | Shoot, Field(discriminator="kind")])
    older = union.json_schema(ref_template="#/definitions/{model}")
    older["definitions"] = older.pop("$defs")
    for schema in (union.json_schema(), older):
        its = ActionForm(schema)
        assert its.question().splitlines() == [
            "Answer with a JSON object that has these fields:",
            "- kind: move or shoot",
            "- by (optional): a whole number or text",
            "- at (optional): an object {width: a whole number, unit: one of cm, m}",
        ]
        for action in ({"kind": "move", "by": 1}, {"kind": "shoot", "at": {"width": 2}}):
            assert its.parse(json.dumps(action)) == action
        assert isinstance(its.parse("fly"), Invalid)


BESIDE = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "type": "object"}
EITHER = [{"required": ["a"]}, {"required": ["b"]}]


@pytest.mark.parametrize(
    "schema",
    [
        {**BESIDE, "anyOf": EITHER},
        {**BESIDE, "oneOf": EITHER},
        {"allOf": [BESIDE, {"anyOf": EITHER}]},
        {"$ref": "#/$defs/Base", "anyOf": EITHER, "$defs": {"Base": BESIDE}},
        {"oneOf": [{"$ref": "#/$defs/Base"}], "anyOf": EITHER, "$defs": {"Base": BESIDE}},
    ],
)
def test_fields_beside_alternatives_belong_to_all_of_them(schema: dict[str, Any]) -> None:
    its = ActionForm(schema)
    assert its.parse('{"a": 1}') == {"a": 1}
    assert its.parse('{"b": "x"}') == {"b": "x"}
    assert isinstance(its.parse("x"), Invalid)


def test_an_object_with_alternatives_inside_a_field_is_not_text() -> None:
    its = form({"place": {**BESIDE, "anyOf": EITHER}, "n": {"type": "integer"}})
    assert "place: an object {a: a whole number, b: text}" in its.question()


def test_a_constant_of_one_alternative_is_stronger_than_the_field_beside_it() -> None:
    kinds = [{"properties": {"kind": {"const": each}}, "required": ["kind"]} for each in "xy"]
    its = ActionForm({"properties": {"kind": {"type": "string"}}, "anyOf": kinds})
    assert "- kind: x or y" in its.question()
    assert its.parse('{"kind": "y"}') == {"kind": "y"}


def test_references_lead_to_definitions_only_and_not_in_circles() -> None:
    number: dict[str, Any] = {"type": "integer"}
    its = ActionForm({"properties": {"x": {"$ref": "#/properties/y"}}, "$defs": {"y": number}})
    assert its.parse("a") == {"x": "a"}
    escaped = {"properties": {"x": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": number}}
    assert ActionForm(escaped).parse("7") == {"x": 7}
    circle = {"anyOf": [{"$ref": "#/$defs/A"}, number]}
    its = ActionForm({"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": circle}})
    assert its.parse("7") == {"x": 7}
    itself = {"$ref": "#/$defs/A", "type": "integer"}
    its = ActionForm({"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": itself}})
    assert its.parse("7") == {"x": 7}


class Recursive(Model):
    inner: Recursive | None = None
    number: int


def test_a_schema_that_refers_to_itself() -> None:
    assert ActionForm(Recursive.model_json_schema()).parse('{"number": 1}') == {"number": 1}
    assert "number: a whole number" in ActionForm(Recursive.model_json_schema()).question()


@pytest.mark.parametrize("kind", [Line, AsyncLine])
async def test_a_class_in_this_process(kind: type[Line]) -> None:
    config = {"environment": f"openenv_server:{kind.__name__}", "kwargs": {"length": 5}}
    env = make_env("openenv", config)
    start = await CALLS.reset(env, 1, Stream.TRAIN)
    assert (start.observation, start.instruction) == ("2", "Answer with one of: -1, 0, 1.")
    assert (await CALLS.step(env, "2")).metrics["action_is_valid"] == 0.0
    assert (await CALLS.step(env, "-1")).observation == "1"
    result = await CALLS.step(env, '{"step": -1}')
    assert isinstance(result, StepResult)
    assert (result.terminated, result.reward) == (True, 1.0)
    before = Line.closed
    await CALLS.close(env)
    assert Line.closed == before + 1


def test_check_env_finds_nothing_in_a_class() -> None:
    report = check_env(
        "openenv", {"environment": "openenv_server:Line", "kwargs": {"length": 10_000}}
    )
    report.assert_ok()


def test_an_action_without_a_type_has_to_be_named() -> None:
    config = {"environment": "openenv_server:Unannotated"}
    with pytest.raises(EnvConfigError, match="set action: module:Class"):
        make_env("openenv", config)
    assert make_env("openenv", {**config, "action": "openenv_server:MoveAction"})
