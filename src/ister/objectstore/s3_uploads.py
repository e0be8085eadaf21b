"""Lists and aborts incomplete multipart uploads of an S3 bucket, which opendal cannot do.

An upload that was neither completed nor aborted keeps its parts: they are not listed as objects,
and they are billed. Owns: three requests (ListMultipartUploads, AbortMultipartUpload,
GetBucketLifecycleConfiguration) and their signature. Does not own: which uploads are aborted.

Credentials come from the settings or from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. With other
credentials (a role, a profile) only opendal works, and there is no `S3Uploads`.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import ssl
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from ister.clock import Clock
from ister.errors import (
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)

_TIMEOUT_SECONDS: Final = 10.0
_ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Upload:
    """An incomplete multipart upload."""

    key: str
    """Below the store's root."""
    id: str
    initiated_at: float
    """When it began, in seconds since the Unix epoch."""


class S3Uploads:
    """The incomplete multipart uploads below a store's root. Thread-safe.

    `settings` are the S3 store's options, as opendal names them; `clock` is for the signature.
    """

    def __init__(
        self, settings: Mapping[str, str], *, clock: Clock, timeout_seconds: float
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        given = "access_key_id" in settings
        self._key_id = settings["access_key_id"] if given else os.environ["AWS_ACCESS_KEY_ID"]
        self._secret = (
            settings["secret_access_key"] if given else os.environ["AWS_SECRET_ACCESS_KEY"]
        )
        self._token = settings.get("session_token") or (
            None if given else os.environ.get("AWS_SESSION_TOKEN")
        )
        self._region = _region(settings) or "us-east-1"
        endpoint = settings.get("endpoint") or f"https://s3.{self._region}.amazonaws.com"
        parts = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        self._is_tls = parts.scheme != "http"
        bucket = settings["bucket"]
        if settings.get("enable_virtual_host_style") == "true":
            self._host, self._path = f"{bucket}.{parts.netloc}", "/"
        else:
            self._host, self._path = parts.netloc, f"{parts.path.rstrip('/')}/{bucket}"
        root = settings.get("root", "").strip("/")
        self._root = f"{root}/" if root else ""

    @classmethod
    def open(
        cls, settings: Mapping[str, str], *, clock: Clock, timeout_seconds: float = _TIMEOUT_SECONDS
    ) -> S3Uploads | None:
        """Creates one for these settings; None if they are not enough to sign requests."""
        given = "access_key_id" in settings
        in_environment = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(os.environ)
        roles = {"role_arn", "allow_anonymous", "skip_signature"} & set(settings)
        if roles or not (given or in_environment):
            return None
        if "endpoint" not in settings and _region(settings) is None:
            return None
        return cls(settings, clock=clock, timeout_seconds=min(timeout_seconds, _TIMEOUT_SECONDS))

    def list(self, prefix: str = "") -> Iterator[Upload]:
        """Lists the incomplete uploads of keys that begin with `prefix`.

        Raises:
            PermissionDeniedError, UnsupportedOperationError, UnavailableError: The store does not
                list them.
        """
        query = {"uploads": "", "prefix": self._root + prefix}
        while True:
            try:
                tree = self._ask("GET", self._path, query)
            except NotFoundError as error:
                # How rclone answers for a bucket that has had no multipart upload yet.
                if "NoSuchUpload" in error.message:
                    return
                raise
            for item in tree.iter():
                if _name(item) != "Upload":
                    continue
                fields = {_name(child): child.text or "" for child in item}
                key = fields.get("Key", "")
                if key.startswith(self._root + prefix):
                    yield Upload(
                        key.removeprefix(self._root),
                        fields.get("UploadId", ""),
                        datetime.fromisoformat(fields["Initiated"]).timestamp(),
                    )
            fields = {_name(child): child.text or "" for child in tree}
            if fields.get("IsTruncated") != "true" or not fields.get("NextKeyMarker"):
                return
            query |= {
                "key-marker": fields["NextKeyMarker"],
                "upload-id-marker": fields.get("NextUploadIdMarker", ""),
            }

    def abort(self, upload: Upload) -> None:
        """Aborts an upload and removes its parts; does nothing if it has ended.

        Raises:
            PermissionDeniedError, UnavailableError: It may still be there.
        """
        key = urllib.parse.quote(self._root + upload.key, safe="/-_.~")
        try:
            self._ask("DELETE", f"{self._path.rstrip('/')}/{key}", {"uploadId": upload.id})
        except NotFoundError:
            return

    def has_rule(self) -> bool | None:
        """Whether a lifecycle rule of the bucket aborts incomplete uploads; None if unknown."""
        try:
            tree = self._ask("GET", self._path, {"lifecycle": ""})
        except NotFoundError:
            return False
        except IsterError:
            return None
        for rule in (item for item in tree.iter() if _name(item) == "Rule"):
            inside = {_name(item): (item.text or "").strip() for item in rule.iter()}
            if (
                inside.get("Status") == "Enabled"
                and "AbortIncompleteMultipartUpload" in inside
                and self._root.startswith(inside.get("Prefix", ""))
            ):
                return True
        return False

    def _ask(self, method: str, path: str, query: Mapping[str, str]) -> ET.Element:
        line = "&".join(
            f"{urllib.parse.quote(name, safe='-_.~')}={urllib.parse.quote(value, safe='-_.~')}"
            for name, value in sorted(query.items())
        )
        headers = self._sign(method, path, line)
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, timeout=self._timeout_seconds)
        try:
            connection.request(method, f"{path}?{line}", headers=headers)
            answer = connection.getresponse()
            body = answer.read(_ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            raise UnavailableError(f"the store does not respond: {type(error).__name__}") from error
        finally:
            connection.close()
        if answer.status == http.HTTPStatus.NO_CONTENT:
            return ET.Element("empty")
        try:
            tree = ET.fromstring(body)  # noqa: S314 - the store is trusted with all data
        except ET.ParseError as error:
            if answer.status == http.HTTPStatus.OK:
                raise UnavailableError(f"{method}: the answer is not XML") from error
            tree = ET.Element("empty")
        if answer.status == http.HTTPStatus.OK:
            return tree
        code = next((item.text for item in tree.iter() if _name(item) == "Code"), None)
        message = f"{method}: {answer.status} {code or answer.reason}"
        if answer.status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            raise PermissionDeniedError(message)
        if answer.status == http.HTTPStatus.NOT_FOUND:
            raise NotFoundError(message)
        if answer.status in (http.HTTPStatus.NOT_IMPLEMENTED, http.HTTPStatus.METHOD_NOT_ALLOWED):
            raise UnsupportedOperationError(message)
        raise UnavailableError(message)

    def _sign(self, method: str, path: str, query: str) -> dict[str, str]:
        """Returns the request's headers, signed with AWS Signature Version 4."""
        now = datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC)
        time, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        headers = {
            "host": self._host,
            "x-amz-content-sha256": _EMPTY_SHA256,
            "x-amz-date": time,
        }
        if self._token:
            headers["x-amz-security-token"] = self._token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = "\n".join((method, path, query, lines, names, _EMPTY_SHA256))
        scope = f"{day}/{self._region}/s3/aws4_request"
        text = "\n".join(
            ("AWS4-HMAC-SHA256", time, scope, hashlib.sha256(request.encode()).hexdigest())
        )
        key = f"AWS4{self._secret}".encode()
        for part in (day, self._region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._key_id}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return headers


def _region(settings: Mapping[str, str]) -> str | None:
    return (
        settings.get("region")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
    )


def _name(element: ET.Element) -> str:
    """The tag without its namespace, which differs between stores."""
    return element.tag.rpartition("}")[2]
