"""Every setting as a list: sentences, defaults, bounds, and what is secret."""

from dataclasses import fields, is_dataclass

import yaml

from ister.config import Config, load_config
from ister.config.reference import example, masked, sections, settings, value_of
from tests.support.cases import each

SETTINGS = {setting.path: setting for setting in settings()}


def leaves(value, prefix=""):
    for item in fields(value):
        below = getattr(value, item.name)
        if is_dataclass(below):
            yield from leaves(below, f"{prefix}{item.name}.")
        elif item.name != "given_as":
            yield f"{prefix}{item.name}"


def test_every_setting_is_listed_once():
    assert sorted(SETTINGS) == sorted(leaves(Config()))
    assert len(settings()) == len(SETTINGS)


@each("path", SETTINGS)
def test_default_is_the_one_in_force(path):
    setting = SETTINGS[path]
    assert setting.default == value_of(Config(), path)
    assert setting.is_optional or setting.default is not None
    assert setting.variable == "ISTER_" + path.replace(".", "__").upper()
    if setting.choices:
        assert setting.kind == "choice"
        assert setting.default in setting.choices
    if setting.low is not None and setting.default is not None:
        assert setting.low <= setting.default
    assert (setting.default is None) is (
        setting.shown_default == "none" and not setting.choices
    ) or (setting.default in ([], {}))


@each(
    ("path", "shown", "bounds"),
    [
        ("storage.wal.cache_max_bytes", "16 MiB", "at least 1 KiB"),
        ("storage.wal.writer_threads", "4", "1 to 64"),
        ("storage.mode", "wal_cloud", "wal_cloud, local_only, memory, bucket"),
        ("storage.wal.dir", "none", ""),
        ("broker.auto_create_topics", "true", ""),
        ("broker.bootstrap_namespaces", "default", ""),
        ("storage.max_message_size", "10 MiB", "1 to 64 MiB"),
        ("storage.cloud.retention.size_mb", "none", "at least 1"),
    ],
)
def test_default_and_bounds_in_words(path, shown, bounds):
    assert (SETTINGS[path].shown_default, SETTINGS[path].bounds) == (shown, bounds)


def test_secrets_are_known_as_such():
    secret = {path for path, setting in SETTINGS.items() if setting.is_secret}
    assert secret == {
        "broker.auth.jwt.secret",
        "storage.cloud.options",
        "storage.metadata.password",
        "pipeline.conf",
        "pipeline.export.catalog",
    }


@each(
    ("path", "value", "shown"),
    [
        ("storage.metadata.password", "p", "***"),
        ("storage.metadata.password", None, None),
        ("storage.cloud.options", {"region": "r", "key": "k"}, {"region": "r", "key": "***"}),
        ("storage.cloud.root", "s3://me:pass@bucket/p", "s3://***@bucket/p"),
        ("storage.cloud.root", "s3://bucket/p@q", "s3://bucket/p@q"),
        ("storage.metadata.endpoints", ["http://a:b@h:1", "h:2"], ["http://***@h:1", "h:2"]),
        ("broker.ports.grpc", 5, 5),
    ],
)
def test_nothing_secret_is_shown(path, value, shown):
    assert masked(SETTINGS[path], value) == shown


def test_sections_are_those_of_the_tree_and_have_sentences():
    expected = {
        ".".join(path.split(".")[:size])
        for path in SETTINGS
        for size in range(1, path.count(".") + 1)
    }
    assert {section.path for section in sections()} == expected
    for section in sections():
        assert section.says.endswith("."), section.path
        assert section.says[0].isupper()


def test_example_has_every_setting_and_loads_to_the_defaults():
    tree = yaml.safe_load(example())
    assert load_config(tree, {}) == load_config("./ister-data", {})
    for path in SETTINGS:
        node = tree
        for name in path.split("."):
            node = node[name]
    assert all(len(line) <= 100 for line in example().splitlines())
