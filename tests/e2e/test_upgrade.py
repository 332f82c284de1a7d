"""Upgrades while runs go on, with the commands of docs/upgrade.md.

From the previous version to this tree and back, and with the CRD of a later version. They are
drills (AGENTICRUN_E2E_DRILLS=all), and need the history of the repository.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api.names import LABEL_RUN
from agenticrun_api.version import __version__
from installation import ALL_DRILLS, Images, Operator
from lake import Pods, behind_gate, small_lake
from testcluster import ROOT, Cluster, CommandFailed, devcluster
from waiting import eventually

SYSTEM = "agenticrun-e2e-upgrade-system"
RUNS = "agenticrun-e2e-upgrade"
RELEASE = "agenticrun-upgrade"
CHART = "charts/agenticrun"
CRD = f"{CHART}/crds/agenticruns.yaml"
OURS = {"agenticrun": RELEASE, "agenticrun-system": SYSTEM}
"""Names of the release and its namespace on the page, and those used here."""
TRUE_WITHIN_SECONDS = 10.0
"""The status is true again so long after the new operator is ready."""
READING_SECONDS = 25.0
"""Time between two commands of a user. An operator looks at everything every 20 s, so it has seen
the CRD of another release then."""
SPARE_STEPS = 12
"""Steps that a run may make until it is told to go on, so that it does not end too early."""

pytestmark = [
    pytest.mark.skipif(not ALL_DRILLS, reason="AGENTICRUN_E2E_DRILLS=all"),
    pytest.mark.timeout(2400, func_only=True),
]


@dataclass(frozen=True)
class Release:
    """A source tree, and the images built from it."""

    root: Path
    images: Images

    def image_values(self) -> dict[str, Any]:
        """Return the chart's values that name the images."""
        repository, tag = self.images.operator.rsplit(":", 1)
        return {
            "image": {"repository": repository, "tag": tag},
            "images": {"worker": self.images.worker},
        }


@pytest.fixture(scope="session")
def this_tree(images: Images) -> Release:
    return Release(ROOT, images)


@pytest.fixture(scope="session")
def previous(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The version before this tree's, built from its own sources by the tools of this tree."""
    commit = previous_version()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=True
    ).stdout
    root = tmp_path_factory.mktemp("agenticrun-previous")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(root, filter="data")
    done = devcluster("images", "--source", str(root))
    assert done.returncode == 0, f"the images of {commit} cannot be built, see the output above"
    built = json.loads(done.stdout)
    return Release(root, Images(built["operator"], built["worker"], {}))


def previous_version() -> str:
    """Return the commit of the version before this tree's.

    The newest tag before this version's own, or without tags what CHANGELOG.md says: with a section
    "Unreleased", the commit that dated the newest release; without, the one before it.
    """
    if tag := git("describe", "--tags", "--abbrev=0", f"--exclude=v{__version__}", "--match=v*"):
        return git("rev-parse", f"{tag}^{{commit}}")
    headings = re.findall(r"^## .+$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = next(heading for heading in headings if heading != "## Unreleased")
    dated = git("log", "--format=%H", f"-S{released}", "--", "CHANGELOG.md").splitlines()
    before = "^" if dated and headings[0] == released else ""
    found = git("rev-parse", "--verify", f"{dated[-1] if dated else 'HEAD'}{before}")
    assert found, (
        "the commit of the previous version is missing here: clone the repository with its "
        "history, or complete it by `git fetch --unshallow`"
    )
    return found


def git(*words: str) -> str:
    """Return the output of a git command in this repository; empty if it fails."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


@contextmanager
def installed(cluster: Cluster, release: Release) -> Iterator[Operator]:
    """Install a release with its CRD; remove it at the end, and put this tree's CRD back."""
    with cluster.new_namespace(RUNS) as runs, cluster.new_namespace(SYSTEM) as system:
        apply_crd(cluster, release.root / CRD)
        values = release.image_values() | {"watchNamespaces": [RUNS], "logLevel": "debug"}
        chart, options = str(release.root / CHART), ("-n", SYSTEM, "--wait", "--timeout=10m")
        try:
            words = ("helm", "install", RELEASE, chart, "--skip-crds", "-f", "-", *options)
            system.command(*words, stdin=json.dumps(values))
            operator = Operator(system, RELEASE)
            yield operator
        finally:
            with suppress(CommandFailed):
                print(runs.kubectl("get", "agenticruns,rayclusters,pods", "-o", "wide"))
                print(runs.kubectl("get", "agenticruns", "-o", "yaml"))
                print(system.kubectl("logs", f"deployment/{RELEASE}", "--tail=100"))
            apply_crd(cluster, ROOT / CRD)
            runs.kubectl("delete", "agenticruns", "--all", "--wait=true")
            system.command("helm", "uninstall", RELEASE, "--ignore-not-found", *options)


def apply_crd(cluster: Cluster, file: Path) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file))


def commands(heading: str) -> list[list[str]]:
    """Return the commands of a section of the page, without those of its subsections."""
    page = (ROOT / "docs/upgrade.md").read_text()
    _, _, rest = page.partition(f"\n{heading}\n")
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    section = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for line in section.splitlines() if line.startswith("    ")]
    assert lines, f"docs/upgrade.md has no commands below {heading!r}"
    return lines


def carry_out(cluster: Cluster, command: list[str], **other: str) -> str:
    """Run a command of the page, with this installation's names in it.

    Args:
        cluster: the cluster.
        command: the words of the command.
        other: more words, and what is put in their place.
    """
    words = [OURS.get(word, other.get(word, word)) for word in command]
    words = [str(ROOT / word) if word.startswith(CHART) else word for word in words]
    print(f"{time.strftime('%H:%M:%S')} {' '.join(words)}", flush=True)
    return cluster.command(*words)


class Run:
    """A run that goes on while the operator changes."""

    def __init__(self, runs: Cluster, name: str, max_steps: int) -> None:
        self._runs = runs
        self.name = name
        self.max_steps = max_steps
        self.pods = Pods(runs, name)

    @property
    def status(self) -> dict[str, Any]:
        found = self._runs.get("agenticrun", self.name)
        assert found is not None
        status: dict[str, Any] = found.get("status", {})
        return status

    def condition(self, kind: str) -> dict[str, Any]:
        """Return the condition of this type, or {}."""
        found = self.status.get("conditions", ())
        return next((item for item in found if item["type"] == kind), {})

    def wait(self, phase: str, seconds: float = 600) -> None:
        """Wait until the run has this phase; fail if it fails."""

        def reached() -> bool:
            status = self.status
            failed = status.get("phase") == "Failed" != phase
            assert not failed, f"{self.name} failed: {status.get('message')}"
            return status.get("phase") == phase

        eventually(reached, seconds, f"{self.name} is {phase}", interval=0.5)

    def wait_for_step(self, step: int) -> None:
        eventually(
            lambda: self.status.get("step", 0) >= step,
            600,
            f"{self.name} has made {step} steps",
            interval=0.5,
        )

    def identity(self) -> dict[str, Any]:
        """Return all that changes if any part of the run starts again."""
        status = self.status
        containers = sorted(
            (pod["metadata"]["uid"], item["name"], item["restartCount"])
            for pod in self._runs.list("pods", f"{LABEL_RUN}={self.name}")
            for item in pod["status"].get("containerStatuses", ())
        )
        cluster = self._runs.get("raycluster", self.name)
        return {
            "containers": containers,
            "RayCluster": cluster and cluster["metadata"]["uid"],
            "attempt": status["job"]["attempt"],
            "submission": status["job"]["submissionId"],
            "restarts": status["restarts"],
            "start": status["startTime"],
            "completion": status.get("completionTime"),
        }

    def reported_step(self) -> int:
        """Return the newest step by the reporter in the head pod, whatever the status says."""
        return int(self.pods.progress()["step"])

    def trains_on(self) -> None:
        """Check that new steps are made, and let the run make some more."""
        before = self.reported_step()
        self.pods.allow(before + SPARE_STEPS)
        eventually(
            lambda: self.reported_step() > before, 120, f"{self.name} makes steps", interval=0.5
        )

    def ends_well(self, before: dict[str, Any]) -> None:
        """Check that the run succeeds in its first attempt, after its last step.

        Args:
            before: an earlier `identity`.
        """
        self.pods.allow(10 * self.max_steps)
        self.wait("Succeeded")
        after, status = self.identity(), self.status
        gone = ("containers", "RayCluster", "completion")  # the pods are deleted at the end
        assert [after[key] for key in after if key not in gone] == [
            before[key] for key in before if key not in gone
        ]
        assert (status["step"], status["restarts"]) == (self.max_steps, 0)


def statuses_are_true(*runs: Run, seconds: float = TRUE_WITHIN_SECONDS) -> None:
    """Check that each status shows the newest step and a training driver, in time from now on."""
    began = time.monotonic()
    steps = {run: run.reported_step() for run in runs}

    def are_true() -> bool:
        return all(
            run.status["step"] >= step and run.condition("Training").get("status") == "True"
            for run, step in steps.items()
        )

    shown = ", ".join(f"{run.name} at step {step}" for run, step in steps.items())
    left = seconds - (time.monotonic() - began)
    eventually(are_true, left, f"the status says the truth: {shown} trains", interval=0.2)
    print(f"true after {time.monotonic() - began:.1f} s: {shown}", flush=True)


def begin(
    runs: Cluster,
    name: str,
    max_steps: int,
    *,
    saves: bool = False,
    **more: Any,
) -> Run:
    """Apply a small run. It stops now and then until `Run.trains_on` or `Run.ends_well`.

    Args:
        runs: the namespace.
        name: of the run.
        max_steps: of the run.
        saves: give it a claim, and a checkpoint after each step; without, nothing is saved.
        more: fields of the spec.
    """
    storage: dict[str, Any] = {"uri": "/checkpoints", "volumeClaim": {"size": "1Gi"}}
    if saves:
        more["checkpoint"] = storage
    document = small_lake(name, max_steps=max_steps, save_steps=int(saves), **more)
    if not saves:
        document["spec"]["checkpoint"] = {"none": True}
    document["spec"]["pipeline"].pop("warmup")
    for role in document["spec"]["roles"].values():
        role["memory"] = "1536Mi"  # three runs at a time on a small node
    runs.apply(behind_gate(document, steps=SPARE_STEPS, seconds=0.5), document)
    return Run(runs, name, max_steps)


def test_runs_of_the_previous_version_survive_the_upgrade_and_the_way_back(
    cluster: Cluster, previous: Release, this_tree: Release
) -> None:
    with installed(cluster, previous) as operator:
        runs = cluster.in_namespace(RUNS)
        kept = begin(runs, "kept", 2, cleanup={"onSuccess": "Keep"})
        kept.wait("Succeeded")
        saving = begin(runs, "saving", 80, saves=True)
        bare = begin(runs, "bare", 130)
        for run in (saving, bare):
            run.wait_for_step(3)
        eventually(lambda: "checkpoint" in saving.status, 120, "a checkpoint", interval=0.5)
        before = {run: run.identity() for run in (kept, saving, bare)}

        crd, upgrade = commands("## The steps")
        carry_out(cluster, crd)
        for run in (saving, bare):
            run.trains_on()  # with the old operator
        time.sleep(READING_SECONDS)
        statuses_are_true(saving, bare)
        # The values of this installation name images, so the upgrade names the new ones.
        carry_out(cluster, upgrade + new_images(this_tree))
        is_ready(operator, this_tree)
        for run in (saving, bare):
            run.trains_on()
        statuses_are_true(saving, bare)
        assert {run: run.identity() for run in before} == before, "nothing starts again"
        saving.ends_well(before[saving])
        assert saving.status["checkpoint"]["step"] == saving.max_steps
        begin(runs, "fresh", 3).wait("Succeeded")

        history, rollback = commands("## The way back")
        carry_out(cluster, history)
        carry_out(cluster, rollback, REVISION="1")
        is_ready(operator, previous)
        bare.trains_on()
        statuses_are_true(bare, seconds=60)
        assert {run: run.identity() for run in (kept, bare)} == {
            run: before[run] for run in (kept, bare)
        }
        bare.ends_well(before[bare])


def is_ready(operator: Operator, release: Release) -> None:
    """Wait until the operator of this release is ready."""
    operator.wait_ready()
    print(f"{time.strftime('%H:%M:%S')} the operator is ready", flush=True)
    eventually(
        lambda: (
            {pod["spec"]["containers"][0]["image"] for pod in operator.system.list("pods")}
            == {release.images.operator}
        ),
        60,
        f"only pods of {release.images.operator} are there",
        interval=0.5,
    )


def new_images(release: Release) -> list[str]:
    """Return the options of helm that name the images of a release."""
    names = release.image_values()
    return [
        f"--set=image.repository={names['image']['repository']}",
        f"--set=image.tag={names['image']['tag']}",
        f"--set=images.worker={names['images']['worker']}",
    ]


def test_a_later_crd_comes_before_its_operator(
    cluster: Cluster, this_tree: Release, tmp_path: Path
) -> None:
    """A later version, of which only the CRD differs: it has new fields with defaults."""
    crd = yaml.safe_load((ROOT / CRD).read_text())
    fields = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    number = {"type": "integer", "default": 7}
    fields["spec"]["properties"]["later"] = {
        "type": "object",
        "default": {},
        "properties": {"number": number},
    }
    fields["spec"]["properties"]["pipeline"]["properties"]["later"] = number
    fields["status"]["properties"]["later"] = {"type": "string"}
    file = tmp_path / "later.yaml"
    file.write_text(yaml.safe_dump(crd))
    with installed(cluster, this_tree) as operator:
        runs = cluster.in_namespace(RUNS)
        steady = begin(runs, "steady", 80, saves=True)
        steady.wait_for_step(3)
        before = steady.identity()
        apply, upgrade = commands("## The steps")
        carry_out(cluster, [word.replace(CRD, str(file)) for word in apply])
        stored = runs.get("agenticrun", "steady")
        assert stored is not None
        assert stored["spec"]["later"] == {"number": 7}
        for _ in range(3):  # with the old operator
            steady.trains_on()
            statuses_are_true(steady)
        operator.delete_pod()
        statuses_are_true(steady)
        carry_out(cluster, [*upgrade, "--set=podAnnotations.version=later"])
        operator.wait_ready()
        statuses_are_true(steady)
        steady.trains_on()
        assert steady.identity() == before, "nothing starts again"
        steady.ends_well(before)
