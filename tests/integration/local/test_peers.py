"""benchmarks/peers.py starts: one engine figure, and our side of a step. TRL needs a registry."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from preloaded import environment, executable

pytestmark = pytest.mark.timeout(900)

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_the_engine_is_compared_with_generate(tmp_path: Path) -> None:
    command = [*executable(), str(BENCHMARKS / "peers.py"), "--quick"]
    figure, record = "prefill_over_generate", tmp_path / "peers.json"
    done = subprocess.run(
        [*command, "--figures", figure, "--json", str(record)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(record.read_text())["figures"][figure] > 0


def test_a_step_is_taken_for_each_line_on_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers
    from peer_steps.task import ANSWER

    model = tmp_path / "model"
    peers.make_model(model)
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), variables["PYTHONPATH"]])
    done = subprocess.run(
        [*executable(), str(BENCHMARKS / "peer_steps" / "our_steps.py"), str(model), "1"],
        input="\n\n",
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    seconds = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    assert len(seconds) == 2, done.stderr
    assert all(float(line.removeprefix(ANSWER)) > 0 for line in seconds)
