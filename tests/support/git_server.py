"""A Git repository with commits, and git's own HTTP server, with or without a password.

In a pod: `python git_server.py FOLDER PORT PASSWORD`. It imports the standard library only.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

USER = "me"


class GitServer(ThreadingHTTPServer):
    """Serves the repositories of a folder through `git http-backend`."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0):
        super().__init__((address, port), _Handler)
        self.folder = folder
        self.password: str | None = None
        """The password that it asks for."""

    @property
    def url(self) -> str:
        """Address of the folder on this machine."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: GitServer

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        right = base64.b64encode(f"{USER}:{self.server.password}".encode()).decode()
        if self.server.password and given != f"Basic {right}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        done = subprocess.run(
            ["git", "http-backend"],
            input=self.rfile.read(int(self.headers.get("Content-Length", 0))),
            env={
                **os.environ,
                "GIT_PROJECT_ROOT": str(self.server.folder),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            },
            capture_output=True,
            check=False,  # it answers what it refuses, and fails
        )
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Let a server answer for as long as this lasts."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def call_git(repository: Path, *words: str) -> str:
    """Run git in a repository and return what it prints."""
    who = ("-c", f"user.name={USER}", "-c", "user.email=me@example.com")
    command = ["git", "-C", str(repository), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(repository: Path, files: dict[str, str]) -> str:
    """Commit texts by their paths, in a new repository if there is none; return the commit."""
    if not (repository / ".git").exists():
        repository.mkdir(parents=True)
        call_git(repository, "init", "--quiet", "--initial-branch=main")
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    call_git(repository, "add", ".")
    call_git(repository, "commit", "--quiet", "--message=change")
    return call_git(repository, "rev-parse", "HEAD")


if __name__ == "__main__":
    in_a_pod = GitServer(Path(sys.argv[1]), "", int(sys.argv[2]))
    in_a_pod.password = sys.argv[3]
    in_a_pod.serve_forever()
