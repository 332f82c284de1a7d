"""spec.code.git against real repositories: over HTTP by git's own server, and over a fake ssh."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agenticrun_api.names import ENV_CODE
from agenticrun_api.spec import CodeSpec, GitCode
from agenticrun_workers.code import CodeError, bring, git
from agenticrun_workers.code.git import fetch
from git_server import GitServer, call_git, commit, serving

LAKE = "envs/lake.py"
TOKEN = "s3cr3t-t0ken"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two commits on main, tag v1 and branch old/one at the first."""
    made = tmp_path / "repositories" / "mine"
    commit(made, {LAKE: "VERSION = 1\n"})
    call_git(made, "tag", "v1")
    call_git(made, "branch", "old/one")
    commit(made, {LAKE: "VERSION = 2\n"})
    return made


@pytest.fixture
def server(repository: Path) -> Iterator[GitServer]:
    made = GitServer(repository.parent)
    with serving(made):
        yield made


@pytest.fixture
def url(server: GitServer) -> str:
    """The address of the repository."""
    return f"{server.url}/mine"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    made = tmp_path / "into"
    made.mkdir()
    return made


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The folder of a mounted Secret, still empty."""
    made = tmp_path / "se cret"
    made.mkdir()
    return made


@pytest.mark.parametrize(
    ("ref", "version"), [("HEAD", 2), ("main", 2), ("v1", 1), ("old/one", 1), ("refs/tags/v1", 1)]
)
def test_a_branch_or_tag_is_fetched_without_history(
    url: str, into: Path, secret: Path, ref: str, version: int
) -> None:
    fetch(GitCode(url=url, ref=ref), into, secret)
    assert (into / "envs/lake.py").read_text() == f"VERSION = {version}\n"
    log = subprocess.run(
        ["git", "-C", str(into), "log", "--oneline"], capture_output=True, check=True
    )
    assert len(log.stdout.splitlines()) == 1


def test_a_commit_is_fetched_that_no_branch_points_to(
    url: str, repository: Path, into: Path, secret: Path
) -> None:
    middle = commit(repository, {LAKE: "VERSION = 3\n"})
    commit(repository, {LAKE: "VERSION = 4\n"})
    fetched = fetch(GitCode(url=url, ref=middle, path="envs"), into, secret)
    assert fetched == middle
    assert (into / "envs/lake.py").read_text() == "VERSION = 3\n"


def test_a_second_try_replaces_what_the_first_has_left(
    url: str, repository: Path, into: Path, secret: Path
) -> None:
    fetch(GitCode(url=url), into, secret)
    (into / "stale").mkdir()
    (into / "stale" / "file").write_text("")
    (repository / "envs/lake.py").unlink()
    commit(repository, {"envs/pond.py": ""})
    fetch(GitCode(url=url), into, secret)
    assert sorted(path.name for path in into.iterdir()) == [".git", "envs"]
    assert [path.name for path in (into / "envs").iterdir()] == ["pond.py"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ref": "nope"}, "cannot fetch nope from URL: ref is a branch, a tag, or a commit"),
        ({"ref": "0" * 40}, f"cannot fetch {'0' * 40} from URL: no commit of the repository"),
        ({"path": "missing"}, "HEAD of URL has no folder missing (spec.code.git.path)"),
        ({"url": "URL-of-nothing"}, "cannot fetch HEAD from URL-of-nothing"),
    ],
)
def test_a_failure_says_what_to_do(
    url: str, into: Path, secret: Path, change: dict[str, str], message: str
) -> None:
    fields = {"url": "URL", **change}
    fields["url"] = fields["url"].replace("URL", url)
    with pytest.raises(CodeError) as caught:
        fetch(GitCode(**fields), into, secret)
    assert str(caught.value).startswith(message.replace("URL", url))


def test_a_server_that_never_answers_is_given_up(
    into: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git, "ANSWER_SECONDS", 1.0)
    silent = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # listens, never serves
    url = f"http://127.0.0.1:{silent.server_port}/mine"
    with pytest.raises(CodeError, match="did not answer within 1 s"):
        fetch(GitCode(url=url), into, secret)
    silent.server_close()


def test_a_private_repository_needs_the_password_of_its_secret(
    server: GitServer, url: str, into: Path, secret: Path
) -> None:
    server.password = TOKEN
    with pytest.raises(CodeError, match="private or does not exist: set secretName"):
        fetch(GitCode(url=url), into, secret)
    private = GitCode(url=url, secret_name="mine")
    with pytest.raises(CodeError, match=r"Secret mine .* does not exist or has no key password"):
        fetch(private, into, secret)
    (secret / "username").write_text("me\n")
    (secret / "password").write_text("wrong")
    with pytest.raises(CodeError, match="user or password in the Secret are wrong"):
        fetch(private, into, secret)
    (secret / "password").write_text(f"{TOKEN}\n")
    fetch(private, into, secret)
    assert (into / "envs/lake.py").exists()
    written = b"".join(path.read_bytes() for path in into.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written


def test_no_other_host_gets_the_password(
    server: GitServer, url: str, into: Path, secret: Path
) -> None:
    server.password = TOKEN
    (secret / "username").write_text("me")
    (secret / "password").write_text(TOKEN)
    options, _ = git._access(GitCode(url="https://other.example/mine", secret_name="mine"), secret)
    command = ["git", *options, "ls-remote", url]
    done = subprocess.run(
        command,
        env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "could not read Username" in done.stderr) == (128, True)


def test_ssh_uses_the_key_and_the_hosts_of_the_secret(
    repository: Path, into: Path, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    # The last word is the command for the other host; here it runs on this one.
    fake.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/said\nexec bash -c "${{@: -1}}"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    code = GitCode(url=f"ssh://git@host.example{repository}", secret_name="mine")
    for key in ("ssh-privatekey", "known_hosts"):
        with pytest.raises(CodeError, match=f"has no key {key}"):
            fetch(code, into, secret)
        (secret / key).write_text(f"the {key}")
    fetch(code, into, secret)
    assert (into / "envs/lake.py").exists()
    said = (tmp_path / "said").read_text()
    for part in (
        f"-i {secret}/ssh-privatekey",
        f"UserKnownHostsFile={secret}/known_hosts",
        "StrictHostKeyChecking=yes",
        "BatchMode=yes",
    ):
        assert part in said


def test_the_reason_for_a_failure_is_in_the_status_of_the_pod(
    into: Path, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = CodeSpec(git=GitCode(url="http://127.0.0.1:9/mine"))
    monkeypatch.setenv(ENV_CODE, code.model_dump_json(by_alias=True, exclude_none=True))
    log = tmp_path / "termination-log"
    log.touch()

    def action(code: CodeSpec) -> str:
        assert code.git
        return fetch(code.git, into, secret)

    assert bring(action, log) == 1
    assert log.read_text().startswith("cannot fetch HEAD from http://127.0.0.1:9/mine (fatal")
    assert bring(lambda _: "done", log) == 0
    assert log.read_text() == "done"


def test_an_image_without_git_is_named(
    into: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CodeError, match="the image has no program git: use one made FROM"):
        fetch(GitCode(url="https://host.example/mine"), into, secret)
