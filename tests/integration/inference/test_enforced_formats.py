"""Formats that engines enforce: by the real servers, and by the grammar library that both have."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from agenticrun_workers.agents.chat_families import DEMANDING, AnswerReader, find_family
from agenticrun_workers.agents.outside.formats import AnswerFormat
from agenticrun_workers.inference.engine import InferenceEngine
from agenticrun_workers.inference.server_process import find_engine
from agenticrun_workers.inference.sglang.engine import SglangEngine
from agenticrun_workers.inference.vllm import server as vllm
from agenticrun_workers.inference.vllm.engine import VllmEngine
from outside_agents import FORMAT_WORDS, check_enforced_formats
from tiny_model import CONTEXT, tiny_model

XGRAMMAR = r"""
import json, random, sys
import torch, xgrammar
ENDS = ("</arg_value>", "\n</parameter>", '"', "}", "]")
END, BYTES = 256, [bytes([number]) for number in range(256)]
info = xgrammar.TokenizerInfo(
    [*BYTES, b"</s>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[END]
)
compiler = xgrammar.GrammarCompiler(info)
mask = xgrammar.allocate_token_bitmask(1, 257)
for line in sys.stdin:
    tag, texts, count = json.loads(line)
    grammar = compiler.compile_structural_tag(json.dumps(tag))
    taken, written = [], []
    for text in texts:
        matcher = xgrammar.GrammarMatcher(grammar)
        taken.append(matcher.accept_string(text) and matcher.accept_token(END))
    for seed in range(count):
        matcher, chance, answer = xgrammar.GrammarMatcher(grammar), random.Random(seed), b""
        while True:
            matcher.fill_next_token_bitmask(mask)
            allowed = [n for n in range(257) if mask[0, n // 32] >> n % 32 & 1]
            if END in allowed:
                break
            ended = chance.random() < 0.3 and [each for each in ENDS if matcher.accept_string(each)]
            if ended:
                answer += "".join(ended).encode()
                continue
            token = chance.choice([n for n in allowed if n < 127] or allowed)
            assert matcher.accept_token(token)
            answer += BYTES[token]
        written.append(answer.decode())
    print(json.dumps([taken, written]), flush=True)
"""
"""Says which texts are whole answers in a format, and writes random ones, byte by byte. Texts that
end values are tried as a whole, because random bytes hardly make one."""

ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "side": {"enum": ["left", "right"]},
        "more": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["text", "count", "side"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS, "strict": True}}
]
VALUES = {"text": "a b", "count": -3, "side": "left", "more": [True, False]}
JSON = json.dumps(VALUES)


class Grammars:
    """xgrammar in the environment of an engine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(
        self, form: AnswerFormat, texts: Sequence[str] = (), count: int = 0
    ) -> tuple[list[bool], list[str]]:
        """Return which texts are answers in the format, and so many random answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps([form.structural_tag, [*texts], count]), file=self._process.stdin, flush=True
        )
        taken, written = json.loads(self._process.stdout.readline())
        return taken, written


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    python = find_engine("vllm", vllm.PACKAGES, vllm.VERSIONS)
    with subprocess.Popen(
        [str(python), "-c", XGRAMMAR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Grammars(process)
        process.terminate()


def test_an_answer_is_a_value_of_the_schema_and_nothing_else(grammars: Grammars) -> None:
    form = AnswerFormat(schema=ARGUMENTS)
    texts = [JSON, f"Well. {JSON}", f"{JSON} and", JSON.replace("left", "up"), "{}"]
    taken, written = grammars.ask(form, texts, 20)
    assert taken == [True, False, False, False, False]
    for answer in written:
        jsonschema.validate(json.loads(answer), ARGUMENTS)
    any_object, _ = grammars.ask(AnswerFormat(schema={"type": "object"}), [JSON, "{}", "[]"])
    assert any_object == [True, True, False]


def test_names_are_required_that_are_no_properties(grammars: Grammars) -> None:
    inner = {"type": "object", "required": ["b"], "additionalProperties": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {"in": {"$ref": "#/$defs/inner"}},
        "required": ["a", "in"],
        "$defs": {"inner": inner},
    }
    texts = ['{"in": {"b": 1}, "a": "x"}', '{"in": {"b": 1}}', '{"in": {}, "a": 1}']
    taken, written = grammars.ask(AnswerFormat(schema=schema), texts, 20)
    assert taken == [True, False, False]
    for answer in written:
        jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize("reasoning", [("", "</think>"), ("<think>", "</think>")])
def test_reasoning_may_come_first_and_has_any_form(
    grammars: Grammars, reasoning: tuple[str, str]
) -> None:
    form = AnswerFormat(schema=ARGUMENTS, reasoning=reasoning)
    begins, ends = reasoning
    texts = [f"{begins}\nSo {{\n{ends}\n\n{JSON}", f"{begins}So{ends}Well.", f"{begins}So", JSON]
    taken, _ = grammars.ask(form, texts)
    assert taken == [True, False, False, bool(begins)]


def test_with_a_schema_and_tools_the_answer_is_one_of_both(grammars: Grammars) -> None:
    form = AnswerFormat({"add": ARGUMENTS}, {"type": "object"})
    call = f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>'
    taken, _ = grammars.ask(form, [call, JSON, call + JSON, "Well."])
    assert taken == [True, True, False, False]


@pytest.mark.parametrize("name", DEMANDING)
def test_a_demanded_call_is_read_as_the_family_writes_it(grammars: Grammars, name: str) -> None:
    family = find_family(name, "")
    reader = AnswerReader(family, "", "")
    form = AnswerFormat({"add": ARGUMENTS}, call_text=family.call_text)
    taken, written = grammars.ask(form, [JSON, "add", "", "Well."], 20)
    assert not any(taken)
    for answer in written:
        parsed = reader.read(answer, ended=True, tools=TOOLS)
        assert parsed.problem is None, answer
        (call,) = parsed.calls
        assert call.name == "add"
        jsonschema.validate(json.loads(call.arguments), ARGUMENTS)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
async def test_a_server_samples_answers_in_the_format_of_the_request(
    name: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_length": CONTEXT,
        "log_folder": tmp_path,
        "enforces_formats": True,
    }
    folder = tiny_model(tmp_path / "model", words=FORMAT_WORDS)
    engine: InferenceEngine = (
        SglangEngine(folder, **options) if name == "sglang" else VllmEngine(folder, **options)
    )
    await engine.start()
    try:
        await check_enforced_formats(engine)
    finally:
        await engine.stop()
