"""Each benchmark can be imported and called. `make drills` runs them all, which takes minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
HELPERS = {"record", "trend"}
PROGRAM = """
import contextlib, importlib.util, io, json, sys

helps = {}
for name in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [f"{name}.py", "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        module.main()
    helps[name] = printed.getvalue()
print(json.dumps(helps))
"""
"""One process for all of them, because most of the time goes into importing torch and Ray."""


def test_each_benchmark_is_importable_and_takes_quick_and_json() -> None:
    names = sorted({file.stem for file in BENCHMARKS.glob("*.py")} - HELPERS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    helps = json.loads(done.stdout.splitlines()[-1])
    lacking = [
        f"{name} {option}"
        for name in names
        for option in ("--quick", "--json")
        if option not in helps[name]
    ]
    assert names
    assert not lacking
