"""Options of the strategy `deepspeed` (`strategy.config`).

They are DeepSpeed's own JSON, without what other fields decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agenticrun_workers.trainer.log_probs import CHUNK_ELEMENTS
from agenticrun_workers.trainer.optimizer import OptimizerSpec

_TRAINING = "spec.pipeline.actorTrain.training"
_MICRO_BATCHES = f"{_TRAINING}.maxTokensPerMicroBatch"
_GLOBAL_SUM = (
    "spec.pipeline.algorithm.lossAggMode (gradients are sums under denominators of the whole step)"
)
_TRACKERS = "spec.trackers"

DECIDED_ELSEWHERE = {
    "train_batch_size": f"{_TRAINING}.miniBatchSize",
    "train_micro_batch_size_per_gpu": _MICRO_BATCHES,
    "gradient_accumulation_steps": _MICRO_BATCHES,
    "managed_gradient_accumulation": _MICRO_BATCHES,
    "optimizer": f"{_TRAINING} (AdamW)",
    "scheduler": f"{_TRAINING}.lrSchedulerType",
    "gradient_clipping": f"{_TRAINING}.maxGradNorm",
    "gradient_allreduce_op": _GLOBAL_SUM,
    "gradient_predivide_factor": _GLOBAL_SUM,
    "prescale_gradients": _GLOBAL_SUM,
    "fp16": "spec.model.dtype",
    "data_types": "spec.model.dtype (gradients are always summed in float32)",
    "torch_autocast": "spec.model.dtype",
    "activation_checkpointing": "the option gradient_checkpointing",
    "checkpoint": "spec.checkpoint",
    "tensorboard": _TRACKERS,
    "wandb": _TRACKERS,
    "comet": _TRACKERS,
    "csv_monitor": _TRACKERS,
}
"""Options of DeepSpeed, and the field that decides each."""

OWN = frozenset({"gradient_checkpointing", "logits_chunk_elements"})
"""Options that are not DeepSpeed's; see `FsdpOptions`."""
PASSED = frozenset(
    {
        "comms_logger",
        "communication_data_type",
        "flops_profiler",
        "memory_breakdown",
        "wall_clock_breakdown",
    }
)
"""Options that DeepSpeed gets unchanged, besides `zero_optimization` and `bf16`."""
ZERO_DECIDED_ELSEWHERE = {
    "compute_grad_norm": f"{_TRAINING}.maxGradNorm",
    "elastic_checkpoint": "spec.checkpoint",
    "load_from_fp32_weights": "spec.checkpoint",
    "gather_16bit_weights_on_model_save": "spec.checkpoint",
    "stage3_gather_16bit_weights_on_model_save": "spec.checkpoint",
}
ZERO_PASSED = frozenset(
    {
        "stage",
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "overlap_comm",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
    }
)
OFFLOADED = ("offload_optimizer", "offload_param")
OFFLOAD_PASSED = frozenset({"device", "pin_memory", "ratio"})
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class DeepSpeedOptions:
    """Checked options of a run for DeepSpeed."""

    passed: Mapping[str, Any]
    """Options for DeepSpeed."""
    stage: int = 3
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer and compute the layer again in the backward pass."""
    logits_chunk_elements: int = CHUNK_ELEMENTS
    """Logits (tokens times vocabulary) that exist at a time."""

    @staticmethod
    def parse(config: Mapping[str, Any], dtype: torch.dtype) -> DeepSpeedOptions:
        """Read `strategy.config`.

        Args:
            config: the options.
            dtype: of the computation.

        Raises:
            ValueError: an option is unknown, wrong, or decided by another field; names it.
        """
        if dtype not in DTYPES:
            raise ValueError(
                "deepspeed computes in float32 or bfloat16: set spec.model.dtype, or train in "
                f"{dtype} with fsdp2"
            )
        _check_names("", config, {"zero_optimization", "bf16", *PASSED, *OWN}, DECIDED_ELSEWHERE)
        # Configurations usually contain it. It may only repeat the model's dtype.
        bf16 = _section("bf16", config.get("bf16", {}))
        _check_names("bf16.", bf16, {"enabled"}, {})
        if bf16 and bf16.get("enabled") is not (dtype is torch.bfloat16):
            raise ValueError(
                "the option bf16.enabled of deepspeed is decided by spec.model.dtype, which is "
                f"{str(dtype).removeprefix('torch.')}"
            )
        zero = {"stage": 3, **_section("zero_optimization", config.get("zero_optimization", {}))}
        _check_zero(zero)
        own = {name: config[name] for name in OWN & config.keys()}
        checkpoints = own.get("gradient_checkpointing", False)
        if type(checkpoints) is not bool:
            raise ValueError(
                f"the option gradient_checkpointing must be true or false, not {checkpoints!r}"
            )
        elements = own.get("logits_chunk_elements", 1)
        if type(elements) is not int or elements < 1:
            raise ValueError(
                "the option logits_chunk_elements must be a whole number of at least 1, not "
                f"{elements!r}"
            )
        passed = {name: config[name] for name in PASSED & config.keys()}
        return DeepSpeedOptions({**passed, "zero_optimization": zero}, zero["stage"], **own)

    @property
    def offloads_optimizer(self) -> bool:
        """True if masters and moments are always in host memory."""
        return bool(
            self.passed["zero_optimization"].get("offload_optimizer", {}).get("device") == "cpu"
        )

    def config(self, optimizer: OptimizerSpec, dtype: torch.dtype) -> dict[str, Any]:
        """Return DeepSpeed's whole configuration.

        For DeepSpeed a step has one micro-batch of one sample: the trainer itself marks the last
        backward pass of a step.
        """
        return {
            "communication_data_type": "fp32",
            **self.passed,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": optimizer.max_grad_norm,
            "bf16": {"enabled": dtype is torch.bfloat16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_force_ds_cpu_optimizer": False,  # its own needs a compiler
        }


def _check_names(
    section: str, given: Mapping[str, Any], known: set[str], elsewhere: Mapping[str, str]
) -> None:
    for name in given:
        if name in elsewhere:
            raise ValueError(
                f"the option {section}{name} of deepspeed is decided by {elsewhere[name]}: "
                "leave it out"
            )
        if name not in known:
            raise ValueError(
                f"the option {section}{name} of deepspeed is unknown or not offered; offered "
                f"are {', '.join(sorted(known))}"
            )


def _section(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"the option {name} of deepspeed must be a mapping, not {value!r}")
    return value


def _check_zero(zero: Mapping[str, Any]) -> None:
    _check_names("zero_optimization.", zero, {*ZERO_PASSED, *OFFLOADED}, ZERO_DECIDED_ELSEWHERE)
    if type(zero["stage"]) is not int or zero["stage"] not in (1, 2, 3):
        raise ValueError(
            f"zero_optimization.stage must be 1, 2 or 3, not {zero['stage']!r}; without ZeRO "
            "use the strategy fsdp2"
        )
    for name in OFFLOADED:
        section = _section(f"zero_optimization.{name}", zero.get(name, {}))
        _check_names(f"zero_optimization.{name}.", section, set(OFFLOAD_PASSED), {})
        if section and section.get("device") not in ("cpu", "none"):
            raise ValueError(
                f"zero_optimization.{name}.device must be cpu or none, not "
                f"{section.get('device')!r}"
            )
    if zero["stage"] < 3:
        for option, given in {
            "offload_param": zero.get("offload_param", {}).get("device") == "cpu",
            "offload_optimizer.ratio": "ratio" in zero.get("offload_optimizer", {}),
        }.items():
            if given:
                raise ValueError(f"zero_optimization.{option} needs zero_optimization.stage 3")
