"""Stored bodies become the same messages on the wire as protobuf makes of their fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.base.model import Codec, MessageId, StreamMessage
from ister.broker.dispatch import encoder as delivered
from ister.broker.dispatch.consumer_ids import ConsumerIdentity
from ister.broker.dispatch.encoder import DeliveredEncoder, encode, key_of, key_of_record, varint
from ister.errors import CorruptDataError
from ister.format.message import decode_message, encode_message
from ister.subscription.receipts import Receipts
from ister.topic.message import make_message
from ister.wire import danube
from tests.support.message_strategies import EXAMPLES, FILLINGS, MESSAGES, TEXT, U64, damaged

BOTH_CODECS = pytest.mark.parametrize("codec", list(Codec))
CONSUMERS = st.builds(
    ConsumerIdentity, id=st.integers(1, 2**63), topic=TEXT, subscription=TEXT, name=st.just("c")
)
ATTEMPTS = st.sampled_from((1, 2, 255, 256))
RECEIPTS = Receipts("0" * 32)


def in_chunk(body, offset, codec, before=b"", after=b""):
    """A message that was read with others."""
    return make_message(offset, before + body + after, len(before), len(before + body), codec)


def check(data, record, expected):
    """Compares bytes, or fields where the order of attributes is not said."""
    if len(record.attributes) < 2:
        assert data == expected
    else:
        parse = danube.StreamMessage.FromString
        assert parse(data) == parse(expected)
        assert len(data) == len(expected)


@pytest.mark.nightly
@BOTH_CODECS
@EXAMPLES
@given(data=st.data())
def test_any_stored_message_is_what_protobuf_makes_of_it(codec, data):
    consumer = data.draw(CONSUMERS)
    encoder = DeliveredEncoder(consumer, RECEIPTS)
    # One encoder for all: what it keeps from one message must not show in the next.
    for record in data.draw(st.lists(MESSAGES[codec], min_size=1, max_size=4)) * 2:
        offset, attempt = data.draw(U64), data.draw(ATTEMPTS)
        body = encode_message(record, codec)
        around = data.draw(st.tuples(st.binary(max_size=9), st.sampled_from(FILLINGS)))
        message = in_chunk(body, offset, codec, *around)
        found, size = encoder.encode(message, attempt)
        check(found, record, encode(record, offset, attempt, consumer, RECEIPTS))
        assert size == len(record.payload)
        assert key_of(message) == key_of_record(record)


@pytest.mark.nightly
@BOTH_CODECS
@EXAMPLES
@given(data=st.data())
def test_damaged_bodies_are_left_to_the_decoder(codec, data):
    consumer = data.draw(CONSUMERS)
    encoder = DeliveredEncoder(consumer, RECEIPTS)
    record = data.draw(MESSAGES[codec])
    whole = encode_message(record, codec)
    encoder.encode(in_chunk(whole, 1, codec), 1)  # so that its parts are known
    body = data.draw(damaged(whole))
    message = in_chunk(body, 1, codec, after=data.draw(st.sampled_from((b"", *FILLINGS))))
    found = encoder.encode(message, 1)
    try:
        read = decode_message(body, codec)
    except CorruptDataError:
        assert found is None
        assert isinstance(key_of(message), str)  # the damage may be elsewhere
    else:
        check(found[0], read, encode(read, 1, 1, consumer, RECEIPTS))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 20_000, 3_000_000])
def test_payloads_of_all_sizes(size):
    consumer = ConsumerIdentity(7, "/default/t", "s", "c")
    record = StreamMessage(payload=b"\xff" * size, msg_id=MessageId(producer_id=1))
    message = in_chunk(encode_message(record, Codec.BINCODE2), 3, Codec.BINCODE2, b"ab", b"cd")
    found = DeliveredEncoder(consumer, RECEIPTS).encode(message, 1)
    assert found == (encode(record, 3, 1, consumer, RECEIPTS), size)


def test_message_that_was_decoded_is_left_to_its_fields():
    record = StreamMessage(payload=b"a", producer_name="p")
    message = in_chunk(encode_message(record, Codec.BINCODE2), 3, Codec.BINCODE2)
    assert message.record == record
    consumer = ConsumerIdentity(7, "/default/t", "s", "c")
    assert DeliveredEncoder(consumer, RECEIPTS).encode(message, 1) is None
    assert key_of(message) == "p"


@EXAMPLES
@given(value=U64)
def test_varints_are_protobufs(value):
    expected = danube.AckResponse(request_id=value).SerializeToString()
    assert (b"\x08" + varint(value) if value else b"") == expected


def test_what_is_kept_is_bounded():
    consumer = ConsumerIdentity(7, "/default/t", "s", "c")
    encoder = DeliveredEncoder(consumer, RECEIPTS)
    for number in range(10_000):
        record = StreamMessage(
            msg_id=MessageId(producer_id=number),
            routing_key=f"k{number}",
            publish_time=number << 30,
        )
        message = in_chunk(encode_message(record, Codec.BINCODE2), number, Codec.BINCODE2)
        found, _ = encoder.encode(message, 1)
        assert found == encode(record, number, 1, consumer, RECEIPTS)
    assert len(encoder._heads) <= 64
    assert max(len(delivered._tails), len(delivered._high_parts)) <= 4096
