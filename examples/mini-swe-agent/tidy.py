"""mini-swe-agent, a terminal agent: the policy deletes files with shell commands.

`python tidy.py`, with mini-swe-agent installed, plays one episode. The run starts it for each
episode (`agent.config.command`) in a Python environment of its own: mini-swe-agent needs another
version of openai than the run.
"""

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

FILES = ("red", "green", "blue")


class Folder:
    """A folder with three files. Keeping the right one, and no other, earns 1."""

    blocking = False
    instruction = "Keep one file."

    def reset(self, seed: int, split: str) -> str:
        return random.Random(seed).choice(FILES)

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent posts its reward")

    def valid_actions(self) -> list[str]:
        """Return answers for the warm-up, which lets the agent play with random ones."""
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "rm %s"}}\n</tool_call>'
        return [call % file for file in FILES]

    def vocabulary(self) -> list[str]:
        return [*self.valid_actions(), *FILES, "bash(command)\n", "done", "failed"]


def play(task: dict[str, Any]) -> float:
    """Play an episode with the policy at OPENAI_BASE_URL, and return its reward."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    with tempfile.TemporaryDirectory() as folder:
        for file in FILES:
            Path(folder, file).touch()
        model = LitellmModel(
            model_name=f"openai/{task['model']}",
            cost_tracking="ignore_errors",
            observation_template="{{ 'failed' if output.returncode else 'done' }}",
            format_error_template="failed",
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=folder),
            system_template=task["instruction"],
            instance_template="{{task}}",
            step_limit=2,
        )
        agent.run(task["observation"])
        return float(os.listdir(folder) == [task["observation"]])


if __name__ == "__main__":
    os.environ |= {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would download a list of prices
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # the run repeats episodes that fail
        "MSWEA_SILENT_STARTUP": "1",
    }
    reward = json.dumps({"reward": play(json.loads(os.environ["AGENTICRUN_TASK"]))}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    with urlopen(Request(os.environ["AGENTICRUN_REWARD_URL"], reward, headers)):
        pass
