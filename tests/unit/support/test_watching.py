"""The history of a run has no gap when kubectl's watch ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

from testcluster import Cluster
from watching import Watch

KUBECTL = """#!/bin/sh
[ -e "$0.again" ] && { echo '%s'; echo '%s'; exec sleep 60; }
touch "$0.again"
echo '%s'
printf '%s'
"""


def event(kind: str, step: int) -> str:
    metadata = {"uid": "a", "resourceVersion": str(step)}
    document = {"metadata": metadata, "status": {"phase": "Running", "step": step}}
    return json.dumps({"type": kind, "object": document})


def test_a_watch_of_kubectl_that_ends_begins_again(tmp_path: Path) -> None:
    cut_off = event("MODIFIED", 2)[:40]
    lines = (event("ADDED", 1), event("MODIFIED", 3), event("ADDED", 1), cut_off)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL % lines)
    kubectl.chmod(0o755)
    cluster = Cluster({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, "runs")
    with Watch(cluster, "lake") as watch:
        watch.wait(lambda seen: seen.step == 3, 30, "the last step")
    assert [seen.step for seen in watch.history] == [1, 3]
