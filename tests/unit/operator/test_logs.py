"""The operator's log names the run of each line, also as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from agenticrun_operator import logs
from agenticrun_operator.logs import LogFormat, about_run, note_attempt
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.workqueue import Item, WorkQueue

log = logging.getLogger("agenticrun_operator.test")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Put the root logger back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_of_json_has_the_run_and_its_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", LogFormat.JSON)
    with about_run("team", "lake"):
        note_attempt(3)
        log.warning("cannot delete %s", "a\npod")
    log.info("after")
    first, second = lines(capsys)
    assert first.pop("time")
    assert first == {
        "level": "warning",
        "logger": "agenticrun_operator.test",
        "message": "cannot delete a\npod",
        "namespace": "team",
        "run": "lake",
        "attempt": 3,
    }
    assert "run" not in second


def test_a_traceback_stays_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", LogFormat.JSON)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: broken" in str(line["error"])


def test_text_is_the_other_format(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", LogFormat.TEXT)
    log.info("started")
    assert capsys.readouterr().err.rstrip().endswith("agenticrun_operator.test: started")


async def test_reconcile_workers_name_the_run_that_each_of_them_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("INFO", LogFormat.JSON)
    queue, leading, both = WorkQueue(), asyncio.Event(), asyncio.Barrier(2)
    leading.set()

    async def reconcile(item: Item) -> float | None:
        await both.wait()  # both at the same time
        log.info("of %s", item.key[1])
        raise ValueError("broken")

    workers = ReconcileWorkers(queue, reconcile, leading, asyncio.Semaphore(2))
    workers.start()
    queue.add(("team", "one"))
    queue.add(("team", "two"))
    for _ in range(20):
        await asyncio.sleep(0)
    await workers.stop()
    found = lines(capsys)
    assert {(line["run"], line["message"]) for line in found if "of" in str(line["message"])} >= {
        ("one", "of one"),
        ("two", "of two"),
    }
    failed = [line for line in found if "reconciliation failed" in str(line["message"])]
    assert {line["run"] for line in failed} == {"one", "two"}
