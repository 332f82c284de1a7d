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

DASHBOARD_PORT = 8265
REPORTER_PORT = 8787
TOKEN_HEADER = "X-Ray-Authorization"
"""Tokens are sent as `Bearer <token>` in this header, which Ray accepts: the apiserver's proxy
removes `Authorization`."""

RUN_FILE = "/etc/agenticrun/run/run.yaml"
"""The whole AgenticRun (metadata.name, namespace, uid, generation and spec), mounted in the head
pod."""
REPORTER_TOKEN_FILE = "/etc/agenticrun/reporter/token"
"""Mounted in the containers of the head pod only."""
CODE_DIR = "/etc/agenticrun/code"
"""The user's modules (spec.code.configMap), on PYTHONPATH in every Ray container."""
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
ENV_REPLICAS = "AGENTICRUN_REPLICAS"
"""Replicas of roles that may have changed since the run was mounted, as JSON: {"env": 2}."""
DRIVER_COMMAND = "python -m agenticrun_workers.driver"
REPORTER_COMMAND = ("python", "-m", "agenticrun_workers.reporting.sidecar")


class ExitCode(IntEnum):
    """Exit codes of the driver, used if there is no final report."""

    SUCCEEDED = 0
    FAILED = 1
    """A retry may help."""
    INVALID_CONFIG = 64
    """A retry would fail again, so there is none."""
    STOPPED = 75
    """Stopped on request. A checkpoint was saved if the run has storage for it."""
