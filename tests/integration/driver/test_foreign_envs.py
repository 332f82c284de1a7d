"""Environments of other libraries: the real ones, and the examples with them train a step.

uv installs what our environment does not have, and keeps it in its cache.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest

from agenticrun_workers.envs import Env, EnvCalls, EnvFault, make_env
from agenticrun_workers.envs.checking import Verdict, check_env
from agenticrun_workers.envs.env import EnvConfigError
from agenticrun_workers.types import Stream
from example_runs import EXAMPLES, shrunk, train_a_step
from waiting import eventually

SUPPORT = Path(__file__).parents[2] / "support"
CALLS = EnvCalls(30.0)
CELLS = [f"[{cell}]" for cell in range(9)]
BETS = ["[check]", "[bet]", "[call]", "[fold]"]


@pytest.fixture(scope="module")
def openenv_python() -> list[str]:
    """The command that runs Python with OpenEnv."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv is not None, "uv is a dependency of the extra dev: run make setup"
    python = [uv, "run", "--quiet", "--no-project", "--python", sys.executable]
    python += ["--with", required("openenv/agenticrun.yaml"), "python"]
    made = subprocess.run([*python, "-c", "import openenv"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return python


@pytest.fixture(scope="module")
def openenv(openenv_python: list[str]) -> Iterator[str]:
    """The address of a server with the example's environment, and others below."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*openenv_python, "-m", "uvicorn", "openenv_app:app", "--port", str(port)]
    path = os.pathsep.join(map(str, [SUPPORT, EXAMPLES / "openenv"]))
    with subprocess.Popen(
        [*command, "--log-level", "warning"], env={**os.environ, "PYTHONPATH": path}
    ) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: server.poll() is None and answers(url), 120, "the server answers")
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def packages() -> Iterator[None]:
    """TextArena and reasoning-gym, behind our own packages, as `spec.code.pip` installs them."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv is not None
    before = list(sys.path)
    for name in ("reasoning-gym", "textarena"):
        package = required(f"{name}.yaml")
        command = [uv, "run", "--quiet", "--no-project", "--python", sys.executable]
        program = f"import {name.replace('-', '_')} as m; print(m.__path__[0])"
        made = subprocess.run(
            [*command, "--with", package, "python", "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        sys.path.append(str(Path(made.stdout.splitlines()[-1]).parent))
    yield
    sys.path[:] = before


def required(example: str) -> str:
    """The package with its version that an example names."""
    words = (EXAMPLES / example).read_text().split()
    (package,) = {word for word in words if "==" in word and "[" not in word}
    return package


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Env]:
    env = make_env("openenv", {"url": url})
    try:
        yield env
    finally:
        await CALLS.close(env)


async def test_the_example_of_openenv_trains(openenv: str, tmp_path: Path) -> None:
    document = shrunk("openenv/agenticrun.yaml")
    document["spec"]["pipeline"]["envs"][0]["config"]["url"] = openenv
    await train_a_step(document, tmp_path)


def test_check_env_on_the_real_server(openenv: str) -> None:
    report = check_env("openenv", {"url": openenv}, seeds=6)
    assert report.of(Verdict.FAILED) == {}
    assert report.findings["same seed"].verdict is Verdict.OK


async def test_actions_with_several_fields(openenv: str) -> None:
    async with opened(f"{openenv}/shop") as env:
        start = await CALLS.reset(env, 1, Stream.TRAIN)
        assert "- kind (optional): one of a, b" in start.instruction
        played = {
            answer: await CALLS.step(env, answer)
            for answer in ("tea", '{"name": "tea", "count": "2"}', '{"name": "tea", "kind": "c"}')
        }
        simple, several, wrong = played.values()
        assert (simple.observation, simple.reward) == ("None tea a", 1.0)
        assert several.observation == "2 tea a"
        assert wrong.observation == "kind: Input should be 'a' or 'b'\n2 tea a"
        assert wrong.metrics["action_is_valid"] == 0.0
        sold = await CALLS.step(env, "sold out")  # OpenEnv cannot report it, and ends the session
        assert (sold.metrics["action_is_valid"], sold.truncated) == (0.0, True)


async def test_an_environment_that_raises_and_the_place_of_its_session(openenv: str) -> None:
    """Its server has one place, so that the second session needs that of the first."""
    for _ in range(2):
        async with opened(f"{openenv}/shop") as env:
            await CALLS.reset(env, 1, Stream.TRAIN)
            with pytest.raises(EnvFault, match="EXECUTION_ERROR: the till is broken"):
                await CALLS.step(env, "broken")


async def test_an_environment_with_tools(openenv: str) -> None:
    async with opened(f"{openenv}/tools") as env:
        start = await CALLS.reset(env, 1, Stream.TRAIN)
        assert start.observation == "ready"
        assert '{"name": "echo", "description": "Repeat a text."' in start.instruction
        said = '<tool_call>{"name": "echo", "arguments": {"text": "\U0001f642"}}</tool_call>'
        assert (await CALLS.step(env, said)).observation == "\U0001f642"
        failed = await CALLS.step(env, '<tool_call>{"name": "fail"}</tool_call>')
        assert "it fails" in failed.observation
        assert failed.metrics["action_is_valid"] == 1.0
        assert (await CALLS.step(env, "nothing")).metrics["action_is_valid"] == 0.0


def test_check_env_on_the_class_in_the_environment_of_openenv(openenv_python: list[str]) -> None:
    ours = [EXAMPLES / "openenv", SUPPORT, *filter(None, sys.path)]
    program = (
        f"import sys\nsys.path += {[*map(str, ours)]}\n"  # after OpenEnv's own packages
        "from agenticrun_workers.envs.checking import check_env\n"
        "check_env('openenv', {'environment': 'lift:Lift'}, seeds=6).assert_ok()\n"
        "check_env('openenv', {'environment': 'openenv_app:Tools'}, seeds=2).assert_ok()\n"
    )
    done = subprocess.run([*openenv_python, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_example_of_mcp_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "mcp"))
    step = await train_a_step(shrunk("mcp/agenticrun.yaml"), tmp_path)
    assert "env/Numbers/tool_calls" in step


async def test_a_server_of_the_library_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through no proxy: it is on this machine."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        f"from numbers_server import server; server.run(transport='streamable-http', port={port})"
    )
    path = os.pathsep.join([str(EXAMPLES / "mcp"), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}
    ) as server:
        config = {
            "startTool": "begin",
            "rewardTool": "score",
            "url": f"http://127.0.0.1:{port}/mcp",
        }
        env = make_env("mcp", config)
        try:
            start = await CALLS.reset(env, 7, Stream.TRAIN)
            assert start.observation == "Look, then name the number."
            said = await CALLS.step(env, '<tool_call>{"name": "look", "arguments": {}}</tool_call>')
            assert said.observation == "2"
            ended = await CALLS.step(env, "<answer>2</answer>")
            assert (ended.reward, ended.terminated) == (1.0, True)
        finally:
            await CALLS.close(env)
            server.terminate()


@pytest.mark.parametrize("name", ["reasoning-gym", "textarena"])
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
async def test_the_examples_of_libraries_train(name: str, tmp_path: Path) -> None:
    await train_a_step(shrunk(f"{name}.yaml"), tmp_path)


@pytest.mark.parametrize(
    ("type", "config"),
    [
        ("reasoning_gym", {"dataset": "chain_sum"}),
        ("reasoning_gym", {"dataset": "leg_counting"}),
        ("textarena", {"id": "GuessTheNumber-v0", "actions": ["[3]", "4"]}),
        ("textarena", {"id": "Mastermind-v0"}),
        ("textarena", {"id": "TicTacToe-v0", "players": 2, "actions": CELLS}),
        ("textarena", {"id": "KuhnPoker-v0", "players": 2, "actions": BETS}),
    ],
)
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_check_env_finds_nothing_in_libraries(type: str, config: dict[str, Any]) -> None:
    report = check_env(type, config, seeds=5)
    report.assert_ok()
    assert report.findings["odd answers"].verdict is Verdict.OK


@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_a_question_is_scored_by_its_library_and_splits_share_none() -> None:
    env: Any = make_env("reasoning_gym", {"dataset": "chain_sum", "answerPattern": r"<a>(.*)</a>"})
    question = env.reset(3, Stream.TRAIN)
    right_answer = env._entry["answer"]
    result = env.step(f"it is <a> {right_answer} </a>")
    assert (result.reward, result.terminated, result.metrics["success"]) == (1.0, True, 1.0)
    env.reset(3, Stream.TRAIN)
    assert env.step(right_answer).metrics["action_is_valid"] == 0.0
    assert question not in {env.reset(seed, Stream.VALIDATION) for seed in range(50)}


@pytest.mark.usefixtures("packages")
async def test_a_game_is_won_and_an_invalid_move_is_refused() -> None:
    env: Any = make_env("textarena", {"id": "GuessTheNumber-v0", "kwargs": {"max_number": 4}})
    assert "between 1 and 4" in env.reset(5, Stream.TRAIN)
    refused = env.step("nothing")
    assert refused.metrics["action_is_valid"] == 0.0
    assert "invalid move" in refused.observation
    results = []
    for guess in range(1, 5):
        results.append(env.step(str(guess)))
        if results[-1].terminated:
            break
    assert results[-1].reward == 1.0
    assert results[-1].metrics["success"] == 1.0
    assert all(result.metrics["action_is_valid"] for result in results)


def first_cell(shown: str) -> str:
    """The first free cell that Tic Tac Toe names."""
    return shown.rpartition("Available Moves: ")[2].split("'")[1]


@pytest.mark.parametrize("opponent", [None, "own_opponent:answer"])
@pytest.mark.usefixtures("packages")
def test_a_game_for_two_is_played_against_chance_or_a_function(
    opponent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("own_opponent")
    monkeypatch.setattr(module, "answer", first_cell, raising=False)
    monkeypatch.setitem(sys.modules, "own_opponent", module)
    config = {"id": "TicTacToe-v0", "players": 2, "actions": CELLS}
    env: Any = make_env("textarena", config | ({"opponent": opponent} if opponent else {}))

    def game(seed: int) -> list[str]:
        shown = [env.reset(seed, Stream.TRAIN)]
        assert "You are Player 0" in shown[0]
        for _ in range(5):
            result = env.step(first_cell(shown[-1]))
            shown.append(result.observation)
            assert result.metrics["action_is_valid"] == 1.0
            if result.terminated:
                assert result.metrics["success"] == float(result.reward == 1)
                return shown
            assert "Player 1 placed their symbol" in result.observation
        raise AssertionError("nine cells are full after five moves of the first player")

    games = [game(seed) for seed in (1, 1, 2, 3, 4)]
    assert games[0] == games[1]
    assert len({str(each) for each in games}) == (1 if opponent else 4)
    if opponent:  # 0 2 4 6 against 1 3 5
        assert "Player 0 has won!" in games[0][-1]


@pytest.mark.parametrize(
    ("type", "config", "message"),
    [
        ("reasoning_gym", {"dataset": "chain_sums"}, "dataset 'chain_sums': .* not registered"),
        ("reasoning_gym", {"dataset": "chain_sum", "params": {"a": 1}}, "unexpected keyword"),
        ("textarena", {"id": "TicTacToe-v0"}, "not a game for players: 1"),
        ("textarena", {"id": "TicTacToe-v0", "players": 2}, "the others need opponent"),
        ("textarena", {"id": "TicTacToe-v0", "players": 3, "actions": ["[0]"]}, "players: 3"),
        ("textarena", {"id": "Mastermind-v0", "opponent": "a:b"}, "set players"),
        ("textarena", {"id": "NoGame-v0"}, "cannot make 'NoGame-v0'"),
    ],
)
@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_mistakes_in_the_config_of_libraries(
    type: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env(type, config)


async def test_the_example_of_verifiers_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group, without a warm-up: the first episode waits for the player's packages."""
    example = EXAMPLES / "verifiers"
    monkeypatch.syspath_prepend(str(example))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    document = shrunk("verifiers/agenticrun.yaml")
    document["spec"]["pipeline"].pop("warmup")
    program: Any = importlib.import_module("play")
    made = subprocess.run(
        [*program.PYTHON, "-c", "import verifiers"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    try:
        step = await train_a_step(document, tmp_path)
    finally:
        program.player.close()
    assert step["stop/completed"] == 1.0
