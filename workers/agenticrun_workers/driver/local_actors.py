"""The actors of a run on this machine: on an embedded Ray, which has every role, or as threads."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import RAY_ENV
from agenticrun_workers.errors import CannotStart, InvalidConfig
from agenticrun_workers.inference.actor import LOG_FOLDER
from agenticrun_workers.launch import Launcher
from agenticrun_workers.launch.in_process import InProcessLauncher
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.processes import children, end_families, families
from agenticrun_workers.reporting.run_folder import RunFolder

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 * 1024 * 1024
"""Fits the weights of the small models that train on one machine; the rest spills to disk."""

START_TRIES = 3
"""Ray gives up if it is not up after half a minute, which happens on busy machines."""

PATIENCE_SECONDS = 15.0
"""Time for Ray's leftover processes to end by themselves.

More than the supervisor of an engine's server needs to clean up.
"""

DEBUGGER_SECONDS = 86_400.0
"""Time limit of a call of an environment in which a debugger may stop: the longest one."""

KILL_SECONDS = 10.0
"""Time for killed processes to disappear, unless a disk hangs."""


class RayNotStarted(CannotStart):
    """This machine is too busy for Ray."""


@contextmanager
def embedded_ray(run: AgenticRun, logs: Path | None = None) -> Iterator[Launcher]:
    """Start a Ray of our own, with one node that has all roles.

    All processes and files of it are gone when the context ends.

    Args:
        logs: folder that keeps the logs of engines; the folder above it keeps those of actors.
            None deletes them too.

    Raises:
        CannotStart: this machine is too busy.
    """
    resources = {
        role.value: float(run.spec.actors(role))
        for role in {*run.spec.roles.workers, Role.INFERENCE}
    }
    # Before Ray is started: its daemons inherit them.
    for name, value in RAY_ENV.items():
        os.environ.setdefault(name, value)
    scratch = Path(
        tempfile.mkdtemp(prefix=f"arun-{os.getpid()}-", dir="/tmp")
    )  # paths of sockets must be short
    os.environ[LOG_FOLDER] = str((logs or scratch).absolute())
    # A notebook may have children of its own, which stay.
    others = children(os.getpid())
    ours: set[psutil.Process] = set()
    try:
        # Each try starts daemons, and one that failed leaves some behind.
        for tries_left in reversed(range(START_TRIES)):
            try:
                _start_ray(resources, scratch)
                break
            except RayNotStarted:
                if not tries_left:
                    raise
                log.warning("Ray did not start in half a minute: it gets another try")
                _end_ray(families(children(os.getpid()) - others))
            finally:
                ours = families(children(os.getpid()) - others)
        if logs is not None:
            RunFolder(logs.parent).link_actor_logs(scratch / "session_latest" / "logs")
        # The logs are linked before the first actor writes to them.
        yield RayLauncher()
    finally:
        _end_ray(families(ours))  # while their parents live: orphans have another parent
        if logs is not None:
            RunFolder(logs.parent).keep_actor_logs()
        shutil.rmtree(scratch, ignore_errors=True)


def _start_ray(resources: Mapping[str, float], scratch: Path) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=1,
            resources=dict(resources),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(scratch),
        )
    except Exception as error:
        # Ray has no type of its own for this.
        if "timed out during startup" not in str(error):
            raise
        raise RayNotStarted(
            "Ray did not start in half a minute: this machine is too busy. Try again when it has "
            "less to do, or train with agenticrun run --in-process, which needs no Ray"
        ) from error


def _end_ray(processes: Set[psutil.Process]) -> None:
    """Disconnect, and end these processes.

    Ray kills its daemon after a second; what the daemon has not ended by then would live on for a
    minute.
    """
    ray.shutdown()
    if left := end_families(processes, PATIENCE_SECONDS, KILL_SECONDS):
        pids = sorted(process.pid for process in left)
        log.warning("processes of Ray that cannot be killed: %s", pids)


def in_one_process(run: AgenticRun, pods: Collection[Role]) -> AgenticRun:
    """Prepare this process for all actors of a run, and return the run as it runs here.

    Args:
        pods: roles of its pods.

    Raises:
        InvalidConfig: the run cannot be run in one process, or asks for more GPUs than torch sees.
    """
    # torch takes seconds to import, and only this mode needs it here.
    from agenticrun_workers.models.devices import set_deterministic, visible_gpus

    check_in_process(run)
    check_gpus(run, pods, visible_gpus(), "torch sees")
    # Before any actor computes: cuBLAS reads its settings at the first product of a process.
    if run.spec.pipeline.deterministic:
        set_deterministic(True)
    return with_patience(run)


def gpus_here() -> int:
    """Return the number of GPUs that Ray has found on this machine."""
    return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]


def check_gpus(
    run: AgenticRun,
    pods: Collection[Role],
    available: int,
    found_by: str = "this machine has",
) -> None:
    """Raise `InvalidConfig` if pods ask for more GPUs than there are.

    Ray would wait for them, and a process without them would train on its CPUs.

    Args:
        pods: roles of the pods that are needed.
        available: number of GPUs of this machine.
        found_by: subject and verb of the sentence that ends with this number.
    """
    roles = run.spec.roles
    asked = {role.value: roles.total_gpus(role) for role in sorted(pods) if roles.total_gpus(role)}
    if sum(asked.values()) <= available:
        return
    # All roles at once: with one alone, the user would get the next refusal.
    on_cpus = " ".join(f"--set roles.{role}.gpus=0" for role in asked)
    raise InvalidConfig(
        f"spec.roles.{next(iter(asked))}.gpus",
        f"the run asks for {sum(asked.values())} GPUs "
        f"({', '.join(f'{role} {gpus}' for role, gpus in asked.items())}), and {found_by} "
        f"{available}: use a cluster or machine that has them, or take CPUs for a small model "
        f"with {on_cpus}",
    )


def check_in_process(run: AgenticRun) -> None:
    """Raise `InvalidConfig` if the actors of the run need processes of their own."""
    spec = run.spec
    for role in (Role.TRAINER, Role.REFERENCE, Role.CRITIC):
        if not spec.roles.has(role) or spec.actors(role) == 1:
            continue
        field = "replicas" if spec.roles.replicas(role) > 1 else "gpus"
        path = f"spec.roles.{role.value}.{field}"
        raise InvalidConfig(
            path, f"--in-process runs one {role.value} rank: set {path} to 1{_OR_LEAVE_OUT}"
        )
    # Colocated engines free GPU memory by sleeping, which they cannot do in a shared process.
    if spec.colocated:
        raise InvalidConfig(
            "spec.placement",
            "engines that take turns with trainers need a process of their own: "
            f"set spec.placement to Disaggregated{_OR_LEAVE_OUT}",
        )
    strategy = spec.pipeline.actor_train.strategy.name
    if strategy != "fsdp2":
        raise InvalidConfig(
            "spec.pipeline.actorTrain.strategy.name",
            f"{strategy} needs a process of its own: set it to fsdp2{_OR_LEAVE_OUT}",
        )


_OR_LEAVE_OUT = ", or leave out --in-process"


def with_patience(run: AgenticRun) -> AgenticRun:
    """Return the run without the limits that a debugger in an environment would exceed.

    Environments are in this process too, as `agenticrun debug` has them.
    """
    pipeline = run.spec.pipeline
    # A deterministic run must have no limit: it would depend on the clock.
    limit = None if pipeline.deterministic else DEBUGGER_SECONDS
    envs = [
        env.model_copy(update={"step_timeout_seconds": limit, "isolated": False})
        for env in pipeline.envs
    ]
    changed = pipeline.model_copy(update={"envs": envs})
    return run.model_copy(update={"spec": run.spec.model_copy(update={"pipeline": changed})})


@contextmanager
def threads_of_this_process(logs: Path) -> Iterator[Launcher]:
    """Run actors in this process until the context ends.

    Args:
        logs: folder that keeps the logs of engines.
    """
    before = os.environ.get(LOG_FOLDER)
    os.environ[LOG_FOLDER] = str(logs.absolute())
    import transformers

    # transformers loads its classes on first access. If two threads ask at once, one of them may
    # get "no such class".
    for name in ("PreTrainedModel", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    launcher = InProcessLauncher()
    try:
        yield launcher
    finally:
        launcher.close()
        if before is None:
            del os.environ[LOG_FOLDER]
        else:
            os.environ[LOG_FOLDER] = before
