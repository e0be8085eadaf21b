"""Message bodies in both codecs: bytes, limits, refusals, and the hot path's encoder."""

import random

import pytest

from ister.base.model import Codec, MessageId, StreamMessage
from ister.errors import CorruptDataError, InvalidRequestError
from ister.format.message import (
    BodyEncoder,
    decode_message,
    decode_payload,
    decode_publish_time,
    decode_suffix,
    encode_message,
    recognise,
    split,
)
from tests.support.builders import a_message, bincode_body, bincode_integer, measured_allocation
from tests.support.cases import each
from tests.support.danube_files import a_danube_message, danube_body

BOTH_CODECS = each("codec", list(Codec))
MIB = 1024 * 1024


def body_by_parts(message, encoder):
    identity = message.msg_id
    head = encoder.head(
        message.request_id, identity.producer_id, identity.topic_name, identity.broker_addr
    )
    tail = encoder.tail(
        message.producer_name,
        message.subscription_name,
        message.attributes,
        schema_id=message.schema_id,
        schema_version=message.schema_version,
        routing_key=message.routing_key,
    )
    offset = identity.topic_offset
    return encoder.body(head, offset, message.payload, message.publish_time, tail)


@BOTH_CODECS
def test_parts_that_an_encoder_keeps_are_those_of_their_message(codec):
    encoder = BodyEncoder(codec)
    messages = [
        a_message(
            request_id=number,
            producer_name=f"p{number % 3}",
            subscription_name=(None, "", "s")[number % 3],
            attributes={"k": str(number)} if number % 2 else {},
            msg_id=MessageId(
                producer_id=number % 2,
                topic_name=f"/default/{number % 3}",
                broker_addr="b" * (number % 5),
                topic_offset=number,
            ),
        )
        for number in range(300)
    ]
    for message in messages:
        assert body_by_parts(message, encoder) == encode_message(message, codec)


@BOTH_CODECS
@each("first", [0, 249, 65534, 2**32 - 2])
def test_messages_that_differ_in_offset_and_payload_are_encoded_as_each_alone(codec, first):
    encoder = BodyEncoder(codec)
    head = encoder.head(0, 0, "/default/t", "")
    tail = encoder.tail("p", "", {"k": "v"}, schema_id=None, schema_version=None, routing_key=None)
    payloads = [b"x" * size for size in (0, 0, 250, 251, 250, 65536)]
    assert encoder.bodies(head, first, payloads, 2**32, tail) == [
        encoder.body(head, offset, payload, 2**32, tail)
        for offset, payload in enumerate(payloads, first)
    ]


@BOTH_CODECS
@each(
    "fields",
    [
        *({"payload": bytes(size)} for size in (65535, 65536, 10 * MIB)),
        {"attributes": {str(n): "x" * n for n in range(300)}},
    ],
    ids=["65535", "65536", "10 MiB", "300 attributes"],
)
def test_large_message_survives_both_ways(codec, fields):
    """Smaller ones are those of `test_any_message_survives_both_ways`."""
    message = a_message(**fields)
    body = encode_message(message, codec)
    assert body == bincode_body(message, codec)
    assert decode_message(body, codec) == message


WRONG_NUMBERS = [-1, 2**64]
REFUSED = {
    "cannot be encoded": [
        {"request_id": None},
        {"request_id": 1.0},
        {"publish_time": 300.0},
        {"payload": "text"},
        {"payload": None},
        {"producer_name": b"p"},
        {"producer_name": None},
        {"attributes": {"k": 1}},
        {"attributes": [("k", "v")]},
        {"attributes": {1: "v"}},
    ],
    "not valid Unicode": [
        {"topic_name": "/a/\ud800"},
        {"broker_addr": "\udfff"},
        {"producer_name": "\ud800"},
        {"subscription_name": "\ud800"},
        {"attributes": {"\ud800": ""}},
        {"attributes": {"": "\udc80"}},
    ],
    None: [
        {name: value}
        for name in ("request_id", "producer_id", "topic_offset", "publish_time")
        for value in WRONG_NUMBERS
    ],
}
REFUSED_OF_BINCODE2 = {
    "cannot be encoded": [
        {"schema_id": 1.0},
        {"schema_id": 300.0},
        {"schema_version": "2"},
        {"routing_key": b"k1"},
    ],
    "not valid Unicode": [{"routing_key": "\ud800"}],
    None: [
        *({"schema_id": value} for value in WRONG_NUMBERS),
        *({"schema_version": value} for value in (-1, 2**32)),
    ],
}


@each(
    ("codec", "text", "fields"),
    [
        *((codec, text, one) for codec in Codec for text, rows in REFUSED.items() for one in rows),
        *(
            (Codec.BINCODE2, text, fields)
            for text, rows in REFUSED_OF_BINCODE2.items()
            for fields in rows
        ),
        *(
            (Codec.BINCODE1, f"no field {name}", {name: value})
            for name, value in {"schema_id": 0, "schema_version": 0, "routing_key": ""}.items()
        ),
    ],
)
def test_value_that_a_codec_has_no_place_for_is_refused(codec, text, fields):
    with pytest.raises(InvalidRequestError, match=text):
        encode_message(a_message(**fields), codec)


BOMB_SIZES = each("size", [2**31, 2**32 - 1, 2**63, 2**64 - 1], ids=hex)


@BOTH_CODECS
@BOMB_SIZES
@each(
    "fields_before",
    [
        pytest.param(2, id="topic_name"),
        pytest.param(3, id="broker_addr"),
        pytest.param(5, id="payload"),
        pytest.param(7, id="producer_name"),
    ],
)
def test_length_bomb_is_refused_without_allocation(codec, size, fields_before):
    body = bincode_integer(0, codec) * fields_before + bincode_integer(size, codec) + b"x" * 100
    with measured_allocation() as allocation, pytest.raises(CorruptDataError, match="past the end"):
        decode_message(body, codec)
    assert allocation.peak_bytes < MIB
    assert recognise(body) is None


@pytest.mark.timeout(10)
@BOTH_CODECS
@BOMB_SIZES
@each(("pairs", "error"), [("", "past the end"), ("1122", "past the end"), ("1010", "twice")])
def test_attribute_count_bomb_is_refused_without_allocation(codec, size, pairs, error):
    """A count of attributes beyond what the bytes can hold ends at the first missing key.

    The count is followed by no pairs, by different ones, or by equal ones, each text one
    character long; neither time (the timeout) nor memory may follow the count.
    """
    body = encode_message(StreamMessage(), codec)
    end = {Codec.BINCODE1: 8, Codec.BINCODE2: 4}[codec]
    body = body[:-end] + bincode_integer(size, codec)
    body += b"".join(bincode_integer(1, codec) + character.encode() for character in pairs)
    with measured_allocation() as allocation, pytest.raises(CorruptDataError, match=error):
        decode_message(body, codec)
    assert allocation.peak_bytes < MIB
    assert recognise(body) is None


@BOTH_CODECS
def test_message_cut_anywhere_is_refused(codec):
    """Goal: a cut is seen, unless what is left is a body of an older Danube."""
    message = a_message(schema_id=None, schema_version=None, routing_key=None)
    body = encode_message(message, codec)
    older = {len(body) - 3, len(body) - 1} if codec is Codec.BINCODE2 else set()
    for size in set(range(len(body))) - older:
        with pytest.raises(CorruptDataError):
            decode_message(body[:size], codec)
    assert all(decode_message(body[:size], codec) == message for size in older)


@each("body", ["0.5.1", "0.6"])
def test_bodies_of_danubes_between_the_codecs_are_read(body):
    message = a_danube_message(7, body)
    data = danube_body(message, body)
    assert recognise(data, offset=7) is Codec.BINCODE2
    assert decode_message(data, Codec.BINCODE2) == message
    assert decode_suffix(data[split(data, 0, len(data), Codec.BINCODE2)[-1] :], Codec.BINCODE2) == (
        message.producer_name,
        message.subscription_name,
        message.attributes,
        message.schema_id,
        message.schema_version,
        None,
    )


@each(
    ("integer", "error"),
    [
        pytest.param("fb fa00", "longer form", id="u16-for-one-byte"),
        pytest.param("fc ffff0000", "longer form", id="u32-for-u16"),
        pytest.param("fd ffffffff00000000", "longer form", id="u64-for-u32"),
        pytest.param("fe" + "00" * 16, "integer tag 0xfe", id="u128"),
        pytest.param("ff", "integer tag 0xff", id="reserved"),
    ],
)
def test_varint_that_no_encoder_makes_is_refused(integer, error):
    body = encode_message(a_message(), Codec.BINCODE2)
    bad = bytes.fromhex(integer) + body[1:]
    with pytest.raises(CorruptDataError, match=error):
        decode_message(bad, Codec.BINCODE2)
    with pytest.raises(CorruptDataError):
        split(bad, 0, len(bad), Codec.BINCODE2)


@BOTH_CODECS
def test_cut_head_is_refused(codec):
    """Payload and publish time need everything up to themselves, and nothing behind."""
    message = a_message()
    whole = encode_message(message, codec)
    time = bincode_integer(message.publish_time, codec)
    head_size = whole.index(time) + len(time)
    for size in range(head_size):
        with pytest.raises(CorruptDataError):
            decode_publish_time(whole[:size], codec)
        if size < head_size - len(time):
            with pytest.raises(CorruptDataError):
                decode_payload(whole[:size], codec)
    assert decode_publish_time(whole[:head_size], codec) == message.publish_time
    assert decode_payload(whole[:head_size], codec) == message.payload


@BOTH_CODECS
@each("view", [bytes, bytearray, memoryview])
def test_body_in_any_kind_of_buffer_decodes_to_plain_values(codec, view):
    body = view(encode_message(a_message(), codec))
    message = decode_message(body, codec)
    assert message == a_message()
    assert type(message.payload) is bytes
    assert decode_publish_time(body, codec) == message.publish_time
    assert decode_payload(body, codec) == message.payload
    assert recognise(body) is codec


@each(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0", id="one-zero"),
        pytest.param(bytes(64), id="zeros"),
        pytest.param(b"\xff" * 64, id="ones"),
        pytest.param(b"{'request_id': 1, 'payload': 'hi', 'producer_name': 'p'}" * 3, id="text"),
        pytest.param(random.Random(2).randbytes(200), id="random"),
        pytest.param(encode_message(a_message(), Codec.BINCODE1)[:-1], id="cut-bincode1"),
        pytest.param(encode_message(a_message(), Codec.BINCODE2)[:-2], id="cut-bincode2"),
    ],
)
def test_codec_of_garbage_is_none(body):
    assert recognise(body) is None
    assert recognise(body, offset=0) is None


@each(
    ("offset", "codec"),
    [
        pytest.param(5, Codec.BINCODE2, id="offset-of-bincode2"),
        pytest.param(9, Codec.BINCODE1, id="offset-of-bincode1"),
        pytest.param(6, Codec.BINCODE2, id="offset-of-neither"),
        pytest.param(None, Codec.BINCODE2, id="no-offset"),
    ],
)
def test_codec_of_an_ambiguous_body_is_decided_by_the_offset(offset, codec):
    """A body that is a message in both codecs goes to the codec that has the frame's offset.

    Made by hand: in bincode 2 a message at offset 5 with a payload of 60 bytes, and those 60 hold
    the fields that bincode 1 would have there, among them the offset 9.
    """
    payload = bytearray(60)
    payload[26] = 9
    body = encode_message(
        StreamMessage(
            msg_id=MessageId(topic_offset=5), payload=bytes(payload), subscription_name=None
        ),
        Codec.BINCODE2,
    )
    assert decode_message(body, Codec.BINCODE1).msg_id.topic_offset == 9
    assert recognise(body, offset=offset) is codec
