"""Which error becomes which, and what of its text is shown."""

import errno

import opendal.exceptions as raised

from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    DiskError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.objectstore.store_errors import map_store_error, redact
from tests.support.cases import each


def s3(kind, code, message="Something."):
    """An error as opendal words one that S3 answered."""
    return (
        f'{kind} (permanent) at write => S3Error {{ code: "{code}", message: "{message}", '
        'resource: "", request_id: "1" }\n\nContext:\n   service_operation: PutObject\n'
        "   uri: http://127.0.0.1:1/bucket/key?uploadId=7\n"
        '   response: Parts { status: 400, version: HTTP/1.1, headers: {"date": "x"} }\n'
    )


def local(action, number, text):
    """An error as opendal words one of a file."""
    return (
        f"Unexpected (temporary) at {action} => {text.lower()}\n\nContext:\n   service: fs\n\n"
        f"Source:\n   {text} (os error {number})\n\nBacktrace:\n   0: <unknown>\n"
    )


REMOTE = [
    (raised.ConditionNotMatch, s3("ConditionNotMatch", "PreconditionFailed"), AlreadyExistsError),
    (raised.AlreadyExists, "AlreadyExists (permanent) at write => x", AlreadyExistsError),
    (raised.NotFound, s3("NotFound", "NoSuchKey"), NotFoundError),
    (raised.NotFound, "NotFound (permanent) at stat\n\nContext:\n  service: s3", NotFoundError),
    (raised.ConfigInvalid, s3("ConfigInvalid", "NoSuchBucket"), NotFoundError),
    (raised.PermissionDenied, s3("PermissionDenied", "AccessDenied"), PermissionDeniedError),
    (raised.Unexpected, s3("Unexpected", "InvalidAccessKeyId"), PermissionDeniedError),
    (raised.Unexpected, s3("Unexpected", "SignatureDoesNotMatch"), PermissionDeniedError),
    (raised.Unexpected, s3("Unexpected", "ExpiredToken"), PermissionDeniedError),
    (
        raised.Unexpected,
        "Unexpected (permanent) at stat => x\n\nSource:\n   failed to load signing credential",
        PermissionDeniedError,
    ),
    (raised.RateLimited, s3("RateLimited", "SlowDown"), UnavailableError),
    (raised.Unexpected, s3("Unexpected", "InternalError"), UnavailableError),
    (raised.Unexpected, "Unexpected (temporary) at read => io timeout reached", UnavailableError),
    (raised.Conflict, s3("Conflict", "ConditionalRequestConflict"), UnavailableError),
    (raised.Unsupported, "Unsupported (permanent) at copy => no", UnsupportedOperationError),
    (raised.Unexpected, s3("Unexpected", "NotImplemented"), UnsupportedOperationError),
    (OSError, "NotFound (permanent) at read, context: { a: b } => gone", NotFoundError),
    (OSError, "RateLimited (temporary) at write, context: { } => slow", UnavailableError),
    (OSError, "PermissionDenied (permanent) at write, context: { } => no", PermissionDeniedError),
    # A network's numbers are no file's: these tell of a connection.
    (raised.Unexpected, local("write", 13, "Permission denied"), UnavailableError),
]


@each(("kind", "text", "expected"), REMOTE)
def test_error_of_a_store_becomes_the_one_that_tells_what_to_do(kind, text, expected):
    original = kind(text)
    mapped = map_store_error(original, "put", "a/b", location="s3://bucket/prefix")
    assert type(mapped) is expected
    assert mapped.path == "s3://bucket/prefix/a/b"
    assert mapped.message.startswith("put failed: ")
    assert mapped.__cause__ is original


@each(
    ("number", "expected"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EMFILE, CapacityError),
        (errno.EACCES, PermissionDeniedError),
        (errno.EROFS, PermissionDeniedError),
        (errno.ENOENT, NotFoundError),
        (errno.ENOTDIR, NotFoundError),
        (errno.EISDIR, NotFoundError),
        (errno.EIO, UnavailableError),
    ],
)
def test_error_of_a_file_is_told_by_its_number(number, expected):
    for original in (
        raised.Unexpected(local("write", number, "Text")),
        OSError(f"Unexpected (temporary) at write => text, source: Text (os error {number})"),
        OSError(number, "Text"),
    ):
        mapped = map_store_error(original, "put", "a", location="fs:///x", is_local=True)
        assert type(mapped) is expected


def test_refused_file_of_the_file_system_seam_is_a_denial():
    mapped = map_store_error(
        DiskError("open failed: Permission denied", errno=errno.EACCES, path="/x"),
        "put",
        "a",
        location="fs:///x",
    )
    assert type(mapped) is PermissionDeniedError
    kept = DiskError("open failed", errno=errno.EIO, path="/x")
    assert map_store_error(kept, "put", "a", location="fs:///x") is kept


def test_text_has_the_stores_words_and_not_their_surroundings():
    error = raised.Unexpected(s3("Unexpected", "EntityTooLarge", "Too much of it."))
    text = str(map_store_error(error, "put", "a", location="s3://b"))
    assert "EntityTooLarge" in text
    assert "Too much of it." in text
    for part in ("uploadId", "Parts", "headers", "127.0.0.1"):
        assert part not in text
    error = raised.Unexpected(local("write", 104, "Connection reset by peer"))
    assert "Connection reset by peer" in str(map_store_error(error, "put", "a", location="s3://b"))


@each(
    "text",
    [
        "Authorization: AWS4-HMAC-SHA256 Credential=CANARY/x, Signature=CANARY",
        '"authorization": "Bearer CANARY"',
        "http://host/key?X-Amz-Credential=CANARY%2F2026&X-Amz-Signature=CANARY&x=1",
        "http://host/key?X-Amz-Security-Token=CANARY",
        "https://account.blob/x?sv=1&sig=CANARY",
        "https://CANARY:CANARY@host/path",
        "<AWSAccessKeyId=CANARY",
        "bearer CANARY.CANARY-CANARY",
    ],
)
def test_whatever_looks_like_a_secret_is_hidden(text):
    assert "CANARY" not in redact(text, ())
    mapped = map_store_error(
        raised.Unexpected(f"Unexpected (temporary) at write => {text}\n\nContext:\n  {text}"),
        "put",
        "a",
        location="s3://b",
    )
    assert "CANARY" not in str(mapped)
    assert mapped.__cause__ is None


def test_secret_that_a_store_repeats_is_hidden_wherever_it_stands():
    error = raised.Unexpected(s3("Unexpected", "Odd", "no such key CANARYSECRET here"))
    mapped = map_store_error(error, "put", "a", location="s3://b", secrets=("CANARYSECRET",))
    assert "CANARY" not in str(mapped)
    assert "no such key [hidden] here" in str(mapped)
    assert mapped.__cause__ is None
    assert mapped.__context__ is None
