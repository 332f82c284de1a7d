"""Several processes of one program that meet in a gloo group: the launcher, and what each of them does around its work."""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

RankWork = Callable[..., Any]


def launch(program: Path, world: int, out: Path, arguments: list[str], environment: dict[str, str] | None = None) -> list[Any]:
    """What `take_part` in each of `world` processes of this program returned, by rank.

    Args:
        out: a folder for the results.
        arguments: for the work.
        environment: added to this process's.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **(environment or {})}
    results = [out / f"rank-{rank}-of-{world}.pickle" for rank in range(world)]
    commands = [
        [sys.executable, str(program), str(rank), str(world), str(port), str(result), *arguments] for rank, result in enumerate(results)
    ]
    ranks = [subprocess.Popen(command, env=full, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=500)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), "\n".join(errors)
    return [pickle.loads(result.read_bytes()) for result in results]


def load(program: Path) -> ModuleType:
    """The program as a module of this process, under its own name, so that what its ranks pickle can be read here."""
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module
    spec.loader.exec_module(module)
    return module


def take_part(work: RankWork) -> None:
    """The main function of a rank's program: join the others, work with the launcher's arguments, and tell it the result."""
    rank, world, port = (int(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    Path(sys.argv[4]).write_bytes(pickle.dumps(work(*sys.argv[5:])))
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo may still hold tensors, whose release aborts a process that is taking its interpreter down (pytorch#179291).
    sys.stderr.flush()
    os._exit(0)
