"""Verification of answers outside the event loop, in a few processes shared by all environments.

math-verify limits its own time by signals, which work only in the main thread. Here each comparison
runs in a process that a signal ends when it has computed for too long, and a new one replaces it.
The limit is on computing time, so that the verdict is the same on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import selectors
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BOX = "\\boxed{"
GSM8K = "####"

_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of an answer."""

    right: bool
    readable: bool = True
    """An answer was found in the text."""
    timeout: bool = False
    """The comparison took too long and was ended; the answer counts as wrong."""


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} with balanced braces; None without one."""
    begin = text.rfind(BOX)
    if begin < 0:
        return None
    depth, first = 1, begin + len(BOX)
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[first:place].strip()
    return None


def stated_answer(text: str) -> str | None:
    r"""Return the marked answer of a text: its last \boxed{...}, or what follows its last ####."""
    inside = boxed(text)
    if inside is not None:
        return inside
    _, mark, after = text.rpartition(GSM8K)
    return after.strip() if mark else None


def reference_answer(text: str) -> str:
    r"""Return the answer of a data set's solution.

    GSM8K's follows ####, MATH's is in \boxed{...}; otherwise it is the whole text.
    """
    stated = stated_answer(text)
    return text.strip() if stated is None else stated


def plain_verdict(gold: str, answer: str) -> Verdict | None:
    """Compare equal texts and whole numbers; return None if that takes mathematics.

    `gold` is a reference answer.
    """
    stated = reference_answer(answer)
    if not stated:
        return Verdict(right=False, readable=False)
    if stated == gold:
        return Verdict(right=True)
    one, other = stated.replace(",", ""), gold.replace(",", "")
    if _INTEGER.fullmatch(one) and _INTEGER.fullmatch(other):
        return Verdict(right=int(one) == int(other))
    return None


CHECKER = Path(__file__).with_name("checker.py")

PROCESSES = 2
"""Processes of one env worker. Most answers need none: equal texts and whole numbers."""

MEMORY = 4 * 2**30
"""Bytes of address space of one process, so that 9^(9^9) is a wrong answer and not an OOM kill."""

MAX_ANSWER = 4096
"""Characters at the end of a response that are searched for an answer."""

WALL_SECONDS_EACH = 20.0
"""Real time per second of computing time, after which a process counts as stuck."""

START_SECONDS = 120.0
"""Real time for a process to start."""


class MathVerifier:
    """Compares answers with `processes` processes, which start on first use.

    Args:
        seconds: computing time of one comparison.
    """

    def __init__(self, seconds: float, processes: int = PROCESSES) -> None:
        self.seconds = seconds
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="math-verifier")
        self._mine = threading.local()
        self._checkers: set[_Checker] = set()
        self._lock = threading.Lock()

    async def verify(self, gold: str, answer: str) -> Verdict:
        """Compare a response with the reference answer `gold`. Never raises for bad content."""
        answer = answer[-MAX_ANSWER:]
        plain = plain_verdict(gold, answer)
        if plain is not None:
            return plain
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._compare, gold, answer
        )

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown()
        for checker in self._checkers:
            checker.close()

    def _compare(self, gold: str, answer: str) -> Verdict:
        """Compare in one of the threads, each of which has its own process."""
        checker: _Checker | None = getattr(self._mine, "checker", None)
        if checker is None or not checker.lives:
            checker = self._mine.checker = self._replaced(checker)
        verdict = checker.compare(gold, answer)
        return Verdict(right=False, timeout=True) if verdict is None else verdict

    def _replaced(self, old: _Checker | None) -> _Checker:
        if old is not None:
            old.close()
        new = _Checker(self.seconds)
        with self._lock:
            self._checkers = (self._checkers - {old}) | {new}
        return new


def math_verify(
    id2info: Mapping[str, Mapping[str, Any]],
    generateds: Sequence[str],
    query_ids: Sequence[str],
    max_workers: int = PROCESSES,
) -> list[float]:
    """Compare responses with the answers of their problems, with the arguments of AReaL's verifier.

    It blocks, so environments call it by `asyncio.to_thread`.

    Args:
        id2info: problem by id, with the column `answer`, or AReaL's `solutions`, of which one
            suffices. An environment service has this as its `id2info`.
        generateds: responses.
        query_ids: id of the problem of each response.
        max_workers: comparisons at the same time.

    Returns:
        1 for each right response, 0 for the others.

    Raises:
        KeyError: there is no such problem, or it has no answer.
    """
    verifier, places = shared_verifier(VERIFY_SECONDS), asyncio.Semaphore(max_workers)

    async def right(query_id: str, generated: str) -> float:
        async with places:
            for solution in _solutions(id2info, query_id):
                if (await verifier.verify(reference_answer(solution), generated)).right:
                    return 1.0
        return 0.0

    async def compare() -> list[float]:
        return await asyncio.gather(*map(right, query_ids, generateds))

    return asyncio.run(compare())


VERIFY_SECONDS = 5.0
"""Computing time of one comparison by `math_verify`."""


def _solutions(id2info: Mapping[str, Mapping[str, Any]], query_id: str) -> Sequence[str]:
    if query_id not in id2info:
        raise KeyError(f"id2info has no problem {query_id!r}: it has {sorted(id2info)[:3]}")
    problem = id2info[query_id]
    if "solutions" in problem:
        return list(problem["solutions"])
    if "answer" in problem:
        return [str(problem["answer"])]
    raise KeyError(f"the problem {query_id!r} has neither answer nor solutions: {sorted(problem)}")


class _Checker:
    """One process of `checker.py`."""

    def __init__(self, seconds: float) -> None:
        self._wall_seconds = seconds * WALL_SECONDS_EACH
        command = [sys.executable, "-P", str(CHECKER), str(seconds), str(MEMORY)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        if self._line(START_SECONDS) is None:
            self.close()
            raise RuntimeError(f"{' '.join(command)} does not begin: is math-verify installed?")

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def compare(self, gold: str, answer: str) -> Verdict | None:
        """Return the verdict; None if the process died or had to be killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([gold, answer]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = None
        else:
            line = self._line(self._wall_seconds)
        if line is None:
            self.close()
            return None
        right, readable = json.loads(line)
        return Verdict(right, readable)

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # what was not written yet
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _line(self, seconds: float) -> str | None:
        """Return the next line of output; None if the process ends or takes longer."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return (self._process.stdout.readline() or None) if selector.select(seconds) else None


@cache
def shared_verifier(seconds: float) -> MathVerifier:
    """Return this process's verifier for this limit."""
    return MathVerifier(seconds)
