"""The store with real modules over the S3 protocol, and what a killed driver leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from s3fs import S3FileSystem
from torch import nn

from agenticrun_workers.driver.checkpoints import CheckpointStore, DriverState
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.storage import Folder
from agenticrun_workers.trainer import checkpoint
from module_savers import save_whole


class Module:
    """A small module under training, as the trainer group of a role offers it to the store."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.network = nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.1)
        self.steps = 0

    def step(self) -> None:
        self.network(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def snapshot(self) -> checkpoint.Snapshot:
        return checkpoint.snapshot(self.network, self.optimizer, {"steps": self.steps})

    def reserve_snapshot(self) -> Callable[[], None]:
        raise AssertionError("no memory is reserved")

    async def save(self, folder: str) -> None:
        checkpoint.save(folder, self.snapshot())

    async def load(self, folder: str) -> None:
        self.steps = checkpoint.load(folder, self.network, self.optimizer, {})["steps"]


class Attempt:
    """Two modules, each with its own optimizer, and a store."""

    def __init__(self, base: str, seed: int = 0) -> None:
        self.modules = {"actor_train": Module(seed), "critic": Module(seed + 1)}
        self.store = CheckpointStore(base, "uid-1", keep=2)

    async def train(self, begin: int, end: int) -> None:
        """Save after each step."""
        saves: dict[str, Callable[[str], Awaitable[None]]] = {
            name: module.save for name, module in self.modules.items()
        }
        for step in range(begin + 1, end + 1):
            for module in self.modules.values():
                module.step()
            await save_whole(
                self.store, DriverState(step, step * 4, (), parts={"cursor": step}), saves
            )

    async def resume(self, resume: str = "Auto") -> int:
        found = await self.store.restore(
            resume, {name: module.load for name, module in self.modules.items()}
        )
        return found[1].step if found else 0

    def weights(self) -> dict[str, list[list[float]]]:
        return {name: module.network.weight.tolist() for name, module in self.modules.items()}


async def test_a_run_over_s3_goes_on_exactly_and_keeps_the_newest(s3: str) -> None:
    base = f"{s3}/goes-on"
    straight = Attempt(f"{base}/straight")
    await straight.train(0, 6)
    await Attempt(f"{base}/stopped").train(0, 4)
    resumed = Attempt(f"{base}/stopped", seed=5)
    assert await resumed.resume() == 4
    await resumed.train(4, 6)
    assert resumed.weights() == straight.weights()
    assert sorted(Folder(f"{base}/stopped").folders()) == ["step-5", "step-6"]


async def test_an_altered_object_makes_auto_fall_back(s3: str) -> None:
    base = f"{s3}/altered"
    straight = Attempt(f"{base}/straight")
    await straight.train(0, 3)
    await Attempt(f"{base}/run").train(0, 3)
    shard = Folder(f"{base}/run/step-3/critic")
    data = shard.read("__0_0.distcp")
    shard.write(
        "__0_0.distcp",
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :],
    )
    resumed = Attempt(f"{base}/run", seed=5)
    assert await resumed.resume() == 2
    await resumed.train(2, 3)
    assert resumed.weights() == straight.weights()


async def test_a_deleted_object_is_named_when_its_checkpoint_is_asked_for(s3: str) -> None:
    base = f"{s3}/deleted"
    await Attempt(base).train(0, 2)
    Folder(f"{base}/step-2/actor_train").remove("__0_0.distcp")
    with pytest.raises(
        InvalidConfig, match=r"s3://checkpoints/deleted/step-2/actor_train/__0_0.distcp is missing"
    ):
        await Attempt(base).resume(f"{base}/step-2")


async def test_a_bucket_that_does_not_exist_is_a_config_error(s3: str) -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"spec\.checkpoint\.uri: s3://no-such-bucket/run cannot be written "
        r".*make the bucket first",
    ):
        await Attempt("s3://no-such-bucket/run").resume()


async def test_missing_credentials_are_a_config_error_that_names_the_variables(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(
        InvalidConfig, match=r"spec\.checkpoint\.uri: .*credentials.*envFrom.*AWS_ACCESS_KEY_ID"
    ):
        await Attempt(f"{s3}/run").resume()


DYING = """
import asyncio, sys, time
from contextlib import contextmanager
from agenticrun_workers.driver.checkpoints import CheckpointStore, DriverState
from agenticrun_workers.storage import Folder
from agenticrun_workers.trainer.checkpoint import SnapshotWriter
from test_store import Module

create = Folder.create

@contextmanager
def half(folder, name):
    with create(folder, name) as file:
        file.write(b"half")
        file.flush()
        print("writing", flush=True)
        time.sleep(600)
        yield file

async def main():
    module, writer = Module(0), SnapshotWriter()

    async def save(folder):
        writer.write("actor_train", module, folder)

        async def is_durable():
            return writer.is_durable("actor_train")

        return is_durable

    store = CheckpointStore(sys.argv[1], "uid-1", keep=1)
    module.step()
    await (await store.save(DriverState(1, 4, ()), {"actor_train": save}))
    module.step()
    Folder.create = half
    saving = asyncio.create_task(await store.save(DriverState(2, 8, ()), {"actor_train": save}))
    while True:
        module.step()
        await asyncio.sleep(0.01)

asyncio.run(main())
"""


@pytest.mark.parametrize("place", ["folder", "s3"])
async def test_a_driver_killed_while_it_saves_leaves_the_checkpoint_before(
    place: str, s3: str, tmp_path: Path
) -> None:
    base = Folder(f"{s3}/killed" if place == "s3" else tmp_path)
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DYING, base.uri], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "writing\n"
    finally:
        driver.kill()
        driver.communicate(timeout=60)

    expected, attempt = Module(0), Attempt(base.uri, seed=5)
    expected.step()
    del attempt.modules["critic"]
    assert await attempt.resume() == 1
    assert attempt.weights() == {"actor_train": expected.network.weight.tolist()}
    await attempt.train(2, 3)
    assert sorted(base.folders()) == ["step-1", "step-3"]
