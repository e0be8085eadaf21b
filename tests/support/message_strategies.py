"""Messages with any fields, and damaged bytes, made by hypothesis."""

from hypothesis import settings
from hypothesis import strategies as st

from ister.base.model import Codec, MessageId, StreamMessage
from tests.support.builders import VARINT_BOUNDARIES
from tests.support.scale import scaled

EXAMPLES = settings(max_examples=scaled(100, 300), deadline=None, print_blob=True)

U64 = st.sampled_from(VARINT_BOUNDARIES) | st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=20)
OPTIONAL_TEXT = st.none() | TEXT
PAYLOAD = st.sampled_from((0, 250, 251, 600)).map(bytes) | st.binary(max_size=600)
ATTRIBUTES = st.dictionaries(TEXT, TEXT, max_size=5)
MESSAGE_IDS = st.builds(
    MessageId, producer_id=U64, topic_name=TEXT, broker_addr=TEXT, topic_offset=U64
)
FIELDS_OF_BINCODE1 = {
    "request_id": U64,
    "msg_id": MESSAGE_IDS,
    "payload": PAYLOAD,
    "publish_time": U64,
    "producer_name": TEXT,
    "subscription_name": OPTIONAL_TEXT,
    "attributes": ATTRIBUTES,
}
MESSAGES = {
    Codec.BINCODE1: st.builds(StreamMessage, **FIELDS_OF_BINCODE1),
    Codec.BINCODE2: st.builds(
        StreamMessage,
        **FIELDS_OF_BINCODE1,
        schema_id=st.none() | U64,
        schema_version=st.none() | st.integers(0, 2**32 - 1),
        routing_key=OPTIONAL_TEXT,
    ),
}

FILLINGS = (bytes(4), bytes(16), bytes(64), b"\xff" * 4, b"\xff" * 16)


@st.composite
def damaged(draw, data):
    """Some of the bytes of `data` overwritten, cut out or inserted."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(result)))
        end = draw(st.integers(start, min(len(result), start + 8)))
        result[start:end] = draw(st.binary(max_size=8) | st.sampled_from(FILLINGS))
    return bytes(result)
