"""Image builds from Dockerfiles without Docker, on a Debian base that debootstrap makes."""

import hashlib
import shutil
from pathlib import Path

from devcluster.console import progress
from devcluster.recipes import Recipe
from devcluster.settings import Settings
from devcluster.shell import run, succeeds, write_if_changed

_DEBIAN = "bookworm"
# Dockerfiles install what is missing of these, which takes longer.
_BASE_PACKAGES = "ca-certificates,libnuma1,python3,python3-venv"
# Documentation and package lists: half of the base.
_NOT_NEEDED = (
    "usr/share/doc",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
)
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_CERTIFICATES_IN_BUILD = "/run/build-certificates.crt"
# An image of a user may begin FROM one in our registry, which has no certificate.
_REGISTRIES = """\
unqualified-search-registries = ["docker.io"]

[[registry]]
location = "{registry}"
insecure = true
"""


class Buildah:
    """Buildah with its own store in the cache: layers survive between builds, apart from others."""

    def __init__(self, settings: Settings) -> None:
        """Start nothing."""
        self._settings = settings
        store = settings.cache / "buildah"
        # Buildah's temporary files and the cache mounts of RUN lines follow TMPDIR.
        self._tmp = store / "tmp"
        self._argv = [
            "buildah",
            "--root",
            f"{store}/storage",
            "--runroot",
            f"{store}/run",
            "--storage-driver",
            "overlay",
        ]

    @property
    def base(self) -> str:
        """Name of the base image, with a hash of what it is made of."""
        key = hashlib.sha256(f"{_DEBIAN} {_BASE_PACKAGES} {_NOT_NEEDED}".encode()).hexdigest()[:8]
        return f"localhost/agenticrun/debian:{_DEBIAN}-{key}"

    def has(self, image: str) -> bool:
        """Return True if the store has the image."""
        return succeeds([*self._argv, "inspect", "--type", "image", image])

    def make_base(self) -> None:
        """Make the base image, Debian with its Python, unless it is there; takes about a minute."""
        if self.has(self.base):
            return
        root = self._settings.cache / "debian"
        shutil.rmtree(root, ignore_errors=True)
        with progress(f"Debian {_DEBIAN} base image (about 60 s)"):
            log = self._settings.cache / "log" / "debootstrap.log"
            run(
                ["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", _DEBIAN, root],
                log=log,
            )
            for name in _NOT_NEEDED:
                shutil.rmtree(root / name)
            container = self._run("from", "scratch").strip()
            self._run("add", container, str(root), "/")
            self._run("config", "--cmd", "/bin/bash", container)
            self._run("commit", "--rm", container, self.base)
            shutil.rmtree(root)

    def build(self, recipe: Recipe, image: str) -> None:
        """Build a Dockerfile on our base, with unchanged layers from the store."""
        root = self._settings.repository
        argv = [
            "bud",
            "--layers",
            "--isolation",
            "chroot",
        ]
        if (root / f"{recipe.dockerfile}.dockerignore").exists():
            argv += ["--ignorefile", f"{recipe.dockerfile}.dockerignore"]
        argv += [
            "--file",
            recipe.dockerfile,
            *recipe.build_arguments(BASE=self.base),
            "--tag",
            image,
        ]
        if (
            _CERTIFICATES.exists()
        ):  # the package indexes may be behind a certificate that only this machine knows
            argv += ["--volume", f"{_CERTIFICATES}:{_CERTIFICATES_IN_BUILD}:ro"]
            argv += [
                f"--build-arg={name}={_CERTIFICATES_IN_BUILD}"
                for name in ("SSL_CERT_FILE", "PIP_CERT")
            ]
        try:
            with progress(f"building the {recipe.name} image"):
                log = self._settings.cache / "log" / f"image-{recipe.name}.log"
                self._run(*argv, ".", cwd=root, log=log)
        finally:
            self._run(
                "rm", "--all"
            )  # a failed build leaves its working container, which holds gigabytes

    def push(self, image: str, target: str) -> None:
        """Push an image to our registry.

        With the fastest zstd: on a local link the processor is the bottleneck.
        """
        with progress(f"pushing {target}"):
            self._run(
                "push",
                "--compression-format=zstd",
                "--compression-level=1",
                image,
                f"docker://{target}",
            )

    def remove(self, image: str) -> None:
        """Remove an image; layers that another image uses stay."""
        self._run("rmi", image)

    def _run(self, *arguments: str, cwd: Path | None = None, log: Path | None = None) -> str:
        self._tmp.mkdir(parents=True, exist_ok=True)
        registries = self._tmp.parent / "registries.conf"
        write_if_changed(registries, _REGISTRIES.format(registry=self._settings.registry))
        env = {"TMPDIR": str(self._tmp), "CONTAINERS_REGISTRIES_CONF": str(registries)}
        return run([*self._argv, *arguments], cwd=cwd, env=env, log=log)
