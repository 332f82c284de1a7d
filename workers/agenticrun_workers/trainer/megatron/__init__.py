"""The strategy `megatron`. Importing it imports Megatron-Core."""

from agenticrun_workers.trainer.megatron.options import MegatronOptions
from agenticrun_workers.trainer.megatron.strategy import megatron_policy

__all__ = ["MegatronOptions", "megatron_policy"]
