"""The challenge with which a head pod proves that it knows the token of its reporter.

The operator sends no token to an address before that: the address of a pod that has ended may
belong to another pod, and a pod may only claim to be the head.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Annotated

from pydantic import Field

from agenticrun_api.base import Model


class Challenge(Model):
    """The body of `POST /challenge`."""

    nonce: Annotated[str, Field(pattern="^[0-9a-f]{32,128}$")]
    """A random number that the operator uses once."""


class Proof(Model):
    """The answer to a challenge."""

    proof: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """As `prove` returns it."""


def prove(token: str, nonce: str, pod_uid: str, pod_ip: str) -> str:
    """Return the proof of a pod for a challenge, in hexadecimal digits.

    It holds for one pod at one address, so another pod that passes the challenge on to the head
    gets a proof that is of no use to it.

    Args:
        token: the token of the reporter.
        nonce: the nonce of the challenge.
        pod_uid: uid of the pod.
        pod_ip: IP of the pod, as in its status.
    """
    text = "\n".join(("agenticrun-challenge", nonce, pod_uid, pod_ip))
    return hmac.new(token.encode(), text.encode(), sha256).hexdigest()
