"""Devices of models. No other module asks whether there is a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agenticrun_api.names import ENV_SIMULATED_GPUS
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.tracing import recording, span

log = logging.getLogger(__name__)


class MissingGpus(Exception):
    """GPUs are reserved for this process, and torch does not see them. Another node may have them.

    Without this error the process would compute on its CPUs, many times slower.
    """


def visible_gpus() -> int:
    """Return the number of GPUs that torch sees in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def require_gpus(reserved: int) -> None:
    """Check that torch sees the GPUs that are reserved for this process.

    Raises:
        InvalidConfig: this torch is built for CPUs.
        MissingGpus: the driver or the libraries of this node hide them.
    """
    visible = visible_gpus()
    if visible >= reserved:
        return
    if os.environ.get(ENV_SIMULATED_GPUS):
        log.warning("the GPUs of this process are simulated: it computes on CPUs")
        return
    problem = (
        f"this process has {reserved} GPU{'s' * (reserved > 1)} reserved, and torch sees "
        f"{visible or 'none'}"
    )
    without = "or set gpus of the role to 0 for a small model"
    if torch.version.cuda is None and torch.version.hip is None:
        raise InvalidConfig(
            "spec.image",
            f"{problem}, because it is built for CPUs: take an image with a torch for GPUs, "
            f"{without}",
        )
    raise MissingGpus(
        f"{problem} ({_cuda_error()}): check the driver of the node, CUDA_VISIBLE_DEVICES and "
        f"LD_LIBRARY_PATH, {without}"
    )


def _cuda_error() -> str:
    """Return the first line of the reason for which torch sees no GPU."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # of any type
        return str(error).strip().split("\n")[0].rstrip(".")
    return "it sees fewer"


def compute_device() -> torch.device:
    """Return this process's GPU, which `claim_device` chose, else the CPU."""
    if visible_gpus():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def claim_device(rank: int) -> torch.device:
    """Choose the device of a rank.

    Ranks that see the same GPUs take them in turn. Under Ray, each rank sees only its own.
    """
    if gpus := visible_gpus():
        torch.cuda.set_device(rank % gpus)
    return compute_device()


def collective_backends(device: torch.device) -> str:
    """Return the `backend` of `torch.distributed.init_process_group` for tensors on `device`.

    NCCL carries tensors on GPUs, gloo those in host memory.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def device_span(name: str, **args: Any) -> Iterator[None]:
    """Record the `with` block, until the GPU has done its work, as `tracing.span` does.

    Without a trace nothing waits for the GPU.
    """
    with span(name, **args):
        yield
        if recording() and torch.cuda.is_available():
            torch.cuda.synchronize()
