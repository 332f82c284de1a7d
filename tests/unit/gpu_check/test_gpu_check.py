"""gpu-check never rots and never claims: its code runs on a CPU, and then proves nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agenticrun_workers.gpu_check import __main__ as command
from agenticrun_workers.gpu_check.__main__ import ENTRIES, main, table
from agenticrun_workers.gpu_check.stages import Bench, Figure, Outcome, Stage, Verdict, run_stage

SMALL_MACHINE = """
import importlib.util
import sys

for name in ("ray", "numba"):
    sys.modules[name] = None
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else found(name, *rest)
"""
"""Hides what a machine with PyTorch, transformers and a few small wheels lacks."""


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, errors="replace"
    )


def test_a_dry_run_runs_every_stage_and_passes_none(tmp_path: Path) -> None:
    done = python(
        f"{SMALL_MACHINE}\n"
        "from agenticrun_workers.gpu_check.__main__ import main\n"
        f"if __name__ == '__main__': sys.exit(main(['--dry-run', '--out', {str(tmp_path)!r}]))"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    results = {stage["stage"]: stage["verdict"] for stage in report["stages"]}
    assert results == {entry.name: "needs a GPU" for entry in ENTRIES}
    assert all(stage["figures"] for stage in report["stages"])
    assert "proves nothing about a GPU" in done.stdout


def test_without_a_gpu_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "driver_gpus", lambda: (0, "libcuda.so.1: cannot open"))
    assert main(["--out", str(tmp_path / "out")]) == command.NO_GPU
    assert capsys.readouterr().out == (
        "no GPU: libcuda.so.1: cannot open. --dry-run runs every stage at tiny size on the CPU\n"
    )
    assert not (tmp_path / "out").exists()


def test_an_unknown_stage_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--stages", "probe,kernel"])
    assert "no stage kernel; stages: probe, kernels, ranks" in capsys.readouterr().err


def test_all_stages_take_half_an_hour_at_most() -> None:
    assert sum(entry.minutes for entry in ENTRIES) <= 31


def good(bench: Bench) -> None:
    bench.exact("error", 0.0, at_most=1e-3)


def inexact(bench: Bench) -> None:
    bench.exact("error", 2e-3, at_most=1e-3)


def not_a_number(bench: Bench) -> None:
    bench.exact("error", math.nan, at_most=1e-3)


def raising(bench: Bench) -> None:
    bench.exact("error", 0.0, at_most=1e-3)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def silent(bench: Bench) -> None:
    pass


@pytest.mark.parametrize("stage", [inexact, not_a_number, raising, silent])
def test_a_stage_fails_by_its_figures_by_an_exception_and_without_figures(
    stage: Stage, tmp_path: Path
) -> None:
    outcome = run_stage("a", stage, tmp_path, gpu=False)
    assert outcome.verdict is Verdict.FAILED
    outcome.write(tmp_path / "a.json")
    read = Outcome.read(tmp_path / "a.json")
    assert str(read.figures) == str(outcome.figures)
    assert table([read]).splitlines()[1].split()[:2] == ["a", "failed"]


def test_the_table_names_the_figure_and_the_bound_that_it_misses(tmp_path: Path) -> None:
    assert table([run_stage("a", inexact, tmp_path, gpu=False)]).splitlines()[-1] == (
        "a: error: 0.002 (at most 0.001)"
    )


def test_a_good_stage_on_a_cpu_has_not_passed(tmp_path: Path) -> None:
    assert run_stage("a", good, tmp_path, gpu=False).verdict is Verdict.NEEDS_GPU


def test_times_and_rates_of_a_cpu_are_not_judged(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), tmp_path)
    bench.measure("copy", 1.0, "GB/s", at_least=20)
    assert bench.figures == [Figure("copy", 1.0, "GB/s")]


def test_a_stage_that_dies_or_hangs_fails_alone(tmp_path: Path) -> None:
    done = python(
        "import os, time\n"
        "from pathlib import Path\n"
        "from agenticrun_workers.gpu_check.__main__ import Entry, _run\n"
        "def dies(bench): os.kill(os.getpid(), 9)\n"
        "def hangs(bench): time.sleep(60)\n"
        "for stage in (dies, hangs):\n"
        f"    outcome = _run(Entry('a', 'm', 0.01), stage, Path({str(tmp_path)!r}), gpu=False)\n"
        "    print(outcome.verdict, outcome.error, sep='|')"
    )
    assert done.stdout.splitlines() == [
        "failed|its process ended with exit code -9",
        "failed|it took more than 0.01 minutes",
    ], done.stderr
