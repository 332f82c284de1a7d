"""An MCP server over stdin and stdout that breaks on command. It has no library, so it starts fast.

Run as `python -m mcp_server`. It speaks the protocol of 2025: a client that begins with a newer one
has to fall back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "begin": {"seed": "integer", "split": "string", "word": "string"},
    "echo": {"text": "string"},
    "big": {},
    "broken": {},
    "picture": {},
    "structured": {},
    "document": {},
    "link": {},
    "binary": {},
    "fails": {},
    "refuses": {},
    "crashes": {},
    "dies": {},
    "hangs": {},
    "score": {"answer": "string", "seed": "integer"},
    "object_score": {"answer": "string"},
    "text_score": {"answer": "string"},
    "truth_score": {"answer": "string"},
    "nested_score": {"answer": "string"},
    "point_score": {"answer": "string"},
    "other_score": {"answer": "string"},
    "huge_score": {"answer": "string"},
    "failed_score": {"answer": "string"},
    "bad_score": {"answer": "string"},
}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "dies":
            os._exit(3)
        case "hangs":
            time.sleep(3600)
        case "begin":
            return text(f"begin {json.dumps(arguments, sort_keys=True)} {os.getpid()}")
        case "score":
            return text(str(len(arguments["answer"]) / 10))
    return FIXED.get(name) or text(arguments.get("text", ""))


def resource(found: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "resource", "resource": {"uri": "file:///a.txt", **found}}]}


def text(said: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": said}]}


FIXED = {
    "big": text("\U0001f642" * 1_000_000),
    "broken": text("half \ud83d"),
    "picture": {
        "content": [
            {"type": "image", "data": "aGk=", "mimeType": "image/png"},
            {"type": "text", "text": "a caption"},
        ]
    },
    "structured": {"content": [], "structuredContent": {"a": 1}},
    "document": resource({"mimeType": "text/plain", "text": "the file"}),
    "binary": resource({"mimeType": "image/png", "blob": "aGk="}),
    "link": {"content": [{"type": "resource_link", "uri": "file:///a.txt", "name": "a.txt"}]},
    "fails": {**text("no such file"), "isError": True},
    "object_score": {**text("-"), "structuredContent": {"reward": True}},
    "text_score": text('{"reward": 0.5, "why": "half"}'),
    "truth_score": text("true"),
    "nested_score": {**text("-"), "structuredContent": {"result": {"reward": 0.25}}},
    "point_score": text(" .5\n"),
    "other_score": {**text("0.5"), "structuredContent": {"why": "ok"}},
    "huge_score": text("1" * 400),
    "failed_score": {**text("1"), "isError": True},
    "bad_score": text("very good"),
}
"""Results that do not depend on the arguments."""


def answer(method: str, asked: dict[str, Any]) -> dict[str, Any]:
    match method, asked.get("name"):
        case "initialize", _:
            info = {"name": "fake", "version": "1"}
            found = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            return {"result": {**found, "serverInfo": info}}
        case "tools/list", _:
            listed = [
                {
                    "name": name,
                    "description": f"The tool {name}",
                    "inputSchema": {
                        "type": "object",
                        "properties": {key: {"type": kind} for key, kind in fields.items()},
                    },
                }
                for name, fields in TOOLS.items()
            ]
            half = len(listed) // 2
            if "growing" in sys.argv:
                following = f"{int(asked.get('cursor') or 0) + 1}"
                return {"result": {"tools": listed[:1], "nextCursor": following}}
            if asked.get("cursor") and "endless" not in sys.argv:
                return {"result": {"tools": listed[half:]}}
            return {"result": {"tools": listed[:half], "nextCursor": "2"}}
        case "tools/call", "refuses":
            return {"error": {"code": -32602, "message": "x is missing"}}
        case "tools/call", "crashes":
            return {"error": {"code": -32603, "message": "internal error"}}
        case "tools/call", name:
            return {"result": call(str(name), asked.get("arguments") or {})}
        case "ping", _:
            return {"result": {}}
    return {"error": {"code": -32601, "message": "Method not found"}}


def main() -> None:
    if "silent" in sys.argv:
        time.sleep(3600)
    noise = "noisy" in sys.argv
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            if noise:
                print("INFO: a line that is no message\n{", flush=True)
            said = answer(asked["method"], asked.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)


if __name__ == "__main__":
    main()
