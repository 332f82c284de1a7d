"""Metrics for MLflow, trackio and SwanLab: each writes to the run's output folder, offline."""

import os
from collections.abc import Mapping

from agenticrun_workers.reporting.trackers import TrackedRun


class Mlflow:
    """pip install mlflow-skinny. Look at it: mlflow ui --backend-store-uri OUTPUT/mlflow."""

    def __init__(self, run: TrackedRun, uri: str = "", experiment: str = "agenticrun"):
        import mlflow

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers databases
        mlflow.set_tracking_uri(uri or (run.folder / "mlflow").absolute().as_uri())
        mlflow.set_experiment(experiment)
        found = mlflow.search_runs(
            filter_string=f"tags.agenticrun = '{run.id}'", output_format="list"
        )
        self.mlflow = mlflow
        mlflow.start_run(found[0].info.run_id if found else None, run_name=run.name)
        mlflow.set_tag("agenticrun", run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics({name.replace("@", "_"): x for name, x in metrics.items()}, step)

    def close(self) -> None:
        self.mlflow.end_run()


class Trackio:
    """pip install trackio. Look at it: TRACKIO_DIR=OUTPUT/trackio trackio show."""

    def __init__(self, run: TrackedRun, project: str = "agenticrun", space: str | None = None):
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        import trackio

        self.run = trackio.init(
            project, name=f"{run.name}-{run.id}", space_id=space, config=run.config, resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step)

    def close(self) -> None:
        self.run.finish()


class Swanlab:
    """pip install swanlab. Send it later: swanlab sync OUTPUT/swanlab/run-*. Or `mode: cloud`.

    Offline, each attempt is a run of its own.
    """

    def __init__(self, run: TrackedRun, project: str = "agenticrun", mode: str = "offline"):
        import swanlab

        self.run = swanlab.init(
            project=project,
            name=run.name,
            config=run.config,
            logdir=str(run.folder / "swanlab"),
            mode=mode,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()
