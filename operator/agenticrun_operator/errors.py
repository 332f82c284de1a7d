"""Errors of the clients in `cluster`: one type for each case that a caller handles."""

from __future__ import annotations


class ClusterError(Exception):
    """Base class of all errors of the clients."""


class NotFound(ClusterError):
    """The object does not exist."""


class AlreadyExists(ClusterError):
    """An object with that name exists already."""


class Conflict(ClusterError):
    """The object has changed or was replaced since it was read."""


class Refused(ClusterError):
    """The apiserver rejects the object as invalid; its message names the field."""


class Denied(ClusterError):
    """A quota, an admission policy or missing rights prevent the request. It may succeed later."""


class RightMissing(Denied):
    """The operator's identity may not make such requests, as with the chart of an older release."""


class TooLarge(ClusterError):
    """The object is larger than the apiserver or etcd takes. No retry helps."""


class WebhookUnavailable(ClusterError):
    """An admission or conversion webhook failed or did not answer. It may answer later."""


class NotServed(ClusterError):
    """The apiserver does not serve this kind: its CRD is not installed."""


class NamespaceGone(ClusterError):
    """The namespace does not exist or is being deleted, so nothing can be created in it."""


class WatchExpired(ClusterError):
    """The watch must begin again with a list: it missed more than the apiserver remembers."""


class KubeUnavailable(ClusterError):
    """The apiserver did not answer, or its answer is unusable. A retry may help."""


class Unanswered(KubeUnavailable):
    """The apiserver has not answered in time. The request may still be carried out."""


class AnswerTooLong(KubeUnavailable):
    """The answer is longer than the request allows. The rest was not read."""


class WatchBroken(KubeUnavailable):
    """The watch cannot begin, its connection broke, or it fell silent.

    The next watch may continue from the version that it has reached.
    """


class HeadUnreachable(ClusterError):
    """The head pod did not answer, or its answer is unusable. A retry may help."""


class TokenRefused(HeadUnreachable):
    """The head pod answered that the operator's token is wrong."""


class HeadUnproved(HeadUnreachable):
    """A pod answered, and did not prove that it is the head, so it gets no token."""
