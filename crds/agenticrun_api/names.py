"""Names shared by operator and workers: labels, ports, paths, environment variables, exit codes."""

from __future__ import annotations

from enum import IntEnum, StrEnum

GROUP = "agenticrun.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "AgenticRun"
PLURAL = "agenticruns"
SINGULAR = "agenticrun"
SHORT_NAME = "arun"

MAX_NAME_LENGTH = 45
"""KubeRay allows 53 characters for a RayCluster, and children add suffixes."""

LABEL_RUN = f"{GROUP}/run"
LABEL_RUN_UID = f"{GROUP}/run-uid"
LABEL_ROLE = f"{GROUP}/role"
LABEL_SAVES = f"{GROUP}/saves"
"""Is "true" on the pods that write checkpoints."""

ANNOTATION_VERSION = f"{GROUP}/version"
"""Version of the operator that wrote the run for the pods."""


class Role(StrEnum):
    """The role of a pod. Also the Ray resource that its pods offer and its actors request."""

    DRIVER = "driver"
    TRAINER = "trainer"
    REFERENCE = "reference"
    CRITIC = "critic"
    INFERENCE = "inference"
    ENV = "env"


RAY_CONTAINER = "ray"
REPORTER_CONTAINER = "reporter"
"""Containers of a run's pods; the reporter is on the head only."""
FETCH_CONTAINER = "fetch-code"
INSTALL_CONTAINER = "install-packages"
"""Init containers of all pods, for spec.code.git or image, and for spec.code.pip."""

DASHBOARD_PORT = 8265
REPORTER_PORT = 8787
TOKEN_HEADER = "X-Ray-Authorization"
"""Tokens are sent as `Bearer <token>` in this header, which Ray accepts: the apiserver's proxy
removes `Authorization`."""
DRIVER_HEADER = "X-AgenticRun-Driver"
"""A driver sends its snapshots with a secret of its own in this header. Other processes of the pod
can read the reporter's token, too."""

RUN_FILE = "/etc/agenticrun/run/run.yaml"
"""The whole AgenticRun (metadata.name, namespace, uid, generation and spec), mounted in the head
pod."""
REPORTER_TOKEN_FILE = "/etc/agenticrun/reporter/token"
"""Mounted in the containers of the head pod only."""
CODE_DIR = "/etc/agenticrun/code"
"""The user's modules (spec.code), on PYTHONPATH in every Ray container."""
PACKAGES_DIR = "/etc/agenticrun/packages"
"""The user's packages (spec.code.pip), on PYTHONPATH in every Ray container."""
GIT_SECRET_DIR = "/etc/agenticrun/git"
"""The Secret of spec.code.git, mounted only in the init container that fetches."""
PACKAGE_CACHE_DIR = "/var/cache/agenticrun"
"""uv's cache (spec.code.pip.cacheClaimName), mounted only in the init container that installs."""
IMAGE_CODE_DIR = "/opt/agenticrun/code"
"""Users' modules in images made FROM the worker image, which has it on PYTHONPATH."""
WORK_DIR = "/var/lib/agenticrun"
"""Scratch space of a pod (an emptyDir): initialized models, output if there is no checkpoint URI,
the reporter's state."""
HUB_CACHE_DIR = "/var/cache/huggingface"
"""Mount path of spec.huggingFace.cacheClaimName in all pods."""
CHECKPOINT_DIR = "/checkpoints"
"""Mount path of spec.checkpoint.volumeClaim in head and trainer pods."""

ENV_ATTEMPT = "AGENTICRUN_ATTEMPT"
ENV_SUBMISSION_ID = "AGENTICRUN_SUBMISSION_ID"
ENV_CODE = "AGENTICRUN_CODE"
"""spec.code as JSON, for `FETCH_COMMAND` and `INSTALL_COMMAND`."""
ENV_RAY_TOKEN = "RAY_AUTH_TOKEN"
"""Ray's token. KubeRay sets it in all Ray containers, the operator in the reporter."""
ENV_POD_UID = "AGENTICRUN_POD_UID"
ENV_POD_IP = "AGENTICRUN_POD_IP"
"""uid and IP of the head pod, for the reporter's answer to a challenge."""
ENV_REPLICAS = "AGENTICRUN_REPLICAS"
"""Replicas of roles that may have changed since the run was mounted, as JSON: {"env": 2}."""
ENV_SIMULATED_GPUS = "AGENTICRUN_SIMULATED_GPUS"
"""Set in containers that got simulated GPUs, by the device plugin of the development cluster: their
processes compute on CPUs."""
ENV_NODE = "AGENTICRUN_NODE"
"""Name of a pod's node."""
RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""Variables of a run's processes, unless the user sets them. Ray hides all GPUs from an actor that
has none (CUDA_VISIBLE_DEVICES=""). glibc would give threads arenas of their own, up to 8 per core,
and what is free in one is of no use to the others: processes that run for days would grow."""
DRIVER_COMMAND = "python -m agenticrun_workers.driver"
FETCH_COMMAND = ("python", "-m", "agenticrun_workers.code.git")
INSTALL_COMMAND = ("python", "-m", "agenticrun_workers.code.packages")
REPORTER_COMMAND = ("python", "-m", "agenticrun_workers.reporting.sidecar")
LEAVE_COMMAND = ("python", "-m", "agenticrun_workers.reporting.leave")
"""preStop hook of head and trainer pods; its argument is the number of seconds that it may take."""


def submission_id(name: str, uid: str, attempt: int | str) -> str:
    """Return the Ray submission id of an attempt, unique among all runs.

    Args:
        name: of the run.
        uid: of the run.
        attempt: its number; empty for the prefix that all ids of the run have.
    """
    return f"{name}-{uid[:8]}-{attempt}"


class ExitCode(IntEnum):
    """Exit codes of the driver, used if there is no final report."""

    SUCCEEDED = 0
    FAILED = 1
    """A retry may help."""
    INVALID_CONFIG = 64
    """A retry would fail again, so there is none."""
    STOPPED = 75
    """Stopped on request. A checkpoint was saved if the run has storage for it."""
