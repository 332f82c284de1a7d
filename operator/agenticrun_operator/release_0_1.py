"""Runs of release 0.1, whose tokens are random and in two Secrets.

Delete this module once no such run is left: it is the only part that reads Secrets.
"""

from __future__ import annotations

import time
from base64 import b64decode

from agenticrun_api import AgenticRun, Reason
from agenticrun_operator.cluster import Denied, Kube
from agenticrun_operator.observed import Unreachable

RETRY_SECONDS = 30.0


class RandomTokens:
    """Reads the random tokens of runs, once for each run."""

    def __init__(self, kube: Kube):
        self._kube = kube
        self._known: dict[str, tuple[str, str]] = {}
        self._failures: dict[str, tuple[float, Unreachable]] = {}

    async def read(self, run: AgenticRun) -> tuple[str, str] | Unreachable:
        """Return Ray's and the reporter's token, or why they are not known."""
        uid = run.metadata.uid
        if uid in self._known:
            return self._known[uid]
        failed_at, failure = self._failures.get(uid, (0.0, None))
        if failure and time.monotonic() - failed_at < RETRY_SECONDS:
            return failure
        try:
            self._known[uid] = (
                await self._token(run, "ray-token", "auth_token"),
                await self._token(run, "reporter", "token"),
            )
        except (Denied, LookupError) as error:
            why = (
                "release 0.1 made this run's tokens, and the operator may not read them: set the "
                "chart's value migration.readRunSecrets to true while runs of 0.1 go on"
                if isinstance(error, Denied)
                else f"release 0.1 made this run's tokens: restore Secret {error.args[0]}"
            )
            failure = Unreachable(why, Reason.TOKENS_UNKNOWN)
            self._failures[uid] = (time.monotonic(), failure)
            return failure
        return self._known[uid]

    async def _token(self, run: AgenticRun, suffix: str, key: str) -> str:
        name = f"{run.metadata.name}-{suffix}"
        secret = await self._kube.get("Secret", run.metadata.namespace, name)
        if secret is None or key not in secret.get("data", {}):
            raise LookupError(name)
        return b64decode(secret["data"][key]).decode()
