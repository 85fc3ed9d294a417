"""What an S3-like server does with files that are sent to it: whole, in parts, removed."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Writing(BaseHTTPRequestHandler):
    """Writes to the folders of `remotes.Server`, with its faults."""

    of: Any

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that has gone
            super().handle()

    def _failed(self, fault: Any) -> bool:
        raise NotImplementedError

    def _answer(self, status: int, body: bytes, cut: int | None = None, **headers: str) -> None:
        raise NotImplementedError

    def do_PUT(self) -> None:
        name, query, fault = self._sent()
        size = int(self.headers["Content-Length"])
        if fault is not None and fault.cut is not None:
            self.rfile.read(min(fault.cut, size))
            self.close_connection = True
            self.connection.shutdown(2)
            return
        data = self.rfile.read(size)
        time.sleep(self.of.pause_s)
        if self._failed(fault):
            return
        if not self._bucket(name).is_dir():
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            return
        if self.headers.get("If-None-Match") == "*" and (self.of.root / name.strip("/")).exists():
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        if "uploadId" in query:
            with self.of.lock:
                self.of.parts[query["uploadId"][0]][int(query["partNumber"][0])] = data
        else:
            self._write(name, data)
        self._answer(200, b"", ETag=f'"{hashlib.md5(data).hexdigest()}"')

    def do_POST(self) -> None:
        name, query, fault = self._sent()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._failed(fault):
            return
        if "uploads" in query:
            with self.of.lock:
                upload = f"{len(self.of.parts)}-{name.rpartition('/')[2]}"
                self.of.parts[upload] = {}
            self._xml(f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>")
            return
        parts = self.of.parts.pop(query["uploadId"][0])
        digests = b"".join(hashlib.md5(parts[number]).digest() for number in sorted(parts))
        etag = f"{hashlib.md5(digests).hexdigest()}-{len(parts)}"
        self._write(name, b"".join(parts[number] for number in sorted(parts)), etag)
        self._xml(f'<CompleteMultipartUploadResult><ETag>"{etag}"</ETag></CompleteMultipartUploadResult>')

    def do_DELETE(self) -> None:
        name, query, fault = self._sent()
        if self._failed(fault):
            return
        if "uploadId" in query:
            self.of.parts.pop(query["uploadId"][0], None)
        else:
            (self.of.root / name.strip("/")).unlink(missing_ok=True)
        self._answer(204, b"")

    def _sent(self) -> tuple[str, dict[str, list[str]], Any]:
        asked = urlsplit(self.path)
        name = unquote(asked.path)
        self.of.requests.append((self.command, name, ""))
        fault = self.of.fault(name, listing=False, method=self.command)
        return name, parse_qs(asked.query, keep_blank_values=True), fault

    def _bucket(self, name: str) -> Path:
        return self.of.root / name.strip("/").partition("/")[0]

    def _write(self, name: str, data: bytes, etag: str = "") -> None:
        path = self.of.root / name.strip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if etag:
            self.of.etags[path] = (data, etag)

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0"?>{text}'.encode(), Content_Type="application/xml")
