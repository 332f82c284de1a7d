"""The policy in DeepSpeed's ZeRO 1 to 3, with offload to host memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from agenticrun_workers.models.devices import HostCopies, compute_device, device_span
from agenticrun_workers.models.lora import Adapters, describe_lora, whole_weights
from agenticrun_workers.models.stored_names import stored_weights
from agenticrun_workers.trainer.checkpoint import (
    HostBuffers,
    ModuleState,
    Snapshot,
    architecture_of,
    load_state,
)
from agenticrun_workers.trainer.deepspeed.options import DeepSpeedOptions
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.optimizer import OptimizerSpec, StepCounts
from agenticrun_workers.trainer.policy_trainer import PartLoss, PolicyTrainer
from agenticrun_workers.trainer.ranks import join_alone
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import FsdpOptions, ShardedModule
from agenticrun_workers.types import FloatArray

if compute_device().type == "cpu":
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # read at import; without it DeepSpeed guesses, and warns
    os.environ.setdefault(
        "LOCAL_SIZE", "1"
    )  # else DeepSpeed runs a program to list NUMA nodes at each reduction

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""A faster all-reduce between CPUs of one machine.

It is off: DeepSpeed compiles it at its first use, and the images have no compiler.
"""

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state of a parameter."""


class ZeroEngine(StepCounts):
    """Optimizer of a policy with ZeRO, which also counts its steps. All methods are collective.

    Gradients are sums over ranks and micro-batches. DeepSpeed takes the mean over ranks, so losses
    are multiplied by the number of ranks.

    Args:
        module: on this rank's device, the same on all ranks; from here on ZeRO owns it.
        spec: learning rate, schedule, clipping. DeepSpeed clips as `torch.nn.utils.clip_grad_norm_`
            does, and changes nothing if the norm is not finite.
        config: DeepSpeed's.
    """

    def __init__(
        self, module: PolicyModule, spec: OptimizerSpec, config: Mapping[str, Any]
    ) -> None:
        super().__init__(spec)
        self.module = module
        self.stage: int = config["zero_optimization"]["stage"]
        device = next(module.parameters()).device
        os.environ["LOCAL_RANK"] = str(
            device.index or 0
        )  # DeepSpeed's name for the number of the device
        self.adam = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
        )
        rounded = (
            {id(p): p.detach().to("cpu", copy=True) for _, p in self.trained()}
            if config["bf16"]["enabled"]
            else {}
        )
        self._engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=self.adam, config=dict(config)
        )
        self._engine.eval()
        if self.stage == 3:  # read by the scoring, not by the forward pass of its own layer
            deepspeed.zero.register_external_parameter(
                module, module.model.get_output_embeddings().weight
            )
        self._start_adam()
        if rounded:  # DeepSpeed makes masters from what it computes with
            for _, parameter in self.trained():
                self.set_master(parameter, rounded.pop(id(parameter)))
            self.masters_set()

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Run the module's forward pass; a backward pass can follow."""
        logprobs_N, entropies_N = self._engine(batch, temperature)
        return logprobs_N, entropies_N

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one micro-batch.

        Args:
            loss: of the micro-batch.
            last: it is the last micro-batch of this step.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * dist.get_world_size())

    def step(self, rate: float, *, scheduled: bool = True) -> float:
        """Take an optimizer step and return the norm, as `Strategy.optimizer_step` does."""
        first_broken = self._first_broken() if self.skip_budget_exhausted else None
        for group in self.adam.param_groups:
            group["lr"] = rate
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        self.record_step(norm, scheduled=scheduled, first_broken=first_broken)
        return norm

    def reset_adam(self) -> None:
        """Set AdamW's moments and number of steps to zero, in place: ZeRO holds views of them."""
        for flat in self._flat_masters():
            for value in self.adam.state[flat].values():
                value.zero_()

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that the optimizer has, each once."""
        return (
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradients so far, by parameter name, and clear them."""
        found = {name: safe_get_full_grad(parameter).clone() for name, parameter in self.trained()}
        for (
            _,
            parameter,
        ) in self.trained():  # DeepSpeed drops gradients only in a step, so force it to skip one
            if self.stage == 3:
                safe_set_local_grad(parameter, torch.full_like(parameter.ds_tensor, torch.nan))  # type: ignore[attr-defined]  # DeepSpeed's
            else:
                safe_set_full_grad(
                    parameter, torch.full_like(parameter, torch.nan, dtype=torch.float32)
                )
        self._engine.step()
        assert not self._engine.was_step_applied(), (
            "DeepSpeed took a step with gradients that are not finite"
        )
        return found

    @property
    def adam_steps(self) -> float:
        """Number of steps in AdamW's bias correction."""
        return float(self.adam.state[self._flat_masters()[0]]["step"])

    def set_adam_steps(self, steps: float) -> None:
        for flat in self._flat_masters():
            self.adam.state[flat]["step"].fill_(steps)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's whole float32 value."""
        value: Tensor = safe_get_full_fp32_param(parameter)
        return value

    def moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return one of `MOMENTS` of a parameter, whole."""
        value: Tensor = safe_get_full_optimizer_state(parameter, name)
        return value

    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the float32 value of a parameter, and the value that the model computes with.

        Args:
            parameter: the same on every rank.
            value: float32, whole.
        """
        value = value.to(parameter.device)
        if self.stage == 3:
            safe_set_local_fp32_param(parameter, _part(parameter, value))
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
        else:
            safe_set_full_fp32_param(parameter, value)

    def set_moment(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        value = value.to(parameter.device)
        if self.stage == 3:
            safe_set_local_optimizer_state(parameter, _part(parameter, value), name)
        else:
            safe_set_full_optimizer_state(parameter, value, name)

    def masters_set(self) -> None:
        """Copy the masters to the values that the model computes with.

        Call it after `set_master` of all parameters.
        """
        if self.stage < 3:
            self.optimizer.update_lp_params()

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole value that the model computes with, from all ranks' shards."""
        if self.stage < 3:
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Move AdamW's moments, and the masters if they are separate tensors.

        The weights stay. DeepSpeed's own `offload_states` requires its fused AdamW, and leaves no
        weights to export.
        """
        for flat in self._flat_masters():
            if self.stage < 3 or all(
                flat is not computed for computed in self.optimizer.fp16_partitioned_groups_flat
            ):
                flat.data = moved(flat.data)
            state = self.adam.state[flat]
            state.update({name: moved(state[name]) for name in MOMENTS})
        if self.stage < 3:  # link DeepSpeed's parameters to the moved tensors
            self.optimizer._link_all_hp_params()
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _first_broken(self) -> str:
        """Return the first parameter with a gradient that is not finite on any rank."""
        broken = [
            name
            for name, parameter in self.trained()
            if not safe_get_full_grad(parameter).isfinite().all()
        ]
        return broken[0] if broken else "their joint norm"

    def _flat_masters(self) -> list[Tensor]:
        """Return this rank's float32 weights as the optimizer holds them."""
        if self.stage == 3:
            flat: list[Tensor] = self.optimizer.fp32_partitioned_groups_flat
            return flat
        return [flat for group in self.adam.param_groups for flat in group["params"]]

    def _start_adam(self) -> None:
        """Give AdamW the state that its first step would create.

        A checkpoint can then be written or read before that step.
        """
        for flat in self._flat_masters():
            zeros = {name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS}
            self.adam.state[flat] = {"step": torch.zeros(()), **zeros}
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()


def state_of(engine: ZeroEngine, buffers: HostBuffers) -> ModuleState:
    """Return a copy of the state in `buffers`; each rank holds its rows. Collective."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = {id(parameter): name for name, parameter in engine.trained()}
    masters: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in engine.trained():
        masters[name] = _sharded(engine.master(parameter), mesh, buffers, f"{MASTER}.{name}")
        moments[name] = {
            kind: _sharded(engine.moment(parameter, kind), mesh, buffers, f"{kind}.{name}")
            for kind in MOMENTS
        }
        moments[name]["step"] = torch.tensor(engine.adam_steps)
    model: dict[str, Any] = {}
    for name, value in engine.module.state_dict(
        keep_vars=True
    ).items():  # tied ones under each of their names, and buffers
        if not isinstance(value, nn.Parameter):
            model[name] = buffers.copy(f"buffer.{name}", value)
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


def _rows(whole: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, as `torch.chunk` divides it."""
    size = -(-len(whole) // dist.get_world_size())
    return whole[size * dist.get_rank() :][:size]


def _sharded(whole: Tensor, mesh: DeviceMesh, buffers: HostBuffers, name: str) -> DTensor:
    """Return a copy of this rank's rows of a whole tensor."""
    rows = buffers.copy(name, _rows(whole))
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's part of a whole value, as ZeRO-3 divides it.

    The value is flattened, and the last rank's part is padded with zeros.
    """
    size: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    padded = torch.nn.functional.pad(
        value.flatten(), (0, size * dist.get_world_size() - value.numel())
    )
    return padded[size * dist.get_rank() :][:size]


class DeepSpeedStrategy:
    """Implements `Strategy`. For the arguments see `deepspeed_policy`."""

    def __init__(
        self,
        model: ShardedModule[PolicyModule],
        optimizer: OptimizerSpec,
        options: DeepSpeedOptions,
    ) -> None:
        self.model = model
        self.ranks, self.batcher = model.ranks, model.batcher
        self.steps = ZeroEngine(model.module, optimizer, options.config(optimizer, model.dtype))
        self.adapters = Adapters.of(model.module.model, self.steps.whole, model.ranks.rank)
        self._on_host = options.offloads_optimizer
        self._host_copies = HostCopies()
        self._buffers = HostBuffers()

    def score(self, samples: list[Sample], temperature: float) -> list[FloatArray]:
        return self.model.score(samples, temperature)

    def forward_backward(
        self, batches: list[MicroBatch], temperature: float, loss: PartLoss
    ) -> None:
        self.model.module.router_load.reset()
        for number, batch in enumerate(batches, 1):
            with device_span("forward"):
                part = loss(batch, *self.steps.forward(batch, temperature))
            with device_span("backward"):
                self.steps.backward(part, last=number == len(batches))

    def router_metrics(self) -> dict[str, float]:
        return self.model.module.router_load.metrics(self.ranks)

    def optimizer_step(self, rate: float, *, scheduled: bool = True) -> float:
        return self.steps.step(rate, scheduled=scheduled)

    def reset_optimizer(self) -> None:
        self.steps.reset_adam()

    def gradients(self) -> dict[str, Tensor]:
        return {
            name.removeprefix("model."): gradient
            for name, gradient in self.steps.gradients().items()
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Tied parameters have the name that `named_parameters` gives."""
        model, dtype = self.model.module.model, self.model.dtype
        gathered = whole_weights(model, self.steps.whole)
        weights = stored_weights(model, ((name, weight.to(dtype)) for name, weight in gathered))
        for named in weights:
            if self.ranks.rank == 0:
                yield named

    def hugging_face_model(self) -> PreTrainedModel:
        return self.model.module.model

    def snapshot(self, progress: dict[str, int]) -> Snapshot:
        return Snapshot.of(state_of(self.steps, self._buffers), progress)

    def reserve_snapshot(self) -> Callable[[], None]:
        shapes = {
            name: torch.empty(getattr(each, "ds_shape", each.shape), device="meta")
            for name, each in self.steps.trained()
        }
        rows = {
            f"{kind}.{name}": _rows(whole)
            for name, whole in shapes.items()
            for kind in (MASTER, *MOMENTS)
        }
        return lambda: self._buffers.reserve(rows)

    def load(self, folder: str, progress: dict[str, int]) -> dict[str, int]:
        state = state_of(self.steps, HostBuffers())
        progress = load_state(folder, state, progress)
        restore(self.steps, state)
        return progress

    def offload(self) -> None:
        """Move the optimizer's state to host memory. The weights stay and can be exported."""
        if not self._on_host:
            self.steps.move(self._host_copies.filling())
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if not self._on_host:
            self.steps.move(lambda tensor: tensor.to(self.model.device, copy=True))


def deepspeed_policy(
    load: Callable[[], PreTrainedModel],
    optimizer: OptimizerSpec,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    max_tokens: int = 16_384,
    temperature: float = 1.0,
    packing: bool = False,
) -> PolicyTrainer:
    """Return a policy that trains with DeepSpeed.

    With more than one rank `torch.distributed` must be initialised before.

    Args:
        load: makes the model, the same on every rank.
        optimizer: learning rate, schedule, clipping.
        config: DeepSpeed's own options, see `DeepSpeedOptions`.
        dtype: of the computation and of exported weights: float32 or bfloat16. Optimizer state and
            master weights are float32.
        max_tokens: tokens of one micro-batch, padding included.
        temperature: of the sampling, for `compute_log_probs` and `supervised_step`.
        packing: several sequences in a row, if the model keeps them apart.

    Raises:
        ValueError: an option is wrong, or decided by another field; names it.
    """
    options = DeepSpeedOptions.parse(config or {}, dtype)
    if not dist.is_initialized():
        join_alone(compute_device())
    model = ShardedModule(
        load,
        lambda model: PolicyModule(model, options.logits_chunk_elements),
        max_tokens=max_tokens,
        packing=packing,
        dtype=dtype,
        options=FsdpOptions(gradient_checkpointing=options.gradient_checkpointing),
        sharded=False,
    )
    return PolicyTrainer(DeepSpeedStrategy(model, optimizer, options), temperature)
