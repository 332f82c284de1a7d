"""`spec.roles` from ROLL's device mappings."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from agenticrun_workers.convert.compose import ConvertError
from agenticrun_workers.convert.fields import View, is_secret
from agenticrun_workers.convert.notes import Notes

Spec = dict[str, Any]

MAX_GPUS_PER_POD = 16
MAX_VARIABLES = 32
_ROLE_OF = {
    "trainer": "actor_train",
    "inference": "actor_infer",
    "env": "train_env_manager",
    "reference": "reference",
    "critic": "critic",
}


def roles(top: View, env_pods: int, notes: Notes) -> Spec:
    """Pods of each role. Reference and critic have their own where ROLL gives them GPUs of their own."""
    trainer, inference = devices(top, "actor_train"), devices(top, "actor_infer")
    together = placement(top) == "Colocated"
    if set(trainer) & set(inference) and not together:
        notes.changed(
            "actor_infer.device_mapping",
            list(inference),
            "shares some GPUs with actor_train, or all while rollout runs ahead (async_generation_ratio); engines that take turns with "
            f"trainers do so on all of them and wait for them: here {len(trainer)} + {len(inference)} GPUs",
        )
    notes.changed(
        "(resources)",
        "",
        "ROLL takes whole nodes: set cpus and memory of spec.roles.* (the defaults suit tiny models)",
    )
    per_pod = min(int(top["num_gpus_per_node"]), MAX_GPUS_PER_POD)
    pods: dict[str, Spec] = {
        "driver": {},
        "trainer": _pods(len(trainer), top.section("actor_train")["world_size"], per_pod),
        "inference": _pods(len(inference), top.section("actor_infer")["world_size"], per_pod),
        "env": {"replicas": env_pods},
    }
    for role, used in (
        ("reference", uses_reference(top)),
        ("critic", top["adv_estimator"] == "gae"),
    ):
        gpus = devices(top, role)
        if used and gpus and not set(gpus) & set(trainer):
            pods[role] = _pods(len(gpus), None, per_pod)
    if together:
        del pods["inference"]
    everywhere = _variables(top["system_envs"], "system_envs", notes)
    for role, pod in pods.items():
        section = _ROLE_OF.get(role)
        own = (
            _variables(top.section(section)["system_envs"], f"{section}.system_envs", notes)
            if section
            else {}
        )
        variables = [
            {"name": name, "value": value} for name, value in {**everywhere, **own}.items()
        ]
        if len(variables) > MAX_VARIABLES:
            notes.cannot(
                "system_envs",
                len(variables),
                f"at most {MAX_VARIABLES} variables: the others are left out",
            )
        if variables:
            pod["env"] = variables[:MAX_VARIABLES]
    return {role: pod for role, pod in pods.items() if pod}


def placement(top: View) -> str | None:
    """`spec.placement` where it is not the default: engines on exactly the trainers' GPUs, in a synchronous run."""
    trainer = set(devices(top, "actor_train"))
    synchronous = (
        top["async_generation_ratio"] == 0
        and top.section("actor_train")["model_update_frequency"] == 1
    )
    return (
        "Colocated"
        if synchronous and trainer and trainer == set(devices(top, "actor_infer"))
        else None
    )


def uses_reference(top: View) -> bool:
    """Whether a KL penalty needs the frozen policy."""
    return bool(
        (top["add_token_level_kl"] and top["init_kl_coef"] > 0)
        or (top["use_kl_loss"] and top["kl_loss_coef"] > 0)
    )


def devices(top: View, role: str) -> list[int]:
    """The GPUs of a role. ROLL passes the text to `eval`; here it is read, never run. Raises `ConvertError`."""
    given = top.section(role)["device_mapping"]
    if given is None or given == "":
        return []
    try:
        return (
            _read(ast.parse(given, mode="eval").body)
            if isinstance(given, str)
            else [int(device) for device in given]
        )
    except (SyntaxError, ValueError, TypeError) as error:
        raise ConvertError(
            f"{role}.device_mapping: {given!r} is no list of GPU numbers such as list(range(0, 8)) ({error})"
        ) from error


def _read(node: ast.expr) -> list[int]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _read(left) + _read(right)
        case ast.Call(func=ast.Name(id="list"), args=[inner]):
            return _read(inner)
        case ast.Call(func=ast.Name(id="range"), args=bounds):
            return list(range(*(int(ast.literal_eval(bound)) for bound in bounds)))
        case ast.List() | ast.Tuple():
            return [int(device) for device in ast.literal_eval(node)]
    raise ValueError(f"{ast.unparse(node)} is neither a list nor a range")


def _pods(gpus: int, world_size: int | None, per_pod: int) -> Spec:
    """The fewest pods of equal size."""
    if not gpus:
        return {"replicas": int(world_size)} if world_size else {}
    size = max(size for size in range(1, min(per_pod, gpus) + 1) if gpus % size == 0)
    return {"gpus": size, "replicas": gpus // size}


def _variables(given: Mapping[str, Any] | None, path: str, notes: Notes) -> dict[str, str]:
    variables = {}
    for name, value in (given or {}).items():
        if is_secret(name):
            notes.changed(
                f"{path}.{name}",
                "***",
                "a secret: name it in spec.roles.*.envFrom, never in a YAML",
            )
        else:
            variables[str(name)] = str(value)
    return variables
