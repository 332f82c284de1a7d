"""The command: which places it looks at, and its exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agenticrun_api.version import __version__
from agenticrun_workers.cli.check_env import table
from agenticrun_workers.cli.common import Changes, load
from agenticrun_workers.cli.doctor.cluster import (
    KubectlOfOneLook,
    cluster_findings,
    run_there,
    try_network,
)
from agenticrun_workers.cli.doctor.machine import machine_findings, run_here
from agenticrun_workers.cli.kubectl import Kubectl
from agenticrun_workers.cli.source import Context, Namespace
from agenticrun_workers.findings import Finding, Report, Verdict


def doctor(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="YAML file with one AgenticRun: check what this run needs, too.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Check this machine only.")] = False,
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Start two pods in the namespace, and try if NetworkPolicies are enforced.",
        ),
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    changes: Changes = None,
) -> None:
    """Check this machine and the cluster that kubectl reaches, and say what to fix.

    With a run, check whether it can start on the cluster. With --local, or if kubectl knows no
    cluster, check whether it can start on this machine.
    Exit codes: 0 nothing stands in the way, 1 something does, 64 the run is invalid.
    """
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    reports: dict[str, Report] = {}

    def show(place: str, findings: dict[str, Finding], title: str = "") -> Report:
        reports[place] = Report(findings)
        console.print(table(reports[place], title or place))
        return reports[place]

    show("this machine", machine_findings(), f"this machine, AgenticRun {__version__}")
    here = local
    if not local:
        kubectl = KubectlOfOneLook(namespace, context)
        cluster = show("the cluster", cluster_findings(kubectl))
        here = cluster.findings["apiserver"].verdict is Verdict.NOT_CHECKED
        reached = len(cluster.findings) > 1
        if network and reached:
            tried = try_network(Kubectl(namespace, context))
            show("the network", {"NetworkPolicies": tried})
    if file is not None:
        run = load(file, changes, local=here)
        name = run.metadata.name
        if here:
            show(f"{name} on this machine", run_here(run, file.parent))
        else:
            del reports["this machine"]  # the run does not need it
            if reached:
                show(f"{name} on the cluster", run_there(run, file.parent, kubectl))
    failed = [
        f"{place}: {name}"
        for place, report in reports.items()
        for name in report.of(Verdict.FAILED)
    ]
    if failed:
        console.print(f"to fix: {', '.join(failed)}")
    raise typer.Exit(int(bool(failed)))
