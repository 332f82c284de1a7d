"""All network access: clients of the kube-apiserver and of the head pods of runs."""

from agenticrun_operator.cluster.head import HeadAddress, RunHead, open_clients
from agenticrun_operator.cluster.kube import KubeClient, connect
from agenticrun_operator.cluster.protocols import Head, Kube
from agenticrun_operator.cluster.transports import (
    DirectTransport,
    HeadTransport,
    ProxyTransport,
    head_session,
)

__all__ = [
    "DirectTransport",
    "Head",
    "HeadAddress",
    "HeadTransport",
    "Kube",
    "KubeClient",
    "ProxyTransport",
    "RunHead",
    "connect",
    "head_session",
    "open_clients",
]
