"""`agenticrun stop`, `checkpoint`, `suspend` and `resume`: steer a run that was started."""

from __future__ import annotations

import typer

from agenticrun_workers.cli.source import Context, Namespace, RunName, open_run, or_give_up


def stop(run: RunName, namespace: Namespace = None, context: Context = None) -> None:
    """Save a checkpoint and end the run. On a cluster: suspend it.

    Exit codes: 0 asked, 64 there is no such run, or it does not train.
    """
    with or_give_up():
        typer.echo(open_run(run, namespace, context).stop())


def checkpoint(run: RunName, namespace: Namespace = None, context: Context = None) -> None:
    """Save a checkpoint after the current step. The run continues.

    Exit codes: 0 asked, 64 there is no such run, or it does not train.
    """
    with or_give_up():
        typer.echo(open_run(run, namespace, context).checkpoint())


def suspend(run: RunName, namespace: Namespace = None, context: Context = None) -> None:
    """Save a checkpoint and give the pods back, until `agenticrun resume`.

    It sets spec.suspend. On this machine: the same as stop.
    Exit codes: 0 asked, 64 there is no such run, or it does not train.
    """
    stop(run, namespace, context)


def resume(run: RunName, namespace: Namespace = None, context: Context = None) -> None:
    """Continue from the newest checkpoint.

    On a cluster, this sets spec.suspend to false. On this machine it trains, as `agenticrun run`
    does, with the run as it was run.
    Exit codes: 0 asked, 64 there is no such run, or it has ended; on this machine those of run.
    """
    with or_give_up():
        typer.echo(open_run(run, namespace, context).resume())
