"""A ZeRO engine's state as every trainer's checkpoints hold it: readable by any number of ranks, any ZeRO stage, and `TorchPolicy`.

ZeRO cuts the row of all parameters at any element; here each parameter is cut by rows, one whole parameter in memory at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from agenticrun_workers.models.lora import describe_lora
from agenticrun_workers.trainer.checkpoint import ModuleState, architecture_of
from agenticrun_workers.trainer.deepspeed.engine import MOMENTS, ZeroEngine


def state_of(engine: ZeroEngine) -> ModuleState:
    """A copy in host memory, each rank its rows. Collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = {id(parameter): name for name, parameter in engine.trained()}
    masters: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in engine.trained():
        masters[name] = _rows(engine.master(parameter), mesh)
        moments[name] = {kind: _rows(engine.moment(parameter, kind), mesh) for kind in MOMENTS}
        moments[name]["step"] = torch.tensor(engine.adam_steps)
    model: dict[str, Any] = {}
    for name, value in engine.module.state_dict(
        keep_vars=True
    ).items():  # tied ones under each of their names, and buffers
        if not isinstance(value, nn.Parameter):
            model[name] = value.cpu()
        elif id(value) in names:
            model[name] = masters[names[id(value)]]
    group = {name: value for name, value in engine.adam.param_groups[0].items() if name != "params"}
    optimizer = {"state": moments, "param_groups": [{**group, "params": list(masters)}]}
    parameters = sum(
        getattr(parameter, "ds_numel", parameter.numel())
        for parameter in engine.module.parameters()
    )
    return ModuleState(
        architecture_of(engine.module), parameters, describe_lora(engine.module), model, optimizer
    )


def restore(engine: ZeroEngine, state: ModuleState) -> None:
    """Take over a state that has been read. Collective."""
    for name, parameter in engine.trained():
        engine.set_master(parameter, state.model[name].full_tensor())
        for kind in MOMENTS:
            engine.set_moment(parameter, kind, state.optimizer["state"][name][kind].full_tensor())
    engine.masters_set()
    engine.set_adam_steps(
        max(float(moments["step"]) for moments in state.optimizer["state"].values())
    )


def _rows(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a whole tensor, as `torch.chunk` cuts it."""
    size = -(-len(whole) // mesh.size())
    rows = whole[size * mesh.get_local_rank() :][:size].to("cpu", copy=True)
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
