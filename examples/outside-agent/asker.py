"""An agent without any AgenticRun code: a script that uses the openai client.

It asks, questions the answer, and asks again. `run: asker:play` calls it as a function;
`command: [python, -m, asker]` starts it as a program for each episode.
"""

import atexit
import json
import os
from types import SimpleNamespace
from typing import Any

from openai import DefaultHttpxClient, OpenAI

CONNECTIONS = DefaultHttpxClient()
"""Shared by all episodes of an env worker: a new client reads TLS certificates for 50 ms.

So an episode does not close its client: that would close the connections of all episodes.
"""

atexit.register(CONNECTIONS.close)


def play(base_url: str, task: Any) -> None:
    client = OpenAI(base_url=base_url, api_key="any", http_client=CONNECTIONS)
    messages = list(task.messages)
    answer = client.chat.completions.create(model=task.model, messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    client.chat.completions.create(
        model=task.model, messages=messages
    )  # the environment rewards the last answer


if __name__ == "__main__":
    play(
        os.environ["OPENAI_BASE_URL"], SimpleNamespace(**json.loads(os.environ["AGENTICRUN_TASK"]))
    )
