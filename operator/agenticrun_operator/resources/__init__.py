"""Pure functions that build the manifests of a run's child objects."""

from agenticrun_operator.resources.children import (
    Child,
    Event,
    code_config_map,
    desired_children,
    mounted_children,
    mounted_names,
    users_claim_of,
)
from agenticrun_operator.resources.claims import (
    CLAIM_KIND,
    checkpoint_claim_name,
    created_claim,
    is_retained,
    made_by,
    unbound,
    unsuitable,
)
from agenticrun_operator.resources.images import REPORTER_RESOURCES, WorkerImages
from agenticrun_operator.resources.metadata import (
    LABEL_CLUSTER,
    Manifest,
    controller,
    controller_uid,
    is_deleting,
    is_own,
    run_labels,
)
from agenticrun_operator.resources.raycluster import (
    answers_challenges,
    changes_by_others,
    editor_of,
    images_in,
    ray_cluster,
    repaired,
    replicas_in,
    rescaled,
)
from agenticrun_operator.resources.tokens import (
    OperatorKey,
    key_id_of,
    secret_of,
    tokens_name,
    tokens_secret,
)
from agenticrun_operator.resources.volumes import claim_name, storage_of

__all__ = [
    "CLAIM_KIND",
    "LABEL_CLUSTER",
    "REPORTER_RESOURCES",
    "Child",
    "Event",
    "Manifest",
    "OperatorKey",
    "WorkerImages",
    "answers_challenges",
    "changes_by_others",
    "checkpoint_claim_name",
    "claim_name",
    "code_config_map",
    "controller",
    "controller_uid",
    "created_claim",
    "desired_children",
    "editor_of",
    "images_in",
    "is_deleting",
    "is_own",
    "is_retained",
    "key_id_of",
    "made_by",
    "mounted_children",
    "mounted_names",
    "ray_cluster",
    "repaired",
    "replicas_in",
    "rescaled",
    "run_labels",
    "secret_of",
    "storage_of",
    "tokens_name",
    "tokens_secret",
    "unbound",
    "unsuitable",
    "users_claim_of",
]
