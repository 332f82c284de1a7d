"""mini-swe-agent, a terminal agent: the policy deletes files with shell commands.

`run: tidy:play` calls it with the base_url of the policy.
"""

import os
import random
import ssl
import tempfile
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient

# Read when mini-swe-agent and litellm are imported, or ask a model.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would download a list of prices
    "LITELLM_LOG": "ERROR",  # else it prints two lines for each request
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # the run repeats episodes that fail
    "MSWEA_SILENT_STARTUP": "1",
}
import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

FILES = ("red", "green", "blue")

litellm.client_session = DefaultHttpxClient(verify=ssl.create_default_context())
"""Shared by all episodes: each would read the certificates again, which takes 50 ms."""


class Folder:
    """A folder with three files. Keeping the right one, and no other, earns 1."""

    blocking = False
    instruction = "Keep one file."

    def reset(self, seed: int, split: str) -> str:
        return random.Random(seed).choice(FILES)

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent returns its reward")

    def valid_actions(self) -> list[str]:
        """Return answers for the warm-up, which lets the agent play with random ones."""
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "rm %s"}}\n</tool_call>'
        return [call % file for file in FILES]

    def vocabulary(self) -> list[str]:
        texts = [self.instruction, "bash(command)\n", "done", "failed"]
        return [*self.valid_actions(), *FILES, *texts]


def play(base_url: str, task: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        for file in FILES:
            Path(folder, file).touch()
        model = LitellmModel(
            model_name=f"openai/{task.model}",
            model_kwargs={"api_base": base_url, "api_key": task.api_key},
            cost_tracking="ignore_errors",
            observation_template="{{ 'failed' if output.returncode else 'done' }}",
            format_error_template="failed",
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=folder),
            system_template=task.instruction,
            instance_template="{{task}}",
            step_limit=2,
        )
        agent.run(task.observation)
        return float(os.listdir(folder) == [task.observation])
