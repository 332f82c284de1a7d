"""The operator's key at the start: read from its Secret, or created once.

The operator creates it and not the chart, because a chart that is rendered without access to the
apiserver (`helm template`, Argo CD) would make another key each time, and with another key the
operator cannot talk to any run.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import secrets
from base64 import b64decode, b64encode
from typing import Protocol

from agenticrun_operator import errors
from agenticrun_operator.resources import Manifest, OperatorKey

FIELD = "key"
"""The key of the Secret's data."""
BYTES = 48
"""Random bytes of a new key: 64 characters."""
RETRY_SECONDS = 2.0

log = logging.getLogger(__name__)


class SecretStore(Protocol):
    """The methods of the kube client that the key needs."""

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None: ...

    async def create(self, manifest: Manifest) -> None: ...


class UnusableKey(errors.ClusterError):
    """The Secret has no usable key. It is never replaced: runs may depend on the one it had."""


async def wait_for_key(store: SecretStore, namespace: str, name: str) -> OperatorKey:
    """Return the operator's key. Repeat the attempt until it succeeds.

    Args:
        store: the apiserver.
        namespace: the namespace of the Secret.
        name: the name of the Secret.
    """
    while True:
        try:
            return await read_or_create(store, namespace, name)
        except errors.ClusterError as error:
            log.warning("cannot get the operator's key: %s", error)
            await asyncio.sleep(RETRY_SECONDS)


async def read_or_create(store: SecretStore, namespace: str, name: str) -> OperatorKey:
    """Return the key in the Secret; create the Secret with a new key if it does not exist.

    Of two replicas that start together one creates it, and both use what is stored.

    Args:
        store: the apiserver.
        namespace: the namespace of the Secret.
        name: the name of the Secret.

    Raises:
        UnusableKey: the Secret exists, but its key is missing or damaged.
        ClusterError: the apiserver does not answer, or rights are missing.
    """
    found = await store.get("Secret", namespace, name)
    if found is None:
        try:
            key = secrets.token_urlsafe(BYTES).encode()
            await store.create(
                {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "type": "Opaque",
                    "metadata": {
                        "name": name,
                        "namespace": namespace,
                        "labels": {
                            "app.kubernetes.io/name": "agenticrun",
                            "app.kubernetes.io/managed-by": "agenticrun-operator",
                        },
                    },
                    "data": {FIELD: b64encode(key).decode()},
                }
            )
            log.info("created Secret %s/%s with a new operator key", namespace, name)
        except errors.AlreadyExists:
            pass  # by another replica
        # Read back: the other replica's key counts if it was first.
        found = await store.get("Secret", namespace, name)
    try:
        return OperatorKey(b64decode((found or {})["data"][FIELD], validate=True).decode())
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UnusableKey(
            f"Secret {namespace}/{name} has no usable key {FIELD}, of at least "
            f"{OperatorKey.MIN_LENGTH} characters: put the former one back, or delete the Secret "
            "to get a new one (running runs then have to be built again)"
        ) from error
