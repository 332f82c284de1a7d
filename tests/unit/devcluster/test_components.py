"""The plan of processes and their configuration, rendered without starting anything."""

import json
import re
from pathlib import Path

import pytest
import yaml

from devcluster import configs, network, pki
from devcluster.components import Components
from devcluster.processes import ProcessSpec
from devcluster.settings import Settings

_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "coredns",
    "registry",
    "fakegpu",
    "volumes",
)


@pytest.fixture
def components(settings: Settings) -> Components:
    """Components with made-up program paths."""
    return Components(settings, {name: Path("/programs") / name for name in _PROGRAMS})


def all_specs(components: Components) -> list[ProcessSpec]:
    """Every process of the cluster."""
    return [
        components.etcd(),
        components.apiserver(),
        components.controller_manager(),
        components.scheduler(),
        components.kubelet(),
        components.proxy(),
        components.containerd(),
        components.registry(),
        components.coredns(),
        components.fake_gpus(),
        components.volumes(),
        components.network_policies(Path("/programs/kube-router")),
    ]


def test_every_component_but_the_registry_lives_in_the_nodes_network(
    components: Components,
) -> None:
    outside = [spec.name for spec in all_specs(components) if not spec.in_netns]
    assert outside == ["registry"]


def test_rbac_and_node_restriction_are_on(components: Components) -> None:
    argv = components.apiserver().argv
    assert "--authorization-mode=Node,RBAC" in argv
    assert "--enable-admission-plugins=NodeRestriction" in argv


def test_nothing_is_written_outside_state_and_cache(
    components: Components, settings: Settings
) -> None:
    for spec in all_specs(components):
        for path in spec.files:
            assert path.is_relative_to(settings.state), spec.name


def test_configuration_files_that_are_yaml_parse(components: Components) -> None:
    parsed = 0
    for spec in all_specs(components):
        for path, content in spec.files.items():
            if path.suffix == ".yaml":
                assert yaml.safe_load(content)
                parsed += 1
    assert parsed == 3


def test_the_enforcing_agent_routes_nothing_and_has_a_kubeconfig(
    components: Components, settings: Settings
) -> None:
    argv = components.network_policies(Path("/programs/kube-router")).argv
    assert {"--run-firewall=true", "--run-router=false", "--run-service-proxy=false"} < {*argv}
    (kubeconfig,) = [word for word in argv if word.startswith("--kubeconfig=")]
    names = {certificate.name for certificate in pki.certificates(settings)}
    assert Path(kubeconfig.partition("=")[2]).stem in names


def test_kubelet_and_runtime_agree_on_the_socket_and_the_cgroup_driver(settings: Settings) -> None:
    kubelet = yaml.safe_load(configs.kubelet(settings))
    runtime = configs.containerd(settings, Path("/cni"))
    assert kubelet["containerRuntimeEndpoint"] == f"unix://{settings.containerd_socket}"
    assert f'address = "{settings.containerd_socket}"' in runtime
    assert kubelet["cgroupDriver"] == "cgroupfs"
    assert "SystemdCgroup = false" in runtime


def test_pods_ask_the_address_that_coredns_binds(settings: Settings) -> None:
    assert yaml.safe_load(configs.kubelet(settings))["clusterDNS"] == [settings.dns_ip]
    assert configs.coredns(settings).count(f"bind {settings.dns_ip}") == 2
    assert [*network.plan(settings)][8][-2:] == ["dev", "lo"]


def test_the_runtime_pulls_from_the_address_that_the_registry_serves(
    settings: Settings, components: Components
) -> None:
    assert yaml.safe_load(configs.registry(settings))["http"]["addr"] == settings.registry
    hosts = [path for path in components.containerd().files if path.name == "hosts.toml"]
    assert [path.parent.name for path in hosts] == [settings.registry]


def test_cni_hands_out_addresses_that_the_host_routes(settings: Settings) -> None:
    bridge = json.loads(configs.cni(settings))["plugins"][0]
    assert bridge["ipam"]["ranges"] == [[{"subnet": settings.pod_cidr}]]
    routed = {
        command[3]
        for command in network.plan(settings)
        if list(command[:3]) == ["ip", "route", "add"]
    }
    assert routed == {settings.pod_cidr, settings.service_cidr}


def test_the_cni_folder_is_the_one_that_has_the_plugins_when_containerd_starts(
    components: Components, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    debian, upstream = tmp_path / "usr/lib/cni", tmp_path / "opt/cni/bin"
    monkeypatch.setattr(configs, "CNI_FOLDERS", (debian, upstream))

    def folder() -> str:
        (text,) = [
            text
            for path, text in components.containerd().files.items()
            if path.name == "containerd.toml"
        ]
        found = re.search(r'bin_dir = "(.*)"', text)
        assert found is not None
        return found[1]

    for installed in (upstream, debian):
        installed.mkdir(parents=True)
        assert folder() != str(installed), "a folder without plugins is not taken"
        (installed / "bridge").touch()
        assert folder() == str(installed)


def test_image_store_outlives_the_state(settings: Settings) -> None:
    root = re.search(r'^root = "(.*)"$', configs.containerd(settings, Path("/cni")), re.MULTILINE)
    assert root is not None
    assert Path(root[1]).is_relative_to(settings.cache)


def test_interface_name_fits_the_kernels_limit(settings: Settings) -> None:
    assert len(settings.host_interface) <= 15


def test_apiserver_certificate_names_every_address_it_is_reached_by(settings: Settings) -> None:
    (certificate,) = [
        certificate for certificate in pki.certificates(settings) if certificate.name == "apiserver"
    ]
    for name in (
        "DNS:kubernetes.default.svc",
        f"IP:{settings.node_ip}",
        f"IP:{settings.apiserver_service_ip}",
    ):
        assert name in certificate.alternative_names.split(",")


def test_kubelet_certificate_has_the_identity_that_the_node_authorizer_expects(
    settings: Settings,
) -> None:
    (certificate,) = [
        certificate for certificate in pki.certificates(settings) if certificate.name == "kubelet"
    ]
    assert certificate.subject == f"/O=system:nodes/CN=system:node:{settings.node_name}"


def test_kubeconfig_has_one_context_and_it_is_current(settings: Settings) -> None:
    config = yaml.safe_load(pki.kubeconfig(settings, "admin", b"ca", b"certificate", b"key"))
    assert [context["name"] for context in config["contexts"]] == [config["current-context"]]
    assert config["clusters"][0]["cluster"]["server"] == f"https://{settings.node_ip}:6443"


def test_created_pki_is_complete_and_a_second_creation_changes_nothing(settings: Settings) -> None:
    pki.create(settings)
    before = {path: path.read_bytes() for path in settings.pki.iterdir()}
    pki.create(settings)
    assert {path: path.read_bytes() for path in settings.pki.iterdir()} == before
    assert settings.kubeconfig.stat().st_mode & 0o077 == 0
    assert {f"{certificate.name}.crt" for certificate in pki.certificates(settings)} <= {
        path.name for path in before
    }
