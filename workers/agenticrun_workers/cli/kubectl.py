"""Calls kubectl: whatever the user's kubectl can reach and sign in to, our commands can."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any


class SourceError(Exception):
    """A run cannot be found, read or steered. The message says what to do."""


class NoKubectl(SourceError):
    """This machine has no kubectl."""


class NoCluster(SourceError):
    """kubectl knows no cluster."""


NO_CLUSTER = "localhost:8080"
"""The address that kubectl tries when nothing names a cluster."""


def without_log_lines(text: str) -> str:
    """Return what kubectl says to people, without the errors in its log format (E1123 ...)."""
    lines = [line for line in text.splitlines() if not re.match(r"E\d{4}\b", line)]
    return "\n".join(lines).strip() or text.strip()


class Kubectl:
    """Kubectl with a namespace and a context."""

    def __init__(self, namespace: str | None = None, context: str | None = None) -> None:
        self.context = context
        self._options = [
            *([f"--namespace={namespace}"] if namespace else []),
            *([f"--context={context}"] if context else []),
        ]

    def command(self, *words: str) -> list[str]:
        """Return a command line."""
        program = shutil.which("kubectl")
        if program is None:
            raise NoKubectl(
                "kubectl is not on the PATH: install it, or name the output folder of a run "
                "on this machine (./NAME)"
            )
        return [program, *self._options, *words]

    def run(self, *words: str, timeout: float = 60.0) -> bytes:
        """Run kubectl and return what it prints. Raises `SourceError` with what it says."""
        return self._call(words, timeout)

    def create(self, manifest: dict[str, Any]) -> None:
        """Create an object."""
        self._call(("create", "-f", "-"), 60.0, json.dumps(manifest).encode())

    def _call(self, words: tuple[str, ...], timeout: float, stdin: bytes | None = None) -> bytes:
        try:
            done = subprocess.run(
                self.command(*words), input=stdin, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise SourceError(f"kubectl {words[0]} took longer than {timeout:.0f} s") from None
        if done.returncode:
            said = without_log_lines(done.stderr.decode(errors="replace"))
            if NO_CLUSTER in said:
                raise NoCluster("kubectl knows no cluster: set KUBECONFIG, or pass --context")
            raise SourceError(f"kubectl {' '.join(words[:3])}: {said}")
        return done.stdout

    def json(self, *words: str) -> dict[str, Any]:
        """Return an object or a list."""
        found: dict[str, Any] = json.loads(self.run("get", *words, "-o", "json"))
        return found
