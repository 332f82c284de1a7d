"""The part of the Hugging Face Hub's API that an upload uses, on localhost."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_writer"


@dataclass
class FakeHub:
    """Content and answers of the server."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    """Repositories."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refuses_commits: int = 0
    """Status of the answer to a commit, 0 to accept it."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve an empty hub that knows one token."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.answer(401, {"error": "Invalid user token."})
            else:
                self.answer(*_answer(hub, self.path, body))

        def answer(self, status: int, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(hub: FakeHub, path: str, body: bytes) -> tuple[int, object]:
    parts = path.partition("?")[0].strip("/").split("/")
    if parts == ["api", "repos", "create"]:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not name.startswith("me/"):
            return 403, {"error": "You don't have the rights to create a model there"}
        if name in hub.private:
            return 409, {"error": "exists", "url": f"{hub.url}/{name}"}
        hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return 200, {"url": f"{hub.url}/{name}"}
    if parts[:2] == ["api", "models"] and parts[4] == "preupload":
        files = json.loads(body)["files"]
        return 200, {
            "files": [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
        }
    if parts[:2] == ["api", "models"] and parts[4] == "commit":
        if hub.refuses_commits:
            return hub.refuses_commits, {"error": "not now"}
        name = "/".join(parts[2:4])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                hub.messages.append(line["value"]["summary"])
            else:
                content = base64.b64decode(line["value"]["content"])
                hub.files.setdefault(name, {})[line["value"]["path"]] = content
        return 200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1", "success": True}
    return 404, {"error": f"no {path}"}
