"""A small Hugging Face Hub on this machine: it takes commits of the real client."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Hub:
    """Uploads: file contents by repository and path."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@contextmanager
def running_hub(token: str) -> Iterator[Hub]:
    """Runs the server; it refuses requests without the token."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Authorization") != f"Bearer {token}":
                return self.answer({"error": "Invalid username or password."}, 401)
            parts = self.path.strip("/").split("/")
            if parts[1:] == ["repos", "create"]:
                name = "me/" + json.loads(body)["name"]
                hub.files.setdefault(name, {})
                return self.answer({"url": f"{hub.url}/{name}"})
            name = "/".join(parts[2:4])
            if parts[4] == "preupload":
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = {"uploadMode": "regular", "shouldIgnore": False}
                return self.answer({"files": [{"path": path, **modes} for path in paths]})
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.messages.append(value["summary"])
                else:
                    hub.files[name][value["path"]] = base64.b64decode(value["content"])
            return self.answer({"commitOid": "0" * 40, "commitUrl": f"{hub.url}/{name}/commit/0"})

        def answer(self, value: object, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
