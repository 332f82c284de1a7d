"""Brings the user's modules and packages (spec.code) into the pods.

A ConfigMap is mounted. Everything else is brought by init containers into an emptyDir, which the
Ray container mounts read-only: Git and packages by the worker image's own programs
(`agenticrun_workers.code`), an image by its program `cp`. Image volumes would need no program, but
Kubernetes 1.30, which the operator supports, does not have them.
"""

from __future__ import annotations

import json

from agenticrun_api import AgenticRun
from agenticrun_api.names import (
    CODE_DIR,
    ENV_CODE,
    FETCH_COMMAND,
    FETCH_CONTAINER,
    GIT_SECRET_DIR,
    INSTALL_COMMAND,
    INSTALL_CONTAINER,
    PACKAGE_CACHE_DIR,
    PACKAGES_DIR,
)
from agenticrun_api.roles import PodRole
from agenticrun_api.spec import CodeSpec
from agenticrun_operator.resources.metadata import Manifest

_OWNER_AND_GROUP_READ = 0o440


def code_volumes(code: CodeSpec) -> list[tuple[str, str, Manifest]]:
    """Return name, mount path and source of the volumes that the Ray container mounts."""
    volumes: list[tuple[str, str, Manifest]] = []
    if code.sources:
        source: Manifest = (
            {"configMap": {"name": code.config_map}} if code.config_map else {"emptyDir": {}}
        )
        volumes.append(("code", CODE_DIR, source))
    if code.pip:
        volumes.append(("packages", PACKAGES_DIR, {"emptyDir": {}}))
    return volumes


def init_volumes(code: CodeSpec) -> list[Manifest]:
    """Return the volumes that only init containers mount."""
    volumes: list[Manifest] = []
    if code.git and code.git.secret_name:
        # Optional: the container says that the Secret is missing. Without this, the pod would
        # wait, and the operator, which may not read Secrets, could not say for what.
        secret = {
            "secretName": code.git.secret_name,
            "defaultMode": _OWNER_AND_GROUP_READ,
            "optional": True,
        }
        volumes.append({"name": "git-secret", "secret": secret})
    if code.pip and code.pip.cache_claim_name:
        claim = {"claimName": code.pip.cache_claim_name}
        volumes.append({"name": "package-cache", "persistentVolumeClaim": claim})
    return volumes


def code_containers(run: AgenticRun, settings: PodRole, common: Manifest) -> list[Manifest]:
    """Return the init containers that bring the code, in their order.

    Args:
        run: the run.
        settings: of the pod's role. Its env, envFrom and volumeMounts hold for them, too: a proxy,
            a certificate bundle.
        common: fields of every such container, with the image of the pod.
    """
    code = run.spec.code
    if code is None:
        return []
    variable = {"name": ENV_CODE, "value": json.dumps(code.to_dict())}
    ours: Manifest = {
        **common,
        "env": [*settings.env, variable],
        **({"envFrom": settings.env_from} if settings.env_from else {}),
    }
    into_code = {"name": "code", "mountPath": CODE_DIR}
    containers: list[Manifest] = []
    if code.git:
        mounts: list[Manifest] = [into_code]
        if code.git.secret_name:
            mounts.append({"name": "git-secret", "mountPath": GIT_SECRET_DIR, "readOnly": True})
        containers.append(
            {
                **ours,
                "name": FETCH_CONTAINER,
                "command": list(FETCH_COMMAND),
                "volumeMounts": [*mounts, *settings.volume_mounts],
            }
        )
    if code.image:
        containers.append(
            {
                **common,
                "name": FETCH_CONTAINER,
                "image": code.image.reference,
                # -f: a second try replaces read-only files of the first.
                "command": ["cp", "-R", "-f", f"{code.image.path.rstrip('/')}/.", CODE_DIR],
                "volumeMounts": [into_code],
            }
        )
    if code.pip:
        mounts = [{"name": "packages", "mountPath": PACKAGES_DIR}]
        if code.sources:
            mounts.append(into_code)  # a build writes beside its sources
        if code.pip.cache_claim_name:
            mounts.append({"name": "package-cache", "mountPath": PACKAGE_CACHE_DIR})
        secret = code.pip.secret_name
        own = {"envFrom": [*settings.env_from, {"secretRef": {"name": secret}}]} if secret else {}
        containers.append(
            {
                **ours,
                **own,
                "name": INSTALL_CONTAINER,
                "command": list(INSTALL_COMMAND),
                "volumeMounts": [*mounts, *settings.volume_mounts],
            }
        )
    return containers
