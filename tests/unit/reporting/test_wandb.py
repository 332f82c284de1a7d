"""The real wandb: offline runs read back from files; servers that refuse or do not answer."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import AgenticRun
from agenticrun_workers.reporting.trackers import run_id

MakeRun = Callable[..., AgenticRun]
Server = tuple[str, list[bytes]]

OFFLINE = {"project": "rl", "entity": "us", "group": "night", "tags": ["demo"], "mode": "offline"}

BLOCK, FILE_HEADER, RECORD_HEADER = 32_768, 7, 7
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    """What a .wandb file holds: protobuf records in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), FILE_HEADER, b""
    while position + RECORD_HEADER <= len(data):
        if BLOCK - position % BLOCK < RECORD_HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + RECORD_HEADER])
        body = data[position + RECORD_HEADER : position + RECORD_HEADER + length]
        position += RECORD_HEADER + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined] # chosen at run time
            record.ParseFromString(parts)
            yield record


def rows(path: Path) -> list[dict[str, float]]:
    """The logged rows, without wandb's own columns."""
    items = [record.history.item for record in records(path) if record.HasField("history")]
    named = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in row}
        for row in items
    ]
    return [
        {name: value for name, value in row.items() if not name.startswith("_")} for row in named
    ]


SCRIPT = """
import json, logging, sys
from pathlib import Path
from agenticrun_api import InvalidRun, parse_run
import agenticrun_workers.reporting.trackers
from agenticrun_workers.reporting.trackers import build_trackers
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
agenticrun_workers.reporting.trackers.INIT_SECONDS = 3.0
document, output, resume_step, steps = json.loads(sys.argv[1])
try:
    trackers = build_trackers(parse_run(document), Path(output), resume_step, lambda: 2)
except InvalidRun as error:
    sys.exit(str(error))
for step in steps:
    for tracker in trackers:
        tracker.log(step, {"rollout/score/mean": step / 10, "actor/entropy": 1.0})
for tracker in trackers:
    tracker.close()
"""


def attempt(
    run: AgenticRun, output: Path, steps: list[int], *, resume_step: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """An attempt in a process of its own, as attempts are: wandb keeps state per process."""
    arguments = json.dumps(
        [
            run.model_dump(mode="json", by_alias=True, exclude_none=True),
            str(output),
            resume_step,
            steps,
        ]
    )
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "HOME": str(output.parent), **env},
        check=False,
    )


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that hangs up on every caller, and what callers said."""
    calls: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    calls.append(connection.recv(100))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", calls
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_offline_attempts_of_one_run_share_its_id_and_never_call_anybody(
    make_run: MakeRun, tmp_path: Path, server: Server
) -> None:
    address, calls = server
    run = make_run("uid-1", wandb=OFFLINE)
    output = tmp_path / "out"
    for resume_step, steps in ((0, [1, 2, 3]), (2, [3, 4])):
        done = attempt(run, output, steps, resume_step=resume_step, WANDB_BASE_URL=address)
        assert done.returncode == 0, done.stderr
    assert calls == []
    first, second = sorted(output.glob("wandb/offline-run-*/run-uid-1.wandb"))
    assert rows(first) == [
        {"step": step, "rollout/score/mean": step / 10, "actor/entropy": 1.0} for step in (1, 2, 3)
    ]
    assert [row["step"] for row in rows(second)] == [3, 4]


def test_an_offline_run_tells_project_group_tags_and_spec_but_no_secrets(
    make_run: MakeRun, tmp_path: Path
) -> None:
    attempt(make_run("uid-1", wandb=OFFLINE), tmp_path / "out", [1])
    (path,) = (tmp_path / "out").glob("wandb/offline-run-*/run-uid-1.wandb")
    assert b"tell-nobody" not in path.read_bytes()
    told = next(record.run for record in records(path) if record.HasField("run"))
    assert (told.run_id, told.project, told.entity, told.run_group, list(told.tags)) == (
        "uid-1",
        "rl",
        "us",
        "night",
        ["demo"],
    )
    config = {item.key: json.loads(item.value_json) for item in told.config.update if item.key}
    assert config["pipeline"]["maxSteps"] == 10
    axes = [record.metric for record in records(path) if record.HasField("metric")]
    assert any(axis.glob_name == "*" and axis.step_metric == "step" for axis in axes)


def test_online_without_a_key_is_refused_and_says_how_to_give_one(
    make_run: MakeRun, tmp_path: Path
) -> None:
    done = attempt(make_run("uid-1", wandb={"project": "rl"}), tmp_path / "out", [1])
    assert done.returncode == 1
    assert done.stderr.startswith(
        "spec.tracking.wandb: no API key: put WANDB_API_KEY into roles.driver.env"
    )


def test_a_server_that_does_not_answer_never_stops_training_and_is_told_once(
    make_run: MakeRun, tmp_path: Path, server: Server
) -> None:
    address, calls = server
    output = tmp_path / "out"
    done = attempt(
        make_run("uid-1", wandb={"project": "rl"}),
        output,
        [1, 2],
        WANDB_API_KEY="k" * 40,
        WANDB_BASE_URL=address,
    )
    assert done.returncode == 0, done.stderr
    assert calls
    assert done.stdout.count("the run trains without W&B") == 1
    assert [
        json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]


def test_a_local_run_keeps_its_id_in_its_folder(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    ids = [run_id(run, tmp_path / folder) for folder in ("one", "one", "two")]
    assert ids[0] == ids[1] != ids[2]
    assert run_id(make_run("uid-1"), tmp_path) == "uid-1"
