"""The embedded engine keeps what every engine promises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agenticrun_workers.inference import InferenceEngine
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.pretrained import load_model
from engine_conformance import EngineConformance, Models
from tiny_model import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


async def serving(folder: Path, **options: Any) -> AsyncIterator[InferenceEngine]:
    engine = TransformersEngine(partial(load_model, str(folder)), max_length=CONTEXT, **options)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models: Models) -> AsyncIterator[InferenceEngine]:
    async for engine in serving(models.a, max_sessions=EngineConformance.SEATS):
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fresh(models: Models) -> AsyncIterator[InferenceEngine]:
    async for engine in serving(models.b, restart_on_update=True):
        yield engine


class TestTransformers(EngineConformance):
    pass
