"""Needs of environments of others: packages, addresses, headers, and time to connect."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

PATIENCE_SECONDS = 8.0
"""Time for a server to answer, and to have a place: one that has just restarted, or that has not
yet noticed that an earlier session was closed. Less than the 10 seconds that `check-env` waits, so
that it shows the reason."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def checked_package(module: str, package: str) -> Any:
    """Import a library that the worker image does not have.

    Raises:
        ValueError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"the package {package} is needed: name it in spec.code.pip.requirements, and on your "
            f"machine pip install it ({error})"
        ) from error


def checked_url(url: str, schemes: tuple[str, ...] = ("http", "https")) -> str:
    """Return an address without a slash at its end. Raises `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(
            f"url: {url!r} is not an address such as {schemes[0]}://my-server:8000 "
            f"(schemes: {', '.join(schemes)})"
        )
    return url.rstrip("/")


def uses_proxy(url: str) -> bool:
    """Return False for addresses of this machine, which HTTP_PROXY is not meant for."""
    return urlsplit(url).hostname not in LOOPBACK


def with_secrets(values: Mapping[str, str], key: str = "headers") -> dict[str, str]:
    """Return values with `${NAME}` replaced by that environment variable.

    Args:
        values: by name.
        key: the config's name of them, for the message.

    Raises:
        ValueError: a variable is not set.
    """

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ValueError(
                f"{key}: {match[1]} is not set on the env pods: set it in "
                "roles.env.podTemplate, from a Secret"
            )
        return os.environ[match[1]]

    return {name: re.sub(r"\$\{(\w+)\}", value_of, value) for name, value in values.items()}


class Patience:
    """The time that is left to reach a server, and the pauses between two tries."""

    def __init__(self, seconds: float = PATIENCE_SECONDS) -> None:
        self._until = time.monotonic() + seconds
        self._pause = 0.05

    @property
    def left(self) -> float:
        """Seconds until it is over; at least a tenth of a second, for one last try."""
        return max(0.1, self._until - time.monotonic())

    @property
    def over(self) -> bool:
        """True if no time is left for another try."""
        return time.monotonic() + self._pause >= self._until

    def pause(self) -> float:
        """Return the seconds to wait before the next try; each is longer than the one before."""
        pause, self._pause = self._pause, min(2 * self._pause, 1.0)
        return pause
