"""The chart: its rendered objects, the values that it refuses, and the apiserver's acceptance."""

from __future__ import annotations

import copy
import json
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from agenticrun_api.version import __version__
from agenticrun_operator.lease import Leadership
from agenticrun_operator.settings import Settings
from agenticrun_operator.shard import Shard
from testcluster import ROOT, Cluster, CommandFailed
from waiting import eventually

CHART = ROOT / "charts/agenticrun"
RELEASE = "test-chart"
NAMESPACE = "agenticrun-test-chart"
OPERATOR = "agenticrun-operator"
"""Name of the Roles, the ClusterRole and the Lease of all namespaces."""

REGISTRY = "registry.example.org/agents"

POLICY = {("ValidatingAdmissionPolicy", ""), ("ValidatingAdmissionPolicyBinding", "")}

Objects = dict[tuple[str, str, str], dict[str, Any]]
"""(kind, namespace, name) -> object"""


def render(
    cluster: Cluster,
    *,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    options: tuple[str, ...] = (),
    **values: Any,
) -> Objects:
    """`helm template` with values; by default with a registry, as the chart of a release has."""
    out = cluster.command(
        "helm",
        "template",
        release,
        str(CHART),
        "-n",
        namespace,
        *options,
        "-f",
        "-",
        stdin=json.dumps({"registry": REGISTRY, **values}),
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
        ("ClusterRole", ""),  # of the operator, and of users
        ("ClusterRoleBinding", ""),
        ("Role", "default"),
        ("RoleBinding", "default"),
        ("Deployment", NAMESPACE),
        ("Role", NAMESPACE),
        ("RoleBinding", NAMESPACE),
        ("PodDisruptionBudget", NAMESPACE),
        ("NetworkPolicy", NAMESPACE),
        ("Service", NAMESPACE),
        *POLICY,
    }
    assert environment(objects)["AGENTICRUN_NAMESPACES"] == ""


def test_with_namespaces_there_is_a_role_in_each_and_nothing_of_the_cluster_but_the_policy(
    cluster: Cluster,
) -> None:
    objects = render(cluster, watchNamespaces=["blue", "green"])
    assert {(kind, namespace) for kind, namespace, _ in objects if not namespace} == POLICY
    assert {namespace for kind, namespace, _ in objects if kind == "RoleBinding"} == {
        "blue",
        "green",
        "default",
        NAMESPACE,
    }
    assert environment(objects)["AGENTICRUN_NAMESPACES"] == "blue,green"
    assert (
        objects["Role", "blue", OPERATOR]["rules"]
        == render(cluster)["ClusterRole", "", OPERATOR]["rules"]
    )


WORKERS = ("WORKER_IMAGE", "WORKER_IMAGE_SGLANG", "WORKER_IMAGE_VLLM")


def worker_images(objects: Objects) -> list[str]:
    return [environment(objects)[f"AGENTICRUN_{name}"] for name in WORKERS]


@pytest.mark.parametrize(("values", "tag"), [({}, __version__), ({"tag": "7"}, "7")])
def test_one_registry_and_one_tag_name_all_images(
    cluster: Cluster, values: dict[str, Any], tag: str
) -> None:
    objects = render(cluster, **values)
    assert container(objects)["image"] == f"{REGISTRY}/operator:{tag}"
    assert worker_images(objects) == [
        f"{REGISTRY}/{name}:{tag}" for name in ("worker", "worker-sglang", "worker-vllm")
    ]


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({"repository": "registry:5000/op", "tag": "dev-1"}, "registry:5000/op:dev-1"),
        (
            {"tag": "dev-1", "digest": f"sha256:{'a' * 64}"},
            f"{REGISTRY}/operator@sha256:{'a' * 64}",
        ),
    ],
)
def test_the_image_is_named_by_tag_or_by_digest(
    cluster: Cluster, image: dict[str, str], reference: str
) -> None:
    objects = render(cluster, image=image)
    assert container(objects)["image"] == reference
    assert worker_images(objects)[0] == f"{REGISTRY}/worker:{__version__}"


def test_images_with_names_of_their_own_need_no_registry(cluster: Cluster) -> None:
    objects = render(cluster, registry="", image={"repository": "op"}, images={"worker": "w:1"})
    assert container(objects)["image"] == f"op:{__version__}"
    assert worker_images(objects) == ["w:1", "", ""]


@pytest.mark.parametrize(
    "values", [{}, {"image": {"repository": "op"}}, {"images": {"worker": "w:1"}}]
)
def test_a_chart_without_images_says_how_to_get_some(
    cluster: Cluster, values: dict[str, Any]
) -> None:
    with pytest.raises(CommandFailed, match=r"registry: not set.*make images") as caught:
        render(cluster, registry="", **values)
    assert "--set registry=" in caught.value.stderr


def test_every_value_reaches_the_pod(cluster: Cluster) -> None:
    objects = render(
        cluster,
        images={"worker": "worker:1", "workers": {"sglang": "worker-sglang:1"}},
        logLevel="debug",
        logFormat="json",
        defaults={"ttlSecondsAfterFinished": 0},
        extraEnv=[{"name": "NO_PROXY", "value": "10.0.0.0/8"}],
        extraEnvFrom=[{"secretRef": {"name": "proxy"}}],
        topologySpreadConstraints=[
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
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
    assert worker_images(objects) == [
        "worker:1",
        "worker-sglang:1",
        f"{REGISTRY}/worker-vllm:{__version__}",
    ]
    assert environment(objects)["AGENTICRUN_LOG_LEVEL"] == "DEBUG"
    assert environment(objects)["AGENTICRUN_LOG_FORMAT"] == "json"
    assert environment(objects)["AGENTICRUN_TTL_SECONDS_AFTER_FINISHED"] == "0"
    assert environment(objects)["NO_PROXY"] == "10.0.0.0/8"
    assert container(objects)["envFrom"] == [{"secretRef": {"name": "proxy"}}]
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
    assert pod["nodeSelector"] == {"pool": "system", "kubernetes.io/arch": "amd64"}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}
    assert pod["priorityClassName"] == "system-cluster-critical"
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "zone"
    metadata = objects["Deployment", NAMESPACE, RELEASE]["spec"]["template"]["metadata"]
    assert metadata["annotations"] == {"a": "b"}
    assert metadata["labels"]["c"] == "d"


def test_objects_for_prometheus_and_grafana_are_made_if_wanted(cluster: Cluster) -> None:
    release = "mine"
    objects = render(
        cluster,
        release=release,
        watchNamespaces=["team"],
        metrics={
            "port": 9191,
            "serviceMonitor": {"enabled": True, "labels": {"release": "kps"}, "interval": "15s"},
            "podMonitor": {"enabled": True, "keep": "ray_.+"},
            "prometheusRule": {"enabled": True, "docsUrl": "https://docs.example/"},
            "dashboard": {"enabled": True},
        },
    )
    monitor = objects["ServiceMonitor", NAMESPACE, release]
    assert monitor["metadata"]["labels"]["release"] == "kps"
    service = objects["Service", NAMESPACE, f"{release}-metrics"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items(), "it selects the Service"
    engines = objects["PodMonitor", NAMESPACE, release]["spec"]
    assert engines["namespaceSelector"] == {"matchNames": ["team"]}
    (scraped,) = engines["podMetricsEndpoints"]
    assert (scraped["port"], scraped["interval"]) == ("metrics", "30s")
    assert scraped["metricRelabelings"][0]["regex"] == "ray_.+"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": "metrics", "honorLabels": True, "interval": "15s"}
    assert service["spec"]["ports"][0]["name"] == "metrics"
    headless = objects["Service", NAMESPACE, f"{release}-operators"]["spec"]
    assert (headless["clusterIP"], headless["selector"]) == ("None", service["spec"]["selector"])
    assert headless["ports"] == [service["spec"]["ports"][0] | {"name": "operators"}]
    written = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"]
    made = objects["PrometheusRule", NAMESPACE, release]["spec"]["groups"]
    assert [rule["alert"] for group in made for rule in group["rules"]] == [
        rule["alert"] for group in written for rule in group["rules"]
    ]
    down = made[0]["rules"][0]
    assert 'job="mine-metrics"' in down["expr"]
    assert down["annotations"]["runbook_url"] == (
        "https://docs.example/monitoring.html#agenticrunoperatordown"
    )
    assert "agenticrun-metrics" not in json.dumps(made)
    board = objects["ConfigMap", NAMESPACE, f"{release}-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = (CHART / "files/dashboards").iterdir()
    assert board["data"] == {f"agenticrun-{file.name}": file.read_text() for file in files}


KEY_NAME = f"{RELEASE}-operator-key"


def key_variables(objects: Objects) -> dict[str, Any]:
    """Return the variables that say where the operator's key is."""
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in container(objects)["env"]
        if entry["name"].startswith("AGENTICRUN_OPERATOR_KEY")
    }


def test_the_chart_renders_nothing_random(cluster: Cluster) -> None:
    """`helm template` and Argo CD render without access to the apiserver, again and again."""
    objects = render(cluster)
    assert objects == render(cluster)
    assert "Secret" not in {kind for kind, _, _ in objects}
    assert key_variables(objects) == {"AGENTICRUN_OPERATOR_KEY_SECRET": f"{NAMESPACE}/{KEY_NAME}"}
    settings = Settings(operator_key_secret=f"{NAMESPACE}/{KEY_NAME}", worker_image="x")
    assert settings.key is None


def test_the_operator_may_read_its_own_key_and_no_other_secret_of_its_namespace(
    cluster: Cluster,
) -> None:
    rules = render(cluster)["Role", NAMESPACE, KEY_NAME]["rules"]
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in rules] == [
        (["create"], None),
        (["get"], [KEY_NAME]),
    ]


def test_a_key_that_an_earlier_chart_made_stays_in_the_release(namespace: Cluster) -> None:
    """Otherwise `helm rollback` to that chart would not find it."""
    data = {"key": b64encode(b"of-before").decode()}
    metadata: dict[str, Any] = {"name": KEY_NAME, "namespace": NAMESPACE}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
    try:
        namespace.apply(secret)
        rendered = render(namespace, options=("--dry-run=server",))
        assert "Secret" not in {kind for kind, _, _ in rendered}, "the operator has made it"
        metadata["annotations"] = {"meta.helm.sh/release-name": RELEASE}
        namespace.apply(secret)
        kept = render(namespace, options=("--dry-run=server",))["Secret", NAMESPACE, KEY_NAME]
        assert kept["data"] == data
        assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    finally:
        namespace.kubectl("delete", "secret", KEY_NAME, "--ignore-not-found")


CRD_FILE = "crds/agenticruns.yaml"
CRD_OF_TEST = "agenticruns.upgrade-test.agenticrun.dev"


def chart_with_crd(folder: Path, *, properties: set[str]) -> Path:
    """Copy the chart, with the CRD in a group of its own and only some fields of `spec`."""
    shutil.copytree(CHART, folder)
    crd = yaml.safe_load((CHART / CRD_FILE).read_text())
    crd["metadata"]["name"] = CRD_OF_TEST
    crd["spec"]["group"] = CRD_OF_TEST.partition(".")[2]
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"] = {name: spec["properties"][name] for name in sorted(properties)}
    spec["required"] = []
    spec.pop("x-kubernetes-validations")
    (folder / CRD_FILE).write_text(yaml.safe_dump(crd))
    return folder


def fields_of_crd(cluster: Cluster) -> set[str]:
    crd = cluster.get("crd", CRD_OF_TEST)
    assert crd is not None
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return set(schema["properties"]["spec"]["properties"])


def test_the_printed_command_upgrades_the_crd_that_helm_leaves_alone(
    namespace: Cluster, tmp_path: Path
) -> None:
    old = chart_with_crd(tmp_path / "old", properties={"model"})
    new = chart_with_crd(tmp_path / "new", properties={"model", "huggingFace"})
    options = ("-n", NAMESPACE, "--set", f"registry={REGISTRY},watchNamespaces={{{NAMESPACE}}}")
    try:
        notes = namespace.command("helm", "install", RELEASE, str(old), *options)
        assert fields_of_crd(namespace) == {"model"}
        namespace.command("helm", "upgrade", RELEASE, str(new), *options)
        assert fields_of_crd(namespace) == {"model"}
        (printed,) = re.findall(r"^  (helm show crds CHART .*)$", notes, re.MULTILINE)
        command = printed.replace("CHART", str(new))
        with pytest.raises(CommandFailed, match="conflict"):
            namespace.command("bash", "-c", command.replace(" --force-conflicts", ""))
        namespace.command("bash", "-c", command)
        assert fields_of_crd(namespace) == {"model", "huggingFace"}
    finally:
        namespace.command("helm", "uninstall", RELEASE, "-n", NAMESPACE)
        namespace.kubectl("delete", "crd", CRD_OF_TEST, "--ignore-not-found")
        namespace.kubectl("delete", "secret", KEY_NAME, "--ignore-not-found")


def test_a_secret_of_the_users_holds_the_key(cluster: Cluster) -> None:
    objects = render(cluster, operatorKey={"existingSecret": "mine"})
    reference = {"secretKeyRef": {"name": "mine", "key": "key"}}
    assert key_variables(objects) == {"AGENTICRUN_OPERATOR_KEY": reference}
    assert ("Role", NAMESPACE, KEY_NAME) not in objects


def test_the_operator_reads_no_secret_of_a_run(cluster: Cluster) -> None:
    rules = render(cluster)["ClusterRole", "", OPERATOR]["rules"]
    verbs = {verb for rule in rules if "secrets" in rule["resources"] for verb in rule["verbs"]}
    assert verbs == {"create"}


def policy_text(objects: Objects) -> str:
    return json.dumps(objects["ValidatingAdmissionPolicy", "", f"{NAMESPACE}.{RELEASE}"])


def test_the_policy_can_be_left_out_and_loosened(cluster: Cluster) -> None:
    values: dict[str, Any] = {"enabled": False}
    assert not {(kind, "") for kind, _, _ in render(cluster, admissionPolicy=values)} & POLICY
    assert "hostPath" in policy_text(render(cluster))
    values = {"allowHostAccess": True, "serviceAccountNames": ["trainer"]}
    loose = policy_text(render(cluster, admissionPolicy=values))
    assert "hostPath" not in loose
    assert "'default','trainer'" in loose


def test_the_policy_protects_the_releases_namespace_unless_it_is_watched(cluster: Cluster) -> None:
    def protected(**values: Any) -> bool:
        return f"'kube-node-lease','{NAMESPACE}'" in policy_text(render(cluster, **values))

    assert protected()
    assert not protected(watchNamespaces=[NAMESPACE])


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"replicas": 0}, "/replicas"),
        ({"logFormat": "xml"}, "/logFormat"),
        ({"tolerations": [{"keyy": "gpu"}]}, "/tolerations/0"),
        ({"tolerations": [{"effect": "Never"}]}, "/tolerations/0/effect"),
        ({"affinity": {"nodeAfinity": {}}}, "/affinity"),
        ({"topologySpreadConstraints": [{"topologyKey": "z"}]}, "/topologySpreadConstraints/0"),
        ({"extraEnv": [{"nme": "A"}]}, "/extraEnv/0"),
        ({"extraEnv": [{"name": "AGENTICRUN_WORKERS", "value": "1"}]}, "/extraEnv/0/name"),
        ({"extraEnv": [{"name": "A", "value": 1}]}, "/extraEnv/0/value"),
        ({"extraEnvFrom": [{"secretRef": {}}]}, "/extraEnvFrom/0/secretRef"),
        ({"defaults": {"ttlSecondsAfterFinished": -1}}, "/defaults/ttlSecondsAfterFinished"),
        ({"userRoles": {"create": "yes"}}, "/userRoles/create"),
        ({"secretAuthorization": {}, "secretAuthorisation": {}}, "secretAuthorisation"),
        ({"admissionPolicy": {"enable": True}}, "/admissionPolicy"),
        (
            {"admissionPolicy": {"serviceAccountNames": ["a'"]}},
            "/admissionPolicy/serviceAccountNames/0",
        ),
        ({"operatorKey": {"existingSecret": "A b"}}, "/operatorKey/existingSecret"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"registry": "a b"}, "/registry"),
        ({"registry": "r.example/"}, "/registry"),
        ({"registry": "r.example/worker:1"}, "/registry"),
        ({"tag": "r/x"}, "/tag"),
        ({"image": {"digest": "sha256:1"}}, "/image/digest"),
        ({"watchNamespaces": "default"}, "/watchNamespaces"),
        ({"watchNamespaces": ["A_B"]}, "/watchNamespaces/0"),
        ({"logLevel": "loud"}, "/logLevel"),
        ({"images": {"workers": {"tgi": "x"}}}, "/images/workers"),
        ({"metrics": {"port": 80}}, "/metrics/port"),
        ({"metrics": {"serviceMonitor": {"interval": "soon"}}}, "/metrics/serviceMonitor/interval"),
        ({"metrics": {"dashboard": {"labels": {"a": 1}}}}, "/metrics/dashboard/labels/a"),
        ({"resources": {"requets": {}}}, "/resources"),
        ({"resources": {"limits": {"memory": "banana"}}}, "/resources/limits/memory"),
        ({"resources": {"limits": {"memory": "2GB"}}}, "/resources/limits/memory"),
        ({"resources": {"requests": {"cpu": "-1"}}}, "/resources/requests/cpu"),
        ({"resources": {"requests": {"cpu": -1}}}, "/resources/requests/cpu"),
        ({"resources": {"requests": {"ram": "1Gi"}}}, "/resources/requests"),
        ({"probes": {"port": 80}}, "/probes/port"),
        ({"networkPolicy": {"enabled": "no"}}, "/networkPolicy/enabled"),
        ({"networkPolicy": {"metricsFrom": [{"pods": {}}]}}, "/networkPolicy/metricsFrom/0"),
        ({"networkPolicy": {"apiserver": ["10.0.0.1"]}}, "/networkPolicy/apiserver/0"),
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


def test_two_operators_on_two_nodes_of_which_a_drain_takes_one(cluster: Cluster) -> None:
    objects = render(cluster)
    spec = objects["Deployment", NAMESPACE, RELEASE]["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (2, "RollingUpdate")
    budget = objects["PodDisruptionBudget", NAMESPACE, RELEASE]["spec"]
    assert (budget["maxUnavailable"], budget["selector"]) == (1, spec["selector"])
    (wish,) = pod_spec(objects)["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert wish["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert wish["podAffinityTerm"]["labelSelector"] == spec["selector"]


def test_the_operator_goes_to_nodes_of_its_images_architectures(cluster: Cluster) -> None:
    pod = pod_spec(render(cluster, architectures=["amd64", "arm64"]))
    assert "nodeSelector" not in pod
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}
    ]


def test_each_shard_has_operators_and_a_lease_of_its_own(cluster: Cluster) -> None:
    objects = render(cluster, shards=3)
    deployments = [found for key, found in objects.items() if key[0] == "Deployment"]
    assert len(deployments) == 3
    selectors, leases = [], []
    for number, deployment in enumerate(deployments):
        template = deployment["spec"]["template"]
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert selector.items() <= template["metadata"]["labels"].items()
        selectors.append(selector["agenticrun.dev/shard"])
        (pod,) = template["spec"]["containers"]
        env = {entry["name"]: entry.get("value") for entry in pod["env"]}
        leases.append(env["AGENTICRUN_LEASE_NAME"])
        settings = Settings(
            operator_key=SecretStr("k" * 32), worker_image="worker:1", shard=env["AGENTICRUN_SHARD"]
        )
        assert settings.part == Shard(number, 3)
    assert selectors == ["0", "1", "2"]
    assert len({deployment["metadata"]["name"] for deployment in deployments}) == 3
    roles = (found for key, found in objects.items() if key[0] == "Role" and "lease" in key[2])
    rules = [rule for role in roles for rule in role["rules"]]
    assert [rule["resourceNames"] for rule in rules if "resourceNames" in rule] == [leases]


def test_a_single_operator_has_no_budget_that_would_hold_up_a_drain(cluster: Cluster) -> None:
    objects = render(cluster, replicas=1)
    assert "PodDisruptionBudget" not in {kind for kind, _, _ in objects}
    update = objects["Deployment", NAMESPACE, RELEASE]["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxUnavailable": 0, "maxSurge": 1}


def operators_policy(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["NetworkPolicy", NAMESPACE, RELEASE]["spec"]
    return spec


def test_the_operators_pods_let_in_metrics_and_probes_only(cluster: Cluster) -> None:
    objects = render(cluster)
    spec = operators_policy(objects)
    assert spec["podSelector"] == objects["Deployment", NAMESPACE, RELEASE]["spec"]["selector"]
    assert spec["policyTypes"] == ["Ingress"]
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == [9090, 8080]
    monitoring = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    values = {"metricsFrom": [monitoring]}
    limited = operators_policy(render(cluster, networkPolicy=values))["ingress"]
    assert [rule.get("from") for rule in limited] == [[monitoring], None]


def test_with_egress_they_reach_dns_heads_and_the_apiserver_only(cluster: Cluster) -> None:
    values = {"egress": True, "apiserver": ["10.0.0.1/32"]}
    spec = operators_policy(render(cluster, networkPolicy=values))
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    dns, heads, apiserver = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53, 5353}
    assert [port["port"] for port in heads["ports"]] == [8265, 8787]
    assert heads["to"][0]["podSelector"] == {"matchLabels": {"agenticrun.dev/role": "driver"}}
    assert apiserver["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]


def test_one_switch_turns_off_all_network_policies(cluster: Cluster) -> None:
    setting = "AGENTICRUN_NETWORK_POLICY_NAMESPACE"
    assert environment(render(cluster))[setting] == NAMESPACE
    objects = render(cluster, networkPolicy={"enabled": False})
    assert "NetworkPolicy" not in {kind for kind, _, _ in objects}
    assert setting not in environment(objects)


AGGREGATES = "rbac.authorization.k8s.io/aggregate-to-"


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({}, True),
        ({"watchNamespaces": ["blue"]}, False),
        ({"watchNamespaces": ["blue"], "userRoles": {"create": True}}, True),
        ({"userRoles": {"create": False}}, False),
    ],
)
def test_users_get_their_rights_with_kubernetes_own_roles(
    cluster: Cluster, values: dict[str, Any], made: bool
) -> None:
    objects = render(cluster, **values)
    found = {
        name: {
            label.removeprefix(AGGREGATES)
            for label in item["metadata"]["labels"]
            if label.startswith(AGGREGATES)
        }
        for (kind, _, name), item in objects.items()
        if kind == "ClusterRole" and name != OPERATOR and "queues" not in name
    }
    wanted = {"agenticrun-viewer": {"view"}, "agenticrun-editor": {"edit", "admin"}}
    assert found == (wanted if made else {})


def test_never_as_root(cluster: Cluster) -> None:
    objects = render(cluster)
    assert container(objects)["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container(objects))


class Leases:
    """The Leases of a cluster."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], dict[str, Any]] = {}

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.stored.get((namespace, name)))

    async def create(self, manifest: dict[str, Any]) -> None:
        metadata = manifest["metadata"]
        self.stored[metadata["namespace"], metadata["name"]] = manifest

    async def put(self, manifest: dict[str, Any]) -> dict[str, Any]:
        await self.create(manifest)
        return manifest


@pytest.mark.parametrize(
    ("first", "second", "leaders"),
    [
        ([], [], 1),
        (["blue"], ["blue"], 1),
        (["blue", "green"], ["green", "blue"], 1),
        (["blue"], ["green"], 2),
        (["blue"], ["blue", "green"], 2),
        ([], ["blue"], 2),
    ],
    ids=str,
)
async def test_of_two_releases_that_watch_the_same_namespaces_one_leads(
    cluster: Cluster, first: list[str], second: list[str], leaders: int
) -> None:
    """Helm refuses those that share some of their namespaces, so that both may lead here."""
    leases = Leases()
    leads = []
    for release, watched in (("one", first), ("two", second)):
        objects = render(
            cluster, release=release, namespace=f"system-{release}", watchNamespaces=watched
        )
        (deployment,) = (found for key, found in objects.items() if key[0] == "Deployment")
        (pod,) = deployment["spec"]["template"]["spec"]["containers"]
        env = {entry["name"]: entry.get("value") for entry in pod["env"]}
        candidate = Leadership(
            leases, env["AGENTICRUN_LEASE_NAMESPACE"], env["AGENTICRUN_LEASE_NAME"], release
        )
        leads.append(await candidate.attempt(datetime.now(UTC)))
    assert sum(leads) == leaders


def test_without_namespaces_the_lease_is_the_operators_default(cluster: Cluster) -> None:
    env = environment(render(cluster))
    settings = Settings(operator_key=SecretStr("k" * 32), worker_image="worker:1")
    assert env["AGENTICRUN_LEASE_NAME"] == settings.lease_name == OPERATOR
    assert env["AGENTICRUN_LEASE_NAMESPACE"] == settings.lease_namespace


def test_releases_of_one_name_do_not_collide_if_they_watch_other_namespaces(
    cluster: Cluster,
) -> None:
    blue = render(cluster, namespace="system-blue", watchNamespaces=["blue"])
    green = render(cluster, namespace="system-green", watchNamespaces=["green"])
    assert set(blue) & set(green) == set()


def test_an_upgrade_to_other_namespaces_changes_no_role_of_a_binding(cluster: Cluster) -> None:
    """The apiserver refuses another roleRef, and the upgrade would stop half-way."""
    watched: tuple[list[str], ...] = ([], ["blue"], ["blue", "green"], ["green"])
    roles: dict[tuple[str, str, str], set[str]] = {}
    for namespaces in watched:
        for key, item in render(cluster, watchNamespaces=namespaces).items():
            if "Binding" in key[0] and "roleRef" in item:
                roles.setdefault(key, set()).add(json.dumps(item["roleRef"]))
    assert [key for key, found in roles.items() if len(found) > 1] == []


def test_two_releases_for_all_namespaces_have_one_cluster_role_so_that_helm_refuses_the_second(
    cluster: Cluster,
) -> None:
    one = render(cluster, release="one", namespace="system-one")
    two = render(cluster, release="two", namespace="system-two")
    assert ("ClusterRole", "", OPERATOR) in set(one) & set(two)
    assert one["ClusterRole", "", OPERATOR]["rules"] == two["ClusterRole", "", OPERATOR]["rules"]


@pytest.mark.parametrize("watched", [[NAMESPACE], ["default", NAMESPACE]], ids=str)
def test_helm_refuses_a_second_release_for_the_same_namespace(
    namespace: Cluster, watched: list[str]
) -> None:
    role = render(namespace, watchNamespaces=[NAMESPACE])["Role", NAMESPACE, OPERATOR]
    role["metadata"]["annotations"] = {
        "meta.helm.sh/release-name": RELEASE,
        "meta.helm.sh/release-namespace": NAMESPACE,
    }
    namespace.apply(role)
    try:
        with pytest.raises(CommandFailed) as caught:
            namespace.command(
                *("helm", "install", "second", str(CHART), "-n", NAMESPACE),
                *("--skip-crds", "--dry-run=server", "-f", "-"),
                stdin=json.dumps({"registry": REGISTRY, "watchNamespaces": watched}),
            )
    finally:
        namespace.kubectl("delete", "role", OPERATOR)
    assert f'Role "{OPERATOR}" in namespace "{NAMESPACE}" exists' in caught.value.stderr
    assert "cannot be imported into the current release" in caught.value.stderr


def test_a_restricted_namespace_admits_the_pod(namespace: Cluster) -> None:
    template = render(namespace)["Deployment", NAMESPACE, RELEASE]["spec"]["template"]
    spec = {**template["spec"], "serviceAccountName": "default"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
    assert "created (server dry run)" in namespace.apply(pod, options=("--dry-run=server",))


def test_the_service_account_may_do_its_work_and_no_more(namespace: Cluster) -> None:
    objects = render(namespace, watchNamespaces=[NAMESPACE], lease={"namespace": NAMESPACE})
    lease = f"leases.coordination.k8s.io/{environment(objects)['AGENTICRUN_LEASE_NAME']}"
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
        ("get", lease),
        ("update", lease),
    ):  # the apiserver learns of roles by a watch of its own
        eventually(partial(allowed, *request), 120, f"it may {' '.join(request)}", interval=0.5)
    assert not allowed("patch", "agenticruns.agenticrun.dev")
    assert not allowed("patch", "rayclusters.ray.io")
    assert allowed("delete", "pods")
    assert not allowed("create", "pods")
    assert not allowed("create", "pods", "--subresource=exec")
    assert not allowed("update", "leases.coordination.k8s.io/of-another")
    for verb in ("get", "list", "watch", "patch", "update", "delete"):
        assert not allowed(verb, "secrets"), verb
    assert not allowed("list", "agenticruns.agenticrun.dev", "--namespace=default")
