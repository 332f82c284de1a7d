"""Objects of the cluster that one run names: Secrets, ConfigMaps, claims, classes, images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agenticrun_api import AgenticRun, Role
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.findings import Finding, Verdict, failed, not_checked, ok, warning

Objects = list[dict[str, Any]]

_KEYS = "go-template={{range $key, $value := .data}}{{$key}} {{end}}"
"""Prints the keys of a Secret or ConfigMap, and no value."""
_CREATE = {
    "secret": "kubectl create secret generic {name} --from-literal={key}=...",
    "configmap": "kubectl create configmap {name} --from-file=...",
    "persistentvolumeclaim": "create the claim, or name another one (kubectl get pvc)",
    "storageclass": "name one of kubectl get storageclass",
    "serviceaccount": "kubectl create serviceaccount {name}",
    "priorityclass": "name one of kubectl get priorityclass",
    "runtimeclass": "name one of kubectl get runtimeclass",
}


@dataclass(frozen=True)
class Reference:
    """An object that a run needs, and the field that names it."""

    kind: str
    """As kubectl takes it."""
    name: str
    field: str
    keys: tuple[str, ...] = ()
    """Keys of a Secret or ConfigMap that the run reads."""
    pulls_images: bool = False
    """True for a Secret of imagePullSecrets: without it, a node pulls anonymously."""


def references(run: AgenticRun) -> Iterator[Reference]:
    """Yield the objects that a run names, without the optional ones."""
    spec = run.spec
    if spec.hugging_face:
        if spec.hugging_face.secret_name:
            field = "spec.huggingFace.secretName"
            yield Reference("secret", spec.hugging_face.secret_name, field, ("HF_TOKEN",))
        if spec.hugging_face.cache_claim_name:
            field = "spec.huggingFace.cacheClaimName"
            yield Reference("persistentvolumeclaim", spec.hugging_face.cache_claim_name, field)
    for number, name in enumerate(spec.image_pull_secrets):
        yield Reference("secret", name, f"spec.imagePullSecrets[{number}]", pulls_images=True)
    if spec.priority_class_name:
        yield Reference("priorityclass", spec.priority_class_name, "spec.priorityClassName")
    code = spec.code
    if code and code.config_map:
        yield Reference("configmap", code.config_map, "spec.code.configMap")
    if code and code.git and code.git.secret_name:
        over_http = code.git.url.startswith(("http://", "https://"))
        keys = ("password",) if over_http else ("ssh-privatekey", "known_hosts")
        yield Reference("secret", code.git.secret_name, "spec.code.git.secretName", keys)
    if code and code.pip and code.pip.secret_name:
        yield Reference("secret", code.pip.secret_name, "spec.code.pip.secretName")
    if code and code.pip and code.pip.cache_claim_name:
        field = "spec.code.pip.cacheClaimName"
        yield Reference("persistentvolumeclaim", code.pip.cache_claim_name, field)
    claim = spec.storage.volume_claim if spec.storage else None
    if claim and claim.claim_name:
        field = "spec.checkpoint.volumeClaim.claimName"
        yield Reference("persistentvolumeclaim", claim.claim_name, field)
    if claim and claim.storage_class_name:
        field = "spec.checkpoint.volumeClaim.storageClassName"
        yield Reference("storageclass", claim.storage_class_name, field)
    for role in (Role.DRIVER, *spec.roles.workers):
        yield from _of_role(run, role)


def _of_role(run: AgenticRun, role: Role) -> Iterator[Reference]:
    settings, field = run.spec.roles.of(role), f"spec.roles.{role.value}"
    if settings.priority_class_name:
        yield Reference("priorityclass", settings.priority_class_name, f"{field}.priorityClassName")
    if settings.runtime_class_name:
        yield Reference("runtimeclass", settings.runtime_class_name, f"{field}.runtimeClassName")
    account = settings.overlay.spec.get("serviceAccountName")
    if account:
        place = f"{field}.podTemplate.spec.serviceAccountName"
        yield Reference("serviceaccount", account, place)
    for number, variable in enumerate(settings.env):
        source = variable.get("valueFrom")
        for kind, key in (("secret", "secretKeyRef"), ("configmap", "configMapKeyRef")):
            found = source.get(key) if isinstance(source, dict) else None
            place = f"{field}.env[{number}].valueFrom.{key}"
            yield from _named(found, kind, "name", place, reads_key=True)
    for number, item in enumerate(settings.env_from):
        for kind, key in (("secret", "secretRef"), ("configmap", "configMapRef")):
            yield from _named(item.get(key), kind, "name", f"{field}.envFrom[{number}].{key}")
    for number, volume in enumerate(settings.volumes):
        for kind, key, name in (
            ("secret", "secret", "secretName"),
            ("configmap", "configMap", "name"),
            ("persistentvolumeclaim", "persistentVolumeClaim", "claimName"),
        ):
            yield from _named(volume.get(key), kind, name, f"{field}.volumes[{number}].{key}")


def _named(
    found: object, kind: str, field: str, place: str, *, reads_key: bool = False
) -> Iterator[Reference]:
    """Yield the object that a reference in a pod names in `field`, unless it is optional.

    One without a name has the name "": the apiserver will refuse the pods.
    """
    # Pods start without an optional object.
    if not found or (isinstance(found, dict) and found.get("optional")):
        return
    given = found if isinstance(found, dict) else {}
    name, key = given.get(field), given.get("key")
    yield Reference(
        kind,
        name if isinstance(name, str) else "",
        place if name else f"{place}.{field}",
        (str(key),) if reads_key and key else (),
    )


def objects_exist(run: AgenticRun, kubectl: Kubectl) -> dict[str, Finding]:
    """Look for each object that the run names. Returns the findings by kind and name."""
    found: dict[str, Finding] = {}
    for reference in references(run):
        name = f"{reference.kind} {reference.name or reference.field}"
        # Two fields may name one object; a failure of either counts.
        before = found.get(name)
        if before is None or before.verdict is not Verdict.FAILED:
            found[name] = _exists(reference, kubectl)
    return found


def _exists(reference: Reference, kubectl: Kubectl) -> Finding:
    if not reference.name:
        return failed(f"{reference.field} names no {reference.kind}", f"set {reference.field}")
    # Only the names of keys, never their values.
    output = _KEYS if reference.kind in ("secret", "configmap") else "name"
    example = reference.keys[0] if reference.keys else "KEY"
    advice = _CREATE[reference.kind].format(name=reference.name, key=example)
    try:
        keys = kubectl.run("get", reference.kind, reference.name, "-o", output).decode().split()
    except SourceError as error:
        # Only this answer is about the object: others are about rights or the connection.
        if "NotFound" in str(error) or "not found" in str(error):
            missing = f"it does not exist; {reference.field} names it"
            # A missing pull secret is ignored by nodes, and the image may be public.
            if reference.pulls_images:
                return warning(
                    f"{missing}: nodes pull images without it",
                    f"kubectl create secret docker-registry {reference.name} "
                    "--docker-server=... --docker-username=... --docker-password=..., "
                    "if a registry asks for a login",
                )
            return failed(missing, advice)
        return not_checked(f"cannot be read ({reference.field}): {error}")
    if lacking := [key for key in reference.keys if key not in keys]:
        return failed(f"it has no key {', '.join(lacking)} ({reference.field})", advice)
    return ok(reference.field)


def images_are_known(run: AgenticRun, nodes: Objects, operators: Objects) -> Finding:
    """Return whether the operator has an image for the run, and which images no node has yet.

    Args:
        operators: the operator's Deployments.
    """
    named = _images(run)
    if run.spec.image is None and not _have_image_for(run, operators):
        engine = run.spec.pipeline.actor_infer.strategy.name
        return failed(
            f"the operator has no worker image with {engine}",
            "set spec.image, or the chart's values registry or images",
        )
    present = {
        name
        for node in nodes
        for image in node["status"].get("images") or []
        for name in image.get("names") or []
    }
    new = {
        image: field
        for image, field in named.items()
        # Nodes list images of Docker Hub with the registry that their name leaves out.
        if present.isdisjoint((image, f"docker.io/{image}", f"docker.io/library/{image}"))
    }
    if new:
        shown = ", ".join(f"{image} ({field})" for image, field in new.items())
        return warning(
            f"on no node yet: {shown}",
            "nodes will pull it: see that it exists, and that imagePullSecrets fit its registry",
        )
    return ok(", ".join(named) or "those of the operator")


def _images(run: AgenticRun) -> dict[str, str]:
    """Return the field of each image that the run names."""
    spec = run.spec
    found = {spec.image: "spec.image"} if spec.image else {}
    for role in (Role.DRIVER, *spec.roles.workers):
        if image := spec.roles.of(role).image:
            found.setdefault(image, f"spec.roles.{role.value}.image")
    if spec.code and spec.code.image:
        found.setdefault(spec.code.image.reference, "spec.code.image.reference")
    return found


def _have_image_for(run: AgenticRun, operators: Objects) -> bool:
    """Return whether the operators have a worker image for the run's engine."""
    engine = run.spec.pipeline.actor_infer.strategy.name
    suffix = "" if engine == "transformers" else f"_{engine.upper()}"
    return all(
        variable.get("value")
        for item in operators
        for container in item["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env") or []
        if variable["name"] == f"AGENTICRUN_WORKER_IMAGE{suffix}"
    )
