#!/usr/bin/env python3
"""Convert every agentic YAML of a ROLL checkout, and print a table of what comes out.

    python tools/roll_migration.py ~/ROLL --commit 8eb27cc2 > docs/migrate-from-roll-files.md

Each file goes through `agenticrun convert`. A result that validates trains one step in this
process, with a tiny model, short answers and as few episodes as its algorithm allows; everything
else is the file's. Nothing of the checkout is copied, and nothing is downloaded: a data set that
the file names on a hub is replaced by a few made-up rows.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agenticrun_api import AgenticRun, InvalidRun, parse_run
from agenticrun_workers.convert import Conversion, ConvertError, compose, convert
from agenticrun_workers.convert.outcome import ConvertExit, exit_code, lines_for_a_person
from agenticrun_workers.driver.local import run_locally
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.env_worker import describe_envs

ANSWER_TOKENS = 8
TURNS = 2
PROBLEMS = [("1 + 1", "2"), ("2 + 3", "5"), ("7 - 4", "3"), ("2 * 3", "6")] * 5
"""Questions and answers that stand in for a data set."""
WORDS = [chr(code) for code in range(32, 127)]
"""Every ASCII character, so that the tiny model reads these problems."""


@dataclass(frozen=True)
class Row:
    """Result of one file."""

    file: str
    valid: bool
    trained: bool
    made_up: bool
    """True if a data set was replaced."""
    lines: tuple[str, ...]
    """What needs a person."""
    code: int
    """Exit code of `agenticrun convert`."""
    result: str
    """Outcome of the first step, or the reason why there is none."""


def agentic_files(checkout: Path) -> list[Path]:
    """Return the agentic YAMLs among ROLL's examples, in the order of their paths."""
    examples = checkout / "examples"
    return sorted(
        file for file in examples.rglob("*.yaml") if "agentic" in str(file.relative_to(examples))
    )


def tiny(document: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the run for one step on this machine, and whether a data set was replaced.

    Args:
        document: the converted run.
        folder: scratch folder for recordings and data sets.
    """
    document = copy.deepcopy(document)
    spec = document["spec"]
    sizes = {"hiddenSize": 32, "layers": 1, "heads": 2, "intermediateSize": 64}
    spec["model"] = {"initialize": {**sizes, "words": WORDS}}
    spec["roles"], spec["checkpoint"] = {}, {"none": True}
    spec["tracking"] = {"tensorboard": False, "console": False}
    spec.pop("placement", None)
    pipeline = spec["pipeline"]
    pipeline["maxSteps"] = 1
    train, val = pipeline["trainEnvs"], pipeline.get("valEnvs")
    for part in filter(None, (train, val)):
        part["groups"] = len(part["tags"])
        part.pop("partition", None)
    size = train.get("groupSize", 1)
    train["groups"] *= 2 if size == 1 else 1
    pipeline["rolloutBatchSize"] = train["groups"] * size
    if val:
        pipeline["valBatchSize"] = val["groups"] * val.get("groupSize", 1)
    actor = pipeline["actorTrain"]
    actor.pop("strategy", None)
    actor["training"].pop("miniBatchSize", None)
    pipeline["actorInfer"].pop("strategy", None)
    for role in ("critic", "reference"):
        pipeline.get(role, {}).pop("path", None)
    if "to" in pipeline.get("record", {}):
        pipeline["record"]["to"] = str(folder / "records")
    made_up = False
    for number, env in enumerate(pipeline["envs"]):
        env["maxSteps"] = min(env["maxSteps"], TURNS)
        env["maxTokensPerStep"] = min(env["maxTokensPerStep"], ANSWER_TOKENS)
        if "dataset" in env:
            env["dataset"], made_up = _stand_in(env["dataset"], folder / f"{number}.jsonl"), True
    return document, made_up


def _stand_in(dataset: dict[str, Any], file: Path) -> dict[str, Any]:
    columns = dataset.get("columns", {})
    question, answer = columns.get("question", "question"), columns.get("answer", "answer")
    file.write_text("".join(json.dumps({question: q, answer: a}) + "\n" for q, a in PROBLEMS))
    return {"path": str(file), "columns": columns}


def check(file: Path, name: str) -> Row:
    """Convert one file and train its first step."""
    try:
        conversion = convert(compose(file), file.stem)
    except ConvertError as error:
        why = str(error).removeprefix(f"{file}: ")
        return Row(name, False, False, False, (), ConvertExit.UNREADABLE, why)
    result = _problem(conversion)
    valid, trained, made_up = not result, False, False
    if valid:
        trained, made_up, result = _first_step(conversion)
    lines = tuple(lines_for_a_person(conversion))
    return Row(name, valid, trained, made_up, lines, exit_code(conversion), result)


def _problem(conversion: Conversion) -> str:
    """Return what `agenticrun validate` says against the run, or an empty text."""
    try:
        describe_envs(parse_run(conversion.document).spec.pipeline)
    except (InvalidRun, InvalidConfig) as error:
        return str(error)
    return ""


def _first_step(conversion: Conversion) -> tuple[bool, bool, str]:
    """Train one step; return success, whether data was made up, and the reason of a failure."""
    with tempfile.TemporaryDirectory(prefix="roll-migration-") as folder:
        document, made_up = tiny(conversion.document, Path(folder))
        try:
            run: AgenticRun = parse_run(document)
            report = run_locally(
                run, Path(folder) / "out", Console(file=io.StringIO()), in_process=True
            )
        except (InvalidRun, InvalidConfig) as error:
            return False, made_up, str(error)
    return report.outcome == "Succeeded", made_up, report.message


HEADER = """# ROLL's agentic files

What [`agenticrun convert`](migrate-from-roll.md) makes of every agentic YAML of ROLL's repository
{commit}. Generated by `tools/roll_migration.py`; do not edit. "First step" is one training step of
the result with a tiny model, in one process on a CPU: the model, its engine, its pods and long
answers are replaced, and everything else is the file's.
"""


def page(rows: Sequence[Row], commit: str) -> Iterator[str]:
    """Yield the lines of the markdown page."""
    yield HEADER.format(commit=f"at commit {commit}" if commit else "in this checkout")
    yield "| file below `examples/` | validates | first step | lines for a person | exit code |"
    yield "|---|---|---|---|---|"
    for row in rows:
        step = ("yes, with made-up data" if row.made_up else "yes") if row.trained else "no"
        yield (
            f"| {row.file} | {'yes' if row.valid else 'no'} | {step} | {len(row.lines) or ''} "
            f"| {row.code} |"
        )
    yield ""
    yield (
        f"{len(rows)} files: {sum(row.valid for row in rows)} validate, "
        f"{sum(row.trained for row in rows)} train their first step, "
        f"{_count(rows, ConvertExit.READY)} are ready, "
        f"{_count(rows, ConvertExit.PERSON)} have lines for a person "
        f"({sum(len(row.lines) for row in rows)} lines), "
        f"{_count(rows, ConvertExit.UNREADABLE)} cannot be read."
    )
    yield "\n## Lines for a person\n"
    for row in rows:
        if row.lines or row.code == ConvertExit.UNREADABLE:
            yield f"- {row.file}"
            yield from (f"  - {_without_value(line)}" for line in row.lines)
            if not row.lines:
                yield f"  - cannot be read: {row.result}"


def _count(rows: Sequence[Row], code: ConvertExit) -> int:
    return sum(row.code == code for row in rows)


def _without_value(line: str) -> str:
    """Return the line without the file's own value, which is ROLL's text."""
    field, _, note = line.partition(": ")
    return f"`{field.partition(' (')[0]}`: {note}" if note else line


def main() -> int:
    """Print the table of a checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="folder of a clone of alibaba/ROLL")
    parser.add_argument("--commit", default="", help="of the checkout, for the page")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only files with this text in their path"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    examples = options.checkout / "examples"
    rows = []
    for file in agentic_files(options.checkout):
        name = str(file.relative_to(examples))
        if options.only not in name:
            continue
        with contextlib.redirect_stdout(sys.stderr):
            rows.append(check(file, name))
        row = rows[-1]
        print(f"{row.file}: exit code {row.code}. {row.result}", file=sys.stderr, flush=True)
    if not rows:
        parser.error(
            f"{options.checkout} has no agentic YAML in examples: is it a checkout of ROLL?"
        )
    print("\n".join(page(rows, options.commit)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
