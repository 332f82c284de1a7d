"""Code from an image and from a Git repository, with packages; and code that does not arrive.

The image is built as docs/own-code.md prints it. Runs of other tests have their code from a
ConfigMap (`lake.behind_gate`). A pod serves the repository, which asks for a password, and the
package index. It also has the agent of the run from Git, as docs/outside-agents.md prints it
("Agents in other pods").
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import Role
from git_server import USER, call_git, commit
from installation import RUNS, Images
from lake import Pods, small_lake
from pages import ROOT, blocks
from testcluster import Cluster, devcluster
from waiting import eventually
from watching import Watch
from wheels import wheel

SITE = "code-site"
PASSWORD = "s3cr3t-t0ken"
SUPPORT = Path(__file__).parents[1] / "support"
GIT_URL = f"http://{SITE}.{RUNS}.svc:8000/mine"
INDEX_URL = f"http://{SITE}:8001/"
PACKAGE = "iniconfig"
"""A package that the worker image has not."""
SEEN_SECONDS = 60

OWN_LAKE = f"""
import {PACKAGE}
from agenticrun_workers.envs import FrozenLake
from sizes import SIZE


class OwnLake(FrozenLake):
    def __init__(self):
        super().__init__(size=SIZE)
"""
CALLER, SERVICE = (
    next(block for block in blocks(ROOT / "docs/outside-agents.md", "python") if name in block)
    for name in ("# caller.py", "# service.py")
)
FILES = {
    "own_lake.py": OWN_LAKE,
    "sizes.py": "SIZE = 4\n",
    "caller.py": CALLER.replace("my-agents.default.svc", f"{SITE}.{RUNS}.svc:8002"),
    "requirements.txt": f"{PACKAGE}==99.1\n",
}


@pytest.fixture
def tagged(runs: Cluster, images: Images, tmp_path: Path) -> Iterator[str]:
    """Run a pod with a private repository and a package index; yield the commit of tag v1."""
    repository, bundle = tmp_path / "mine", tmp_path / "bundle"
    made_commit = commit(repository, {f"envs/{name}": text for name, text in FILES.items()})
    call_git(repository, "tag", "v1")
    call_git(repository, "bundle", "create", "--quiet", str(bundle), "--all")
    package = wheel(tmp_path / "index", PACKAGE, "99.1")
    files = {"bundle": bundle.read_bytes(), package.name: package.read_bytes()}
    files["service.py"] = SERVICE.replace("8000", "8002").encode()
    files["git_server.py"] = (SUPPORT / "git_server.py").read_bytes()
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SITE},
        "binaryData": {name: base64.b64encode(data).decode() for name, data in files.items()},
    }
    program = (
        f"mkdir -p index/{PACKAGE} && cp /site/*.whl index/{PACKAGE}/ && "
        "git clone -q --mirror /site/bundle repositories/mine && "
        "(python -m http.server 8001 --directory index &) && (python /site/service.py &) && "
        f"exec python /site/git_server.py repositories 8000 {PASSWORD}"
    )
    container = {
        "name": SITE,
        "image": images.worker,
        "workingDir": "/tmp",
        "command": ["sh", "-c", program],
        "volumeMounts": [{"name": "site", "mountPath": "/site"}],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
    }
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": SITE, "labels": {"app": SITE}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "site", "configMap": {"name": SITE}}],
        },
    }
    ports = [{"name": f"port-{port}", "port": port} for port in (8000, 8001, 8002)]
    service: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SITE},
        "spec": {"selector": {"app": SITE}, "ports": ports},
    }
    made: tuple[dict[str, Any], ...] = (
        config,
        pod,
        service,
        secret("right", PASSWORD),
        secret("wrong", "guessed"),
    )
    runs.apply(*made)
    try:
        runs.kubectl("wait", "--for=condition=Ready", f"pod/{SITE}", "--timeout=120s")
        yield made_commit
    finally:
        for item in made:
            runs.kubectl("delete", item["kind"], item["metadata"]["name"])


def secret(name: str, password: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "type": "kubernetes.io/basic-auth",
        "stringData": {"username": USER, "password": password},
    }


def own_lake(name: str, code: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a run of one step on an environment of `FILES`."""
    document = small_lake(name, max_steps=1, save_steps=0, checkpoint={"none": True})
    document["spec"]["pipeline"]["envs"][0] |= {"type": "own_lake:OwnLake", "config": {}}
    document["spec"] |= {"code": code} if code else {}
    return document


def image_with_code(folder: Path, base: str) -> str:
    """Build the image of docs/own-code.md with `FILES`; return its reference."""
    (dockerfile,) = (
        block for block in blocks(ROOT / "docs/own-code.md", "dockerfile") if "busybox" in block
    )
    (folder / "envs").mkdir(parents=True)
    (folder / "Dockerfile").write_text(dockerfile.replace("busybox:1.37", base))
    for name, text in FILES.items():
        (folder / "envs" / name).write_text(text)
    done = devcluster("image", str(folder))
    assert done.returncode == 0, "tools/devcluster image failed, see its output above"
    return done.stdout.strip()


@pytest.mark.timeout(1800, func_only=True)
def test_own_code_trains_from_an_image_and_from_git(
    runs: Cluster, images: Images, tagged: str, tmp_path: Path
) -> None:
    image = {"reference": image_with_code(tmp_path / "games", images.worker), "path": "/code"}
    git = {"url": GIT_URL, "ref": "v1", "path": "envs", "secretName": "right"}
    pip = {"requirementsFile": "requirements.txt", "indexUrl": INDEX_URL}
    from_image = own_lake("from-image", {"image": image, "pip": pip})
    from_git = own_lake("from-git", {"git": git, "pip": pip})
    from_git["spec"]["pipeline"]["envs"][0]["agent"] = {
        "type": "outside",
        "config": {"run": "caller:play", "reachableFrom": "network"},
    }
    from_git["spec"]["network"] = {"allowFrom": [{"role": "env", "podLabels": {"app": SITE}}]}

    def with_code() -> dict[str, Any] | None:
        """Return the env pod once Git's container has ended. A run of one step may be over soon."""
        for pod in Pods(runs, "from-git").of(Role.ENV):
            first, *_ = pod["status"].get("initContainerStatuses") or [{"state": {}}]
            if "terminated" in first["state"]:
                return pod
        return None

    with Watch(runs, "from-image") as first, Watch(runs, "from-git") as second:
        runs.apply(from_image, from_git)
        pod = eventually(with_code, 600, "the code of the run from Git is fetched", interval=0.5)
        for watch in (first, second):
            watch.wait(lambda seen: seen.phase == "Succeeded", 600, "a step of own code")
    assert PASSWORD not in json.dumps(pod)
    (fetched, *_) = pod["status"]["initContainerStatuses"]
    assert fetched["state"]["terminated"]["message"] == tagged


GIT = {"url": GIT_URL, "ref": "v1", "path": "envs", "secretName": "right"}
CODE_IN_IMAGE = "/opt/agenticrun/src/agenticrun_workers/cli"
BROKEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bad-ref": (
        {"git": GIT | {"ref": "nope"}},
        ("cannot fetch nope from", "ref is a branch, a tag, or a commit"),
    ),
    "no-password": (
        {"git": {"url": GIT_URL}},
        ("the repository is private or does not exist: set secretName",),
    ),
    "wrong-password": (
        {"git": GIT | {"secretName": "wrong"}},
        ("user or password in the Secret are wrong",),
    ),
    "no-secret": (
        {"git": GIT | {"secretName": "nowhere"}},
        ("Secret nowhere (spec.code.git.secretName) does not exist or has no key password",),
    ),
    "no-package": (
        {"pip": {"requirements": ["no-such-game==3"], "indexUrl": INDEX_URL}},
        ("cannot install spec.code.pip", "no-such-game was not found in the package registry"),
    ),
    "image-without-package": (  # the file of the image is read, so the image's code has arrived
        {
            "image": {"reference": "IMAGE", "path": f"{CODE_IN_IMAGE}/env-template"},
            "pip": {"requirementsFile": "agenticrun.yaml"},
        },
        ("cannot install spec.code.pip", "parse requirement in `agenticrun.yaml`"),
    ),
    "no-folder": (
        {"image": {"reference": "IMAGE", "path": "/no-such-folder"}},
        ("cannot fetch spec.code", "/no-such-folder"),
    ),
}


@pytest.mark.timeout(900, func_only=True)
@pytest.mark.usefixtures("tagged")
def test_code_that_does_not_arrive_says_why(runs: Cluster, images: Images) -> None:
    watches = {name: Watch(runs, name) for name in BROKEN}
    for name, (code, words) in BROKEN.items():
        text = json.dumps(code).replace("IMAGE", images.worker)
        run = own_lake(name, json.loads(text))
        for role in run["spec"]["roles"].values():
            role |= {"cpus": "1m", "memory": "256Mi"}
        with watches[name] as watch:
            runs.apply(run)
            started = eventually(
                lambda name=name: [  # type: ignore[misc]
                    pod
                    for pod in runs.list("pods", f"agenticrun.dev/run={name}")
                    if pod["status"].get("initContainerStatuses")
                ],
                120,
                "the first init container",
            )
            assert started
            seen = watch.wait(
                lambda seen: seen.condition("RolesReady").get("reason") == "CodeUnavailable",
                SEEN_SECONDS,
                f"{name} says why",
            )
            message = seen.condition("RolesReady")["message"]
            assert all(word in message for word in words), message
            assert seen.phase == "Starting"
            runs.kubectl("delete", "agenticrun", name)
