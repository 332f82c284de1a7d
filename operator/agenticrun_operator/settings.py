"""Settings of the operator, from environment variables with the prefix AGENTICRUN_."""

from __future__ import annotations

import socket
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from agenticrun_api.roles import REPORTER_RESOURCES, Resources
from agenticrun_operator.logs import LogFormat
from agenticrun_operator.resources import OperatorKey, WorkerImages
from agenticrun_operator.shard import Shard


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
    operator_key: Annotated[SecretStr, Field(min_length=OperatorKey.MIN_LENGTH)] | None = None
    """The key from which the tokens of all runs are derived: at least 32 random characters. With
    another key the operator cannot talk to running runs. Either this or operator_key_secret."""
    operator_key_secret: Annotated[str, Field(pattern=r"^([^/]+/[^/]+)?$")] = ""
    """`<namespace>/<name>` of the Secret with the operator's key. The operator creates it if it
    does not exist."""
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
    network_policy_namespace: str = ""
    """Namespace of the operator's pods: each run gets NetworkPolicies that let in these and its own
    pods, and whom spec.network names. Empty: runs get none."""
    head_access: HeadAccess = HeadAccess.DIRECT
    """Direct: at the pod's IP. ApiserverProxy: through the apiserver, from outside the Kubernetes
    cluster (needs the right to pods/proxy)."""
    shard: Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")] = "0/1"
    """The part of all runs that this operator follows: `2/4` is the third of four. Operators of
    different parts have different Leases."""
    lease_name: str = "agenticrun-operator"
    lease_namespace: str = "default"
    identity: str = Field(default_factory=socket.gethostname)
    """Name of this operator in the lease; in a Kubernetes cluster, the pod's name."""
    probe_port: int = 8080
    """Port of the liveness probe (GET /healthz)."""
    metrics_port: int = 9090
    log_level: str = "INFO"
    log_format: LogFormat = LogFormat.TEXT
    """text, or json: one JSON object in each line."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)] | None = None
    """spec.ttlSecondsAfterFinished of runs that do not set it. None: they are kept."""

    @property
    def images(self) -> WorkerImages:
        """The configured worker images, and how they run."""
        return WorkerImages(
            self.worker_image,
            {"sglang": self.worker_image_sglang, "vllm": self.worker_image_vllm},
            self.architectures,
            self.reporter_resources,
            self.network_policy_namespace,
        )

    @property
    def heads_by_proxy(self) -> bool:
        """True to reach head pods through the apiserver's proxy."""
        return self.head_access is HeadAccess.APISERVER_PROXY

    @property
    def key(self) -> OperatorKey | None:
        """The operator's key; None if it is in a Secret that the operator reads."""
        return OperatorKey(self.operator_key.get_secret_value()) if self.operator_key else None

    @property
    def part(self) -> Shard:
        """The part of all runs that this operator follows."""
        return Shard(*map(int, self.shard.split("/")))

    @field_validator("shard")
    @classmethod
    def _is_a_part(cls, value: str) -> str:
        number, count = map(int, value.split("/"))
        if number >= count:
            raise ValueError(f"of {count} parts the last is {count - 1}/{count}")
        return value

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if (self.operator_key is None) is (self.operator_key_secret == ""):
            raise ValueError("set either operator_key or operator_key_secret")
        return self

    @field_validator("namespaces", "architectures", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
        )
