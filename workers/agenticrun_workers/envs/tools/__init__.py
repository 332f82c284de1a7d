"""Environments in which the policy uses tools."""

from agenticrun_workers.envs.tools.python_tool import PythonTool

__all__ = ["PythonTool"]
