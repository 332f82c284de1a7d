"""Weight syncs between processes, on a real Ray: transports, deltas, deaths and damage."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.pool import EnginePool
from agenticrun_workers.launch import ActorDied, liveness
from agenticrun_workers.weights.node import NodeWeights
from agenticrun_workers.weights.sync import Receiver
from sync_actors import (
    Drill,
    Engine,
    Exporter,
    LossyNode,
    NamedNode,
    drills,
    killed,
    make_model,
    serving,
    spawn,
    version_of,
)
from tiny_runs import tiny_run
from waiting import eventually_in_loop

pytestmark = pytest.mark.usefixtures("ray_node")

RUN = "sync-drill"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@pytest.fixture(scope="module")
def trainer(ray_node: None, folder: Path) -> Any:
    return spawn(Exporter, folder, tiny_run().spec.pipeline, calls=1)


@pytest.fixture(scope="module")
def engines(ray_node: None, folder: Path) -> dict[str, Any]:
    """Tests that kill engines make their own."""
    return serving(folder)


@pytest.fixture
def drill(trainer: Any) -> Iterator[Callable[..., Drill]]:
    """Make drills. `node`: the class of nodes away from the trainer."""

    def make(node: type = NodeWeights, **spec: Any) -> Drill:
        def whole(place: str, *arguments: Any) -> Any:
            return spawn(node if place == "away" else NodeWeights, *arguments, calls=4)

        return Drill(trainer, RUN, whole, **spec)

    with drills(RUN, make) as making:
        yield making


async def exporting(running: asyncio.Task[Any], folder: Path) -> None:
    """Wait until the trainer has made the file `exporting` in the folder."""
    await eventually_in_loop(
        lambda: running.done() or (folder / "exporting").exists(), 120, "the trainer exports"
    )
    assert not running.done()


async def check(engine: Any, folder: Path, version: int, share: float = 1.0) -> None:
    """Check that the engine has exactly these weights, and serves them as this version."""
    held = await engine.call(lambda actor: actor.held())
    expected = version_of(folder, version, share)
    assert held.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(held[name], value.numpy(), err_msg=name)
    assert await engine.call(lambda actor: actor.version_sampled()) == version


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("transport", ["SharedMemory", "ObjectStore", "Disk"])
async def test_engines_serve_exactly_the_trainers_weights(
    drill: Any, engines: dict[str, Any], folder: Path, tmp_path: Path, transport: str, delta: bool
) -> None:
    share = 0.02 if delta else 1.0
    options = {"uri": str(tmp_path)} if transport == "Disk" else {}
    leftover = tmp_path / RUN / "weights" / "sync-000004" / "bucket-00000.data"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    syncing = drill(transport=transport, delta=delta, **options)
    far = "home" if transport == "SharedMemory" else "away"
    places = {"near": (engines["near"], "home"), "far": (engines["far"], far)}
    copies = 1 if transport == "SharedMemory" else 2
    size = sum(value.numel() * 4 for value in version_of(folder, 0).values())
    for version in (1, 2, 3):
        report = await syncing.update(places, version, share)
        assert (report.transport, report.failed) == (transport, {})
        for engine in engines.values():
            await check(engine, folder, version, share)
        if delta and version > 1:
            assert report.nbytes < 0.08 * size * copies
            assert report.changed_share == pytest.approx(share, rel=0.5)
        else:
            assert (report.nbytes, report.changed_share) == (size * copies, 1.0)
    assert list(tmp_path.rglob("bucket*")) == ([] if transport == "Disk" else [leftover])


async def test_a_broadcast_reaches_all_engines_and_one_that_joins(
    drill: Any, engines: dict[str, Any], folder: Path
) -> None:
    syncing = drill(transport="Broadcast")
    near, far = (engines["near"], "home"), (engines["far"], "away")
    size = sum(value.numel() * 4 for value in version_of(folder, 0).values())
    for version, places in (
        (1, {"near": near, "far": far}),
        (2, {"near": near, "far": far}),
        (3, {"near": near}),
    ):
        report = await syncing.update(places, version)
        assert (report.transport, report.nbytes, report.failed) == (
            "Broadcast",
            len(places) * size,
            {},
        )
        for engine, _ in places.values():
            await check(engine, folder, version)
    await syncing.sync.join("far", Receiver(*far))
    await check(engines["far"], folder, 3)


async def test_nobody_else_gets_the_port_at_which_ranks_are_to_meet(trainer: Any) -> None:
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.bind(await trainer.call(lambda actor: actor.rendezvous()))


@pytest.mark.parametrize("transport", ["ObjectStore", "Broadcast"])
async def test_an_engine_killed_in_mid_sync_does_not_fail_it(
    drill: Any, engines: dict[str, Any], folder: Path, tmp_path: Path, transport: str
) -> None:
    victim = spawn(Engine, "victim")
    pid = await victim.call(lambda actor: actor.serve(folder))
    syncing = drill(transport=transport)
    places = {
        "near": (engines["near"], "home"),
        "victim": (victim, "home"),
        "far": (engines["far"], "away"),
    }
    await syncing.shapes_known(5)
    running = asyncio.create_task(syncing.update(places, 5, 1.0, 0.2, tmp_path / "exporting"))
    await exporting(running, tmp_path)
    os.kill(pid, signal.SIGKILL)
    report = await running
    assert list(report.failed) == ["victim"]
    assert isinstance(report.failed["victim"], ActorDied)
    for engine in engines.values():
        await check(engine, folder, 5)


async def test_a_node_frozen_in_mid_sync_fails_its_engines_only(
    drill: Any,
    engines: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the next sync makes another actor for the node."""
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.5)
    monkeypatch.setattr(liveness, "FROZEN_POLLS", 12)
    syncing = drill(node=NamedNode, transport="ObjectStore")
    far = spawn(Engine, "far")
    await far.call(lambda actor: actor.serve(folder))
    places = {"near": (engines["near"], "home"), "far": (far, "away")}
    await syncing.update(places, 8)
    pid = await syncing.sync._whole._nodes["away"].handle.call(lambda node: node.pid())
    running = asyncio.create_task(syncing.update(places, 9, 1.0, 0.2, tmp_path / "exporting"))
    await exporting(running, tmp_path)
    os.kill(pid, signal.SIGSTOP)
    report = await running
    assert list(report.failed) == ["far"]
    await check(engines["near"], folder, 9)
    far.kill()  # as the pool does
    report = await syncing.update({"near": (engines["near"], "away")}, 10)
    assert report.failed == {}
    await check(engines["near"], folder, 10)


async def test_a_replaced_engine_serves_the_current_version_from_the_first_token(
    drill: Any, folder: Path, tmp_path: Path
) -> None:
    """The new engine serves no requests before it has the weights."""
    pids: dict[str, int] = {}
    seen: list[dict[str, int]] = []
    pool: EnginePool

    async def make(engine_id: str, *_: Any) -> Any:
        handle = spawn(Engine, engine_id)
        pids[engine_id] = await handle.call(lambda actor: actor.serve(folder))
        return handle

    async def changed(engines: dict[str, Any]) -> None:
        found = {
            name: await handle.call(lambda actor: actor.version_sampled())
            for name, handle in engines.items()
        }
        seen.append(found)

    pool = EnginePool(make, 2, changed)
    await pool.start()
    syncing = drill(home=ray.get_runtime_context().get_node_id())
    await syncing.shapes_known(7)
    await syncing.trainer.call(lambda actor: actor.become(7, 1.0, 0.2, tmp_path / "exporting"))
    running = asyncio.create_task(pool.update_weights(syncing.sync, 7))
    await exporting(running, tmp_path)
    os.kill(pids["engine-1"], signal.SIGKILL)
    report = await asyncio.wait_for(running, 120)
    assert list(report.failed) == ["engine-1"]
    await eventually_in_loop(
        lambda: "engine-2" in seen[-1] if seen else False, 240, "another engine is told"
    )
    for engine in pool.engines.values():
        await check(engine, folder, 7)
    await pool.stop()
    assert sorted(pool.engines) == ["engine-0", "engine-2"]
    assert seen[-1] == {"engine-0": 7, "engine-2": 7}
    for engine in pool.engines.values():
        engine.kill()


async def test_an_engine_that_joins_on_a_new_node_gets_the_last_version_while_the_trainer_is_busy(
    drill: Any, engines: dict[str, Any], folder: Path
) -> None:
    syncing = drill(transport="ObjectStore", delta=True)
    await syncing.update({"near": (engines["near"], "home")}, 1, 0.02)
    await syncing.update({"near": (engines["near"], "home")}, 2, 0.02)
    busy = syncing.trainer.call(lambda actor: actor.become(3))
    await asyncio.wait_for(syncing.sync.join("far", Receiver(engines["far"], "away")), 60)
    await check(engines["far"], folder, 2, 0.02)
    await busy
    both = {"near": (engines["near"], "home"), "far": (engines["far"], "away")}
    report = await syncing.update(both, 3, 0.02)
    size = sum(value.numel() * 4 for value in version_of(folder, 0).values())
    assert report.nbytes < 0.08 * 2 * size
    await check(engines["far"], folder, 3, 0.02)


@pytest.mark.parametrize("place", ["home", "away"])
async def test_an_engine_that_joins_after_all_copies_are_lost_gets_the_trainers_weights(
    drill: Any, engines: dict[str, Any], folder: Path, place: str
) -> None:
    syncing = drill(transport="ObjectStore")
    await syncing.update({"near": (engines["near"], "home")}, 6)
    for node in syncing.nodes:
        await killed(node)
    await asyncio.wait_for(syncing.sync.join("far", Receiver(engines["far"], place)), 60)
    await check(engines["far"], folder, 6)


async def test_engines_that_join_after_all_copies_are_lost_tell_the_version_that_they_have(
    drill: Any, engines: dict[str, Any], folder: Path
) -> None:
    syncing = drill(transport="ObjectStore")
    await syncing.update({"near": (engines["near"], "home")}, 6)
    for node in syncing.nodes:
        await killed(node)
    await syncing.trainer.call(lambda actor: actor.become(7))
    for engine in ("far", "near"):  # the second one gets the export that was made for the first
        await asyncio.wait_for(syncing.sync.join(engine, Receiver(engines[engine], "home")), 60)
        await check(engines[engine], folder, 7)


async def test_an_engine_tells_the_version_of_its_weights_though_the_trainer_goes_on_meanwhile(
    drill: Any, engines: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing = drill(transport="Broadcast")  # it leaves no copy: whoever joins asks the trainer
    await syncing.update({"near": (engines["near"], "home")}, 1)
    make = syncing.sync._whole._spawn

    def train_and_make(*arguments: Any) -> Any:
        syncing.trainer.call(lambda actor: actor.become(2))
        return make(*arguments)

    monkeypatch.setattr(syncing.sync._whole, "_spawn", train_and_make)
    await asyncio.wait_for(syncing.sync.join("far", Receiver(engines["far"], "home")), 60)
    await check(engines["far"], folder, 2)


async def test_a_bucket_damaged_on_the_way_is_found_and_sent_again(
    drill: Any, engines: dict[str, Any], folder: Path
) -> None:
    syncing = drill(node=LossyNode, transport="ObjectStore")
    report = await syncing.update({"far": (engines["far"], "away")}, 4)
    assert report.failed == {}
    await check(engines["far"], folder, 4)


async def test_a_node_whose_memory_is_lost_gets_everything_again(
    drill: Any, engines: dict[str, Any], folder: Path
) -> None:
    syncing = drill(transport="ObjectStore", delta=True)
    places = {"near": (engines["near"], "home"), "far": (engines["far"], "away")}
    await syncing.update(places, 1, 0.02)
    for node in syncing.nodes:
        await killed(node)
    report = await syncing.update(places, 2, 0.02)
    assert report.failed == {}
    for engine in engines.values():
        await check(engine, folder, 2, 0.02)


async def test_a_transport_that_cannot_reach_an_engine_is_a_config_error(
    drill: Any, engines: dict[str, Any]
) -> None:
    syncing = drill(transport="SharedMemory")
    with pytest.raises(
        InvalidConfig, match=r"spec.pipeline.weightSync.transport: 1 engines are on other nodes"
    ):
        await syncing.update({"far": (engines["far"], "away")}, 1)
