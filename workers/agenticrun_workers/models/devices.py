"""Devices of models. No other module asks whether there is a GPU.

The spec decides. An actor computes on the GPUs that its launcher has reserved for it
(`roles.<role>.gpus`), on the CPU if there are none, and it fails if it does not see them. Ray hides
all other GPUs from it (`names.RAY_ENV`).

torch is imported inside functions: actors whose models live in other processes do without it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenticrun_api.names import ENV_SIMULATED_GPUS
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.placement import node_name, pod_name
from agenticrun_workers.tracing import recording, span

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_claimed: ContextVar[torch.device | None] = ContextVar("device", default=None)
"""The device of the calling actor. Actors may share a process, and each has a context."""

DRIVER_SECONDS = 120.0
"""Longest wait for NVIDIA's driver. Without its persistence mode it initialises the GPUs first."""

AMD_DRIVER = Path("/dev/kfd")

COUNT_GPUS = """
import ctypes, sys
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(str(error))
count, text = ctypes.c_int(0), ctypes.c_char_p()
status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if status:
    driver.cuGetErrorString(status, ctypes.byref(text))
    sys.exit(f"error {status} of the driver: {(text.value or b'unknown').decode()}")
print(count.value)
"""
"""Program that prints the number of GPUs that NVIDIA's driver shows, or fails with the reason."""


class MissingGpus(Exception):
    """An actor does not see the GPUs that are reserved for it. Another node may have them.

    Without this error it would compute on CPUs, many times slower.
    """


def claim_device(owner: str, gpus: Sequence[str]) -> torch.device:
    """Choose the device of the calling actor, which `compute_device` returns from now on.

    Args:
        owner: role and name of the actor, for messages.
        gpus: ids of the GPUs that are reserved for it. It computes on the first one.

    Raises:
        InvalidConfig: GPUs are reserved, and this torch is built for CPUs.
        MissingGpus: the driver or the libraries of this node hide them.
    """
    import torch

    device = torch.device("cpu")
    if _are_real(owner, gpus):
        visible = visible_gpus()
        if visible < len(gpus):
            raise _missing_in_torch(owner, gpus, visible)
        # Ray shows an actor only its own. Actors that share a process see those of all.
        shared = visible > len(gpus) and gpus[0].isdecimal()
        device = torch.device("cuda", int(gpus[0]) if shared else 0)
        torch.cuda.set_device(device)
    _claimed.set(device)
    return device


def set_deterministic(wanted: bool) -> None:
    """Let this process compute the same bits each time, or stop doing so.

    cuBLAS repeats its sums only with workspaces of a fixed size, which it reads from the
    environment; without them torch refuses every matrix product on a GPU.
    """
    import torch

    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def compute_device() -> torch.device:
    """Return the device that the calling actor has claimed, else the CPU."""
    import torch

    return _claimed.get() or torch.device("cpu")


def gpus_of_children(owner: str, gpus: Sequence[str]) -> int:
    """Return the number of GPUs that child processes of the calling actor compute on.

    Args:
        owner: role and name of the actor, for messages.
        gpus: ids of the GPUs that are reserved for it. 0 is returned if they are simulated.

    Raises:
        MissingGpus: the driver of this node does not show them.
    """
    if not _are_real(owner, gpus):
        return 0
    if AMD_DRIVER.exists():
        return len(gpus)
    visible, cause = driver_gpus()
    if visible < len(gpus):
        found = _found(owner, gpus, "NVIDIA's driver shows", visible)
        raise MissingGpus(f"{found} ({cause or 'it shows fewer'}): {CHECK}, {OR_CPUS}")
    return len(gpus)


def visible_gpus() -> int:
    """Return the number of GPUs that torch sees in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def driver_gpus() -> tuple[int, str]:
    """Return the number of GPUs that NVIDIA's driver shows to a child process, and why not more."""
    command = [sys.executable, "-I", "-S", "-c", COUNT_GPUS]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DRIVER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0, f"the driver has not answered for {DRIVER_SECONDS:.0f} s"
    if done.returncode:
        return 0, (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return int(done.stdout), ""


CHECK = "check the driver of the node, CUDA_VISIBLE_DEVICES and LD_LIBRARY_PATH"
OR_CPUS = "or set gpus of the role to 0 for a small model"


def _are_real(owner: str, gpus: Sequence[str]) -> bool:
    if gpus and os.environ.get(ENV_SIMULATED_GPUS):
        log.warning("the GPUs of %s are simulated: it computes on CPUs", owner)
        return False
    return bool(gpus)


def _found(owner: str, gpus: Sequence[str], subject: str, visible: int) -> str:
    """Return the sentence that names the actor, its pod, its node and the GPUs."""
    node = f" on node {node_name()}" if node_name() else ""
    reserved = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} reserved"
    return f"{owner} in pod {pod_name()}{node} has {reserved}, and {subject} {visible or 'none'}"


def _missing_in_torch(owner: str, gpus: Sequence[str], visible: int) -> InvalidConfig | MissingGpus:
    import torch

    found = _found(owner, gpus, "torch sees", visible)
    if torch.version.cuda is None and torch.version.hip is None:
        advice = f"because it is built for CPUs: take an image with a torch for GPUs, {OR_CPUS}"
        return InvalidConfig("spec.image", f"{found}, {advice}")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        cause = "it sees fewer"
    except Exception as error:  # of any type
        cause = str(error).strip().split("\n")[0].rstrip(".")
    return MissingGpus(f"{found} ({cause}): {CHECK}, {OR_CPUS}")


def collective_backends(device: torch.device) -> str:
    """Return the `backend` of `torch.distributed.init_process_group` for tensors on `device`.

    NCCL carries tensors on GPUs, gloo those in host memory.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


class HostCopies:
    """Copies of the device's tensors in host memory, which is allocated once and page-locked.

    So no later offload allocates, and transfers have the speed of the bus. Tensors that are in host
    memory beside a GPU are not copied. A CPU's are, so that tests see the same as on a GPU.
    """

    def __init__(self) -> None:
        self._source = compute_device().type
        self._held: dict[int, torch.Tensor] = {}

    def filling(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that copies a tensor.

        Its n-th copy has the memory of the n-th copy of the time before.
        """
        places = count()

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            import torch

            if tensor.device.type != self._source:
                return tensor
            place = next(places)
            held = self._held.get(place)
            if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                pinned = tensor.is_cuda
                held = self._held[place] = torch.empty_like(
                    tensor, device="cpu", pin_memory=pinned, requires_grad=False
                )
            # `Module._apply` swaps the contents of parameter and copy, so it gets an alias.
            alias = held.detach()
            alias.copy_(tensor)
            return alias

        return copy


@contextmanager
def device_span(name: str, **args: Any) -> Iterator[None]:
    """Record the `with` block, until the GPU has done its work, as `tracing.span` does.

    Without a trace nothing waits for the GPU.
    """
    with span(name, **args):
        yield
        if recording() and compute_device().type == "cuda":
            import torch

            torch.cuda.synchronize()
