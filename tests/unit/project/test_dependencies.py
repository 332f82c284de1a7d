"""Every declared dependency is imported, and every imported package is declared."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

FOLDERS = {
    "base": ["crds"],
    "operator": ["operator"],
    "workers": ["workers", "examples"],
    "megatron": ["workers"],
    "deepspeed": ["workers"],
    "sglang": ["workers"],
    "vllm": ["workers"],
    "mcp": ["workers", "examples"],
    "dev": ["tests", "tools", "benchmarks", "examples"],
}
"""Folders whose code must import the dependencies of each extra.

Examples run in the worker image.
"""

MODULES = {
    "hydra-core": "hydra",
    "megatron-core": "megatron",
    "openai-agents": "agents",
    "pillow": "PIL",
    "pytest-xdist": "xdist",
    "pyyaml": "yaml",
}
"""Distributions whose module has another name."""

NOT_IMPORTED = {
    "agenticrun": "our own extras",
    "box2d": "gymnasium imports it for LunarLander",
    "codespell": "a command of make lint",
    "hatchling": "builds our own package",
    "import-linter": "a command of make lint",
    "minigrid": "gymnasium imports it for minigrid:MiniGrid-...",
    "mkdocs-material": "the theme of make docs",
    "mypy": "a command of make lint",
    "nvidia-cuda-cccl": "headers of what SGLang compiles",
    "nvidia-cuda-crt": "headers of what SGLang compiles",
    "nvidia-cuda-nvcc": "SGLang compiles kernels with it",
    "nvidia-nvvm": "a part of nvcc",
    "pre-commit": "a command that contributors run",
    "pytest-cov": "a plugin that make coverage uses",
    "pytest-timeout": "a plugin that pytest loads",
    "ruff": "a command of make lint",
    "s3fs": "fsspec loads it for s3:// addresses",
    "setuptools": "gym-sokoban needs its pkg_resources",
    "types-pyyaml": "types that mypy reads",
    "uv": "a command of make setup and make lock",
}
"""Dependencies that no file of ours imports, and why they are declared."""

PART_OF = {"httpx2": "mcp", "mcp_types": "mcp", "pyarrow": "datasets", "pydantic_core": "pydantic"}
"""Modules that come with a declared dependency, which pins their version."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}


def imported(folders: list[str]) -> set[str]:
    """Top-level modules that the Python files below these folders import."""
    return set().union(*map(imported_in, folders))


@cache
def imported_in(folder: str) -> frozenset[str]:
    found: set[str] = set()
    for file in (ROOT / folder).rglob("*.py"):
        modules: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules.add(node.module.split(".")[0])
        # The test in the template of `agenticrun init` imports the module beside it.
        found |= modules - {file.stem.removeprefix("test_")}
    return frozenset(found)


@pytest.mark.parametrize("extra", FOLDERS)
def test_a_declared_dependency_is_imported(extra: str) -> None:
    declared = names(PROJECT["dependencies"] if extra == "base" else EXTRAS[extra])
    modules = imported(FOLDERS[extra])
    unused = {
        name
        for name in declared - NOT_IMPORTED.keys()
        if MODULES.get(name, name.replace("-", "_")) not in modules
    }
    assert not unused, (
        f"remove from pyproject.toml, or say in NOT_IMPORTED why they are needed: {unused}"
    )


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("crds", []),
        ("operator", ["operator"]),
        ("workers", ["workers", "megatron", "deepspeed", "sglang", "vllm", "mcp"]),
    ],
)
def test_an_imported_package_is_declared(folder: str, extras: list[str]) -> None:
    declared = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in extras))
    known = {MODULES.get(name, name.replace("-", "_")) for name in declared}
    missing = {
        module
        for module in imported([folder]) - sys.stdlib_module_names
        if not module.startswith("agenticrun_") and PART_OF.get(module, module) not in known
    }
    assert not missing


def test_exceptions_are_declared_and_not_imported() -> None:
    declared = names(PROJECT["dependencies"]).union(*(names(extra) for extra in EXTRAS.values()))
    assert NOT_IMPORTED.keys() <= declared
    assert MODULES.keys() <= declared
    ours = imported(["crds", "operator", "workers", "tools", "benchmarks", "examples"])
    assert not {name.replace("-", "_") for name in NOT_IMPORTED} & ours


def test_every_extra_is_looked_at() -> None:
    assert FOLDERS.keys() == {"base", *EXTRAS}
