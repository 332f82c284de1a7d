"""An agent without any AgenticRun code: a script that uses the openai client.

It asks, questions the answer, and asks again. `run: asker:play` calls it as a function;
`command: [python, -m, asker]` starts it as a program for each episode.
"""

import json
import os
import ssl
from types import SimpleNamespace
from typing import Any

from openai import DefaultHttpxClient, OpenAI

TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


def play(base_url: str, task: Any) -> None:
    http_client = DefaultHttpxClient(verify=TLS)
    with OpenAI(base_url=base_url, api_key="any", http_client=http_client) as client:
        messages = list(task.messages)
        answer = client.chat.completions.create(model=task.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
        # The environment rewards the last answer.
        client.chat.completions.create(model=task.model, messages=messages)


if __name__ == "__main__":
    play(
        os.environ["OPENAI_BASE_URL"], SimpleNamespace(**json.loads(os.environ["AGENTICRUN_TASK"]))
    )
