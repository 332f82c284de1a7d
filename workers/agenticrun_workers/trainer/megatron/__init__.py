"""The `megatron` strategy: Megatron-Core with tensor, pipeline, context and data parallelism. Importing it imports Megatron."""

from agenticrun_workers.trainer.megatron.options import MegatronOptions
from agenticrun_workers.trainer.megatron.strategy import MegatronPolicy

__all__ = ["MegatronOptions", "MegatronPolicy"]
