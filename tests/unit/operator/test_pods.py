"""Why a pod is not ready, in one line."""

from __future__ import annotations

import pytest

from agenticrun_api import Reason, Role
from agenticrun_operator.observed import Incarnation, PassingProblem, Pod, Problem
from agenticrun_operator.pod_reader import problem_of_warnings, read_pod, with_head
from agenticrun_operator.resources import Manifest


def pod(
    *containers: Manifest,
    conditions: list[Manifest] | None = None,
    init: list[Manifest] | None = None,
) -> Manifest:
    return {
        "metadata": {
            "name": "lake-env-1",
            "uid": "u",
            "labels": {"agenticrun.dev/role": "env", "agenticrun.dev/run-uid": "r"},
        },
        "spec": {
            "initContainers": [
                {"name": "fetch-code", "image": "code:1"},
                {"name": "install-packages", "image": "img:1"},
                {"name": "reporter", "image": "img:1"},
            ],
            "containers": [{"name": "ray", "image": "img:1"}],
        },
        "status": {
            "conditions": conditions or [],
            "containerStatuses": list(containers),
            "initContainerStatuses": init or [],
        },
    }


def waiting(reason: str, message: str = "", name: str = "ray", **more: Manifest) -> Manifest:
    return {
        "name": name,
        "restartCount": 0,
        "state": {"waiting": {"reason": reason, "message": message}},
        **more,
    }


def ended(name: str, message: str) -> Manifest:
    state = {"terminated": {"exitCode": 1, "message": message}}
    return {"name": name, "restartCount": 0, "state": state}


@pytest.mark.parametrize(
    ("manifest", "reason", "text"),
    [
        (
            pod(
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "message": "0/1 nodes are available:\n Insufficient nvidia.com/gpu.",
                    }
                ]
            ),
            Reason.UNSCHEDULABLE,
            "cannot be scheduled: 0/1 nodes are available: Insufficient nvidia.com/gpu.",
        ),
        (
            pod(waiting("ErrImagePull", "not found")),
            Reason.IMAGE_PULL_FAILED,
            "cannot pull image img:1: not found",
        ),
        (
            pod(waiting("ImagePullBackOff")),
            Reason.IMAGE_PULL_FAILED,
            "cannot pull image img:1: ImagePullBackOff",
        ),
        (
            pod(init=[waiting("ErrImagePull", "no", "reporter")]),
            Reason.IMAGE_PULL_FAILED,
            "cannot pull image img:1: no",
        ),
        (
            pod(
                waiting(
                    "CrashLoopBackOff",
                    "back-off",
                    lastState={"terminated": {"exitCode": 3, "message": "no module\n x"}},
                )
            ),
            Reason.CONTAINER_CRASHED,
            "container ray ended with exit code 3: no module x",
        ),
        (
            pod(
                {
                    "name": "ray",
                    "restartCount": 1,
                    "state": {"running": {}},
                    "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                }
            ),
            Reason.CONTAINER_CRASHED,
            "container ray ended with exit code 137: OOMKilled",
        ),
        (
            pod(waiting("CreateContainerConfigError", 'secret "x" not found')),
            Reason.CONTAINER_CRASHED,
            'container ray cannot start: secret "x" not found',
        ),
        (
            pod(init=[ended("fetch-code", "cannot fetch nope from https://host/x")]),
            Reason.CODE_UNAVAILABLE,
            "cannot fetch spec.code: cannot fetch nope from https://host/x",
        ),
        (
            pod(
                init=[
                    waiting(
                        "CrashLoopBackOff",
                        "back-off",
                        "install-packages",
                        lastState={"terminated": {"exitCode": 1, "message": "no emoji==9"}},
                    )
                ]
            ),
            Reason.CODE_UNAVAILABLE,
            "cannot install spec.code.pip: no emoji==9",
        ),
        (
            pod(init=[waiting("ErrImagePull", "not found", "fetch-code")]),
            Reason.IMAGE_PULL_FAILED,
            "cannot pull image code:1: not found",
        ),
    ],
)
def test_the_reason_is_told(manifest: Manifest, reason: Reason, text: str) -> None:
    problem = read_pod(manifest).problem
    assert problem is not None
    assert (problem.reason, problem.message) == (reason, text)


def test_the_words_of_a_container_show_no_secrets() -> None:
    problem = read_pod(pod(ended("ray", "OSError: https://me:pw@minio/x\nAPI_KEY=abc"))).problem
    assert problem is not None
    assert problem.message.endswith("OSError: https://***@minio/x API_KEY=***")


@pytest.mark.parametrize(
    "manifest", [pod(), pod(waiting("ContainerCreating")), pod(waiting("PodInitializing"))]
)
def test_starting_is_no_problem(manifest: Manifest) -> None:
    assert read_pod(manifest).problem is None


def test_a_ready_pod_has_no_problem_whatever_happened_before() -> None:
    crashed = {
        "name": "ray",
        "restartCount": 1,
        "state": {"running": {}},
        "lastState": {"terminated": {"exitCode": 1}},
    }
    seen = read_pod(pod(crashed, conditions=[{"type": "Ready", "status": "True"}]))
    assert seen.ready
    assert seen.problem is None
    assert seen.role is Role.ENV


def test_the_incarnation_changes_with_the_container_and_with_the_pod() -> None:
    def incarnation(uid: str, restarts: int) -> Incarnation | None:
        manifest = pod(
            {"name": "ray", "containerID": "c", "restartCount": restarts, "state": {"running": {}}}
        )
        manifest["metadata"]["uid"] = uid
        return read_pod(manifest).incarnation

    assert len({incarnation("a", 0), incarnation("a", 1), incarnation("b", 0)}) == 3
    assert read_pod(pod(waiting("ContainerCreating"))).incarnation is None


def test_an_incarnation_is_read_as_it_was_stored() -> None:
    assert Incarnation.parse(str(Incarnation("a-b", 3))) == Incarnation("a-b", 3)
    for damaged in ("", "a-b", "a-b/", "a-b/x", "a-b/1/2"):
        assert Incarnation.parse(damaged) is None


@pytest.mark.parametrize(("sidecar_ready", "reason"), [(True, Reason.NODE_LOST), (False, None)])
def test_a_sidecar_that_fails_its_probe_is_no_lost_node(
    sidecar_ready: bool, reason: Reason | None
) -> None:
    sidecar = {"name": "reporter", "restartCount": 0, "ready": sidecar_ready, "state": {}}
    ray = {"name": "ray", "restartCount": 0, "ready": True, "state": {}}
    seen = read_pod(pod(ray, init=[sidecar], conditions=[{"type": "Ready", "status": "False"}]))
    assert (seen.problem.reason if seen.problem else None) is reason


def test_the_commit_is_what_the_container_that_fetches_said_at_its_end() -> None:
    def commit(name: str, said: str) -> str:
        state = {"terminated": {"exitCode": 0, "message": said}}
        return read_pod(pod(init=[{"name": name, "state": state}])).commit

    assert commit("fetch-code", "a1" * 20) == "a1" * 20
    assert commit("fetch-code", "copied") == ""
    assert commit("install-packages", "a1" * 20) == ""


def preparing(*containers: Manifest, **conditions: str) -> str | None:
    """Return the time since which a pod on a node is prepared."""
    since = "2026-01-01T00:00:00Z"
    states = {"PodScheduled": "True", **conditions}
    manifest = pod(
        *containers,
        conditions=[
            {"type": kind, "status": status, "lastTransitionTime": since}
            for kind, status in states.items()
        ],
    )
    manifest["spec"]["nodeName"] = "node-1"
    return read_pod(manifest).preparing_since


def test_a_pod_is_prepared_until_its_first_container_may_start() -> None:
    creating = waiting("ContainerCreating")
    assert preparing(creating) == "2026-01-01T00:00:00Z"
    assert preparing(creating, PodReadyToStartContainers="False") == "2026-01-01T00:00:00Z"
    assert preparing(creating, PodReadyToStartContainers="True") is None, "it pulls an image"
    assert preparing({"name": "ray", "restartCount": 0, "state": {"running": {}}}) is None
    assert preparing(waiting("ErrImagePull")) is None
    assert read_pod(pod(creating)).preparing_since is None, "it has no node"


def test_the_newest_warning_says_what_a_pod_waits_for() -> None:
    mount = {"reason": "FailedMount", "message": "secret\n x", "lastTimestamp": "2026-01-01T00:00Z"}
    network = {
        "reason": "FailedCreatePodSandBox",
        "message": "no address is left",
        "eventTime": "2026-01-01T00:01Z",
    }
    placed = {"reason": "FailedScheduling", "message": "no GPU", "eventTime": "2026-01-01T00:02Z"}
    assert problem_of_warnings([]) is None
    assert problem_of_warnings([placed]) is None
    assert problem_of_warnings([mount]) == Problem(
        Reason.MOUNT_FAILED, "cannot mount its volumes: secret x"
    )
    assert problem_of_warnings([network, placed, mount]) == Problem(
        Reason.PODS_PENDING, "cannot start its containers: no address is left"
    )


@pytest.mark.parametrize(
    ("status", "disruption"),
    [
        ({"reason": "Evicted", "message": "The node was low on resource: memory. "}, "Evicted"),
        ({"reason": "Preempting", "message": "Preempted in order to admit critical pod"}, None),
        ({"reason": "Terminated", "message": "imminent node shutdown"}, None),
        ({"reason": "NodeShutdown"}, None),
        ({"reason": "NodeAffinity"}, None),
        ({"reason": "DeadlineExceeded"}, ""),
        ({"reason": "Evicted", "message": 'Usage of EmptyDir volume "w" exceeds the limit'}, ""),
        (
            {"reason": "Evicted", "message": "Container ray exceeded its local ephemeral storage"},
            "",
        ),
        ({}, ""),
    ],
)
def test_a_pod_that_its_node_has_ended_is_disrupted(
    status: Manifest, disruption: str | None
) -> None:
    """What uses more than its own limits would be evicted again."""
    manifest = pod()
    manifest["status"] |= {"phase": "Failed", **status}
    expected = status["reason"] if disruption is None else disruption
    assert read_pod(manifest).disruption == expected


@pytest.mark.parametrize(
    "reason",
    [
        "PreemptionByScheduler",
        "DeletionByTaintManager",
        "EvictionByEvictionAPI",
        "DeletionByPodGC",
        "TerminationByKubelet",
    ],
)
def test_a_pod_that_kubernetes_is_about_to_end_is_disrupted(reason: str) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    assert read_pod(pod(conditions=[condition])).disruption == reason
    assert read_pod(pod(conditions=[condition | {"status": "False"}])).disruption == ""


SECONDS = "2026-01-01T00:00:{:02}+00:00".format
"""A second of the minute in which the pods of these tests start."""


def condition(kind: str, status: str, second: int, **more: str) -> Manifest:
    return {"type": kind, "status": status, "lastTransitionTime": SECONDS(second), **more}


def running(name: str, ready: bool, second: int = 0, restarts: int = 0) -> Manifest:
    state = {"running": {"startedAt": SECONDS(second)}}
    return {"name": name, "restartCount": restarts, "ready": ready, "state": state}


@pytest.mark.parametrize(
    "words",
    [
        "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
        'persistentvolumeclaim "lake-checkpoints" not found',
        "waiting for ephemeral volume controller to create the persistentvolumeclaim",
    ],
)
def test_a_volume_that_is_being_made_counts_only_after_some_seconds(words: str) -> None:
    seen = read_pod(pod(conditions=[condition("PodScheduled", "False", 3, message=words)]))
    assert seen.problem is None
    problem = Problem(Reason.UNSCHEDULABLE, f"cannot be scheduled: {words}")
    assert seen.passing == PassingProblem(problem, SECONDS(13))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "CreateContainerConfigError",
            "failed to sync secret cache: timed out waiting for the condition",
        ),
        ("CreateContainerConfigError", "failed to sync configmap cache: timed out"),
        ("CreateContainerError", "context deadline exceeded"),
    ],
)
def test_what_the_kubelet_tries_again_is_no_crash(reason: str, words: str) -> None:
    seen = read_pod(pod(waiting(reason, words), conditions=[condition("PodScheduled", "True", 2)]))
    assert seen.problem is None
    assert seen.passing == PassingProblem(
        Problem(Reason.PODS_PENDING, f"container ray waits: {words}"), SECONDS(12)
    )


@pytest.mark.parametrize(
    ("containers", "message", "counts_from"),
    [
        (
            [running("ray", True), running("istio-proxy", False, 5)],
            "container istio-proxy is not ready",
            25,
        ),
        (
            [running("ray", False, 1), running("istio-proxy", False, 5, restarts=2)],
            "container ray, istio-proxy (restarted 2 times) is not ready",
            25,
        ),
        ([running("ray", False, 1, restarts=1)], "container ray (restarted once) is not ready", 22),
    ],
)
def test_a_container_that_runs_and_is_not_ready_is_named(
    containers: list[Manifest], message: str, counts_from: int
) -> None:
    manifest = pod(*containers, conditions=[condition("Ready", "False", 2)])
    manifest["spec"]["containers"].append({"name": "istio-proxy", "image": "istio:1"})
    seen = read_pod(manifest)
    assert seen.problem is None
    problem = Problem(Reason.CONTAINER_NOT_READY, message)
    assert seen.passing == PassingProblem(problem, SECONDS(counts_from))


def test_a_sidecar_is_named_and_a_container_that_prepares_is_not() -> None:
    manifest = pod(
        init=[running("reporter", False, 1)], conditions=[condition("Ready", "False", 2)]
    )
    assert read_pod(manifest).passing is None, "it has not ended yet"
    manifest["spec"]["initContainers"][2]["restartPolicy"] = "Always"
    passing = read_pod(manifest).passing
    assert passing is not None
    assert passing.problem.message == "container reporter is not ready"


def test_a_readiness_gate_that_is_not_true_is_named() -> None:
    ready = running("ray", True)
    manifest = pod(ready, conditions=[condition("Ready", "False", 2)])
    manifest["spec"]["readinessGates"] = [{"conditionType": "mesh/ready"}]
    passing = read_pod(manifest).passing
    assert passing is not None
    assert passing.problem == Problem(
        Reason.CONTAINER_NOT_READY,
        "readiness gate mesh/ready is not true: its controller has not set it",
    )
    manifest["status"]["conditions"].append(condition("mesh/ready", "True", 3))
    seen = read_pod(manifest)
    assert seen.problem is not None
    assert seen.problem.reason is Reason.NODE_LOST, "everything is ready but the pod"


def crashed(began: int, ended: int, reason: str = "Error") -> Pod:
    """Return a worker pod after the end of its Ray process."""
    state = {
        "exitCode": 1,
        "reason": reason,
        "startedAt": SECONDS(began),
        "finishedAt": SECONDS(ended),
    }
    container = running("ray", False) | {"lastState": {"terminated": state}}
    return read_pod(pod(container, conditions=[condition("Ready", "False", 2)]))


def head_started(second: int | None) -> Pod:
    started = None if second is None else SECONDS(second)
    return Pod("head", "h", "r", Role.DRIVER, ready=True, started_at=started)


@pytest.mark.parametrize(
    ("worker", "head", "follows"),
    [
        (crashed(0, 20), head_started(10), True),
        (crashed(0, 20), head_started(None), True),
        (crashed(0, 20), None, True),
        (crashed(12, 20), head_started(10), False),
        (crashed(0, 20, "OOMKilled"), head_started(10), False),
    ],
    ids=["replaced", "starting", "gone", "of-this-head", "out-of-memory"],
)
def test_a_worker_that_starts_again_with_its_head_has_not_crashed(
    worker: Pod, head: Pod | None, follows: bool
) -> None:
    pods = [worker, head] if head else [worker]
    seen = with_head(pods, head.name if head else None, None)[0]
    if not follows:
        assert seen.problem is not None
        assert seen.problem.reason is Reason.CONTAINER_CRASHED
        return
    assert seen.problem is None
    problem = Problem(
        Reason.PODS_PENDING,
        "starts again after the loss of its head: container ray ended with exit code 1: Error",
    )
    assert seen.passing == PassingProblem(problem, SECONDS(50))


def test_a_pod_that_its_node_has_ended_says_so() -> None:
    manifest = pod()
    manifest["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "low on\n memory"}
    assert read_pod(manifest).problem == Problem(
        Reason.PODS_PENDING, "was ended by its node: Evicted: low on memory"
    )
    manifest["status"]["message"] = 'Usage of EmptyDir volume "w" exceeds the limit "1Gi".'
    problem = read_pod(manifest).problem
    assert problem is not None
    assert problem.reason is Reason.CONTAINER_CRASHED
