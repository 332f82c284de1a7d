"""Settings of the operator, from environment variables with the prefix AGENTICRUN_."""

from __future__ import annotations

import socket
from enum import StrEnum
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from agenticrun_api.roles import Resources
from agenticrun_operator.resources import REPORTER_RESOURCES, OperatorKey, WorkerImages


class HeadAccess(StrEnum):
    """The way to reach head pods."""

    DIRECT = "Direct"
    APISERVER_PROXY = "ApiserverProxy"


class Settings(BaseSettings):
    """Settings of one installation of the operator."""

    model_config = SettingsConfigDict(
        env_prefix="AGENTICRUN_",
        frozen=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Namespaces to watch, separated by commas. Empty: the whole Kubernetes cluster."""
    operator_key: Annotated[SecretStr, Field(min_length=32)]
    """The key from which the tokens of all runs are derived: at least 32 random characters. With
    another key the operator cannot talk to the runs that go on."""
    worker_image: str
    """Worker image of runs without spec.image."""
    worker_image_sglang: str = ""
    """Worker image with SGLang, for the pods that run its engines. Empty: runs that use SGLang must
    set spec.image."""
    worker_image_vllm: str = ""
    """Worker image with vLLM, likewise."""
    architectures: Annotated[tuple[str, ...], NoDecode] = ("amd64",)
    """Architectures of the worker images, separated by commas, as nodes name theirs. Pods go to no
    other nodes. Empty: pods go to any node."""
    reporter_resources: Resources = REPORTER_RESOURCES
    """Resources of the reporter's container on head pods, as JSON."""
    workers: Annotated[int, Field(ge=1, le=64)] = 16
    """Number of runs whose objects are read at the same time. Questions to head pods and writes do
    not count."""
    resync_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Seconds between two resyncs of all runs."""
    full_look_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Maximum age, in seconds, of what the operator remembers of a run's objects. A watch event
    makes it look at once."""
    head_access: HeadAccess = HeadAccess.DIRECT
    """Direct: at the pod's IP. ApiserverProxy: through the apiserver, from outside the Kubernetes
    cluster (needs the right to pods/proxy)."""
    lease_name: str = "agenticrun-operator"
    lease_namespace: str = "default"
    identity: str = Field(default_factory=socket.gethostname)
    """Name of this operator in the lease; in a Kubernetes cluster, the pod's name."""
    probe_port: int = 8080
    """Port of the liveness probe (GET /healthz)."""
    metrics_port: int = 9090
    log_level: str = "INFO"

    @property
    def images(self) -> WorkerImages:
        """The configured worker images, and how they run."""
        return WorkerImages(
            self.worker_image,
            {"sglang": self.worker_image_sglang, "vllm": self.worker_image_vllm},
            self.architectures,
            self.reporter_resources,
        )

    @property
    def key(self) -> OperatorKey:
        """The operator's key."""
        return OperatorKey(self.operator_key.get_secret_value())

    @field_validator("namespaces", "architectures", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
        )
