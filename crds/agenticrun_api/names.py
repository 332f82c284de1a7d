"""Names that the operator and the workers agree on: labels, ports, paths, environment variables, exit codes."""

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


class Role(StrEnum):
    """What a pod of a run is for. Also the Ray resource that its pods offer and its actors ask for."""

    DRIVER = "driver"
    TRAINER = "trainer"
    REFERENCE = "reference"
    CRITIC = "critic"
    INFERENCE = "inference"
    ENV = "env"


DASHBOARD_PORT = 8265
REPORTER_PORT = 8787
TOKEN_HEADER = "X-Ray-Authorization"
"""Tokens travel as `Bearer <token>` in this header: the apiserver's proxy strips `Authorization`, and Ray accepts this one too."""

RUN_FILE = "/etc/agenticrun/run/run.yaml"
"""The whole AgenticRun (metadata.name, namespace, uid, generation and spec), mounted in the head pod."""
REPORTER_TOKEN_FILE = "/etc/agenticrun/reporter/token"
"""Mounted in the containers of the head pod only."""
CODE_DIR = "/etc/agenticrun/code"
"""The user's modules (spec.code.configMap), on PYTHONPATH in every Ray container."""
WORK_DIR = "/var/lib/agenticrun"
"""Scratch space of a pod, an emptyDir: models made by the run, output when there is no checkpoint URI, the reporter's state."""
CHECKPOINT_DIR = "/checkpoints"
"""Where spec.checkpoint.volumeClaim is mounted, in head and trainer pods."""

ENV_ATTEMPT = "AGENTICRUN_ATTEMPT"
ENV_SUBMISSION_ID = "AGENTICRUN_SUBMISSION_ID"
DRIVER_COMMAND = "python -m agenticrun_workers.driver"
REPORTER_COMMAND = ("python", "-m", "agenticrun_workers.reporting.sidecar")


class ExitCode(IntEnum):
    """Exit codes of the driver. The final report says more; these serve when there is none."""

    SUCCEEDED = 0
    FAILED = 1
    """Worth another attempt."""
    INVALID_CONFIG = 64
    """Will fail again: not retried."""
    STOPPED = 75
    """Asked to stop; a checkpoint was saved if there is somewhere to save it."""
