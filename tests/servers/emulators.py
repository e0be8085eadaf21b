"""Emulators of Azure's and Google's object stores, installed when a test first needs them.

Azurite comes from npm, fake-gcs-server from Go's module proxy; both go into the environment of the
tests and stay there. Where npm or Go is missing, the test is skipped.

fake-gcs-server has no multipart uploads of the XML API, which opendal uses for objects of more than
one part. `_Parts` stands before it and keeps the parts until they are completed, as Google's
description of that API says. So requests of parts are checked against that description alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from .s3 import server_directory, server_process

CONTAINER = "history"
_AZURITE = "azurite@3.35.0"
_FAKE_GCS = "github.com/fsouza/fake-gcs-server@v1.56.1"
_ACCOUNT = "ister"
_ACCOUNT_KEY = base64.b64encode(b"a key of the emulator's, for tests").decode()
_INSTALL_SECONDS = 2400.0


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """Where an emulator listens, and what opens a store on it."""

    backend: str
    root: str
    options: dict[str, str]


@contextmanager
def azurite() -> Iterator[Emulator]:
    """Azurite's blob service with an empty container. Verifies signatures."""
    binary = _install("azurite", "npm") / "node_modules" / ".bin" / "azurite-blob"
    with (
        server_directory("azurite") as directory,
        server_process(
            lambda port: [
                *(str(binary), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
                *("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"),
            ],
            directory=directory,
            environment={**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_ACCOUNT_KEY}"},
        ) as port,
    ):
        _make_container(port)
        yield Emulator(
            backend="azblob",
            root=f"azblob://{CONTAINER}",
            options={
                "endpoint": f"http://127.0.0.1:{port}/{_ACCOUNT}",
                "account_name": _ACCOUNT,
                "account_key": _ACCOUNT_KEY,
            },
        )


def _make_container(port: int) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + 12 * "\n" + "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed += f"/{_ACCOUNT}/{_ACCOUNT}/{CONTAINER}\nrestype:container"
    digest = hmac.new(base64.b64decode(_ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    path = f"/{_ACCOUNT}/{CONTAINER}?restype=container"
    status, text = _ask(port, "PUT", path, b"", headers)
    assert status == 201, f"Azurite did not make a container: {status} {text!r}"


@contextmanager
def fake_gcs() -> Iterator[Emulator]:
    """fake-gcs-server with an empty bucket. Verifies no signatures."""
    binary = _install("fake-gcs-server", "go") / "fake-gcs-server"
    with (
        server_directory("gcs") as directory,
        server_process(
            lambda port: [
                *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
                *("-backend", "memory", "-log-level", "error", "-public-host", f"127.0.0.1:{port}"),
            ],
            directory=directory,
            environment=dict(os.environ),
        ) as port,
    ):
        bucket = json.dumps({"name": CONTAINER}).encode()
        status, text = _ask(port, "POST", "/storage/v1/b?project=p", bucket, _JSON)
        assert status == 200, f"fake-gcs-server did not make a bucket: {status} {text!r}"
        with _parts_before(port) as front:
            yield Emulator(
                backend="gcs",
                root=f"gs://{CONTAINER}",
                options={
                    "endpoint": f"http://127.0.0.1:{front}",
                    "skip_signature": "true",
                    "disable_vm_metadata": "true",
                    "disable_config_load": "true",
                },
            )


_JSON = {"Content-Type": "application/json"}


def _ask(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {**headers, "Content-Length": str(len(body))})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


# -- multipart uploads of Google's XML API --------------------------------------------------------


class _Parts(BaseHTTPRequestHandler):
    """Answers the requests of multipart uploads, and passes all others on."""

    protocol_version = "HTTP/1.1"
    server: _Front

    def _serve(self) -> None:
        body = self._read_body()
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        if "uploads" in query and self.command == "POST":
            self._begin()
        elif "uploadId" in query:
            self._continue(unquote(parts.path), query, body)
        else:
            self._pass_on(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _begin(self) -> None:
        upload = f"upload-{next(self.server.numbers)}"
        self.server.uploads[upload] = {}
        name = "InitiateMultipartUploadResult"
        self._answer(200, f"<{name}><UploadId>{upload}</UploadId></{name}>".encode())

    def _continue(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        upload = query["uploadId"][0]
        parts = self.server.uploads.get(upload)
        if parts is None:
            self._answer(404, b"<Error><Code>NoSuchUpload</Code><Message>gone</Message></Error>")
        elif self.command == "PUT":
            parts[int(query["partNumber"][0])] = body
            self._answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        elif self.command == "DELETE":
            del self.server.uploads[upload]
            self._answer(204, b"")
        else:
            self._complete(upload, path, body)

    def _complete(self, upload: str, path: str, body: bytes) -> None:
        parts = self.server.uploads.pop(upload)
        listed = re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())
        tags = re.findall(r"<ETag>(.*?)</ETag>", body.decode())
        for number, tag in zip(map(int, listed), tags, strict=True):
            assert tag.strip('"').removeprefix("&quot;").removesuffix("&quot;") == (
                hashlib.md5(parts[number]).hexdigest()
            ), f"part {number} has the tag {tag}"
        bucket, _, name = path.removeprefix("/").partition("/")
        status, text = _ask(
            self.server.behind,
            "POST",
            f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}",
            b"".join(parts[number] for number in map(int, listed)),
            {"Content-Type": "application/octet-stream"},
        )
        assert status == 200, f"{status} {text!r}"
        result = "CompleteMultipartUploadResult"
        self._answer(200, f"<{result}><ETag>{upload}</ETag></{result}>".encode())

    def _pass_on(self, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        try:
            own = {"host", "content-length", "transfer-encoding", "connection"}
            headers = {name: text for name, text in self.headers.items() if name.lower() not in own}
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            dropped = {"transfer-encoding", "content-length", "connection"}
            kept = {
                name: value for name, value in reply.headers.items() if name.lower() not in dropped
            }
            self._answer(reply.status, reply.read(), kept)
        finally:
            connection.close()

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Front(ThreadingHTTPServer):
    """The server before fake-gcs-server."""

    daemon_threads = True

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _Parts)
        self.behind = behind
        self.numbers = itertools.count(1)
        self.uploads: dict[str, dict[int, bytes]] = {}


@contextmanager
def _parts_before(port: int) -> Iterator[int]:
    with _Front(port) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


# -- installation ---------------------------------------------------------------------------------


def _install(name: str, program: str) -> Path:
    """The directory of an emulator; it is complete if it is there."""
    target = Path(sys.prefix, "emulators", name)
    if target.exists():
        return target
    if shutil.which(program) is None:
        pytest.skip(f"{name} takes {program} to install, which is not on this machine")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary, name)
        made.mkdir()
        environment = dict(os.environ)
        if program == "npm":
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(made), _AZURITE]
        else:
            # Modules of 700 MB, of which nothing is needed afterwards.
            command = ["go", "install", "-modcacherw", _FAKE_GCS]
            environment |= {
                "GOPATH": f"{temporary}/modules",
                "GOCACHE": f"{temporary}/cache",
                "GOBIN": str(made),
            }
        done = subprocess.run(
            command,
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
        )
        assert done.returncode == 0, f"{name} cannot be installed: {done.stderr[-2000:]}"
        made.rename(target)
    return target
