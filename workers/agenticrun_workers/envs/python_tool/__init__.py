"""PythonTool: answer questions with the help of Python, which runs in a sandbox."""

from agenticrun_workers.envs.python_tool.python_tool import PythonTool

__all__ = ["PythonTool"]
