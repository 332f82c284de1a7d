"""`make demo`: from nothing to a trained policy on a real cluster, with live progress.

Brings up the cluster (tools/devcluster), makes the images available, installs the chart, applies
examples/frozen-lake.yaml and shows the status of the run until it ends. Safe to repeat: it reuses
what exists. On a machine that cannot have a cluster, the same YAML runs in local mode.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from devcluster.kubectl import Kubectl
from devcluster.shell import DevclusterError
from devcluster.waiting import CANNOT_PASS, Wait, wait_for

ROOT = Path(__file__).resolve().parent.parent
DEVCLUSTER = [sys.executable, str(ROOT / "tools/devcluster")]
NO_CLUSTER = 3
"""Exit code of `devcluster up` where no cluster can be had."""
SYSTEM = "agenticrun-system"
RELEASE = "agenticrun"
FINAL = ("Succeeded", "Failed")
SPARKS = "▁▂▃▄▅▆▇█"

console = Console(highlight=False)


class Steps:
    """Names each phase of the demo and how long it took."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self.start:6.0f} s[/]  [bold]{escape(text)}[/]")


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
    parser.add_argument(
        "--operator-only", action="store_true", help="stop when the operator is available"
    )
    options = parser.parse_args()
    file: Path = options.file
    steps = Steps()
    steps.say("cluster")
    up = subprocess.run([*DEVCLUSTER, "up"], cwd=ROOT, check=False).returncode
    if up == NO_CLUSTER and not options.operator_only:
        local = [str(ROOT / ".venv/bin/agenticrun"), "run", "-f", str(file)]
        return subprocess.run(local, cwd=ROOT, check=False).returncode
    if up:
        return up
    try:
        kubectl = install_operator(file, steps)
        return 0 if options.operator_only else train(kubectl, file, steps)
    except DevclusterError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def install_operator(file: Path, steps: Steps) -> Kubectl:
    """Install the operator, with the images that the run needs, on the cluster that is up."""
    environment = _environment()
    program = shutil.which("kubectl", path=environment["PATH"])
    if program is None:
        raise DevclusterError("kubectl is not on the PATH that `python3 tools/devcluster env` sets")
    kubectl = Kubectl(program, Path(environment["KUBECONFIG"]))
    steps.say("images")
    build = [*DEVCLUSTER, "images", *engine_options(file)]
    built = subprocess.run(build, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        raise DevclusterError("the images cannot be made, see the output above")
    steps.say("operator")
    install_chart(environment, json.loads(built.stdout))
    wait_for(
        "the operator to be available",
        lambda: kubectl.deployment_available(SYSTEM, RELEASE),
        lambda: kubectl.reports(SYSTEM),
        tell=steps.say,
    )
    return kubectl


def train(kubectl: Kubectl, file: Path, steps: Steps) -> int:
    """Apply the run and follow it to its end."""
    steps.say(f"apply {file.name}")
    name = apply(kubectl, file)
    phase = watch(kubectl, name, steps)
    result = _result(find_run(kubectl, name))
    print(f"\n{result}\n{kubectl('get', 'agenticruns', name)}", flush=True)
    _next_lines(name)
    return 0 if phase == "Succeeded" else 1


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
    """Return the options of `devcluster images` for the engine of the run, if it is a server."""
    run = next(doc for doc in yaml.safe_load_all(file.read_text()) if doc["kind"] == "AgenticRun")
    engine = (
        run["spec"]["pipeline"]
        .get("actorInfer", {})
        .get("strategy", {})
        .get("name", "transformers")
    )
    return [] if engine == "transformers" else ["--engines", engine]


def install_chart(environment: dict[str, str], images: dict[str, str]) -> None:
    """Install the operator with the images of this tree, or upgrade it to them.

    Raises:
        DevclusterError: kubectl or helm failed; the message is what it printed.
    """
    crds = str(ROOT / "crds/agenticruns.yaml")
    apply_crds = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", crds]
    install = ["helm", "upgrade", "--install", RELEASE, str(ROOT / "charts/agenticrun")]
    install += ["--namespace", SYSTEM, "--create-namespace", "--set", "replicas=1"]
    repository, tag = images["operator"].rsplit(":", 1)
    install += ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}"]
    install += ["--set", f"images.worker={images['worker']}"]
    for engine in (name.removeprefix("worker-") for name in images if name.startswith("worker-")):
        install += ["--set", f"images.workers.{engine}={images[f'worker-{engine}']}"]
    for command in (apply_crds, install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DevclusterError(f"{' '.join(command[:3])}: {done.stderr.strip()}")


def apply(kubectl: Kubectl, file: Path) -> str:
    """Apply the run. One that finished earlier is deleted, so that a second demo trains again."""
    documents = yaml.safe_load_all(file.read_text())
    name = str(next(doc["metadata"]["name"] for doc in documents if doc["kind"] == "AgenticRun"))
    if find_run(kubectl, name).get("status", {}).get("phase") in FINAL:
        kubectl("delete", "agenticrun", name)
    kubectl("apply", "-f", str(file))
    return name


def find_run(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Return the AgenticRun, or {} if there is none."""
    out = kubectl("get", "agenticrun", name, "--output=json", "--ignore-not-found")
    found: dict[str, Any] = json.loads(out) if out.strip() else {}
    return found


def watch(kubectl: Kubectl, name: str, steps: Steps) -> str:
    """Show the status of the run until it finishes; return its phase.

    Raises:
        CannotPass: an object of the run reports, before it trains, a problem that stays.
    """
    curve: dict[int, float] = {}
    shown, note, stage = "", "", ""
    trained = False
    wait: Wait | None = None

    def tell(line: str) -> None:
        nonlocal note
        note = line
        if not console.is_terminal:
            steps.say(line)

    with Live(console=console, refresh_per_second=4, transient=False, auto_refresh=False) as live:
        while True:
            run = find_run(kubectl, name)
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
            phase = str(status.get("phase", "Pending"))
            line = _line(status, success)
            if line != shown and not console.is_terminal:
                steps.say(line)
            shown = line
            trained = trained or phase == "Running"
            if wait is None or stage != (line if trained else phase):
                stage, note = line if trained else phase, ""
                wait = Wait(
                    f"{name} ({stage})",
                    lambda: kubectl.reports("default", "pods,rayclusters", prefix=name),
                    # Once it has trained, the operator decides whether it restarts or fails.
                    rules=() if trained else CANNOT_PASS,
                    tell=tell,
                )
            if console.is_terminal:
                live.update(_view(name, status, metrics, curve, note), refresh=True)
            if phase in FINAL:
                return phase
            wait.look()
            time.sleep(1)


def _line(status: dict[str, Any], success: float | None) -> str:
    """Return the run in one line, for logs.

    It changes with the phase, the activity before the first step, every tenth step and each
    validation.
    """
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
    """Return the message of the first condition that is not true yet."""
    return next(
        (
            c["message"]
            for c in status.get("conditions", [])
            if c["status"] != "True" and c.get("message")
        ),
        "",
    )


def _view(
    name: str,
    status: dict[str, Any],
    metrics: dict[str, float],
    curve: dict[int, float],
    note: str,
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
    if note:
        lines.append(Text(note, style="dim"))
    return Group(*lines)


def _result(run: dict[str, Any]) -> str:
    """Return the success of the policy beside that after warm-up and that of random actions."""
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
            f"{tag}: success on unseen levels {metrics[f'val/{tag}/success']:.2f}"
            f" ({', '.join(others)})"
        )
    return "\n".join(lines) or run["status"].get("message", "")


def _next_lines(name: str) -> None:
    """Print what to type next."""
    context = "" if os.environ.get("CONTEXT") else 'eval "$(python3 tools/devcluster env)"\n'
    console.print(
        f"\n[bold]Next[/]\n{context}kubectl get agenticruns\nkubectl describe agenticrun {name}\n"
        f"kubectl -n {SYSTEM} logs deploy/agenticrun\nmake down"
    )


if __name__ == "__main__":
    sys.exit(main())
