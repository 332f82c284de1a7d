"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenticrun_api import AgenticRun, InvalidRun
from agenticrun_api.spec import Wandb

INIT_SECONDS = 30.0
"""How long a run waits for the server before it trains without W&B."""
FINISH_SECONDS = 60
"""How long a run's end waits for uploads; what is left can be sent with `wandb sync`."""
FIELD = "spec.tracking.wandb"


class WandbTracker:
    """Every step as one row whose x-axis is `step`: after a resume the steps that are computed again are added, never dropped.

    Attempts of one run share one W&B run. Files go to `<folder>/wandb`, from where `wandb sync` sends them in offline mode.
    Only `model` and `pipeline` of the spec are uploaded: roles may hold secrets in their environment.

    Args:
        run_id: of the W&B run; the same for all attempts.

    Raises:
        InvalidRun: there is no API key, or the server refuses it or the project.
        wandb.Error: the server does not answer within `INIT_SECONDS`.
    """

    def __init__(self, run: AgenticRun, spec: Wandb, folder: Path, run_id: str) -> None:
        if spec.mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = (
                "false"  # wandb sends telemetry of its own, offline too
            )
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if spec.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise InvalidRun(
                [
                    f"{FIELD}: no API key: put WANDB_API_KEY into roles.driver.env or a secret of roles.driver.envFrom, or set mode: offline"
                ]
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=spec.project,
                entity=spec.entity,
                group=spec.group,
                tags=spec.tags,
                mode=spec.mode,
                id=run_id,
                name=run.metadata.name,
                resume="allow",
                dir=str(folder),
                config={"model": run.spec.model.to_dict(), "pipeline": run.spec.pipeline.to_dict()},
                allow_val_change=True,
                settings=wandb.Settings(
                    console="off",  # the driver's log has its own place, and the terminal its own display
                    silent=True,
                    init_timeout=INIT_SECONDS,
                    x_disable_meta=True,  # it uploads the command line, where --set may hold what roles hide
                    finish_timeout=FINISH_SECONDS,
                ),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise InvalidRun([f"{FIELD}: {error}"]) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def run_id(run: AgenticRun, output: Path) -> str:
    """The run's uid; in local mode, where there is none, an id that the output folder keeps."""
    if run.metadata.uid:
        return run.metadata.uid
    kept = output / "wandb-run-id"
    if not kept.exists():
        output.mkdir(parents=True, exist_ok=True)
        kept.write_text(secrets.token_hex(8))
    return kept.read_text()
