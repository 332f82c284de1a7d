"""The chart: its rendered objects, the values that it refuses, and the apiserver's acceptance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from agenticrun_api.version import __version__
from testcluster import ROOT, Cluster, CommandFailed
from waiting import eventually

CHART = ROOT / "charts/agenticrun"
RELEASE = "test-chart"
NAMESPACE = "agenticrun-test-chart"

Objects = dict[tuple[str, str, str], dict[str, Any]]
"""(kind, namespace, name) -> object"""


def render(cluster: Cluster, **values: Any) -> Objects:
    """`helm template` with values."""
    out = cluster.command(
        "helm",
        "template",
        RELEASE,
        str(CHART),
        "-n",
        NAMESPACE,
        "-f",
        "-",
        stdin=json.dumps(values),
    )
    documents = [document for document in yaml.safe_load_all(out) if document]
    return {
        (d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]): d for d in documents
    }


def pod_spec(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment", NAMESPACE, RELEASE]["spec"]["template"]["spec"]
    return spec


def container(objects: Objects) -> dict[str, Any]:
    (found,) = pod_spec(objects)["containers"]
    assert isinstance(found, dict)
    return found


def environment(objects: Objects) -> dict[str, str]:
    return {
        entry["name"]: entry["value"] for entry in container(objects)["env"] if "value" in entry
    }


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[Cluster]:
    """Yield a namespace that enforces the restricted Pod Security Standard.

    Its cluster has the chart's CRD.
    """
    cluster.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", str(CHART / "crds/agenticruns.yaml")
    )
    cluster.wait_for_crd("agenticruns.agenticrun.dev")
    with cluster.new_namespace(NAMESPACE) as inside:
        inside.kubectl(
            "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted"
        )
        yield inside


def test_helm_lint_is_clean(cluster: Cluster) -> None:
    assert "0 chart(s) failed" in cluster.command("helm", "lint", "--strict", str(CHART))


def test_by_default_it_serves_all_namespaces_with_a_cluster_role(cluster: Cluster) -> None:
    objects = render(cluster)
    assert {(kind, namespace) for kind, namespace, _ in objects} == {
        ("ServiceAccount", NAMESPACE),
        ("ClusterRole", ""),
        ("ClusterRoleBinding", ""),
        ("Role", NAMESPACE),
        ("RoleBinding", NAMESPACE),
        ("Deployment", NAMESPACE),
        ("Service", NAMESPACE),
    }
    assert environment(objects)["AGENTICRUN_NAMESPACES"] == ""


def test_with_namespaces_there_is_a_role_in_each_and_nothing_of_the_cluster(
    cluster: Cluster,
) -> None:
    objects = render(cluster, watchNamespaces=["blue", "green"])
    assert not {kind for kind, _, _ in objects} & {"ClusterRole", "ClusterRoleBinding"}
    assert {
        namespace for kind, namespace, name in objects if kind == "RoleBinding" and name == RELEASE
    } == {"blue", "green"}
    assert environment(objects)["AGENTICRUN_NAMESPACES"] == "blue,green"
    assert (
        objects["Role", "blue", RELEASE]["rules"]
        == render(cluster)["ClusterRole", "", RELEASE]["rules"]
    )


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, f"agenticrun/operator:{__version__}"),
        ({"repository": "registry:5000/op", "tag": "dev-1"}, "registry:5000/op:dev-1"),
        (
            {"tag": "dev-1", "digest": f"sha256:{'a' * 64}"},
            f"agenticrun/operator@sha256:{'a' * 64}",
        ),
    ],
)
def test_the_image_is_named_by_tag_or_by_digest(
    cluster: Cluster, image: dict[str, str], reference: str
) -> None:
    assert container(render(cluster, image=image))["image"] == reference


def test_every_value_reaches_the_pod(cluster: Cluster) -> None:
    objects = render(
        cluster,
        images={"worker": "worker:1", "workers": {"sglang": "worker-sglang:1"}},
        logLevel="debug",
        metrics={"port": 8080},
        probes={"port": 9999},
        imagePullSecrets=[{"name": "pull"}],
        resources={"limits": {"memory": "1Gi"}},
        nodeSelector={"pool": "system"},
        tolerations=[{"operator": "Exists"}],
        affinity={"nodeAffinity": {}},
        priorityClassName="system-cluster-critical",
        podAnnotations={"a": "b"},
        podLabels={"c": "d"},
    )
    assert environment(objects)["AGENTICRUN_WORKER_IMAGE"] == "worker:1"
    assert environment(objects)["AGENTICRUN_WORKER_IMAGE_SGLANG"] == "worker-sglang:1"
    assert environment(objects)["AGENTICRUN_WORKER_IMAGE_VLLM"] == ""
    assert environment(objects)["AGENTICRUN_LOG_LEVEL"] == "DEBUG"
    assert environment(objects)["AGENTICRUN_METRICS_PORT"] == "8080"
    assert environment(objects)["AGENTICRUN_PROBE_PORT"] == "9999"
    assert container(objects)["ports"] == [
        {"name": "metrics", "containerPort": 8080},
        {"name": "probes", "containerPort": 9999},
    ]
    service = objects["Service", NAMESPACE, f"{RELEASE}-metrics"]["spec"]["ports"][0]
    assert (service["port"], service["targetPort"]) == (8080, 8080)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(objects)[probe]["httpGet"] == {"path": "/healthz", "port": 9999}
    assert container(objects)["resources"]["limits"] == {"memory": "1Gi"}
    pod = pod_spec(objects)
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert (pod["nodeSelector"], pod["tolerations"]) == (
        {"pool": "system"},
        [{"operator": "Exists"}],
    )
    assert (pod["affinity"], pod["priorityClassName"]) == (
        {"nodeAffinity": {}},
        "system-cluster-critical",
    )
    metadata = objects["Deployment", NAMESPACE, RELEASE]["spec"]["template"]["metadata"]
    assert metadata["annotations"] == {"a": "b"}
    assert metadata["labels"]["c"] == "d"


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"replicas": 2}, "replicas"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"image": {"digest": "sha256:1"}}, "/image/digest"),
        ({"watchNamespaces": "default"}, "/watchNamespaces"),
        ({"watchNamespaces": ["A_B"]}, "/watchNamespaces/0"),
        ({"logLevel": "loud"}, "/logLevel"),
        ({"images": {"workers": {"tgi": "x"}}}, "/images/workers"),
        ({"metrics": {"port": 80}}, "/metrics/port"),
        ({"resources": {"requets": {}}}, "/resources"),
        ({"resources": {"limits": {"memory": "banana"}}}, "/resources/limits/memory"),
        ({"resources": {"limits": {"memory": "2GB"}}}, "/resources/limits/memory"),
        ({"resources": {"requests": {"cpu": "-1"}}}, "/resources/requests/cpu"),
        ({"resources": {"requests": {"cpu": -1}}}, "/resources/requests/cpu"),
        ({"resources": {"requests": {"memroy": "1Gi"}}}, "/resources/requests"),
        ({"probes": {"port": 80}}, "/probes/port"),
        ({"podLabels": {"team": "a b"}}, "/podLabels/team"),
    ],
)
def test_wrong_values_are_refused_with_their_path(
    cluster: Cluster, values: dict[str, Any], path: str
) -> None:
    with pytest.raises(CommandFailed, match="values don't meet the specifications") as caught:
        render(cluster, **values)
    assert path in caught.value.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metrics": {"port": 8080}}, "metrics.port and probes.port are both 8080: choose two"),
        ({"probes": {"port": 9090}}, "metrics.port and probes.port are both 9090: choose two"),
        (
            {"podLabels": {"app.kubernetes.io/name": "mine"}},
            "podLabels.app.kubernetes.io/name: the chart sets this label itself",
        ),
        (
            {"podLabels": {"app.kubernetes.io/instance": "mine"}},
            "podLabels.app.kubernetes.io/instance: the chart sets this label itself",
        ),
    ],
)
def test_values_that_would_break_the_installation_are_refused(
    cluster: Cluster, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CommandFailed) as caught:
        render(cluster, **values)
    assert message in caught.value.stderr


@pytest.mark.parametrize("quantity", ["500m", "1", 2, 0.5, "1.5Gi", "2e9", "1E", "128974848"])
def test_every_form_of_a_quantity_is_accepted(cluster: Cluster, quantity: str | float) -> None:
    objects = render(cluster, resources={"limits": {"memory": quantity, "vendor.com/x": 1}})
    assert container(objects)["resources"]["limits"]["memory"] == quantity


def test_the_readme_has_a_row_for_every_value() -> None:
    def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in node.items():
            yield from (
                leaves(value, f"{prefix}{key}.")
                if isinstance(value, dict) and value and key != "resources"
                else [f"{prefix}{key}"]
            )

    values = set(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    rows = set(re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE))
    assert rows == values


def test_one_operator_at_a_time_and_never_as_root(cluster: Cluster) -> None:
    objects = render(cluster)
    spec = objects["Deployment", NAMESPACE, RELEASE]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert container(objects)["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container(objects))


def test_a_restricted_namespace_admits_the_pod(namespace: Cluster) -> None:
    template = render(namespace)["Deployment", NAMESPACE, RELEASE]["spec"]["template"]
    spec = {**template["spec"], "serviceAccountName": "default"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
    assert "created (server dry run)" in namespace.apply(pod, options=("--dry-run=server",))


def test_the_service_account_may_do_its_work_and_no_more(namespace: Cluster) -> None:
    objects = render(namespace, watchNamespaces=[NAMESPACE])
    namespace.apply(
        *(objects[key] for key in objects if key[0] in ("ServiceAccount", "Role", "RoleBinding"))
    )

    def allowed(verb: str, resource: str, *options: str) -> bool:
        identity = f"--as=system:serviceaccount:{NAMESPACE}:{RELEASE}"
        try:
            return (
                namespace.kubectl("auth", "can-i", verb, resource, identity, *options).strip()
                == "yes"
            )
        except CommandFailed:
            return False

    for request in (
        ("list", "agenticruns.agenticrun.dev"),
        ("patch", "agenticruns.agenticrun.dev", "--subresource=status"),
        ("create", "rayclusters.ray.io"),
        ("create", "leases.coordination.k8s.io"),
    ):  # the apiserver learns of roles by a watch of its own
        eventually(partial(allowed, *request), 120, f"it may {' '.join(request)}", interval=0.5)
    assert not allowed("patch", "agenticruns.agenticrun.dev")
    assert not allowed("patch", "rayclusters.ray.io")
    assert not allowed("create", "pods")
    assert not allowed("create", "pods", "--subresource=exec")
    assert not allowed("list", "secrets")
    assert not allowed("list", "agenticruns.agenticrun.dev", "--namespace=default")
