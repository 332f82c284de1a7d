"""A server whose load cannot be read serves, and says so once; it does not start with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agenticrun_workers.inference import EngineStartError
from agenticrun_workers.inference.sglang import engine as sglang_engine
from agenticrun_workers.inference.sglang.engine import SglangEngine
from agenticrun_workers.inference.sglang.server import SglangOptions
from agenticrun_workers.inference.vllm.engine import KV_USAGE, VllmEngine

READABLE = {
    SglangEngine: json.dumps(
        {"loads": [{"max_running_requests": 4, "token_usage": 0.5, "num_used_tokens": 32}]}
    ),
    VllmEngine: f"""{KV_USAGE}engine="0"}} 0.5
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="4"}} 1.0
vllm:prompt_tokens_total{{engine="0"}} 30.0
vllm:generation_tokens_total{{engine="0"}} 12.0
""",
}
COMPUTED = {SglangEngine: 32, VllmEngine: 32 + 30 + 12}


class Server:
    """Stands for the process and the client: every GET has the same answer."""

    log = Path("/logs/server.log")

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.alive = False

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def close(self) -> None: ...

    async def check(self, path: str) -> bytes:
        return self.answer.encode()


def engine_on(made: type[Any], server: Server) -> Any:
    engine = made(Path("/model"), dtype="bfloat16", max_length=64, log_folder=Path("/logs"))
    engine._started = SimpleNamespace(http=server)
    return engine


@pytest.mark.parametrize("unreadable", ["not JSON", "{}", '{"loads": []}', f"{KV_USAGE} none\n"])
@pytest.mark.parametrize("made", [SglangEngine, VllmEngine])
async def test_an_unreadable_load_is_told_once_and_harms_no_engine_that_serves(
    made: type[Any], unreadable: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(unreadable)
    engine = engine_on(made, server)
    for _ in range(3):
        await engine.check_health()
    assert len(caplog.records) == 1
    assert "the load cannot be read" in caplog.text
    assert engine.stats().kv_polls == 0, "no poll counts as an empty cache"
    assert engine.stats().computed_tokens is None
    server.answer = READABLE[made]
    await engine.check_health()
    assert (engine.stats().kv_used, engine.stats().kv_polls) == (0.5, 1)


@pytest.mark.parametrize("made", [SglangEngine, VllmEngine])
async def test_polls_tell_the_tokens_that_were_computed(made: type[Any]) -> None:
    engine = engine_on(made, Server(READABLE[made]))
    for _ in range(2):
        await engine.check_health()
        assert engine.stats().computed_tokens == COMPUTED[made]


async def test_sglang_does_not_start_with_a_load_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server("{}")
    for name in ("ServerProcess", "ServerClient"):
        monkeypatch.setattr(sglang_engine, name, lambda _: server)
    for name, reader in (("RequestLimits", "of_model"), ("ServedModel", "read")):
        made = SimpleNamespace(**{reader: lambda *_: object()})
        monkeypatch.setattr(sglang_engine, name, made)
    monkeypatch.setattr(SglangOptions, "spec", lambda _: object())
    with pytest.raises(EngineStartError, match=r"see its log /logs/server.log\. .*'loads'"):
        await engine_on(SglangEngine, server).start()
