"""The history of one run on the apiserver, as `kubectl get --watch` shows it, with times."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

from testcluster import Cluster

RESTART_SECONDS = 0.5


@dataclass(frozen=True)
class Seen:
    """One version of the run."""

    at: float
    """When it arrived, in seconds since the epoch."""
    uid: str
    status: dict[str, Any]

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    @property
    def step(self) -> int:
        return int(self.status.get("step", 0))

    @property
    def lag(self) -> float:
        """Seconds from the end of the newest step to the arrival of its version here.

        The end is by the driver's clock, in whole seconds.
        """
        return self.at - datetime.fromisoformat(self.status["lastStepTime"]).timestamp()

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition of this type, or {}."""
        return next(
            (item for item in self.status.get("conditions", ()) if item["type"] == kind), {}
        )


class Watch:
    """Follows the runs of one name, across deletion and re-creation. Use as a context manager."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._changed = threading.Condition()
        self._history: list[Seen] = []
        self._over = False

    def __enter__(self) -> Watch:
        self._process = self._kubectl()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _kubectl(self) -> subprocess.Popen[str]:
        selected = ("--field-selector", f"metadata.name={self._name}")
        command = ["kubectl", "-n", self._cluster.namespace, "get", "agenticruns", *selected]
        command += ["-o", "json", "--watch", "--output-watch-events"]
        return subprocess.Popen(command, env=self._cluster.env, stdout=subprocess.PIPE, text=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._over = True
            self._process.terminate()
        self._thread.join()

    @property
    def history(self) -> list[Seen]:
        """Every version so far, oldest first."""
        with self._changed:
            return list(self._history)

    def wait(
        self,
        wanted: Callable[[Seen], bool],
        seconds: float,
        what: str,
        after: Seen | None = None,
        since: Seen | None = None,
    ) -> Seen:
        """Return the first version for which `wanted` is true, even if others follow at once.

        Fails after `seconds`, and if the run ends before.

        Args:
            after: a version of an earlier run of the same name; versions of that run do not count.
            since: the version from which on they count; by default the newest one.
        """
        end = time.monotonic() + seconds
        with self._changed:
            begin = max(len(self._history) - 1, 0) if since is None else self._history.index(since)
            while True:
                seen = [
                    item for item in self._history[begin:] if after is None or item.uid != after.uid
                ]
                found = next((item for item in seen if wanted(item)), None)
                if found is not None:
                    return found
                ended = bool(seen) and seen[-1].phase in ("Failed", "Succeeded")
                left = end - time.monotonic()
                if left <= 0 or ended:
                    raise AssertionError(
                        f"{'the run ended' if ended else f'not within {seconds:.0f} s'}: "
                        f"{what}\n{self._last()}"
                    )
                self._changed.wait(left)

    def _last(self) -> str:
        return (
            json.dumps(self._history[-1].status, indent=1)
            if self._history
            else "the run was never seen"
        )

    def _read(self) -> None:
        version = ""
        while True:
            with self._process as kubectl:
                assert kubectl.stdout is not None
                for line in kubectl.stdout:  # one event per line
                    event: Any = json.loads(line) if line.endswith("\n") else {"type": "cut off"}
                    if event["type"] not in ("ADDED", "MODIFIED"):
                        continue
                    metadata = event["object"]["metadata"]
                    if metadata["resourceVersion"] == version:
                        continue
                    version = metadata["resourceVersion"]
                    status = event["object"].get("status", {})
                    with self._changed:
                        self._history.append(Seen(time.time(), metadata["uid"], status))
                        self._changed.notify_all()
            # An apiserver that does not answer for a while ends kubectl's watch.
            time.sleep(RESTART_SECONDS)
            with self._changed:
                if self._over:
                    return
                self._process = self._kubectl()
