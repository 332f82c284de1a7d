"""Outside agents: programs that call the policy through an OpenAI-compatible endpoint."""

from agenticrun_workers.agents.outside.agent import OutsideAgent

__all__ = ["OutsideAgent"]
