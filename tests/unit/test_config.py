"""Settings: every key, its bounds, where they come from, and what is refused by name."""

import re
from enum import StrEnum
from itertools import pairwise

import pytest

import ister
from ister.base.model import AckLevel
from ister.config import (
    Engine,
    Origin,
    StorageMode,
    examine_config,
    load_config,
)
from ister.config.reference import settings
from ister.config.settings import to_plain
from ister.errors import ConfigError, InvalidRequestError
from tests.support.cases import each

_DIR = "/home/wal"

# What each setting is, its default and its bounds are in docs/reference/config.md, which
# tests/docs compares with the code.
_SETTINGS = {setting.path: setting for setting in settings()}
_NUMBERS = {path: setting for path, setting in _SETTINGS.items() if setting.kind == "number"}
_BY_KIND = {"text": "x", "list": ["a", "b"], "mapping": {"region": "eu"}}
# Where the rest of the settings has to agree with a value, or it has a form.
_BY_PATH = {
    "broker.auth.mode": "token",
    "pipeline.conf": {"spark.x": "1"},
    "storage.ack": "written",
    "storage.cloud.backend": "memory",
    "storage.metadata.backend": "memory",
    "storage.metadata.root_prefix": "/other",
    "storage.mode": "local_only",
}


def _another(setting):
    """A value as it is written that is not the default."""
    if setting.path in _BY_PATH:
        return _BY_PATH[setting.path]
    if setting.kind == "number":
        return setting.low + (setting.low == setting.default)
    if setting.kind == "switch":
        return not setting.default
    if setting.kind == "choice":
        return next(choice for choice in setting.choices if choice != setting.default)
    return _BY_KIND[setting.kind]


def _tree(path, value):
    """The tree of a log with a directory in which the key at `path` has a value."""
    tree = {"storage": {"wal": {"dir": _DIR}}}
    node = tree
    *parents, last = path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return tree


def _load(tree=None, environment=None):
    """Settings of a log with a directory."""
    return load_config(_tree("storage.wal.dir", _DIR) if tree is None else tree, environment or {})


def _get(config, path):
    for part in path.split("."):
        config = getattr(config, part)
    return config


@each("setting", _SETTINGS.values())
def test_key_takes_a_value_from_a_tree_and_from_its_variable(setting):
    written, name = _another(setting), "ISTER_" + setting.path.upper().replace(".", "__")
    found = _get(load_config(_tree(setting.path, written), {}), setting.path)
    assert (to_plain(found), isinstance(found, StrEnum)) == (written, setting.kind == "choice")
    text = ",".join(written) if isinstance(written, list) else str(written)
    if isinstance(written, dict):
        ((option, text),) = written.items()
        name = f"{name}__{option.upper()}"
    assert _get(_load(environment={name: text}), setting.path) == found


@each("setting", _NUMBERS.values())
def test_bounds_are_inclusive_and_named(setting):
    path, low, high = setting.path, setting.low, setting.high
    for value in (low, high):
        if value is not None:
            assert _get(load_config(_tree(path, value), {}), path) == value
    for value in (low - 1, None if high is None else high + 1):
        if value is not None:
            with pytest.raises(ConfigError, match=f"{path} is {value}.*{low}"):
                load_config(_tree(path, value), {})


@each("path", _NUMBERS)
@each("value", ["5", 5.0, True, [5], {"a": 1}])
def test_number_of_another_kind_is_refused(path, value):
    with pytest.raises(ConfigError, match=f"{path} must be a whole number"):
        load_config(_tree(path, value), {})


@each("setting", _NUMBERS.values())
def test_null_is_no_limit_where_a_number_is_optional_and_refused_elsewhere(setting):
    tree = _tree(setting.path, None)
    if setting.is_optional:
        assert _get(load_config(tree, {}), setting.path) is None
    else:
        with pytest.raises(ConfigError, match=f"{setting.path} must be a whole number, not None"):
            load_config(tree, {})


_SWITCHES = [path for path, setting in _SETTINGS.items() if setting.kind == "switch"]


@each("path", _SWITCHES)
@each("value", ["true", "no", 0, 1, None, []])
def test_switch_of_another_kind_is_refused(path, value):
    with pytest.raises(ConfigError, match=f"{path} must be true or false"):
        load_config(_tree(path, value), {})


@each(("text", "expected"), [("true", True), ("True", True), ("FALSE", False), ("false", False)])
def test_switch_from_the_environment_is_read_in_any_case(text, expected):
    name = "ISTER_STORAGE__CLOUD_READER__READ_AHEAD"
    assert _load(environment={name: text}).storage.cloud_reader.read_ahead is expected


@each("text", ["1", "yes", "", "on"])
def test_switch_from_the_environment_of_another_kind_is_refused(text):
    with pytest.raises(ConfigError, match=r"cloud_reader\.read_ahead must be true or false"):
        _load(environment={"ISTER_STORAGE__CLOUD_READER__READ_AHEAD": text})


# -- lists, options, secrets --------------------------------------------------------------------


@each(
    ("value", "expected"),
    [
        (["a:1"], ("a:1",)),
        (("a:1", "b:2"), ("a:1", "b:2")),
        ("a:1", ("a:1",)),
        ("a:1, b:2", ("a:1", "b:2")),
        ([], ()),
        (None, ()),
    ],
)
def test_list_is_taken_as_a_list_or_a_text_with_commas(value, expected):
    config = load_config(_tree("storage.metadata.endpoints", value), {})
    assert config.storage.metadata.endpoints == expected


@each("value", [5, True, {"a": 1}, [5], [None], [""], "a,,b", ""])
def test_list_of_another_kind_is_refused(value):
    with pytest.raises(ConfigError, match=r"metadata\.endpoints must be a list of texts"):
        load_config(_tree("storage.metadata.endpoints", value), {})


@each("value", ["a:1, ", ["a:1", " "]])
def test_list_with_an_item_of_spaces_is_refused(value):
    with pytest.raises(ConfigError, match=r"metadata\.endpoints must be a list of texts"):
        load_config(_tree("storage.metadata.endpoints", value), {})


def test_reference_inside_of_a_list_is_replaced():
    config = load_config(_tree("storage.metadata.endpoints", ["${HOST}:2379"]), {"HOST": "etcd"})
    assert config.storage.metadata.endpoints == ("etcd:2379",)


def test_options_are_texts_and_those_without_a_value_are_left_out():
    options = {"region": "eu", "port": 9000, "ssl": False, "path_style": True, "token": None}
    config = load_config(_tree("storage.cloud.options", options), {})
    assert config.storage.cloud.options == {
        "region": "eu",
        "port": "9000",
        "ssl": "false",
        "path_style": "true",
    }


def test_options_may_come_from_references_and_from_the_environment():
    tree = _tree("storage.cloud.options", {"secret_key": "${SECRET}"})
    environment = {"SECRET": "hidden", "ISTER_STORAGE__CLOUD__OPTIONS__ACCESS_KEY": "me"}
    options = load_config(tree, environment).storage.cloud.options
    assert options == {"secret_key": "hidden", "access_key": "me"}
    assert {type(value) for value in options.values()} == {str}


@each("value", [["a"], {"a": 1}, ("a",)])
def test_option_that_is_no_single_value_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"storage\.cloud\.options\.keys must be a single value"):
        load_config(_tree("storage.cloud.options", {"keys": value}), {})


@each("value", ["a=b", 5, ["a"]])
def test_options_that_are_no_tree_are_refused_without_showing_them(value):
    with pytest.raises(ConfigError, match="options must be a tree of keys") as refused:
        load_config(_tree("storage.cloud.options", value), {})
    assert str(value) not in str(refused.value)


def test_secrets_are_never_shown():
    tree = _tree("storage.cloud.options", {"secret_key": "hidden-1"})
    tree["storage"]["metadata"] = {"username": "ister", "password": "hidden-2"}
    config = load_config(tree, {})
    assert config.storage.cloud.options["secret_key"] == "hidden-1"
    assert config.storage.metadata.password == "hidden-2"
    for section in (config, config.storage, config.storage.cloud, config.storage.metadata):
        assert "hidden" not in repr(section)
        assert "hidden" not in str(section)


@each("value", [84611, ["84611"], {"a": "84611"}])
def test_password_of_another_kind_is_refused_without_showing_it(value):
    with pytest.raises(ConfigError, match=r"storage\.metadata\.password") as refused:
        load_config(_tree("storage.metadata.password", value), {})
    assert "84611" not in str(refused.value)


# -- choices and trees --------------------------------------------------------------------------


_CHOICES = [path for path, setting in _SETTINGS.items() if setting.kind == "choice"]


@each("path", _CHOICES)
@each("value", ["sync", "SYNCED", "", None, 1, False, []])
def test_choice_that_does_not_exist_is_refused_with_those_that_do(path, value):
    with pytest.raises(ConfigError, match=f"{path} is .*one of: "):
        load_config(_tree(path, value), {})


_TEXTS = [
    "storage.wal.dir",
    "storage.cloud.root",
    "storage.metadata.path",
    "storage.metadata.username",
    "storage.metadata.root_prefix",
]


@each("path", _TEXTS)
@each("value", [5, "", "a\0b", ["x"], True])
def test_text_of_another_kind_is_refused(path, value):
    with pytest.raises(ConfigError, match=f"{path} must be a non-empty text"):
        load_config(_tree(path, value), {})


@each(
    ("tree", "path", "hint"),
    [
        ({"storge": {}}, "storge", "did you mean 'storage'"),
        ({"storage": {"wall": {}}}, "storage.wall", "did you mean 'wal'"),
        (
            {"storage": {"wal": {"fsync_interval": 5}}},
            "storage.wal.fsync_interval",
            "did you mean 'fsync_interval_ms'",
        ),
        (
            {"storage": {"wal": {"cache_capcity": 5}}},
            "storage.wal.cache_capcity",
            "did you mean 'cache_capacity'",
        ),
        ({"storage": {"wal": {"zzz": 5}}}, "storage.wal.zzz", "known: dir, "),
        (
            {"storage": {"wal": {"retention": {"time_minute": 5}}}},
            "storage.wal.retention.time_minute",
            "did you mean 'time_minutes'",
        ),
        (
            {"storage": {"uploader": {"interval_second": 5}}},
            "storage.uploader.interval_second",
            "did you mean 'interval_seconds'",
        ),
        (
            {"storage": {"wal": {"max_file_byte": 5}}},
            "storage.wal.max_file_byte",
            "did you mean 'max_file_bytes'",
        ),
        (
            {"progress_flush_interval_second": 5},
            "progress_flush_interval_second",
            "did you mean 'progress_flush_interval_seconds'",
        ),
        ({1: 2}, "1", "known: broker, dispatch, pipeline, storage"),
    ],
)
def test_unknown_key_is_refused_with_its_path_and_the_nearest(tree, path, hint):
    with pytest.raises(ConfigError) as refused:
        load_config(tree, {})
    assert f"unknown key '{path}'" in str(refused.value)
    assert hint in str(refused.value)


@each(
    "tree",
    [
        {"storage": 5},
        {"storage": []},
        {"storage": {"wal": "x"}},
        {"storage": {"wal": {"retention": 5}}},
        {"storage": {"cloud": {"retention": [5]}}},
    ],
)
def test_value_where_a_tree_belongs_is_refused(tree):
    with pytest.raises(ConfigError, match="must be a tree of keys"):
        load_config(tree, {})


@each("section", ["uploader", "cloud", "cloud_reader", "metadata"])
@each("mode", [mode for mode in StorageMode if mode is not StorageMode.BUCKET])
def test_empty_section_is_its_defaults(section, mode):
    wal = {} if mode is StorageMode.MEMORY else {"wal": {"dir": _DIR}}
    for empty in (None, {}):
        tree = {"storage": {"mode": mode.value, **wal, section: empty}}
        assert load_config(tree, {}) == load_config({"storage": {"mode": mode.value, **wal}}, {})


@each("tree", [{}, {"storage": None}, {"storage": {"wal": None}}])
def test_tree_without_a_directory_is_refused_with_what_to_do(tree):
    with pytest.raises(ConfigError, match=r"storage\.wal\.dir is not set.*wal_cloud") as refused:
        load_config(tree, {})
    assert "mode 'bucket' or 'memory'" in refused.value.hint


# -- without local files ------------------------------------------------------------------------

_BUCKET = {
    "mode": "bucket",
    "cloud": {"backend": "s3", "root": "s3://bucket/prefix"},
    "metadata": {"backend": "etcd", "endpoints": ["127.0.0.1:2379"]},
}


def test_log_without_files_is_tiered_and_bounded():
    storage = load_config({"storage": _BUCKET}, {}).storage
    assert storage.ack is AckLevel.TIERED
    assert storage.wal.dir is None
    assert storage.uploader.engine is Engine.EMBEDDED
    memory = storage.bucket.memory_max_bytes
    assert storage.wal.rotate_max_bytes == storage.wal.fsync_max_batch_bytes == memory // 64
    assert storage.wal.fsync_interval_ms == 100
    assert storage.wal.buffer_max_bytes == memory // 8
    assert storage.wal.cache_max_bytes == memory // 1024
    assert storage.uploader.max_lag_bytes == memory // 4


def test_log_without_files_keeps_lower_limits():
    tree = {"wal": {"rotate_max_bytes": 8192}, "uploader": {"max_lag_bytes": 9000}}
    storage = load_config({"storage": {**_BUCKET, **tree}}, {}).storage
    assert (storage.wal.rotate_max_bytes, storage.uploader.max_lag_bytes) == (8192, 9000)


@each(
    ("change", "key", "hint"),
    [
        ({"ack": "synced"}, "storage.ack is 'synced'", "implies 'tiered'"),
        ({"wal": {"dir": "/x"}}, "storage.wal.dir is set", "remove storage.wal.dir"),
        ({"cloud": {"backend": "fs"}}, "storage.cloud.root is not set", "use backend s3"),
        ({"metadata": {}}, "storage.metadata.backend is 'sqlite'", "use backend 'etcd'"),
        ({"uploader": {"engine": "spark"}}, "storage.uploader.engine is 'spark'", "'auto'"),
    ],
)
def test_what_a_log_without_files_cannot_do_is_refused_with_what_to_do(change, key, hint):
    with pytest.raises(ConfigError) as refused:
        load_config({"storage": {**_BUCKET, **change}}, {})
    assert key in refused.value.message
    assert hint in refused.value.hint


def test_log_without_files_may_have_sqlite_and_a_directory_that_are_named():
    places = {"cloud": {"root": "/share/objects"}, "metadata": {"path": "/share/metadata.db"}}
    storage = load_config({"storage": {"mode": "bucket", **places}}, {}).storage
    assert (storage.cloud.root, storage.metadata.path) == (
        "/share/objects",
        "/share/metadata.db",
    )


# -- places that follow from the directory ------------------------------------------------------


@each(
    ("directory", "root", "path"),
    [
        ("/home/wal", "/home/objects", "/home/metadata.db"),
        ("/home/wal/", "/home/objects", "/home/metadata.db"),
        ("/wal", "/objects", "/metadata.db"),
    ],
)
def test_objects_and_metadata_lie_beside_the_logs(directory, root, path):
    storage = load_config(_tree("storage.wal.dir", directory), {}).storage
    assert (storage.cloud.root, storage.metadata.path) == (root, path)


def test_places_beside_a_relative_directory_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = load_config(_tree("storage.wal.dir", "data/wal"), {}).storage
    assert storage.wal.dir == "data/wal"
    assert storage.cloud.root == str(tmp_path / "data" / "objects")
    assert storage.metadata.path == str(tmp_path / "data" / "metadata.db")


def test_places_that_are_named_stay_as_they_are():
    tree = _tree("storage.cloud", {"backend": "s3", "root": "s3://bucket/prefix"})
    tree["storage"]["metadata"] = {"path": "meta.db"}
    storage = load_config(tree, {}).storage
    assert (storage.cloud.root, storage.metadata.path) == ("s3://bucket/prefix", "meta.db")


@each("backend", ["memory", "etcd"])
def test_metadata_that_is_no_file_has_no_path(backend):
    tree = _tree("storage.metadata", {"backend": backend, "endpoints": ["a:1"]})
    assert load_config(tree, {}).storage.metadata.path is None


@each("mode", ["local_only", "memory"])
def test_mode_without_a_bucket_has_no_places_for_one(mode):
    wal = {} if mode == "memory" else {"wal": {"dir": _DIR}}
    storage = load_config({"storage": {"mode": mode, **wal}}, {}).storage
    assert (storage.cloud.root, storage.metadata.path) == (None, None)


# -- sources ------------------------------------------------------------------------------------


def test_none_keeps_everything_in_memory():
    config = load_config(None, {})
    assert (config.storage.mode, config.storage.wal.dir) == (StorageMode.MEMORY, None)


def test_directory_gets_logs_objects_and_metadata_below(tmp_path):
    for source in (tmp_path, str(tmp_path)):
        storage = load_config(source, {}).storage
        assert storage.mode is StorageMode.WAL_CLOUD
        assert storage.wal.dir == str(tmp_path / "wal")
        assert storage.cloud.root == str(tmp_path / "objects")
        assert storage.metadata.path == str(tmp_path / "metadata.db")


@each("suffix", ["yml", "yaml"])
def test_yaml_file_is_read(tmp_path, suffix):
    path = tmp_path / f"ister.{suffix}"
    path.write_text("storage:\n  ack: written\n  wal: {dir: /x, cache_capacity: 5}\n")
    config = load_config(path, {})
    assert config.storage.ack is AckLevel.WRITTEN
    assert (config.storage.wal.dir, config.storage.wal.cache_capacity) == ("/x", 5)


@each(
    ("content", "message"),
    [
        (b"storage: [", "not valid YAML"),
        (b"- a\n- b\n", "not a tree of keys"),
        (b"just text", "not a tree of keys"),
        (b"storage:\n  wal:\n    dri: /x\n", "unknown key 'storage.wal.dri'"),
        (b"storage: !!python/object:os.system {}", "not valid YAML"),
        (b"\xff\xfe\xfa", "the config file"),
    ],
)
def test_yaml_file_that_is_wrong_is_refused(tmp_path, content, message):
    path = tmp_path / "ister.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path, {})


def _load_text(tmp_path, text, environment=None):
    path = tmp_path / "ister.yml"
    path.write_text(text)
    return load_config(path, environment or {})


@each(
    ("text", "key", "lines"),
    [
        ("storage:\n  wal: {dir: /x}\n  ack: tiered\n  ack: memory\n", "storage.ack", (3, 4)),
        ("storage: {wal: {dir: /x}}\nbroker: {}\nstorage: {ack: memory}\n", "storage", (1, 3)),
        ('storage: {wal: {dir: /x, "dir": /y}}\n', "storage.wal.dir", (1, 1)),
        ("storage:\n  cloud:\n    options:\n      a: 1\n      a: 1\n", "options.a", (4, 5)),
    ],
)
def test_key_that_is_set_twice_is_refused_with_both_lines(tmp_path, text, key, lines):
    first, second = lines
    with pytest.raises(ConfigError, match=f"{key} is set twice: on line {first} and on line"):
        _load_text(tmp_path, text)
    examined = examine_config(tmp_path / "ister.yml", {})
    assert examined.config is None
    assert f"on line {first} and on line {second}" in examined.problems[0].message


@each("written", ["0100", "1:30", "0_1", "1__0", "1_00", "0o17", "1.5", "1e3"])
def test_ambiguous_yaml_number_is_refused_with_its_line(tmp_path, written):
    with pytest.raises(ConfigError, match="cache_capacity must be a whole number") as refused:
        _load_text(tmp_path, f"storage:\n  wal:\n    dir: /x\n    cache_capacity: {written}\n")
    assert refused.value.path == f"{tmp_path / 'ister.yml'}:4"
    assert repr(written) in refused.value.message


@each(("written", "value"), [("100", 100), ("1_000", 1000), ("0x10", 16), ("+5", 5)])
def test_unambiguous_number_is_accepted(tmp_path, written, value):
    text = f"storage: {{wal: {{dir: /x, cache_capacity: {written}}}}}"
    assert _load_text(tmp_path, text).storage.wal.cache_capacity == value


def test_number_in_quotes_is_a_text(tmp_path):
    with pytest.raises(ConfigError, match="must be a whole number, not '100'"):
        _load_text(tmp_path, "storage: {wal: {dir: /x, cache_capacity: '100'}}")


@each(
    ("written", "value"),
    [("no", "no"), ("0100", "0100"), ("1:30", "1:30"), ("3.10", "3.10"), ("2024-01-01",) * 2],
)
def test_text_without_quotes_stays_as_it_is_written(tmp_path, written, value):
    text = f"""
broker: {{bootstrap_namespaces: [{written}]}}
storage:
  wal: {{dir: {written}}}
  metadata: {{username: {written}}}
pipeline: {{conf: {{spark.version: {"'no'" if written == "no" else written}}}}}
"""
    config = _load_text(tmp_path, text)
    assert config.storage.wal.dir == value
    assert config.storage.metadata.username == value
    assert config.broker.bootstrap_namespaces == (value,)
    assert config.pipeline.conf == {"spark.version": value}


@each(
    ("written", "value"), [("yes", True), ("on", True), ("True", True), ("no", False), ("Off", 0)]
)
def test_boolean_in_a_file_may_be_yes_or_no(tmp_path, written, value):
    text = f"storage: {{wal: {{dir: /x}}, cloud_reader: {{read_ahead: {written}}}}}"
    assert _load_text(tmp_path, text).storage.cloud_reader.read_ahead is bool(value)


@each("key", ["audit_file", "super_admins"])
def test_unquoted_true_is_refused_for_a_text(tmp_path, key):
    with pytest.raises(ConfigError, match=rf"broker\.auth\.{key} must be a text, not true"):
        _load_text(
            tmp_path, f"broker: {{auth: {{{key}: {'[true]' if key[0] == 's' else 'true'}}}}}"
        )


@each("written", ["yes", "no", "On", "off"])
def test_option_that_may_be_a_boolean_or_a_text_is_refused(tmp_path, written):
    text = "storage: {{wal: {{dir: /x}}, cloud: {{options: {{region: {}}}}}}}"
    with pytest.raises(ConfigError, match=r"options\.region is \w+ without quotes"):
        _load_text(tmp_path, text.format(written))
    quoted = _load_text(tmp_path, text.format(f"'{written}'"))
    assert quoted.storage.cloud.options == {"region": written}
    switch = _load_text(tmp_path, text.format("True"))
    assert switch.storage.cloud.options == {"region": "true"}


def test_error_names_the_line_of_the_key_or_of_its_section(tmp_path):
    def line(text, environment=None):
        with pytest.raises(ConfigError) as refused:
            _load_text(tmp_path, text, environment)
        return refused.value.path and refused.value.path.removeprefix(f"{tmp_path}/ister.yml")

    assert line("storage:\n  wal:\n    dri: /x\n") == ":3"
    assert line("storage:\n  wal: {dir: /x}\n  ack: fast\n") == ":3"
    assert line("storage:\n  wal:\n    dir: ${MISSING}\n") == ":3"
    assert line("\nstorage:\n  mode: wal_cloud\n") == ":2"
    # What the environment says is in no line of the file.
    overridden = {"ISTER_STORAGE__ACK": "fast"}
    assert line("storage:\n  wal: {dir: /x}\n  ack: synced\n", overridden) is None


def test_anchors_aliases_and_merges_are_followed(tmp_path):
    text = """
storage:
  wal: {dir: /x}
  metadata: {username: &name ann}
broker:
  auth: {jwt: {issuer: *name}}
pipeline:
  compact: &often
    every_minutes: 7
    topics: [a]
  scrub:
    topics: [b]
    <<: *often
"""
    config = _load_text(tmp_path, text)
    assert config.broker.auth.jwt.issuer == "ann"
    assert config.pipeline.scrub.every_minutes == 7
    assert config.pipeline.scrub.topics == ("b",)
    with pytest.raises(ConfigError, match=r"scrub\.every_minutes is 0") as refused:
        _load_text(tmp_path, text.replace("<<: *often", "<<: {every_minutes: 0}"))
    assert refused.value.path.endswith(":13")


_LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n" for last, name in pairwise("abcdefghi")
)


@each(
    "text",
    [
        _LAUGHS,
        "a: &a {<<: *a}\n",
        "a: &a [*a]\n",
        "a: " + "[" * 5_000 + "]" * 5_000,
        "a: " + "[" * 100 + "]" * 100,
        "? [a]\n: b\n",
        "a: 1\n---\nb: 2\n",
        "a: {<<: x}\n",
        "a: !!int '3'\n",
        "a: *b\n",
    ],
)
def test_yaml_that_is_not_supported_is_refused_at_once(tmp_path, text):
    with pytest.raises(ConfigError, match="not valid YAML"):
        _load_text(tmp_path, text)


def test_yaml_file_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        _load_text(tmp_path, "#" * (1 << 20) + "\n")


# -- home directories ---------------------------------------------------------------------------

_PATHS = [
    "broker.tls.cert_file",
    "broker.tls.key_file",
    "broker.tls.ca_file",
    "broker.auth.jwt.public_key_file",
    "broker.auth.api_keys_file",
    "broker.auth.audit_file",
    "pipeline.export.to",
    "pipeline.export.schema",
    "storage.wal.dir",
    "storage.cloud.root",
    "storage.metadata.path",
    "storage.metadata.tls.ca_file",
    "storage.metadata.tls.cert_file",
    "storage.metadata.tls.key_file",
]


def test_every_setting_that_sounds_like_a_path_is_one():
    named = {path for path in _SETTINGS if re.search(r"(_file|\.dir|\.path)$", path)}
    assert named <= set(_PATHS)


@each("way", ["mapping", "file", "reference", "override"])
@each("path", _PATHS)
def test_tilde_is_the_home_directory_in_every_path(tmp_path, monkeypatch, path, way):
    monkeypatch.setenv("HOME", "/home/ann")
    environment = {"ISTER_STORAGE__WAL__DIR": _DIR, "H": "~/x"}
    if way == "override":
        environment[f"ISTER_{path.upper().replace('.', '__')}"] = "~/x"
    elif path == "storage.wal.dir":
        del environment["ISTER_STORAGE__WAL__DIR"]
    tree = {} if way == "override" else _tree(path, "${H}" if way == "reference" else "~/x")
    if way == "file":
        source = tmp_path / "ister.yml"
        *parents, last = path.split(".")
        lines = [f"{'  ' * depth}{name}:\n" for depth, name in enumerate(parents)]
        source.write_text("".join(lines) + f"{'  ' * len(parents)}{last}: ~/x\n")
    value = load_config(source if way == "file" else tree, environment)
    for name in path.split("."):
        value = getattr(value, name)
    assert value == "/home/ann/x"


def test_tilde_of_the_source_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config("~/data", {}).storage.wal.dir == str(tmp_path / "data" / "wal")
    (tmp_path / "ister.yml").write_text("storage: {wal: {dir: /x}}")
    assert load_config("~/ister.yml", {}).storage.wal.dir == "/x"
    assert load_config("./~/data", {}).storage.wal.dir == "./~/data/wal"


def test_home_directory_of_an_unknown_user_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'~nobody-of-that-name/x'") as refused:
        _load_text(tmp_path, "storage:\n  wal:\n    dir: ~nobody-of-that-name/x\n")
    assert refused.value.path.endswith(":3")
    with pytest.raises(ConfigError):
        load_config("~nobody-of-that-name/x", {})


def test_yaml_file_that_is_empty_is_an_empty_tree(tmp_path):
    path = tmp_path / "ister.yml"
    path.write_text("# nothing\n")
    assert load_config(path, {"ISTER_STORAGE__WAL__DIR": _DIR}) == _load()


def test_yaml_file_that_is_missing_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        load_config(tmp_path / "ister.yml", {})
    assert refused.value.path == str(tmp_path / "ister.yml")
    assert isinstance(refused.value, InvalidRequestError)


def test_source_is_not_changed():
    tree = {"storage": {"wal": {"dir": "${HOME}"}}}
    load_config(tree, {"HOME": "/home", "ISTER_STORAGE__ACK": "written"})
    assert tree == {"storage": {"wal": {"dir": "${HOME}"}}}


def test_settings_cannot_be_changed():
    config = _load()
    with pytest.raises(AttributeError):
        config.storage.wal.dir = "/x"


# -- environment --------------------------------------------------------------------------------


@each(
    ("text", "expected"),
    [
        ("${ROOT}", "/data"),
        ("${ROOT}/wal", "/data/wal"),
        ("${ROOT}/${TEAM}/wal", "/data/blue/wal"),
        ("${MISSING:-/fallback}", "/fallback"),
        ("${ROOT:-/fallback}", "/data"),
        ("${MISSING:-/a}${MISSING:-/b}", "/a/b"),
        ("$ROOT", "$ROOT"),
        ("${9}", "${9}"),
    ],
)
def test_reference_is_replaced(text, expected):
    environment = {"ROOT": "/data", "TEAM": "blue"}
    assert load_config(_tree("storage.wal.dir", text), environment).storage.wal.dir == expected


def test_reference_may_give_a_number_or_a_choice():
    tree = {"storage": {"ack": "${ACK}", "wal": {"dir": "/x", "cache_capacity": "${N:-12}"}}}
    config = load_config(tree, {"ACK": "written"})
    assert (config.storage.ack, config.storage.wal.cache_capacity) == (AckLevel.WRITTEN, 12)


def test_reference_without_its_variable_is_refused_with_key_and_name():
    with pytest.raises(ConfigError, match=r"storage\.wal\.dir.*no variable MISSING"):
        load_config(_tree("storage.wal.dir", "${MISSING}"), {})


@each(
    "value",
    [
        "/data/a #1",
        "/data: x",
        "null",
        "2024",
        "x~",
        "[",
    ],
)
@each("way", ["reference", "override"])
def test_directory_from_the_environment_is_taken_as_it_is(value, way):
    if way == "reference":
        config = load_config(_tree("storage.wal.dir", "${X}"), {"X": value})
    else:
        config = load_config({}, {"ISTER_STORAGE__WAL__DIR": value})
    assert config.storage.wal.dir == value


def test_empty_override_of_the_directory_is_no_way_to_lose_durability():
    with pytest.raises(ConfigError):
        load_config("/data", {"ISTER_STORAGE__WAL__DIR": ""})


def test_override_wins_over_file_and_directory(tmp_path):
    path = tmp_path / "ister.yml"
    path.write_text("storage: {wal: {dir: /x, cache_capacity: 5}}")
    environment = {"ISTER_STORAGE__WAL__DIR": "/y", "PATH": "/bin", "ISTER_CONFIG": "ignored"}
    config = load_config(path, environment)
    assert (config.storage.wal.dir, config.storage.wal.cache_capacity) == ("/y", 5)
    assert load_config(tmp_path, environment).storage.wal.dir == "/y"


@each(
    ("name", "message"),
    [
        ("ISTER_STORAGE__WAL__DRI", "unknown key 'storage.wal.dri'"),
        ("ISTER_STORGE__ACK", "unknown key 'storge'"),
        ("ISTER_STORAGE__ACK__LEVEL", "which is a single value"),
    ],
)
def test_override_that_leads_nowhere_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"storage": {"ack": "synced"}}, {name: "x"})


@each("key", ["ack", "max_message_size"])
def test_override_that_is_no_value_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"(?i)storage(\\.|__){key}"):
        load_config({}, {f"ISTER_STORAGE__{key.upper()}": "["})


def test_override_below_an_empty_tree_is_taken():
    config = load_config({"storage": None}, {"ISTER_STORAGE__WAL__DIR": "/y"})
    assert config.storage.wal.dir == "/y"


def test_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("ISTER_STORAGE__WAL__CACHE_CAPACITY", "77")
    tree = _tree("storage.wal.dir", _DIR)
    assert load_config(tree).storage.wal.cache_capacity == 77


# -- contradictions -----------------------------------------------------------------------------


@each(
    ("tree", "message"),
    [
        ({"storage": {"mode": "memory", "wal": {"dir": "/x"}}}, "storage.mode is 'memory'"),
        (
            {"storage": {"mode": "local_only", "ack": "tiered", "wal": {"dir": "/x"}}},
            "storage.ack is 'tiered'",
        ),
        ({"storage": {"mode": "memory", "ack": "tiered"}}, "storage.ack is 'tiered'"),
        (_tree("storage.cloud.backend", "s3"), r"storage\.cloud\.root is not set"),
        (_tree("storage.cloud.backend", "gcs"), r"storage\.cloud\.root is not set"),
        (_tree("storage.cloud.backend", "azblob"), r"storage\.cloud\.root is not set"),
        (_tree("storage.metadata.backend", "etcd"), r"storage\.metadata\.endpoints is empty"),
        (_tree("storage.metadata.root_prefix", "danube"), r"storage\.metadata\.root_prefix is"),
        (_tree("storage.metadata.root_prefix", "/danube/"), r"storage\.metadata\.root_prefix is"),
        (_tree("storage.metadata.root_prefix", "/"), r"storage\.metadata\.root_prefix is"),
    ],
)
def test_contradiction_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(tree, {})
    assert refused.value.hint


@each("mode", ["local_only", "memory"])
@each(
    ("section", "key", "value"),
    [
        ("uploader", "threads", 1),
        ("cloud", "root", "/y"),
        ("cloud_reader", "read_ahead", False),
        ("metadata", "path", "/y"),
    ],
)
def test_section_of_a_bucket_that_the_mode_has_not_is_refused(mode, section, key, value):
    wal = {} if mode == "memory" else {"wal": {"dir": _DIR}}
    tree = {"storage": {"mode": mode, **wal, section: {key: value}}}
    with pytest.raises(ConfigError, match=f"storage.{section} is set.*{mode}") as refused:
        load_config(tree, {})
    assert "wal_cloud" in refused.value.hint


def test_level_tiered_is_taken_where_there_is_a_bucket():
    assert load_config(_tree("storage.ack", "tiered"), {}).storage.ack is AckLevel.TIERED


@each("storage", [{"mode": "memory", "ack": "synced"}, {"mode": "local_only", "ack": "written"}])
def test_level_that_a_log_in_memory_cannot_keep_is_refused(storage):
    with pytest.raises(ConfigError):
        load_config({"storage": storage}, {})


@each("source", [3, b"./data", object()])
def test_source_of_another_kind_is_refused(source):
    with pytest.raises(ConfigError, match="cannot open"):
        load_config(source, {})


# -- all problems at once -------------------------------------------------------------------


def test_examination_of_good_settings_is_what_loading_gives():
    tree = {"storage": {"wal": {"dir": _DIR}}}
    found = examine_config(tree, {"ISTER_BROKER__PORTS__GRPC": "7"})
    assert found.config == load_config(tree, {"ISTER_BROKER__PORTS__GRPC": "7"})
    assert found.problems == ()
    assert found.origins["storage.wal.dir"] is Origin.FILE
    assert found.origins["broker.ports.grpc"] is Origin.ENVIRONMENT
    assert "storage.ack" not in found.origins


def test_examination_finds_all_problems_and_loading_the_first():
    tree = {
        "storage": {"ack": "soon", "wal": {"dri": _DIR, "cache_capacity": 0}},
        "broker": {"ports": 5, "host": ""},
        "nonsense": 1,
    }
    found = examine_config(tree, {})
    assert found.config is None
    assert [(problem.key, problem.near) for problem in found.problems] == [
        ("storage.ack", None),
        ("storage.wal.dri", "storage.wal.dir"),
        ("storage.wal.cache_capacity", None),
        ("broker.ports", None),
        ("broker.host", None),
        ("nonsense", None),
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(tree, {})
    assert caught.value.message == found.problems[0].message
    assert caught.value.hint == found.problems[0].hint


def test_examination_does_not_tell_what_follows_from_a_problem():
    """Goal: a misspelt `dir` is one problem, not two; a missing one is one."""
    assert len(examine_config({"storage": {"wal": {"dri": _DIR}}}, {}).problems) == 1
    (problem,) = examine_config({"storage": {"wal": {}}}, {}).problems
    assert problem.key == "storage.wal.dir"


@each("tree", [{"storage": 5}, {"storage": "x"}, {"storage": [1]}])
def test_examination_goes_on_where_a_section_is_none(tree):
    found = examine_config(tree, {})
    assert found.problems[0].key == "storage"


def test_examination_of_a_file_that_cannot_be_read_is_one_problem(tmp_path):
    (problem,) = examine_config(str(tmp_path / "none.yml"), {}).problems
    assert problem.key is None
    assert "none.yml" in problem.message


def test_examination_of_a_directory_says_where_its_place_comes_from(tmp_path):
    assert examine_config(str(tmp_path), {}).origins["storage.wal.dir"] is Origin.DIRECTORY


def test_null_in_a_file_is_a_value_only_where_it_changes_something():
    tree = {
        "storage": {"wal": {"dir": _DIR, "retention": {"size_mb": None}}, "cloud": {"root": None}}
    }
    origins = examine_config(tree, {}).origins
    assert origins["storage.wal.retention.size_mb"] is Origin.FILE
    assert "storage.cloud.root" not in origins


def test_only_copies_are_kept_unless_a_limit_is_set(tmp_path):
    """Goal: without a bucket, no default deletes the only copy of a message."""
    local = {"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}
    kept = load_config(local, {}).storage.wal.retention
    assert (kept.time_minutes, kept.size_mb) == (None, None)

    local["storage"]["wal"]["retention"] = {"time_minutes": 60}
    limited = load_config(local, {"ISTER_STORAGE__WAL__RETENTION__SIZE_MB": "5"})
    assert limited.storage.wal.retention.time_minutes == 60
    assert limited.storage.wal.retention.size_mb == 5

    with_bucket = load_config(str(tmp_path), {}).storage.wal.retention
    assert (with_bucket.time_minutes, with_bucket.size_mb) == (1440, 10240)


def long_path(base, size):
    """A path of so many bytes, of names that are allowed."""
    path = str(base)
    while len(path) < size - 256:
        path += "/" + "d" * 200
    return path + "/" + "e" * (size - len(path) - 1)


@each(
    ("path", "says"),
    [
        (lambda base: long_path(base, 493), "storage.metadata.path has 505 bytes"),
        (lambda base: long_path(base, 3600), "storage.metadata.path has 3612 bytes"),
        (lambda base: long_path(base, 4090), "storage.wal.dir has 4094 bytes"),
        (lambda base: f"{base}/{'n' * 256}", "storage.wal.dir has a name of 256 bytes"),
        (lambda base: f"{base}/sub/{'é' * 128}", "storage.wal.dir has a name of 256 bytes"),
        (lambda base: f"{base}/\ud800", "storage.wal.dir is not valid Unicode"),
        (lambda base: "", "cannot open ''"),
    ],
)
def test_path_that_cannot_be_used_is_refused_before_anything_is_made(tmp_path, path, says):
    with pytest.raises(ConfigError, match=says):
        ister.open(path(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_unicode_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"storage\.mode is"):
        load_config({"storage": {"mode": "\ud800"}})


def test_longest_path_can_be_used(tmp_path):
    """Goal: the limit is SQLite's own, and not lower."""
    with ister.open(long_path(tmp_path, 492)) as log:
        topic = log.topic(f"/{'n' * 120}/{'t' * 120}", create=True)
        topic.wait(topic.append(b"x"))
        topic.upload()
