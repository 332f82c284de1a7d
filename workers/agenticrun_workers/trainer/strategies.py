"""Building of the models that a rank trains or scores with, from the run's spec.

Megatron-Core and DeepSpeed are imported only by runs that train with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from agenticrun_api import Pipeline
from agenticrun_api.training import ActorTrain, Critic
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.devices import compute_device
from agenticrun_workers.models.folder import ModelLoadError
from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.models.lora import LoraSpec, UnknownTarget, add_lora
from agenticrun_workers.models.pretrained import ModelLoader, count_parameters
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.pod_memory import PodMemory, machine_bytes
from agenticrun_workers.seeds import derive
from agenticrun_workers.trainer.config_translation import loss_temperature, optimizer_spec
from agenticrun_workers.trainer.critic import CriticTrainer
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.ranks import ranks_of_this_host
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.sharded_module import FsdpOptions

STRATEGY = "spec.pipeline.actorTrain.strategy.name"
OPTIONS = "spec.pipeline.actorTrain.strategy.config"


def build_strategy(pipeline: Pipeline, source: ModelSource) -> PolicyTrainer:
    """Build the policy's trainer of this rank.

    Raises:
        InvalidConfig: names the field that cannot work.
    """
    spec = pipeline.actor_train.strategy
    optimizer = optimizer_spec(pipeline, pipeline.actor_train.training)
    dtype: torch.dtype = getattr(torch, source.dtype)
    arguments = {"temperature": loss_temperature(pipeline), **_batches(pipeline.actor_train)}
    with _refusing("spec.model.path", OPTIONS):
        if spec.name == "megatron":
            from agenticrun_workers.trainer.megatron.strategy import megatron_policy

            # Its attention takes a mask of packed rows, with which no fast kernel computes.
            arguments["packing"] = bool(pipeline.actor_train.training.sequence_packing)
            with source.folder() as path:
                return megatron_policy(
                    path,
                    dtype,
                    optimizer,
                    config=spec.config,
                    trust_remote_code=source.trust_remote_code,
                    **arguments,
                )
        load_policy = _policy_loader(pipeline, source)
        if spec.name == "deepspeed":
            _require_room(source)
            from agenticrun_workers.trainer.deepspeed.strategy import deepspeed_policy

            return deepspeed_policy(
                load_policy, optimizer, config=spec.config, dtype=dtype, **arguments
            )
        return fsdp2_policy(
            load_policy, optimizer, dtype=dtype, options=FsdpOptions.parse(spec.config), **arguments
        )


def build_policy_to_export(pipeline: Pipeline, source: ModelSource) -> PolicyTrainer:
    """Build the policy in a single process, for any strategy that trained it.

    This works because all strategies share one checkpoint format.

    Raises:
        InvalidConfig: names the field that cannot work.
    """
    optimizer = optimizer_spec(pipeline, pipeline.actor_train.training)
    with _refusing("spec.model.path", OPTIONS):
        return fsdp2_policy(
            _policy_loader(pipeline, source), optimizer, dtype=getattr(torch, source.dtype)
        )


def build_reference(pipeline: Pipeline, source: ModelSource, *, shared: bool) -> ReferencePolicy:
    """Build the reference of this rank.

    Args:
        shared: it lives on the policy's ranks.

    Raises:
        InvalidConfig: names the field that cannot work.
    """
    arguments = {"temperature": loss_temperature(pipeline), **_batches(pipeline.actor_train)}
    named = pipeline.reference is not None and pipeline.reference.path is not None
    with _refusing("spec.pipeline.reference.path" if named else "spec.model.path", OPTIONS):
        return ReferencePolicy(ModelLoader(source), options=_options(pipeline, shared), **arguments)


def build_critic(pipeline: Pipeline, source: ModelSource, *, shared: bool) -> CriticTrainer:
    """Build the critic of this rank.

    Args:
        shared: it lives on the policy's ranks.

    Raises:
        InvalidConfig: names the field that cannot work.
    """
    assert pipeline.critic is not None, "gae has a critic"
    optimizer = optimizer_spec(pipeline, pipeline.critic.training)
    named = pipeline.critic.path is not None
    with _refusing("spec.pipeline.critic.path" if named else "spec.model.path", OPTIONS):
        return CriticTrainer(
            ModelLoader(source, _masters(source), output_layer=False),
            optimizer,
            dtype=getattr(torch, source.dtype),
            options=_options(pipeline, shared),
            **_batches(pipeline.critic),
        )


def _options(pipeline: Pipeline, shared: bool) -> FsdpOptions:
    """Return the sharding of reference and critic: that of an fsdp2 policy.

    On pods of their own there is no sequence parallelism: each rank has its own share of a batch.
    """
    spec = pipeline.actor_train.strategy
    if spec.name != "fsdp2":
        return FsdpOptions()
    options = FsdpOptions.parse(spec.config)
    return options if shared else options.on_other_ranks()


def _policy_loader(pipeline: Pipeline, source: ModelSource) -> ModelLoader:
    """Return a loader of the policy: dtype of the master weights, with adapters if it has LoRA.

    The frozen base of adapters has the dtype of the computation, as a reference has; DeepSpeed
    needs one dtype for all.
    """
    lora = pipeline.actor_train.lora
    if lora is None:
        return ModelLoader(source, _masters(source))
    spec = LoraSpec(rank=lora.rank, alpha=lora.alpha, target_modules=tuple(lora.target_modules))
    deepspeed = pipeline.actor_train.strategy.name == "deepspeed"
    return ModelLoader(
        source,
        _masters(source) if deepspeed else None,
        adapt=partial(add_lora, spec=spec, seed=derive(pipeline.seed, "lora")),
    )


def _masters(source: ModelSource) -> torch.dtype:
    """Return the dtype of the master weights: float32, or float64 for a float64 model."""
    dtype: torch.dtype = getattr(torch, source.dtype)
    return torch.promote_types(dtype, torch.float32)


def _require_room(source: ModelSource) -> None:
    """Check that the ranks of this machine can each load the whole model in float32.

    Raises:
        InvalidConfig: they cannot, with the arithmetic.
    """
    with source.folder() as path:
        count = count_parameters(path, trust_remote_code=source.trust_remote_code)
    needed = 4 * count
    of_one = f"{count / 1e9:.3g} billion parameters x 4 bytes = {needed / 1e9:.3g} GB"
    remedy = "use the strategy fsdp2, whose ranks each load a shard"
    device = compute_device()
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
        if needed > room:
            raise InvalidConfig(
                STRATEGY,
                f"with deepspeed each GPU loads the whole model: {of_one}, and it has "
                f"{room / 1e9:.3g} GB: {remedy}",
            )
    together = ranks_of_this_host()
    room = PodMemory().limit() or machine_bytes()
    if together * needed > room:
        raise InvalidConfig(
            STRATEGY,
            f"with deepspeed each rank loads the whole model: {of_one}, for {together} ranks here "
            f"{together * needed / 1e9:.3g} GB, and their memory is {room / 1e9:.3g} GB: {remedy}, "
            "or raise roles.trainer.memory",
        )


@contextmanager
def _refusing(model: str, options: str) -> Iterator[None]:
    """Turn errors of a model or of strategy options into `InvalidConfig` of their fields."""
    try:
        yield
    except (ModelLoadError, UnsupportedModel) as error:
        raise InvalidConfig(model, str(error)) from error
    except UnknownTarget as error:
        raise InvalidConfig("spec.pipeline.actorTrain.lora.targetModules", str(error)) from error
    except ValueError as error:
        raise InvalidConfig(options, str(error)) from error


def _batches(trained: ActorTrain | Critic) -> dict[str, Any]:
    training, on_gpus = trained.training, compute_device().type == "cuda"
    packing = training.sequence_packing
    return {
        "max_tokens": training.micro_batch_tokens(on_gpus=on_gpus),
        "packing": on_gpus if packing is None else packing,
    }
