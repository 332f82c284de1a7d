"""`agenticrun eval`: measure a policy on the validation set."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from agenticrun_workers.cli.common import Changes, RunFile, give_up, load, look_in

if TYPE_CHECKING:
    from agenticrun_api import AgenticRun
    from agenticrun_workers.driver.evaluation import TagResult


def evaluate(
    file: RunFile,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Folder or URI of a checkpoint of this run (step-N), or of all its checkpoints: "
            "then the newest one is used."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face folder or name to use instead of a checkpoint. "
            "Default: spec.model.path."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the results to this file.", dir_okay=False),
    ] = None,
    changes: Changes = None,
) -> None:
    """Run the validation episodes without training and print the results of each environment.

    The results are success, pass@k, score, turns, the environment's own metrics and stop reasons.
    pipeline.eval sets the number of
    episodes per level (samples), the k of pass@k and the sampling.
    Exit codes: 0 done, 64 run, checkpoint or model cannot be used.
    """
    loaded = load(file, changes)
    if checkpoint is not None and model is not None:
        raise typer.BadParameter("give --checkpoint or --model, not both")
    look_in(file.parent)
    from agenticrun_workers.driver.outcome import report_of
    from agenticrun_workers.errors import CannotStart, InvalidConfig

    console = Console()
    with tempfile.TemporaryDirectory(prefix="agenticrun-eval-") as scratch:
        try:
            results, what = _play(loaded, checkpoint, model, Path(scratch), console)
        except InvalidConfig as error:
            give_up(report_of(error, 0).message)  # unwraps Ray's own exceptions
        except CannotStart as error:
            give_up(str(error))
    console.print(table(results, what))
    if json_file is not None:
        document = {
            "run": loaded.metadata.name,
            "policy": what,
            "tags": {tag: result.to_json() for tag, result in results.items()},
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n")


def _play(
    run: AgenticRun, checkpoint: str | None, model: str | None, scratch: Path, console: Console
) -> tuple[dict[str, TagResult], str]:
    """Return the result of each tag, and the name of the policy.

    Raises:
        InvalidConfig: the run, the checkpoint or the model cannot be used.
    """
    from agenticrun_api import Role
    from agenticrun_workers.driver.evaluation import evaluate as play
    from agenticrun_workers.driver.evaluation import evaluation_run
    from agenticrun_workers.driver.export import export_checkpoint
    from agenticrun_workers.driver.local_actors import check_gpus, embedded_ray, gpus_here

    what = model or run.spec.model.path or ""
    if checkpoint is not None:
        step = export_checkpoint(run, checkpoint, scratch)
        model, what = str(scratch), f"{checkpoint} (step {step})"
    playing = evaluation_run(run, model)
    generating = playing.spec.pipeline.actor_infer.validation_generating
    if run.spec.pipeline.eval.samples > 1 and generating.temperature == 0:
        console.print(
            "note: at temperature 0 all samples of a level are the same; "
            "set pipeline.eval.generating.temperature"
        )
    columns: list[Any] = [
        TextColumn("episodes"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    ]
    bars = Progress(*columns, console=console, transient=True)
    with embedded_ray(playing) as launcher, bars as progress:
        check_gpus(run, {run.spec.engine_role, Role.ENV}, gpus_here())
        bar = progress.add_task("", total=playing.spec.pipeline.val_batch_size)
        results = asyncio.run(
            play(playing, launcher, lambda episodes: progress.advance(bar, episodes))
        )
        return results, what


def table(results: Mapping[str, TagResult], what: str) -> Table:
    """Return a table with one column per environment and one row per metric."""
    ks = sorted({k for result in results.values() for k in result.pass_at})
    reasons = dict.fromkeys(reason for result in results.values() for reason in result.stop)
    shown = Table(title=Text(what), title_justify="left")
    shown.add_column("")
    for tag in results:
        shown.add_column(Text(tag), justify="right")

    def row(name: str, values: Iterable[float | None], form: str) -> None:
        shown.add_row(name, *("-" if value is None else form.format(value) for value in values))

    found = list(results.values())
    row("levels", (result.levels for result in found), "{}")
    row("episodes", (result.episodes for result in found), "{}")
    row("success", (result.success for result in found), "{:.3f}")
    for k in ks:
        row(f"pass@{k}", (result.pass_at.get(k) for result in found), "{:.3f}")
    row("score", (result.score for result in found), "{:.3f}")
    row("turns", (result.turns for result in found), "{:.2f}")
    row("response tokens", (result.response_tokens for result in found), "{:.1f}")
    for name in dict.fromkeys(name for result in found for name in result.metrics):
        row(name, (result.metrics.get(name) for result in found), "{:.3f}")
    for reason in reasons:
        row(f"stop/{reason}", (result.stop.get(reason) for result in found), "{:.1%}")
    return shown
