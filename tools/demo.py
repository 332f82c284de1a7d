"""`make demo`: from nothing to a trained policy on a real cluster, with live progress.

Brings up the cluster (tools/devcluster), makes the images available, installs the chart, applies examples/frozen-lake.yaml and shows
the run's own status until it ends. Safe to repeat: what exists is reused. Where no cluster can be had, the same YAML runs in local mode.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
DEVCLUSTER = [sys.executable, str(ROOT / "tools/devcluster")]
NO_CLUSTER = 3
"""Exit code of `devcluster up` where no cluster can be had."""
SYSTEM = "agenticrun-system"
SPARKS = "▁▂▃▄▅▆▇█"

console = Console(highlight=False)


@dataclass
class Kubectl:
    """kubectl and helm with the cluster's own kubeconfig and binaries."""

    env: dict[str, str]

    def __call__(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            ["kubectl", *arguments], env=self.env, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def run_object(self, name: str) -> dict[str, Any]:
        """The AgenticRun, or {} if there is none."""
        out = self("get", "agenticrun", name, "-o", "json", "--ignore-not-found")
        found: dict[str, Any] = json.loads(out) if out.strip() else {}
        return found


class Steps:
    """Names each phase of the demo and how long it took."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self.start:6.0f} s[/]  [bold]{text}[/]")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=ROOT / "examples/frozen-lake.yaml",
        help="the AgenticRun to apply",
    )
    arguments = parser.parse_args()
    steps = Steps()
    steps.say("cluster")
    up = subprocess.run([*DEVCLUSTER, "up"], cwd=ROOT, check=False).returncode
    if up == NO_CLUSTER:
        return subprocess.run(
            [str(ROOT / ".venv/bin/agenticrun"), "run", "-f", str(arguments.file)],
            cwd=ROOT,
            check=False,
        ).returncode
    if up:
        return up
    kubectl = Kubectl(_environment())
    steps.say("images")
    build = [*DEVCLUSTER, "images", *engine_options(arguments.file)]
    images = json.loads(
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    steps.say("operator")
    install_chart(kubectl, images)
    steps.say(f"apply {arguments.file.name}")
    name = apply(kubectl, arguments.file)
    outcome = watch(kubectl, name, steps)
    print(
        f"\n{_result(kubectl.run_object(name))}\n{kubectl('get', 'agenticruns', name)}", flush=True
    )
    _next_lines(name)
    return 0 if outcome == "Succeeded" else 1


def _environment() -> dict[str, str]:
    """The process environment plus what `devcluster env` exports."""
    exports = subprocess.run(
        [*DEVCLUSTER, "env"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    command = f"{exports}\nenv -0"
    shown = subprocess.run(
        ["bash", "-c", command], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return dict(line.split("=", 1) for line in shown.split("\0") if "=" in line)


def engine_options(file: Path) -> list[str]:
    """Options of `devcluster images`: the worker image with the engine that the run samples with, if it is a server of its own."""
    run = next(doc for doc in yaml.safe_load_all(file.read_text()) if doc["kind"] == "AgenticRun")
    engine = (
        run["spec"]["pipeline"]
        .get("actorInfer", {})
        .get("strategy", {})
        .get("name", "transformers")
    )
    return [] if engine == "transformers" else ["--engines", engine]


def install_chart(kubectl: Kubectl, images: dict[str, str]) -> None:
    """Install or upgrade the operator with the images of this tree."""
    kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds/agenticruns.yaml")
    )
    repository, tag = images["operator"].rsplit(":", 1)
    command = [
        "helm",
        "upgrade",
        "--install",
        "agenticrun",
        str(ROOT / "charts/agenticrun"),
        "--namespace",
        SYSTEM,
        "--create-namespace",
    ]
    command += [
        "--set",
        f"image.repository={repository}",
        "--set",
        f"image.tag={tag}",
        "--set",
        f"images.worker={images['worker']}",
    ]
    for engine in (name.removeprefix("worker-") for name in images if name.startswith("worker-")):
        command += ["--set", f"images.workers.{engine}={images[f'worker-{engine}']}"]
    command += ["--wait", "--timeout", "5m"]
    done = subprocess.run(command, env=kubectl.env, capture_output=True, text=True, check=False)
    if done.returncode:
        pods = kubectl("-n", SYSTEM, "get", "pods", "-o", "wide", check=False)
        sys.exit(f"helm: {done.stderr.strip()}\n{pods}")


def apply(kubectl: Kubectl, file: Path) -> str:
    """Apply the run; one that finished earlier is deleted first, so that a second demo trains again."""
    name: str = next(
        doc["metadata"]["name"]
        for doc in yaml.safe_load_all(file.read_text())
        if doc["kind"] == "AgenticRun"
    )
    if kubectl.run_object(name).get("status", {}).get("phase") in ("Succeeded", "Failed"):
        kubectl("delete", "agenticrun", name)
    kubectl("apply", "-f", str(file))
    return name


def watch(kubectl: Kubectl, name: str, steps: Steps) -> str:
    """Show the run's status until it finished; returns its phase."""
    curve: dict[int, float] = {}
    shown = ""
    with Live(console=console, refresh_per_second=4, transient=False, auto_refresh=False) as live:
        while True:
            run = kubectl.run_object(name)
            status = run.get("status", {})
            metrics = {
                metric["name"]: float(metric["value"]) for metric in status.get("metrics", [])
            }
            success = next(
                (
                    value
                    for key, value in metrics.items()
                    if re.fullmatch(r"val/[^/]+/success", key)
                ),
                None,
            )
            if success is not None:
                every = run["spec"]["pipeline"]["evalSteps"]
                curve[status["step"] // every] = success
            if console.is_terminal:
                live.update(_view(name, status, metrics, curve), refresh=True)
            else:
                line = _line(status, success)
                if line != shown:
                    steps.say(line)
                    shown = line
            if status.get("phase") in ("Succeeded", "Failed"):
                return str(status["phase"])
            time.sleep(1)


def _line(status: dict[str, Any], success: float | None) -> str:
    """The run in one line, for logs: changes with the phase, what it does before the first step, every tenth step, each validation."""
    step = status.get("step", 0) or 0
    doing = (
        ""
        if step
        else status.get("activity", "")
        if status.get("phase") == "Running"
        else _waiting(status)
    )
    parts = [status.get("phase", "Pending"), doing]
    parts += [f"step {step - step % 10}/{status.get('maxSteps', '?')}"] if step else []
    parts += [f"success {success:.2f}"] if success is not None else []
    return "  ".join(part for part in parts if part)


def _waiting(status: dict[str, Any]) -> str:
    """What the first condition that is not yet true waits for."""
    return next(
        (
            c["message"]
            for c in status.get("conditions", [])
            if c["status"] != "True" and c.get("message")
        ),
        "",
    )


def _view(
    name: str, status: dict[str, Any], metrics: dict[str, float], curve: dict[int, float]
) -> Group:
    """The run as a few lines for a terminal."""
    step, steps = status.get("step") or 0, status.get("maxSteps") or 1
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(name, style="bold"),
        status.get("phase", "Pending"),
        ProgressBar(total=steps, completed=step, width=40),
        f"{step}/{steps}",
    )
    facts = Table.grid(padding=(0, 2))
    values = [
        ("activity", status.get("activity")),
        ("reward", status.get("reward")),
        ("tokens/s", status.get("tokensPerSecond")),
        ("eta", status.get("eta")),
    ]
    facts.add_row(*(f"{key} [bold]{value}[/]" for key, value in values if value))
    lines: list[Any] = [bar, facts]
    if curve:
        spark = "".join(SPARKS[min(7, int(value * 8))] for _, value in sorted(curve.items()))
        random = next(
            (value for key, value in metrics.items() if key.endswith("/random_success")), None
        )
        beside = f"   random policy {random:.2f}" if random is not None else ""
        lines.append(Text(f"success on unseen maps  {spark}  {curve[max(curve)]:.2f}{beside}"))
    if status.get("phase") not in ("Running", "Succeeded"):
        lines.append(Text(status.get("message") or _waiting(status), style="dim"))
    return Group(*lines)


def _result(run: dict[str, Any]) -> str:
    """What the policy can do now, beside what it could before and what chance can."""
    metrics = {
        metric["name"]: float(metric["value"]) for metric in run["status"].get("metrics", [])
    }
    tags = sorted(
        match[1]
        for match in (re.fullmatch(r"val/([^/]+)/success", name) for name in metrics)
        if match
    )
    lines = []
    for tag in tags:
        beside = [("after warm-up", "warmup_success"), ("random valid actions", "random_success")]
        others = [
            f"{words} {metrics[f'val/{tag}/{name}']:.2f}"
            for words, name in beside
            if f"val/{tag}/{name}" in metrics
        ]
        lines.append(
            f"{tag}: success on unseen levels {metrics[f'val/{tag}/success']:.2f} ({', '.join(others)})"
        )
    return "\n".join(lines) or run["status"].get("message", "")


def _next_lines(name: str) -> None:
    """What to type next."""
    context = "" if os.environ.get("CONTEXT") else 'eval "$(python3 tools/devcluster env)"\n'
    console.print(
        f"\n[bold]Next[/]\n{context}kubectl get agenticruns\nkubectl describe agenticrun {name}\n"
        f"kubectl -n {SYSTEM} logs deploy/agenticrun\nmake down"
    )


if __name__ == "__main__":
    sys.exit(main())
