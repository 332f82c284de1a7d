"""`agenticrun plan`: whether a run fits on its GPUs and pods, before anything starts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agenticrun_api import AgenticRun
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli.common import Changes, RunFile, give_up, load, refuse
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.findings import Finding, failed, not_checked, ok, warning
from agenticrun_workers.reporting.run_folder import gpus

if TYPE_CHECKING:
    from agenticrun_workers.sizing.gpus import Gpu
    from agenticrun_workers.sizing.plan import Change, Plan
    from agenticrun_workers.sizing.step_time import StepTime

COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def plan(
    file: RunFile,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="GPU of all roles with GPUs: a100, a100-40gb, a10g, b200, h100, h200, l4, l40s or "
            "rtx4090. Default: this machine's, else h100.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="config.json of the policy, if neither a folder here nor the Hub has it.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a trajectory. Default: sequenceLength, the longest."),
    ] = None,
    output: Annotated[
        Literal["table", "json"], typer.Option("--output", "-o", help="Form of the output.")
    ] = "table",
    changes: Changes = None,
) -> None:
    """Compute memory and step time of a run from its YAML and the model's config.

    Nothing is downloaded but a config.json, and nothing starts. Says what does not fit, why, and
    the nearest changes that fit.
    Exit codes: 0 the run fits, 64 it does not, or the file or model cannot be used.
    """
    # Before the imports below, so that a mistake in the file is shown at once.
    run = load(file, changes, local=True)
    from agenticrun_workers.models.folder import ModelLoadError
    from agenticrun_workers.sizing.models import refusal, run_shapes
    from agenticrun_workers.sizing.plan import plan_run

    card, origin = find_gpu(gpu)
    try:
        shapes = run_shapes(run.spec, config)
        refused = refusal(run.spec, config)
        planned = plan_run(run, shapes, card, tokens=tokens)
    except InvalidConfig as error:
        refuse(file, [str(error)])
    except ModelLoadError as error:
        give_up(f"{error}\nWith a copy of its config.json: --config config.json")
    if output == "json":
        typer.echo(json.dumps(as_json(planned) | {"refused": refused}, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
        for part in _shown(run, planned, _again(file, gpu, config, changes), origin):
            console.print(part, soft_wrap=isinstance(part, Text))
    if refused:
        give_up(f"spec.model.path: {refused}")
    raise typer.Exit(ExitCode.INVALID_CONFIG if planned.too_large() else ExitCode.SUCCEEDED)


def find_gpu(name: str | None) -> tuple[Gpu, str]:
    """Return a GPU by its name, or this machine's, and where it comes from."""
    from agenticrun_workers.sizing.gpus import DEFAULT, GPUS, of_machine

    if name is not None:
        if name.lower() not in GPUS:
            raise typer.BadParameter(f"--gpu {name}: choose one of {', '.join(sorted(GPUS))}")
        return GPUS[name.lower()], "--gpu"
    found = of_machine(gpus())
    return (found, "of this machine") if found else (GPUS[DEFAULT], "assumed: set --gpu")


def plan_finding(run: AgenticRun, *, pods: bool, card: Gpu | None = None) -> Finding:
    """Return whether a run fits into its GPUs and the memory of its pods.

    Args:
        run: the run.
        pods: it runs on pods, of which the run says how much memory they have.
        card: the GPU. Default: see `find_gpu`.
    """
    from agenticrun_workers.models.folder import ModelLoadError
    from agenticrun_workers.sizing.models import run_shapes
    from agenticrun_workers.sizing.plan import Fit, Kind, plan_run

    chosen, origin = find_gpu(None) if card is None else (card, "of the cluster")
    try:
        planned = plan_run(run, run_shapes(run.spec), chosen)
    except InvalidConfig as error:
        return failed(str(error), "correct it")
    except ModelLoadError as error:
        return not_checked(str(error))
    # On one machine, the memory of pods is no limit.
    kinds = tuple(Kind) if pods else (Kind.GPU,)
    places = [place for place in planned.places if place.kind in kinds]
    if not places:
        return not_checked("no role has GPUs; agenticrun plan -f shows the memory of pods")
    on = f" on {chosen.name} ({origin})" if planned.gpu else ""
    more = f"agenticrun plan -f shows the arithmetic{', --gpu takes another GPU' * bool(on)}"
    bad = next((place for place in places if place.fit is Fit.TOO_LARGE), None)
    if bad is not None:
        nearest = [_settings(change) for change in planned.changes[:1]]
        return failed(f"{bad.sum}{on}", "; ".join([*nearest, more]))
    tight = next((place for place in places if place.fit is Fit.TIGHT), None)
    if tight is not None:
        return warning(f"tight: {tight.sum}{on}", more)
    return ok(f"it fits{on}")


def size(count: float) -> str:
    """Format a number of bytes: 14.6 GiB, 35 MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:,.1f} MiB"


def as_json(planned: Plan) -> dict[str, Any]:
    """Return a plan as plain values; all sizes in bytes, times in seconds."""
    model, step = planned.model, planned.step
    return {
        "run": planned.run,
        "fits": not planned.too_large(),
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "activeParameters": model.active_parameters,
        },
        "gpu": planned.gpu and {"name": planned.gpu.name, "memory": planned.gpu.memory},
        "places": [
            {
                "role": place.role.value,
                "kind": place.kind.value,
                "title": place.title,
                "phase": place.phase,
                "field": place.field,
                "needed": place.needed,
                "offered": place.offered,
                "fit": place.fit.value,
                "items": [
                    {"name": item.name, "bytes": item.bytes, "arithmetic": item.arithmetic}
                    for item in place.items
                ],
            }
            for place in planned.places
        ],
        "step": step
        and {
            "seconds": step.seconds,
            "tokensPerTrajectory": step.tokens,
            "sampledTokens": step.sampled,
            "phases": {
                phase.name: {"seconds": phase.seconds, "limit": phase.limit}
                for phase in step.phases
            },
        },
        "checkpointBytes": planned.checkpoint,
        "changes": [
            {"why": change.why, "set": list(change.settings)} for change in planned.changes
        ],
    }


def _again(file: Path, gpu: str | None, config: Path | None, changes: list[str] | None) -> str:
    """Return the command that the user has typed, to which a suggestion adds its settings."""
    words = ["agenticrun", "plan", "-f", str(file)]
    words += ["--gpu", gpu] if gpu else []
    words += ["--config", str(config)] if config else []
    return shlex.join([*words, *(word for item in changes or () for word in ("--set", item))])


def _shown(run: AgenticRun, planned: Plan, again: str, origin: str) -> Iterator[Table | Text]:
    """Return the parts of the output, from top to bottom."""
    from agenticrun_workers.sizing.memory import billions

    model = planned.model
    used = model.active_parameters
    active = f" ({billions(used)} for each token)" if used != model.parameters else ""
    on = f", on {planned.gpu.name} ({size(planned.gpu.memory)}, {origin})" if planned.gpu else ""
    yield Text(
        f"{planned.run}: {model.name}, {billions(model.parameters)} parameters{active}, "
        f"{run.spec.model.dtype}{on}"
    )
    yield _memories(planned)
    if (step := planned.step) is not None:
        yield Text(
            f"shortest time of a step with trajectories of {step.tokens:,} tokens, "
            f"{step.sampled:,} of them sampled; real steps take two to three times as long"
        )
        yield _times(step)
    # A new checkpoint is complete before the oldest one is deleted.
    keep = run.spec.storage.keep + 1 if run.spec.storage else 0
    claim = f"; {keep} of them (keep + 1): {size(keep * planned.checkpoint)}" if keep else ""
    yield Text(f"a checkpoint: {size(planned.checkpoint)}{claim}")
    bad = planned.too_large()
    if not bad:
        yield Text("The run fits.", style="green")
        return
    for place in bad:
        yield Text(f"{place.field}: {place.sum}", style="bold red")
    if not planned.changes:
        yield Text("No change of such settings fits: take a smaller model or larger GPUs (--gpu).")
    for change in planned.changes:
        yield Text(f"with {change.why}: {again} {_settings(change)}")


def _settings(change: Change) -> str:
    return " ".join(f"--set {item}" for item in change.settings)


def _memories(planned: Plan) -> Table:
    shown = Table()
    shown.add_column("memory")
    shown.add_column("size", justify="right")
    shown.add_column("arithmetic")
    for place in planned.places:
        verdict = Text(f"of {size(place.offered)}: ")
        verdict.append(place.fit.value, style=COLOURS[place.fit.value])
        if place.phase:
            verdict.append(f" ({place.phase})")
        shown.add_row(Text(place.title, style="bold"), size(place.needed), verdict)
        for item in place.items:
            shown.add_row(f"  {item.name}", size(item.bytes), item.arithmetic, style="dim")
        shown.add_section()
    return shown


def _times(step: StepTime) -> Table:
    shown = Table()
    shown.add_column("phase")
    shown.add_column("seconds", justify="right")
    shown.add_column("limited by")
    for phase in step.phases:
        shown.add_row(phase.name, f"{phase.seconds:,.2f}", phase.limit)
    shown.add_section()
    shown.add_row("step", f"{step.seconds:,.2f}", "")
    return shown
