"""Settings: every key, its bounds, where they come from, and what is refused by name."""

import re
from enum import StrEnum
from itertools import pairwise

import pytest
import yaml

import ister
from ister.base.model import AckLevel
from ister.config import Engine, Origin, StorageMode, examine_config, load_config
from ister.config.reference import settings, value_of
from ister.errors import ConfigError, InvalidRequestError
from tests.support.cases import each, product

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
_READ_AHEAD = "storage.cloud_reader.read_ahead"
_CAPACITY = "storage.wal.cache_capacity"
_ENDPOINTS = "storage.metadata.endpoints"
_OPTIONS = "storage.cloud.options"
_PREFIX = "storage.metadata.root_prefix"


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


def _tree(*pairs):
    """The tree of a log with a directory, and in it each key with its value."""
    tree = {"storage": {"wal": {"dir": _DIR}}}
    for path, value in pairs:
        node = tree
        *parents, last = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _variable(path):
    return "ISTER_" + path.upper().replace(".", "__")


def _get(config, path):
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _values(source, environment, wanted):
    """What settings are that were read, of the keys of a mapping."""
    config = load_config(source, environment)
    return {path: value_of(config, path) for path in wanted}


@each("setting", _SETTINGS.values())
def test_key_takes_a_value_from_a_tree_and_from_its_variable(setting):
    written, name = _another(setting), _variable(setting.path)
    found = load_config(_tree((setting.path, written)), {})
    assert value_of(found, setting.path) == written
    assert isinstance(_get(found, setting.path), StrEnum) is (setting.kind == "choice")
    text = ",".join(written) if isinstance(written, list) else str(written)
    if isinstance(written, dict):
        ((option, text),) = written.items()
        name = f"{name}__{option.upper()}"
    assert value_of(load_config(_tree(), {name: text}), setting.path) == written


@each("setting", _NUMBERS.values())
def test_bounds_are_inclusive_and_named_and_null_is_no_limit_where_optional(setting):
    path, low, high = setting.path, setting.low, setting.high
    for value in (low, high, None):
        if value is not None or setting.is_optional:
            assert value_of(load_config(_tree((path, value)), {}), path) == value
    for value in (low - 1, None if high is None else high + 1):
        if value is not None:
            with pytest.raises(ConfigError, match=f"{path} is {value}.*{low}"):
                load_config(_tree((path, value)), {})


def _of_kind(kind):
    return [path for path, setting in _SETTINGS.items() if setting.kind == kind]


# For each kind: what its error says, the settings, and values of other kinds.
_WRONG = {
    "must be a whole number": (_NUMBERS, ["5", 5.0, True, [5], {"a": 1}]),
    "must be a whole number, not None": (
        [path for path, setting in _NUMBERS.items() if not setting.is_optional],
        [None],
    ),
    "must be true or false": (_of_kind("switch"), ["true", "no", 0, 1, None, []]),
    " is ": (_of_kind("choice"), ["sync", "SYNCED", "", "\ud800", None, 1, False, []]),
    "must be a non-empty text": (
        [path for path in _of_kind("text") if not path.startswith("broker.auth")],
        [5, "", "a\0b", ["x"], True],
    ),
    "must be a list of texts": (
        [_ENDPOINTS],
        [5, True, {"a": 1}, [5], [None], [""], "a,,b", "", "a:1, ", ["a:1", " "]],
    ),
    "must be a tree of keys": ([_OPTIONS], ["a=b", 5, ["a"]]),
}


@each("says", _WRONG)
def test_value_of_another_kind_is_refused_by_the_key(says):
    for path, value in product(*_WRONG[says]):
        problem = examine_config(_tree((path, value)), {}).problems[0]
        assert (problem.key, says in problem.message) == (path, True), (problem, value)
        assert value == "" or not _SETTINGS[path].is_secret or repr(value) not in problem.message


@each(
    ("path", "value", "expected"),
    [
        (_ENDPOINTS, ["a:1"], ["a:1"]),
        (_ENDPOINTS, ("a:1", "b:2"), ["a:1", "b:2"]),
        (_ENDPOINTS, "a:1", ["a:1"]),
        (_ENDPOINTS, "a:1, b:2", ["a:1", "b:2"]),
        (_ENDPOINTS, [], []),
        (_ENDPOINTS, None, []),
        (_ENDPOINTS, ["${TEAM}:2379"], ["blue:2379"]),
        (
            _OPTIONS,
            {"region": "eu", "port": 9000, "ssl": False, "path_style": True, "token": None},
            {"region": "eu", "port": "9000", "ssl": "false", "path_style": "true"},
        ),
        (_OPTIONS, {"secret_key": "${TEAM}"}, {"secret_key": "blue"}),
        ("storage.wal.dir", "${ROOT}", "/data"),
        ("storage.wal.dir", "${ROOT}/wal", "/data/wal"),
        ("storage.wal.dir", "${ROOT}/${TEAM}/wal", "/data/blue/wal"),
        ("storage.wal.dir", "${MISSING:-/fallback}", "/fallback"),
        ("storage.wal.dir", "${ROOT:-/fallback}", "/data"),
        ("storage.wal.dir", "${MISSING:-/a}${MISSING:-/b}", "/a/b"),
        ("storage.wal.dir", "$ROOT", "$ROOT"),
        ("storage.wal.dir", "${9}", "${9}"),
        (_CAPACITY, "${MISSING:-12}", 12),
        ("storage.ack", "${ACK}", "written"),
        ("storage.ack", "tiered", "tiered"),
    ],
)
def test_value_of_a_tree_is_read(path, value, expected):
    environment = {"ROOT": "/data", "TEAM": "blue", "ACK": "written"}
    assert value_of(load_config(_tree((path, value)), environment), path) == expected


@each(
    ("tree", "key", "text", "expected"),
    [
        (_tree(), _READ_AHEAD, "True", {_READ_AHEAD: True}),
        (_tree(), _READ_AHEAD, "FALSE", {_READ_AHEAD: False}),
        ({"storage": None}, "storage.wal.dir", "/y", {"storage.wal.dir": "/y"}),
        (_tree((_OPTIONS, {"a": "1"})), f"{_OPTIONS}.b", "2", {_OPTIONS: {"a": "1", "b": "2"}}),
    ],
)
def test_value_of_the_environment_is_read(tree, key, text, expected):
    assert _values(tree, {_variable(key): text}, expected) == expected


@each("value", ["/data/a #1", "/data: x", "null", "2024", "x~", "["])
def test_directory_from_the_environment_is_taken_as_it_is(value):
    for tree, environment in (
        (_tree(("storage.wal.dir", "${X}")), {"X": value}),
        ({}, {"ISTER_STORAGE__WAL__DIR": value}),
    ):
        assert load_config(tree, environment).storage.wal.dir == value


def test_secrets_are_never_shown():
    tree = _tree((f"{_OPTIONS}.secret_key", "hidden-1"), ("storage.metadata.password", "hidden-2"))
    config = load_config(tree, {})
    for section in (config, config.storage, config.storage.cloud, config.storage.metadata):
        assert "hidden" not in repr(section)
    for value in (84611, ["84611"], {"a": "84611"}):
        (problem,) = examine_config(_tree(("storage.metadata.password", value)), {}).problems
        assert problem.key == "storage.metadata.password"
        assert "84611" not in problem.message


@each(
    ("path", "near"),
    [
        ("storge", "storage"),
        ("storage.wall", "storage.wal"),
        ("storage.wal.fsync_interval", "storage.wal.fsync_interval_ms"),
        ("storage.wal.retention.time_minute", "storage.wal.retention.time_minutes"),
        # Aliases are suggested, too.
        ("storage.wal.max_file_byte", "storage.wal.max_file_bytes"),
        ("progress_flush_interval_second", "progress_flush_interval_seconds"),
        ("storage.wal.zzz", None),
        ("1", None),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(path, near):
    (problem,) = examine_config(_tree((path, 5)), {}).problems
    assert (problem.key, problem.near) == (path, near)
    assert f"unknown key '{path}'" in problem.message
    known = "known: dir, " if path.startswith("storage") else "known: broker, dispatch, "
    name = near and near.rpartition(".")[2]
    assert problem.hint == f"did you mean {name!r}?" if near else problem.hint.startswith(known)


@each("section", ["uploader", "cloud", "cloud_reader", "metadata"])
@each("mode", [mode for mode in StorageMode if mode is not StorageMode.BUCKET])
def test_empty_section_is_its_defaults(section, mode):
    wal = {} if mode is StorageMode.MEMORY else {"wal": {"dir": _DIR}}
    for empty in (None, {}):
        tree = {"storage": {"mode": mode.value, **wal, section: empty}}
        assert load_config(tree, {}) == load_config({"storage": {"mode": mode.value, **wal}}, {})


# -- contradictions and what else is refused -----------------------------------------------------

_BUCKET = {
    "mode": "bucket",
    "cloud": {"backend": "s3", "root": "s3://bucket/prefix"},
    "metadata": {"backend": "etcd", "endpoints": ["127.0.0.1:2379"]},
}
_LOCAL = {"mode": "local_only", "wal": {"dir": _DIR}}


def _without_files(**change):
    return {"storage": {**_BUCKET, **change}}


@each(
    ("tree", "key", "hint"),
    [
        *((tree, "storage.wal.dir", "'bucket'") for tree in ({}, {"storage": {"wal": None}})),
        ({"storage": 5}, "storage", ""),
        ({"storage": {"wal": "x"}}, "storage.wal", ""),
        ({"storage": {"wal": {"retention": [5]}}}, "storage.wal.retention", ""),
        (_tree((f"{_OPTIONS}.keys", ["a"])), f"{_OPTIONS}", ""),
        (_tree((f"{_OPTIONS}.keys", {"a": 1})), f"{_OPTIONS}", ""),
        ({"storage": {"mode": "memory", "wal": {"dir": "/x"}}}, "storage.wal.dir", "remove"),
        ({"storage": {**_LOCAL, "ack": "tiered"}}, "storage.ack", "wal_cloud"),
        ({"storage": {"mode": "memory", "ack": "tiered"}}, "storage.ack", "'memory'"),
        ({"storage": {"mode": "memory", "ack": "synced"}}, "storage.ack", "'memory'"),
        ({"storage": {"mode": "local_only", "ack": "written"}}, "storage.ack", "'memory'"),
        (_tree(("storage.cloud.backend", "s3")), "storage.cloud.root", "s3://"),
        (_tree(("storage.cloud.backend", "gcs")), "storage.cloud.root", "s3://"),
        (_tree(("storage.cloud.backend", "azblob")), "storage.cloud.root", "s3://"),
        (_tree(("storage.metadata.backend", "etcd")), _ENDPOINTS, ":2379"),
        (_tree((_PREFIX, "danube")), _PREFIX, "begins"),
        (_tree((_PREFIX, "/danube/")), _PREFIX, "begins"),
        (_tree((_PREFIX, "/")), _PREFIX, "begins"),
        *(
            ({"storage": {**log, section: {key: value}}}, f"storage.{section}", "wal_cloud")
            for log in (_LOCAL, {"mode": "memory"})
            for section, key, value in (
                ("uploader", "threads", 1),
                ("cloud", "root", "/y"),
                ("cloud_reader", "read_ahead", False),
                ("metadata", "path", "/y"),
            )
        ),
        # What a log without files cannot do.
        (_without_files(ack="synced"), "storage.ack", "implies 'tiered'"),
        (_without_files(wal={"dir": "/x"}), "storage.wal.dir", "remove storage.wal.dir"),
        (_without_files(cloud={"backend": "fs"}), "storage.cloud.root", "use backend s3"),
        (_without_files(metadata={}), "storage.metadata.backend", "use backend 'etcd'"),
        (_without_files(uploader={"engine": "spark"}), "storage.uploader.engine", "'auto'"),
    ],
)
def test_contradiction_is_refused_by_a_key_with_what_to_do(tree, key, hint):
    problem = examine_config(tree, {}).problems[0]
    assert problem.key == key
    assert hint in (problem.hint or "")


@each(
    ("environment", "key"),
    [
        ({"ISTER_STORAGE__WAL__DRI": "x"}, "storage.wal.dri"),
        ({"ISTER_STORGE__ACK": "x"}, "storge"),
        ({"ISTER_STORAGE__ACK__LEVEL": "x"}, "storage.ack.level"),
        ({"ISTER_STORAGE__MAX_MESSAGE_SIZE": "["}, "storage.max_message_size"),
        ({"ISTER_STORAGE__WAL__DIR": ""}, "storage.wal.dir"),
        *(({_variable(_READ_AHEAD): text}, _READ_AHEAD) for text in ("1", "yes", "", "on")),
    ],
)
def test_variable_that_leads_nowhere_or_has_no_value_is_refused(environment, key):
    (problem,) = examine_config(_tree(("storage.ack", "synced")), environment).problems
    assert problem.key == key


def test_reference_without_its_variable_is_refused_with_key_and_name():
    (problem,) = examine_config(_tree(("storage.wal.dir", "${MISSING}")), {}).problems
    assert problem.key == "storage.wal.dir"
    assert "no variable MISSING" in problem.message


@each("source", [3, b"./data", object()])
def test_source_of_another_kind_is_refused(source):
    with pytest.raises(ConfigError):
        load_config(source, {})


# -- what follows from other settings ------------------------------------------------------------


def test_log_without_files_is_tiered_and_bounded():
    storage = load_config({"storage": _BUCKET}, {}).storage
    assert (storage.ack, storage.uploader.engine) == (AckLevel.TIERED, Engine.EMBEDDED)
    assert storage.wal.dir is None
    memory = storage.bucket.memory_max_bytes
    assert storage.wal.rotate_max_bytes == storage.wal.fsync_max_batch_bytes == memory // 64
    assert storage.wal.fsync_interval_ms == 100
    assert storage.wal.buffer_max_bytes == memory // 8
    assert storage.wal.cache_max_bytes == memory // 1024
    assert storage.uploader.max_lag_bytes == memory // 4


# Sections of `storage`, and settings of it that follow.
_FOLLOWS = """
mode: bucket, cloud: {root: /a}, metadata: {path: /m.db}, wal: {rotate_max_bytes: 8192}
=> wal.rotate_max_bytes: 8192, cloud.root: /a, metadata.path: /m.db
mode: bucket, cloud: {root: /a}, metadata: {path: /m.db}, uploader: {max_lag_bytes: 9000}
=> uploader.max_lag_bytes: 9000
wal: {dir: /home/wal/} => cloud.root: /home/objects, metadata.path: /home/metadata.db
wal: {dir: /wal} => cloud.root: /objects, metadata.path: /metadata.db
wal: {dir: /h/wal}, cloud: {backend: s3, root: "s3://b"}
=> cloud.root: "s3://b", metadata.path: /h/metadata.db
wal: {dir: /wal}, metadata: {path: meta.db} => cloud.root: /objects, metadata.path: meta.db
wal: {dir: /wal}, metadata: {backend: memory} => metadata.path: null
wal: {dir: /wal}, metadata: {backend: etcd, endpoints: ["a:1"]} => metadata.path: null
mode: memory => cloud.root: null, metadata.path: null
mode: local_only, wal: {dir: /wal} => cloud.root: null, metadata.path: null
mode: local_only, wal: {dir: /wal} => wal.retention.time_minutes: null, wal.retention.size_mb: null
mode: local_only, wal: {dir: /wal, retention: {time_minutes: 60}}
=> wal.retention.time_minutes: 60, wal.retention.size_mb: null
wal: {dir: /wal} => wal.retention.time_minutes: 1440, wal.retention.size_mb: 10240
"""


@each("row", _FOLLOWS.strip().replace("\n=>", " =>").splitlines())
def test_default_follows_from_other_settings(row):
    storage, expected = (yaml.safe_load(f"{{{side}}}") for side in row.split(" => "))
    config = load_config({"storage": storage}, {})
    assert {path: value_of(config, f"storage.{path}") for path in expected} == expected


def test_places_beside_a_relative_directory_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = load_config(_tree(("storage.wal.dir", "data/wal")), {}).storage
    assert storage.wal.dir == "data/wal"
    assert storage.cloud.root == str(tmp_path / "data" / "objects")
    assert storage.metadata.path == str(tmp_path / "data" / "metadata.db")


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


def _file(tmp_path, text, suffix="yml"):
    path = tmp_path / f"ister.{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _capacity(written):
    return f"storage: {{wal: {{dir: /x, cache_capacity: {written}}}}}"


def _read_ahead(written):
    return f"storage: {{wal: {{dir: /x}}, cloud_reader: {{read_ahead: {written}}}}}"


def _region(written):
    return f"storage:\n  wal: {{dir: /x}}\n  cloud: {{options: {{region: {written}}}}}\n"


def _text_everywhere(written):
    return f"""
broker: {{bootstrap_namespaces: [{written}]}}
storage:
  wal: {{dir: {written}}}
  metadata: {{username: {written}}}
pipeline: {{conf: {{spark.version: {"'no'" if written == "no" else written}}}}}
"""


_ANCHORS = """
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


@each(
    ("text", "expected"),
    [
        (
            "storage:\n  ack: written\n  wal: {dir: /x, cache_capacity: 5}\n",
            {"storage.ack": "written", "storage.wal.dir": "/x", _CAPACITY: 5},
        ),
        *(
            (_capacity(written), {_CAPACITY: value})
            for written, value in (("100", 100), ("1_000", 1000), ("0x10", 16), ("+5", 5))
        ),
        # A text without quotes stays as it is written.
        *(
            (
                _text_everywhere(text),
                {
                    "storage.wal.dir": text,
                    "storage.metadata.username": text,
                    "broker.bootstrap_namespaces": [text],
                    "pipeline.conf": {"spark.version": text},
                },
            )
            for text in ("no", "0100", "1:30", "3.10", "2024-01-01")
        ),
        *((_read_ahead(text), {_READ_AHEAD: True}) for text in ("yes", "on", "True")),
        *((_read_ahead(text), {_READ_AHEAD: False}) for text in ("no", "Off")),
        (_region("'yes'"), {_OPTIONS: {"region": "yes"}}),
        (_region("True"), {_OPTIONS: {"region": "true"}}),
        (
            _ANCHORS,
            {
                "broker.auth.jwt.issuer": "ann",
                "pipeline.scrub.every_minutes": 7,
                "pipeline.scrub.topics": ["b"],
            },
        ),
    ],
)
def test_file_is_read(tmp_path, text, expected):
    for suffix in ("yml", "yaml"):
        assert _values(_file(tmp_path, text, suffix), {}, expected) == expected


def test_empty_file_is_an_empty_tree(tmp_path):
    environment = {"ISTER_STORAGE__WAL__DIR": _DIR}
    assert load_config(_file(tmp_path, "# nothing\n"), environment) == load_config(_tree(), {})


_LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n" for last, name in pairwise("abcdefghi")
)


@each(
    ("text", "says"),
    [
        (b"storage: [", "not valid YAML"),
        (b"- a\n- b\n", "not a tree of keys"),
        (b"just text", "not a tree of keys"),
        (b"storage: !!python/object:os.system {}", "not valid YAML"),
        (b"\xff\xfe\xfa", "UTF-8"),
        (_LAUGHS, "not valid YAML"),
        ("a: &a {<<: *a}\n", "not valid YAML"),
        ("a: &a [*a]\n", "not valid YAML"),
        ("a: " + "[" * 5_000 + "]" * 5_000, "not valid YAML"),
        ("a: " + "[" * 100 + "]" * 100, "not valid YAML"),
        ("? [a]\n: b\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: {<<: x}\n", "not valid YAML"),
        ("a: !!int '3'\n", "not valid YAML"),
        ("a: *b\n", "not valid YAML"),
        ("#" * (1 << 20) + "\n", "larger than 1048576 bytes"),
        (None, "cannot be read"),
    ],
)
def test_file_that_is_no_tree_is_refused_by_its_name(tmp_path, text, says):
    path = tmp_path / "ister.yml" if text is None else _file(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as refused:
        load_config(path, {})
    assert refused.value.path == str(path)
    assert isinstance(refused.value, InvalidRequestError)
    (problem,) = examine_config(path, {}).problems
    assert problem.key is None
    assert str(path) in problem.message


@each(
    ("text", "key", "line", "says"),
    [
        ("storage:\n  wal:\n    dri: /x\n", "storage.wal.dri", 3, ""),
        ("storage:\n  wal: {dir: /x}\n  ack: fast\n", "storage.ack", 3, ""),
        ("storage:\n  wal:\n    dir: ${MISSING}\n", "storage.wal.dir", 3, ""),
        ("storage:\n  wal:\n    dir: ~nobody-there/x\n", "storage.wal.dir", 3, "~nobody-there/x"),
        # Of what is missing, the line of its section.
        ("\nstorage:\n  mode: wal_cloud\n", "storage.wal.dir", 2, ""),
        (_ANCHORS.replace("*often", "{every_minutes: 0}"), "pipeline.scrub.every_minutes", 13, ""),
        *(
            (_capacity(written), _CAPACITY, 1, f"must be a whole number, not {written!r}")
            for written in ("0100", "1:30", "0_1", "1__0", "1_00", "0o17", "1.5", "1e3")
        ),
        (_capacity("'100'"), _CAPACITY, 1, "not '100'"),
        *((_region(text), _OPTIONS, 3, "without quotes") for text in ("yes", "no", "On", "off")),
        *(
            (
                f"storage: {{wal: {{dir: /x}}}}\nbroker:\n  auth: {{{key}: {text}}}",
                f"broker.auth.{key}",
                3,
                "not true",
            )
            for key, text in (("audit_file", "true"), ("super_admins", "[true]"))
        ),
    ],
)
def test_value_of_a_file_is_refused_with_its_line(tmp_path, text, key, line, says):
    path = _file(tmp_path, text)
    (problem,) = examine_config(path, {}).problems
    assert problem.key == key
    with pytest.raises(ConfigError) as refused:
        load_config(path, {})
    assert refused.value.path == f"{path}:{line}"
    assert says in refused.value.message


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
    examined = examine_config(_file(tmp_path, text), {})
    assert examined.config is None
    assert f"{key} is set twice: on line {first} and on line {second}" in (
        examined.problems[0].message
    )


# -- home directories ---------------------------------------------------------------------------

_PATHS = [path for path, setting in _SETTINGS.items() if setting.is_path]


def test_every_setting_that_sounds_like_a_path_is_one():
    named = {path for path in _SETTINGS if re.search(r"(_file|\.dir|\.path|cloud\.root)$", path)}
    assert named | {"pipeline.export.to", "pipeline.export.schema"} == set(_PATHS)


@each("path", _PATHS)
def test_tilde_is_the_home_directory_in_every_path(tmp_path, monkeypatch, path):
    monkeypatch.setenv("HOME", "/home/ann")
    home = {"ISTER_STORAGE__WAL__DIR": _DIR} if path != "storage.wal.dir" else {}
    for source, environment in (
        (_tree((path, "~/x")), {}),
        (_file(tmp_path, yaml.safe_dump(_tree((path, "~/x")))), {}),
        (_tree((path, "${H}")), {"H": "~/x"}),
        ({}, home | {_variable(path): "~/x"}),
    ):
        assert _get(load_config(source, environment), path) == "/home/ann/x"


def test_tilde_of_the_source_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config("~/data", {}).storage.wal.dir == str(tmp_path / "data" / "wal")
    _file(tmp_path, "storage: {wal: {dir: /x}}")
    assert load_config("~/ister.yml", {}).storage.wal.dir == "/x"
    assert load_config("./~/data", {}).storage.wal.dir == "./~/data/wal"
    with pytest.raises(ConfigError):
        load_config("~nobody-of-that-name/x", {})


# -- environment --------------------------------------------------------------------------------


def test_override_wins_over_file_and_directory(tmp_path):
    path = _file(tmp_path, "storage: {wal: {dir: /x, cache_capacity: 5}}")
    environment = {"ISTER_STORAGE__WAL__DIR": "/y", "PATH": "/bin", "ISTER_CONFIG": "ignored"}
    config = load_config(path, environment)
    assert (config.storage.wal.dir, config.storage.wal.cache_capacity) == ("/y", 5)
    assert load_config(tmp_path, environment).storage.wal.dir == "/y"


def test_source_is_not_changed():
    tree = {"storage": {"wal": {"dir": "${HOME}"}}}
    load_config(tree, {"HOME": "/home", "ISTER_STORAGE__ACK": "written"})
    assert tree == {"storage": {"wal": {"dir": "${HOME}"}}}


# -- all problems at once -------------------------------------------------------------------


def test_examination_of_good_settings_is_what_loading_gives(tmp_path):
    tree = _tree(("storage.wal.retention.size_mb", None), ("storage.cloud.root", None))
    found = examine_config(tree, {"ISTER_BROKER__PORTS__GRPC": "7"})
    assert found.config == load_config(tree, {"ISTER_BROKER__PORTS__GRPC": "7"})
    assert found.problems == ()
    assert found.origins["storage.wal.dir"] is Origin.FILE
    assert found.origins["broker.ports.grpc"] is Origin.ENVIRONMENT
    assert "storage.ack" not in found.origins
    # Null is a value only where it changes something.
    assert found.origins["storage.wal.retention.size_mb"] is Origin.FILE
    assert "storage.cloud.root" not in found.origins
    assert examine_config(str(tmp_path), {}).origins["storage.wal.dir"] is Origin.DIRECTORY


def test_examination_finds_all_problems_and_loading_the_first():
    tree = {
        "storage": {"ack": "soon", "wal": {"dri": _DIR, "cache_capacity": 0}},
        "broker": {"ports": 5, "host": ""},
        "nonsense": 1,
    }
    found = examine_config(tree, {})
    assert found.config is None
    # That there is no `dir` follows from its misspelling, and is not told.
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


# -- lengths of paths -------------------------------------------------------------------------


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


def test_longest_path_can_be_used(tmp_path):
    """Goal: the limit is SQLite's own, and not lower."""
    with ister.open(long_path(tmp_path, 492)) as log:
        topic = log.topic(f"/{'n' * 120}/{'t' * 120}", create=True)
        topic.wait(topic.append(b"x"))
        topic.upload()
