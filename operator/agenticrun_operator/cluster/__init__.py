"""All network access: clients of the kube-apiserver and of the head pods of runs."""

from agenticrun_operator.cluster.head import HeadAddress, RunHead
from agenticrun_operator.cluster.kube import KubeClient, connect
from agenticrun_operator.cluster.protocols import Head, Kube
from agenticrun_operator.cluster.transports import (
    DirectTransport,
    HeadTransport,
    ProxyTransport,
    head_session,
)
from agenticrun_operator.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    HeadUnreachable,
    KubeUnavailable,
    NamespaceGone,
    NotFound,
    NotServed,
    Refused,
    RightMissing,
    TooLarge,
    Unanswered,
    WatchBroken,
    WatchExpired,
    WebhookUnavailable,
)

__all__ = [
    "AlreadyExists",
    "ClusterError",
    "Conflict",
    "Denied",
    "DirectTransport",
    "Head",
    "HeadAddress",
    "HeadTransport",
    "HeadUnreachable",
    "Kube",
    "KubeClient",
    "KubeUnavailable",
    "NamespaceGone",
    "NotFound",
    "NotServed",
    "ProxyTransport",
    "Refused",
    "RightMissing",
    "RunHead",
    "TooLarge",
    "Unanswered",
    "WatchBroken",
    "WatchExpired",
    "WebhookUnavailable",
    "connect",
    "head_session",
]
