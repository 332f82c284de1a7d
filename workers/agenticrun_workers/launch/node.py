"""The machine that an actor runs on, and what it shows of the actor."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge


@dataclass(frozen=True, slots=True)
class Node:
    """The machine that the calling actor runs on, as its launcher knows it."""

    node_id: str
    address: str
    """IP address at which other actors reach this one."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that are reserved for this actor."""


shared_node: ContextVar[Node | None] = ContextVar("shared_node", default=None)
"""Set in the threads of actors that share a process; elsewhere Ray knows the node."""


def current_node() -> Node:
    """Return the node of the calling actor."""
    shared = shared_node.get()
    if shared is not None:
        return shared
    import ray  # takes a second, which processes without Ray do not have to wait

    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    if not ray.is_initialized():
        return Node("", address)
    context = ray.get_runtime_context()
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return Node(context.get_node_id(), address, gpus)


class NodeMetrics:
    """Numbers that Ray serves to Prometheus, at port 8080 of each pod of a run.

    Nothing is served for an actor without a process of Ray's.

    Args:
        labels: of all numbers.
        gauges: names of numbers that rise and fall, with a text about each.
        counters: the same of numbers that only rise; Ray adds `_total` to their names.
    """

    def __init__(
        self, labels: dict[str, str], gauges: Mapping[str, str], counters: Mapping[str, str]
    ) -> None:
        self._labels = labels
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._before: Mapping[str, float] = {}
        if shared_node.get() is not None:
            return
        import ray
        from ray.util.metrics import Counter, Gauge

        if ray.is_initialized():
            keys = tuple(labels)
            self._gauges = {name: Gauge(name, text, keys) for name, text in gauges.items()}
            self._counters = {name: Counter(name, text, keys) for name, text in counters.items()}

    def show(self, values: Mapping[str, float]) -> None:
        """Serve these values from now on.

        Args:
            values: of every gauge and counter, by name.
        """
        for name, gauge in self._gauges.items():
            gauge.set(values[name], self._labels)
        for name, counter in self._counters.items():
            # Ray refuses to add nothing.
            if (more := values[name] - self._before.get(name, 0.0)) > 0:
                counter.inc(more, self._labels)
        self._before = values
