"""The ConfigMap of `agenticrun package` on a real apiserver: it takes what we write, to the byte.

It refuses one byte more, as we do.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_workers.cli.package import HEADER, LIMIT, config_map, manifest_text
from control_plane import control_plane
from testcluster import ROOT, Cluster, CommandFailed


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane(tmp_path_factory.mktemp("plane")) as cluster:
        yield cluster


def contents(stored: dict[str, Any]) -> dict[str, bytes]:
    text = {name: value.encode() for name, value in stored.get("data", {}).items()}
    binary = {name: base64.b64decode(v) for name, v in stored.get("binaryData", {}).items()}
    return text | binary


def applied(plane: Cluster, manifest: dict[str, Any], *options: str) -> dict[str, bytes]:
    """Return what the apiserver stores of a manifest as we write it."""
    shown = plane.kubectl(
        *("apply", "--server-side", "-o", "json", *options, "-f", "-"),
        stdin=HEADER + manifest_text(manifest),
    )
    return contents(json.loads(shown))


def test_the_example_is_packaged_applied_and_named_by_its_run(
    plane: Cluster, tmp_path: Path
) -> None:
    example = ROOT / "examples/outside-agent"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agenticrun_workers.cli", "package"),
            *("-f", str(example / "agenticrun.yaml"), "--seeds", "5", "--timeout", "120"),
        ],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    command = next(line.split() for line in done.stdout.splitlines() if "--server-side" in line)
    written = tmp_path / command[-1]
    for _ in range(2):  # as it is applied again after a change
        plane.kubectl(*command[1:-1], str(written))
    run = yaml.safe_load((example / "agenticrun.yaml").read_text())
    stored = plane.get("configmap", run["spec"]["code"]["configMap"])
    assert stored is not None
    assert contents(stored) == {
        name: (example / name).read_bytes() for name in ("asker.py", "words.py")
    }


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\n",
        b"one line",
        *(b"y", b"No", b"null", b"~", b"1e5", b"0o7", b"0x1f", b"1:30", b".inf", b"2026-11-23"),
        b" leading\n  more\n\n\n",
        b"windows\r\nline\rends",
        "größe = '词'\n# \u2028 \x85 \ufeff".encode(),
        b"tab\tand trailing \nspaces  ",
        b"null: ~\n---\n...\n# comment",
        b"\x00control\x1b\n",
        bytes(range(256)),
    ],
)
def test_every_byte_arrives(plane: Cluster, odd: bytes) -> None:
    files = {"odd.py": odd, "-other._9": b"x = 1\n", "y": b"", "1e5": b"", "on": b"", "0": b""}
    assert applied(plane, config_map("odd", None, files), "--dry-run=server") == files


@pytest.mark.parametrize("byte", [b"a", b"\xff"], ids=["text", "binary"])
def test_the_limit_is_that_of_the_apiserver(plane: Cluster, byte: bytes) -> None:
    files = {"x" * 200: byte * (LIMIT - 3), "y": b"abc"}
    manifest = config_map("large", None, files)
    assert applied(plane, manifest) == files
    manifest["data"] = {**manifest.get("data", {}), "z": "1"}
    with pytest.raises(CommandFailed) as caught:
        applied(plane, manifest)
    assert "Too long: may not be more than 1048576 bytes" in caught.value.stderr


@pytest.mark.parametrize("key", ["a/b.py", "with space", "..hidden", "größe.py", "x" * 254])
def test_keys_that_we_refuse_are_refused_by_the_apiserver(plane: Cluster, key: str) -> None:
    manifest = config_map("keys", None, {"fine.py": b""})
    manifest["data"] = {key: ""}
    with pytest.raises(CommandFailed) as caught:
        applied(plane, manifest)
    assert "Invalid value" in caught.value.stderr


def test_apply_without_server_side_refuses_what_our_command_applies(plane: Cluster) -> None:
    manifest = config_map("annotated", None, {"large.py": b"a" * 300 * 1024})
    applied(plane, manifest)
    with pytest.raises(CommandFailed, match="annotations: Too long"):
        plane.kubectl(
            "apply", "-f", "-", stdin=manifest_text({**manifest, "metadata": {"name": "b"}})
        )
