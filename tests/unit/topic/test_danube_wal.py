"""WAL directories that Danube wrote open as they are."""

import pytest

from ister.cli.main import main
from ister.config import load_config
from ister.errors import DataGapError
from ister.topic.log import Log
from tests.support.danube_files import TOPIC, DanubeBucket, messages_of, write_wal

BODIES = ["0.5", "0.5.1", "0.6", "0.12"]


def opened(path, mode="wal_cloud"):
    tree = {"storage": {"mode": mode, "wal": {"dir": str(path / "wal")}}}
    return Log(load_config(tree, {}), background=False)


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only"])
@pytest.mark.parametrize("body", BODIES)
def test_directory_is_read_field_by_field_and_goes_on(tmp_path, body, mode):
    """Goal: the checkpoint is Danube's, with paths of another machine; the frames say it all."""
    write_wal(tmp_path / "wal/default/orders", body, (0, 10), (10, 300), (300, 330))
    with opened(tmp_path, mode) as log:
        topic = log.topic(TOPIC)
        assert topic.codec == ("bincode1" if body == "0.5" else "bincode2")
        assert [message.record for message in topic.read()] == messages_of(0, 330, body)
        assert topic.append(b"new") == 330
        topic.flush()
    with opened(tmp_path, mode) as log:
        *old, new = (message.record for message in log.topic(TOPIC).read())
    assert old == messages_of(0, 330, body)
    assert new.payload == b"new"


@pytest.mark.parametrize(
    "torn", [b"\x1e", b"\x1e" + bytes(15), b"\x1e" + bytes(7) + b"\x63\0\0\0ab"]
)
def test_torn_tail_is_set_aside_and_everything_before_it_read(tmp_path, caplog, torn):
    directory = tmp_path / "wal/default/orders"
    write_wal(directory, "0.12", (0, 10), (10, 30), torn=torn)
    with opened(tmp_path) as log:
        topic = log.topic(TOPIC)
        assert [message.record for message in topic.read()] == messages_of(0, 30, "0.12")
        assert topic.append(b"new") == 30
    (aside,) = directory.glob("*.cut-*")
    assert aside.read_bytes() == torn
    assert "set aside" in caplog.text


def test_directory_that_begins_in_the_midst_of_the_topic_is_read(tmp_path):
    """Goal: Danube deletes the oldest files once they are exported."""
    write_wal(tmp_path / "wal/default/orders", "0.12", (100, 110), (110, 130))
    with opened(tmp_path, "local_only") as log:
        topic = log.topic(TOPIC)
        assert topic.watermarks.trimmed == 100
        assert [message.record for message in topic.read()] == messages_of(100, 130, "0.12")


@pytest.mark.parametrize("layout", ["0.5", "0.6.2", "0.9"])
@pytest.mark.parametrize("first", [0, 15, 20])
def test_files_continue_what_is_in_the_bucket(tmp_path, layout, first):
    body = {"0.5": "0.5", "0.6.2": "0.6", "0.9": "0.12"}[layout]
    DanubeBucket(tmp_path / "objects").put(layout, 0, 20)
    write_wal(tmp_path / "wal/default/orders", body, (first, 22), (22, 40))
    assert main(["recover", "--data", str(tmp_path)]) == 0
    with opened(tmp_path) as log:
        topic = log.topic(TOPIC)
        assert [message.record for message in topic.read()] == messages_of(0, 40, body)
        topic.upload()
        assert topic.watermarks.tiered == 40
        assert [message.record for message in topic.read()] == messages_of(0, 40, body)


def test_offsets_that_neither_has_are_told(tmp_path):
    DanubeBucket(tmp_path / "objects").put("0.9", 0, 20)
    write_wal(tmp_path / "wal/default/orders", "0.12", (25, 30))
    assert main(["recover", "--data", str(tmp_path)]) == 0
    with opened(tmp_path) as log, pytest.raises(DataGapError) as caught:
        list(log.topic(TOPIC).read())
    assert (caught.value.start, caught.value.end) == (20, 25)
