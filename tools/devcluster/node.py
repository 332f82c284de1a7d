"""The host cluster: one node made of the real components, in a network namespace of this machine.

`up` starts what is not running and returns when a pod could run; `down` leaves nothing but the
cache. A cluster does not survive a restart of the machine: `up` then drops the old state and makes
a new cluster, with the images still there.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devcluster import cgroups, configs, network, pki
from devcluster.binaries import KUBE_ROUTER, KUEUE, NETWORK_POLICY, Binaries
from devcluster.components import Components
from devcluster.console import say
from devcluster.containerd import Containerd, write_image
from devcluster.kubectl import Kubectl, is_ready, node_reports
from devcluster.processes import ProcessTable, start_ticks
from devcluster.settings import KUBERAY_VERSION, KUEUE_VERSION, Settings
from devcluster.shell import DevclusterError, run, succeeds, write_if_changed
from devcluster.waiting import Observe, Report, last_line, wait_for

KUBERAY_IMAGE = f"localhost/kuberay/operator:{KUBERAY_VERSION}"
KUEUE_IMAGE = f"localhost/kueue/kueue:{KUEUE_VERSION}"
_MANIFESTS = Path(__file__).parent / "manifests"
# Paths compiled into the components. `down` removes the ones that were not there before.
_FIXED_PATHS = tuple(
    Path(path)
    for path in (
        "/var/lib/kubelet",
        "/run/containerd",
        "/var/lib/cni",
        "/var/log/containers",
        "/run/xtables.lock",
        "/run/netns",
    )
)
# What the kubelet sets for the whole machine.
_SYSCTLS = ("vm.overcommit_memory", "kernel.panic", "kernel.panic_on_oops")
_BEFORE = "before.json"
_START_SECONDS = 600
"""Time limit of a wait. Seconds are usual; a wait that cannot end well ends long before this."""
_GONE_SECONDS = 60
_CONNECT_SECONDS = 10
_LOG_CHARACTERS = 2000
_NEEDS_CONTAINERS_GONE = ("containerd", "etcd", "kube-apiserver", "registry")


class Node:
    """The one-node cluster of this machine."""

    def __init__(self, settings: Settings, binaries: Binaries) -> None:
        """Start nothing. Others bring images through `containerd`."""
        self._settings = settings
        self._binaries = binaries
        self._processes = ProcessTable(
            settings.state / "processes", settings.logs, settings.netns_path
        )
        self.containerd = Containerd(settings, binaries.paths()["imagectl"])
        self._kubectl = Kubectl(binaries.paths()["kubectl"], settings.kubeconfig)
        self._components = Components(settings, binaries.paths())

    def up(self, parts: Collection[str] = ()) -> None:
        """Bring the cluster up; see the module.

        Args:
            parts: names of optional parts (`binaries.PARTS`), whose programs are built.

        Raises:
            DevclusterError: a component did not become ready; the message says what it reported.
        """
        if self._left_over():
            say("removing what is left of a cluster from before the machine restarted")
            self.down()
        first_start = not self._processes.names()
        self._remember_machine()
        network.create(self._settings)
        pki.create(self._settings)
        cgroups.create(self._settings.name)
        with ThreadPoolExecutor() as pool:
            self._start_control_plane()
            runtime = pool.submit(self._start_runtime, first_start)
            self._wait(
                "the apiserver to be ready",
                "kube-apiserver",
                lambda: self._kubectl.ok("get", "--raw", "/readyz"),
            )
            say("apiserver is ready")
            for component in (self._components.controller_manager(), self._components.scheduler()):
                self._processes.start(component)
            kuberay = pool.submit(self._install_base)
            runtime.result()
            for component in (
                self._components.kubelet(),
                self._components.proxy(),
                self._components.coredns(),
                self._components.fake_gpus(),
                self._components.volumes(),
            ):
                self._processes.start(component)
            self._wait(
                f"node {self._settings.node_name} to be Ready",
                "kubelet",
                self._node_ready,
                self._node_reports,
            )
            say(
                f"node {self._settings.node_name} is Ready with"
                f" {self._settings.fake_gpus} nvidia.com/gpu"
            )
            self._wait(
                "the default service account",
                "kube-controller-manager",
                lambda: self._kubectl.ok("get", "serviceaccount", "default"),
            )
            self._wait("CoreDNS to answer", "coredns", lambda: _accepts(self._settings.dns_ip, 53))
            self._wait(
                "the image registry to answer",
                "registry",
                lambda: _accepts(self._settings.host_ip, self._settings.registry_port),
            )
            kuberay.result()
        self._wait(
            "KubeRay's operator to be available",
            "kubelet",
            lambda: self._kubectl.deployment_available("kuberay-system", "kuberay-operator"),
            lambda: self._kubectl.reports("kuberay-system"),
        )
        say(f"KubeRay {KUBERAY_VERSION} is available")
        if NETWORK_POLICY in parts:
            self._enforce_network_policies()
        if KUEUE.name in parts:
            self._install_kueue()

    def down(self, *, purge: bool = False) -> None:
        """Stop all that `up` started and remove what it made; with `purge` the whole cache too."""
        settings = self._settings
        others = [name for name in self._processes.names() if name not in _NEEDS_CONTAINERS_GONE]
        self._processes.stop(others, grace_seconds=2)
        if self._processes.alive("containerd"):
            self.containerd.remove_containers()  # while it can still list them
        self._processes.stop(self._processes.names(), grace_seconds=3)
        _kill(self._shims())
        _kill(cgroups.processes(settings.name))  # containers of a containerd that died before
        self._unmount()
        network.remove(settings)
        cgroups.remove(settings.name)
        self._restore_machine()
        _remove(settings.state)
        if purge:
            shutil.rmtree(settings.cache)

    def problems(self) -> list[str]:
        """Return a line for each thing that keeps the cluster from being usable."""
        if not self._processes.names():
            return ["down"]
        found = [
            f"{name} is not running (log: {self._processes.log(name)})"
            for name in self._processes.names()
            if not self._processes.alive(name)
        ]
        if not self._kubectl.ok("get", "--raw", "/readyz"):
            return [*found, "the apiserver does not answer"]
        if not self._node_ready():
            found.append("the node is not Ready")
        if not self._kubectl.deployment_available("kuberay-system", "kuberay-operator"):
            found.append("KubeRay's operator is not available")
        return found

    # --- up --------------------------------------------------------------------------------

    def _left_over(self) -> bool:
        """Return True if the state is from before the machine restarted."""
        before = self._settings.state / _BEFORE
        return before.exists() and json.loads(before.read_text())["boot"] != _boot_id()

    def _remember_machine(self) -> None:
        """Write down once what `down` has to restore."""
        before = self._settings.state / _BEFORE
        if not before.exists():
            absent = [str(path) for path in _FIXED_PATHS if not path.exists()]
            sysctls = {name: run(["sysctl", "-n", name]).strip() for name in _SYSCTLS}
            write_if_changed(
                before, json.dumps({"boot": _boot_id(), "absent": absent, "sysctls": sysctls})
            )

    def _start_control_plane(self) -> None:
        registry = self._components.registry()
        if (
            not self._processes.alive(registry.name)
            and (self._settings.cache / "registry").exists()
        ):
            # Only a stopped registry may drop the layers of images that were deleted.
            for path, content in registry.files.items():
                write_if_changed(path, content)
            run([registry.argv[0], "garbage-collect", "--delete-untagged", *registry.files])
        self._processes.start(registry)
        self._processes.start(self._components.etcd())
        self._processes.start(self._components.apiserver())

    def _start_runtime(self, first_start: bool) -> None:
        """Start containerd without old containers, with the images that the first pods need."""
        spec = self._components.containerd()
        self._processes.start(spec)
        self._wait("containerd to answer", spec.name, self.containerd.answers)
        if first_start and self.containerd.remove_containers():
            # Its CRI plugin has read them already and forgets them only when it restarts.
            self._processes.stop([spec.name])
            self._processes.start(spec)
            self._wait("containerd to answer", spec.name, self.containerd.answers)
        paths = self._binaries.paths()
        self._load_static(
            {
                configs.PAUSE_IMAGE: ("/pause", paths["pause"]),
                KUBERAY_IMAGE: ("/manager", paths["kuberay-operator"]),
            }
        )
        say("containerd is ready")

    def _load_static(self, images: Mapping[str, tuple[str, Path]]) -> None:
        """Make images of one program each, unless containerd has them.

        Args:
            images: path in the image, and the program, by reference.
        """
        present = self.containerd.images()
        for reference, (name, program) in images.items():
            # The tag alone does not say that the image holds this build of the program.
            mark = f"{reference}-{program.parent.name}"
            if {reference, mark} <= present:
                continue
            image = self._settings.cache / "images" / f"{program.parent.name}.tar"
            if not image.exists():
                write_image(image, reference, {name: program}, [name])
            self.containerd.load(image)
            self.containerd.tag(reference, mark)

    def _enforce_network_policies(self) -> None:
        """Start the agent, and wait until it has made its first rules."""
        inside = ["nsenter", f"--net={self._settings.netns_path}"]
        # Its rules are of iptables, which see what crosses the bridge of the pods only with this.
        run([*inside, "sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=1"])
        program = self._binaries.paths([KUBE_ROUTER])[KUBE_ROUTER.name]
        agent = self._components.network_policies(program)
        self._processes.start(agent)
        self._wait(
            "NetworkPolicies to be enforced",
            agent.name,
            lambda: succeeds([*inside, "iptables", "--wait", "-nL", "KUBE-ROUTER-FORWARD"]),
        )
        say("NetworkPolicies are enforced, by kube-router")

    def _install_kueue(self) -> None:
        """Apply Kueue, and wait until it is available."""
        program = self._binaries.paths([KUEUE])[KUEUE.name]
        self._load_static({KUEUE_IMAGE: ("/manager", program)})
        self._apply_module("kueue", program.parent / "config")
        self._wait(
            "Kueue to be available",
            "kubelet",
            lambda: self._kubectl.deployment_available("kueue-system", "kueue-controller-manager"),
            lambda: self._kubectl.reports("kueue-system"),
        )
        say(f"Kueue {KUEUE_VERSION} is available")

    def _apply_module(self, name: str, config: Path) -> None:
        """Apply our changes of what the module of a program brings.

        Args:
            name: the folder of the changes below manifests.
            config: the manifests of the module.
        """
        overlay = self._settings.etc / name
        shutil.copytree(_MANIFESTS / name, overlay, dirs_exist_ok=True)
        shutil.copytree(config, overlay / "config", dirs_exist_ok=True)
        self._kubectl.apply(overlay, kustomization=True)

    def _install_base(self) -> None:
        """Apply RBAC and StorageClass, then KubeRay.

        Its CRDs are 4 MB of YAML, so this runs while the node starts.
        """
        applied = self._settings.etc / f"applied-{self._manifests_key()}"
        if applied.exists():
            return
        self._kubectl.apply(_MANIFESTS / "base.yaml")
        self._apply_module("kuberay", self._binaries.paths()["kuberay-operator"].parent / "config")
        applied.touch()

    def _manifests_key(self) -> str:
        """Return a hash that changes when the manifests have to be applied again."""
        digest = hashlib.sha256(self._binaries.paths()["kuberay-operator"].parent.name.encode())
        for path in sorted(path for path in _MANIFESTS.rglob("*") if path.is_file()):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:12]

    def _node_ready(self) -> bool:
        """Return True if the node is Ready and has its GPUs."""
        node = self._kubectl.find("node", self._settings.node_name)
        if node is None or not is_ready(node):
            return False
        gpus: str | None = node["status"]["allocatable"].get("nvidia.com/gpu")
        return gpus == str(self._settings.fake_gpus)

    def _node_reports(self) -> list[Report]:
        """Return why the node is not Ready; a Ready one may still lack its GPUs."""
        node = self._kubectl.find("node", self._settings.node_name)
        if node is None or not is_ready(node):
            return node_reports(node)
        gpus = node["status"]["allocatable"].get("nvidia.com/gpu", "0")
        message = f"{gpus} of {self._settings.fake_gpus} nvidia.com/gpu are advertised"
        return [Report(f"node {self._settings.node_name}", "Ready", message)]

    def _wait(
        self,
        what: str,
        component: str,
        condition: Callable[[], bool],
        observe: Observe | None = None,
    ) -> None:
        """Wait for what a component does, and give up at once when it has ended.

        Args:
            observe: what the objects report; without it, the last line of the component's log.
        """
        log = self._processes.log(component)

        def met() -> bool:
            if not self._processes.alive(component):
                end = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
                raise DevclusterError(f"{component} ended; the end of {log}:\n{end}")
            return condition()

        def log_line() -> list[Report]:
            line = (
                last_line(log.read_text(errors="replace")[-_LOG_CHARACTERS:])
                if log.exists()
                else ""
            )
            return [Report(component, f"the last line of {log}", line or "(the log is empty)")]

        wait_for(what, met, observe or log_line, seconds=_START_SECONDS)

    # --- down ------------------------------------------------------------------------------

    def _shims(self) -> set[int]:
        """Return the pids of our container shims, which outlive containerd by design.

        Ours have our socket on their command line.
        """
        socket = str(self._settings.containerd_socket).encode()
        found = set()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                line = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
                if b"containerd-shim" in line and socket in line:
                    found.add(int(folder.name))
        return found

    def _unmount(self) -> None:
        """Unmount everything below our folders, the innermost first, until nothing is mounted."""

        def unmounted() -> bool:
            mounted = [
                path
                for root in (self._settings.state, self._settings.cache)
                for path in mounts_below(root)
            ]
            for path in sorted(mounted, reverse=True):
                succeeds(["umount", "--lazy", path])  # unless it is gone
            return not mounted

        wait_for(
            f"everything below {self._settings.state} and {self._settings.cache} to be unmounted",
            unmounted,
            seconds=_GONE_SECONDS,
        )

    def _restore_machine(self) -> None:
        before = self._settings.state / _BEFORE
        if not before.exists():
            return
        noted = json.loads(before.read_text())
        for name, value in noted["sysctls"].items():
            run(["sysctl", "-qw", f"{name}={value}"])
        for path in map(Path, noted["absent"]):
            if path.name == "netns":
                network.remove_netns_mountpoint(path)
            elif path.is_dir():
                _remove(path)
            else:
                path.unlink(missing_ok=True)


def _accepts(address: str, port: int) -> bool:
    """Return True when a server listens there."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove a folder in which a process that is ending may still write."""

    def removed() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_for(
        f"{folder} to be removed (is something mounted or open there?)",
        removed,
        seconds=_GONE_SECONDS,
    )


def _kill(pids: Iterable[int]) -> None:
    """Kill processes and wait until they are gone."""
    pids = set(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(
        "killed containers to end",
        lambda: all(start_ticks(pid) is None for pid in pids),
        seconds=_GONE_SECONDS,
    )


def mounts_below(root: Path, table: Path = Path("/proc/mounts")) -> list[str]:
    """Return the mount points below `root`, as the kernel lists them."""
    points = [
        line.split()[1].encode().decode("unicode_escape") for line in table.read_text().splitlines()
    ]
    return [point for point in points if point.startswith(f"{root}/")]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
