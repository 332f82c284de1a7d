"""Volumes of a run's pods, and the names of the objects that they mount."""

from __future__ import annotations

from dataclasses import dataclass

from agenticrun_api import AgenticRun, Role
from agenticrun_api.names import CHECKPOINT_DIR, CODE_DIR, REPORTER_TOKEN_FILE, RUN_FILE, WORK_DIR
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
    """Return the name of the claim that is created for spec.checkpoint.volumeClaim.size."""
    return f"{run.metadata.name}-checkpoints"


def pod_volumes(run: AgenticRun, role: Role, tokens: str) -> tuple[Mounted, ...]:
    """Return the volumes of a role's pods, without the user's own (spec.roles.*.volumes).

    Args:
        run: the run.
        role: the role.
        tokens: the name of the Secret with the run's tokens.
    """
    volumes = [_shared_memory(run, role), _mounted("work", WORK_DIR, {"emptyDir": {}})]
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
        volumes.append(
            _mounted(
                "code", CODE_DIR, {"configMap": {"name": run.spec.code.config_map}}, read_only=True
            )
        )
    claim = run.spec.checkpoint.volume_claim if run.spec.checkpoint else None
    if claim and role in (Role.DRIVER, Role.TRAINER, Role.REFERENCE, Role.CRITIC):
        source = {"persistentVolumeClaim": {"claimName": claim.claim_name or claim_name(run)}}
        volumes.append(_mounted("checkpoints", CHECKPOINT_DIR, source))
    return tuple(volumes)


def _shared_memory(run: AgenticRun, role: Role) -> Mounted:
    size = run.spec.roles.of(role).shm_size
    return _mounted(
        "shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    )


def _mounted(name: str, path: str, source: Manifest, read_only: bool = False) -> Mounted:
    mount: Manifest = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return Mounted({"name": name, **source}, mount)


def _folder(path: str) -> str:
    return path.rsplit("/", 1)[0]
