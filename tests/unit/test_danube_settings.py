"""The keys of Danube's design documents: every YAML block loads, and means what it says there."""

import json
import os
import re

import pytest
import yaml

from ister.base.clock import SystemClock
from ister.base.limits import GIB, MIB
from ister.cli.config_check import find_deeper_problems
from ister.cli.main import main
from ister.config import Origin, examine_config, load_config
from ister.config.aliases import ALIASES
from ister.config.reference import settings, value_of
from ister.errors import ConfigError
from ister.topic.stores import open_objects
from tests.support.cases import each

KEYS = {"AWS_ACCESS_KEY_ID": "key-1", "AWS_SECRET_ACCESS_KEY": "secret-1"}

# The documents' blocks: what is written, and what it has to be here.

# "WAL + Cloud Persistence Design", as implemented: "Example Broker Configuration".
IMPLEMENTED = """\
storage:
  wal:
    dir: /var/lib/danube/wal
    cache_capacity: 2048
    fsync_interval_ms: 5000
    fsync_max_batch_bytes: 10485760
    rotate_max_bytes: 52428800
    rotate_max_seconds: 3600
  uploader:
    interval_seconds: 300
  cloud:
    backend: s3
    root: s3://my-bucket/danube
    options:
      region: us-east-1
      endpoint: https://s3.amazonaws.com
      access_key: ${AWS_ACCESS_KEY_ID}
      secret_key: ${AWS_SECRET_ACCESS_KEY}
"""
OPTIONS = {
    "region": "us-east-1",
    "endpoint": "https://s3.amazonaws.com",
    "access_key": "key-1",
    "secret_key": "secret-1",
}
# "WAL + Cloud Persistence Design", the proposal: "Configuration".
PROPOSED = """\
storage:
  mode: wal_cloud
  wal:
    dir: /var/lib/danube/wal
    fsync_interval_ms: 5
    retention:
      min_minutes: 60
      min_bytes: 107374182400
      active_subscription_grace_seconds: 300
  uploader:
    interval_seconds: 10
    max_batch_bytes: 8388608
    rotation:
      max_object_bytes: 134217728
      max_object_seconds: 300
  cloud:
    backend: s3
    root: s3://my-bucket/danube
    s3:
      region: us-east-1
      endpoint: https://s3.amazonaws.com
      access_key: ${AWS_ACCESS_KEY_ID}
      secret_key: ${AWS_SECRET_ACCESS_KEY}
    gcs:
      bucket: my-bucket
      credential_file: ${GOOGLE_APPLICATION_CREDENTIALS}
"""
# "Streaming Uploader and CloudReader": "Configuration knobs".
STREAMING = """\
storage:
  uploader:
    stream_chunk_size: 8388608
    concurrent_parts: 4
  cloud_reader:
    fetch_chunk_size: 4194304
    enable_ranged_reads: true
"""
# "WAL Tail Reader Optimization": "Broker config". ("WAL Performance" has no YAML.)
TAIL = """\
storage:
  wal:
    stream_chunk_size: 4194304
"""
BLOCKS = {
    IMPLEMENTED: {
        "storage.wal.dir": "/var/lib/danube/wal",
        "storage.wal.cache_capacity": 2048,
        "storage.wal.fsync_interval_ms": 5000,
        "storage.wal.fsync_max_batch_bytes": 10 * MIB,
        "storage.wal.rotate_max_bytes": 50 * MIB,
        "storage.wal.rotate_max_seconds": 3600,
        "storage.uploader.interval_seconds": 300,
        "storage.cloud.backend": "s3",
        "storage.cloud.root": "s3://my-bucket/danube",
        "storage.cloud.options": OPTIONS,
    },
    PROPOSED: {
        "storage.mode": "wal_cloud",
        "storage.wal.dir": "/var/lib/danube/wal",
        "storage.wal.fsync_interval_ms": 5,
        "storage.wal.retention.min_minutes": 60,
        "storage.wal.retention.min_bytes": 100 * GIB,
        "storage.wal.retention.time_minutes": None,
        "storage.wal.retention.size_mb": None,
        "storage.wal.retention.active_subscription_grace_seconds": 300,
        "storage.uploader.interval_seconds": 10,
        "storage.uploader.max_batch_bytes": 8 * MIB,
        "storage.uploader.max_object_bytes": 128 * MIB,
        "storage.uploader.max_object_seconds": 300,
        "storage.cloud.backend": "s3",
        "storage.cloud.root": "s3://my-bucket/danube",
        "storage.cloud.options": OPTIONS,
    },
    STREAMING: {
        "storage.uploader.stream_chunk_size": 8 * MIB,
        "storage.uploader.concurrent_parts": 4,
        "storage.cloud_reader.fetch_chunk_size": 4 * MIB,
        "storage.cloud_reader.enable_ranged_reads": True,
    },
    TAIL: {"storage.wal.stream_chunk_size": 4 * MIB},
}
# The two short blocks are additions to a file that names the directory.
DIRECTORY = {"ISTER_STORAGE__WAL__DIR": "/var/lib/danube/wal"}


@each("block", BLOCKS)
def test_every_block_of_the_documents_loads_and_means_what_it_says(block, tmp_path):
    path = tmp_path / "danube_broker.yml"
    path.write_text(block)
    environment = KEYS if "dir:" in block else KEYS | DIRECTORY
    for source in (str(path), yaml.safe_load(block)):
        config = load_config(source, environment)
        assert {key: value_of(config, key) for key in BLOCKS[block]} == BLOCKS[block]


def test_what_the_proposal_says_twice_is_told(tmp_path):
    path = tmp_path / "danube_broker.yml"
    path.write_text(PROPOSED)
    examined = examine_config(str(path), KEYS)
    became = {alias.key: alias.setting for alias in examined.aliases}
    assert became == {
        "storage.uploader.rotation.max_object_bytes": "storage.uploader.max_object_bytes",
        "storage.uploader.rotation.max_object_seconds": "storage.uploader.max_object_seconds",
        **{f"storage.cloud.s3.{name}": f"storage.cloud.options.{name}" for name in OPTIONS},
        # Neither is used with S3, and so its variable need not exist.
        "storage.cloud.gcs.bucket": None,
        "storage.cloud.gcs.credential_file": None,
    }
    assert examined.origins["storage.uploader.max_object_bytes"] is Origin.FILE
    assert examined.lines["storage.uploader.max_object_bytes"] == 14


# -- aliases ------------------------------------------------------------------------------------

TREE = {"storage": {"wal": {"dir": "/wal"}}}
# alias: (a value, the setting, what it is there)
FATES = {
    "storage.wal.max_batch_bytes": (5000, "storage.wal.fsync_max_batch_bytes", 5000),
    "storage.wal.max_file_bytes": (5000, "storage.wal.rotate_max_bytes", 5000),
    "storage.wal.max_file_seconds": (50, "storage.wal.rotate_max_seconds", 50),
    "storage.uploader.rotation.max_object_bytes": (5000, "storage.uploader.max_object_bytes", 5000),
    "storage.uploader.rotation.max_object_seconds": (50, "storage.uploader.max_object_seconds", 50),
    "storage.cloud.s3.*": ("eu", "storage.cloud.options", {"region": "eu"}),
    "storage.cloud.gcs.bucket": ("my-bucket", "storage.cloud.root", "gs://my-bucket"),
    "storage.cloud.gcs.*": ("eu", "storage.cloud.options", {"region": "eu"}),
    "progress_flush_interval_seconds": (7, "dispatch.progress_flush_interval_seconds", 7),
    "storage.progress_flush_interval_seconds": (7, "dispatch.progress_flush_interval_seconds", 7),
    "progress_min_offset_delta": (70, "dispatch.progress_min_offset_delta", 70),
    "storage.progress_min_offset_delta": (70, "dispatch.progress_min_offset_delta", 70),
}


def tree_with(*pairs):
    """A tree that loads, and in it each key with its value."""
    tree = {"storage": {"wal": {"dir": "/wal"}}}
    for key, value in pairs:
        *parents, last = key.replace("*", "region").split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
        if parents[-1:] in (["s3"], ["gcs"]):
            root = {} if last == "bucket" else {"root": f"{parents[-1]}://bucket/p"}
            tree["storage"]["cloud"] |= {"backend": parents[-1], **root}
    return tree


def test_every_alias_has_a_row_here_and_leads_to_a_setting():
    assert {alias.key for alias in ALIASES} == set(FATES)
    known = {setting.path for setting in settings()}
    for alias in ALIASES:
        assert alias.setting.removesuffix(".*") in known
        assert alias.key not in known, "the alias would hide a setting"


@each("key", FATES)
def test_alias_is_its_setting(key):
    value, setting, expected = FATES[key]
    assert value_of(load_config(tree_with((key, value)), {}), setting) == expected
    if "." not in key:
        return  # Variables are named after keys in sections.
    variable = "ISTER_" + key.replace("*", "region").replace(".", "__").upper()
    tree = tree_with((key, None))
    examined = examine_config(tree, {variable: str(value)})
    assert value_of(examined.config, setting) == expected
    assert Origin.ENVIRONMENT in [
        origin for path, origin in examined.origins.items() if path.startswith(setting)
    ]


@each("key", [key for key in FATES if not key.startswith("storage.cloud")])
def test_alias_beside_its_setting_is_refused_by_both_names(key):
    value, setting, _ = FATES[key]
    with pytest.raises(ConfigError) as refused:
        load_config(tree_with((key, value), (setting, value)), {})
    assert key in refused.value.message
    assert setting in refused.value.message
    assert refused.value.hint == "remove one of them"
    # One that is null is not set.
    for given in (((key, None), (setting, value)), ((key, value), (setting, None))):
        assert value_of(load_config(tree_with(*given), {}), setting) == value


def test_option_given_twice_is_refused_by_both_names():
    tree = tree_with(("storage.cloud.s3.*", "eu"))
    tree["storage"]["cloud"]["options"] = {"region": "us", "endpoint": "http://h"}
    with pytest.raises(ConfigError, match=r"storage\.cloud\.s3\.region and storage\.cloud\.opt"):
        load_config(tree, {})
    del tree["storage"]["cloud"]["options"]["region"]
    options = load_config(tree, {}).storage.cloud.options
    assert options == {"region": "eu", "endpoint": "http://h"}


def test_environment_overrides_a_file_by_either_name():
    given = {"ISTER_STORAGE__WAL__ROTATE_MAX_BYTES": "6000"}
    tree = tree_with(("storage.wal.max_file_bytes", 5000))
    examined = examine_config(tree, given)
    assert examined.config.storage.wal.rotate_max_bytes == 6000
    (alias,) = examined.aliases
    assert (alias.setting, alias.reason) == (
        None,
        "storage.wal.rotate_max_bytes is set in the environment",
    )
    given = {"ISTER_STORAGE__WAL__MAX_FILE_BYTES": "6000"}
    tree = tree_with(("storage.wal.rotate_max_bytes", 5000))
    assert load_config(tree, given).storage.wal.rotate_max_bytes == 6000
    given |= {"ISTER_STORAGE__WAL__ROTATE_MAX_BYTES": "6000"}
    with pytest.raises(ConfigError):
        load_config(TREE, given)


@each("root", ["gs://my-bucket", "gs://my-bucket/danube", "gcs://my-bucket/x", "${ROOT}"])
@each("bucket", ["my-bucket", "my-bucket/"])
def test_bucket_of_gcs_that_the_root_names_is_said_once(root, bucket):
    tree = tree_with(("storage.cloud.gcs.bucket", "${BUCKET}"))
    tree["storage"]["cloud"]["root"] = root
    variables = {"BUCKET": bucket, "ROOT": "gs://my-bucket/x"}
    examined = examine_config(tree, variables)
    expected = variables["ROOT"] if root == "${ROOT}" else root
    assert examined.config.storage.cloud.root == expected
    assert [alias.setting for alias in examined.aliases] == [None]


@each("root", ["gs://other/danube", "gs://my-bucket2", "/danube"])
def test_another_bucket_of_gcs_than_that_of_the_root_is_refused(root):
    tree = tree_with(("storage.cloud.gcs.bucket", "my-bucket"))
    tree["storage"]["cloud"]["root"] = root
    with pytest.raises(ConfigError, match=r"gcs\.bucket and storage\.cloud\.root are both set"):
        load_config(tree, {})


def test_options_of_a_backend_that_is_not_named_are_refused():
    """Goal: keys of S3 do not go unused while messages go to a directory."""
    tree = tree_with()
    tree["storage"]["cloud"] = {"s3": {"region": "eu"}}
    with pytest.raises(ConfigError, match=r"cloud\.s3\.region is set, and .*backend is not") as got:
        load_config(tree, {})
    assert got.value.hint == "set it to 's3'"


@each(
    ("text", "key", "message", "line"),
    [
        ("uploader: {rotation: {max_objct_bytes: 5}}", "rotation.max_objct_bytes", "unknown", 3),
        ("uploader: {rotation: 5}", "uploader.rotation", "must be a tree", 3),
        ("uploader: {rotation: {max_object_bytes: x}}", "uploader.max_object", "given as", 3),
        ("uploader: {rotation: {max_object_bytes: 5}}", "uploader.max_object", "given as", 3),
        (
            "cloud: {backend: s3, root: s3://b, s3: {a: [1]}}",
            "options",
            "(given as storage.cloud.s3.a)",
            3,
        ),
        ("cloud: {backend: s3, root: s3://b, s3: {x.a: 1}}", "s3.x.a", "unknown key", 3),
        ("cloud: {backend: s3, root: s3://b, options: 5, s3: {a: 1}}", "options", "a tree", 3),
    ],
)
def test_error_names_the_line_and_the_key_that_was_written(text, key, message, line, tmp_path):
    path = tmp_path / "ister.yml"
    path.write_text(f"storage:\n  wal: {{dir: /wal}}\n  {text}\n")
    (problem,) = examine_config(str(path), {}).problems
    assert key in problem.key
    assert message in problem.message
    with pytest.raises(ConfigError) as refused:
        load_config(str(path), {})
    assert refused.value.path == f"{path}:{line}"


@each(
    ("backend", "section", "given", "message"),
    [
        ("s3", {"regoin": "eu"}, "regoin", "unknown to backend 's3'"),
        ("gcs", {"bucket": "b", "region": "eu"}, "region", "unknown to backend 'gcs'"),
        ("s3", {"access_key": "k"}, "access_key", "is set without secret_key"),
        ("s3", {"bucket": "other"}, "bucket", "is not an option"),
        *(("gcs", {"bucket": name}, "bucket", "not of the form") for name in ("gs://b", "", "a b")),
    ],
)
def test_check_and_open_refuse_what_a_store_would_by_the_key_that_was_written(
    backend, section, given, message
):
    cloud = {"backend": backend, backend: section}
    if backend == "s3":
        cloud["root"] = "s3://bucket/p"
    config = load_config({"storage": {"wal": {"dir": "/wal"}, "cloud": cloud}}, {})
    (problem,) = find_deeper_problems(config)
    with pytest.raises(ConfigError) as refused:
        open_objects(config.storage, SystemClock())
    for text in (problem.message, refused.value.message):
        assert message in text
        assert text.endswith(f"(given as storage.cloud.{backend}.{given})")


def test_secret_that_is_given_as_a_section_is_not_shown():
    tree = tree_with()
    tree["storage"]["cloud"] = {"backend": "s3", "root": "s3://b", "s3": "hunter2"}
    with pytest.raises(ConfigError) as refused:
        load_config(tree, {})
    assert "hunter2" not in str(refused.value)


# -- floors -------------------------------------------------------------------------------------


def retention(**given):
    return {"storage": {"wal": {"dir": "/wal", "retention": given}}}


def test_floors_replace_the_limits_that_nobody_set():
    for given in ({"min_minutes": 60}, {"min_bytes": 5}, {"min_minutes": 0, "size_mb": None}):
        found = load_config(retention(**given), {}).storage.wal.retention
        assert found.has_floors
        assert (found.time_minutes, found.size_mb) == (None, None)
    assert not load_config(TREE, {}).storage.wal.retention.has_floors


@each("floor", ["min_minutes", "min_bytes"])
@each("limit", ["time_minutes", "size_mb"])
def test_floor_beside_a_limit_is_refused_by_both_names(floor, limit):
    with pytest.raises(ConfigError) as refused:
        load_config(retention(**{floor: 5, limit: 5}), {})
    assert f"retention.{floor} and storage.wal.retention.{limit} are both" in refused.value.message


@each("mode", ["local_only", "memory"])
def test_floor_without_a_bucket_is_refused(mode):
    """Goal: the rule removes what is uploaded, and never the only copy."""
    tree = retention(min_minutes=5)
    tree["storage"]["mode"] = mode
    if mode == "memory":
        del tree["storage"]["wal"]["dir"]
    with pytest.raises(ConfigError, match=r"min_minutes is set, and .* has no bucket"):
        load_config(tree, {})


# -- what commands say --------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("ISTER_")]:
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "danube_broker.yml"
    path.write_text(PROPOSED)
    return str(path)


@each("action", ["check", "show"])
def test_commands_say_what_each_key_became(file, capsys, action):
    assert main(["config", action, file, "--json"]) == 0
    aliases = {alias["key"]: alias for alias in json.loads(capsys.readouterr().out)["aliases"]}
    assert aliases["storage.cloud.s3.region"]["setting"] == "storage.cloud.options.region"
    assert aliases["storage.cloud.gcs.bucket"]["setting"] is None
    assert main(["config", action, file]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"rotation\.max_object_bytes +storage\.uploader\.max_object_bytes", shown)
    assert "not used: storage.cloud.backend is not 'gcs'" in shown
    assert "secret-1" not in shown
