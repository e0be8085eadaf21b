"""The storage settings that a client may see: complete, and without secrets."""

import json

import pytest

from ister.config import load_config
from ister.errors import InvalidRequestError
from ister.wire.settings import decode_settings, encode_settings, has_local_stores
from tests.support.cases import each

SECRETS = {
    "access_key": "AKIASECRET1",
    "access_key_id": "AKIASECRET2",
    "secret_key": "hidden-secret-3",
    "secret_access_key": "hidden-secret-4",
    "session_token": "hidden-secret-5",
    "account_key": "hidden-secret-6",
    "sas_token": "hidden-secret-7",
    "credential": "hidden-secret-8",
    "credential_path": "/etc/hidden-secret-9",
    "token": "hidden-secret-10",
    "server_side_encryption_customer_key": "hidden-secret-11",
    "encryption_key": "hidden-secret-12",
    "external_id": "hidden-secret-13",
    "profile": "hidden-secret-14",
    "invented_next_year": "hidden-secret-15",
}


def test_settings_carry_no_secret():
    tree = {
        "storage": {
            "wal": {"dir": "/data/wal"},
            "cloud": {
                "backend": "s3",
                "root": "s3://bucket/prefix",
                "options": {**SECRETS, "region": "eu-1", "endpoint": "http://127.0.0.1:9000"},
            },
            "metadata": {
                "backend": "etcd",
                "endpoints": ["10.0.0.1:2379", "user:hidden-secret-16@10.0.0.2:2379"],
                "username": "reader",
                "password": "hidden-secret-17",
            },
        }
    }
    data = encode_settings(load_config(tree, {}))
    for value in SECRETS.values():
        assert value not in data.decode()
    assert b"hidden" not in data
    storage = decode_settings(data)["storage"]
    assert storage["cloud"] == {
        "backend": "s3",
        "root": "s3://bucket/prefix",
        "options": {"region": "eu-1", "endpoint": "http://127.0.0.1:9000"},
    }
    assert storage["metadata"] == {
        "backend": "etcd",
        "endpoints": ["10.0.0.1:2379"],
        "username": "reader",
    }


def test_address_that_may_hold_credentials_is_not_told():
    for endpoint in (
        "http://key:hidden@127.0.0.1:9000",
        "http://key:hid/den@127.0.0.1:9000",
        "https://account.example.com/?sig=hidden",
        "https://account.example.com/#hidden",
        "key:hidden@127.0.0.1:9000",
    ):
        check_address(endpoint)


def check_address(endpoint):
    options = {"endpoint": endpoint, "region": "eu-1"}
    tree = {
        "storage": {
            "wal": {"dir": "/data/wal"},
            "cloud": {"backend": "s3", "root": "s3://bucket", "options": options},
        }
    }
    data = encode_settings(load_config(tree, {}))
    assert b"hid" not in data
    assert decode_settings(data)["storage"]["cloud"]["options"] == {"region": "eu-1"}


def test_settings_without_secrets_arrive_as_they_are():
    for source in (
        None,
        "/data",
        {"storage": {"mode": "local_only", "wal": {"dir": "/data/wal"}}},
        {"storage": {"mode": "memory", "ack": "memory"}},
        {
            "storage": {
                "ack": "tiered",
                "codec": "bincode1",
                "max_message_size": 1000,
                "wal": {"dir": "/data/wal", "retention": {"time_minutes": None, "size_mb": 5}},
                "uploader": {"engine": "none"},
                "cloud": {
                    "root": "/bucket",
                    "retention": {"time_minutes": 7},
                    "call_timeout_seconds": 9,
                },
                "cloud_reader": {"read_ahead": False, "on_damage": "skip"},
                "metadata": {"path": "/meta.db", "root_prefix": "/ister", "lease_ttl_seconds": 30},
            }
        },
        {
            "storage": {
                "wal": {"dir": "/data/wal"},
                "cloud": {
                    "backend": "s3",
                    "root": "s3://bucket/a@b",
                    "options": {"region": "eu-1", "virtual_host_style": True},
                },
                "metadata": {"backend": "etcd", "endpoints": ["a:1", "b:2"]},
            }
        },
    ):
        config = load_config(source, {})
        assert load_config(decode_settings(encode_settings(config)), {}) == config


def test_what_is_not_about_the_stores_stays_with_the_server():
    """Goal: who may call a broker, and what it does with topics, is not told to its clients."""
    tree = {
        "broker": {"auth": {"super_admins": ["root-of-all"], "audit_file": "/var/audit"}},
        "dispatch": {"max_unacked_messages": 17},
        "storage": {"mode": "local_only"},
    }
    data = encode_settings(load_config(tree, {}))
    assert set(decode_settings(data)) == {"storage"}
    assert b"root-of-all" not in data
    assert b"audit" not in data


def test_settings_name_places_whatever_directory_the_client_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {
        "storage": {
            "wal": {"dir": "data/wal"},
            "cloud": {"root": "bucket"},
            "metadata": {"path": "meta.db"},
        }
    }
    storage = decode_settings(encode_settings(load_config(tree, {})))["storage"]
    assert storage["wal"]["dir"] == str(tmp_path / "data/wal")
    assert storage["cloud"]["root"] == str(tmp_path / "bucket")
    assert storage["metadata"]["path"] == str(tmp_path / "meta.db")


def test_settings_that_would_give_away_the_clients_environment_are_refused():
    for tree in (
        {"storage": {"cloud": {"root": "s3://elsewhere/${AWS_SECRET_ACCESS_KEY}"}}},
        {"storage": {"metadata": {"endpoints": ["a:1", "${HOME}"]}}},
        {"storage": {"cloud": {"options": {"${HOME}": "x"}}}},
        {"storage": {"wal": {"dir": "\u0024{HOME}"}}},
        [],
        "x",
        None,
    ):
        data = json.dumps({"version": 1, "settings": tree}).encode()
        with pytest.raises(InvalidRequestError):
            decode_settings(data)


def test_settings_nested_without_an_end_are_refused():
    data = b'{"version":1,"settings":' + b'{"a":' * 500 + b"1" + b"}" * 501
    with pytest.raises(InvalidRequestError, match="deep"):
        decode_settings(data)


@each("backend", ["fs", "s3"])
def test_paths_are_shown_to_administrators_alone(backend):
    root = "/srv/bucket" if backend == "fs" else "s3://bucket/prefix"
    metadata = {"backend": "etcd", "endpoints": ["10.0.0.1:2379"]}
    tree = {
        "storage": {
            "wal": {"dir": "/srv/wal"},
            "cloud": {"backend": backend, "root": root},
            "metadata": metadata if backend == "s3" else {"path": "/srv/metadata.db"},
        }
    }
    config = load_config(tree, {})
    assert b"/srv/wal" in encode_settings(config)
    data = encode_settings(config, shows_paths=False)
    assert b"/srv" not in data
    assert has_local_stores(config) == (backend == "fs")
    found = load_config(decode_settings(data), {}).storage
    assert backend == "fs" or (found.cloud, found.metadata) == (
        config.storage.cloud,
        config.storage.metadata,
    )
