"""Fetches spec.code.git: `python -m agenticrun_workers.code.git`, in an init container.

User, password and key stay in the files of the mounted Secret: they are in no argument, no
environment variable, and nothing that the Ray container mounts.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agenticrun_api.names import CODE_DIR, GIT_SECRET_DIR
from agenticrun_api.spec import CodeSpec, GitCode
from agenticrun_workers.code import CodeError, bring, clear, program

ANSWER_SECONDS = 40.0
"""Time in which the server must answer. git itself waits for minutes."""
HINTS: Mapping[str, str] = {
    "couldn't find remote ref": "ref is a branch, a tag, or a commit with all 40 digits",
    "not our ref": "no commit of the repository has this number",
    "could not read Username": "the repository is private or does not exist: set secretName",
    "could not read Password": "the repository is private or does not exist: set secretName",
    "Authentication failed": "user or password in the Secret are wrong",
    "returned error: 403": "user or password in the Secret do not give access to it",
    "' not found": "the repository does not exist, or is private and needs another secretName",
    "Repository not found": "it does not exist, or is private and needs another secretName",
    "Permission denied (publickey)": "the key in the Secret does not give access to it",
    "Host key verification failed": "known_hosts in the Secret lacks the key of this host",
}
"""Advice to the user, by words of git."""


def fetch(git: GitCode, into: Path, secret: Path) -> str:
    """Fetch the files of a commit, without history, and return the commit.

    Args:
        git: what to fetch.
        into: an existing folder; what it contains is deleted.
        secret: the folder of the mounted Secret, which is empty if the Secret does not exist.

    Raises:
        CodeError: it cannot be fetched, or has no folder `git.path`.
    """
    options, variables = _access(git, secret) if git.secret_name else ([], {})
    # The folder is a volume's, so it belongs to root.
    # Advice of git about detached heads would be the last line that a user reads.
    options += ["-c", "safe.directory=*", "-c", "advice.detachedHead=false"]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **variables}

    def call(*words: str, timeout: float | None = None) -> str:
        command = [program("git"), "-C", str(into), *options, *words]
        return _output(command, environment, git, timeout)

    clear(into)
    # First: a server that is away is noticed in time, whereas a fetch has no limit.
    call("ls-remote", "--quiet", "--", git.url, "HEAD", timeout=ANSWER_SECONDS)
    call("init", "--quiet")
    # A fetch, because `git clone --branch` takes no commit hash.
    call("fetch", "--quiet", "--depth=1", "--", git.url, git.ref)
    call("checkout", "--quiet", "FETCH_HEAD")
    if git.path and not (into / git.path).is_dir():
        raise CodeError(f"{git.ref} of {git.url} has no folder {git.path} (spec.code.git.path)")
    return call("rev-parse", "HEAD").strip()


def _output(
    command: Sequence[str], environment: Mapping[str, str], git: GitCode, timeout: float | None
) -> str:
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CodeError(f"{git.url} did not answer within {timeout:.0f} s") from None
    if done.returncode == 0:
        return done.stdout
    # One line, because it becomes the message of the container's end.
    said = " ".join(done.stderr.split())
    hint = next((f": {hint}" for words, hint in HINTS.items() if words in said), "")
    raise CodeError(f"cannot fetch {git.ref} from {git.url}{hint} ({said})")


def _access(git: GitCode, secret: Path) -> tuple[list[str], dict[str, str]]:
    """Return options and environment variables by which git reads the Secret itself."""

    def needed(key: str) -> str:
        path = secret / key
        if not path.is_file():
            raise CodeError(
                f"Secret {git.secret_name} (spec.code.git.secretName) does not exist or has no key "
                f"{key}: create it in the namespace of the run"
            )
        # git runs helper and ssh command in a shell.
        return shlex.quote(str(path))

    # Over ssh with a key: git must not prompt, and unknown hosts are refused.
    if not git.url.startswith(("http://", "https://")):
        key, hosts = needed("ssh-privatekey"), needed("known_hosts")
        ssh = (
            f"ssh -F /dev/null -i {key} -o IdentitiesOnly=yes -o BatchMode=yes "
            f"-o ConnectTimeout=20 -o StrictHostKeyChecking=yes -o UserKnownHostsFile={hosts}"
        )
        return [], {"GIT_SSH_COMMAND": ssh}
    password = needed("password")
    user = f'"$(cat {needed("username")})"' if (secret / "username").is_file() else "git"
    # It reads the Secret when git asks, so the password is in no argument and no variable.
    helper = f'!f() {{ echo username={user}; echo password="$(cat {password})"; }}; f'
    address = urlsplit(git.url)
    # For this host only: a redirect to another one gets nothing.
    return ["-c", f"credential.{address.scheme}://{address.netloc}.helper={helper}"], {}


def _main(code: CodeSpec) -> str:
    assert code.git is not None
    return fetch(code.git, Path(CODE_DIR), Path(GIT_SECRET_DIR))


if __name__ == "__main__":
    sys.exit(bring(_main))
