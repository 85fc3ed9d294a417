"""Servers of files on this machine: plain HTTP, an S3-like one, and their faults."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Fault:
    """What a server does instead of answering.

    Attributes:
        status: of the answer; 0 is the usual one.
        times: how often.
        cut: bytes after which the connection is closed.
        of: the end of the paths that it is for.
        act, after: called before the file is read, and before its bytes are sent.
        on_listing: whether listings, and sizes, have it, too.
    """

    status: int = 0
    times: int = 1
    cut: int | None = None
    of: str = ""
    on_listing: bool = False
    act: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


@dataclass
class Server:
    """A server of a folder.

    Attributes:
        root: the folder; of S3 its folders are buckets.
        url: without a slash at its end.
        faults: those that are left.
        requests: method, path and range of each request so far.
        queries: what stood behind `?` in them, and the header `Authorization`.
        connections: that were opened so far.
        pause_s: before each piece of 64 KiB.
        ranges: whether parts can be asked for.
        shift: bytes by which the parts that are sent begin before those that were asked for.
        short: bytes that are missing at the end of answers of more than one byte.
        encoding: of files, as the server says.
    """

    root: Path
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    queries: list[tuple[str, str]] = field(default_factory=list)
    connections: int = 0
    pause_s: float = 0.0
    ranges: bool = True
    shift: int = 0
    short: int = 0
    encoding: str = ""
    lock: Any = field(default_factory=threading.Lock)

    def fault(self, path: str, *, listing: bool) -> Fault | None:
        """The next fault for a request."""
        with self.lock:
            for fault in self.faults:
                if fault.times and path.endswith(fault.of) and (fault.on_listing or not listing):
                    fault.times -= 1
                    return fault
        return None

    def fetched(self) -> list[str]:
        """The paths of whose content more than a byte was asked for."""
        return [path for method, path, part in self.requests if method == "GET" and part != "bytes=0-0"]


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    """Serve a folder, by plain HTTP and by what S3's clients ask for."""
    server = Server(root)
    handler = type("Handler", (_Handler,), {"of": server})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=[0.02])
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    of: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body waits 40 ms for its header to be acknowledged

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that has gone
            super().handle()

    def setup(self) -> None:
        super().setup()
        with self.of.lock:
            self.of.connections += 1

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        name, query, part = unquote(asked.path), parse_qs(asked.query), self.headers.get("Range", "")
        self.of.requests.append((self.command, name, part))
        self.of.queries.append((asked.query, self.headers.get("Authorization", "")))
        listing = "list-type" in query or part == "bytes=0-0" or self.command == "HEAD"
        fault = self.of.fault(name, listing=listing)
        if fault is not None:
            fault.act()
            if fault.status:
                self._answer(fault.status, b"")
                return
        path = self.of.root / name.strip("/")
        if "list-type" in query:
            self._list_bucket(path, query)
        elif path.is_file():
            self._file(path, part, fault)
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _list_bucket(self, bucket: Path, query: dict[str, list[str]]) -> None:
        prefix, start = (query.get(key, [""])[0] for key in ("prefix", "continuation-token"))
        keys = sorted(str(each.relative_to(bucket)) for each in bucket.rglob("*") if each.is_file())
        keys = [key for key in keys if key.startswith(prefix) and key >= start]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{hashlib.md5(data).hexdigest()}"</ETag><Size>{len(data)}</Size></Contents>'
            for key in keys[:1000]
            for data in [(bucket / key).read_bytes()]
        )
        more = f"<NextContinuationToken>{escape(keys[1000])}</NextContinuationToken>" if len(keys) > 1000 else ""
        flag = str(bool(more)).lower()
        if not bucket.is_dir():
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            return
        xml = f'<?xml version="1.0"?><ListBucketResult><IsTruncated>{flag}</IsTruncated>{more}{rows}</ListBucketResult>'
        self._answer(200, xml.encode(), Content_Type="application/xml")

    def _file(self, path: Path, part: str, fault: Fault | None) -> None:
        data = path.read_bytes()
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        if (wanted := self.headers.get("If-Match")) and wanted != etag:
            self._answer(412, b"")
            return
        self.send_response(206 if part and self.of.ranges else 200)
        body = data
        if part and self.of.ranges:
            asked, _, last = part.removeprefix("bytes=").partition("-")
            first = max(0, int(asked) - self.of.shift)
            body = data[first : int(last or len(data)) - int(asked) + first + 1]
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(data)}")
        body = body[: max(1, len(body) - self.of.short)]
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if self.of.encoding:
            self.send_header("Content-Encoding", self.of.encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if fault is not None:
            fault.after()
        for start in range(0, len(body), 1 << 16):
            time.sleep(self.of.pause_s)
            try:
                self.wfile.write(body[start : start + (1 << 16)])
            except OSError:
                self.close_connection = True
                return
