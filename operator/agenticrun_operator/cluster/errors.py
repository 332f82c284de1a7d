"""What can go wrong when talking to the cluster, one type per thing that a caller handles."""

from __future__ import annotations


class ClusterError(Exception):
    """The base of them all."""


class NotFound(ClusterError):
    """There is no such object."""


class AlreadyExists(ClusterError):
    """An object of that name exists."""


class Conflict(ClusterError):
    """The object has changed since it was read, or is another one of the same name."""


class Refused(ClusterError):
    """The apiserver does not accept the object: its message names the field."""


class Denied(ClusterError):
    """The apiserver does not let us: a quota, a policy, or rights that are missing. It may later."""


class KubeUnavailable(ClusterError):
    """The apiserver did not answer, or not as it should: worth another try."""


class HeadUnreachable(ClusterError):
    """The head pod did not answer, or not as it should: worth another try."""
