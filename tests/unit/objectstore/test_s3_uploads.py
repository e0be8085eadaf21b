"""Multipart uploads that came to nothing: aborted at once, or collected when they are old."""

import xml.etree.ElementTree as ET

import boto3
import pytest

from ister.clock import ManualClock, SystemClock
from ister.errors import IsterError, PermissionDeniedError
from ister.objectstore.opendal_store import open_store
from ister.objectstore.s3_uploads import S3Uploads, Upload
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, moto_server, rclone_server
from tests.support.cases import each

MIB = 1024 * 1024
CHUNK = 5 * MIB
DAY = 24 * 3600


@pytest.fixture(scope="module", params=[moto_server, rclone_server], ids=["moto", "rclone"])
def server(request):
    with request.param() as server:
        yield server


@pytest.fixture
def open_it(server, request):
    opened = []

    def open_it(*, clock=None, options=None):
        root = f"s3://{server.bucket}/{request.node.name.partition('[')[0]}"
        options = {**server.options(), **(options or {})}
        store = open_store("s3", root, options, clock=clock or SystemClock(), retries=0)
        opened.append(store)
        return store

    yield open_it
    for store in opened:
        store.close()


def begin(store, key):
    """An upload of two parts that has not ended."""
    writer = store.open_writer(key, chunk_bytes=CHUNK, concurrent_parts=1)
    for _ in range(3):
        writer.write(bytes(CHUNK))
    return writer


def leave(store, key):
    """As a killed process does."""
    writer = begin(store, key)
    writer._file = None


def incomplete(store):
    return [upload.key for upload in store._uploads.list()]


def test_upload_that_is_given_up_leaves_no_parts(open_it):
    store = open_it()
    other = begin(store, "objects/other")
    writer = begin(store, "objects/one")
    assert set(incomplete(store)) == {"objects/one", "objects/other"}
    writer.abort()
    assert incomplete(store) == ["objects/other"]
    other.close()
    assert incomplete(store) == []
    assert [found.key for found in store.list("objects/")] == ["objects/other"]


def test_upload_that_fails_leaves_no_parts(open_it, monkeypatch):
    store = open_it()
    writer = begin(store, "objects/one")
    assert incomplete(store) == ["objects/one"]

    def fail(file):
        raise OSError("the network is gone")

    monkeypatch.setattr(writer, "_complete", fail)
    with pytest.raises(IsterError):
        writer.close()
    assert incomplete(store) == []


def test_parts_of_a_killed_process_are_collected_when_they_are_old(server, open_it):
    if server.name != "rclone":
        pytest.skip("with moto every upload began in 2010")
    store = open_it()
    leave(store, "objects/one")
    assert store.remove_stale_parts(0) == 0
    assert incomplete(store) == ["objects/one"]
    tomorrow = ManualClock(now_ms=SystemClock().now_ns() // 1_000_000 + (DAY + 60) * 1000)
    store._clock = tomorrow
    assert store.remove_stale_parts(3600) == 1
    assert incomplete(store) == []


def test_other_prefixes_of_the_bucket_are_left_alone(server, open_it):
    store = open_it()
    elsewhere = open_store(
        "s3", f"s3://{server.bucket}/elsewhere", server.options(), clock=SystemClock()
    )
    leave(elsewhere, "objects/one")
    store._clock = ManualClock(now_ms=SystemClock().now_ns() // 1_000_000 + 2 * DAY * 1000)
    assert store.remove_stale_parts(0) == 0
    assert incomplete(elsewhere) == ["objects/one"]
    elsewhere._abort_uploads("")
    elsewhere.close()


def test_store_that_can_be_listed_needs_no_rule(open_it):
    assert open_it().probe().leftovers == ""


def test_bucket_that_never_had_an_upload_can_be_listed():
    with rclone_server() as server:
        store = open_store(
            "s3", f"s3://{server.bucket}/new", server.options(), clock=SystemClock(), retries=0
        )
        try:
            assert incomplete(store) == []
            assert store.probe().leftovers == ""
        finally:
            store.close()


def test_store_that_cannot_be_listed_says_that_a_rule_is_needed(open_it, monkeypatch):
    def refuse(self, prefix=""):
        raise PermissionDeniedError("GET: 403 AccessDenied")

    monkeypatch.setattr(S3Uploads, "list", refuse)
    rules = iter([None, False, True])
    monkeypatch.setattr(S3Uploads, "has_rule", lambda self: next(rules))
    for _ in range(2):
        assert (
            "cannot list incomplete uploads (GET: 403 AccessDenied)" in open_it().probe().leftovers
        )
    assert open_it().probe().leftovers == ""
    writer = begin(open_it(), "objects/one")
    writer.abort()  # raises nothing


def test_wrong_secret_is_refused(server, open_it):
    if server.name != "rclone":
        pytest.skip("moto verifies no signatures")
    uploads = open_it(options={"secret_key": "WRONG"})._uploads
    with pytest.raises(PermissionDeniedError):
        list(uploads.list())


def test_rule_of_the_bucket_is_seen(server, open_it):
    if server.name != "moto":
        pytest.skip("rclone has no rules")
    uploads = open_it()._uploads
    assert uploads.has_rule() is False
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    for prefix, expected in (("other/", False), ("", True)):
        rule = {
            "ID": "parts",
            "Filter": {"Prefix": prefix},
            "Status": "Enabled",
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
        }
        client.put_bucket_lifecycle_configuration(
            Bucket=server.bucket, LifecycleConfiguration={"Rules": [rule]}
        )
        assert uploads.has_rule() is expected


def test_many_uploads_are_listed_page_by_page(monkeypatch):
    def page(key, number, more):
        return (
            f"<R><IsTruncated>{more}</IsTruncated><NextKeyMarker>{key}</NextKeyMarker>"
            f"<Upload><Key>r/{key}</Key><UploadId>{number}</UploadId>"
            f"<Initiated>2026-01-01T00:00:0{number}.000Z</Initiated></Upload></R>"
        )

    pages = iter([page("a", 0, "true"), page("b", 1, "false")])
    asked = []

    def ask(self, method, path, query):
        asked.append(dict(query))
        return ET.fromstring(next(pages))

    monkeypatch.setattr(S3Uploads, "_ask", ask)
    settings = {"access_key_id": "a", "secret_access_key": "b", "bucket": "c", "root": "/r"}
    uploads = S3Uploads.open({**settings, "region": "eu-1"}, clock=SystemClock())
    assert list(uploads.list()) == [Upload("a", "0", 1767225600.0), Upload("b", "1", 1767225601.0)]
    assert asked[1]["key-marker"] == "a"


@each("settings", [{}, {"role_arn": "arn", "access_key_id": "a", "secret_access_key": "b"}])
def test_credentials_that_only_opendal_knows_are_not_guessed(settings, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    settings = {"bucket": "c", "region": "eu-1", **settings}
    assert S3Uploads.open(settings, clock=SystemClock()) is None
