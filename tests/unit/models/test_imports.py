"""torch takes seconds and hundreds of MB: processes that compute no tensors must not import it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["models.source", "models.tokenizer", "weights.sync", "rollout.env_worker", "driver.attempt"],
)
def test_a_module_of_processes_without_tensors_does_not_import_torch(module: str) -> None:
    code = f"import sys, agenticrun_workers.{module}; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "False"


def test_the_holder_of_a_nodes_weights_starts_without_transformers() -> None:
    """The first weight sync waits for its start."""
    code = "import sys, agenticrun_workers.weights.node; print('transformers' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "False"
