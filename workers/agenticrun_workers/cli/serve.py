"""`agenticrun serve`: answer requests of OpenAI's and Anthropic's clients with a policy."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import yaml

from agenticrun_api import AgenticRun
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli.common import Changes, give_up, load, look_in

API_KEY = "AGENTICRUN_API_KEY"
LONGEST = 32_768
"""Largest `sequenceLength` of a model without a run, however long its config allows sequences."""
UNKNOWN_LENGTH = 4096


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Output folder of a run, a checkpoint (step-N) or the URI of one; or the Hugging "
            "Face folder or name of a model.",
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="YAML of the run that saved the checkpoint. Default: run.yaml in its output "
            "folder.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help=f"Address to listen at. Clients of other machines need {API_KEY}."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any free port.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            help="Model name that clients request. Default: that of the run or the folder."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0, help="GPUs of the engine. Default: those of an inference pod of the run."
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Serve a policy at /v1/chat/completions, /v1/responses, /v1/messages and /v1/completions.

    Requests may choose temperature, top_p, top_k, min_p and seed. Nothing is recorded. The engine
    is that of the run (--set pipeline.actorInfer.strategy.name=vllm chooses another).
    Exit codes: 0 stopped (Ctrl-C), 1 the engine failed, 64 run, checkpoint or model cannot be used.
    """
    from agenticrun_workers.driver.serve import Served
    from agenticrun_workers.driver.serve import serve as answer
    from agenticrun_workers.errors import InvalidConfig
    from agenticrun_workers.inference import EngineError
    from agenticrun_workers.inference.engine import EngineStartError
    from agenticrun_workers.models.devices import MissingGpus
    from agenticrun_workers.plugins import PluginError

    api_key = os.environ.get(API_KEY)
    if host not in ("127.0.0.1", "::1", "localhost") and not api_key:
        api_key = secrets.token_urlsafe(24)
        typer.echo(f"API key: {api_key}")
    with tempfile.TemporaryDirectory(prefix="agenticrun-serve-") as scratch:
        try:
            run, found_name = _loaded(model, file, changes, Path(scratch))
            pods = run.spec.roles.of(run.spec.engine_role).gpus
            served = Served(name or found_name, host, port, api_key, pods if gpus is None else gpus)
            engine = run.spec.pipeline.actor_infer.strategy.name
            asyncio.run(
                answer(
                    run,
                    served,
                    Path(scratch),
                    lambda url: typer.echo(f"{served.name} answers at {url} (engine {engine})"),
                )
            )
        except (InvalidConfig, PluginError, MissingGpus, EngineStartError) as error:
            give_up(str(error))
        except (EngineError, OSError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(ExitCode.FAILED) from error


def _loaded(
    model: str, file: Path | None, changes: list[str] | None, scratch: Path
) -> tuple[AgenticRun, str]:
    """Return a run whose `model.path` is a Hugging Face folder with the weights, and a name.

    Raises:
        InvalidConfig: there is no usable checkpoint.
    """
    from agenticrun_workers.driver.export import export_checkpoint

    place = Path(model)
    run_file = file or next(
        (
            found
            for folder in (place, *place.parents[:2])
            if (found := folder / "run.yaml").exists()
        ),
        None,
    )
    if run_file is None or (place / "config.json").exists():
        if "://" in model:
            give_up(f"{model}: name the YAML of the run that saved it with -f")
        return load(_run_of_model(model, scratch), changes), place.name
    run = load(run_file, changes)
    look_in(run_file.parent)
    checkpoints = place / "checkpoints"
    exported = scratch / "policy"
    export_checkpoint(run, str(checkpoints) if checkpoints.is_dir() else model, exported)
    changed = run.spec.model.model_copy(update={"path": str(exported), "initialize": None})
    spec = run.spec.model_copy(update={"model": changed})
    return run.model_copy(update={"spec": spec}), run.metadata.name


def _run_of_model(model: str, scratch: Path) -> Path:
    """Write the YAML of a run that has only a model."""
    config = Path(model) / "config.json"
    known = json.loads(config.read_text()) if config.exists() else {}
    length = min(int(known.get("max_position_embeddings") or UNKNOWN_LENGTH), LONGEST)
    document = {
        "apiVersion": "agenticrun.dev/v1alpha1",
        "kind": "AgenticRun",
        "metadata": {"name": "served"},
        "spec": {
            "model": {"path": model},
            "pipeline": {
                "maxSteps": 1,
                "rolloutBatchSize": 2,
                "evalSteps": 0,
                "sequenceLength": length,
                "envs": [{"tag": "None", "type": "frozen_lake", "maxTokensPerStep": 1}],
                "trainEnvs": {"groups": 1, "groupSize": 2, "tags": ["None"]},
            },
        },
    }
    file = scratch / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    return file
