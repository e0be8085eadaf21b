"""From Danube to Ister and back, as `docs/howto/from-danube.md` walks through it."""

import json
import struct
import zlib

import pytest

from ister.base.model import Codec
from ister.cli.main import main
from ister.config import load_config
from ister.format.message import decode_message
from ister.topic.log import Log
from tests.servers.broker import BrokerProcess, broker_settings
from tests.support.danube import SHARED, connect, offsets, run
from tests.support.danube_files import (
    BODY_OF_LAYOUT,
    TOPIC,
    DanubeBucket,
    a_danube_message,
    messages_of,
    write_wal,
)

SUBSCRIPTION = "/topics/default/orders/subscriptions/billing"
METADATA = {
    SUBSCRIPTION: {"subscription_name": "billing", "subscription_type": 1, "consumer_name": "c"},
    f"{SUBSCRIPTION}/cursor": 11,
}
SETTINGS = {"storage": {"cloud": {"layout": "segments"}}}


@pytest.mark.parametrize("layout", ["0.5", "0.6.2", "0.9"])
def test_topic_moves_with_its_history_its_cursors_and_its_clients(tmp_path, capsys, layout):
    data, body = tmp_path / "data", BODY_OF_LAYOUT[layout]
    bucket = DanubeBucket(data / "objects")
    bucket.put(layout, 0, 20)
    bucket.put(layout, 20, 30)
    write_wal(data / "wal/default/orders", body, (20, 30), (30, 40))
    (tmp_path / "metadata.json").write_text(json.dumps(METADATA))
    assert main(["recover", "--data", str(data)]) == 0
    assert main(["danube", "import", str(tmp_path / "metadata.json"), "--data", str(data)]) == 0
    with BrokerProcess(tmp_path, settings=SETTINGS) as broker:
        run(use(broker, body))
    config = load_config(broker_settings(tmp_path, SETTINGS), {})
    with Log(config, background=False) as log:
        log.topic(TOPIC).upload()
        records = [message.record for message in log.topic(TOPIC).read()]
    assert records[:40] == messages_of(0, 40, body)
    assert [record.payload for record in records[40:]] == [b"new-0", b"new-1"]
    go_back(tmp_path, capsys, layout, records)


async def use(broker, body):
    """What Danube's own client gets and does, unchanged."""
    async with connect(broker) as session:
        inbox = await session.consumer(TOPIC, subscription="billing", kind=SHARED)
        await session.send(TOPIC, ["new-0", "new-1"])
        # Behind the last acknowledged offset, through the bucket and the files, to what is new.
        received = await inbox.take(30)
        assert offsets(received) == list(range(12, 42))
        for message in received[:28]:
            wanted = a_danube_message(message.msg_id.topic_offset, body)
            assert (message.payload, message.publish_time, message.producer_name) == (
                wanted.payload,
                wanted.publish_time,
                wanted.producer_name,
            )
            assert dict(message.attributes) == wanted.attributes
        assert [message.payload for message in received[28:]] == [b"new-0", b"new-1"]
        # A subscription whose cursor cannot be read begins by time.
        late = await session.consumer(TOPIC, "late", subscription="late")
        await session.seek(TOPIC, "late", publish_time_ms=a_danube_message(25, body).publish_time)
        assert offsets(await late.take(3)) == [25, 26, 27]


def go_back(path, capsys, layout, records):
    """What Danube 0.9 and later needs: segments that it can read, and the keys that name them."""
    config = path / "back.yml"
    config.write_text(json.dumps(broker_settings(path, SETTINGS)))
    capsys.readouterr()
    code = main(["danube", "export", TOPIC, "--config", str(config)])
    printed = capsys.readouterr()
    if layout != "0.9":
        # Objects of older layouts stay where they are, and Danube 0.9 does not find them there.
        assert code == 1
        assert "is not in the layout segments" in printed.err
        return
    assert code == 0
    keys = json.loads(printed.out)
    assert keys[f"{SUBSCRIPTION}/cursor"] >= 11
    root = "/danube/storage/topics/default/orders/"
    assert keys[f"{root}state"]["last_committed_offset"] == 41
    folder = path / "data/objects/storage/topics/default/orders/segments"
    found = []
    for key in sorted(key for key in keys if key.startswith(f"{root}segments/0")):
        described = keys[key]
        assert key.endswith(f"{described['start_offset']:020d}")
        assert described["start_offset"] == len(found)
        found += decoded((folder / described["segment_id"]).read_bytes(), len(found))
        assert described["end_offset"] == len(found) - 1
    assert found == records


def decoded(data, offset):
    """The messages of a segment, read as Danube's reader reads them."""
    found = []
    while data:
        number, length, crc = struct.unpack_from("<QII", data)
        body, data = data[16 : 16 + length], data[16 + length :]
        assert (number, crc) == (offset + len(found), zlib.crc32(body))
        found.append(decode_message(body, Codec.BINCODE2))
    return found
