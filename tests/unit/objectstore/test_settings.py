"""What `storage.cloud` may say, and that secrets go nowhere."""

import builtins
import logging

import pytest

from ister.base.clock import SystemClock
from ister.errors import ConfigError, IsterError, PermissionDeniedError
from ister.objectstore.backends import hidden_values, parse_backend
from ister.objectstore.opendal_store import open_store
from tests.servers.ports import free_port
from tests.support.cases import each

KEY, SECRET, TOKEN = "CANARYKEY00001", "CANARYSECRET0002", "CANARYTOKEN0003"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)


def settings(root="s3://bucket/pre/fix", backend="s3", **options):
    return parse_backend(backend, root, options).settings


def test_keys_of_the_configuration_become_opendals():
    found = settings(access_key="k", secret_key="s", session_token="t", region="eu-1")
    assert found["access_key_id"] == "k"
    assert found["secret_access_key"] == "s"
    assert found["session_token"] == "t"
    assert (found["bucket"], found["root"], found["region"]) == ("bucket", "/pre/fix", "eu-1")
    # What was given holds: neither files nor the machine's own role mix in.
    assert found["disable_config_load"] == found["disable_ec2_metadata"] == "true"


def test_without_keys_the_environment_is_asked():
    found = settings(region="eu-1")
    assert "access_key_id" not in found
    assert "disable_config_load" not in found


def test_endpoint_means_path_style_and_a_region():
    found = settings(endpoint="http://127.0.0.1:9000")
    assert found["region"] == "us-east-1"
    assert "enable_virtual_host_style" not in found
    found = settings(endpoint="http://x", virtual_host_style="true")
    assert found["enable_virtual_host_style"] == "true"


def test_amazon_itself_is_addressed_by_host():
    assert settings(region="x")["enable_virtual_host_style"] == "true"
    assert "enable_virtual_host_style" not in settings("s3://dotted.bucket", region="x")


def test_other_clouds_have_their_own_names():
    found = settings("gs://bucket/p", "gcs", credential_file="/key.json")
    assert (found["bucket"], found["credential_path"]) == ("bucket", "/key.json")
    assert settings("gcs://bucket", "gcs")["root"] == "/"
    found = settings("azblob://box/p", "azblob", account_name="acc", account_key="k")
    assert found["container"] == "box"
    assert found["endpoint"] == "https://acc.blob.core.windows.net"


@each(
    ("backend", "root", "options", "location"),
    [
        ("s3", "s3://bucket/pre/fix/", {"region": "x"}, "s3://bucket/pre/fix"),
        ("s3", "s3://bucket", {"region": "x"}, "s3://bucket"),
        ("gcs", "gs://bucket/p", {}, "gcs://bucket/p"),
        ("azblob", "azblob://box", {"account_name": "a"}, "azblob://box"),
        ("memory", "whatever", {}, "memory://"),
    ],
)
def test_store_says_where_it_is(backend, root, options, location):
    store = open_store(backend, root, options, clock=SystemClock())
    assert store.location == location
    assert repr(store) == f"<OpendalStore {location}>"


@each(
    ("backend", "root", "options", "named"),
    [
        ("ftp", "ftp://x", {}, "storage.cloud.backend"),
        ("", "", {}, "storage.cloud.backend"),
        ("S3", "s3://bucket", {}, "storage.cloud.backend"),
        ("s3", "", {}, "storage.cloud.root"),
        ("s3", "bucket/prefix", {}, "storage.cloud.root"),
        ("s3", "s3://", {}, "storage.cloud.root"),
        ("s3", "s3:///prefix", {}, "storage.cloud.root"),
        ("s3", "gs://bucket", {}, "storage.cloud.root"),
        ("s3", "s3://bucket/a/../b", {}, "storage.cloud.root"),
        ("s3", "s3://bucket/a//b", {}, "storage.cloud.root"),
        ("s3", f"s3://{KEY}:{SECRET}@bucket", {}, "storage.cloud.root"),
        ("s3", f"s3://bucket/p?secret={SECRET}", {}, "storage.cloud.root"),
        ("gcs", "s3://bucket", {}, "storage.cloud.root"),
        ("fs", "", {}, "storage.cloud.root"),
        ("fs", "s3://bucket", {}, "storage.cloud.root"),
        ("s3", "s3://bucket", {}, "storage.cloud.options"),
        ("s3", "s3://bucket", {"region": "x", "acess_key": SECRET}, "acess_key"),
        ("s3", "s3://bucket", {"region": "x", "access_key": KEY}, "secret_key"),
        ("fs", "/tmp/never-made", {"region": "x"}, "region"),
        ("azblob", "azblob://box", {}, "storage.cloud.options"),
        ("s3", "s3://bucket", {"region": "x", "bucket": "other"}, "options.bucket is not"),
        ("gcs", "gs://bucket", {"bucket": "other"}, "put it in storage.cloud.root"),
        ("azblob", "azblob://box", {"account_name": "a", "container": "x"}, "options.container"),
        ("gcs", "gs://bucket", {"root": "/other"}, "options.root"),
    ],
)
def test_wrong_setting_is_named_and_not_repeated(backend, root, options, named):
    with pytest.raises(ConfigError) as raised:
        open_store(backend, root, options, clock=SystemClock())
    assert named in str(raised.value)
    assert "CANARY" not in str(raised.value)


def test_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *details):
        if name.split(".")[0] == "opendal":
            raise ImportError(name)
        return real(name, *details)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install opendal"):
        open_store("memory", "", {}, clock=SystemClock())


def test_directory_that_may_not_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IsterError):
        open_store("fs", str(tmp_path / "file" / "below"), {}, clock=SystemClock())


def test_hidden_values_are_the_secret_ones(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    found = hidden_values(
        {"access_key": KEY, "session_token": TOKEN, "region": "r", "credential_file": "/f"}
    )
    assert set(found) == {KEY, SECRET, TOKEN}


def test_secrets_stand_in_no_error_log_or_representation(caplog):
    """Goal: credentials go nowhere. Method: every call against a port that nobody listens on."""
    caplog.set_level(logging.DEBUG)
    store = open_store(
        "s3",
        "s3://bucket/prefix",
        {
            "endpoint": f"http://127.0.0.1:{free_port()}",
            "access_key": KEY,
            "secret_key": SECRET,
            "session_token": TOKEN,
        },
        clock=SystemClock(),
        retries=1,
        sleep=lambda seconds: None,
    )
    writer = store.open_writer("a", chunk_bytes=5 << 20, concurrent_parts=1)
    texts = [repr(store), repr(writer), str(vars(store)["_operator"])]
    writer.write(b"x")
    for call in (
        writer.close,
        lambda: writer.write(b"x"),
        lambda: store.put("a", b"x"),
        lambda: store.put("a", b"x", if_absent=True),
        lambda: store.read("a", 0, 1),
        lambda: store.stat("a"),
        lambda: store.list(""),
        lambda: store.copy("a", "b"),
        lambda: store.delete("a"),
        store.probe,
    ):
        with pytest.raises(IsterError) as raised:
            call()
        error = raised.value
        while error is not None:
            texts += [str(error), repr(error), str(vars(error))]
            error = error.__cause__ or error.__context__
    store.close()
    texts += [record.getMessage() + str(vars(record)) for record in caplog.records]
    assert len(texts) > 30
    assert not [text for text in texts if "CANARY" in text]


def test_credentials_that_are_nowhere_are_a_denial(monkeypatch, tmp_path):
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    store = open_store(
        "s3",
        "s3://bucket",
        {"endpoint": f"http://127.0.0.1:{free_port()}", "disable_ec2_metadata": "true"},
        clock=SystemClock(),
    )
    with pytest.raises(PermissionDeniedError, match="credentials"):
        store.stat("a")
