"""Kafka's record batches and messages: what goes in comes out, whatever it is.

A failure prints the smallest input and `@reproduce_failure`; put that above the test to replay it.
"""

import struct

import cramjam
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from ister.base.model import Codec, MessageId, StreamMessage
from ister.broker.kafka.fetch import RecordDecoder
from ister.broker.kafka.protocol import KafkaError
from ister.broker.kafka.records import (
    HEADERS,
    KEY,
    NULL_VALUE,
    TIMESTAMP,
    Record,
    Stored,
    decode_batches,
    decode_headers,
    encode_batch,
    encode_headers,
    to_record,
    to_stored,
)
from ister.format.message import BodyEncoder, decode_message, encode_message
from ister.topic.message import make_message
from tests.support.scale import scaled

EXAMPLES = settings(max_examples=scaled(200, 5000), deadline=None, print_blob=True)
OURS = (KEY, HEADERS, NULL_VALUE, TIMESTAMP)
SIZE_MAX = 1 << 20

I64 = st.sampled_from((0, -1, 1, 2**63 - 1, -(2**63), 1_760_745_600_000)) | st.integers(
    -(2**63), 2**63 - 1
)
TEXT = st.text(max_size=12).map(str.encode)
DATA = TEXT | st.binary(max_size=200)
NAMES = TEXT | st.sampled_from([name.encode() for name in OURS]) | st.binary(max_size=8)
HEADER = st.tuples(NAMES, st.none() | DATA)
RECORDS = st.builds(
    Record,
    timestamp=I64,
    key=st.none() | DATA,
    value=st.none() | DATA,
    headers=st.lists(HEADER, max_size=5).map(encode_headers),
)
ATTRIBUTES = st.dictionaries(
    st.sampled_from(OURS) | st.text(max_size=8),
    st.sampled_from(("1", "", "-1", "-01", "AA==", "AgA=", "AAAA")) | st.text(max_size=8),
    max_size=5,
)


def through_a_message(stored: Stored) -> Record:
    """What a stored message is to Kafka's clients, by the path that a fetch takes."""
    message = StreamMessage(
        msg_id=MessageId(topic_name="/default/t", topic_offset=7),
        payload=stored.payload,
        publish_time=stored.publish_time,
        attributes=stored.attributes,
        routing_key=stored.routing_key,
    )
    body = encode_message(message, Codec.BINCODE2)
    assert decode_message(body, Codec.BINCODE2) == message
    decoder = RecordDecoder(Codec.BINCODE2)
    found = [make_message(7, body, 0, len(body), Codec.BINCODE2)] * 2
    [(offset, first), again] = decoder.records(found)
    assert again == (offset, first)
    found[0].record  # noqa: B018 - a message that someone has decoded before
    assert decoder.records(found) == [(offset, first), again]
    return first


@EXAMPLES
@given(RECORDS)
def test_a_record_comes_back_as_it_was(record):
    assert through_a_message(to_stored(record)) == record


@EXAMPLES
@given(
    st.builds(
        Stored,
        payload=st.binary(max_size=4),
        publish_time=st.sampled_from((0, 1, 2**63)) | st.integers(0, 2**64 - 1),
        routing_key=st.none() | st.text(max_size=5),
        attributes=ATTRIBUTES,
    )
)
def test_a_message_of_another_door_is_a_record_whatever_its_attributes_say(stored):
    record = through_a_message(stored)
    again = to_record(to_stored(record))
    assert again == record
    names = [name for name, _ in decode_headers(record.headers)]
    for name in stored.attributes:
        assert name in OURS or name.encode() in names
    if stored.routing_key is not None:
        assert record.key == stored.routing_key.encode()
    if stored.payload:
        assert record.value == stored.payload


@EXAMPLES
@given(st.lists(RECORDS, min_size=1, max_size=20), st.integers(0, 2**40), st.integers(1, 1000))
def test_batches_are_read_as_they_were_written(records, base, step):
    times = [record.timestamp for record in records]
    if max(times) - min(times) >= 2**63:  # the difference has 64 bits
        records = [record._replace(timestamp=5) for record in records]
    batch = encode_batch(list(enumerate(records, base)))
    [found] = decode_batches(batch, size_max=SIZE_MAX)
    assert found.records == records
    assert found.producer_id == -1
    sparse = encode_batch([(base + n * step, record) for n, record in enumerate(records)])
    assert struct.unpack_from(">q", sparse)[0] == base
    assert struct.unpack_from(">i", sparse, 23)[0] == step * (len(records) - 1)


COMPRESSIONS = {
    1: cramjam.gzip.compress,
    2: cramjam.snappy.compress_raw,
    3: cramjam.lz4.compress,
    4: cramjam.zstd.compress,
}


def compressed(batch: bytes, kind: int, body: bytes | None = None) -> bytes:
    """A batch with its records compressed, or with others."""
    data = bytes(COMPRESSIONS[kind](batch[61:])) if body is None else body
    head = bytearray(batch[:61])
    struct.pack_into(">i", head, 8, 61 - 12 + len(data))
    struct.pack_into(">h", head, 21, kind)
    whole = head + data
    struct.pack_into(">I", whole, 17, crc32c(bytes(whole[21:])))
    return bytes(whole)


@pytest.mark.parametrize("kind", COMPRESSIONS)
@settings(EXAMPLES, max_examples=scaled(30, 500))
@given(st.lists(RECORDS, min_size=1, max_size=10))
def test_compressed_batches_are_read_within_their_bound(kind, records):
    records = [record._replace(timestamp=5) for record in records]
    batch = encode_batch(list(enumerate(records)))
    packed = compressed(batch, kind)
    size = len(batch) - 61
    assert decode_batches(packed, size_max=size)[0].records == records
    with pytest.raises(KafkaError) as refused:
        decode_batches(packed, size_max=size - 1)
    assert refused.value.kafka is ErrorCode.message_too_large


def test_xerials_blocks_are_read_and_bounded():
    records = [Record(5, None, b"x" * 1000, b"\0") for _ in range(10)]
    batch = encode_batch(list(enumerate(records)))
    body = batch[61:]
    blocks = [
        bytes(cramjam.snappy.compress_raw(body[at : at + 777])) for at in range(0, len(body), 777)
    ]
    framed = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    framed += b"".join(struct.pack(">i", len(block)) + block for block in blocks)
    packed = compressed(batch, 2, framed)
    assert decode_batches(packed, size_max=len(body))[0].records == records
    with pytest.raises(KafkaError) as refused:
        decode_batches(packed, size_max=len(body) - 1)
    assert refused.value.kafka is ErrorCode.message_too_large


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_bomb_is_refused_by_its_size(kind):
    batch = encode_batch([(0, Record(5, None, b"x", b"\0"))])
    bomb = compressed(batch, kind, bytes(COMPRESSIONS[kind](bytes(8 << 20))))
    with pytest.raises(KafkaError) as refused:
        decode_batches(bomb, size_max=SIZE_MAX)
    assert refused.value.kafka is ErrorCode.message_too_large


@settings(EXAMPLES, max_examples=scaled(500, 100_000))
@given(
    st.lists(RECORDS, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
    st.integers(0, 200),
    st.sampled_from((0, 1, 2, 3, 4)),
    st.booleans(),
)
def test_damaged_batches_are_refused_with_an_error_of_kafkas(records, changes, cut, kind, seals):
    records = [record._replace(timestamp=5) for record in records]
    batch = encode_batch(list(enumerate(records)))
    damaged = bytearray(batch if kind == 0 else compressed(batch, kind))
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    if cut % 3 == 0:
        del damaged[len(damaged) - cut // 3 :]
    if seals and len(damaged) > 61:
        # So that what is behind the checksum is looked at, too.
        struct.pack_into(">i", damaged, 8, len(damaged) - 12)
        struct.pack_into(">I", damaged, 17, crc32c(bytes(damaged[21:])))
    try:
        found = decode_batches(bytes(damaged), size_max=SIZE_MAX)
    except KafkaError as error:
        assert error.kafka is not ErrorCode.none
    else:
        for one in found:
            for record in one.records:
                assert to_record(to_stored(record)) == record


@EXAMPLES
@given(st.text(max_size=300), st.text(max_size=20))
def test_a_tail_with_a_key_alone_is_that_of_any_message(key, producer):
    encoder = BodyEncoder(Codec.BINCODE2)
    for _ in range(2):
        assert encoder.keyed_tail(producer, key) == encoder.tail(
            producer, "", {}, schema_id=None, schema_version=None, routing_key=key
        )
