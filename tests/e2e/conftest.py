"""The operator of this tree and a namespace of runs that it serves.

Its chart installs it with images of this tree.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator

import pytest

from installation import ENGINES, RELEASE, RUNS, SYSTEM, Images, Operator
from testcluster import ROOT, Cluster, devcluster
from waiting import eventually

FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Images:
    """Build what changed and make it available to the cluster."""
    done = devcluster("images", *(["--engines", ",".join(ENGINES)] if ENGINES else []))
    assert done.returncode == 0, "tools/devcluster images failed, see its output above"
    built = json.loads(done.stdout)
    return Images(
        built["operator"],
        built["worker"],
        {engine: built[f"worker-{engine}"] for engine in ENGINES},
    )


@pytest.fixture(scope="session")
def operator(cluster: Cluster, images: Images) -> Iterator[Operator]:
    """Installed as the README says, for one namespace."""
    repository, tag = images.operator.rsplit(":", 1)
    values = {
        "image": {"repository": repository, "tag": tag},
        "images": {"worker": images.worker, "workers": images.workers},
        "watchNamespaces": [RUNS],
        "replicas": 1,  # drills kill the operator, and see how another start goes
        "logLevel": "debug",
        "kueue": {"enabled": True},
    }
    with cluster.new_namespace(RUNS), cluster.new_namespace(SYSTEM) as system:
        cluster.kubectl(
            "apply",
            "--server-side",
            "--force-conflicts",
            "-f",
            str(ROOT / "charts/agenticrun/crds/agenticruns.yaml"),
        )
        chart = str(ROOT / "charts/agenticrun")
        install = (
            "helm",
            "install",
            RELEASE,
            chart,
            "-n",
            SYSTEM,
            "--skip-crds",
            "-f",
            "-",
            "--wait",
            "--timeout",
            "10m",
        )
        system.command(*install, stdin=json.dumps(values))
        yield Operator(system)
        cluster.in_namespace(RUNS).kubectl("delete", "agenticruns", "--all", "--wait=true")
        system.command("helm", "uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout", "10m")


@pytest.fixture
def runs(cluster: Cluster, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The namespace of the runs, empty before and after the test."""
    inside = cluster.in_namespace(RUNS)
    yield inside
    try:
        if request.node.stash.get(FAILED, False):
            print(inside.kubectl("get", "agenticruns,rayclusters,pods", "-o", "wide"))
            print(operator.log())
    finally:
        inside.kubectl("delete", "agenticruns", "--all", "--wait=true")
        eventually(
            lambda: not inside.list("pods,rayclusters"),
            300,
            "the pods of the test's runs are gone",
            interval=0.5,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember a failure, so that fixtures can show what the cluster looked like."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report
