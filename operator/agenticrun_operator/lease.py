"""Leader election by a Lease: of several operators, only one reconciles.

This saves requests; safety does not depend on it. Status writes carry the resourceVersion that was
read, and Ray accepts each submission id once, so two operators at the same time do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from agenticrun_operator import errors, metrics
from agenticrun_operator.resources import Manifest

DURATION_SECONDS = 15
RENEW_DEADLINE_SECONDS = 10.0
"""Without a renewal for so long, the leader stops. Others take over after `DURATION_SECONDS`."""
CLOCK_SKEW_SECONDS = 5.0
"""Clocks of two nodes differ by less, as a rule. If they do not, two operators act for a moment."""
RENEW_SECONDS = 2.0
RETRY_SECONDS = 1.0
REQUEST_SECONDS = 3.5
"""Limit for one attempt. A renewal without an answer can be repeated before the deadline."""

log = logging.getLogger(__name__)


class LeaseStore(Protocol):
    """The methods of the kube client that a lease needs."""

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None: ...

    async def create(self, manifest: Manifest) -> None: ...

    async def put(self, manifest: Manifest) -> Manifest: ...


class Leadership:
    """Acquires and renews the lease. `held` is set only while the lease is certainly ours."""

    def __init__(
        self,
        store: LeaseStore,
        namespace: str,
        name: str,
        identity: str,
        recovered: Callable[[], None] = lambda: None,
    ):
        """Create a candidate.

        Args:
            store: the apiserver.
            namespace: the namespace of the lease.
            name: the name of the lease.
            identity: the name of this operator.
            recovered: called when an attempt succeeds after one that got no usable answer. An
                attempt is made every few seconds, so this is the first to know that the apiserver
                answers again.
        """
        self._store = store
        self._namespace = namespace
        self._name = name
        self._identity = f"{identity}_{uuid.uuid4().hex[:8]}"
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0
        self._recovered = recovered
        self._failed = False
        """True if the latest attempt got no usable answer."""
        self._renewed = False
        """True if the latest attempt acquired or renewed the lease."""
        self._overdue: asyncio.TimerHandle | None = None
        """Ends leadership unless the lease is renewed before."""
        self.held = asyncio.Event()
        metrics.LEADER.labels(lease=name).set(0)

    async def run(self) -> None:
        """Acquire and renew the lease until cancelled."""
        while True:
            await self.attempt(datetime.now(UTC))
            await asyncio.sleep(RENEW_SECONDS if self._renewed else RETRY_SECONDS)

    async def attempt(self, now: datetime) -> bool:
        """Try once to acquire or renew the lease. Return True if it is ours."""
        # Taken before the request, so that the deadline is never too late.
        clock = asyncio.get_running_loop().time()
        self._renewed = False
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                mine = await self._acquire(now, clock)
        except (errors.Conflict, errors.AlreadyExists, errors.NotFound):
            mine = False  # another operator was faster
        except (errors.ClusterError, TimeoutError) as error:
            why = str(error) or f"no answer within {REQUEST_SECONDS:.0f} s"
            log.warning("cannot acquire or renew lease %s: %s", self._name, why)
            self._failed = True
            return self.held.is_set()  # until it is overdue
        self._tell(mine)
        self._renewed = mine
        if mine:
            # A timer, so that leadership ends in time even while a request waits for its answer.
            self._overdue = asyncio.get_running_loop().call_at(
                clock + RENEW_DEADLINE_SECONDS, self._tell, False
            )
            if self._failed:
                self._recovered()
            self._failed = False
        return self.held.is_set()

    async def release(self) -> None:
        """Release the lease so that another operator can take over at once."""
        if not self.held.is_set():
            return
        # First of all: from here on nothing may be written as the leader.
        self._tell(False)
        lease = await self._store.get("Lease", self._namespace, self._name)
        if lease and lease["spec"].get("holderIdentity") == self._identity:
            # As client-go does: a short duration, for candidates that look only at the time.
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            await self._store.put(lease)

    async def _acquire(self, now: datetime, clock: float) -> bool:
        lease = await self._store.get("Lease", self._namespace, self._name)
        stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": stamp,
        }
        if lease is None:
            await self._store.create(
                {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": self._name, "namespace": self._namespace},
                    "spec": ours | {"acquireTime": stamp},
                }
            )
            return True
        spec = lease["spec"]
        if spec.get("holderIdentity") == self._identity:
            # The write carries the resourceVersion that was read, so it conflicts if another
            # candidate has written since.
            await self._store.put({**lease, "spec": {**spec, **ours}})
            return True
        if spec.get("holderIdentity") and not self._expired(spec, now, clock):
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + 1
        await self._store.put(
            {
                **lease,
                "spec": {**spec, **ours, "acquireTime": stamp, "leaseTransitions": transitions},
            }
        )
        return True

    def _expired(self, spec: Manifest, now: datetime, clock: float) -> bool:
        """Return True if the holder has not renewed the lease for its duration.

        Measured with our own clock from when we saw the lease, because the holder's clock may be
        wrong. A lease that is much older by its own time has lost its holder: `helm uninstall`
        deletes the operator's rights before it can release the lease.
        """
        duration = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        renewed = spec.get("renewTime")
        seen = (str(spec.get("holderIdentity")), str(renewed))
        # The lease has changed: its holder is alive, and its duration counts from now.
        if seen != self._seen:
            self._seen, self._seen_at = seen, clock
        age = (now - datetime.fromisoformat(renewed)).total_seconds() if renewed else 0.0
        return clock - self._seen_at > duration or age > duration + CLOCK_SKEW_SECONDS

    def _tell(self, mine: bool) -> None:
        if self._overdue:
            self._overdue.cancel()
        if mine and not self.held.is_set():
            log.info("became the leader as %s", self._identity)
            self.held.set()
        elif not mine and self.held.is_set():
            log.warning("no longer the leader")
            self.held.clear()
        metrics.LEADER.labels(lease=self._name).set(1 if mine else 0)
