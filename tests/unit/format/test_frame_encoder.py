"""Messages as frames, many at a time: byte for byte what encoding them one by one gives."""

import pytest

from ister import kernels
from ister.base.limits import KIB
from ister.base.model import Codec
from ister.format import frame_encoder
from ister.format.frame import encode_frame
from ister.format.frame_encoder import FrameEncoder
from ister.format.message import BodyEncoder

TOPIC = "/default/ä"


@pytest.fixture(params=["python", "compiled"])
def engine(request, monkeypatch):
    """Either way of filling in offsets and crcs."""
    if request.param == "python":
        monkeypatch.setattr(frame_encoder, "_COMPILED_BYTES_MIN", 1 << 60)
    else:
        assert kernels.load()
        monkeypatch.setattr(frame_encoder, "_COMPILED_BYTES_MIN", 0)
    return request.param


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("first", [0, 247, (1 << 16) - 3, (1 << 32) - 3, (1 << 63) - 4, 1 << 63])
def test_frames_are_those_of_messages_encoded_one_by_one(engine, codec, first):
    """Goal: the widths of offsets, sizes and times change within one call, and nothing is lost."""
    encoder = FrameEncoder(topic_name=TOPIC, codec=codec)
    bodies = BodyEncoder(codec)
    head = bodies.head(0, 0, TOPIC, "")
    parts, expected = [], b""
    for number, size in enumerate((0, 1, 250, 251, 65535, 65536, 100 * KIB)):
        offset, payload = first + number, bytes([number]) * size
        time_ms = (1 << 32) - 2 + number
        suffix = bodies.tail(
            "p" * number, "", {}, schema_id=None, schema_version=None, routing_key=None
        )
        tail = encoder.tail(time_ms, suffix)
        blank, end = encoder.blank(offset, size, len(tail))
        assert end > offset
        parts += (blank, payload, tail)
        expected += encode_frame(offset, bodies.body(head, offset, payload, time_ms, suffix))
    assert encoder.fill(parts, first) == expected


def test_blank_serves_offsets_up_to_the_next_width():
    encoder = FrameEncoder(topic_name=TOPIC, codec=Codec.BINCODE2)
    blank, end = encoder.blank(0, 5, 9)
    assert end == 251
    assert encoder.blank(end - 1, 5, 9)[0] == blank
    assert len(encoder.blank(end, 5, 9)[0]) == len(blank) + 2
