"""The `megatron` strategy: Megatron-Core with tensor, pipeline, context and data parallelism. Importing it imports Megatron."""

from agenticrun_workers.training.megatron.options import MegatronOptions
from agenticrun_workers.training.megatron.policy import MegatronPolicy

__all__ = ["MegatronOptions", "MegatronPolicy"]
