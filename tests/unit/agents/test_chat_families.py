"""Answers of each family are read into content, reasoning and calls; malformed ones never raise."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api.spec import ChatFamily
from agenticrun_workers.agents.chat_families import (
    MAX_NESTING,
    NAMES,
    AnswerReader,
    ParsedAnswer,
    find_family,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "s": {"type": "string"},
                "flag": {"type": "boolean"},
                "items": {"type": "array"},
            },
        },
    },
}
TOOLS = [ADD]
BAR = "\N{FULLWIDTH VERTICAL LINE}"


def reader(family: str, template: str = "<think>", prompt: str = "") -> AnswerReader:
    return AnswerReader(find_family(family, ""), template, prompt)


def read(family: str, text: str, *, ended: bool = True, **more: str) -> ParsedAnswer:
    return reader(family, **more).read(text, ended=ended, tools=TOOLS)


def calls(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("family", ["qwen_xml", "glm", "muse"])
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"enum": ["left", "right"]}, "left"),
        ({"const": "left"}, "left"),
        ({"$ref": "#/$defs/Side"}, "left"),
        ({"$ref": "#/$defs/Chain"}, "left"),
        ({"anyOf": [{"enum": ["left"], "type": "string"}, {"type": "null"}]}, "left"),
        ({"anyOf": [{"enum": [1]}, {"anyOf": [{"const": "left"}, {"type": "null"}]}]}, "left"),
        ({"oneOf": [{"const": "right"}, {"$ref": "#/$defs/Side"}]}, "left"),
        ({"allOf": [{"$ref": "#/$defs/Side"}]}, "left"),
        ({"allOf": [{"type": "string"}, {"$ref": "#/$defs/Side"}]}, "left"),
        ({"anyOf": [{"enum": ["left"]}, {"type": "string"}]}, "\n\n left \n\n"),
        ({"anyOf": [{"enum": ["left"]}, {"type": ["null", "string"]}]}, "\n\n left \n\n"),
        ({"$ref": "#/$defs/Loop"}, "\n\n left \n\n"),
        ({"$ref": "#/$defs/Nowhere"}, "\n\n left \n\n"),
        ({"enum": ["left", "\n\n left \n\n"]}, "\n\n left \n\n"),
        ({"type": "string"}, "\n\n left \n\n"),
    ],
)
def test_space_around_a_text_that_the_schema_lists_is_no_part_of_it(
    family: str, schema: dict[str, Any], value: str
) -> None:
    defs = {
        "Side": {"enum": ["left"]},
        "Chain": {"$ref": "#/$defs/Side"},
        "Loop": {"allOf": [{"$ref": "#/$defs/Loop"}]},
    }
    parameters = {"properties": {"side": schema}, "$defs": defs}
    tool = {"type": "function", "function": {"name": "turn", "parameters": parameters}}
    text = {
        "qwen_xml": "<tool_call>\n<function=turn>\n<parameter=side>\n\n\n left \n\n\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm": "<tool_call>turn\n<arg_key>side</arg_key>\n<arg_value>\n\n left \n\n</arg_value>\n"
        "</tool_call>",
        "muse": 'to=functions.turn<|message|><atem:function_calls><atem:invoke name="turn">'
        '<atem:parameter name="side">\n\n left \n\n</atem:parameter></atem:invoke>'
        "</atem:function_calls>",
    }[family]
    (call,) = reader(family).read(text, ended=True, tools=[tool]).calls
    assert json.loads(call.arguments) == {"side": value}


XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n1\n</parameter>\n"
    "</function>\n</tool_call>"
)
CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "1"}}\n</tool_call>',
    "qwen_xml": XML,
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:add{a:1,s:<|"|>1<|"|>}<tool_call|>',
    "gpt_oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1,"s":"1"}',
    "llama3": '{"name": "add", "parameters": {"a": 1, "s": "1"}}',
    "deepseek": f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function"
    f'<{BAR}tool▁sep{BAR}>add\n```json\n{{"a": 1, "s": "1"}}\n```<{BAR}tool▁call▁end{BAR}>'
    f"<{BAR}tool▁calls▁end{BAR}>",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "s": "1"}}]',
    "lfm2": "<|tool_call_start|>[add(a=1, s='1')]<|tool_call_end|>",
    "muse": ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
    '<atem:parameter name="a">1</atem:parameter>\n<atem:parameter name="s">1</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
}


def test_the_run_knows_the_families_that_answers_are_read_in() -> None:
    assert set(get_args(ChatFamily)) == {"auto", *NAMES}
    assert {*CALLS, "text"} == set(NAMES)


@pytest.mark.parametrize("family", CALLS)
def test_a_call_has_its_name_and_values_of_the_types_that_the_tool_declares(family: str) -> None:
    answer = read(family, CALLS[family])
    assert calls(answer) == [("add", {"a": 1, "s": "1"})]
    assert (answer.content, answer.problem) == ("", None)


@pytest.mark.parametrize("family", CALLS)
def test_a_call_that_is_cut_is_a_malformed_answer_and_stays_text(family: str) -> None:
    whole = CALLS[family]
    text = whole if reader(family)._ends_calls else whole[: len(whole) - len(whole) // 3]
    answer = read(family, text, ended=False)
    assert (answer.content, answer.calls) == (text, ())
    assert answer.problem


@pytest.mark.parametrize("family", [name for name in CALLS if not reader(name)._ends_calls])
def test_a_whole_call_counts_though_its_turn_was_cut(family: str) -> None:
    assert calls(read(family, CALLS[family], ended=False)) == [("add", {"a": 1, "s": "1"})]


@pytest.mark.parametrize(
    ("family", "reasoning", "text"),
    [
        ("hermes", "<think>\nhm\n</think>\n\n", "Sum."),
        ("qwen_xml", "<think>hm</think>", "Sum."),
        ("gemma4", "<|channel>thought\nhm\n<channel|>", "Sum."),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
            "<|channel|>final<|message|>Sum.",
        ),
        ("muse", " to=self<|message|>hm<|eom|><|start|>assistant", " to=user<|message|>Sum."),
        ("text", "<think>hm</think>", "Sum."),
    ],
)
def test_reasoning_is_no_content(family: str, reasoning: str, text: str) -> None:
    assert read(family, reasoning + text) == ParsedAnswer("Sum.", "hm")
    with_call = read(family, reasoning + CALLS.get(family, ""))
    assert with_call.reasoning == "hm"
    assert len(with_call.calls) == (family in CALLS)


def test_reasoning_may_begin_in_the_prompt_and_stay_unfinished() -> None:
    prompt = "<|im_start|>assistant\n<think>\n"
    assert read("qwen_xml", f"hm\n</think>\n\n{XML}", prompt=prompt).reasoning == "hm"
    assert read("qwen_xml", "hm", ended=False, prompt=prompt) == ParsedAnswer("", "hm")
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert read("qwen_xml", "Sum.", prompt=closed) == ParsedAnswer("Sum.")


def test_marks_of_reasoning_are_text_where_the_template_has_none_and_after_the_beginning() -> None:
    assert read("hermes", "<think>a</think>b", template="") == ParsedAnswer("<think>a</think>b")
    assert read("hermes", "Write <think>a</think>.") == ParsedAnswer("Write <think>a</think>.")


def test_without_tools_a_call_is_text() -> None:
    answer = reader("hermes").read(CALLS["hermes"], ended=True)
    assert answer == ParsedAnswer(CALLS["hermes"])


def test_several_calls_and_the_text_around_them() -> None:
    answer = read("qwen_xml", f"Hi {XML} and {XML}")
    assert len(answer.calls) == 2
    assert answer.content == "Hi  and"
    both = "<|tool_call_start|>[add(a=1), add(items=[{'x': true}, null])]<|tool_call_end|>"
    assert calls(read("lfm2", both)) == [("add", {"a": 1}), ("add", {"items": [{"x": True}, None]})]


@pytest.mark.parametrize(
    ("value", "typed"),
    [
        ("<parameter=a>\n-3\n</parameter>", {"a": -3}),
        ("<parameter=flag>\ntrue\n</parameter>", {"flag": True}),
        ("<parameter=items>\n[1, 2]\n</parameter>", {"items": [1, 2]}),
        ("<parameter=s>\ntrue\n</parameter>", {"s": "true"}),
        ("<parameter=s>\ntwo\n\nlines \n</parameter>", {"s": "two\n\nlines "}),
        ("<parameter=a>\nmany\n</parameter>", {"a": "many"}),
        ("<parameter=other>\n7\n</parameter>", {"other": "7"}),
    ],
)
def test_text_arguments_get_the_type_of_the_schema(value: str, typed: dict[str, Any]) -> None:
    answer = read("qwen_xml", f"<tool_call>\n<function=add>\n{value}\n</function>\n</tool_call>")
    assert calls(answer) == [("add", typed)]


@pytest.mark.parametrize("family", ["hermes", "gpt_oss", "gemma4", "deepseek"])
def test_a_json_text_that_the_schema_allows_is_no_number(family: str) -> None:
    either = {"type": ["string", "integer"]}
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    for schema, value in ((either, "1"), (either, "007"), (nullable, "None")):
        known = {"a": {"type": "integer"}, "s": schema}
        tool = {
            "type": "function",
            "function": {"name": "add", "parameters": {"properties": known}},
        }
        text = CALLS[family].replace('"1"', f'"{value}"').replace('<|"|>1', f'<|"|>{value}')
        answer = reader(family).read(text, ended=True, tools=[tool])
        assert calls(answer) == [("add", {"a": 1, "s": value})]


REFERRED: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Level": {"type": "integer", "enum": [1, 2]},
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Names/all": {"type": "array", "items": {"type": "string"}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Level"}]},
    },
    "properties": {
        "level": {"$ref": "#/$defs/Level", "description": "How much."},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}], "default": None},
        "point": {"allOf": [{"$ref": "#/$defs/Point"}, {"title": "P"}]},
        "names": {"oneOf": [{"$ref": "#/$defs/Names~1all"}, {"type": "null"}]},
        "flag": {"type": ["boolean", "null"]},
        "older": {"type": "integer", "nullable": True},
        "word": {"enum": ["1", "2"]},
        "number": {"enum": [1, 2, None]},
        "either": {"enum": ["1", 2]},
        "consts": {"oneOf": [{"const": "1"}, {"const": 2}]},
        "auto": {"enum": ["auto", 1, None]},
        "first": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "same": {"$ref": "#/properties/first/anyOf/0"},
        "after": {"$ref": "#/properties/first/anyOf/-1"},
        "fixed": {"const": True},
        "loop": {"$ref": "#/$defs/Loop"},
        "any": True,
        "open": {"anyOf": [{"type": "integer"}, {}]},
        "lost": {"$ref": "#/$defs/Missing"},
        "elsewhere": {"$ref": "other.json"},
        "odd": {"type": None, "anyOf": 5},
    },
}
TYPED: list[tuple[str, str, Any]] = [
    ("level", "2", 2),
    ("maybe", "2", 2),
    ("maybe", "null", None),
    ("point", '{"x": 1}', {"x": 1}),
    ("names", '["a"]', ["a"]),
    ("names", "null", None),
    ("flag", "true", True),
    ("flag", "null", None),
    ("older", "7", 7),
    ("older", "null", None),
    ("word", "1", "1"),
    ("number", "1", 1),
    ("number", "null", None),
    ("either", "1", "1"),
    ("consts", "1", "1"),
    ("auto", "1", 1),
    ("auto", "auto", "auto"),
    ("auto", "null", None),
    ("same", "1", 1),
    ("after", "null", "null"),
    ("fixed", "true", True),
    ("loop", "1", 1),
    ("any", "1", "1"),
    ("open", "1", "1"),
    ("lost", "1", "1"),
    ("elsewhere", "1", "1"),
    ("odd", "1", "1"),
]


@pytest.mark.parametrize(("name", "text", "value"), TYPED)
@pytest.mark.parametrize("family", ["qwen_xml", "glm", "muse"])
def test_types_are_found_behind_references_and_alternatives(
    family: str, name: str, text: str, value: Any
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": REFERRED}}
    written = {
        "qwen_xml": f"<tool_call>\n<function=add>\n<parameter={name}>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm": f"<tool_call>add\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n"
        "</tool_call>",
        "muse": ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
        f'<atem:parameter name="{name}">{text}</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
    }
    answer = reader(family).read(written[family], ended=True, tools=[tool])
    assert calls(answer) == [("add", {name: value})]


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


MALFORMED = [
    ("hermes", hermes(body))
    for body in (
        "{}",
        "[]",
        "add(1)",
        '{"name": null}',
        '{"name": ""}',
        '{"name": "two words"}',
        '{"name": "a\\ud800", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": 5}',
        '{"name": "add", "arguments": null}',
        '{"name": "add", "arguments": "{\\"a\\": 1"}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": -Infinity}}',
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": ' + "[" * 1000 + "]" * 1000 + "}",
        '{"name": "add", "arguments": {"a": ' + "[" * MAX_NESTING + "]" * MAX_NESTING + "}}",
        '<tool_call>{"name": "add"}</tool_call>',
    )
] + [
    ("hermes", "<tool_call>"),
    ("hermes", CALLS["hermes"] + "<tool_call>"),
    ("qwen_xml", "<tool_call><function=search_web英文>\n</function></tool_call>"),
    ("qwen_xml", "<tool_call><function=add\n<parameter=a>1</parameter></function></tool_call>"),
    ("qwen_xml", "<tool_call><function=add></function><function=add></function></tool_call>"),
    ("qwen_xml", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
    ("qwen_xml", XML.removesuffix("\n</tool_call>")),
    ("qwen_xml", CALLS["hermes"]),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_val>1</tool_call>"),
    ("glm", "<tool_call></tool_call>"),
    ("gemma4", "<|tool_call>call:add a<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:}<tool_call|>"),
    ("gpt_oss", '<|channel|>commentary to=functions.add json<|message|>{"a"'),
    ("gpt_oss", "noise<|channel|>final<|message|>Sum."),
    ("llama3", '{"name": "add", "parameters": {"a": 1'),
    ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[add(a=f())]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[" + "(" * 5000 + "]<|tool_call_end|>"),
    ("muse", CALLS["muse"].replace("1</atem:parameter>\n</atem:invoke>", "</atem:invoke>")),
    ("mistral", "[TOOL_CALLS]add"),
]


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_a_malformed_call_is_text_with_a_reason(family: str, text: str) -> None:
    answer = read(family, text)
    assert (answer.content, answer.calls) == (text, ())
    assert answer.problem
    assert len(answer.problem) < 300


PIECES = sorted({*CALLS.values(), *(text for _, text in MALFORMED if len(text) < 200)})


@given(
    st.sampled_from(NAMES),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=4),
    st.booleans(),
)
def test_no_answer_raises_and_each_call_can_be_sent(
    family: str, pieces: list[str], ended: bool
) -> None:
    answer = read(family, "".join(pieces), ended=ended)
    for call in answer.calls:
        assert isinstance(json.loads(call.arguments.encode()), dict)
    if answer.problem:
        assert (answer.content, answer.calls) == ("".join(pieces), ())


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    "piece", ["to=functions.", "<parameter=a>", "<arg_key>a</arg_key>", "\n", "<", '<|"|>', "```"]
)
def test_a_policy_that_repeats_a_delimiter_costs_no_more_than_its_length(
    family: str, piece: str
) -> None:
    """Patterns without a bound took 13 seconds."""
    begun = {"qwen_xml": "<tool_call><function=add>", "glm": "<tool_call>add"}.get(family, "")
    its = reader(family)
    start = time.process_time()
    its.read(begun + piece * (16_000 // len(piece)), ended=True, tools=TOOLS)
    assert time.process_time() - start < 2


def test_half_of_a_surrogate_pair_stays_an_escape() -> None:
    body = '{"name": "add", "arguments": {"s": "\\ud800", "a": 2}}'
    assert read("hermes", hermes(body)).calls[0].arguments == '{"s": "\\ud800", "a": 2}'


def test_a_json_answer_of_llama_that_is_no_call_is_content() -> None:
    assert read("llama3", '{"name": "Bob"}') == ParsedAnswer('{"name": "Bob"}')


def test_the_place_after_the_first_call() -> None:
    assert reader("qwen_xml").first_call_end(f"a{XML}b{XML}") == 1 + len(XML)
    assert reader("qwen_xml").first_call_end(XML[:-1]) is None
    assert reader("text").first_call_end(XML) is None


def test_a_checkpoints_own_response_template_is_used() -> None:
    own = {
        "start_anchor": "<a>",
        "fields": {
            "tool_calls": {
                "open": "CALL ",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    its = AnswerReader(find_family("text", ""), "", "<a>", own)
    answer = its.read('Hi CALL {"name": "add", "arguments": {"a": 1}};', ended=True, tools=TOOLS)
    assert (calls(answer), answer.content) == ([("add", {"a": 1})], "Hi")
    broken = its.read('CALL {"name": "add"', ended=True, tools=TOOLS)
    assert broken.problem
