"""The few things that this tool asks an apiserver, through kubectl."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devcluster.shell import run, succeeds


class Kubectl:
    """kubectl with one kubeconfig, and a context of it if one is named."""

    def __init__(self, program: Path | str, kubeconfig: Path | None = None, context: str = "") -> None:
        """Without a kubeconfig kubectl's own search order holds."""
        self._argv: list[str | Path] = [program]
        self._argv += ["--kubeconfig", kubeconfig] if kubeconfig else []
        self._argv += ["--context", context] if context else []

    def __call__(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Runs one command and returns its stdout; raises CommandFailed."""
        return run([*self._argv, *arguments], stdin=stdin)

    def ok(self, *arguments: str | Path) -> bool:
        """Whether the command succeeds."""
        return succeeds([*self._argv, *arguments])

    def get(self, *arguments: str) -> Mapping[str, Any]:
        """One object or list as parsed JSON."""
        parsed: Mapping[str, Any] = json.loads(self("get", *arguments, "--output=json"))
        return parsed

    def apply(self, source: Path | str, *, kustomization: bool = False) -> None:
        """Server-side apply: the KubeRay CRDs are larger than the annotation of client-side apply may be."""
        self("apply", "--server-side", "--force-conflicts", "-k" if kustomization else "-f", source)

    def deployment_available(self, namespace: str, name: str) -> bool:
        """Whether the deployment's newest generation has all its replicas available."""
        return self.ok("rollout", "status", f"deployment/{name}", f"--namespace={namespace}", "--timeout=1s")
