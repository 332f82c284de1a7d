"""`agenticrun validate`: check a run file alone."""

from __future__ import annotations

import typer

from agenticrun_workers.cli.common import Changes, RunFile, load, look_in, refuse


def validate(file: RunFile, changes: Changes = None) -> None:
    """Validate a file as the apiserver would, and import its environments as env workers do.

    Exit codes: 0 valid, 64 invalid.
    """
    loaded = load(file, changes, local=False)
    look_in(file.parent)
    from agenticrun_workers.errors import InvalidConfig
    from agenticrun_workers.rollout.env_worker import describe_envs

    try:
        describe_envs(loaded.spec.pipeline)
    except InvalidConfig as error:
        refuse(file, [str(error)])
    typer.echo(f"{file}: AgenticRun {loaded.metadata.name} is valid")
