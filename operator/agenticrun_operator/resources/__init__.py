"""Pure functions that build the manifests of a run's child objects."""

from agenticrun_operator.resources.children import (
    Child,
    Event,
    code_config_map,
    desired_children,
    mounted_children,
    mounted_names,
    token_secret,
    token_secrets,
)
from agenticrun_operator.resources.claims import (
    CLAIM_KIND,
    created_claim,
    is_retained,
    made_by,
    unsuitable,
)
from agenticrun_operator.resources.images import WorkerImages
from agenticrun_operator.resources.metadata import (
    Manifest,
    controller,
    controller_uid,
    is_deleting,
    whole_number,
)
from agenticrun_operator.resources.pods import RAY_CONTAINER
from agenticrun_operator.resources.raycluster import images_in, ray_cluster

__all__ = [
    "CLAIM_KIND",
    "RAY_CONTAINER",
    "Child",
    "Event",
    "Manifest",
    "WorkerImages",
    "code_config_map",
    "controller",
    "controller_uid",
    "created_claim",
    "desired_children",
    "images_in",
    "is_deleting",
    "is_retained",
    "made_by",
    "mounted_children",
    "mounted_names",
    "ray_cluster",
    "token_secret",
    "token_secrets",
    "unsuitable",
    "whole_number",
]
