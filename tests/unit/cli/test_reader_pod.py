"""The output of a run without pods, read from its volume through a pod that is then deleted."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import typer

from agenticrun_api.load import parse_served
from agenticrun_api.names import LABEL_RUN
from agenticrun_workers.cli import reader_pod as module
from agenticrun_workers.cli import source as source_module
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.cli.reader_pod import OutputVolume, output_volume, reader_pod
from agenticrun_workers.cli.source import ClusterSource
from agenticrun_workers.cli.watch import samples
from agenticrun_workers.driver.checkpoints import cluster_folders
from agenticrun_workers.storage import Folder
from run_folders import make_run_folder
from runs import run_with

UID = "0123456789"
CLAIM = "lake-checkpoints"
OUTPUT = "/checkpoints/lake-01234567"
RUNNING: dict[str, Any] = {
    "phase": "Running",
    "containerStatuses": [{"name": "reader", "state": {"running": {}}}],
}
CREATING: dict[str, Any] = {
    "phase": "Pending",
    "containerStatuses": [
        {"name": "reader", "state": {"waiting": {"reason": "ContainerCreating"}}}
    ],
}
FORBIDDEN = (
    'Error from server (Forbidden): pods is forbidden: User "eve" cannot create resource "pods" '
    'in API group "" in the namespace "team"'
)


def served(*changes: tuple[str, Any], phase: str = "Succeeded", **status: Any) -> dict[str, Any]:
    """Return a run that says nothing about checkpoints and has ended, as the apiserver has it."""
    document = run_with(*changes, name="lake")
    metadata = {"namespace": "team", "uid": UID, "creationTimestamp": "2026-11-24T10:00:00Z"}
    image = {"name": "driver", "desired": 1, "ready": 0, "gpus": 0, "image": "worker:1"}
    document["metadata"] |= metadata
    document["status"] = {
        "phase": phase,
        "volumeClaim": CLAIM,
        "roles": [image],
        "job": {"attempt": 1, "submissionId": "lake-1"},
        **status,
    }
    return document


class Here(Kubectl):
    """A cluster with one run, of which the volume claim is a folder of this machine.

    Attributes:
        states: of the reader pod, one at each look; the last one stays.
        refusal: what the apiserver says to a pod.
        unanswered: what comes in place of its answer, when it has created the pod.
        interrupted: Ctrl-C comes while files are read.
    """

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        super().__init__()
        self.folder, self.document = folder, document
        self.states: list[dict[str, Any]] = [CREATING, RUNNING]
        self.events: list[dict[str, Any]] = []
        self.claim: dict[str, Any] | None = {"metadata": {"name": CLAIM}}
        self.refusal = ""
        self.unanswered: BaseException | None = None
        self.interrupted = False
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []

    def create(self, manifest: dict[str, Any]) -> None:
        if self.refusal:
            raise SourceError(f"kubectl create -f -: {self.refusal}")
        self.created.append(manifest)
        if self.unanswered:
            raise self.unanswered

    def run(self, *words: str, timeout: float = 60.0) -> bytes:
        if words[:2] == ("delete", "pod"):
            self.deleted.append(words[2])
            return b""
        assert words[0] == "exec"
        if self.interrupted:
            raise KeyboardInterrupt
        command = [word.replace("/checkpoints", str(self.folder)) for word in words[5:]]
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
        if done.returncode:
            raise SourceError(done.stderr.decode())
        return done.stdout

    def json(self, *words: str) -> dict[str, Any]:
        match words[0]:
            case "pods":
                return {"items": []}
            case "pod":
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                return {**self.created[-1], "status": state}
            case "persistentvolumeclaim":
                if self.claim is None:
                    raise SourceError('(NotFound): persistentvolumeclaims "x" not found')
                return self.claim
            case "events":
                return {"items": self.events}
        return self.document

    @property
    def names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.created]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """A run that names no storage has ended, and its pods are gone."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    folder = make_run_folder(tmp_path / "lake-01234567")
    (folder / "driver.log.1").write_text("step 3\n")
    (folder / "driver.log").write_text("step 4\n")
    found = Here(tmp_path, served(("spec.tracking", {"renderDir": "films"})))
    yield found
    assert found.deleted == found.names, "no pod is left"


def test_a_run_that_has_ended_is_read_whole(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    reading = ClusterSource(here, "lake").read()
    folder = reading.folder
    assert not reading.missing
    assert len([line for line in folder.metrics() if "time/step" in line]) == 4
    assert folder.attempts()
    (episode,) = folder.episodes(folder.sample_files()[-1])
    assert (episode.step, episode.validation) == (4, True)
    assert episode.picture is not None
    said = capsys.readouterr().err
    assert f"the run has ended: reading its output from claim {CLAIM} with a pod" in said


def test_the_log_of_a_driver_that_has_ended(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    ClusterSource(here, "lake").logs("driver", lines=2, follow=True)
    assert capsys.readouterr().out == "step 3\nstep 4\n"


@pytest.mark.parametrize("kept", ["volume", "storage"])
def test_a_driver_without_a_log_shows_the_end_that_the_status_has(here: Here, kept: str) -> None:
    for file in ("driver.log", "driver.log.1"):
        (here.folder / "lake-01234567" / file).unlink()
    storage = ("spec.checkpoint", {"uri": "memory://empty"})
    here.document = served(storage, volumeClaim=None) if kept == "storage" else here.document
    here.document["status"]["logTail"] = "no GPU\n"
    with pytest.raises(SourceError) as error:
        ClusterSource(here, "lake").logs("driver", lines=2, follow=False)
    assert str(error.value).startswith("driver.log: it is not in ")
    assert str(error.value).endswith("Its end, as the status has it:\nno GPU\n")


def test_the_log_of_a_driver_in_object_storage(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.document = served(("spec.checkpoint", {"uri": "memory://bucket"}), volumeClaim=None)
    stored = Folder("memory://bucket/lake-01234567")
    stored.write("driver.log.1", b"step 2\nstep 3\n")
    stored.write("driver.log", b"step 4\n")
    try:
        for lines, shown in ((2, "step 3\nstep 4\n"), (0, ""), (9, "step 2\nstep 3\nstep 4\n")):
            ClusterSource(here, "lake").logs("driver", lines=lines, follow=False)
            assert capsys.readouterr().out == shown
    finally:
        fsspec.filesystem("memory").store.clear()
    assert not here.created


def test_a_run_that_stands_still_is_read_once(here: Here) -> None:
    """`watch` looks at a suspended run every two seconds."""
    here.document["status"]["phase"] = "Suspended"
    source = ClusterSource(here, "lake")
    for _ in range(3):
        assert source.read(steps=500, samples=1).folder.metrics()
    assert len(here.created) == 1
    here.document["status"] |= {"phase": "Succeeded"}
    assert not source.read(steps=500, samples=1).missing
    assert len(here.created) == 2


def test_a_read_that_failed_is_tried_again_after_some_minutes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.document["status"]["phase"] = "Suspended"
    source = ClusterSource(here, "lake")
    here.refusal = "Error from server: etcdserver: request timed out"
    assert "etcdserver" in source.read().missing[0]
    here.refusal, here.deleted = "", []
    assert "etcdserver" in source.read().missing[0], "`watch` looks every two seconds"
    assert not here.created
    now = time.monotonic() + source_module.READ_AGAIN_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not source.read().missing
    assert not source.read().missing
    assert len(here.created) == 1


def test_a_claim_that_is_gone_is_not_looked_for_again(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, claim, here.claim = ClusterSource(here, "lake"), here.claim, None
    assert f"claim {CLAIM} is gone" in source.read().missing[0]
    here.claim, now = claim, time.monotonic() + 1e6
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert f"claim {CLAIM} is gone" in source.read().missing[0]


@pytest.mark.parametrize("phase", ["Starting", "Running", "Restarting", "Suspending"])
def test_the_volume_is_left_to_pods_that_need_it(here: Here, phase: str) -> None:
    here.document["status"]["phase"] = phase
    (problem,) = ClusterSource(here, "lake").read().missing
    assert f"the run is {phase} and has no head pod: try again when it trains" in problem
    assert not here.created


def event(reason: str, message: str, seconds: int) -> dict[str, Any]:
    kind = "Normal" if reason in ("Pulling", "Scheduled") else "Warning"
    time = f"2026-11-24T10:00:{seconds:02}Z"
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": time}


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 node(s) had volume node affinity conflict",
        }
    ],
}
REFUSED = {"waiting": {"reason": "CreateContainerConfigError", "message": "image runs as root"}}


@pytest.mark.parametrize(
    ("state", "events", "reason"),
    [
        (UNSCHEDULABLE, [], "Unschedulable: 0/3 nodes are available: 3 node(s) had volume"),
        (
            CREATING,
            [
                event("FailedAttachVolume", 'Multi-Attach error for volume "pvc-1"', 5),
                event("Scheduled", "to a", 1),
            ],
            'FailedAttachVolume: Multi-Attach error for volume "pvc-1"',
        ),
        (
            {**CREATING, "containerStatuses": [{"name": "reader", "state": REFUSED}]},
            [],
            "CreateContainerConfigError: image runs as root",
        ),
        ({"phase": "Pending"}, [], "no scheduler has looked at it"),
    ],
)
def test_a_pod_that_does_not_start_is_given_up_with_the_reason(
    here: Here,
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, Any],
    events: list[dict[str, Any]],
    reason: str,
) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.0)
    here.states, here.events = [state], events
    (problem,) = ClusterSource(here, "lake").read().missing
    assert f"claim {CLAIM} cannot be read: pod {here.names[0]} does not start: {reason}" in problem


def test_a_node_that_pulls_the_image_gets_more_time(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.0)
    here.states = [CREATING, CREATING, RUNNING]
    here.events = [event("Pulling", "image worker:1", 5), event("Scheduled", "to a", 1)]
    assert not ClusterSource(here, "lake").read().missing
    assert capsys.readouterr().err.count("its node pulls the image first") == 1


def test_ctrl_c_deletes_the_pod(here: Here) -> None:
    here.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        ClusterSource(here, "lake").read()
    assert here.created


def test_a_pod_that_was_created_without_an_answer_is_deleted(here: Here) -> None:
    here.unanswered = SourceError("kubectl create took longer than 60 s")
    (problem,) = ClusterSource(here, "lake").read().missing
    assert "took longer than 60 s" in problem
    here.unanswered = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ClusterSource(here, "lake").read()
    assert len(here.created) == 2


def test_an_output_folder_that_was_never_made_is_named(here: Here, tmp_path: Path) -> None:
    here.folder = tmp_path / "elsewhere"
    (problem,) = ClusterSource(here, "lake").read().missing
    assert f"there is no folder {here.folder}/lake-01234567 yet" in problem


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (None, f"claim {CLAIM} is gone, and the run's output with it"),
        ({"metadata": {"deletionTimestamp": "now"}}, f"claim {CLAIM} is being deleted"),
    ],
)
def test_a_claim_that_is_gone_needs_no_pod(here: Here, claim: Any, reason: str) -> None:
    here.claim = claim
    (problem,) = ClusterSource(here, "lake").read().missing
    assert reason in problem
    assert not here.created


def test_a_run_without_storage_says_that_its_output_is_lost(here: Here) -> None:
    here.document = served(("spec.checkpoint", {"none": True}), volumeClaim=None)
    (problem,) = ClusterSource(here, "lake").read().missing
    assert "lost with its pods: it saves no checkpoints (checkpoint.none)" in problem


def test_who_may_not_create_pods_gets_the_commands(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.refusal, here.context = FORBIDDEN, "far away"
    (problem,) = ClusterSource(here, "lake").read().missing
    said = capsys.readouterr().err
    assert f"only a pod can read claim {CLAIM}, and you may not create pods" in problem
    assert said.count("kubectl '--context=far away' ") == 4
    for piece in (" create -f - <<'EOF'", f'"claimName": "{CLAIM}"', f"tar -C {OUTPUT}"):
        assert piece in said, said
    assert not here.deleted, "there is no pod to delete"


def test_samples_that_cannot_be_read_are_no_samples_that_were_not_kept(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.claim = None
    monkeypatch.setattr(
        "agenticrun_workers.cli.watch.open_run", lambda *_: ClusterSource(here, "lake")
    )
    with pytest.raises(typer.Exit):
        samples("lake")
    said = capsys.readouterr().err
    assert f"claim {CLAIM} is gone" in said
    assert "sampleLogs" not in said


def test_what_else_the_apiserver_says_about_the_pod_is_passed_on(here: Here) -> None:
    reason = 'pods "lake-reader-1" is forbidden: exceeded quota: compute'
    here.refusal = f'Error from server (Forbidden): error when creating "STDIN": {reason}'
    (problem,) = ClusterSource(here, "lake").read().missing
    assert "exceeded quota: compute" in problem


def manifest_of(*changes: tuple[str, Any], **status: Any) -> dict[str, Any]:
    run = parse_served(served(*changes, **status))
    volume = output_volume(run, cluster_folders(run)[0])
    assert volume is not None
    return reader_pod(run, volume)


def test_the_pod_can_only_read_and_is_no_pod_of_the_run() -> None:
    pod = manifest_of(("spec.labels", {"team": "rl"}))
    assert pod["metadata"]["labels"] == {"team": "rl", "agenticrun.dev/reader": "lake"}
    assert LABEL_RUN not in pod["metadata"]["labels"], "the operator looks for it"
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], "controller" in owner) == ("AgenticRun", UID, False)
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }, "without fsGroup, which would change the files"
    (container,) = spec["containers"]
    assert container["image"] == "worker:1"
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["volumeMounts"][0] == {
        "name": "output",
        "mountPath": "/checkpoints",
        "readOnly": True,
    }


def test_the_pod_goes_where_the_driver_was_and_reads_as_its_user() -> None:
    overlay = {
        "tolerations": [{"key": "gpu"}],
        "hostNetwork": True,
        "imagePullSecrets": [{"name": "second"}],
        "securityContext": {"runAsUser": 2000, "fsGroup": 3000, "sysctls": []},
        "containers": [{"name": "ray", "securityContext": {"runAsGroup": 2001}}],
    }
    driver = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "cpu"}],
        "podTemplate": {"spec": overlay},
    }
    spec = manifest_of(("spec.roles.driver", driver), ("spec.imagePullSecrets", ["first"]))["spec"]
    assert spec["nodeSelector"] == {"zone": "a"}
    assert spec["tolerations"] == [{"key": "gpu"}], "as Kubernetes merges them"
    assert spec["imagePullSecrets"] == [{"name": "first"}, {"name": "second"}]
    assert "hostNetwork" not in spec
    user = {"runAsUser": 2000, "runAsGroup": 2001, "supplementalGroups": [3000]}
    assert spec["securityContext"].items() >= user.items()
    assert not spec["securityContext"].keys() & {"sysctls", "fsGroup"}
    root = {"podTemplate": {"spec": {"securityContext": {"runAsUser": 0}}}}
    context = manifest_of(("spec.roles.driver", root))["spec"]["securityContext"]
    assert context["runAsUser"] == 1000


def test_a_volume_that_the_user_mounts_is_read_too() -> None:
    nfs = {"name": "share", "nfs": {"server": "nas", "path": "/runs"}}
    mount = {"name": "share", "mountPath": "/data", "subPath": "rl"}
    driver = {"volumes": [nfs], "volumeMounts": [mount]}
    where = ("spec.checkpoint", {"uri": "/data/runs"})
    run = parse_served(served(("spec.roles.driver", driver), where, volumeClaim=None))
    found = output_volume(run, cluster_folders(run)[0])
    assert found == OutputVolume(nfs, {**mount, "readOnly": True})
    assert str(found) == "volume share"


@pytest.mark.parametrize("path", ["/tmp", "/tmp/runs", "/data"])
def test_the_users_volume_may_have_any_name_and_place(path: str) -> None:
    """The apiserver refuses two volumes of one name, and two mounts of one path."""
    nfs = {"name": "scratch", "nfs": {"server": "nas", "path": "/runs"}}
    mount = {"name": "scratch", "mountPath": path, "readOnly": True}
    spec = reader_pod(parse_served(served()), OutputVolume(nfs, mount))["spec"]
    (container,) = spec["containers"]
    names = [volume["name"] for volume in spec["volumes"]]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert len(set(names)) == len(names) == 2
    assert set(mounts.values()) == set(names)
    assert spec["volumes"][names.index(mounts[path])]["nfs"] == nfs["nfs"]
    (scratch,) = {place for place in mounts if place != path}
    assert container["env"] == [{"name": "TMPDIR", "value": scratch}]


ON_NODE = {"name": "share", "hostPath": {"path": "/mnt"}}


def volume_of(driver: dict[str, Any]) -> OutputVolume | None:
    """Return the volume with the output, of a run that keeps it below /data/runs."""
    where = ("spec.checkpoint", {"uri": "/data/runs"})
    run = parse_served(served(("spec.roles.driver", driver), where, volumeClaim=None))
    return output_volume(run, cluster_folders(run)[0])


@pytest.mark.parametrize(
    "source", [{"emptyDir": {}}, {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]
)
def test_a_volume_that_goes_with_its_pod_is_lost(source: dict[str, Any]) -> None:
    mount = {"name": "share", "mountPath": "/data"}
    driver = {"volumes": [{"name": "share", **source}], "volumeMounts": [mount]}
    assert volume_of(driver) is None


def test_the_nearest_mount_above_the_output_has_it() -> None:
    nfs = {"name": "share", "nfs": {"server": "nas", "path": "/"}}
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    mounts = [{"name": "share", "mountPath": "/data"}, {"name": "runs", "mountPath": "/data/runs/"}]
    for order in (mounts, mounts[::-1]):
        found = volume_of({"volumes": [nfs, claim], "volumeMounts": order})
        assert found is not None
        assert found.claim == "runs"
    lost = {"name": "runs", "emptyDir": {}}
    assert volume_of({"volumes": [nfs, lost], "volumeMounts": mounts}) is None


def test_a_folder_of_a_node_is_read_only_on_a_node_that_is_named() -> None:
    mount = {"name": "share", "mountPath": "/data", "subPath": "rl"}
    driver: dict[str, Any] = {"volumes": [ON_NODE], "volumeMounts": [mount]}
    with pytest.raises(SourceError, match="/mnt/rl/runs/lake-01234567 on the node where"):
        volume_of(driver)
    found = volume_of({**driver, "nodeSelector": {"kubernetes.io/hostname": "a"}})
    assert found == OutputVolume(ON_NODE, {**mount, "readOnly": True})


def test_the_folder_of_a_run_that_names_no_storage_is_on_the_claim_in_its_status() -> None:
    run = parse_served(served())
    assert run.spec.checkpoint is None
    assert str(cluster_folders(run)[0]) == OUTPUT
    older = parse_served(served(volumeClaim=None))
    assert str(cluster_folders(older)[0]) == "/var/lib/agenticrun/lake-01234567"
