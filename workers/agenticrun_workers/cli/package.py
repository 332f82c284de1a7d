"""`agenticrun package`: a run's own code as a ConfigMap or as the context of an image."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

import agenticrun_api
import agenticrun_workers
from agenticrun_api import AgenticRun
from agenticrun_api.load import read_run
from agenticrun_api.names import IMAGE_CODE_DIR, ExitCode
from agenticrun_api.overrides import with_overrides
from agenticrun_api.version import REGISTRY, __version__
from agenticrun_api.yaml_text import BlockDumper, write_yaml
from agenticrun_workers.cli.common import Changes, RunFile, Seeds, StepTimeout, give_up, load
from agenticrun_workers.cli.local_code import (
    LocalCode,
    PackagingError,
    find_local_code,
    normalized,
)

LIMIT = 1024 * 1024
"""Bytes that the values of a ConfigMap may have together; the apiserver refuses more."""
KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
"""Keys that the apiserver takes."""
HEADER = "# Made by `agenticrun package`, which overwrites it.\n"
REQUIREMENTS = "requirements.txt"

Contents = Mapping[str, bytes]
"""The packaged files by their paths, relative to the folder of the run."""


def package(
    file: RunFile,
    image: Annotated[
        Path | None,
        typer.Option(
            "--image",
            metavar="DIR",
            help="Write the context of an image to this folder, instead of a ConfigMap: for "
            "packages with subfolders, for more than 1 MiB, and to install a requirements.txt once "
            "instead of in each pod.",
            file_okay=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE",
            help="Worker image that --image begins with. Default, in a release: its own, with the "
            "run's engine. A checkout has none.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File of the ConfigMap. Default: NAME-code.yaml in the current folder.",
            dir_okay=False,
        ),
    ] = None,
    seeds: Seeds = 20,
    timeout: StepTimeout = 10.0,
    changes: Changes = None,
) -> None:
    """Package a run's own code for a cluster, as a ConfigMap or as the context of an image.

    It takes the modules beside the run file that the run names, what they import from that folder,
    data files that the run names, and a requirements.txt. `check-env` then runs on the copy alone.
    Exit codes: 0 written, 1 a check failed, 2 the output exists and is not from this command, 64
    the code cannot be packaged.
    """
    if image is None and base is not None:
        raise typer.BadParameter("--base is for --image")
    if image is not None and output is not None:
        raise typer.BadParameter("choose one of --output and --image")
    run = load(file, changes, local=False)
    # Beside the validated run: the packaged one must stay as the user wrote it.
    document = with_overrides(read_run(file), changes or [])
    folder = file.parent.resolve()
    requirements = folder / REQUIREMENTS
    packages = requirements.read_text() if requirements.is_file() else ""
    pip = run.spec.code.pip if run.spec.code else None
    name = (run.spec.code and run.spec.code.config_map) or f"{run.metadata.name}-code"
    manifest: dict[str, Any] = {}
    try:
        # In an image, only requirements.txt is installed.
        listed = "\n".join([packages, *(pip.requirements if pip and image is None else ())])
        code = find_local_code(run, folder, required_names(listed))
        if packages and image is None:
            code.files[REQUIREMENTS] = "spec.code.pip"
        contents = {path: (folder / path).read_bytes() for path in sorted(code.files)}
        if not contents:
            raise PackagingError(
                f"{file} names no module and no data file of {folder}: nothing is to be packaged"
            )
        if image is None:
            manifest = config_map(name, document["metadata"].get("namespace"), contents)
    except PackagingError as error:
        give_up(str(error))
    target = image or output or Path(f"{run.metadata.name}-code.yaml")
    # Before anything is written or checked, which may take a minute.
    if not is_ours(target):
        typer.echo(f"{target} is not from agenticrun package: choose another name", err=True)
        raise typer.Exit(2)
    if image is not None and base is None:
        base = worker_image(run)
    typer.echo(f"{len(contents)} files, {size(sum(map(len, contents.values())))}:")
    for path, content in contents.items():
        typer.echo(f"  {size(len(content)):>10}  {path} ({code.files[path]})")
    for warning in warnings(code):
        typer.echo(f"warning: {warning}")
    # Before the target is written, so that a package that cannot work never exists.
    for line in check_copy(run, document, code, contents, seeds, timeout):
        typer.echo(line)
    if image is None:
        target.write_text(HEADER + manifest_text(manifest))
    else:
        assert base is not None, "set with --image"
        write_context(target, contents, packages, base)
    lines = next_steps(run, file, target, name, bool(packages), image=image is not None)
    for line in lines:
        typer.echo(line)


def size(count: int) -> str:
    """Return a number of bytes as people read it."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < LIMIT else f"{count / LIMIT:.2f} MiB"


def warnings(code: LocalCode) -> Iterator[str]:
    """Yield what may be missing on the cluster."""
    for module, place in code.not_in_image.items():
        yield (
            f"{place} imports {module}, which the worker image does not have: name its package in "
            f"{REQUIREMENTS} beside the run"
        )


def required_names(requirements: str) -> frozenset[str]:
    """Return the distributions that a requirements.txt names.

    Raises:
        PackagingError: a line refers to another file, which would not be in the image.
    """
    names = set()
    # A line may continue on the next one.
    logical = requirements.replace("\\\n", " ").splitlines()
    for line in filter(None, (re.sub(r"(^|\s)#.*", "", line).strip() for line in logical)):
        if re.match(r"(-r|-c|-e|--requirement|--constraint|--editable)\b|\.{0,2}/|file:", line):
            raise PackagingError(
                f"{REQUIREMENTS}: {line!r} refers to another file, which is not packaged: "
                "write the packages and versions here"
            )
        # Options of the index say nothing about packages.
        if not line.startswith("-"):
            names.add(normalized(re.split(r"[^\w.-]", line)[0]))
    return frozenset(names)


def config_map(name: str, namespace: str | None, contents: Contents) -> dict[str, Any]:
    """Return a ConfigMap with these files.

    Raises:
        PackagingError: it would be too large, or a path cannot be a key.
    """
    bad = [path for path in contents if not KEY.fullmatch(path) or path.startswith("..")]
    # The more likely cause, with advice of its own.
    nested = [path for path in bad if "/" in path]
    if nested:
        raise PackagingError(
            f"{', '.join(nested[:5])}{' ...' * (len(nested) > 5)}: a ConfigMap has no subfolders. "
            "Use --image, or move the files beside the run"
        )
    if bad:
        raise PackagingError(
            f"{', '.join(map(repr, bad))}: keys of a ConfigMap have letters, digits, '-', '_' and "
            "'.', and do not begin with '..'. Rename the files, or use --image"
        )
    total = sum(map(len, contents.values()))
    if total > LIMIT:
        largest = sorted(contents, key=lambda path: -len(contents[path]))
        sizes = "".join(f"\n  {len(contents[path]):>10} {path}" for path in largest)
        raise PackagingError(
            f"the files have {total} bytes, and a ConfigMap may have {LIMIT}: use --image, or put "
            f"data on a volume or into object storage{sizes}"
        )
    text: dict[str, str] = {}
    binary: dict[str, str] = {}
    for path, content in contents.items():
        # Text stays readable in the manifest, and in its history.
        plain = _plain_text(content)
        if plain is None:
            binary[path] = base64.b64encode(content).decode()
        else:
            text[path] = plain
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        **({"data": text} if text else {}),
        **({"binaryData": binary} if binary else {}),
    }


def _plain_text(content: bytes) -> str | None:
    """Return a text that every YAML parser reads back unchanged, None for other content."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    # YAML would change other characters, or refuse them.
    return text if all(char.isprintable() or char in "\n\r\t" for char in text) else None


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as YAML."""
    text: str = yaml.dump(
        dict(manifest), Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=2**31
    )
    return text


def is_ours(target: Path) -> bool:
    """Return True if nothing is lost by writing there: it is new, empty, or from this command."""
    if target.is_dir():
        # The folder is ours if its Dockerfile is.
        target = target / "Dockerfile" if any(target.iterdir()) else target / "nothing"
        if not target.exists():
            return target.name == "nothing"
    return not target.exists() or target.read_text(errors="replace").startswith(HEADER)


def worker_image(run: AgenticRun) -> str:
    """Return the worker image of this release that has the run's engine.

    Raises:
        typer.Exit: this is no release, so it has no images.
    """
    engine = run.spec.pipeline.actor_infer.strategy.name
    name = "worker" if engine == "transformers" else f"worker-{engine}"
    if not REGISTRY:
        give_up(
            "this version of agenticrun is not from a release, so it names no images: write "
            f"the one that your cluster uses, such as --base registry.example.org/agenticrun/{name}"
            f":{__version__}"
        )
    return f"{REGISTRY}/{name}:{__version__}"


def dockerfile(base: str, *, packages: bool) -> str:
    """Return the Dockerfile of a run's image.

    The worker image's own packages keep their versions, because its lock constrains the new ones.
    """
    install = (
        "# A certificate bundle mounted for the build, where package indexes need one.\n"
        "ARG SSL_CERT_FILE\n"
        f"COPY {REQUIREMENTS} /opt/agenticrun/{REQUIREMENTS}\n"
        "USER root\n"
        "RUN uv pip install --no-cache --python /opt/agenticrun/bin/python --compile-bytecode \\\n"
        "    --constraint /opt/agenticrun/workers.txt"
        f" --requirement /opt/agenticrun/{REQUIREMENTS}\n"
        "USER 1000:1000\n"
    )
    return f"{HEADER}FROM {base}\n{install * packages}COPY code/ {IMAGE_CODE_DIR}/\n"


def write_context(target: Path, contents: Contents, packages: str, base: str) -> None:
    """Write the context of an image, in place of an earlier one."""
    # A module that was removed since must not stay in the image.
    shutil.rmtree(target / "code", ignore_errors=True)
    write_files(target / "code", contents)
    (target / REQUIREMENTS).unlink(missing_ok=True)
    if packages:
        (target / REQUIREMENTS).write_text(packages)
    (target / "Dockerfile").write_text(dockerfile(base, packages=bool(packages)))


def write_files(folder: Path, contents: Contents) -> None:
    """Write files that every user of an image can read."""
    for path, content in contents.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o644)
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        inner.chmod(0o755)


def next_steps(
    run: AgenticRun,
    file: Path,
    target: Path,
    name: str,
    packages: bool,
    *,
    image: bool,
) -> Iterator[str]:
    """Yield what was written, the lines for the run file, and the commands."""
    yield f"wrote {target}"
    if image:
        reference = f"REGISTRY/{run.metadata.name}-code:1"
        also = " (and remove spec.code)" if run.spec.code else ""
        yield f"now write into {file}{also}"
        yield f"  spec:\n    image: {reference}"
        yield "and run, with your registry and a new tag for each build"
        yield f"  docker build -t {reference} {target}\n  docker push {reference}"
    else:
        code = run.spec.code
        there = (
            code and code.config_map and (not packages or (code.pip and code.pip.requirements_file))
        )
        if not there:
            pip = f", pip: {{requirementsFile: {REQUIREMENTS}}}" * packages
            yield f"now write into {file}{', in place of spec.code' * (code is not None)}"
            yield f"  spec:\n    code: {{configMap: {name}{pip}}}"
        yield "now run" if there else "and run"
        # Without --server-side, kubectl keeps a second copy in an annotation: at most 256 KiB.
        yield f"  kubectl apply --server-side -f {target}"
    yield f"  kubectl apply -f {file}"


def check_copy(
    run: AgenticRun,
    document: Mapping[str, Any],
    code: LocalCode,
    contents: Contents,
    seeds: int,
    timeout: float,
) -> Iterator[str]:
    """Check the run with a copy of its code in a folder without anything else.

    Yields a line for each environment that passed. Ends the command with code 1 if a module cannot
    be imported or a check fails, and prints what the check found.
    """
    with tempfile.TemporaryDirectory(prefix="agenticrun-package-") as temporary:
        copy, empty = Path(temporary, "code"), Path(temporary, "empty")
        empty.mkdir()
        write_files(copy, contents)
        copied_run = Path(temporary, "run.yaml")
        copied_run.write_text(write_yaml(dict(document)))

        def call(*words: str, stdin: str = "") -> str:
            # A checkout that is not installed is importable only through PYTHONPATH; an installed
            # package is found anyway.
            installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
            sources = dict.fromkeys(
                str(Path(str(p.__file__)).parents[1]) for p in (agenticrun_api, agenticrun_workers)
            )
            ours = [folder for folder in sources if folder not in installed]
            done = subprocess.run(
                [sys.executable, *words],
                cwd=empty,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), *ours])},
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode:
                typer.echo(done.stdout + done.stderr, err=True)
                typer.echo(
                    "The packaged copy fails, alone in an empty folder. A module or a file may "
                    "be missing in it: import it, or name it in the run. Packages must be "
                    "installed here too.",
                    err=True,
                )
                raise typer.Exit(ExitCode.FAILED)
            return done.stdout

        asked = {
            "references": list(code.references),
            "envs": [[env.tag, env.type, dict(env.config)] for env in run.spec.pipeline.envs],
        }
        services = json.loads(call("-c", BUILDER, stdin=json.dumps(asked)).splitlines()[-1])
        call("-m", "agenticrun_workers.cli", "validate", "-f", str(copied_run))
        for index, env in enumerate(run.spec.pipeline.envs):
            place = f"spec.pipeline.envs[{index}]."
            if not any(field.startswith(place) for field in code.fields):
                continue
            if env.tag in services:
                yield f"{env.tag}: built; only its agent can play it (agenticrun debug)"
                continue
            options = ("--tag", env.tag, "--seeds", str(seeds), "--timeout", str(timeout))
            call("-m", "agenticrun_workers.cli", "check-env", "-f", str(copied_run), *options)
            yield f"{env.tag}: check-env passed"


BUILDER = """
import json, sys
from agenticrun_workers.envs import make_env
from agenticrun_workers.plugins import PluginError, imported

asked = json.load(sys.stdin)
for reference in asked["references"]:
    try:
        imported(*reference.split(":"))
    except PluginError as error:
        sys.exit(f"{reference}: {error}")
services = []
for tag, type, config in asked["envs"]:
    try:
        env = make_env(type, config)
    except PluginError as error:
        sys.exit(f"{tag}: {error}")
    if getattr(env, "is_service", False):
        services.append(tag)
print()
print(json.dumps(services))
"""
"""Imports all references, builds all environments, and prints the tags of services.

check-env cannot play a service.
"""
