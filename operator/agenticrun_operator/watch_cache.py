"""A cache of the watches: the pods and RayClusters of each run, and each run's version.

It saves requests, and never decides: the operator acts only on what it has read itself
(`Reconciler`). Between an event and its arrival the cache is behind; a watch that hangs is replaced
after `cluster.kube.WATCH_SECONDS` and a grace period.
"""

from __future__ import annotations

from collections.abc import Callable

from agenticrun_api.names import LABEL_RUN
from agenticrun_operator.resources import Manifest
from agenticrun_operator.workqueue import Key


class WatchCache:
    """The objects of one kind, by run, from the watches of one or several namespaces.

    Each list replaces what was known of its namespace, so that an object that was deleted in a gap
    of the watch vanishes. While a watch is down, nothing is known of its namespace.
    """

    def __init__(
        self,
        run_of: Callable[[Manifest], Key],
        keep: Callable[[Manifest], Manifest],
        changed: Callable[[Key], None],
    ):
        """Create an empty cache.

        Args:
            run_of: returns the run that an object belongs to.
            keep: returns the part of an object to keep.
            changed: called with the run of each object that is new, changed or deleted.
        """
        self._run_of = run_of
        self._keep = keep
        self._changed = changed
        self._objects: dict[Key, dict[Key, Manifest]] = {}
        """By run, then by the object's namespace and name."""
        self._runs: dict[Key, Key] = {}
        """The run of each object."""
        self._live: set[str | None] = set()

    def listed(self, namespace: str | None, items: list[Manifest]) -> None:
        """Replace the objects of a namespace; None: of all namespaces."""
        names = {_name(item) for item in items}
        known = (name for name in self._runs if namespace in (None, name[0]))
        for name in [name for name in known if name not in names]:
            self._drop(name)
        self._live.add(namespace)
        for item in items:
            self.put(item)

    def put(self, item: Manifest) -> None:
        """Keep a new or changed object. One that is known in this version is no change."""
        name, run = _name(item), self._run_of(item)
        if self._runs.get(name, run) != run:
            self._drop(name)
        known = self._objects.get(run, {}).get(name)
        if known and known["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]:
            return
        self._runs[name] = run
        self._objects.setdefault(run, {})[name] = self._keep(item)
        self._changed(run)

    def deleted(self, item: Manifest) -> None:
        """Drop a deleted object."""
        self._drop(_name(item))

    def resumed(self, namespace: str | None) -> None:
        """Trust what is known of this namespace again: the watch goes on where it stopped."""
        self._live.add(namespace)

    def lost(self, namespace: str | None) -> None:
        """Trust nothing of this namespace until it is listed again or the watch goes on."""
        self._live.discard(namespace)

    def of_run(self, run: Key) -> list[Manifest] | None:
        """Return the objects of a run; None if no watch of its namespace is up."""
        if not self._live & {None, run[0]}:
            return None
        return list(self._objects.get(run, {}).values())

    def _drop(self, name: Key) -> None:
        run = self._runs.pop(name, None)
        if run is None:
            return
        del self._objects[run][name]
        if not self._objects[run]:
            del self._objects[run]
        self._changed(run)


class WatchedObjects:
    """The caches of all watches."""

    def __init__(self, run_changed: Callable[[Key], None], child_changed: Callable[[Key], None]):
        self.runs = WatchCache(_name, _version_only, run_changed)
        self.clusters = WatchCache(_labelled_run, without_bookkeeping, child_changed)
        self.pods = WatchCache(_labelled_run, pod_summary, child_changed)

    def version(self, run: Key) -> str | None:
        """Return the newest resourceVersion of a run; None if it is not known."""
        found = self.runs.of_run(run)
        return found[0]["metadata"]["resourceVersion"] if found else None


def without_bookkeeping(item: Manifest) -> Manifest:
    """Return an object without the metadata that the operator never reads."""
    metadata = item["metadata"]
    dropped = ("managedFields", "annotations")
    return item | {"metadata": {key: metadata[key] for key in metadata if key not in dropped}}


def pod_summary(pod: Manifest) -> Manifest:
    """Return a pod without its volumes, and with only the names and images of its containers."""
    spec = {name: value for name, value in pod["spec"].items() if name != "volumes"}
    for kind in ("initContainers", "containers"):
        if kind in spec:
            spec[kind] = [{"name": item["name"], "image": item["image"]} for item in spec[kind]]
    return without_bookkeeping(pod) | {"spec": spec}


def _version_only(run: Manifest) -> Manifest:
    return {"metadata": {"resourceVersion": run["metadata"]["resourceVersion"]}}


def _name(item: Manifest) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _labelled_run(child: Manifest) -> Key:
    return child["metadata"]["namespace"], child["metadata"]["labels"][LABEL_RUN]
