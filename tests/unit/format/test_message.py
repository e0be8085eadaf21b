"""Message bodies in both codecs: bytes, limits, refusals, and the hot path's encoder."""

import random

import pytest

from ister.base.model import Codec, MessageId, StreamMessage
from ister.errors import CorruptDataError, InvalidRequestError
from ister.format.bincode import BincodeError, encode_varint
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
from tests.support.builders import (
    VARINT_BOUNDARIES,
    a_message,
    bincode_body,
    bincode_integer,
    measured_allocation,
    with_bytes_at,
)
from tests.support.cases import each
from tests.support.danube_files import a_danube_message, danube_body

BOTH_CODECS = each("codec", list(Codec))
MIB = 1024 * 1024
PAYLOAD_SIZES = (0, 250, 251, 65535, 65536)


def assert_survives_both_ways(message, codec):
    body = encode_message(message, codec)
    assert body == bincode_body(message, codec)
    assert decode_message(body, codec) == message
    assert decode_publish_time(body, codec) == message.publish_time


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


@each("subscription_name", [None, "", "s"])
@each("attributes", [{}, {"k": "v"}, {"": "", "b": "2", "a": "1"}])
@each("producer_name", ["", "p"])
def test_bincode1_message_with_any_optional_fields_survives(
    subscription_name, attributes, producer_name
):
    message = a_message(
        subscription_name=subscription_name, attributes=attributes, producer_name=producer_name
    )
    assert_survives_both_ways(message, Codec.BINCODE1)


@each("subscription_name", [None, "", "s"])
@each("attributes", [{}, {"k": "v"}])
@each("schema_id", [None, 0, 300])
@each("schema_version", [None, 0, 2**32 - 1])
@each("routing_key", [None, "", "k1"])
def test_bincode2_message_with_any_optional_fields_survives(
    subscription_name, attributes, schema_id, schema_version, routing_key
):
    message = a_message(
        subscription_name=subscription_name,
        attributes=attributes,
        schema_id=schema_id,
        schema_version=schema_version,
        routing_key=routing_key,
    )
    assert_survives_both_ways(message, Codec.BINCODE2)


@BOTH_CODECS
@each(
    "message",
    [
        pytest.param(StreamMessage(), id="all-defaults"),
        pytest.param(a_message(payload=b""), id="empty-payload"),
        pytest.param(a_message(payload=bytes(range(256))), id="every-byte"),
        pytest.param(
            a_message(
                topic_name="/größe/日本",
                broker_addr="𝔟:1",
                producer_name="ф",
                subscription_name="\0\N{COMBINING ACUTE ACCENT}",
                attributes={"ключ": "\U0010ffff", "e\u0301": "decomposed", "é": "composed"},
            ),
            id="non-ascii",
        ),
        pytest.param(a_message(attributes={str(n): "x" * n for n in range(300)}), id="300-pairs"),
    ],
)
def test_unusual_message_survives(codec, message):
    assert_survives_both_ways(message, codec)


@BOTH_CODECS
def test_message_of_10_mib_survives(codec):
    assert_survives_both_ways(a_message(payload=random.Random(1).randbytes(10 * MIB)), codec)


@BOTH_CODECS
@each("value", VARINT_BOUNDARIES)
@each("field", ["request_id", "producer_id", "topic_offset", "publish_time"])
def test_integer_at_the_edge_of_a_width_survives(codec, field, value):
    assert_survives_both_ways(a_message(**{field: value}), codec)


@BOTH_CODECS
@each("size", PAYLOAD_SIZES)
def test_payload_length_at_the_edge_of_a_width_survives(codec, size):
    assert_survives_both_ways(a_message(payload=b"x" * size), codec)


@each("value", VARINT_BOUNDARIES)
def test_schema_id_at_the_edge_of_a_width_survives(value):
    assert_survives_both_ways(a_message(schema_id=value), Codec.BINCODE2)


@each(
    ("value", "encoded"),
    [
        (0, "00"),
        (250, "fa"),
        (251, "fb fb00"),
        (65535, "fb ffff"),
        (65536, "fc 00000100"),
        (2**32 - 1, "fc ffffffff"),
        (2**32, "fd 0000000001000000"),
        (2**64 - 1, "fd ffffffffffffffff"),
    ],
)
def test_varint_takes_the_shortest_form(value, encoded):
    assert encode_varint(value) == bytes.fromhex(encoded)


@each("value", [-1, 2**64])
def test_varint_out_of_range_is_refused(value):
    with pytest.raises(BincodeError, match="unsigned 64-bit"):
        encode_varint(value)


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


FIELDS_OF_BINCODE2 = each(
    "fields", [{"schema_id": 0}, {"schema_version": 0}, {"routing_key": ""}], ids=str
)


@FIELDS_OF_BINCODE2
def test_field_that_bincode1_lacks_is_refused(fields):
    with pytest.raises(InvalidRequestError, match=f"no field {next(iter(fields))}"):
        encode_message(a_message(**fields), Codec.BINCODE1)


@BOTH_CODECS
@each("value", [-1, 2**64])
@each("field", ["request_id", "producer_id", "topic_offset", "publish_time"])
def test_integer_out_of_range_is_refused(codec, field, value):
    with pytest.raises(InvalidRequestError):
        encode_message(a_message(**{field: value}), codec)


@each(
    "fields",
    [{"schema_id": -1}, {"schema_id": 2**64}, {"schema_version": -1}, {"schema_version": 2**32}],
    ids=str,
)
def test_schema_integer_out_of_range_is_refused(fields):
    with pytest.raises(InvalidRequestError):
        encode_message(a_message(**fields), Codec.BINCODE2)


@BOTH_CODECS
@each(
    "fields",
    [
        {"request_id": None},
        {"request_id": 1.0},
        {"publish_time": 300.0},
        {"payload": "text"},
        {"payload": None},
        {"producer_name": b"p"},
        {"attributes": {"k": 1}},
        {"attributes": [("k", "v")]},
        {"attributes": {1: "v"}},
        {"producer_name": None},
    ],
    ids=str,
)
def test_value_of_another_type_is_refused(codec, fields):
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        encode_message(a_message(**fields), codec)


@each(
    "fields",
    [
        {"schema_id": 1.0},
        {"schema_id": 300.0},
        {"schema_version": "2"},
        {"routing_key": b"k1"},
    ],
    ids=str,
)
def test_value_of_another_type_is_refused_for_a_schema_or_a_routing_key(fields):
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        encode_message(a_message(**fields), Codec.BINCODE2)


@BOTH_CODECS
@each(
    "fields",
    [
        pytest.param({"topic_name": "/a/\ud800"}, id="topic_name"),
        pytest.param({"broker_addr": "\udfff"}, id="broker_addr"),
        pytest.param({"producer_name": "\ud800"}, id="producer_name"),
        pytest.param({"subscription_name": "\ud800"}, id="subscription_name"),
        pytest.param({"attributes": {"\ud800": ""}}, id="attribute-key"),
        pytest.param({"attributes": {"": "\udc80"}}, id="attribute-value"),
    ],
)
def test_lone_surrogate_is_refused(codec, fields):
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        encode_message(a_message(**fields), codec)


def test_lone_surrogate_in_a_routing_key_is_refused():
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        encode_message(a_message(routing_key="\ud800"), Codec.BINCODE2)


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
@each("extra", [b"\0", b"\1", bytes(8), b"\xff" * 100])
def test_bytes_behind_a_message_are_refused(codec, extra):
    body = encode_message(a_message(), codec)
    with pytest.raises(CorruptDataError, match="left over"):
        decode_message(body + extra, codec)


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


@BOTH_CODECS
def test_attribute_twice_is_refused(codec):
    body = encode_message(a_message(attributes={"aa": "1", "ab": "2"}), codec)
    with pytest.raises(CorruptDataError, match="'aa' twice"):
        decode_message(body.replace(b"ab", b"aa"), codec)


@BOTH_CODECS
@each(
    ("position", "new", "error"),
    [
        pytest.param(0, b"\xff", "UTF-8", id="stray-byte"),
        pytest.param(0, b"\xc0\x80", "UTF-8", id="overlong-zero"),
        pytest.param(0, b"\xed\xa0\x80", "UTF-8", id="encoded-surrogate"),
        pytest.param(9, b"\xe2", "UTF-8", id="cut-character"),
    ],
)
def test_bad_utf8_is_refused(codec, position, new, error):
    body = encode_message(a_message(), codec)
    with pytest.raises(CorruptDataError, match=error):
        decode_message(with_bytes_at(body, body.index(b"/default/t") + position, new), codec)


@BOTH_CODECS
@each("tag", [2, 0x80, 0xFF])
def test_option_tag_other_than_0_and_1_is_refused(codec, tag):
    body = encode_message(a_message(subscription_name=None, attributes={}), codec)
    end = {Codec.BINCODE1: 9, Codec.BINCODE2: 5}[codec]
    with pytest.raises(CorruptDataError, match=f"option tag {tag}"):
        decode_message(with_bytes_at(body, len(body) - end, bytes([tag])), codec)


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


def test_schema_version_beyond_32_bits_is_refused():
    body = encode_message(a_message(schema_version=1), Codec.BINCODE2)
    assert body.endswith(b"\x01\x01\x00")
    with pytest.raises(CorruptDataError, match="unsigned 32-bit"):
        decode_message(body[:-2] + encode_varint(2**32) + b"\0", Codec.BINCODE2)


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


@BOTH_CODECS
@each("offset", [None, 7, 8], ids=["no-offset", "its-offset", "other-offset"])
@each(
    "message",
    [
        pytest.param(a_message(), id="usual"),
        pytest.param(StreamMessage(), id="all-defaults"),
        pytest.param(StreamMessage(subscription_name=None), id="all-zero"),
        pytest.param(a_message(request_id=2**64 - 1), id="large-request-id"),
        pytest.param(a_message(payload=bytes(1000)), id="zero-payload"),
    ],
)
def test_codec_of_a_message_is_recognised(codec, offset, message):
    assert recognise(encode_message(message, codec), offset=offset) is codec


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
