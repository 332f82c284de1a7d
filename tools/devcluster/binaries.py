"""The Go programs of the cluster: built from pinned modules, kept in the cache.

Each program has a module with committed versions in go/<name>. Its folder in the cache carries a
hash of the module's files and of the build flags: a changed version or source gets a new folder,
and an unchanged program is never built again.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.console import progress, say
from devcluster.prerequisites import venv_package
from devcluster.settings import HELM_VERSION, KUBERNETES_VERSION, KUEUE_VERSION, Settings
from devcluster.shell import CommandFailed, DevclusterError, exclusive, run

MINIMUM_GO = (1, 26)
_REQUIREMENTS = Path(__file__).parent / "go-toolchain.txt"


_KEY_CHARACTERS = 12
_FOR_PEOPLE = ("kubectl", "helm")


@dataclass(frozen=True)
class GoProgram:
    """A program and how to build it.

    Attributes:
        name: of the folder below go/, and of the program.
        typical_seconds: for a build on two cores with nothing cached; shown while it builds.
        package: what to build: "." or a package of a required module.
        variables: linker variables, for the versions that programs print.
        links: further names of the file; kube-all runs the command that it is called by.
        module_folder: (module, folder) to keep beside the program; KubeRay's module has its
            manifests.
    """

    name: str
    typical_seconds: int
    package: str = "."
    variables: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    module_folder: tuple[str, str] | None = None


_MINOR = KUBERNETES_VERSION.split(".")[1]
_KUBERAY = "github.com/ray-project/kuberay/ray-operator"

PROGRAMS: tuple[GoProgram, ...] = (
    GoProgram(
        "kube-all",
        300,
        variables=(
            f"k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
            "k8s.io/component-base/version.gitMajor=1",
            f"k8s.io/component-base/version.gitMinor={_MINOR}",
        ),
        links=(
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "kubectl",
        ),
    ),
    GoProgram("kuberay-operator", 60, package=_KUBERAY, module_folder=(_KUBERAY, "config")),
    GoProgram("coredns", 45),
    GoProgram(
        "helm",
        45,
        package="helm.sh/helm/v3/cmd/helm",
        variables=(
            f"helm.sh/helm/v3/internal/version.version={HELM_VERSION}",
            "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor=1",
            f"helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor={_MINOR}",
            "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1",
            f"helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor={_MINOR}",
        ),
    ),
    GoProgram("registry", 20),
    GoProgram("volumes", 15),
    GoProgram("fakegpu", 5),
    GoProgram("imagectl", 5),
    GoProgram("pause", 1),
)

_KUEUE = "sigs.k8s.io/kueue"
KUEUE = GoProgram(
    "kueue",
    120,
    package=f"{_KUEUE}/cmd/kueue",
    variables=(f"{_KUEUE}/pkg/version.GitVersion={KUEUE_VERSION}",),
    module_folder=(_KUEUE, "config"),
)
KUBE_ROUTER = GoProgram(
    "kube-router", 140, package="github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
)
NETWORK_POLICY = "network-policy"
PARTS = {KUEUE.name: KUEUE, NETWORK_POLICY: KUBE_ROUTER}
"""Programs of the parts that `up --with` adds, by name."""
KWOK = GoProgram("kwok", 110, package="sigs.k8s.io/kwok/cmd/kwok")
"""Simulates the kubelets of many runs in tests and benchmarks, which build it themselves."""


def module_key(program: GoProgram, sources: Path) -> str:
    """Return a hash of everything that decides the result of a build, except the Go release."""
    digest = hashlib.sha256(repr(program).encode())
    for path in sorted(path for path in sources.iterdir() if path.is_file()):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_KEY_CHARACTERS]


class Binaries:
    """The built programs in the cache."""

    def __init__(self, settings: Settings, sources: Path | None = None) -> None:
        """Args: `sources` has one Go module per program; by default it is go/ beside this file."""
        self._settings = settings
        self._root = settings.cache / "bin"
        self._sources = sources or Path(__file__).parent / "go"
        self._logs = settings.cache / "log"

    def folder(self, program: GoProgram) -> Path:
        """Return the folder of a program, built or not."""
        return self._root / f"{program.name}-{module_key(program, self._sources / program.name)}"

    def paths(self, programs: Sequence[GoProgram] = PROGRAMS) -> dict[str, Path]:
        """Return the path of every program and link by name."""
        return {
            name: self.folder(program) / name
            for program in programs
            for name in (program.name, *program.links)
        }

    @property
    def current(self) -> Path:
        """A folder for PATH with kubectl and helm."""
        return self._root / "current"

    def build(self, programs: Sequence[GoProgram] = PROGRAMS) -> None:
        """Build what is missing, one program at a time: the compiler already uses every core.

        Raises:
            DevclusterError: there is no usable Go, or a build failed.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        with exclusive(self._root / "lock"):
            missing = [program for program in programs if not self.folder(program).is_dir()]
            if missing:
                go = find_go(self._settings)
                total = sum(program.typical_seconds for program in missing)
                say(f"building {len(missing)} Go programs, once; about {total} s on two cores")
                downloads = [self._download(go, program) for program in missing]
                try:
                    for number, program in enumerate(missing, 1):
                        title = f"[{number}/{len(missing)}] {program.name}"
                        # If it failed, the build fetches the rest or says why it cannot.
                        downloads[number - 1].wait()
                        self._build(go, program, title)
                finally:
                    for download in downloads:
                        download.kill()
                        download.wait()
            self._link_current()

    def _download(self, go: str, program: GoProgram) -> "subprocess.Popen[bytes]":
        """Begin to fetch the modules of a program while the compiler works on another one."""
        return subprocess.Popen(
            [go, "mod", "download"],
            cwd=self._sources / program.name,
            env=_go_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _build(self, go: str, program: GoProgram, title: str) -> None:
        source, target = self._sources / program.name, self.folder(program)
        partial = self._root / f".partial-{program.name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        log = self._logs / f"build-{program.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        linker = " ".join(["-s", "-w", *(f"-X {variable}" for variable in program.variables)])
        argv = [
            "nice",
            "-n",
            "5",
            go,
            "build",
            "-v",
            "-trimpath",
            "-ldflags",
            linker,
            "-o",
            str(partial / program.name),
            program.package,
        ]
        packages = _LineCounter()
        with (
            progress(
                f"{title} (about {program.typical_seconds} s)",
                lambda: f"({packages.count} packages compiled)",
            ),
            log.open("w") as sink,
        ):
            process = subprocess.Popen(
                argv, cwd=source, env=_go_environment(), stderr=subprocess.PIPE, text=True
            )
            assert process.stderr is not None
            for line in process.stderr:
                packages.count += 1
                sink.write(line)
            if process.wait() != 0:
                sink.flush()
                raise CommandFailed(
                    f"building {program.name} failed; the end of {log}:\n{log.read_text()[-2000:]}"
                )
        for link in program.links:
            (partial / link).symlink_to(program.name)
        if program.module_folder is not None:
            module, folder = program.module_folder
            where = run(
                [go, "list", "-m", "-f", "{{.Dir}}", module], cwd=source, env=_go_environment()
            ).strip()
            shutil.copytree(Path(where) / folder, partial / folder, copy_function=shutil.copyfile)
            run(["chmod", "-R", "u+w", partial / folder])  # Go's module cache is read-only
        partial.rename(target)

    def _link_current(self) -> None:
        self.current.mkdir(exist_ok=True)
        for name, path in self.paths().items():
            if name not in _FOR_PEOPLE or not path.exists():
                continue
            partial = self.current / f".{name}"
            partial.unlink(missing_ok=True)
            partial.symlink_to(path)
            partial.replace(self.current / name)


class _LineCounter:
    """Number of packages that `go build -v` has named so far."""

    count = 0


def _go_environment() -> dict[str, str]:
    return {
        **os.environ,
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
    }


def find_go(settings: Settings) -> str:
    """Return the path of a recent enough Go; fetch one into the cache if the machine has none.

    Raises:
        DevclusterError: there is none and none can be fetched; the message says what to install.
    """
    for path in (None, "/usr/local/go/bin"):
        go = shutil.which("go", path=path)
        if go is not None and recent_enough(run([go, "env", "GOVERSION"]).strip()):
            return go
    return _fetched(settings)


def recent_enough(version: str) -> bool:
    """Return True if a version of `go env GOVERSION`, such as "go1.26.8", is recent enough."""
    found = re.match(r"(?:devel )?go(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= MINIMUM_GO


def _fetched(settings: Settings) -> str:
    """Return the Go in a virtual environment in the cache, and install it there the first time."""
    environment = settings.cache / "go"
    go = environment / "bin" / "go"
    if not go.exists():
        try:
            with progress("fetching a Go toolchain"):
                run([sys.executable, "-m", "venv", "--clear", environment])
                run(
                    [
                        environment / "bin" / "pip",
                        "install",
                        "--require-hashes",
                        "--requirement",
                        _REQUIREMENTS,
                    ]
                )
        except CommandFailed as error:
            wanted = ".".join(str(number) for number in MINIMUM_GO)
            raise DevclusterError(
                f"put Go {wanted} or newer on PATH, or install {venv_package()} so that one can be"
                f" fetched ({error})"
            ) from error
    return str(go)
