"""`strategy.config` of the strategy `megatron`: Megatron-Core's own option names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
TRANSFORMER = frozenset(
    (
        "sequence_parallel",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distribute_saved_activations",
        *UNEVEN,
        "batch_p2p_comm",
    )
)
"""Options passed to `TransformerConfig`."""

DATA_PARALLEL = frozenset(
    (
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "bucket_size",
        "grad_reduce_in_fp32",
        "pad_buckets_for_high_nccl_busbw",
    )
)
"""Options passed to `DistributedDataParallelConfig`."""

_TRAINING = "spec.pipeline.actorTrain.training"

OWNED = {
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "add_bias_linear",
            "add_qkv_bias",
            "gated_linear_unit",
            "activation_func",
            "qk_layernorm",
            "rotary_interleaved",
            "softmax_scale",
            "window_size",
            "attention_dropout",
            "hidden_dropout",
            "init_method",
            "init_method_std",
        ),
        "spec.model",
    ),
    **dict.fromkeys(
        ("params_dtype", "bf16", "fp16", "pipeline_dtype", "enable_autocast", "autocast_dtype"),
        "spec.model.dtype",
    ),
    "lr": f"{_TRAINING}.learningRate",
    "min_lr": f"{_TRAINING}.lrSchedulerType",
    "weight_decay": f"{_TRAINING}.weightDecay",
    "adam_beta1": f"{_TRAINING}.adamBeta1",
    "adam_beta2": f"{_TRAINING}.adamBeta2",
    "clip_grad": f"{_TRAINING}.maxGradNorm",
    "deterministic_mode": "spec.pipeline.deterministic",
    **dict.fromkeys(
        (
            "optimizer",
            "variable_seq_lengths",
            "calculate_per_token_loss",
            "average_in_collective",
            "use_cpu_initialization",
            "perform_initialization",
            "check_for_nan_in_grad",
            "overlap_param_gather",
            "loss_scale",
        ),
        "the trainer itself",
    ),
}
"""Options that something else decides, and the decider of each."""


@dataclass(frozen=True)
class MegatronOptions:
    """Sizes of the parallel groups, and options for Megatron's own configurations."""

    tensor: int
    pipeline: int
    context: int
    transformer: dict[str, Any]
    data_parallel: dict[str, Any]

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.transformer.get("sequence_parallel"))

    @property
    def model_ranks(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def row_multiple(self) -> int:
        """Divisor of the length of every row."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    @staticmethod
    def parse(config: Mapping[str, Any]) -> MegatronOptions:
        """Read `strategy.config`.

        Raises:
            ValueError: an option is unknown, decided elsewhere or has a wrong value; names it.
        """
        for name in config:
            if name in OWNED:
                raise ValueError(
                    f"strategy.config.{name} is decided by {OWNED[name]}: leave it out"
                )
            if name not in {*SIZES, *TRANSFORMER, *DATA_PARALLEL}:
                offered = ", ".join(sorted({*SIZES, *TRANSFORMER, *DATA_PARALLEL}))
                raise ValueError(
                    f"strategy.config.{name} is not offered for megatron; there are {offered}"
                )
        sizes = [config.get(name, 1) for name in SIZES]
        for name, size in zip(SIZES, sizes, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"strategy.config.{name} must be a whole number from 1, not {size!r}"
                )
        options = MegatronOptions(
            tensor=sizes[0],
            pipeline=sizes[1],
            context=sizes[2],
            transformer={name: value for name, value in config.items() if name in TRANSFORMER},
            data_parallel={name: value for name, value in config.items() if name in DATA_PARALLEL},
        )
        if options.sequence_parallel and options.tensor == 1:
            raise ValueError(
                "strategy.config.sequence_parallel needs a tensor_model_parallel_size above 1"
            )
        return options
