"""Adapters travel alone to nodes, which merge them into whole weights; whole runs on a real Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from agenticrun_api import Outcome, parse_run
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import Launcher
from agenticrun_workers.launch.in_process import InProcessLauncher
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.weights.node import AdapterNode, NodeWeights
from agenticrun_workers.weights.sync import Receiver
from sync_actors import (
    BUCKET_BYTES,
    AdapterTrainer,
    Drill,
    Engine,
    LossyAdapterNode,
    all_gone,
    drills,
    killed,
    make_model,
    serving,
    spawn,
)
from tiny_runs import TinyAttempt, tiny_document, tiny_run

RUN = "adapter-drill"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = InProcessLauncher()
    yield made
    made.close()


@pytest.fixture(scope="module")
def trainer(launcher: Launcher, folder: Path) -> Any:
    return spawn(AdapterTrainer, folder, tiny_run().spec.pipeline, calls=1, launcher=launcher)


@pytest.fixture(scope="module")
def engines(launcher: Launcher, folder: Path) -> dict[str, Any]:
    return serving(folder, launcher)


@pytest.fixture
def drill(trainer: Any, folder: Path, launcher: Launcher) -> Iterator[Callable[..., Drill]]:
    """Make drills. `node`, `files`: class and model folder of nodes away from the trainer."""

    def make(
        trainer: Any = trainer, node: type = AdapterNode, files: Path = folder, **spec: Any
    ) -> Drill:
        def whole(_place: str, *arguments: Any) -> Any:
            return spawn(NodeWeights, *arguments, calls=4, launcher=launcher)

        def adapter_node(place: str, *arguments: Any) -> Any:
            cls, base = (node, files) if place == "away" else (AdapterNode, folder)
            source = ModelSource(str(base))
            return spawn(cls, *arguments, source, BUCKET_BYTES, 1, calls=4, launcher=launcher)

        return Drill(trainer, RUN, whole, adapter_node, **spec)

    with drills(RUN, make) as making:
        yield making


async def check(engine: Any, trainer: Any, version: int) -> None:
    """Check that the engine has exactly the trainer's weights, and serves this version."""
    held = await engine.call(lambda actor: actor.held())
    expected = await trainer.call(lambda actor: actor.whole())
    assert held.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(held[name], value, err_msg=name)
    assert await engine.call(lambda actor: actor.version_sampled()) == version


@pytest.mark.parametrize(
    ("transport", "delta"), [("SharedMemory", False), ("ObjectStore", False), ("Disk", True)]
)
async def test_engines_serve_exactly_the_merged_weights_though_adapters_alone_travel(
    drill: Any, engines: dict[str, Any], trainer: Any, tmp_path: Path, transport: str, delta: bool
) -> None:
    syncing = drill(
        transport=transport, delta=delta, **({"uri": str(tmp_path)} if transport == "Disk" else {})
    )
    far = "home" if transport == "SharedMemory" else "away"
    places = {"near": (engines["near"], "home"), "far": (engines["far"], far)}
    copies = 1 if transport == "SharedMemory" else 2
    size = await trainer.call(lambda actor: actor.adapter_bytes())
    whole = await trainer.call(lambda actor: actor.whole())
    assert size * 4 < sum(value.nbytes for value in whole.values())
    for version in (1, 2):
        report = await syncing.update(places, version)
        assert (report.transport, report.failed, report.adapters) == (transport, {}, True)
        assert report.nbytes == size * copies
        for engine in engines.values():
            await check(engine, trainer, version)
    assert list(tmp_path.rglob("bucket*")) == []


async def test_an_engine_that_joins_on_a_new_node_gets_the_last_version_while_the_trainer_is_busy(
    drill: Any, engines: dict[str, Any], trainer: Any, folder: Path, launcher: Launcher
) -> None:
    syncing = drill(transport="ObjectStore", delta=True)
    for version in (1, 2):
        await syncing.update({"near": (engines["near"], "home")}, version)
    expected = await trainer.call(lambda actor: actor.whole())
    late = spawn(Engine, "late", launcher=launcher)
    await late.call(lambda actor: actor.serve(folder))
    busy = trainer.call(lambda actor: actor.become(3))
    for joining, engine, place in (("late", late, "away"), ("far", engines["far"], "home")):
        await asyncio.wait_for(syncing.sync.join(joining, Receiver(engine, place)), 60)
        held = await engine.call(lambda actor: actor.held())
        assert all(np.array_equal(held[name], value) for name, value in expected.items())
        assert await engine.call(lambda actor: actor.version_sampled()) == 2
    await busy
    report = await syncing.update({"near": (engines["near"], "home"), "late": (late, "away")}, 3)
    assert (report.failed, report.adapters) == ({}, True)
    await check(late, trainer, 3)
    late.kill()


async def test_adapters_damaged_on_the_way_are_found_and_sent_again(
    drill: Any, engines: dict[str, Any], trainer: Any
) -> None:
    """The damage is found before an engine stops to load anything."""
    syncing = drill(node=LossyAdapterNode, transport="ObjectStore")
    report = await syncing.update(
        {"far": (engines["far"], "away"), "near": (engines["near"], "home")}, 4
    )
    assert (report.failed, report.adapters) == ({}, True)
    for engine in engines.values():
        await check(engine, trainer, 4)


async def test_a_node_whose_memory_is_lost_gets_everything_again(
    drill: Any, engines: dict[str, Any], trainer: Any
) -> None:
    syncing = drill(transport="ObjectStore", delta=True)
    places = {"near": (engines["near"], "home"), "far": (engines["far"], "away")}
    await syncing.update(places, 1)
    for node in syncing.nodes:
        await killed(node)
    report = await syncing.update(places, 2)
    assert report.failed == {}
    for engine in engines.values():
        await check(engine, trainer, 2)


async def test_a_reference_gets_whole_weights_which_leave_no_memory_behind(
    drill: Any, engines: dict[str, Any], trainer: Any
) -> None:
    syncing = drill()
    await trainer.call(lambda actor: actor.become(3))
    await asyncio.wait_for(
        syncing.sync.copy_to({"reference": Receiver(engines["far"], "home")}), 60
    )
    await check(engines["far"], trainer, 3)
    await all_gone(RUN)
    report = await syncing.update({"far": (engines["far"], "home")}, 4)
    assert report.adapters
    await check(engines["far"], trainer, 4)
    await all_gone(RUN, left=1)


async def test_a_broadcast_moves_whole_weights(
    drill: Any, engines: dict[str, Any], trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    syncing = drill(transport="Broadcast")
    report = await syncing.update({"near": (engines["near"], "home")}, 1)
    assert (report.failed, report.adapters) == ({}, False)
    await check(engines["near"], trainer, 1)
    assert (
        "engines get whole weights with the adapters merged, not the adapters alone: "
        "a broadcast goes into" in caplog.text
    )
    await syncing.sync.join("far", Receiver(engines["far"], "away"))
    await check(engines["far"], trainer, 1)


def other_files(folder: Path, other: Path, name: str) -> Path:
    """Copy the model with another name or value of its last norm."""
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    weights[name] = weights.pop("model.norm.weight") + 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return other


async def test_whole_weights_travel_where_the_files_are_not_the_trainers_base(
    drill: Any,
    engines: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    launcher: Launcher,
) -> None:
    files = other_files(folder, tmp_path / "other", "norm.weight")
    pipeline = tiny_run().spec.pipeline
    trainer = spawn(AdapterTrainer, folder, pipeline, files, calls=1, launcher=launcher)
    syncing = drill(trainer=trainer)
    for version in (1, 2):
        report = await syncing.update({"near": (engines["near"], "home")}, version)
        assert (report.failed, report.adapters) == ({}, False)
        await check(engines["near"], trainer, version)
    assert [record.message for record in caplog.records if "merged" in record.message] == [
        "engines get whole weights with the adapters merged, not the adapters alone: "
        "the model's files have no parameter model.norm.weight"
    ]
    trainer.kill()


async def test_a_node_with_another_model_ends_the_run(
    drill: Any, folder: Path, tmp_path: Path, launcher: Launcher
) -> None:
    """Engines there would serve a policy that was never trained."""
    engine = spawn(Engine, "engine", launcher=launcher)
    await engine.call(lambda actor: actor.serve(folder))
    syncing = drill(
        transport="ObjectStore", files=other_files(folder, tmp_path / "other", "model.norm.weight")
    )
    with pytest.raises(
        InvalidConfig,
        match=r"spec.model.path: .*other holds another model.norm.weight here "
        r"than where the trainers run",
    ):
        await syncing.update({"far": (engine, "away")}, 1)
    engine.kill()


LORA = {"lora": {"rank": 2, "alpha": 4}, "training": {"learningRate": 0.02, "miniBatchSize": 4}}


@pytest.mark.usefixtures("ray_node")
async def test_a_run_syncs_adapters_alone_and_its_engines_say_what_its_trainer_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Replacements of killed engines have the last version; the reference is the base."""
    caplog.set_level(logging.INFO)
    document = tiny_document(
        maxSteps=4, evalSteps=0, actorTrain=LORA, algorithm={"lossKl": {"coef": 0.01}}
    )
    session = TinyAttempt(parse_run(document), tmp_path)
    running = asyncio.create_task(asyncio.wait_for(session.execute(), 300))
    while session.sink.step < 2 and not running.done():
        await asyncio.sleep(0.01)
    [pid] = [
        r.args[-1]
        for r in caplog.records
        if "runs on" in r.msg and isinstance(r.args, tuple) and "engine-0" in str(r.args)
    ]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    report = await running
    assert report.outcome is Outcome.SUCCEEDED, report.message
    assert "engine-1 runs on" in caplog.text
    steps = session.training_steps()
    layer = 16 * 2 + 2 * 16
    parameters = 4 * layer + 3 * (16 * 2 + 2 * 32)
    for step in steps.values():
        assert step["weight_sync/lora_merged"] == 0
        assert step["weight_sync/bytes"] in (0, 4 * parameters), (
            "0: the engine was dead, and the next one joined after the sync"
        )
        assert step["engine/logprob_gap"] < 1e-6
        assert step["staleness/max"] == 0
    assert steps[1]["weight_sync/bytes"] == 4 * parameters


@pytest.mark.usefixtures("ray_node")
async def test_colocated_engines_get_the_adapters_of_deepspeed_after_the_handover(
    tmp_path: Path,
) -> None:
    document = tiny_document(
        maxSteps=2, evalSteps=0, actorTrain={**LORA, "strategy": {"name": "deepspeed"}}
    )
    document["spec"]["placement"] = "Colocated"
    session = TinyAttempt(parse_run(document), tmp_path)
    report = await asyncio.wait_for(session.execute(), 300)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    for step in session.training_steps().values():
        assert step["weight_sync/lora_merged"] == 0
        assert step["engine/logprob_gap"] < 1e-6
