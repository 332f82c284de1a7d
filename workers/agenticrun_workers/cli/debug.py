"""`agenticrun debug`: play one episode in this process and print every turn."""

from __future__ import annotations

import asyncio
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agenticrun_workers.cli.common import Changes, RunFile, give_up, load, look_in

if TYPE_CHECKING:
    from agenticrun_api import AgenticRun
    from agenticrun_workers.cli.debug_episode import DebugRequest
    from agenticrun_workers.models.source import ModelSource


class Policy(StrEnum):
    """Source of the answers."""

    RANDOM = "random"
    HUMAN = "human"
    MODEL = "model"


def debug(
    file: RunFile,
    tag: Annotated[
        str | None, typer.Option(help="Environment of the run, by its tag. Default: the first one.")
    ] = None,
    policy: Annotated[
        Policy,
        typer.Option(
            help="Source of the answers: a random valid action, you (on standard input; "
            "end of file ends the episode), or the model."
        ),
    ] = Policy.RANDOM,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face folder or name to use instead of spec.model: its tokenizer, "
            "and its weights with --policy model."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of level and sampling. Default: that of the run's first training episode.",
        ),
    ] = None,
    render: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.gif", help="Write the episode to this file, as a GIF.", dir_okay=False
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Play one training episode and print it: prompts, answers, actions, rewards, trained tokens.

    Everything runs on the main thread, without Ray: breakpoint() in an environment or agent opens
    the debugger in this terminal.
    """
    run = load(file, changes)
    tags = [spec.tag for spec in run.spec.pipeline.envs]
    if tag is not None and tag not in tags:
        give_up(f"{file} has no environment {tag!r}; it has {', '.join(tags)}")
    look_in(file.parent)
    from agenticrun_workers.cli.debug_episode import CannotPlay, play
    from agenticrun_workers.errors import InvalidConfig
    from agenticrun_workers.inference import EngineError
    from agenticrun_workers.models.devices import MissingGpus
    from agenticrun_workers.plugins import PluginError

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    try:
        asyncio.run(play(_request(run, tag or tags[0], policy, model, seed, render, console)))
    except (InvalidConfig, PluginError, EngineError, CannotPlay, MissingGpus) as error:
        give_up(str(error))


def _request(
    run: AgenticRun,
    tag: str,
    policy: Policy,
    model: str | None,
    seed: int | None,
    render: Path | None,
    console: Console,
) -> DebugRequest:
    from agenticrun_workers.cli.debug_episode import DebugRequest

    source = _source(run, model)
    if policy is Policy.MODEL and source.files is not None:
        console.print(
            "note: spec.model.initialize has random weights; "
            "the run's warm-up is not part of `agenticrun debug`"
        )
    gpu = run.spec.roles.of(run.spec.engine_role).gpus > 0
    return DebugRequest(run.spec.pipeline, tag, policy, source, gpu, seed, render, console)


def _source(run: AgenticRun, model: str | None) -> ModelSource:
    """Return the source of tokenizer and weights.

    Raises:
        InvalidConfig: an environment or the model to initialize is invalid.
    """
    from dataclasses import replace

    from agenticrun_workers.models.source import ModelSource

    source = ModelSource.of(run.spec.model)
    if model is not None:
        return replace(source, path=model)
    if run.spec.model.initialize is None:
        return source
    from agenticrun_workers.models.initialize import make_model_files
    from agenticrun_workers.rollout.env_worker import describe_envs

    pipeline = run.spec.pipeline
    return source.with_files(
        make_model_files(
            run.spec.model.initialize, describe_envs(pipeline), pipeline.sequence_length
        )
    )
