"""A server that answers as Hugging Face's hub does, for one dataset in a folder."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

NAME = "zoo/animals"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The dataset `NAME`, with a branch `main` and a tag `v1`.

    Attributes:
        folder: its files.
        commit: what branch and tag are.
        refuses: the code of an error that all requests get, such as GatedRepo.
        asked: "METHOD PATH" of each request.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder, self.commit, self.refuses, self.asked = folder, COMMIT, "", list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        kind, _, rest = path.removeprefix("/api").removeprefix(f"/datasets/{NAME}/").partition("/")
        revision, _, name = rest.partition("/")
        if self.server.refuses:
            self.refuse(403, self.server.refuses)
        elif f"/datasets/{NAME}" not in path:
            self.refuse(404, "RepoNotFound")
        elif kind in ("revision", "tree", "resolve") and revision not in ("main", "v1", self.server.commit):
            self.refuse(404, "RevisionNotFound")
        elif kind == "tree":
            files = sorted(file for file in self.server.folder.rglob("*") if file.is_file())
            self.answer(json.dumps([self.entry(file) for file in files]).encode())
        elif kind == "resolve":
            file = self.server.folder / name
            if file.is_file():
                self.answer(
                    file.read_bytes(), {"ETag": f'"{self.entry(file)["oid"]}"', "X-Repo-Commit": self.server.commit}
                )
            else:
                self.refuse(404, "EntryNotFound")
        else:
            self.answer(
                json.dumps(
                    {"id": NAME, "sha": self.server.commit, "siblings": [], "tags": [], "private": False}
                ).encode()
            )

    def entry(self, file: Path) -> dict[str, object]:
        path = str(file.relative_to(self.server.folder))
        oid = hashlib.sha1(file.read_bytes()).hexdigest()
        return {"type": "file", "oid": oid, "size": file.stat().st_size, "path": path}

    def answer(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the dataset in `folder`, asked by huggingface_hub here, with its own cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    pytest.importorskip("huggingface_hub.file_download")
    hub = Hub(folder)
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    thread = Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
