"""The first start reads nothing before the prerequisites exist, and waits report what they see."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devcluster import node as node_module
from devcluster.binaries import Binaries
from devcluster.clusters import HostCluster
from devcluster.node import Node
from devcluster.settings import Settings
from devcluster.shell import DevclusterError
from devcluster.waiting import Observe

_TOOLS = Path(__file__).resolve().parents[3] / "tools"
# Imports every module with the functions that look at a machine replaced by ones that refuse.
_IMPORT_BLINDFOLDED = """
import importlib, os, pathlib, pkgutil, shutil, subprocess, tempfile
import devcluster

def refuse(*arguments, **more):
    raise AssertionError(f"looks at the machine while it is imported: {arguments}")

for place, names in {
    shutil: ["which"],
    subprocess: ["run", "Popen", "check_output"],
    os: ["access", "listdir"],
    pathlib.Path: ["exists", "is_dir", "is_file", "read_text", "read_bytes", \
"iterdir", "glob", "mkdir"],
}.items():
    for name in names:
        setattr(place, name, refuse)
for name in NAMES:
    print(importlib.import_module(f"devcluster.{name}").__name__)
"""


def test_modules_look_at_nothing_while_they_are_imported() -> None:
    names = [
        path.stem
        for path in (_TOOLS / "devcluster").glob("*.py")
        if path.stem not in ("__init__", "__main__")
    ]
    program = _IMPORT_BLINDFOLDED.replace("NAMES", repr(names))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_TOOLS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(names)


def test_a_cluster_that_is_constructed_looks_at_nothing_but_our_own_files(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = (str(tmp_path), str(_TOOLS))
    looked: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def look(path: Any = ".", *arguments: Any, **more: Any) -> Any:
            if not str(path).startswith(ours):
                looked.append(f"{name} {path}")
            return real(path, *arguments, **more)

        return look

    with monkeypatch.context() as patch:
        for name in ("stat", "scandir", "listdir", "access"):
            patch.setattr(os, name, watched(name))
        patch.setattr(
            subprocess, "Popen", lambda *arguments, **more: looked.append(f"runs {arguments}")
        )
        HostCluster(settings)
    assert looked == []
    assert list(tmp_path.iterdir()) == [], "nothing is written either"


def test_a_wait_for_a_component_ends_at_once_with_the_log_of_one_that_has_ended(
    settings: Settings,
) -> None:
    node = Node(settings, Binaries(settings))
    settings.logs.mkdir(parents=True)
    (settings.logs / "coredns.log").write_text("listen udp 10.96.0.10:53: bind: cannot assign\n")
    with pytest.raises(DevclusterError, match=r"(?s)coredns ended.*cannot assign"):
        node._wait("CoreDNS to answer", "coredns", lambda: True)


def test_a_wait_for_a_component_shows_the_last_line_of_its_log(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def look(what: str, condition: object, observe: Observe, *, seconds: float) -> None:
        seen.extend(map(str, observe()))

    monkeypatch.setattr(node_module, "wait_for", look)
    node = Node(settings, Binaries(settings))
    node._wait("CoreDNS to answer", "coredns", lambda: True)
    settings.logs.mkdir(parents=True)
    (settings.logs / "coredns.log").write_text("starting\nplugin/kubernetes: waiting\n\n")
    node._wait("CoreDNS to answer", "coredns", lambda: True)
    assert [line.partition(".log: ")[2] for line in seen] == [
        "(the log is empty)",
        "plugin/kubernetes: waiting",
    ]
