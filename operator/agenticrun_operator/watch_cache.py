"""A cache of the watches: the pods and RayClusters of each run, and each run's version.

It saves requests, and never decides: the operator acts only on what it has read itself
(`Reconciler`). Between an event and its arrival the cache is behind; a watch that hangs is replaced
after `cluster.kube.WATCH_SECONDS` and a grace period.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from agenticrun_api import names
from agenticrun_operator import resources
from agenticrun_operator.pod_reader import read_labelled_pod
from agenticrun_operator.resources import Manifest
from agenticrun_operator.workqueue import Key

T = TypeVar("T")


class WatchCache(Generic[T]):
    """The objects of one kind, by run, from the watches of one or several namespaces.

    Each version of an object is read once, and only what was read is kept: an event of one of a
    thousand pods costs no more than one of ten.

    Each list replaces what was known of its namespace, so that an object that was deleted in a gap
    of the watch vanishes. While a watch is down, nothing is known of its namespace.
    """

    def __init__(
        self,
        run_of: Callable[[Manifest], Key],
        read: Callable[[Manifest], T | None],
        changed: Callable[[Key], None],
    ):
        """Create an empty cache.

        Args:
            run_of: returns the run that an object belongs to.
            read: returns what to keep of an object; None: nothing, it is not the run's.
            changed: called with the run of each object that is new, changed or deleted.
        """
        self._run_of = run_of
        self._read = read
        self._changed = changed
        self._versions: dict[Key, tuple[str, Key]] = {}
        """The resourceVersion and the run of each object, by its namespace and name."""
        self._kept: dict[Key, dict[Key, T | None]] = {}
        """Kept objects, by run, then by the object's namespace and name."""
        self._of_run: dict[Key, tuple[T, ...]] = {}
        """The answers of `of_run` that still hold."""
        self._live: set[str | None] = set()

    def listed(self, namespace: str | None, items: list[Manifest]) -> None:
        """Replace the objects of a namespace; None: of all namespaces."""
        listed = {_name(item) for item in items}
        known = (name for name in self._versions if namespace in (None, name[0]))
        for name in [name for name in known if name not in listed]:
            self._drop(name)
        self._live.add(namespace)
        for item in items:
            # `put` ignores what has not changed: a new list is not a change of every run.
            self.put(item)

    def put(self, item: Manifest) -> None:
        """Keep a new or changed object. Ignore it if its resourceVersion has not changed."""
        name, run = _name(item), self._run_of(item)
        version = item["metadata"]["resourceVersion"]
        known = self._versions.get(name)
        if known == (version, run):
            return
        # Its label has changed: its previous run must be notified.
        if known and known[1] != run:
            self._drop(name)
        self._versions[name] = version, run
        self._kept.setdefault(run, {})[name] = self._read(item)
        self._of_run.pop(run, None)
        self._changed(run)

    def deleted(self, item: Manifest) -> None:
        """Drop a deleted object."""
        self._drop(_name(item))

    def resumed(self, namespace: str | None) -> None:
        """Trust what is known of this namespace again: the watch continues where it stopped."""
        self._live.add(namespace)

    def lost(self, namespace: str | None) -> None:
        """Trust nothing of this namespace until it is listed again or the watch continues."""
        self._live.discard(namespace)

    def of_run(self, run: Key) -> tuple[T, ...] | None:
        """Return the objects of a run; None if no watch of its namespace is up.

        The same tuple again until one of them changes.
        """
        # Without a watch an empty answer would mean "deleted".
        if not self._live & {None, run[0]}:
            return None
        found = self._of_run.get(run)
        if found is None:
            kept = self._kept.get(run, {}).values()
            found = tuple([item for item in kept if item is not None])
            # Runs without objects are not kept, or each deleted run would leave an entry.
            if found:
                self._of_run[run] = found
        return found

    def version(self, name: Key) -> str | None:
        """Return the newest resourceVersion of an object; None if it is not known."""
        known = self._versions.get(name)
        return known[0] if known and self._live & {None, name[0]} else None

    def _drop(self, name: Key) -> None:
        known = self._versions.pop(name, None)
        if known is None:
            return
        _, run = known
        del self._kept[run][name]
        if not self._kept[run]:
            del self._kept[run]
        self._of_run.pop(run, None)
        self._changed(run)


class WatchedObjects:
    """The caches of all watches."""

    def __init__(self, run_changed: Callable[[Key], None], child_changed: Callable[[Key], None]):
        self.runs: WatchCache[None] = WatchCache(_name, lambda _: None, run_changed)
        self.clusters = WatchCache(_labelled_run, cluster_summary, child_changed)
        self.pods = WatchCache(_labelled_run, read_labelled_pod, child_changed)
        self.claims: WatchCache[tuple[str, bool]] = WatchCache(
            _labelled_run,
            lambda claim: (_name(claim)[1], resources.is_deleting(claim)),
            child_changed,
        )
        """Name of each volume claim, and True if it is being deleted."""
        self.policies = WatchCache(_labelled_run, resources.policy_summary, child_changed)
        self.workloads = WatchCache(_labelled_run, workload_summary, child_changed)

    def version(self, run: Key) -> str | None:
        """Return the newest resourceVersion of a run; None if it is not known."""
        return self.runs.version(run)

    def children_may_exist(self, run: Key) -> bool:
        """Return True unless the watches know that the run has no RayCluster and no pods."""
        return self.clusters.of_run(run) != () or self.pods.of_run(run) != ()


def cluster_summary(cluster: Manifest) -> Manifest:
    """Return a RayCluster without what is only read from the apiserver.

    That is bookkeeping and, of its pods, all but the names and images of their containers and the
    names of the reporter's variables. What is written back was read from the apiserver.
    """
    metadata, spec = cluster["metadata"], dict(cluster["spec"])
    dropped = ("managedFields", "annotations")
    if "headGroupSpec" in spec:
        spec["headGroupSpec"] = _group_summary(spec["headGroupSpec"])
    if "workerGroupSpecs" in spec:
        spec["workerGroupSpecs"] = [_group_summary(group) for group in spec["workerGroupSpecs"]]
    kept = {key: metadata[key] for key in metadata if key not in dropped}
    return cluster | {"metadata": kept, "spec": spec}


def workload_summary(workload: Manifest) -> Manifest:
    """Return a Workload without bookkeeping and without the templates of its pod sets."""
    metadata, spec = workload["metadata"], workload["spec"]
    pod_sets = [
        {key: value for key, value in item.items() if key != "template"}
        for item in spec.get("podSets", ())
    ]
    kept = {key: value for key, value in metadata.items() if key != "managedFields"}
    return workload | {"metadata": kept, "spec": spec | {"podSets": pod_sets}}


def _group_summary(group: Manifest) -> Manifest:
    pod = group.get("template", {}).get("spec", {})
    containers = [
        {"name": item.get("name", ""), "image": item.get("image", "")}
        for item in pod.get("containers", ())
    ]
    reporters = [
        {
            "name": names.REPORTER_CONTAINER,
            "env": [{"name": item.get("name", "")} for item in container.get("env") or ()],
        }
        for container in pod.get("initContainers", ())
        if container.get("name") == names.REPORTER_CONTAINER
    ]
    kept = {"containers": containers} | ({"initContainers": reporters} if reporters else {})
    return group | {"template": {"spec": kept}}


def _name(item: Manifest) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _labelled_run(child: Manifest) -> Key:
    return child["metadata"]["namespace"], child["metadata"]["labels"][names.LABEL_RUN]
