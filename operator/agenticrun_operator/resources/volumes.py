"""Volumes of a run's pods, and the names of the objects that they mount."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import (
    CHECKPOINT_DIR,
    HUB_CACHE_DIR,
    REPORTER_TOKEN_FILE,
    RUN_FILE,
    WORK_DIR,
)
from agenticrun_api.roles import SAVES
from agenticrun_api.spec import Checkpoint, VolumeClaim
from agenticrun_operator.resources.code import code_volumes
from agenticrun_operator.resources.metadata import Manifest
from agenticrun_operator.resources.tokens import REPORTER_TOKEN_KEY

_OWNER_AND_GROUP_READ = 0o440
"""File mode of Secrets. With fsGroup, Kubernetes always adds read permission for the group, so a
pod that does not run as root cannot have 0400."""


@dataclass(frozen=True)
class Mounted:
    """A volume and its mount."""

    volume: Manifest
    mount: Manifest


def run_config_name(run: AgenticRun) -> str:
    """Return the name of the ConfigMap with the run."""
    return f"{run.metadata.name}-run"


def claim_name(run: AgenticRun) -> str:
    """Return the name of the claim for the run's checkpoints: the user's own or the created one."""
    storage = run.spec.storage
    users = storage.volume_claim.claim_name if storage and storage.volume_claim else None
    return users or f"{run.metadata.name}-checkpoints"


def storage_of(run: AgenticRun) -> Checkpoint | None:
    """Return the storage of the run's checkpoints; None if it saves none.

    A run that names none gets a claim of the default StorageClass, if the size of its model is
    known.
    """
    size, storage = run.spec.max_checkpoint_bytes, run.spec.storage
    if size is None or not run.spec.gets_default_claim:
        return storage
    storage = storage or Checkpoint()
    # The checkpoints to keep, the one being written, and metrics.
    gibibytes = 1 + math.ceil((storage.keep + 1) * size / 2**30)
    return storage.model_copy(update={"volume_claim": VolumeClaim(size=f"{gibibytes}Gi")})


def pod_volumes(run: AgenticRun, role: Role, tokens: str) -> tuple[Mounted, ...]:
    """Return the volumes of a role's pods, without the user's own (spec.roles.*.volumes).

    Args:
        run: the run.
        role: the role.
        tokens: the name of the Secret with the run's tokens.
    """
    memory = {"medium": "Memory", "sizeLimit": run.spec.roles.of(role).shm_size}
    volumes = [
        _mounted("shared-memory", "/dev/shm", {"emptyDir": memory}),
        _mounted("work", WORK_DIR, {"emptyDir": {}}),
    ]
    if role is Role.DRIVER:
        token = {
            "secretName": tokens,
            "defaultMode": _OWNER_AND_GROUP_READ,
            "items": [{"key": REPORTER_TOKEN_KEY, "path": REPORTER_TOKEN_KEY}],
        }
        volumes += [
            _mounted(
                "run",
                _folder(RUN_FILE),
                {"configMap": {"name": run_config_name(run)}},
                read_only=True,
            ),
            _mounted(
                "reporter-token", _folder(REPORTER_TOKEN_FILE), {"secret": token}, read_only=True
            ),
        ]
    if run.spec.code:
        volumes += [
            _mounted(name, path, source, read_only=True)
            for name, path, source in code_volumes(run.spec.code)
        ]
    hub = run.spec.hugging_face
    if hub and hub.cache_claim_name:
        source = {"persistentVolumeClaim": {"claimName": hub.cache_claim_name}}
        volumes.append(_mounted("huggingface", HUB_CACHE_DIR, source))
    storage = storage_of(run)
    claim = storage.volume_claim if storage else None
    if claim and role in SAVES:
        source = {"persistentVolumeClaim": {"claimName": claim_name(run)}}
        volumes.append(_mounted("checkpoints", CHECKPOINT_DIR, source))
    return tuple(volumes)


def _mounted(name: str, path: str, source: Manifest, read_only: bool = False) -> Mounted:
    mount: Manifest = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return Mounted({"name": name, **source}, mount)


def _folder(path: str) -> str:
    return path.rsplit("/", 1)[0]
