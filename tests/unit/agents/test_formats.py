"""Formats: how much of a text fits a schema, and which text goes on from there."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.agents.chat_families import DEMANDING, AnswerReader, find_family
from agenticrun_workers.agents.outside.formats import (
    MAX_ITEMS,
    MAX_SPACES,
    AnswerFormat,
    check_schema,
)
from agenticrun_workers.agents.outside.messages import ApiError

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "ratio": {"type": ["number", "boolean"]},
    },
    "required": ["name", "age", "tags", "next", "ratio"],
    "additionalProperties": False,
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "on": {"$ref": "#/$defs/Point"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
LOOSE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
    "required": ["a"],
}
ANYTHING: dict[str, Any] = {"type": "object"}
SCHEMAS = [STRICT, LOOSE, ANYTHING]

ONE = '{"name": "x", "age": 3, "tags": ["red"], "next": {"x": 1.5}, "ratio": true}'


def fits(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


texts = st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=9)
"""Not of the one character that JSON has and grammars of JSON do not: delete."""
keys = st.text(st.characters(categories=["L", "N"]), max_size=3)
points: st.SearchStrategy[Any] = st.recursive(
    st.fixed_dictionaries({"x": st.integers() | st.floats(allow_nan=False, allow_infinity=False)}),
    lambda inner: inner.map(lambda on: {"x": 0, "on": on}),
    max_leaves=3,
)


def in_order(value: dict[str, Any], schema: Any) -> dict[str, Any]:
    return {key: value[key] for key in schema["properties"] if key in value}


strict = st.fixed_dictionaries(
    {
        "name": texts,
        "age": st.integers(),
        "tags": st.lists(st.sampled_from(["red", "green", 3, None]), max_size=3),
        "next": points | st.none(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    }
).map(partial(in_order, schema=STRICT))
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner),
    max_leaves=8,
)
loose = st.dictionaries(keys, values).flatmap(
    lambda more: st.lists(texts, min_size=1, max_size=3).map(lambda a: {"a": a} | more | {"a": a})
)
examples = (
    st.tuples(strict, st.just(STRICT))
    | st.tuples(loose, st.sampled_from([LOOSE, ANYTHING]))
    | st.tuples(st.dictionaries(keys, values), st.just(ANYTHING))
)


@given(examples, st.sampled_from([None, 1]), st.booleans(), st.data())
def test_valid_answers_fit_at_every_length(
    example: tuple[Any, Any], indent: int | None, ascii: bool, data: st.DataObject
) -> None:
    value, schema = example
    enums = ascii or schema is not STRICT
    text = json.dumps(value, indent=indent, ensure_ascii=enums)
    form = AnswerFormat(schema=schema)
    whole = form.read(text + "junk")
    assert (whole.complete, whole.fits) == (True, len(text))
    part = form.read(text[: data.draw(st.integers(0, len(text) - 1))])
    assert not part.complete
    assert text.startswith(text[: part.fits])
    assert part.fits <= len(text)


@given(examples, st.text('{}[]",: \\ntrue019.-e\x00x', max_size=4), st.data())
def test_whatever_is_said_the_rest_that_is_written_makes_it_a_valid_answer(
    example: tuple[Any, Any], noise: str, data: st.DataObject
) -> None:
    """A prefix of a valid answer, some noise, and then only what the format writes."""
    value, schema = example
    text = json.dumps(value)
    text = text[: data.draw(st.integers(0, len(text)))] + noise
    form = AnswerFormat(schema=schema)
    for _ in range(200):
        reading = form.read(text)
        text = text[: reading.fits]
        if reading.complete:
            break
        assert reading.next
        before, text = text, text + reading.next
        assert form.read(text).fits > len(before)
    assert reading.complete
    assert fits(text, schema)


@given(st.text('{}[]",: \\ntrue019.-exagnm', max_size=30))
def test_no_text_is_complete_that_the_schema_rejects(text: str) -> None:
    for schema in SCHEMAS:
        for start in ("", '{"name": "x", "age": ', ONE[:-5]):
            reading = AnswerFormat(schema=schema).read(start + text)
            if reading.complete:
                assert fits((start + text)[: reading.fits], schema)


@pytest.mark.parametrize(
    ("text", "kept", "next", "fixed"),
    [
        ("", "", '{"name": ', True),
        ("Sure!", "", '{"name": ', True),
        ("{", "{", '"name": ', True),
        ('{"na', '{"na', 'me": ', True),
        ('{"age": 1', '{"', 'name": ', True),
        ('{"name": "x"', '{"name": "x"', ', "age": ', True),
        ('{"name": "x", "age": x', '{"name": "x", "age": ', '0, "tags": ', False),
        ('{"name": "x", "age": 1.', '{"name": "x", "age": 1', ', "tags": ', False),
        (ONE[:36], '{"name": "x", "age": 3, "tags": ["re', 'd"', True),
        (
            ONE[:33] + "3, 3, 3, 3",
            '{"name": "x", "age": 3, "tags": [3, 3, 3',
            '], "next": ',
            True,
        ),
        (ONE[:-4] + "no", ONE[:-4], "rue}", True),
        ('{"name": "a\nb', '{"name": "a', '"', False),
        ('{"name": "\\u1', '{"name": "\\u1', "0", False),
        ('{"colour', '{"', 'name": ', True),
        (ONE[:-1] + ", ", ONE[:-1], "}", True),
    ],
)
def test_where_a_text_leaves_the_schema(text: str, kept: str, next: str, fixed: bool) -> None:
    reading = AnswerFormat(schema=STRICT).read(text)
    assert (text[: reading.fits], reading.complete) == (kept, False)
    assert (reading.next, reading.fixed) == (next, fixed)


def test_a_call_has_the_name_of_a_tool_and_its_arguments() -> None:
    tools = {"add": {"type": "object"}, "name it": STRICT}
    form = AnswerFormat(tools)
    assert form.opening == '<tool_call>\n{"name": "'
    named = AnswerFormat({"add": {"type": "object"}})
    assert named.opening == '<tool_call>\n{"name": "add", "arguments": '
    call = named.opening + '{"a": [1]}}\n</tool_call>'
    for each in (form, named):
        reading = each.read(call + "more")
        assert (reading.complete, reading.fits) == (True, len(call))
    assert form.read(form.opening + "sub").next == 'add", "arguments": '
    strict_call = '<tool_call>{"name": "name it", "arguments": {"x"'
    assert form.read(strict_call).fits == len(strict_call) - 2
    assert form.read(call[: -len("}\n</tool_call>")]).next == "}\n</tool_call>"


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "add_all")
]


FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "side": {"enum": ["left", "right"]},
        "more": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
        "any": {},
    },
    "required": ["text", "count", "side"],
    "additionalProperties": False,
}
VALUES: dict[str, Any] = {
    "text": "a <b>\n\n</c>",
    "count": -3,
    "side": "left",
    "more": [1, 2.5],
    "any": "1",
}
TAGGED = [name for name in DEMANDING if getattr(find_family(name, "").call_text, "tags", None)]


def tagged(family: str, arguments: dict[str, Any]) -> str:
    how = find_family(family, "").call_text
    assert how is not None
    assert how.tags is not None
    opening, begins, ends = how.tags
    return "".join(
        f"{opening}{key}{begins}{value if isinstance(value, str) else json.dumps(value)}{ends}"
        for key, value in arguments.items()
    )


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("schema", [FLAT, FLAT | {"additionalProperties": True}, ANYTHING])
@pytest.mark.parametrize("keys", [5, 4, 3])
def test_arguments_in_tags_follow_the_schema(
    family: str, schema: dict[str, Any], keys: int
) -> None:
    how = find_family(family, "").call_text
    assert how is not None
    form = AnswerFormat({"add": schema}, call_text=how)
    values = dict([*VALUES.items()][:keys])
    text, longest = (form.opening + tagged(family, said) + how.end for said in (values, VALUES))
    assert (form.read(text).complete, form.read(text + "x").fits) == (True, len(text))
    # With fewer keys, a cut that also begins the text of all keys is tried there.
    all_said = text == longest
    cuts = [text[:n] for n in range(len(text)) if all_said or not longest.startswith(text[:n])]
    for cut in cuts:
        assert form.read(cut).fits == len(cut)
    tools = [{"type": "function", "function": {"name": "add", "parameters": FLAT}}]
    read = AnswerReader(find_family(family, ""), "", "").read
    (call,) = read(text, ended=True, tools=tools).calls
    assert json.loads(call.arguments) == values
    for cut in cuts:
        if len(cut) < len(form.opening):
            continue
        said = cut + "<x"
        while not (reading := form.read(said)).complete:
            said = said[: reading.fits] + reading.next
        parsed = read(said, ended=True, tools=tools)
        assert parsed.problem is None
        if schema is FLAT:
            assert fits(parsed.calls[0].arguments, FLAT)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"text": "x", "count": "many"}, "many"),
        ({"text": "x", "count": 1, "side": "up"}, "up"),
        ({"text": "x", "other": 1}, "other"),
    ],
)
def test_an_argument_that_the_schema_does_not_have_leaves_the_format(
    family: str, arguments: dict[str, Any], said: str
) -> None:
    form = AnswerFormat({"add": FLAT}, call_text=find_family(family, "").call_text)
    text = form.opening + tagged(family, arguments)
    assert text.index(said) <= form.read(text).fits < text.index(said) + len(said)


@pytest.mark.parametrize("name", [name for name in DEMANDING if name not in TAGGED])
def test_a_demanded_call_is_read_as_the_family_writes_it(name: str) -> None:
    """Whatever is said, what the format writes makes it a call that the family's reader reads."""
    family = find_family(name, "")
    reader = AnswerReader(family, "", "")
    for tools in (["add"], ["add", "add_all"]):
        form = AnswerFormat(dict.fromkeys(tools, STRICT), call_text=family.call_text)
        for wanted in tools:
            assert family.call_text is not None
            text = family.call_text.before_arguments(wanted) + ONE
            assert text.startswith(form.opening)
            whole = form.read(text + family.call_text.end + "more")
            assert (whole.complete, whole.fits) == (True, len(text + family.call_text.end))
            for size in range(len(text)):
                assert form.read(text[:size]).fits == size
            said = text[: len(form.opening)]
            while not (reading := form.read(said)).complete:
                said = said[: reading.fits] + reading.next
            (call,) = reader.read(said, ended=True, tools=TOOLS).calls
            assert call.name in tools
            assert fits(call.arguments, STRICT)


def test_reasoning_of_any_form_may_come_first() -> None:
    form = AnswerFormat({"add": {"type": "object"}}, STRICT, reasoning=("", "</think>"))
    assert form.opening == ""
    for text in ("", "So {", "So {\n</thin"):
        reading = form.read(text)
        assert (reading.fits, reading.complete, reading.fixed) == (len(text), False, False)
        assert form.read(text + reading.next).next == '{"name": '
    assert form.read(f"So\n</think>\n\n{ONE} and").fits == len(f"So\n</think>\n\n{ONE}")
    assert AnswerFormat({"add": {}}, reasoning=("<think>", "</think>")).opening == ""


@pytest.mark.parametrize("calls", [None, {"add": {"type": "object"}}])
def test_an_answer_may_begin_with_reasoning_or_not(calls: Any) -> None:
    form = AnswerFormat(calls, STRICT, reasoning=("<think>", "</think>"))
    thought = "<think>\nSo {\n</think>\n\n"
    for text in (ONE, thought + ONE):
        assert (form.read(text + "x").fits, form.read(text).complete) == (len(text), True)
    for size in range(len(thought)):
        assert (form.read(thought[:size]).fits, form.read(thought[:size]).complete) == (size, False)
    assert form.read("<thanks").fits < len("<thanks")
    assert form.read("<thin").next == "k>"
    assert form.read(f"{ONE[:5]}<think>").fits == 5


def test_space_before_an_answer_without_reasoning_is_no_reasoning() -> None:
    form = AnswerFormat({"add": {"type": "object"}}, reasoning=("<think>", "</think>"))
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for text in (f"\n{call}", f"\n<think>\nx</think>\n{call}"):
        assert (form.read(text).fits, form.read(text).complete) == (len(text), True)


def enumerated(*options: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"enum": [*options]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("options", "said"), [(("да", "нет"), ""), (("north", "northeast"), "north")]
)
@pytest.mark.parametrize("family", ["json", "qwen_xml"])
def test_the_endpoint_never_chooses_where_the_policy_may(
    options: tuple[str, ...], said: str, family: str
) -> None:
    if family == "json":
        form, start = AnswerFormat(schema=enumerated(*options)), '{"a": "'
    else:
        how = find_family(family, "").call_text
        form = AnswerFormat({"add": enumerated(*options)}, call_text=how)
        start = f"{form.opening}<parameter=a>\n"
    assert not form.read(start + said).fixed


def test_tagged_arguments_come_in_the_order_of_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["content"],
    }
    form = AnswerFormat({"add": schema}, call_text=find_family("qwen_xml", "").call_text)
    text = form.opening + tagged("qwen_xml", {"path": "a", "content": "b"})
    reading = form.read(text)
    # More arguments may follow, so the end of the call is not all that can be written.
    assert (reading.fits, reading.fixed) == (len(text), False)


def test_a_value_without_an_end_is_written_piece_by_piece() -> None:
    nested = {"type": "array", "items": {"$ref": "#/$defs/nested"}, "minItems": 1}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/nested"}},
        "required": ["a"],
        "$defs": {"nested": nested},
    }
    reading = AnswerFormat(schema=check_schema(schema, "s")).read('{"a": ')
    assert set(reading.next) == {"["}


def test_with_a_schema_and_tools_the_first_character_decides() -> None:
    form = AnswerFormat({"add": {"type": "object"}}, STRICT)
    assert form.opening == ""
    assert form.read(ONE).complete
    assert form.read('<tool_call>{"name": "add", "arguments": {}}</tool_call>').complete
    assert form.read("Well").next == '{"name": '


def test_spaces_without_end_are_ended() -> None:
    reading = AnswerFormat(schema=STRICT).read("{" + "\n" * 100)
    assert (reading.fits, reading.next, reading.complete) == (1 + MAX_SPACES, '"name": ', False)


def test_values_that_are_nested_deep_are_ended() -> None:
    text = '{"a": ' + "[" * 300 + "x"
    while not (reading := AnswerFormat(schema=ANYTHING).read(text)).complete:
        text = text[: reading.fits] + reading.next
    assert fits(text, ANYTHING)


def test_a_tagged_argument_may_refer_to_any_part_of_the_schema() -> None:
    pair = {"type": "array", "items": {"$ref": "#/properties/one"}}
    schema = {"type": "object", "properties": {"one": {"type": "integer"}, "two": pair}}
    how = find_family("qwen_xml", "").call_text
    form = AnswerFormat({"add": schema | {"required": ["two"]}}, call_text=how)
    text = form.opening + "<parameter=two>\n[1, "
    assert (form.read(text + "2").fits, form.read(text + "a").fits) == (len(text) + 1, len(text))


def test_a_schema_that_llguidance_refuses_is_the_clients_error() -> None:
    for calls, schema, param in (
        (None, {"type": "object", "not": {}}, "response_format"),
        ({"add": {"$ref": "#/nowhere"}}, None, "tools"),
    ):
        with pytest.raises(ApiError, match="cannot be enforced") as refused:
            AnswerFormat(calls, schema).read("")
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ([], "s"),
        ({"type": "string"}, "s"),
        ({"anyOf": [{"type": "object"}]}, "s"),
        ({"type": "object", "minProperties": 1}, "s.minProperties"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
            "s.properties.a.pattern",
        ),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "s.properties.a.type"),
        ({"type": "object", "properties": {"a": {"items": {}}}}, "s.properties.a.type"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/B"}}}, "s.properties.a.$ref"),
        (
            {"type": "object", "properties": {"a": {"enum": []}}},
            "s.properties.a.enum",
        ),
        (
            {"type": "object", "properties": {"a": {"anyOf": [{}], "type": "string"}}},
            "s.properties.a",
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "s.required"),
        ({"type": "object", "properties": {"a": False}}, "s.properties.a"),
        ({"type": "object", "properties": {"a": {"$ref": "b.json"}}}, "s.properties.a.$ref"),
        ({"type": 5}, "s.type"),
        ({"type": []}, "s.type"),
        ({"type": "object", "required": 5}, "s.required"),
        ({"type": "object", "required": [["a"]]}, "s.required"),
        ({"type": "object", "properties": {"a": {"allOf": 5}}}, "s.properties.a.allOf"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}},
            },
            "s.properties.a.maxItems",
        ),
        (
            {"type": "object", "properties": {"a": {"type": "array", "minItems": True}}},
            "s.properties.a.minItems",
        ),
        ({"$ref": "#/$defs/A", "$defs": {"A": True}}, "s"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_place(schema: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_schema(schema, "s")
    assert refused.value.param == param


def numbers(**counts: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, **counts}


@pytest.mark.parametrize("key", ["minItems", "maxItems"])
def test_an_array_of_more_items_than_any_answer_has_is_refused(key: str) -> None:
    """Clients may send any number, and the engines' grammars repeat the items."""

    def schema(count: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"anyOf": [numbers(**{key: count})]}}}

    assert check_schema(schema(MAX_ITEMS), "s")
    with pytest.raises(ApiError, match=f"must be at most {MAX_ITEMS}, not 1000000000: lower") as no:
        check_schema(schema(1_000_000_000), "s")
    assert no.value.param == f"s.properties.a.anyOf[0].{key}"


@pytest.mark.parametrize(
    "key",
    ["minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains"],
)
def test_other_counts_and_patterns_never_reach_a_grammar(key: str) -> None:
    for keyword, value in ((key, 1_000_000_000), ("pattern", "a{1000000000}")):
        schema = {"type": "object", "additionalProperties": {"type": "string", keyword: value}}
        with pytest.raises(ApiError, match="cannot be enforced: leave it out") as no:
            check_schema(schema, "s")
        assert no.value.param == f"s.additionalProperties.{keyword}"


@pytest.mark.parametrize("place", ["default", "examples", "title"])
def test_a_reference_leads_only_to_a_schema_that_was_checked(place: str) -> None:
    """Values of other keywords may be anything, also an array of a billion items."""
    hidden: Any = [numbers(minItems=1_000_000_000)] if place == "examples" else numbers(minItems=2)
    properties = {"a": {"$ref": f"#/{place}" + "/0" * (place == "examples")}}
    with pytest.raises(ApiError, match="is not a schema in this schema") as no:
        check_schema({"type": "object", "properties": properties, place: hidden}, "s")
    assert no.value.param == "s.properties.a.$ref"


def test_schemas_that_frameworks_send_are_taken() -> None:
    assert check_schema(STRICT, "s") is STRICT
    assert check_schema({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}, "s")
    assert check_schema({"title": "A", "description": "B", **LOOSE}, "s")
    nested = {"a": {"type": "object", "properties": {"b": {}}}, "c": {"$ref": "#/properties/a"}}
    within = {"d": {"$ref": "#/properties/a/properties/b"}}
    assert check_schema({"type": "object", "properties": nested | within}, "s")
