"""Two real gloo processes train exactly as one does."""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from agenticrun_workers.models import InitializeSpec, initialize_model

PROGRAM = Path(__file__).with_name("rank_program.py")

Runs = dict[str, Any]


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_program"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Everything that is compared: one rank in this process, two in processes of their own."""
    work = tmp_path_factory.mktemp("ranks")
    model = work / "model"
    spec = InitializeSpec(tuple("abcdefghijklmnop"), hidden_size=16, intermediate_size=32, heads=2, initializer_range=0.3)
    initialize_model(model, spec)
    program = load_program()
    one = program.train(model, save=work / "saved-by-1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(port), str(model), str(work)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=500)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), "\n".join(errors)
    two = [pickle.loads((work / f"rank-{rank}.pickle").read_bytes()) for rank in range(2)]
    return {"one": vars(one), "one from 2": vars(program.train(model, resume=work / "saved-by-2")), "two": two}


def assert_same_weights(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, atol=1e-10, rtol=1e-7, err_msg=name)


pytestmark = pytest.mark.timeout(600)


def test_two_ranks_reach_the_same_weights_as_one(runs: Runs) -> None:
    assert_same_weights(runs["two"][0]["fresh"]["weights"], runs["one"]["weights"])


def test_only_rank_zero_exports_weights(runs: Runs) -> None:
    assert runs["two"][1]["fresh"]["weights"] == {}


def test_metrics_are_global_and_equal_on_every_rank(runs: Runs) -> None:
    first, second = (rank["fresh"]["metrics"] for rank in runs["two"])
    assert first == second
    for alone, together in zip(runs["one"]["metrics"], first, strict=True):
        assert together == pytest.approx(alone, rel=1e-10, abs=1e-10)


def test_each_rank_computes_the_log_probs_of_its_own_samples(runs: Runs) -> None:
    together = [logprobs for rank in runs["two"] for logprobs in rank["fresh"]["logprobs"]]
    for a, b in zip(runs["one"]["logprobs"], together, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_checkpoint_goes_on_exactly_with_as_many_or_with_other_ranks(runs: Runs) -> None:
    expected = runs["one"]["weights"]
    for resumed in (runs["one from 2"], runs["two"][0]["resumed from 2"], runs["two"][0]["resumed from 1"]):
        assert resumed["policy_version"] == 3
        assert len(resumed["metrics"]) == 3
        assert_same_weights(resumed["weights"], expected)
