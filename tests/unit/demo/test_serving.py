"""The demo's broker has the demo's settings, whatever the environment says."""

import json

import pytest

from demo.serving import BrokerProcess, clean_environment
from ister.config import load_config
from ister.errors import InvariantError, UnavailableError


def test_settings_of_the_environment_are_left_out():
    given = {
        "PATH": "/bin",
        "ISTER_TOKEN": "kept: it is no setting",
        "ISTER_STORAGE__WAL__DIR": "/somebody's",
        "ISTER_BROKER__HOST": "0.0.0.0",
        "ISTER_CONFIG": "/somebody's/ister.yml",
        "ISTER_FAILPOINTS": "x",
    }
    assert set(clean_environment(given)) == {"PATH", "ISTER_TOKEN"}


def test_the_settings_are_a_config(tmp_path):
    for engine in ["spark", "embedded"]:
        broker = BrokerProcess(str(tmp_path), engine=engine)
        config = load_config(broker.config)
        assert config.storage.uploader.engine == engine, engine
        assert config.storage.wal.dir == str(tmp_path / "wal"), engine
        broker.configure(wal="another")
        assert load_config(broker.config).storage.wal.dir == str(tmp_path / "another"), engine


def test_a_broker_that_does_not_start_says_why(tmp_path):
    broker = BrokerProcess(str(tmp_path), engine="spark")
    with open(broker.config, "w") as file:
        json.dump({"storage": {"nothing_like_that": 1}}, file)
    with pytest.raises(UnavailableError, match="nothing_like_that"):
        broker.start()
    assert broker.pid is None
    broker.stop()


def test_a_broker_that_was_never_started_has_no_address(tmp_path):
    with pytest.raises(InvariantError):
        _ = BrokerProcess(str(tmp_path), engine="spark").addresses
