"""SGLang's real server keeps what every engine promises, and starts or says why not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from agenticrun_workers.inference import EngineStartError
from agenticrun_workers.inference.process_supervisor import mapped_by
from agenticrun_workers.inference.sglang.engine import SglangEngine
from engine_conformance import Models, ServerConformance, check_mixture
from tiny_model import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")


def an_engine(
    folder: Path,
    logs: Path,
    *,
    max_length: int = CONTEXT,
    restart: bool = False,
    config: Mapping[str, Any] | None = None,
) -> SglangEngine:
    return SglangEngine(
        folder,
        dtype="float32",
        max_length=max_length,
        restart_on_update=restart,
        log_folder=logs,
        config=config,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[SglangEngine, SglangEngine]]:
    """Started at the same time: each takes half a minute, most of it imports."""
    logs = tmp_path_factory.mktemp("logs")
    engines = an_engine(models.a, logs), an_engine(models.b, logs, restart=True)
    await asyncio.gather(*(engine.start() for engine in engines))
    yield engines
    shared = mapped_by(psutil.Process().children(recursive=True))
    await asyncio.gather(*(engine.stop() for engine in engines))
    assert not shared & {*os.listdir("/dev/shm")}, "SGLang's shared memory is left"


@pytest.fixture(scope="module")
def engine(both: tuple[SglangEngine, SglangEngine]) -> SglangEngine:
    return both[0]


@pytest.fixture(scope="module")
def fresh(both: tuple[SglangEngine, SglangEngine]) -> SglangEngine:
    return both[1]


class TestSglang(ServerConformance):
    pass


async def test_a_mixture_of_experts_samples_with_the_weights_of_its_trainer(tmp_path: Path) -> None:
    await check_mixture(lambda folder: an_engine(folder, tmp_path), tmp_path)


async def test_a_model_that_does_not_know_so_long_sequences_is_refused_at_once(
    models: Models, tmp_path: Path
) -> None:
    with pytest.raises(
        EngineStartError,
        match=f"sequences of {CONTEXT + 1} tokens do not fit into the model's context of {CONTEXT}",
    ):
        await an_engine(models.a, tmp_path, max_length=CONTEXT + 1).start()


async def test_an_option_that_sglang_does_not_know_is_named_by_the_start_error(
    models: Models, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match="unrecognized arguments: --no-such-option=1"):
        await an_engine(models.a, tmp_path, config={"no_such_option": 1}).start()


async def test_a_missing_environment_says_what_to_do(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTICRUN_ENGINES", str(tmp_path))
    with pytest.raises(EngineStartError, match=r"sglang is not installed.*make engines"):
        await an_engine(models.a, tmp_path).start()
