"""Plays a taskset of verifiers: each episode is posted to player.py, which has its own packages.

`type: play:Seeds` and `run: play:play`.
"""

import json
import string
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

CONFIG = {
    "taskset": {"id": "apples_taskset"},
    # The default runtime of verifiers is a cloud service.
    "agent": {"harness": {"id": "in_process"}, "runtime": {"type": "subprocess"}},
}
"""For `SingleAgentEnvConfig`: the taskset, and what else its agent needs."""
PYTHON = ["uv", "run", "--quiet", "--no-project", "--with", "verifiers==0.4.0", "python"]


class Seeds:
    """The environment of an agent that finds its task by the seed of the episode."""

    instruction = ""

    def reset(self, seed: int, split: str) -> str:
        return ""

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent returns its reward")

    def valid_actions(self) -> list[str]:
        return list("2345")  # of the warm-up by random play

    def vocabulary(self) -> list[str]:
        return list(string.printable)


class Player:
    """The program player.py, which starts with the first episode and ends with this process."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._address = ""

    def address(self) -> str:
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                program = Path(__file__).with_name("player.py")
                self._process = subprocess.Popen(
                    [*PYTHON, str(program), json.dumps(CONFIG)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert self._process.stdout is not None
                port = self._process.stdout.readline()
                if not port:
                    raise RuntimeError("player.py did not start: its messages say why")
                self._address = f"http://127.0.0.1:{int(port)}"
            return self._address

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # ends its standard input


player = Player()


def play(base_url: str, task: Any) -> float:
    order = {"base_url": base_url, "model": task.model, "split": task.split, "seed": task.seed}
    with urlopen(Request(player.address(), json.dumps(order).encode())) as response:
        answer = json.load(response)
    if "error" in answer:  # the run repeats the episode
        raise RuntimeError(answer["error"])
    return float(answer["reward"])
