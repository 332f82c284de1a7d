"""Outside agents: programs that know nothing of this project and ask the policy through an OpenAI-compatible endpoint."""

from agenticrun_workers.agents.outside.agent import OutsideAgent

__all__ = ["OutsideAgent"]
