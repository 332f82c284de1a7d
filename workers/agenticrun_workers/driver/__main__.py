"""The driver on a RayCluster: the operator submits this module as a Ray job on the head pod.

It reads the mounted run, trains, and posts its progress to the reporter. Its exit code
(`ExitCode`) repeats the outcome of the final report, in case the reporter is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
import yaml

from agenticrun_api import AgenticRun, FinalReport
from agenticrun_api.load import parse_mounted
from agenticrun_api.names import (
    ENV_ATTEMPT,
    ENV_REPLICAS,
    ENV_SUBMISSION_ID,
    REPORTER_PORT,
    REPORTER_TOKEN_FILE,
    RUN_FILE,
    ExitCode,
)
from agenticrun_api.yaml_text import read_yaml
from agenticrun_workers.driver.attempt import AttemptRunner
from agenticrun_workers.driver.checkpoints import cluster_folders
from agenticrun_workers.driver.outcome import exit_code, fail_early
from agenticrun_workers.driver.output import copied_output
from agenticrun_workers.driver.progress import AttemptId, Requests
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.reporting.client import ProgressSink, ReporterClient
from agenticrun_workers.storage import Folder

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_LOG_BYTES = 32 << 20
"""Size of driver.log at which it becomes driver.log.1."""


def main() -> None:
    """Run one attempt and exit."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stdout,
        format=LOG_FORMAT,
    )
    try:
        document = read_yaml(Path(RUN_FILE).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:  # without the run's uid, the reporter accepts no report
        log.error("%s: %s", RUN_FILE, error)
        sys.exit(ExitCode.INVALID_CONFIG)
    report = asyncio.run(_attempt(document))
    log.info("%s (%s): %s", report.outcome, report.reason, report.message)
    sys.exit(exit_code(report))


async def _attempt(document: dict[str, Any]) -> FinalReport:
    attempt = AttemptId(
        document["metadata"]["uid"], os.environ[ENV_SUBMISSION_ID], int(os.environ[ENV_ATTEMPT])
    )
    requests = Requests()
    sink = ReporterClient(
        f"http://127.0.0.1:{REPORTER_PORT}",
        Path(REPORTER_TOKEN_FILE).read_text().strip(),
        requests.apply,
    )
    # Before anything that can fail, so that every failure is reported.
    await sink.start()
    try:
        # The mounted file is from the creation of the cluster; replicas may have changed since.
        run = with_replicas(parse_mounted(document), os.environ.get(ENV_REPLICAS))
        runner = _runner(run, attempt, sink, requests)
        ray.init(address="auto", namespace=run.metadata.name, logging_level=logging.WARNING)
    except Exception as error:  # any failure is reported
        log.exception("the attempt cannot start")
        return await fail_early(sink, attempt, error)
    # After ray.init, which installs handlers of its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, requests.stop.set)
    # A local path, such as a mounted claim, needs no copies.
    target = Folder(runner.checkpoints) if runner.checkpoints else None
    remote = target is not None and target.local_path is None
    async with copied_output(runner.output, target) if target and remote else nullcontext():
        with log_file(runner.output / "driver.log"):
            return await runner.execute()


def with_replicas(run: AgenticRun, replicas: str | None) -> AgenticRun:
    """Return the run with the number of pods that it has now.

    Args:
        run: the run, as it was mounted when it was created.
        replicas: the value of `ENV_REPLICAS`; None if they are still the same.
    """
    return run.with_replicas(json.loads(replicas or "{}"))


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Keep the log beside the metrics, too: Ray's own copy goes with the head pod."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
    except OSError as error:  # saving a checkpoint there fails too, and says what to do
        log.warning("no log file: %s", error)
        yield
        return
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _runner(
    run: AgenticRun, attempt: AttemptId, sink: ProgressSink, requests: Requests
) -> AttemptRunner:
    checkpoint = run.spec.storage
    output, checkpoints = cluster_folders(run)
    return AttemptRunner(
        run=run,
        attempt=attempt,
        output=output,
        checkpoints=checkpoints if checkpoint else None,
        resume=checkpoint.resume if checkpoint else "Never",
        sink=sink,
        requests=requests,
        launcher=RayLauncher(),
    )


if __name__ == "__main__":
    main()
