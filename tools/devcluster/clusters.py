"""The kinds of cluster, and the choice for this machine.

In this order: the kubeconfig context that CONTEXT= names, which is never started or stopped; kind,
where Docker answers; the single node of real components on this host. The current context of a
kubeconfig is never taken without CONTEXT=.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from devcluster import prerequisites
from devcluster.binaries import PARTS, PROGRAMS, Binaries
from devcluster.console import progress, say
from devcluster.images import DockerImages, NodeImages
from devcluster.kubectl import Kubectl
from devcluster.node import Node
from devcluster.recipes import Recipe
from devcluster.settings import KUBERAY_VERSION, Settings
from devcluster.shell import DevclusterError, exclusive, run, succeeds, write_if_changed
from devcluster.waiting import wait_for

_KUBERAY_MANIFESTS = (
    f"github.com/ray-project/kuberay/ray-operator/config/default?ref={KUBERAY_VERSION}"
)


class Cluster(Protocol):
    """A cluster that tests and the demo can use."""

    name: str

    def up(self, parts: Sequence[str] = ()) -> None:
        """Make it usable, with KubeRay and optional parts; do nothing when it is.

        Args:
            parts: names of optional parts (`binaries.PARTS`).
        """

    def down(self, *, purge: bool) -> None:
        """Remove it and, with `purge`, what is cached for it."""

    def problems(self) -> list[str]:
        """Return what keeps it from being usable, one line each; nothing when it is up."""

    def kubeconfig(self) -> Path:
        """Return a kubeconfig with this cluster as its current context."""

    def build(self, recipes: Sequence[Recipe]) -> None:
        """Build these images as far as that needs no cluster, so that `publish` finds them."""

    def publish(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """Build these images, make them available and return their references by name."""

    def load(self, archive: Path) -> None:
        """Make the images of a docker-archive or oci-archive available."""


def choose(settings: Settings) -> Cluster:
    """Return the cluster of this machine.

    Raises:
        NoClusterPossible: the machine can have none.
    """
    if settings.context:
        return ContextCluster(settings)
    if not settings.state.exists() and shutil.which("kind") and succeeds(["docker", "info"]):
        return KindCluster(settings)
    prerequisites.require_host()
    return HostCluster(settings)


class HostCluster:
    """The single node on this host."""

    name = "single node on this host"

    def __init__(self, settings: Settings) -> None:
        """Start nothing."""
        self._settings = settings
        self._binaries = Binaries(settings)
        self._node = Node(settings, self._binaries)
        self._images = NodeImages(settings, self._node.containerd)

    def up(self, parts: Sequence[str] = ()) -> None:
        """See Cluster."""
        with exclusive(self._lock):
            prerequisites.install_packages(self._settings)
            self._binaries.build([*PROGRAMS, *(PARTS[name] for name in parts)])
            self._node.up(parts)
            self._images.pull_published()

    def down(self, *, purge: bool) -> None:
        """See Cluster."""
        with exclusive(self._lock):
            self._node.down(purge=purge)
        say(
            "the cluster is down; "
            + (
                "its cache is gone too"
                if purge
                else f"programs and images stay in {self._settings.cache}"
            )
        )

    def problems(self) -> list[str]:
        """See Cluster."""
        return self._node.problems()

    def kubeconfig(self) -> Path:
        """See Cluster."""
        if not self._settings.kubeconfig.exists():
            raise DevclusterError("the cluster is down: python3 tools/devcluster up")
        return self._settings.kubeconfig

    def build(self, recipes: Sequence[Recipe]) -> None:
        """See Cluster."""
        prerequisites.install_packages(self._settings)
        self._images.build(recipes)

    def publish(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """See Cluster."""
        if self._node.problems() == ["down"]:
            raise DevclusterError(
                "the cluster is down; images go into its registry, so bring it up first"
            )
        return self._images.publish(recipes)

    def load(self, archive: Path) -> None:
        """See Cluster."""
        self._node.containerd.load(archive)

    @property
    def _lock(self) -> Path:
        return self._settings.cache / "cluster.lock"


class KindCluster:
    """A kind cluster on the Docker of this machine."""

    name = "kind"

    def __init__(self, settings: Settings) -> None:
        """Start nothing."""
        self._settings = settings
        self._images = DockerImages(settings)

    def up(self, parts: Sequence[str] = ()) -> None:
        """See Cluster."""
        refuse_parts(parts, self.name)
        kubectl_program = user_program(self._settings, "kubectl")
        if self._settings.name not in run(["kind", "get", "clusters"]).split():
            with progress("creating the kind cluster (about 60 s)"):
                run(["kind", "create", "cluster", "--name", self._settings.name, "--wait", "120s"])
        kubectl = Kubectl(kubectl_program, self.kubeconfig())
        self._advertise_gpus(kubectl)
        install_kuberay(kubectl)

    def down(self, *, purge: bool) -> None:
        """See Cluster. Docker keeps its own caches."""
        run(["kind", "delete", "cluster", "--name", self._settings.name])
        if purge:
            shutil.rmtree(self._settings.cache)

    def problems(self) -> list[str]:
        """See Cluster."""
        if self._settings.name not in run(["kind", "get", "clusters"]).split():
            return ["down"]
        return kuberay_problems(Kubectl(user_program(self._settings, "kubectl"), self.kubeconfig()))

    def kubeconfig(self) -> Path:
        """See Cluster."""
        path = self._settings.cache / "kubeconfig-kind"
        write_if_changed(
            path, run(["kind", "get", "kubeconfig", "--name", self._settings.name]), mode=0o600
        )
        return path

    def build(self, recipes: Sequence[Recipe]) -> None:
        """See Cluster."""
        self._images.build(recipes)

    def publish(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """See Cluster."""
        references = self._images.build(recipes)
        for reference in references.values():
            with progress(f"loading {reference} into kind"):
                run(["kind", "load", "docker-image", "--name", self._settings.name, reference])
        return references

    def load(self, archive: Path) -> None:
        """See Cluster."""
        run(["kind", "load", "image-archive", "--name", self._settings.name, archive])

    def _advertise_gpus(self, kubectl: Kubectl) -> None:
        """Add fake GPUs to the capacity of the nodes: kind has no place for a device plugin."""
        patch = [
            {
                "op": "add",
                "path": "/status/capacity/nvidia.com~1gpu",
                "value": str(self._settings.fake_gpus),
            }
        ]
        for node in kubectl.get("nodes")["items"]:
            kubectl(
                "patch",
                "node",
                node["metadata"]["name"],
                "--subresource=status",
                "--type=json",
                f"--patch={json.dumps(patch)}",
            )


class ContextCluster:
    """A cluster that others run, by its kubeconfig context. It gets KubeRay if that is missing."""

    def __init__(self, settings: Settings) -> None:
        """Start nothing."""
        self._settings = settings
        self.name = f"context {settings.context}"
        self._images = DockerImages(settings)

    def up(self, parts: Sequence[str] = ()) -> None:
        """See Cluster."""
        refuse_parts(parts, self.name)
        kubectl = Kubectl(user_program(self._settings, "kubectl"), context=self._settings.context)
        kubectl("get", "--raw", "/readyz")
        if not kubectl.ok("get", "crd", "rayclusters.ray.io"):
            install_kuberay(kubectl)

    def down(self, *, purge: bool) -> None:
        """See Cluster. It is not ours to stop."""
        say(f"{self.name} is not ours: left as it is")
        if purge:
            shutil.rmtree(self._settings.cache)

    def problems(self) -> list[str]:
        """See Cluster."""
        kubectl = Kubectl(user_program(self._settings, "kubectl"), context=self._settings.context)
        if not kubectl.ok("get", "--raw", "/readyz"):
            return ["the apiserver does not answer"]
        return (
            [] if kubectl.ok("get", "crd", "rayclusters.ray.io") else ["KubeRay is not installed"]
        )

    def kubeconfig(self) -> Path:
        """See Cluster."""
        kubectl = Kubectl(user_program(self._settings, "kubectl"), context=self._settings.context)
        path = self._settings.cache / "kubeconfig-context"
        write_if_changed(path, kubectl("config", "view", "--minify", "--flatten"), mode=0o600)
        return path

    def build(self, recipes: Sequence[Recipe]) -> None:
        """See Cluster. Without IMAGE_REGISTRY nothing is built."""
        if self._settings.image_registry:
            self._images.build(recipes)

    def publish(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """See Cluster. Without IMAGE_REGISTRY the chart uses its default images."""
        if not self._settings.image_registry:
            say("IMAGE_REGISTRY is not set: nothing is built, the chart's default images are used")
            return {}
        references = self._images.build(recipes)
        for reference in references.values():
            with progress(f"pushing {reference}"):
                run(["docker", "push", reference])
        return references

    def load(self, archive: Path) -> None:
        """See Cluster. Impossible here."""
        raise DevclusterError(
            f"cannot load {archive} into {self.name}; push the image to a registry that it reads"
        )


def refuse_parts(parts: Sequence[str], cluster: str) -> None:
    """Refuse optional parts, which are built for the single node on this host only.

    Raises:
        DevclusterError: there are some.
    """
    if parts:
        raise DevclusterError(f"--with {','.join(parts)}: install these in {cluster} yourself")


def user_program(settings: Settings, name: str) -> str:
    """Return the path of kubectl or helm: from PATH, else built."""
    found = shutil.which(name)
    if found is None:
        binaries = Binaries(settings)
        binaries.build([program for program in PROGRAMS if name in (program.name, *program.links)])
        found = str(binaries.current / name)
    return found


def install_kuberay(kubectl: Kubectl) -> None:
    """Install KubeRay from its published manifests, in namespace `default`, and wait for it."""
    kubectl.apply(_KUBERAY_MANIFESTS, kustomization=True)
    wait_for(
        "KubeRay's operator to be available",
        lambda: not kuberay_problems(kubectl),
        lambda: kubectl.reports("default", prefix="kuberay-operator"),
    )


def kuberay_problems(kubectl: Kubectl) -> list[str]:
    """Return one line if KubeRay's operator is not available."""
    return (
        []
        if kubectl.deployment_available("default", "kuberay-operator")
        else ["KubeRay's operator is not available"]
    )
