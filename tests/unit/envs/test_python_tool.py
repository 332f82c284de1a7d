"""The Python tool played: calls found in texts, results told, answers judged."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs import EnvConfigError, make_env, python_tool
from agenticrun_workers.envs.python_tool import (
    Answer,
    BadCall,
    Call,
    CallParser,
    PythonTool,
    problem,
    same_answer,
    shortened,
)
from agenticrun_workers.sandbox import SandboxUnavailable
from agenticrun_workers.types import Stream


def tool_call(name: str = "python", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Let me see.\n```python\nprint(1)\n```\nSo", Call("print(1)\n")),
        ("```py\n1\n```", Call("1\n")),
        ("```Python \n1```", Call("1")),
        (tool_call(code="1 + 1"), Call("1 + 1")),
        (tool_call("code_interpreter", code="2"), Call("2")),
        (
            "<tool_call>"
            f"{json.dumps({'name': 'python', 'arguments': json.dumps({'code': '3'})})}"
            "</tool_call>",
            Call("3"),
        ),
        ("<answer> 42 </answer>", Answer("42")),
        ("<answer>4\n2</answer>", Answer("4\n2")),
        (
            "```python\n1\n```\nIt prints 1. <answer>1</answer>",
            Call("1\n"),
        ),  # what the model makes up after its call does not count
        ("<answer>1</answer>\n```python\n1\n```", Answer("1")),
        (f"{tool_call(code='1')} ```python\n2\n```", Call("1")),
        ("```\n1\n```", None),
        ("```python\nnever closed", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_first_call_or_answer_counts(text: str, asked: object) -> None:
    assert CallParser(None, python_tool.ANSWER_PATTERN).parse(text) == asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>{</tool_call>", "JSONDecodeError"),
        ("<tool_call>[1]</tool_call>", "TypeError"),
        ('<tool_call>{"name": "python"}</tool_call>', "KeyError: 'arguments'"),
        (tool_call(query="x"), "KeyError: 'code'"),
        (tool_call("search", code="x"), "no tool called 'search'"),
        (tool_call(code=3), "must be text"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "RecursionError"),
    ],
)
def test_a_broken_call_says_why(text: str, message: str) -> None:
    asked = CallParser(None, python_tool.ANSWER_PATTERN).parse(text)
    assert isinstance(asked, BadCall)
    assert message in asked.message


def test_patterns_of_ones_own_find_calls_and_answers() -> None:
    parser = CallParser(r"RUN (.*?) END", r"\\boxed\{(.*?)\}")
    assert parser.parse("RUN 1 + 1 END") == Call("1 + 1")
    assert parser.parse(r"so \boxed{7}") == Answer("7")
    assert parser.parse("```python\n1\n```") is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("4", "4.0", True),
        ("1,000", "1000", True),
        ("$5", "5", True),
        ("8/2", "4", True),
        ("-3", "- 3", True),
        ("0.1", "1/10", True),
        (".5", "0.5", True),
        ("4", "4.01", False),
        ("1/0", "0", False),
        ("1/0", "1/0", True),
        ("Paris", " paris ", True),
        ("New  York", "new york", True),
        ("Paris", "Rome", False),
        ("4", "four", False),
        ("", "0", False),
        ("9" * 50, "9" * 49 + "8", False),
    ],
)
def test_answers_are_equal_as_numbers_or_as_texts(one: str, other: str, same: bool) -> None:
    assert same_answer(one, other) is same
    assert same_answer(other, one) is same


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_equal_answers_if_they_are_equal(one: Fraction, other: Fraction) -> None:
    assert same_answer(str(one), str(other)) == (one == other)
    assert same_answer(str(one), f"{2 * one.numerator}/{2 * one.denominator}")


@given(st.text(max_size=60), st.integers(1, 40))
def test_long_texts_lose_their_middle(text: str, characters: int) -> None:
    short = shortened(text, characters)
    if len(text) <= characters:
        assert short == text
    else:
        head, _, tail = short.partition(f"\n... {len(text) - characters} characters left out ...\n")
        assert len(head) + len(tail) == characters
        assert text.startswith(head)
        assert text.endswith(tail)


def test_a_problem_is_solved_with_a_call_and_an_answer() -> None:
    env = make_env("python_tool", {})
    assert isinstance(env, PythonTool)
    env.set_item({"question": "What is 17 * 23?", "answer": 391})
    assert env.reset(0, Stream.TRAIN) == "What is 17 * 23?"
    called = env.step("I compute it.\n```python\nprint(17 * 23)\n```")
    assert (called.observation, called.reward, called.terminated) == ("391", 0.0, False)
    assert (
        called.metrics["tool_calls"],
        called.metrics["tool_errors"],
        called.metrics["action_is_valid"],
    ) == (1.0, 0.0, 1.0)
    end = env.step("<answer>391.0</answer>")
    assert (end.reward, end.terminated, end.metrics["success"]) == (1.0, True, 1.0)


def test_what_is_neither_call_nor_answer_is_told_in_the_words_of_the_patterns() -> None:
    usual, own = PythonTool(), PythonTool(call_pattern="<code>(.*?)</code>")
    for env, told in ((usual, "Write a ```python block"), (own, "neither a call nor an answer")):
        env.reset(0, Stream.TRAIN)
        assert told in env.step("Hm.").observation


def test_a_wrong_answer_ends_the_episode_without_a_reward() -> None:
    env = PythonTool()
    env.set_item({"question": "?", "answer": "7"})
    env.reset(0, Stream.TRAIN)
    end = env.step("<answer>8</answer>")
    assert (end.reward, end.terminated, end.metrics["success"]) == (0.0, True, 0.0)


@pytest.mark.parametrize(
    ("answer", "told", "metrics"),
    [
        (
            "```python\n1 / 0\n```",
            "ZeroDivisionError: division by zero",
            {"tool_calls": 1, "tool_errors": 1, "action_is_valid": 1},
        ),
        (
            "```python\nx = 1\n```",
            "(no output)",
            {"tool_calls": 1, "tool_errors": 0, "action_is_valid": 1},
        ),
        (
            "```python\nwhile True: pass\n```",
            "stopped: it took more than 0.3 s",
            {"tool_calls": 1, "tool_errors": 1, "action_is_valid": 1},
        ),
        (
            "```python\nwhile True: print(1)\n```",
            "stopped: it wrote too much",
            {"tool_calls": 1, "tool_errors": 1, "action_is_valid": 1},
        ),
        (
            "```python\nopen('/etc/passwd').read()\n```",
            "Permission denied",
            {"tool_calls": 1, "tool_errors": 1, "action_is_valid": 1},
        ),
        (
            "<tool_call>{}</tool_call>",
            "this one is not",
            {"tool_calls": 0, "tool_errors": 1, "action_is_valid": 0},
        ),
        (
            "I do not know",
            "or <answer>...</answer> to answer",
            {"tool_calls": 0, "tool_errors": 0, "action_is_valid": 0},
        ),
    ],
)
def test_whatever_a_call_does_is_told_and_the_episode_goes_on(
    answer: str, told: str, metrics: dict[str, float]
) -> None:
    env = PythonTool(seconds=0.3 if "0.3 s" in told else 20.0, result_characters=300)
    env.reset(0, Stream.TRAIN)
    result = env.step(answer)
    assert told in result.observation
    assert len(result.observation) < 400
    assert (result.reward, result.terminated) == (0.0, False)
    assert {name: result.metrics[name] for name in metrics} == metrics


def test_columns_have_the_names_asked_for() -> None:
    env = PythonTool(question="problem", answer="solution")
    env.set_item({"problem": "2?", "solution": "2"})
    assert env.reset(0, Stream.TRAIN) == "2?"
    with pytest.raises(ValueError, match=r"no column problem and no solution .it has: question"):
        env.set_item({"question": "2?"})


def test_sums_of_its_own_are_right_and_never_shared_by_the_splits() -> None:
    asked: dict[Stream, set[str]] = {}
    for split in (Stream.TRAIN, Stream.VALIDATION):
        problems = [problem(seed, split, 9) for seed in range(500)]
        assert problems == [problem(seed, split, 9) for seed in range(500)]
        assert all(str(eval(question)) == answer for question, answer in problems)
        asked[split] = {question for question, _ in problems}
    assert not asked[Stream.TRAIN] & asked[Stream.VALIDATION]
    assert len(asked[Stream.VALIDATION]) > 30


def test_valid_actions_are_calls_with_the_numbers_at_hand_and_answers() -> None:
    env = PythonTool()
    env.set_item({"question": "3 + 4", "answer": "7"})
    env.reset(0, Stream.TRAIN)
    calls = [f"```python\n3 {sign} 4\n```" for sign in "+-*"]
    assert env.valid_actions() == [*calls, "<answer>3</answer>", "<answer>4</answer>"]
    for call in calls:
        result = env.step(call).observation
        assert env.valid_actions() == [*calls, f"<answer>{result}</answer>"]
    for seed in range(20):
        env = PythonTool()
        env.reset(seed, Stream.TRAIN)
        assert all(
            env.step(action).metrics["action_is_valid"] for action in env.valid_actions()[-2:]
        )


def test_every_text_of_a_tiny_models_episode_is_made_of_the_vocabulary() -> None:
    env = PythonTool()
    words = set(env.vocabulary())
    assert {"7", " + ", "400", "```python\n", "</answer>"} <= words
    assert set(env.reset(1, Stream.TRAIN)) <= words


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sandbox": "none"}, "sandbox must be required or best-effort"),
        ({"highest": 0}, "highest must be at least 1"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"memoryMb": -5}, "memoryMb must be above 0"),
        ({"callPattern": "("}, "callPattern '\\(' is no regular expression"),
        ({"answerPattern": "["}, "answerPattern"),
        ({"language": "C"}, "no config key 'language'"),
    ],
)
def test_bad_configs_are_refused_by_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env("python_tool", config)


def test_a_machine_that_cannot_contain_code_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_nothing(*_: object) -> None:
        raise SandboxUnavailable("this machine cannot contain code: landlock: not there")

    monkeypatch.setattr(python_tool, "run_python", run_nothing)
    python_tool._check_sandbox.cache_clear()
    with pytest.raises(EnvConfigError, match="sandbox: this machine cannot contain code: landlock"):
        make_env("python_tool", {})
    assert make_env("python_tool", {"sandbox": "best-effort"})
