"""Settings: every key, its bounds, where they come from, and what is refused by name."""

import pytest

from ister.config import (
    BufferFull,
    Config,
    StorageMode,
    load_config,
)
from ister.errors import ConfigError, InvalidRequestError
from ister.model import AckLevel, Codec

# key: (default, another value as written, the same as kept, lowest, highest)
_STORAGE = {
    "mode": (StorageMode.LOCAL_ONLY, "memory", StorageMode.MEMORY),
    "ack": (AckLevel.SYNCED, "written", AckLevel.WRITTEN),
    "codec": (Codec.BINCODE2, "bincode1", Codec.BINCODE1),
    "max_message_size": (10_485_760, 100, 100),
}
_WAL = {
    "dir": (None, "/x", "/x"),
    "cache_capacity": (1024, 7, 7),
    "cache_max_bytes": (16_777_216, 2048, 2048),
    "fsync_interval_ms": (5000, 10, 10),
    "fsync_max_batch_bytes": (10_485_760, 1, 1),
    "rotate_max_bytes": (536_870_912, 4096, 4096),
    "rotate_max_seconds": (3600, 60, 60),
    "stream_chunk_size": (4_194_304, 65_536, 65_536),
    "buffer_max_bytes": (67_108_864, 65_536, 65_536),
    "buffer_full": (BufferFull.BLOCK, "refuse", BufferFull.REFUSE),
    "writer_threads": (4, 1, 1),
    "max_open_files": (256, 1, 1),
}
_BOUNDS = {
    "storage.max_message_size": (1, 64 * 1024 * 1024),
    "storage.wal.cache_capacity": (1, 1 << 24),
    "storage.wal.cache_max_bytes": (1024, None),
    "storage.wal.fsync_interval_ms": (1, 3_600_000),
    "storage.wal.fsync_max_batch_bytes": (1, None),
    "storage.wal.rotate_max_bytes": (4096, None),
    "storage.wal.rotate_max_seconds": (1, None),
    "storage.wal.stream_chunk_size": (65_536, 64 * 1024 * 1024),
    "storage.wal.buffer_max_bytes": (65_536, None),
    "storage.wal.writer_threads": (1, 64),
    "storage.wal.max_open_files": (1, None),
}


def _tree(path, value):
    """The tree in which the key at `path` has a value."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def _get(config, path):
    for part in path.split("."):
        config = getattr(config, part)
    return config


def test_every_key_has_a_row_here():
    storage = Config().storage
    assert set(_STORAGE) | {"wal"} == set(storage.__dataclass_fields__)
    assert set(_WAL) == set(storage.wal.__dataclass_fields__)
    numbers = {f"storage.{k}" for k, row in _STORAGE.items() if type(row[0]) is int}
    numbers |= {f"storage.wal.{k}" for k, row in _WAL.items() if type(row[0]) is int}
    assert numbers == set(_BOUNDS)


@pytest.mark.parametrize(
    ("path", "row"),
    [
        *((f"storage.{key}", row) for key, row in _STORAGE.items()),
        *((f"storage.wal.{key}", row) for key, row in _WAL.items()),
    ],
)
def test_key_has_its_default_and_takes_a_value(path, row):
    default, written, kept = row
    assert _get(load_config({}, {}), path) == default
    name = "ISTER_" + path.upper().replace(".", "__")
    # Most values make sense in a log with a directory alone.
    wal = {"dir": None if kept is StorageMode.MEMORY else "/x"}
    tree = {"storage": {"wal": wal}}
    assert _get(load_config(tree, {name: str(written)}), path) == kept
    (wal if path.startswith("storage.wal") else tree["storage"])[path.split(".")[-1]] = written
    assert _get(load_config(tree, {}), path) == kept


@pytest.mark.parametrize(("path", "bounds"), _BOUNDS.items(), ids=_BOUNDS)
def test_bounds_are_inclusive_and_named(path, bounds):
    low, high = bounds
    for value in (low, high):
        if value is not None:
            assert _get(load_config(_tree(path, value), {}), path) == value
    for value in (low - 1, None if high is None else high + 1):
        if value is not None:
            with pytest.raises(ConfigError, match=f"{path} is {value}.*{low}"):
                load_config(_tree(path, value), {})


@pytest.mark.parametrize("path", _BOUNDS)
@pytest.mark.parametrize("value", ["5", 5.0, True, None, [5], {"a": 1}], ids=repr)
def test_number_of_another_kind_is_refused(path, value):
    with pytest.raises(ConfigError, match=f"{path} has to be a whole number"):
        load_config(_tree(path, value), {})


@pytest.mark.parametrize("path", ["storage.mode", "storage.ack", "storage.codec"])
@pytest.mark.parametrize("value", ["sync", "SYNCED", "", None, 1, False, []], ids=repr)
def test_choice_that_does_not_exist_is_refused_with_those_that_do(path, value):
    with pytest.raises(ConfigError, match=f"{path} is .*one of: "):
        load_config(_tree(path, value), {})


@pytest.mark.parametrize("value", [5, "", "a\0b", ["x"], True], ids=repr)
def test_directory_that_is_no_text_is_refused(value):
    with pytest.raises(ConfigError, match=r"storage\.wal\.dir"):
        load_config(_tree("storage.wal.dir", value), {})


@pytest.mark.parametrize(
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
        ({1: 2}, "1", "known: storage"),
    ],
)
def test_unknown_key_is_refused_with_its_path_and_the_nearest(tree, path, hint):
    with pytest.raises(ConfigError) as refused:
        load_config(tree, {})
    assert f"unknown key '{path}'" in str(refused.value)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    "tree", [{"storage": 5}, {"storage": []}, {"storage": {"wal": "x"}}], ids=repr
)
def test_value_where_a_tree_belongs_is_refused(tree):
    with pytest.raises(ConfigError, match="has to be a tree of keys"):
        load_config(tree, {})


@pytest.mark.parametrize("tree", [{}, {"storage": None}, {"storage": {"wal": None}}], ids=repr)
def test_empty_trees_are_defaults(tree):
    assert load_config(tree, {}) == Config()


# -- sources ------------------------------------------------------------------------------------


def test_none_keeps_everything_in_memory():
    config = load_config(None, {})
    assert (config.storage.mode, config.storage.wal.dir) == (StorageMode.MEMORY, None)


def test_directory_gets_its_logs_below(tmp_path):
    for source in (tmp_path, str(tmp_path)):
        config = load_config(source, {})
        assert config.storage.wal.dir == str(tmp_path / "wal")
        assert config.storage.mode is StorageMode.LOCAL_ONLY


@pytest.mark.parametrize("suffix", ["yml", "yaml"])
def test_yaml_file_is_read(tmp_path, suffix):
    path = tmp_path / f"ister.{suffix}"
    path.write_text("storage:\n  ack: written\n  wal: {dir: /x, cache_capacity: 5}\n")
    config = load_config(path, {})
    assert config.storage.ack is AckLevel.WRITTEN
    assert (config.storage.wal.dir, config.storage.wal.cache_capacity) == ("/x", 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"storage: [", "not valid YAML"),
        (b"- a\n- b\n", "does not hold a tree"),
        (b"just text", "does not hold a tree"),
        (b"storage:\n  wal:\n    dri: /x\n", "unknown key 'storage.wal.dri'"),
        (b"storage: !!python/object:os.system {}", "not valid YAML"),
        (b"\xff\xfe\xfa", "the config file"),
    ],
    ids=["broken", "list", "text", "unknown key", "python", "not UTF-8"],
)
def test_yaml_file_that_is_wrong_is_refused(tmp_path, content, message):
    path = tmp_path / "ister.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path, {})


def test_yaml_file_that_is_empty_is_defaults(tmp_path):
    path = tmp_path / "ister.yml"
    path.write_text("# nothing\n")
    assert load_config(path, {}) == Config()


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
    config = load_config({}, {})
    with pytest.raises(AttributeError):
        config.storage.wal.dir = "/x"


# -- environment --------------------------------------------------------------------------------


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("/data/a #1", id="comment sign"),
        pytest.param("/data: x", id="colon"),
        pytest.param("null", id="null"),
        pytest.param("~", id="tilde"),
        pytest.param("2024", id="digits"),
        pytest.param("[", id="bracket"),
    ],
)
@pytest.mark.parametrize("way", ["reference", "override"])
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("key", ["ack", "max_message_size"])
def test_override_that_is_no_value_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"(?i)storage(\\.|__){key}"):
        load_config({}, {f"ISTER_STORAGE__{key.upper()}": "["})


def test_override_below_an_empty_tree_is_taken():
    config = load_config({"storage": None}, {"ISTER_STORAGE__WAL__DIR": "/y"})
    assert config.storage.wal.dir == "/y"


def test_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("ISTER_STORAGE__WAL__CACHE_CAPACITY", "77")
    assert load_config({}).storage.wal.cache_capacity == 77


# -- contradictions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"storage": {"mode": "memory", "wal": {"dir": "/x"}}}, "storage.mode is 'memory'"),
        ({"storage": {"ack": "tiered"}}, "storage.ack is 'tiered'"),
    ],
)
def test_contradiction_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(tree, {})
    assert refused.value.hint


@pytest.mark.parametrize(
    "storage", [{"mode": "memory", "ack": "synced"}, {"mode": "local_only", "ack": "written"}]
)
def test_level_that_a_log_in_memory_cannot_keep_is_refused(storage):
    with pytest.raises(ConfigError):
        load_config({"storage": storage}, {})


@pytest.mark.parametrize("source", [3, b"./data", object()], ids=["number", "bytes", "object"])
def test_source_of_another_kind_is_refused(source):
    with pytest.raises(ConfigError, match="cannot open"):
        load_config(source, {})
