"""Circuit breaker for environments: one kind that fails must not slow down the others.

Without it every group of a failing kind runs its episodes again (`maxRerolls`), waits for their
timeouts, and is dropped. A kind of which `MAX_FAILED` groups in a row were dropped is evicted: its
group numbers are left out, and the other kinds fill the batches in their shares. In each step one
of its groups may try again; if that can be trained on, the kind is back. The last kind is never
evicted, because there is nothing to train on without it: the run then ends with `TooManyDropped`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

log = logging.getLogger(__name__)

MAX_FAILED = 3
"""Groups in a row, each with fewer than two episodes that can be trained on after re-rolls."""


class EnvBreaker:
    """Knows which environments are evicted.

    Args:
        tags: of the environments that groups take turns with.
    """

    def __init__(self, tags: Iterable[str]) -> None:
        self._tags = set(tags)
        self._failed: Counter[str] = Counter()
        self._evicted: dict[str, str] = {}
        self._may_try: set[str] = set()

    @property
    def evicted(self) -> Mapping[str, str]:
        """Evicted tags, and the last error of each."""
        return self._evicted

    def next_step(self) -> None:
        """Let one group of each evicted environment try again."""
        self._may_try = set(self._evicted)

    def leaves_out(self, tag: str) -> bool:
        """Return True if the next group must not be of this environment."""
        if tag in self._may_try:
            self._may_try.remove(tag)
            return False
        return tag in self._evicted

    def succeeded(self, tag: str) -> None:
        """Take note of a group that can be trained on."""
        self._failed[tag] = 0
        if self._evicted.pop(tag, None) is not None:
            log.warning("environment %r works again: its groups are trained on again", tag)

    def failed(self, tag: str, error: str) -> None:
        """Take note of a group that was dropped, with the last error of its episodes."""
        self._failed[tag] += 1
        if tag in self._evicted:
            self._evicted[tag] = error
        elif self._failed[tag] >= MAX_FAILED and len(self._tags) - len(self._evicted) > 1:
            self._evicted[tag] = error
            log.warning(
                "environment %r is evicted: %d groups in a row had too few episodes that can be "
                "trained on. The last error: %s. The run continues with the others, and tries one "
                "of its groups in each step",
                tag,
                self._failed[tag],
                error,
            )
