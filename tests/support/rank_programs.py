"""Several ranks of one program that meet in a gloo group: the launcher and the common setup."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from preloaded import executable

RankWork = Callable[..., Any]
COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "allreduce_": "all_reduce",
}
"""Short names of torch's operators."""


def launch(
    program: Path,
    world: int,
    out: Path,
    arguments: list[str],
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """What `take_part` in each of `world` ranks of this program returned, by rank.

    Args:
        out: a folder for the results.
        arguments: for the work.
        environment: added to this process's.
    """
    full = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    command = [*executable(), str(program), str(world), str(out), *arguments]
    done = subprocess.run(
        command, env=full, stderr=subprocess.PIPE, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return [pickle.loads(_result(out, rank, world).read_bytes()) for rank in range(world)]


def count_collectives(work: Callable[[], object]) -> Counter[str]:
    """Return how often some work calls each collective, by short names."""
    with CommDebugMode() as mode:  # type: ignore[no-untyped-call]
        work()
    counts: Counter[str] = Counter()
    for op, count in mode.get_comm_counts().items():
        name = str(op).rpartition(".")[2]
        counts[COLLECTIVES.get(name, name)] += count
    return counts


def _result(out: Path, rank: int, world: int) -> Path:
    return out / f"rank-{rank}-of-{world}.pickle"


def load(program: Path) -> ModuleType:
    """Load the program as a module of this process under its own name, to unpickle its results."""
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module
    spec.loader.exec_module(module)
    return module


def take_part(work: RankWork) -> None:
    """Fork the ranks of a program and wait for them. This is the program's main function.

    The ranks share the imported modules (ten seconds of a core). The first one
    that fails ends all.
    """
    world, out = int(sys.argv[1]), Path(sys.argv[2])
    ranks = set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _be_rank(work, rank, world, listener, _result(out, rank, world))
            ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with status {os.waitstatus_to_exitcode(status)}")


def _be_rank(
    work: RankWork, rank: int, world: int, listener: socket.socket, result: Path
) -> NoReturn:
    """Join the group at the first rank's address, run the work, and write its result."""
    status = 1
    try:
        torch.set_num_threads(1)
        host, port = listener.getsockname()
        descriptor = listener.detach() if rank == 0 else None
        store = dist.TCPStore(host, port, world, rank == 0, master_listen_fd=descriptor)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        result.write_bytes(pickle.dumps(work(*sys.argv[3:])))
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads of gloo may still hold tensors. Their release aborts a process in the middle of
        # the interpreter's shutdown (pytorch#179291).
        sys.stderr.flush()
        os._exit(status)
