"""Checks of this machine, for runs of any kind and for one run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from agenticrun_api import AgenticRun, Role
from agenticrun_api.quantities import quantity
from agenticrun_workers.cli.local_code import PackagingError, find_local_code
from agenticrun_workers.cli.plan import plan_finding
from agenticrun_workers.findings import Finding, failed, ok, warning
from agenticrun_workers.models.folder import (
    ModelLoadError,
    check_config,
    check_folder,
    check_weights,
)
from agenticrun_workers.reporting.run_folder import gpus

SHM_GIB = 1.0
"""/dev/shm that a tiny run on one machine needs; docs/gpus.md says how much others do."""
DISK_GIB = 5.0
IMPORT_SECONDS = 120.0
HUB_SECONDS = 10.0


def machine_findings() -> dict[str, Finding]:
    """Return the findings about this machine, by name."""
    found = f"{platform.python_version()}, {len(os.sched_getaffinity(0))} CPUs"
    return {
        "Python": (
            failed(f"{found} on {sys.platform}", "agenticrun run needs Linux")
            if sys.platform != "linux"
            else ok(found)
        ),
        "PyTorch": _torch(gpus()),
        "engines": _engines(),
        "/dev/shm": space(Path("/dev/shm"), SHM_GIB, "weights on their way to engines", SHM_ADVICE),
        "disk": space(
            Path(), DISK_GIB, "checkpoints in this folder", "free some space, or use --output"
        ),
    }


SHM_ADVICE = (
    "mount a larger one (docker run --shm-size=8g, mount -o remount,size=8g /dev/shm), or set "
    "pipeline.weightSync.transport to ObjectStore"
)


def _torch(cards: list[str]) -> Finding:
    """Import PyTorch as a run does, in a process of its own: a broken one may crash."""
    program = "import torch; print(torch.__version__, torch.cuda.device_count())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed(f"not imported in {IMPORT_SECONDS:.0f} s", "look at the disk and the memory")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return failed(
            f"cannot be imported: {last}", "make setup, or pip install agenticrun[workers]"
        )
    version, count = done.stdout.split()[-2:]
    if cards and count == "0":
        return warning(
            f"{version} sees no GPU; nvidia-smi sees {len(cards)}: {cards[0]}",
            "install a PyTorch with CUDA that this driver supports",
        )
    return ok(
        f"{version}, {f'{count} GPUs: {cards[0]}' if cards else 'no GPU: models train on CPUs'}"
    )


def _find_engines(gpus: int = 0) -> dict[str, str]:
    """Return why each engine with an environment of its own cannot be used; "" if it can.

    Args:
        gpus: number of GPUs that it is to compute on.
    """
    from agenticrun_workers.inference.engine import EngineStartError
    from agenticrun_workers.inference.server_process import find_engine
    from agenticrun_workers.inference.sglang.server import VERSIONS as SGLANG
    from agenticrun_workers.inference.vllm.server import GPU_PACKAGES, PACKAGES
    from agenticrun_workers.inference.vllm.server import VERSIONS as VLLM

    found = {}
    vllm = GPU_PACKAGES if gpus else PACKAGES
    # Each alone: one broken engine says nothing about the other.
    for name, packages, versions in (("sglang", ["sglang"], SGLANG), ("vllm", vllm, VLLM)):
        try:
            find_engine(name, packages, versions, gpus)
            found[name] = ""
        except EngineStartError as error:
            found[name] = str(error)
    return found


def _engines() -> Finding:
    engines = _find_engines()
    usable = [name for name, why in engines.items() if not why]
    missing = [name for name, why in engines.items() if "does not exist" in why]
    broken = [why for name, why in engines.items() if why and name not in missing]
    shown = ", ".join(["transformers", *usable])
    if broken:
        return failed(shown, "; ".join(broken))
    if missing:
        return ok(f"{shown}; not {' and '.join(missing)}: `make engines`, or an image with them")
    return ok(shown)


def space(folder: Path, gib: float, purpose: str, advice: str) -> Finding:
    """Return how much space a folder has for a purpose."""
    if not folder.exists():
        return failed(f"{folder} does not exist", advice)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free, for {purpose}"
    return ok(found) if usage.free >= gib * 2**30 else failed(found, advice)


def run_here(run: AgenticRun, folder: Path) -> dict[str, Finding]:
    """Return what this machine lacks for one run, by name.

    Args:
        folder: of the run's file, where `agenticrun run` looks for modules.
    """
    engine, lack = run.spec.pipeline.actor_infer.strategy.name, ""
    if engine != "transformers":
        lack = _find_engines(run.spec.roles.of(run.spec.engine_role).gpus)[engine]
    advice = "or train with --set pipeline.actorInfer.strategy.name=transformers"
    return {
        "memory": memory_suffices(run, psutil.virtual_memory().available),
        "GPUs": gpus_suffice(run, len(gpus())),
        "engine": failed(lack, advice) if lack else ok(engine),
        "model": model_is_reachable(run),
        "code": code_is_here(run, folder),
        "plan": plan_finding(run, pods=False),
    }


def memory_suffices(run: AgenticRun, available: float) -> Finding:
    """Compare what all pods of the run ask for with the free memory of one machine."""
    roles = run.spec.roles
    asked = {
        role: roles.replicas(role) * quantity(roles.of(role).memory)
        for role in (Role.DRIVER, *roles.workers)
    }
    total = sum(asked.values())
    shown = ", ".join(f"{role.value} {size / 2**30:.0f}" for role, size in asked.items())
    found = f"the run asks for {total / 2**30:.0f} GiB ({shown}); {available / 2**30:.0f} are free"
    if total <= available:
        return ok(found)
    # No failure: Python's processes take what they need, and not what pods would get.
    return warning(
        found,
        "spec.roles.*.memory are limits of pods, and no limits here: a small model may fit anyhow; "
        "for a large one take a cluster, or lower roles.env.replicas and the size of the model",
    )


def gpus_suffice(run: AgenticRun, cards: int) -> Finding:
    """Compare the GPUs of a run with those of one machine."""
    roles = run.spec.roles
    pods = {*roles.workers, run.spec.engine_role}
    asked = {role.value: roles.total_gpus(role) for role in sorted(pods)}
    found = f"the run asks for {sum(asked.values())}, this machine has {cards}"
    if sum(asked.values()) <= cards:
        return ok(found)
    on_cpus = " ".join(f"--set roles.{role}.gpus=0" for role, count in asked.items() if count)
    return failed(
        found, f"use a cluster or machine that has them, or take CPUs for a small model: {on_cpus}"
    )


def model_is_reachable(run: AgenticRun) -> Finding:
    """Return whether the models are whole folders here, in the Hub's cache, or on the Hub."""
    path = run.spec.model.path
    if path is None:
        return ok("made by the run (spec.model.initialize)")
    pipeline = run.spec.pipeline
    try:
        for other in (pipeline.reference, pipeline.critic):
            if other is not None and other.path is not None:
                name = os.path.expanduser(other.path)
                check_config(name, trust_remote_code=run.spec.model.trust_remote_code)
                check_weights(name)
        path = os.path.expanduser(path)
        if not Path(path).is_dir():
            return _on_the_hub(path)
        check_folder(path, trust_remote_code=run.spec.model.trust_remote_code)
    except ModelLoadError as error:
        return failed(str(error), "correct the folder, or its path")
    return ok(f"folder {path}")


def _on_the_hub(path: str) -> Finding:
    """Ask for a file: everybody may read about a gated model, but not its files."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
    )

    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return ok(f"{path}, in the cache of this machine")
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=HUB_SECONDS)
    except EntryNotFoundError:
        return failed(
            f"{path} on the Hub has no config.json", "name a model that transformers can load"
        )
    except GatedRepoError:
        return failed(f"{path} is gated", "accept its terms on the Hub, and set HF_TOKEN")
    except HFValidationError:
        return failed(f"{path} is no folder", "correct spec.model.path: a folder, or a Hub name")
    except HfHubHTTPError as error:
        return failed(
            f"{path} is no folder, and the Hub says: {str(error).splitlines()[0]}",
            "correct spec.model.path; for a private model set HF_TOKEN",
        )
    except Exception as error:  # whatever the HTTP library raises without a network
        return failed(
            f"{path} is no folder, and the Hub cannot be reached: {type(error).__name__}",
            "check the network and HTTPS_PROXY, or copy the model into a folder",
        )
    return ok(f"{path}, on the Hub")


def code_is_here(run: AgenticRun, folder: Path) -> Finding:
    """Return whether the modules that a run names are in its folder or installed."""
    try:
        code = find_local_code(run, folder)
    except PackagingError as error:
        return failed(str(error), "put the module beside the file of the run, or install it")
    if code.missing:
        shown = ", ".join(f"{name} ({place})" for name, place in code.missing.items())
        return failed(f"not found: {shown}", "install them in the environment of agenticrun")
    return ok(f"{len(code.files)} files in {folder}" if code.files else "no modules of its own")
