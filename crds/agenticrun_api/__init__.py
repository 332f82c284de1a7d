"""The AgenticRun API: spec, status and progress as pydantic models.

The CRD is generated from these models; the operator and the workers import them.
"""

from agenticrun_api.load import InvalidRun, load_run, parse_run
from agenticrun_api.names import Role
from agenticrun_api.pipeline import Pipeline
from agenticrun_api.progress import Activity, Commands, LiveConfig, PoolStatus, Progress
from agenticrun_api.run import AgenticRun, Metadata
from agenticrun_api.spec import AgenticRunSpec
from agenticrun_api.status import (
    AgenticRunStatus,
    Condition,
    ConditionType,
    FinalReport,
    Outcome,
    Phase,
    Reason,
)

__all__ = [
    "Activity",
    "AgenticRun",
    "AgenticRunSpec",
    "AgenticRunStatus",
    "Commands",
    "Condition",
    "ConditionType",
    "FinalReport",
    "InvalidRun",
    "LiveConfig",
    "Metadata",
    "Outcome",
    "Phase",
    "Pipeline",
    "PoolStatus",
    "Progress",
    "Reason",
    "Role",
    "load_run",
    "parse_run",
]
