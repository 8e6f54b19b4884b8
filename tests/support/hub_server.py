"""A small Hugging Face Hub on this machine, for commits and downloads of the real client."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "c0de"


@dataclass
class Hub:
    """File contents by repository and path, and what was asked for.

    `listings` are the repositories whose files were listed, `downloads` the names of the files that
    were sent.
    """

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    listings: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)


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

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name = "/".join(parts[2:4])
                if name not in hub.files:
                    return self.answer({"error": "Repository not found"}, 404)
                hub.listings.append(name)
                siblings = [{"rfilename": path} for path in hub.files[name]]
                return self.answer({"id": name, "sha": COMMIT, "siblings": siblings})
            name, file = "/".join(parts[:2]), "/".join(parts[4:])
            if file not in hub.files.get(name, {}):
                return self.answer({"error": "Entry not found"}, 404)
            data = hub.files[name][file]
            if self.command == "GET":
                hub.downloads.append(file)
            etag = hashlib.sha1(data).hexdigest()
            return self.send(data, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, value: object, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send(data, {"Content-Type": "application/json"}, status)

        def send(self, data: bytes, headers: Mapping[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
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
