"""Programs without code of this project as agents.

They use the real openai client, an agent framework from PyPI and a real engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import agents
import httpx
import pytest
import yaml
from openai import AsyncOpenAI

from agenticrun_workers.agents import AgentLimits, OutsideAgent
from agenticrun_workers.envs import Env
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.models.tokenizer import load_tokenizer
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest
from outside_agents import (
    CHAT,
    EPISODE,
    Question,
    Says,
    check_log_probs,
    check_token_for_token,
    play,
)
from pages import ROOT, blocks
from tiny_model import CONTEXT, tiny_model

EXAMPLE = ROOT / "examples/outside-agent"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>'

Known = Callable[[Callable[..., Any]], str]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    """Makes a function known as `run: module:function`."""

    def known(function: Callable[..., Any]) -> str:
        module = type(sys)("outside_program")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:run"

    return known


@pytest.mark.parametrize("api", [agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_openai_agents_calls_a_tool_and_becomes_one_trajectory(
    known: Known, streamed: bool, api: Any
) -> None:
    called: list[tuple[int, int]] = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        called.append((a, b))
        return str(a + b)

    async def run(base_url: str, task: Any) -> float:
        agents.set_tracing_disabled(True)
        async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
            model = api(task.model, client)
            agent = agents.Agent("adder", instructions="Use the tool.", model=model, tools=[add])
            if streamed:
                result: Any = agents.Runner.run_streamed(agent, "19+23?")
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, "19+23?")
            again = [*result.to_input_list(), {"role": "user", "content": "sure?"}]
            assert (await agents.Runner.run(agent, again)).final_output == "Yes."
        return float(result.final_output == "The sum is 42.")

    policy = Says([CALL, "The sum is 42.", "Yes."])
    trajectories = play(policy, run=known(run))
    assert [trajectory.error for trajectory in trajectories] == [""]
    check_token_for_token(trajectories, policy.asked)
    assert called == [(19, 23)]
    assert trajectories[0].score == 1
    shown = CHAT.shown(trajectories[0].tokens_T)
    assert '"description": "Adds two numbers."' in shown
    assert "<|im_start|>user\n\n<tool_response>\n42\n</tool_response><|im_end|>" in shown.replace(
        "user\n<tool", "user\n\n<tool"
    )


def test_a_real_engines_answers_keep_their_log_probs(known: Known, tmp_path: Path) -> None:
    """Compare each log-prob with one plain forward pass over the trajectory.

    Two episodes run at once, and all their branches are checked.
    """
    folder = tiny_model(tmp_path)
    tokenizer = load_tokenizer(TokenizerSource(path=str(folder)))
    limits = AgentLimits(
        max_turns=8, max_tokens_per_step=6, sequence_length=CONTEXT, temperature=0.8
    )

    async def run(base_url: str, task: Any) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
            create = partial(client.chat.completions.create, model=task.model)
            first = await create(messages=[{"role": "user", "content": "ab"}], n=2, logprobs=True)
            for choice in first.choices:
                assert choice.logprobs is not None
                past: list[Any] = [{"role": "user", "content": "ab"}, choice.message]
                await create(
                    messages=[
                        *past,
                        {"role": "user", "content": "c"},
                        {"role": "user", "content": "d"},
                    ]
                )
        return 1.0

    async def episodes() -> list[Any]:
        engine = TransformersEngine(partial(load_model, str(folder)), max_length=CONTEXT)
        await engine.start()
        asked: list[tuple[GenerationRequest, Generation]] = []

        async def generate(request: GenerationRequest) -> Generation:
            made = await engine.generate(request)
            asked.append((request, made))
            return made

        agent = OutsideAgent(tokenizer=tokenizer, limits=limits, run=known(run))
        try:
            both = [
                replace(EPISODE, key=replace(EPISODE.key, member=member), sampling_seed=member)
                for member in (0, 1)
            ]
            return [
                *await asyncio.gather(
                    *(
                        agent.collect_trajectory(each, cast(Env, Question()), generate)
                        for each in both
                    )
                ),
                asked,
            ]
        finally:
            await engine.stop()

    one, two, asked = asyncio.run(episodes())
    model = load_model(str(folder))
    assert len(asked) == 8
    check_log_probs(model, [*one, *two], 0.8)
    for trajectory in [*one, *two]:
        before: list[int] = []
        for turn in trajectory.turns:
            before += turn.prompt_T.tolist()
            assert any(
                request.prompt_tokens.tolist() == before and said.tokens_T is turn.response_T
                for request, said in asked
            )
            before += turn.response_T.tolist()
    assert all(said.finish in (FinishReason.STOP, FinishReason.LENGTH) for _, said in asked)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The programs of docs/outside-agents.md, as modules by the names in their first lines."""
    names = []
    for text in blocks(ROOT / "docs/outside-agents.md", "python"):
        name = re.match(r"# (\w+)\.py", text)
        assert name is not None, f"name the module in the first line: {text[:40]}"
        names.append(name[1])
        (tmp_path / f"{name[1]}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("outside_agents.EPISODE", replace(EPISODE, item={"answer": 42}))
    yield names
    for each in names:
        sys.modules.pop(each, None)


def test_the_programs_of_the_page_run_as_printed(
    page: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent in another pod is a thread here; only the name of its Service is another."""
    assert page == ["asker", "caller", "service", "adder"]
    (trajectory,) = play(Says(["41", "42"]), run="asker:play")
    assert (trajectory.error, trajectory.score) == ("", 1.0)
    policy = Says([CALL, "42"])
    (trajectory,) = play(policy, run="adder:run")
    assert (trajectory.error, trajectory.score) == ("", 1.0)
    assert "<tool_response>\n42\n</tool_response>" in CHAT.shown(trajectory.tokens_T)

    import caller  # type: ignore[import-not-found]
    import service  # type: ignore[import-not-found]

    server = ThreadingHTTPServer(("127.0.0.1", 0), service.Episodes)
    post = httpx.AsyncClient.post

    def to_thread(client: httpx.AsyncClient, url: str, **rest: Any) -> Any:
        assert url == "http://my-agents.default.svc/episodes"
        return post(client, f"http://127.0.0.1:{server.server_port}/episodes", **rest)

    monkeypatch.setattr(caller.httpx.AsyncClient, "post", to_thread)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (trajectory,) = play(Says(["42"]), run="caller:play", reachable_from="network")
        server.shutdown()
    assert (trajectory.error, trajectory.score) == ("", 1.0)


def test_the_example_is_a_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    policy = Says(["a", "bc"])
    (trajectory,) = play(policy, command=[sys.executable, "-m", "asker"], reward="environment")
    check_token_for_token([trajectory], policy.asked)
    assert trajectory.score == pytest.approx(0.2)


def test_the_example_trains(tmp_path: Path) -> None:
    document = yaml.safe_load((EXAMPLE / "agenticrun.yaml").read_text())
    pipeline = document["spec"]["pipeline"]
    pipeline |= {"maxSteps": 2, "rolloutBatchSize": 8, "valBatchSize": 2, "evalSteps": 2}
    pipeline["warmup"] |= {"steps": 2, "batchSize": 4}
    pipeline["trainEnvs"] |= {"groups": 2, "groupSize": 4}
    pipeline["valEnvs"] |= {"groups": 2}
    pipeline["actorTrain"]["training"] |= {"miniBatchSize": 8}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    command = [
        sys.executable,
        "-m",
        "agenticrun_workers.cli",
        "run",
        "-f",
        str(file),
        "-o",
        str(tmp_path / "out"),
        "--in-process",
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(EXAMPLE)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "system/tps" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(
        line["stop/completed"] == 1 and line["env/Words/action_is_valid"] >= 0 for line in steps
    )
