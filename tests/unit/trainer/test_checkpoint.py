"""One module's checkpoint: what is written, what is restored, and what is refused."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from agenticrun_workers.storage import ChecksumWriter, DamagedFile, FileEntry, Folder
from agenticrun_workers.trainer import checkpoint
from agenticrun_workers.trainer.checkpoint import (
    CheckpointMismatch,
    HostBuffers,
    Snapshot,
    SnapshotWriter,
)
from waiting import eventually


def a_module(width: int = 4, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path: Path) -> Folder:
    module, optimizer = a_module()
    train(module, optimizer, 2)
    checkpoint.save(tmp_path / "saved", checkpoint.snapshot(module, optimizer, {"steps": 2}))
    return Folder(tmp_path / "saved")


@pytest.mark.parametrize("place", ["path", "string", "memory"])
def test_weights_optimizer_counters_and_random_state_go_on(place: str, tmp_path: Path) -> None:
    places: dict[str, checkpoint.Location] = {
        "path": tmp_path / "x",
        "string": str(tmp_path / "y"),
        "memory": f"memory://{tmp_path.name}",
    }
    folder = places[place]
    module, optimizer = a_module()
    train(module, optimizer, 2)
    checkpoint.save(folder, checkpoint.snapshot(module, optimizer, {"steps": 2}))
    draw = torch.rand(3)
    train(module, optimizer, 3)
    again, its_optimizer = a_module(seed=1)
    assert checkpoint.load(folder, again, its_optimizer, {"steps": 0}) == {"steps": 2}
    assert torch.equal(torch.rand(3), draw)
    train(again, its_optimizer, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize("trained", [0, 1, 3])
def test_saving_changes_nothing_and_loading_goes_on_from_any_step(
    trained: int, tmp_path: Path
) -> None:
    module, optimizer = a_module()
    train(module, optimizer, trained)
    unsaved, its_optimizer = a_module()
    train(unsaved, its_optimizer, trained)
    checkpoint.save(tmp_path, checkpoint.snapshot(module, optimizer, {}))
    loaded, loaded_optimizer = a_module(seed=1)
    checkpoint.load(tmp_path, loaded, loaded_optimizer, {})
    for one, steps in ((module, optimizer), (unsaved, its_optimizer), (loaded, loaded_optimizer)):
        train(one, steps, 2)
    for saved, same, again in zip(
        module.parameters(), unsaved.parameters(), loaded.parameters(), strict=True
    ):
        assert torch.equal(saved, same), "saving has changed the next update"
        assert torch.equal(saved, again), "loading has changed the next update"


class PartlyUsed(nn.Module):
    """A module with a head that gets no gradient until it is used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.uses_head = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.used(inputs)
        if self.uses_head:
            hidden = self.head(hidden)
        return hidden


@pytest.mark.parametrize("trained_before", [0, 1], ids=["new", "trained before"])
@pytest.mark.parametrize("head_before", [False, True], ids=["head unused", "head used"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_without_a_gradient_so_far_is_saved_and_loaded(
    trained_before: int, head_before: bool, fused: bool, tmp_path: Path
) -> None:
    def made(seed: int) -> tuple[PartlyUsed, torch.optim.Optimizer]:
        module = PartlyUsed(seed)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)

    module, optimizer = made(0)
    train(module, optimizer, 2)
    checkpoint.save(tmp_path, checkpoint.snapshot(module, optimizer, {}))
    unsaved, its_optimizer = made(0)
    train(unsaved, its_optimizer, 2)
    loaded, loaded_optimizer = made(1)
    loaded.uses_head = head_before
    train(loaded, loaded_optimizer, trained_before)
    checkpoint.load(tmp_path, loaded, loaded_optimizer, {})
    for uses_head in (False, True):
        for one, steps in (
            (module, optimizer),
            (unsaved, its_optimizer),
            (loaded, loaded_optimizer),
        ):
            one.uses_head = uses_head
            train(one, steps, 2)
    for saved, same, again in zip(
        module.parameters(), unsaved.parameters(), loaded.parameters(), strict=True
    ):
        assert torch.equal(saved, same), "saving has changed the next update"
        assert torch.equal(saved, again), "loading has changed the next update"


@pytest.mark.parametrize("trained", [0, 1])
def test_saving_keeps_gradients(trained: int, tmp_path: Path) -> None:
    module = PartlyUsed()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    train(module, optimizer, trained)
    module.uses_head = True
    module(torch.ones(2, 3)).square().sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    checkpoint.save(tmp_path, checkpoint.snapshot(module, optimizer, {}))
    for parameter, gradient in zip(module.parameters(), before, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_a_checkpoint_does_not_choose_the_kernel_of_the_optimizer(saved: Folder) -> None:
    """An unfused AdamW wrote it: DeepSpeed's, or that of an older version."""
    module, _ = a_module()
    fused = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    checkpoint.load(str(saved), module, fused, {})
    assert [group["fused"] for group in fused.param_groups] == [True]
    other, unfused = a_module()
    checkpoint.load(str(saved), other, unfused, {})
    for trained, optimizer in ((module, fused), (other, unfused)):
        train(trained, optimizer, 2)
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_module_is_saved_and_loaded_without_an_optimizer(tmp_path: Path) -> None:
    module, _ = a_module()
    checkpoint.save(tmp_path, checkpoint.snapshot(module.requires_grad_(False), None, {}))
    again, _ = a_module(seed=1)
    checkpoint.load(tmp_path, again.requires_grad_(False), None, {})
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )


def test_the_weights_alone_are_loaded_from_a_trained_module(saved: Folder) -> None:
    trained, optimizer = a_module()
    train(trained, optimizer, 2)
    module, _ = a_module(seed=1)
    checkpoint.load(saved.uri, module, None, {})
    assert all(
        torch.equal(a, b) for a, b in zip(trained.parameters(), module.parameters(), strict=True)
    )


def test_a_counter_that_the_checkpoint_lacks_keeps_its_value(saved: Folder) -> None:
    assert checkpoint.load(saved.uri, *a_module(), {"steps": 0, "skipped": 7}) == {
        "steps": 2,
        "skipped": 7,
    }


def test_the_record_tells_model_ranks_and_every_file(saved: Folder) -> None:
    record = json.loads(saved.read("module.json"))
    assert (record["architecture"], record["parameters"], record["ranks"]) == (
        "Sequential",
        3 * 4 + 4 + 4 * 2 + 2,
        1,
    )
    assert record["torch"] == torch.__version__
    shapes = {"0.bias": [4], "0.weight": [4, 3], "1.bias": [2], "1.weight": [2, 4]}
    assert record["shapes"] == hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    files = {name: FileEntry.from_json(entry) for name, entry in record["files"].items()}
    assert files == {name: saved.checksum(name) for name in saved.sizes() if name != "module.json"}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["is missing", "instead of", "was altered"])
def test_a_damaged_file_is_named(saved: Folder, name: str, kind: str) -> None:
    data = saved.read(name)
    if kind == "is missing":
        saved.remove(name)
    else:
        saved.write(
            name, data[:-5] if kind == "instead of" else data[:9] + bytes([data[9] ^ 1]) + data[10:]
        )
    with pytest.raises(DamagedFile, match=f"{name} .*{kind}"):
        checkpoint.load(saved.uri, *a_module(), {})


def test_a_record_that_cannot_be_read_is_damage(saved: Folder) -> None:
    saved.write("module.json", b'{"files": {')
    with pytest.raises(DamagedFile, match=r"module.json cannot be read"):
        checkpoint.load(saved.uri, *a_module(), {})


def test_a_folder_without_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="holds no trainer checkpoint"):
        checkpoint.load(tmp_path, *a_module(), {})


def test_another_shape_is_refused_by_the_first_parameter_and_nothing_changes(saved: Folder) -> None:
    module, optimizer = a_module(width=5)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(
        CheckpointMismatch,
        match=r"^0.weight: the model has shape \[5, 3\], "
        r"the checkpoint in .* has shape \[4, 3\]; set",
    ):
        checkpoint.load(saved.uri, module, optimizer, {})
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([nn.Linear(3, 4)], r"^1.weight: the model has no such parameter, .* has shape \[2, 4\]"),
        (
            [nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)],
            r"^2.weight: the model has shape \[2, 2\], .* has no such parameter",
        ),
    ],
)
def test_a_parameter_that_only_one_side_has_is_named(
    saved: Folder, layers: list[nn.Module], problem: str
) -> None:
    module = nn.Sequential(*layers)
    with pytest.raises(CheckpointMismatch, match=problem):
        checkpoint.load(saved.uri, module, torch.optim.AdamW(module.parameters()), {})


def test_a_full_disk_is_the_error_that_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agenticrun_workers.storage.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, checkpoint.snapshot(*a_module(), {}))


def test_one_rank_saves_and_loads_without_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, checkpoint.snapshot(*a_module(), {}))
        checkpoint.load(tmp_path, *a_module(), {})


class Trained:
    """A rank's part of a model, with buffers of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.module, self.optimizer = a_module(seed=seed)
        self.buffers = HostBuffers()
        train(self.module, self.optimizer, 2)

    def snapshot(self) -> Snapshot:
        return checkpoint.snapshot(self.module, self.optimizer, {"steps": 2}, self.buffers)

    def reserve_snapshot(self) -> Callable[[], None]:
        return checkpoint.reserve(self.module, self.optimizer, self.buffers)


@pytest.fixture
def writer() -> Iterator[SnapshotWriter]:
    writer = SnapshotWriter()
    yield writer
    writer.close()


@dataclass
class SlowDisk:
    """Writes wait until `free` is set, and fail with `error` then."""

    free: threading.Event
    error: OSError | None = None


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(threading.Event())
    create = Folder.create

    @contextmanager
    def slow(folder: Folder, name: str) -> Iterator[ChecksumWriter]:
        assert disk.free.wait(60)
        if disk.error is not None:
            raise disk.error
        with create(folder, name) as file:
            yield file

    monkeypatch.setattr(Folder, "create", slow)
    yield disk
    disk.free.set()


def durable(writer: SnapshotWriter, name: str) -> bool:
    return eventually(lambda: writer.is_durable(name), 60, "the snapshot is durable")


def test_what_is_written_is_the_state_when_the_rank_copied_it(
    writer: SnapshotWriter, slow_disk: SlowDisk, tmp_path: Path
) -> None:
    trained, alone = Trained(), Trained()
    writer.write("critic", Trained(), tmp_path / "critic")  # goes first, and waits
    writer.write("actor_train", trained, tmp_path)
    draw = torch.rand(3)
    train(trained.module, trained.optimizer, 3)
    assert not writer.is_durable("actor_train")
    slow_disk.free.set()
    durable(writer, "actor_train")
    again, its_optimizer = a_module(seed=1)
    assert checkpoint.load(tmp_path, again, its_optimizer, {}) == {"steps": 2}
    assert torch.equal(torch.rand(3), draw)
    for part, saved in zip(alone.module.parameters(), again.parameters(), strict=True):
        assert torch.equal(part, saved)
    train(again, its_optimizer, 3)
    for part, resumed in zip(trained.module.parameters(), again.parameters(), strict=True):
        assert torch.equal(part, resumed), "the optimizer's state is another one"


def test_the_next_copy_of_a_model_waits_for_the_write_of_the_last_one(
    writer: SnapshotWriter, slow_disk: SlowDisk, tmp_path: Path
) -> None:
    trained = Trained()
    writer.write("actor_train", trained, tmp_path / "first")
    before = {name: weight.clone() for name, weight in trained.module.state_dict().items()}
    train(trained.module, trained.optimizer, 1)
    second = threading.Thread(
        target=writer.write, args=("actor_train", trained, tmp_path / "second")
    )
    second.start()
    second.join(0.2)
    assert second.is_alive()
    slow_disk.free.set()
    second.join(60)
    durable(writer, "actor_train")
    found, its_optimizer = a_module(seed=1)
    checkpoint.load(tmp_path / "first", found, its_optimizer, {})
    assert all(torch.equal(found.state_dict()[name], each) for name, each in before.items())


def test_models_of_a_rank_are_written_one_after_the_other(
    writer: SnapshotWriter, slow_disk: SlowDisk, tmp_path: Path
) -> None:
    writer.write("actor_train", Trained(0), tmp_path / "actor_train")
    writer.write("critic", Trained(1), tmp_path / "critic")
    assert not writer.is_durable("actor_train")
    assert not writer.is_durable("critic")
    slow_disk.free.set()
    durable(writer, "critic")
    assert writer.is_durable("actor_train")
    for name, seed in (("actor_train", 0), ("critic", 1)):
        module, optimizer = a_module(seed=9)
        checkpoint.load(tmp_path / name, module, optimizer, {})
        expected = Trained(seed).module
        for found, part in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, part)


def test_the_error_of_a_write_is_raised_where_its_end_is_asked_for(
    writer: SnapshotWriter, slow_disk: SlowDisk, tmp_path: Path
) -> None:
    slow_disk.error = OSError(28, "No space left on device")
    writer.write("actor_train", Trained(), tmp_path)
    assert not writer.is_durable("actor_train")
    slow_disk.free.set()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            durable(writer, "actor_train")


class EndsWhenAsked(Future[None]):
    """A write that fails just after it was asked whether it has ended."""

    def done(self) -> bool:
        ended = super().done()
        if not ended:
            self.set_exception(OSError(28, "No space left on device"))
        return ended


def test_a_write_that_fails_while_it_is_asked_for_is_not_durable(writer: SnapshotWriter) -> None:
    writer._writes["actor_train"] = EndsWhenAsked()
    assert not writer.is_durable("actor_train")
    with pytest.raises(OSError, match="No space left"):
        writer.is_durable("actor_train")


@pytest.mark.parametrize("trained", [True, False])
def test_snapshots_use_the_memory_that_was_reserved(trained: bool, writer: SnapshotWriter) -> None:
    model = Trained()
    if not trained:
        model.module, model.optimizer = a_module()
    writer.reserve(model)
    writer.close()
    reserved = {id(tensor) for tensor in model.buffers.held.values()}
    sizes = sorted(tensor.numel() for tensor in model.buffers.held.values())
    assert sizes == sorted(3 * [p.numel() for p in model.module.parameters()])
    for _ in range(2):
        taken = model.snapshot()
        copies = [*taken.state.model.values()]
        for moments in taken.state.optimizer["state"].values():
            copies += [moments["exp_avg"], moments["exp_avg_sq"]]
        assert {id(copy) for copy in copies} == reserved
        assert all(
            torch.equal(taken.state.model[name], value)
            for name, value in model.module.state_dict().items()
        )
        train(model.module, model.optimizer, 1)
