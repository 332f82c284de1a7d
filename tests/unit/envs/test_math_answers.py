"""Finding answers, comparing them, and surviving comparisons that hang or take all memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs.math.verifier import (
    MathVerifier,
    Verdict,
    boxed,
    plain_verdict,
    reference_answer,
)
from processes import lives
from waiting import eventually

RIGHT, WRONG, TIMEOUT = Verdict(True), Verdict(False), Verdict(False, timeout=True)
UNREADABLE = Verdict(False, readable=False)


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    made = MathVerifier(seconds=1.0)
    yield made
    made.close()


def ask(verifier: MathVerifier, gold: str, answer: str) -> Verdict:
    return asyncio.run(verifier.verify(gold, answer))


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("He has 3 + 4 = 7 apples.\n#### 7", "7"),
        ("#### 1,000", "1,000"),
        ("so #### 3, no, #### 4", "4"),
        (r"Thus $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{ 2 }", "2"),
        (r"\boxed{\text{if } x \in \{1, 2\}}", r"\text{if } x \in \{1, 2\}"),
        (r"\boxed{3} #### 4", "3"),
        (" 42 ", "42"),
        (r"\boxed{4", r"\boxed{4"),
    ],
)
def test_the_answer_of_a_solution(solution: str, answer: str) -> None:
    assert reference_answer(solution) == answer


@given(
    st.recursive(
        st.text("ab1 ", max_size=3),
        lambda inner: st.builds("{{{}}}{}".format, inner, inner),
        max_leaves=6,
    ),
    st.text("ab$. "),
)
def test_a_box_holds_what_was_put_into_it(inside: str, after: str) -> None:
    assert boxed(f"so \\boxed{{{inside}}}{after}") == inside.strip()


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_whole_numbers_need_no_process(gold: int, said: int) -> None:
    for text in (f"\\boxed{{{said}}}", f"so\n#### {said:,}", f" {said} "):
        assert plain_verdict(str(gold), text) == Verdict(gold == said)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("42", "42", RIGHT),
        ("42", r"I think \boxed{42}.", RIGHT),
        ("42", "The answer is 42.", RIGHT),
        ("42", "The answer is $43$.", WRONG),
        (r"\frac{1}{2}", "0.5", RIGHT),
        ("1/2", r"\boxed{\frac{2}{4}}", RIGHT),
        ("0.5", r"\boxed{\frac12}", RIGHT),
        ("x^2+1", r"\boxed{1 + x^2}", RIGHT),
        ("x^2+1", r"\boxed{1 + x^3}", WRONG),
        ("(1,2)", r"\boxed{(1, 2)}", RIGHT),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", RIGHT),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", RIGHT),
        ("1,234", r"\boxed{1234}", RIGHT),
        ("10", r"\boxed{10\%}", WRONG),
        ("42", "", UNREADABLE),
        ("42", "no idea", UNREADABLE),
        (r"\frac{1}{2}", "\\boxed{\\frac{", UNREADABLE),
        ("42", "\x00\u2028\ud7ff", UNREADABLE),
        ("42", "1" * 100_000 + r" \boxed{42}", RIGHT),
    ],
)
def test_answers_are_compared_by_mathematics(
    verifier: MathVerifier, gold: str, answer: str, verdict: Verdict
) -> None:
    assert ask(verifier, gold, answer) == verdict


HANGS = r"\boxed{9^{9^{9^{9}}}}"


def test_a_comparison_that_hangs_is_ended_and_others_go_on(verifier: MathVerifier) -> None:
    async def both() -> list[Verdict]:
        hung = [asyncio.create_task(verifier.verify("1/2", HANGS)) for _ in range(2)]
        await asyncio.sleep(0)  # they begin
        quick = [
            await verifier.verify(str(n), str(n)) for n in range(100)
        ]  # the event loop is free
        assert quick == [RIGHT] * 100
        assert not any(task.done() for task in hung)
        return await asyncio.gather(*hung)

    assert not any(verdict.right for verdict in asyncio.run(both()))
    assert ask(verifier, "1/2", r"\boxed{\frac{2}{4}}") == RIGHT


def test_a_process_that_is_killed_is_replaced(verifier: MathVerifier) -> None:
    assert ask(verifier, "1/2", "0.5") == RIGHT
    killed = list(verifier._checkers)
    for checker in killed:
        checker._process.kill()  # one that was replaced is reaped, and left alone
        checker._process.wait()
    assert [ask(verifier, "1/2", "0.5") for _ in range(3)] == [RIGHT] * 3
    for checker in killed:
        replaced = checker not in verifier._checkers
        for pipe in (checker._process.stdin, checker._process.stdout):
            assert pipe is not None
            assert pipe.closed == replaced


PARENT = r"""
import asyncio, os, sys, time
from agenticrun_workers.envs.math.verifier import MathVerifier

async def main():
    verifier = MathVerifier(seconds=3.0)
    await verifier.verify("1/2", "0.5")
    asyncio.create_task(verifier.verify("1/2", sys.argv[1]))
    await asyncio.sleep(0.3)
    print([checker._process.pid for checker in verifier._checkers], flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_nothing_is_left_behind_by_a_killed_parent_even_in_the_middle_of_a_comparison() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), HANGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().strip("[]\n").split(",")]
        parent.kill()
    assert children
    eventually(lambda: not any(map(lives, children)), 60, "the checkers end")
