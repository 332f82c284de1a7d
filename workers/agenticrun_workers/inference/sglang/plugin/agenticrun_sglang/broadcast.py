"""The server's end of a trainer's broadcast. It replaces SGLang's own group.

SGLang joins a group of torch.distributed's world. The other end would have to register it under the
same name and in the same order. Ours is a bare process group that needs only a store, as in
`agenticrun_workers.weights.collective`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
"""torch's type stubs lack the process groups."""

PREFIX = "agenticrun-weights"
TIMEOUT = timedelta(seconds=120)
"""For the rendezvous and for each tensor. Prefix and timeout are those of the trainer's end."""


def join(
    updater: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    *_: str,
) -> tuple[bool, str]:
    """Replace `WeightUpdater.init_weights_update_group`: NCCL on GPUs, gloo on CPUs."""
    rank, device = rank_offset + updater.tp_rank, torch.device(updater.device)
    try:
        store = dist.PrefixStore(
            PREFIX, dist.TCPStore(master_address, master_port, world_size, False, TIMEOUT)
        )
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
    except RuntimeError as error:
        return False, f"could not reach the trainer at {master_address}:{master_port}: {error}"
    updater._model_update_group[group_name] = group
    return True, "joined"


def receive(
    updater: Any,
    *,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    group_name: str,
    **_: Any,
) -> list[tuple[str, torch.Tensor]]:
    """Replace `WeightUpdater.receive_weights_from_distributed`.

    Return the parameters that the trainer sends in this order.
    """
    group, received = updater._model_update_group[group_name], []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=updater.device)
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        received.append((name, tensor))
    return received
