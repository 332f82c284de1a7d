"""Settings of the operator, from environment variables with the prefix AGENTICRUN_."""

from __future__ import annotations

import socket
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from agenticrun_operator.resources import WorkerImages


class HeadAccess(StrEnum):
    """How head pods are reached."""

    DIRECT = "Direct"
    APISERVER_PROXY = "ApiserverProxy"


class Settings(BaseSettings):
    """What an installation decides."""

    model_config = SettingsConfigDict(
        env_prefix="AGENTICRUN_", frozen=True, use_attribute_docstrings=True
    )

    namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma separated; empty: the whole cluster."""
    worker_image: str
    """Image of the runs that name none."""
    worker_image_sglang: str = ""
    """The same with SGLang, for the pods that carry its engines. Empty: runs with SGLang must name their image."""
    worker_image_vllm: str = ""
    """The same with vLLM."""
    workers: Annotated[int, Field(ge=1, le=64)] = 4
    """Runs that are reconciled at the same time."""
    resync_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Between full passes over all runs, whatever the watches said."""
    full_look_seconds: Annotated[float, Field(gt=0)] = 20.0
    """How long a running run's cluster and pods are taken to be as last seen, when no event says otherwise."""
    head_access: HeadAccess = HeadAccess.DIRECT
    """At the pod's IP, or from outside the cluster through the apiserver's proxy (needs pods/proxy)."""
    lease_name: str = "agenticrun-operator"
    lease_namespace: str = "default"
    identity: str = Field(default_factory=socket.gethostname)
    """Of the lease's holder: the pod's name."""
    probe_port: int = 8080
    """Liveness: GET /healthz."""
    metrics_port: int = 9090
    log_level: str = "INFO"

    @property
    def images(self) -> WorkerImages:
        return WorkerImages(
            self.worker_image, {"sglang": self.worker_image_sglang, "vllm": self.worker_image_vllm}
        )

    @field_validator("namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
        )
