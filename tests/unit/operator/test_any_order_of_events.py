"""Attempts never overlap or repeat, and every run ends, in any order of events and crashes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import timedelta

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agenticrun_api import Outcome, Phase, PoolStatus, Role
from agenticrun_api.status import CheckpointStatus, StopCause
from agenticrun_operator.errors import ClusterError, Denied, WebhookUnavailable
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import POLICY_KIND, OperatorKey, workloads
from fake_kueue import FakeKueue
from operator_world import KEY, NAME, Gpus, Operator, World

MAX_RESTARTS = 3
OTHER_KEY = OperatorKey("another key, also of 32 characters")


class AnyOrder(RuleBasedStateMachine):
    """Faults and progress of a fake cluster, and one or two operators on it."""

    @initialize(
        settled=st.booleans(),
        rejoin_seconds=st.sampled_from([0.0, 27.0]),
        walled=st.booleans(),
        queued=st.booleans(),
    )
    def start(self, settled: bool, rejoin_seconds: float, walled: bool, queued: bool) -> None:
        kueue = FakeKueue() if queued else None
        self.world = World(rejoin_seconds=rejoin_seconds, kueue=kueue)
        queue = {"name": "research", "preemption": {"graceSeconds": 60}}
        self.world.apply_run(
            *([("spec.queue", queue)] if queued else []),
            (
                "spec.failurePolicy",
                {
                    "maxRestarts": MAX_RESTARTS,
                    "backoffSeconds": 5,
                    "stall": {"action": "Restart"},
                    "startupDeadlineSeconds": 150,
                },
            ),
            ("spec.roles.trainer", {"gpus": 1}),
            ("spec.roles.env", {"replicas": 2, "minReplicas": 1}),
            ("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),
        )
        self.claim: str | None = None
        self.claim_was_deleted = False
        self.saved_on: str | None = None
        self.operators = [Operator(self.world), Operator(self.world)]
        self.walled = walled
        self.walled_cluster: str | None = None
        for operator in self.operators if walled else ():
            operator.upgrade(replace(operator.images, operator_namespace="agenticrun-system"))
        self.ended: Phase | None = None
        self.suspensions = 0
        if settled:
            self.quiet_moment()

    @rule()
    def quiet_moment(self) -> None:
        """Enough for the next attempt to begin."""
        self.world.reporter_down = self.world.ray_down = False
        self.world.storage_down = self.world.watches_hang = False
        self.world.delete_errors.clear()
        self.world.bind_claims()
        asyncio.run(self.operators[0].settle(3))
        self.world.now += timedelta(seconds=30)
        asyncio.run(self.operators[0].settle(2))

    @rule(which=st.sampled_from([0, 0, 0, 1]), changed=st.booleans())
    def reconcile(self, which: int, changed: bool) -> None:
        asyncio.run(self.operators[which].reconcile(changed))

    @rule(
        due=st.booleans(),
        when=st.integers(0, 12) | st.sampled_from(["submit", "submitted", "wrote status"]),
        what=st.sampled_from(
            ["crash", "crash", "head", "pod", "cluster", "driver", "rival", "node", "suspend"]
        ),
    )
    def reconcile_and_be_interrupted(self, due: bool, when: int | str, what: str) -> None:
        """The operator crashes, objects change or another operator acts during a reconciliation."""
        world = self.world
        happen = {
            "crash": world.crash,
            "head": world.restart_head_container,
            "pod": lambda: world.delete_pod(Role.DRIVER),
            "cluster": self.cluster_is_deleted,
            "driver": lambda: world.end_driver(None),
            "rival": self.rival_reconciles,
            "node": lambda: world.lose_node(Role.DRIVER, partition=True),
            "suspend": lambda: self.run_is_suspended_or_resumed(not self.is_suspended()),
        }
        if due:  # the next attempt, where one is waited for
            world.make_pods()
            world.now += timedelta(seconds=30)
        world.interruption = (when, happen[what])
        asyncio.run(self.operators[0].reconcile())
        world.interruption = None

    def rival_reconciles(self) -> None:
        """In a thread of its own, because this one's event loop is busy with the other operator."""
        rival = threading.Thread(target=lambda: asyncio.run(self.operators[1].reconcile()))
        rival.start()
        rival.join()

    @rule(ready=st.sampled_from([True, True, False]))
    def kuberay_works(self, ready: bool) -> None:
        self.world.make_pods(ready)

    @rule(seconds=st.sampled_from([1, 5, 20, 100]))
    def time_passes(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    @rule(step=st.integers(0, 2))
    def driver_reports(self, step: int) -> None:
        self.world.drive(step)

    @rule(step=st.integers(0, 2))
    def driver_stalls(self, step: int) -> None:
        self.world.drive(step, idle_seconds=1e6)

    @rule(outcome=st.sampled_from([Outcome.FAILED, Outcome.STOPPED, None]))
    def driver_fails(self, outcome: Outcome | None) -> None:
        self.world.end_driver(outcome)

    @rule()
    def driver_saves_a_checkpoint(self) -> None:
        now = format_time(self.world.now)
        self.world.drive(1, checkpoint=CheckpointStatus(step=1, uri="/checkpoints/1", time=now))

    @rule()
    def driver_succeeds(self) -> None:
        self.world.end_driver(Outcome.SUCCEEDED)

    @rule(number=st.integers(1, 3))
    def env_pods_change(self, number: int) -> None:
        if number != self.world.run["spec"]["roles"]["env"]["replicas"]:
            self.suspensions += 1
            self.world.change_run(("roles.env.replicas", number))

    @rule(step=st.integers(1, 2))
    def driver_has_the_pods_that_it_was_asked_to_have(self, step: int) -> None:
        for job in self.world.live_jobs():
            config = self.world.configs.get(job.incarnation.split("/")[0])
            wanted = self.world.run["spec"]["roles"]["env"]["replicas"]
            number = config.replicas[Role.ENV] if config else job.replicas.get("env", wanted)
            env = PoolStatus(replicas=number, serving=number)
            pools = {Role.ENV: env, Role.INFERENCE: PoolStatus(replicas=1, serving=1)}
            generation = config.generation if config else 1
            self.world.drive(step, pools=pools, observed_generation=generation)

    @rule(pods=st.integers(1, 3))
    def quota_suffices_for_so_many_env_pods(self, pods: int) -> None:
        if self.world.kueue:
            self.world.kueue.elastic_pods = pods

    @rule(role=st.sampled_from(list(Role)))
    def pod_is_deleted(self, role: Role) -> None:
        self.world.delete_pod(role)

    @rule(role=st.sampled_from([Role.DRIVER, Role.TRAINER, Role.ENV]))
    def pod_is_evicted(self, role: Role) -> None:
        """Kubernetes marks a pod and deletes it; its processes run until their grace is over."""
        target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        for pod in self.world.pods(role)[:1]:
            if "nodeName" in pod["spec"]:
                pod["status"].setdefault("conditions", []).append(target)
                self.world._mark_deleted(pod)

    @rule()
    def evicted_pods_are_gone(self) -> None:
        for pod in self.world.pods():
            deleted = "deletionTimestamp" in pod["metadata"]
            if deleted and pod["metadata"]["uid"] not in self.world.lost:
                del self.world.objects["Pod", pod["metadata"]["name"]]

    @rule(suspend=st.booleans())
    def cluster_is_suspended_or_released(self, suspend: bool) -> None:
        """A queue acts on the RayCluster, and KubeRay deletes its pods."""
        cluster = self.world.objects.get(("RayCluster", NAME))
        if cluster is None or bool(cluster["spec"].get("suspend")) is suspend:
            return
        cluster["spec"]["suspend"] = suspend
        self.suspensions += suspend
        if suspend:
            for pod in self.world.pods():
                if pod["metadata"]["uid"] not in self.world.lost:
                    del self.world.objects["Pod", pod["metadata"]["name"]]

    @rule(free=st.booleans())
    def quota_is_free_or_not(self, free: bool) -> None:
        if self.world.kueue:
            self.world.kueue.free = free

    @rule(works=st.booleans())
    def kueue_works_or_not(self, works: bool) -> None:
        if self.world.kueue:
            self.world.kueue.works = works

    @rule(active=st.booleans())
    def workload_is_deactivated_or_activated(self, active: bool) -> None:
        if self.world.workload:
            self.world.workload["spec"]["active"] = active

    @rule(reason=st.sampled_from(["Preempted", "ClusterQueueStopped", "AdmissionCheck"]))
    def kueue_evicts(self, reason: str) -> None:
        found, kueue = self.world.workload, self.world.kueue
        if found and kueue and workloads.holds_quota(found):
            kueue.evict(found, self.world.now, reason)

    @rule(heeds=st.booleans())
    def kueue_evicts_until_it_has_its_quota_back(self, heeds: bool) -> None:
        """Whatever the faults, the pods go and then the quota; a driver may heed the request."""
        self.kueue_evicts("Preempted")
        world = self.world
        if not world.workload or not workloads.is_evicted(world.workload):
            return
        world.watches_hang = False
        world.delete_errors.clear()
        asked = world.stop_requests
        for _ in range(80):
            if not world.workload or not workloads.holds_quota(world.workload):
                break
            world.collect_garbage()
            self.evicted_pods_are_gone()
            world.make_pods()
            asyncio.run(self.operators[0].reconcile())
            if heeds and world.stop_requests > asked and world.live_jobs():
                self.driver_saves_a_checkpoint()
                world.end_driver(Outcome.STOPPED)
            world.now += timedelta(seconds=5)
        assert not world.workload or not workloads.holds_quota(world.workload)
        assert world.pods() == []

    @rule(replicas=st.integers(0, 3))
    def cluster_is_edited(self, replicas: int) -> None:
        cluster = self.world.objects.get(("RayCluster", NAME))
        if cluster is not None:
            cluster["spec"]["workerGroupSpecs"][0]["replicas"] = replicas

    @rule(name=st.sampled_from(["network", "network-driver"]), removed=st.booleans())
    def network_policy_is_changed_or_removed(self, name: str, removed: bool) -> None:
        policy = self.world.objects.get((POLICY_KIND, f"{NAME}-{name}"))
        if policy and removed:
            del self.world.objects[POLICY_KIND, f"{NAME}-{name}"]
        elif policy:
            policy["spec"] = {"podSelector": {}}

    @rule(phase=st.sampled_from(["Succeeded", "Failed"]))
    def end_is_written_by_someone_else(self, phase: str) -> None:
        status = self.world.run.get("status")
        if status and not self.world.status.phase.finished:
            status["phase"] = phase
            self.world.run["metadata"]["resourceVersion"] = f"by-hand-{next(self.world._ids)}"

    @rule()
    def head_restarts(self) -> None:
        self.world.restart_head_container()

    @rule(down=st.booleans())
    def reporter_answers_or_not(self, down: bool) -> None:
        self.world.reporter_down = down

    @rule(down=st.booleans())
    def storage_provides_or_not(self, down: bool) -> None:
        self.world.storage_down = down
        self.world.bind_claims()

    @rule(down=st.booleans())
    def ray_answers_or_not(self, down: bool) -> None:
        self.world.ray_down = down

    @rule(error=st.sampled_from([None, Denied("no"), WebhookUnavailable("no answer")]))
    def deletions_fail_or_not(self, error: ClusterError | None) -> None:
        self.world.delete_errors = {} if error is None else {"RayCluster": error, "Pod": error}

    @rule(hang=st.booleans())
    def watches_hang_or_not(self, hang: bool) -> None:
        self.world.watches_hang = hang

    @rule()
    def cluster_is_deleted(self) -> None:
        self.world.delete_cluster()
        self.world.collect_garbage()

    @rule()
    def cluster_is_deleted_and_leaves_orphans(self) -> None:
        self.world.delete_cluster()

    @rule()
    def secret_is_deleted(self) -> None:
        self.world.delete_secret()

    @rule(role=st.sampled_from([Role.DRIVER, Role.DRIVER, Role.TRAINER]), partition=st.booleans())
    def node_is_lost(self, role: Role, partition: bool) -> None:
        self.world.lose_node(role, partition)

    @rule()
    def lost_pods_are_evicted(self) -> None:
        self.world.evict_lost_pods()

    @rule()
    def lost_nodes_return(self) -> None:
        self.world.nodes_return()

    @rule(enough=st.booleans())
    def gpus_become_scarce_or_not(self, enough: bool) -> None:
        self.world.gpus = None if enough else Gpus(0, [self.world])

    @rule(sure=st.integers(0, 3))
    def claim_is_deleted(self, sure: int) -> None:
        if sure == 0:
            self.claim_was_deleted = True
            self.world.delete_claim()

    @rule(lost=st.booleans())
    def operators_key_is_lost_or_found(self, lost: bool) -> None:
        for operator in self.operators:
            operator.key = OTHER_KEY if lost else KEY
            operator.upgrade(operator.images)

    def is_suspended(self) -> bool:
        return bool(self.world.run["spec"].get("suspend"))

    @rule(suspend=st.booleans())
    def run_is_suspended_or_resumed(self, suspend: bool) -> None:
        if suspend != self.is_suspended():
            self.suspensions += suspend
            self.world.change_run(("suspend", suspend))

    @rule(heeds=st.booleans())
    def run_is_suspended_until_its_pods_are_gone(self, heeds: bool) -> None:
        """Whatever the faults, the pods go; a driver that heeds the request loses no step."""
        self.run_is_suspended_or_resumed(suspend=True)
        world = self.world
        world.watches_hang = False
        world.delete_errors.clear()
        asked, saved = world.stop_requests, False
        for _ in range(60):
            stopping = world.status.stopping
            by_user = stopping is not None and stopping.cause is StopCause.SUSPEND
            suspended = world.status.phase is Phase.SUSPENDED and by_user
            if suspended or (world.status.phase.finished and world.status.completion_time):
                break
            world.collect_garbage()
            self.evicted_pods_are_gone()
            world.make_pods()
            asyncio.run(self.operators[0].reconcile())
            if heeds and world.stop_requests > asked and world.live_jobs():
                self.driver_saves_a_checkpoint()
                world.end_driver(Outcome.STOPPED)
                saved = True
            world.now += timedelta(seconds=5)
        if world.status.phase.finished:
            return
        if self.claim_was_deleted and world.status.phase is not Phase.SUSPENDED:
            return  # its pods are the last way to the checkpoints
        assert world.status.phase is Phase.SUSPENDED
        assert ("RayCluster", NAME) not in world.objects
        assert world.pods() == []
        if saved and not world.reporter_down:
            assert world.status.checkpoint is not None

    @rule()
    def garbage_is_collected(self) -> None:
        self.world.collect_garbage()

    def heed_advice_about_tokens(self) -> None:
        """Do what the condition says about a head whose tokens the operator does not have."""
        if any(item.reason == "TokensUnknown" for item in self.world.status.conditions):
            self.cluster_is_deleted()

    @invariant()
    def pods_have_quota_and_quota_outlives_them(self) -> None:
        assert self.world.quota_faults == []

    @invariant()
    def pods_exist_only_while_their_quota_is_held(self) -> None:
        if self.world.kueue and self.world.pods():
            assert self.world.workload is not None
            assert workloads.holds_quota(self.world.workload)

    @invariant()
    def attempts_never_overlap(self) -> None:
        assert len(self.world.live_jobs()) <= 1

    @invariant()
    def an_attempt_is_submitted_once(self) -> None:
        ids = [job.submission_id for job in self.world.jobs]
        assert len(ids) == len(set(ids))

    @invariant()
    def restarts_are_bounded_and_counted(self) -> None:
        status = self.world.status
        assert status.failures_without_progress <= MAX_RESTARTS + 1
        begun = status.restarts + status.disruptions + 1 + self.suspensions
        assert len(self.world.jobs) <= begun

    @invariant()
    def the_end_is_final(self) -> None:
        phase = self.world.status.phase
        assert self.ended is None or phase is self.ended
        if phase.finished and self.world.status.completion_time:
            self.ended = phase

    @invariant()
    def a_run_that_stands_still_does_not_progress(self) -> None:
        status = self.world.status
        states = {item.type: item.status for item in status.conditions}
        if status.phase.finished and not status.completion_time:
            return  # someone else wrote it a moment ago
        if any(not role.ready for role in status.roles):
            return
        if states.get("Stalled") == "True" or status.phase.finished:
            assert states["Progressing"] == "False"
        elif states.get("Training") == "True" and "Unknown" not in states.values():
            assert states["Progressing"] == "True"

    @invariant()
    def no_pods_are_asked_for_before_the_network_policies_are_there(self) -> None:
        cluster = self.world.objects.get(("RayCluster", NAME))
        uid = cluster["metadata"]["uid"] if cluster else None
        if self.walled and uid is not None and uid != self.walled_cluster:
            found = {name for kind, name in self.world.objects if kind == POLICY_KIND}
            assert found == {f"{NAME}-network", f"{NAME}-network-driver"}
        self.walled_cluster = uid

    @invariant()
    def checkpoints_are_never_lost(self) -> None:
        claim = self.world.objects.get(("PersistentVolumeClaim", f"{NAME}-checkpoints"))
        uid = claim["metadata"]["uid"] if claim else None
        assert self.claim in (None, uid) or self.claim_was_deleted
        self.claim = uid

    @invariant()
    def no_attempt_begins_again_on_an_empty_claim(self) -> None:
        if self.world.status.checkpoint is not None:
            self.saved_on = self.saved_on or self.claim or "gone"
            assert self.claim in (None, self.saved_on)

    def teardown(self) -> None:
        """Without further faults the run ends, and a success is never lost."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if self.is_suspended():
            self.run_is_suspended_until_its_pods_are_gone(heeds=False)
        self.run_is_suspended_or_resumed(suspend=False)
        world.reporter_down = world.ray_down = False
        world.storage_down = world.watches_hang = False
        world.delete_errors.clear()
        self.cluster_is_suspended_or_released(suspend=False)
        self.evicted_pods_are_gone()
        world.bind_claims()
        world.collect_garbage()
        world.gpus = None
        self.kueue_works_or_not(works=True)
        self.workload_is_deactivated_or_activated(active=True)
        world.evict_lost_pods()
        for _ in range(400):
            if world.status.phase.finished and world.status.completion_time:
                break
            self.quota_is_free_or_not(free=True)
            world.make_pods()
            asyncio.run(self.operators[0].reconcile())
            self.heed_advice_about_tokens()
            world.drive(2)
            asyncio.run(self.operators[0].reconcile())
            world.end_driver(Outcome.SUCCEEDED)
            world.now += timedelta(seconds=10)
        assert world.status.completion_time, f"still {world.status}"
        if world.status.phase is Phase.FAILED and not self.claim_was_deleted:
            assert world.status.failures_without_progress == MAX_RESTARTS + 1
        self.the_end_is_final()
        for _ in range(40):
            world.collect_garbage()
            self.evicted_pods_are_gone()
            asyncio.run(self.operators[0].reconcile())
            world.now += timedelta(seconds=5)
        if world.workload and not world.pods():
            assert workloads.is_finished(world.workload)
        self.pods_have_quota_and_quota_outlives_them()
        world.run["metadata"]["finalizers"] = ["example.com/slow"]
        world.delete_run()
        for _ in range(3):
            asyncio.run(self.operators[0].reconcile())
            world.now += timedelta(seconds=30)  # a denied deletion is repeated after a while
        assert ("RayCluster", NAME) not in world.objects
        world.run["metadata"]["finalizers"] = []
        world.delete_run()
        world.collect_garbage()
        self.checkpoints_are_never_lost()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
