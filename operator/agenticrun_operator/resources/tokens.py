"""The tokens of a run, derived from the operator's key, and the Secret with them for its pods.

A derived token needs no store: the operator reads no Secret, and creates a deleted one again with
the same content. The Secret's name says which run and which key it is for, so a Secret of that name
that exists already is the right one.
"""

from __future__ import annotations

import hmac
from base64 import b64encode, urlsafe_b64encode
from hashlib import sha256

from agenticrun_api import AgenticRun
from agenticrun_api.names import REPORTER_TOKEN_FILE
from agenticrun_operator.resources.metadata import Manifest, child_metadata

REPORTER_TOKEN_KEY = REPORTER_TOKEN_FILE.rsplit("/", 1)[1]
RAY_TOKEN_KEY = "auth_token"
"""The only key in the Secret that KubeRay gives to Ray's containers."""


class OperatorKey:
    """The key from which an installation of the operator derives the tokens of all its runs."""

    MIN_LENGTH = 32
    """Characters of a key."""

    def __init__(self, secret: str):
        """Create the key. Raises ValueError if it is too short."""
        if len(secret) < self.MIN_LENGTH:
            raise ValueError(f"the operator's key has less than {self.MIN_LENGTH} characters")
        self._secret = secret.encode()
        self.id = sha256(self._secret).hexdigest()[:8]
        """Names the key without revealing it."""

    def ray_token(self, run_uid: str) -> str:
        """Return the token for Ray's APIs."""
        return self._derive("ray", run_uid)

    def reporter_token(self, run_uid: str) -> str:
        """Return the token for the reporter."""
        return self._derive("reporter", run_uid)

    def _derive(self, purpose: str, run_uid: str) -> str:
        digest = hmac.digest(self._secret, f"{purpose}/{run_uid}".encode(), "sha256")
        return urlsafe_b64encode(digest).decode().rstrip("=")


def tokens_name(run: AgenticRun, key_id: str) -> str:
    """Return the name of the Secret with the tokens that this key gives the run."""
    return f"{_name_prefix(run)}{key_id}"


def tokens_secret(run: AgenticRun, key: OperatorKey) -> Manifest:
    """Return the Secret with the run's tokens.

    It is immutable: a changed token would lock out the pods that started with the old one.
    """
    tokens = {
        RAY_TOKEN_KEY: key.ray_token(run.metadata.uid),
        REPORTER_TOKEN_KEY: key.reporter_token(run.metadata.uid),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": child_metadata(run, tokens_name(run, key.id)),
        "immutable": True,
        "data": {name: b64encode(token.encode()).decode() for name, token in tokens.items()},
    }


def secret_of(cluster: Manifest) -> str:
    """Return the name of the Secret with the tokens of a RayCluster's pods."""
    name: str = (cluster["spec"].get("authOptions") or {}).get("secretName") or ""
    return name


def key_id_of(run: AgenticRun, cluster: Manifest) -> str | None:
    """Return the id of the key that the tokens of a RayCluster's pods are derived from.

    None if the Secret that the RayCluster names is not one of the operator's.
    """
    name, prefix = secret_of(cluster), _name_prefix(run)
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _name_prefix(run: AgenticRun) -> str:
    return f"{run.metadata.name}-tokens-{run.metadata.uid}-"
