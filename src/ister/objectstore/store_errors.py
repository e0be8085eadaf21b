"""Errors of opendal and of the operating system as Ister's own, without credentials.

Owns: which error becomes which, once, and what of its text may be shown. Does not own: what is
repeated.

opendal's errors are classes without a common base, and its file objects raise OSError instead;
the text of both begins with the kind (`NotFound (permanent) at stat, …`), so the kind is taken
from there or from the class. Of the text only the summary and the source are kept: the context
beside them carries addresses with query strings, in which a signature may stand. What is kept is
cleaned of every value that the store was given as a secret and of everything that looks like one.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Final

from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    DiskError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)

_HIDDEN: Final = "[hidden]"
_TEXT_CHARACTERS_MAX: Final = 300
_SECRET_CHARACTERS_MIN: Final = 4
"""Shorter values are no secrets, and hiding them would hide half of a text."""

_LOOKS_SECRET: Final = (
    re.compile(r"(?i)\b(authorization|x-amz-security-token|x-goog-[\w-]*token)\b\W{1,4}[^\n\"}]*"),
    re.compile(r"(?i)\bx-(?:amz|goog|ms)-(?:signature|credential|security-token)=[^&\s\"]*"),
    re.compile(r"(?i)\b(credential|signature|sig|token|awsaccesskeyid)=[^&,\s\"]*"),
    re.compile(r"(?i)\bbearer\s+[\w.~+/-]+=*"),
    re.compile(r"(?<=://)[^/\s@]+@"),
)
_KIND: Final = re.compile(r"^([A-Z]\w+) \((?:temporary|permanent|persistent)\)")
_CODE: Final = re.compile(r'\bcode: "(\w+)"')
_SUMMARY: Final = re.compile(r"=> (.*?)(?:, source: |\n\n|$)", re.DOTALL)
_SOURCE: Final = re.compile(r"(?:, source: |Source:\s+)(.*?)(?:\n\n|$)", re.DOTALL)
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")

_DENIED_CODES: Final = frozenset(
    {
        "AccessDenied",
        "AccountProblem",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidSecurity",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_NO_CREDENTIALS: Final = ("failed to load signing credential", "no valid credential")
_NO_BUCKET_CODES: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_UNSUPPORTED_CODES: Final = frozenset({"NotImplemented", "MethodNotAllowed"})

_FULL: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


def error_kind(error: BaseException) -> str:
    """The kind that opendal gives an error, such as `NotFound`; empty where there is none."""
    found = _KIND.match(str(error))
    return found[1] if found else ""


def error_code(error: BaseException) -> str:
    """The store's own code of an error, such as `NoSuchUpload`; empty where there is none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def redact(text: str, secrets: Sequence[str]) -> str:
    """Returns the text without the given secrets, and without anything that looks like one."""
    for secret in secrets:
        if len(secret) >= _SECRET_CHARACTERS_MIN:
            text = text.replace(secret, _HIDDEN)
    for pattern in _LOOKS_SECRET:
        text = pattern.sub(_HIDDEN, text)
    return text


def map_store_error(
    error: BaseException,
    action: str,
    key: str,
    *,
    location: str,
    is_local: bool = False,
    secrets: Sequence[str] = (),
) -> IsterError:
    """Turns an error of opendal or of the operating system into one of ours.

    Its `__cause__` is the original, unless that one carries a secret. To be raised outside of the
    `except` block, or the original stays reachable as the context.

    `action` is what was tried, as a verb; `location` names the store for people. With `is_local`,
    numbers of the operating system tell of files, not of a network. Values in `secrets` must not be
    shown.
    """
    if isinstance(error, IsterError):
        return _map_own(error, action)
    mapped = _map(error, action, f"{location.rstrip('/')}/{key}", is_local, secrets)
    original = str(error)
    if redact(original, secrets) == original:
        mapped.__cause__ = error
    return mapped


def _map_own(error: IsterError, action: str) -> IsterError:
    """Errors of the file system seam are ours already; only what is refused has its own class."""
    if isinstance(error, DiskError) and error.errno in _REFUSED:
        return PermissionDeniedError(f"{action} failed: {error.message}", path=error.path)
    return error


def _map(
    error: BaseException, action: str, path: str, is_local: bool, secrets: Sequence[str]
) -> IsterError:
    original = str(error)
    kind, code = error_kind(error) or type(error).__name__, error_code(error)
    number = _os_number(error, original) if is_local else None
    text = f"{action} failed: {_summary(error, kind, code, secrets)}"
    if kind in ("ConditionNotMatch", "AlreadyExists", "FileExistsError"):
        return AlreadyExistsError(text, path=path)
    if code in _NO_BUCKET_CODES:
        return NotFoundError(text, path=path, hint="create the bucket, or fix storage.cloud.root")
    if kind == "PermissionDenied" or code in _DENIED_CODES or number in _REFUSED:
        return PermissionDeniedError(text, path=path, hint="check the credentials and their rights")
    if any(phrase in original for phrase in _NO_CREDENTIALS):
        return PermissionDeniedError(
            text, path=path, hint="set credentials in storage.cloud.options or the environment"
        )
    if number in _FULL:
        return CapacityError(text, path=path, hint="free disk space; writing then resumes")
    if kind in ("NotFound", "NotADirectory", "IsADirectory") or number in _NO_FILE:
        return NotFoundError(text, path=path)
    if kind == "Unsupported" or code in _UNSUPPORTED_CODES:
        return UnsupportedOperationError(text, path=path)
    return UnavailableError(text, path=path)


def _os_number(error: BaseException, text: str) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(text)
    return int(found[1]) if found else None


def _summary(error: BaseException, kind: str, code: str, secrets: Sequence[str]) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    original = str(error)
    parts = [f"{kind} {code}".strip()]
    for pattern in (_SUMMARY, _SOURCE):
        found = pattern.search(original)
        # What follows a brace is the store's own answer, parsed; its code and message are enough.
        if found and (part := _message(found[1])):
            parts.append(part)
    return redact(": ".join(parts), secrets)[:_TEXT_CHARACTERS_MAX]


def _message(text: str) -> str:
    found = re.search(r'\bmessage: "((?:[^"\\]|\\.)*)"', text)
    return " ".join((found[1] if found else text).split())
