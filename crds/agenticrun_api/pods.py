"""Traits of every pod that is made for a run: its user, its restrictions, the user's overlay.

The overlay is spec.roles.<role>.podTemplate. Its merge follows Kubernetes' strategic merge:
mappings are merged, lists with a merge key by that key, and everything else is replaced. What is
ours keeps its place, so the Ray container stays the first one, which is where KubeRay looks for it.
"""

from __future__ import annotations

from typing import Any

POD_USER = 1000
"""User and group of every process of a run; the worker image has this user."""
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of every container of ours: what the Pod Security Standard `restricted` asks."""

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""By the name of a list, the field that identifies its items, as in Kubernetes' API."""
_HANDLERS = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})
"""Fields of probes and lifecycle hooks that exclude each other: the overlay's replaces ours."""
_REPLACED = frozenset({"volumes", "env"})
"""Lists of items that have one of several sources: an item replaces the one of the same key."""


def merged(base: Any, overlay: Any, field: str = "") -> Any:
    """Return `base` with `overlay` merged into it; neither is changed.

    Args:
        base: a value as JSON.
        overlay: what to merge into it; an empty mapping changes nothing.
        field: the name of the field that has these values.
    """
    if isinstance(base, dict) and isinstance(overlay, dict):
        if _HANDLERS & overlay.keys():
            base = {key: base[key] for key in base if key not in _HANDLERS - overlay.keys()}
        both = {
            key: merged(base[key], value, key) if key in base else value
            for key, value in overlay.items()
        }
        return base | both
    key = MERGE_KEYS.get(field)
    if key is None or not isinstance(base, list) or not isinstance(overlay, list):
        return overlay
    if not all(
        isinstance(item, dict) and isinstance(item.get(key), str | int) and item[key]
        for item in [*base, *overlay]
    ):
        return [*base, *overlay]  # the apiserver refuses it, and names the item
    items = {item[key]: item for item in base}
    for item in overlay:
        known = item[key] in items and field not in _REPLACED
        items[item[key]] = merged(items[item[key]], item) if known else item
    return list(items.values())
