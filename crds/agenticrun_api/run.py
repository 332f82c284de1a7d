"""The AgenticRun object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict
from pydantic.alias_generators import to_camel

from agenticrun_api.base import Model, Rule, refused
from agenticrun_api.names import ANNOTATION_VERSION, MAX_NAME_LENGTH
from agenticrun_api.spec import AgenticRunSpec
from agenticrun_api.status import AgenticRunStatus
from agenticrun_api.version import __version__

DNS_1035 = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

NAME_RULE = (
    f"must be at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', begin with a letter "
    "and end with a letter or digit"
)


def _run_name(name: str) -> str:
    if len(name) > MAX_NAME_LENGTH or not re.fullmatch(DNS_1035, name):
        # In Python, too: on a laptop there is no apiserver to check it.
        raise refused("", f"{NAME_RULE} (got {name!r})")
    return name


class Metadata(Model):
    """The part of metadata that the operator and the workers read; other fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="ignore",
        frozen=True,
    )

    name: Annotated[str, AfterValidator(_run_name)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    deletion_timestamp: str | None = None
    finalizers: list[str] = []
    resource_version: str | None = None
    labels: dict[str, str] = {}


class AgenticRun(Model):
    """One RL run, as the user writes it and as the apiserver returns it."""

    RULES = (
        Rule(
            f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && "
            f"self.metadata.name.matches('{DNS_1035}')",
            NAME_RULE,
            ".metadata.name",
            None,
        ),
    )

    api_version: Literal["agenticrun.dev/v1alpha1"] = "agenticrun.dev/v1alpha1"
    kind: Literal["AgenticRun"] = "AgenticRun"
    metadata: Metadata
    spec: AgenticRunSpec
    status: AgenticRunStatus = AgenticRunStatus()

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name)"""
        return self.metadata.namespace, self.metadata.name

    def with_replicas(self, replicas: Mapping[str, int]) -> AgenticRun:
        """Return the run with other numbers of pods, by role."""
        roles = self.spec.roles.with_replicas(replicas)
        return self.model_copy(update={"spec": self.spec.model_copy(update={"roles": roles})})

    def document(self) -> dict[str, Any]:
        """Return the document that is mounted in the pods: metadata and spec, without status.

        It leaves out every field that has its default, so that the worker image, which may be
        older, has to know only the fields that the user set.
        """
        # Labels and annotations of other tools may be large, and change without effect on the run.
        keep = {"name", "namespace", "uid", "generation"}
        metadata = {k: v for k, v in self.metadata.to_dict().items() if k in keep}
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": metadata | {"annotations": {ANNOTATION_VERSION: __version__}},
            "spec": self.spec.model_dump(
                mode="json", by_alias=True, exclude_defaults=True, exclude_none=True
            ),
        }
