"""Checks of a trace against the Trace Event Format."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


def read_trace(path: Path) -> dict[str, Any]:
    """Return the content of a trace, whose events are well-formed."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    check_events(document["traceEvents"])
    return document


def check_events(events: Iterable[Event]) -> None:
    """Assert that a viewer can draw the events: they are complete, nested, and have names."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    lines: dict[tuple[str, str], list[Event]] = defaultdict(list)
    named: set[tuple[int, int | None]] = set()
    for event in events:
        assert isinstance(event["name"], str), event
        assert all(isinstance(event[field], int) for field in ("pid", "tid", "ts")), event
        assert event["ts"] >= 0, event
        if event["ph"] == "M":
            assert event["args"], event
            if event["name"] in ("process_name", "thread_name"):
                thread = event["tid"] if event["name"] == "thread_name" else None
                named.add((event["pid"], thread))
        elif event["ph"] == "X":
            assert isinstance(event["dur"], int), event
            assert event["dur"] >= 0, event
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
            assert event["args"], event
        else:
            assert event["ph"] in "be", event
            lines[event["cat"], event["id2"]["global"]].append(event)
    for (pid, tid), spans in rows.items():
        assert {(pid, None), (pid, tid)} <= named, "processes and threads have names"
        check_nesting(spans)
    for line in lines.values():
        begun: list[Event] = []
        for before, after in itertools.pairwise(line):
            assert before["ts"] <= after["ts"], (before, after)
        for event in line:
            if event["ph"] == "b":
                begun.append(event)
            else:
                assert begun.pop()["name"] == event["name"], event
        assert not begun, "every begin has its end"


def check_nesting(spans: Iterable[tuple[int, int]]) -> None:
    """Assert that of two spans one is inside of the other, or they are apart."""
    ends: list[int] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], (begin, end, ends[-1])
        ends.append(end)


def processes(events: Iterable[Event]) -> dict[str, int]:
    """Return the id of each process by its name, without remarks."""
    return {
        event["args"]["name"].partition(" (")[0]: event["pid"]
        for event in events
        if event["name"] == "process_name"
    }


def durations(events: Iterable[Event], pid: int) -> dict[str, int]:
    """Return the microseconds of all spans of a process by their names."""
    found: dict[str, int] = defaultdict(int)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            found[event["name"]] += event["dur"]
    return dict(found)
