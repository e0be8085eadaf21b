"""What holds for any bytes whatever: checked by the property tests and by both fuzzers."""

import struct
import zlib

from ister.base.model import Codec
from ister.errors import CorruptDataError
from ister.format.frame import Corrupt, Frame, Scan, decode_frame, scan_frames
from ister.format.message import (
    decode_message,
    decode_publish_time,
    encode_message,
    recognise,
)

_HEADER = struct.Struct("<QII")


def check_body(body: bytes) -> list[Codec]:
    """Bytes that decode are the only encoding of their message; all others are refused.

    A message without the last fields also has the shorter encodings of earlier Danubes.

    Returns:
        The codecs in which the bytes are a message.
    """
    decodable: list[Codec] = []
    for codec in Codec:
        try:
            message = decode_message(body, codec)
        except CorruptDataError:
            continue
        decodable.append(codec)
        encoded = encode_message(message, codec)
        encodings = [encoded]
        if codec is Codec.BINCODE2 and message.routing_key is None:
            encodings.append(encoded[:-1])
            if message.schema_id is None and message.schema_version is None:
                encodings.append(encoded[:-3])
        assert body in encodings, "a second encoding of the same message"
        assert decode_publish_time(body, codec) == message.publish_time, "two publish times"
    recognised = recognise(body)
    if decodable:
        assert recognised in decodable, f"{recognised}, but decodes as {decodable}"
    else:
        assert recognised is None, f"{recognised}, but does not decode"
    return decodable


def check_frames(buffer: bytes, *, expected_offset: int | None) -> tuple[Scan, list[Frame]]:
    """A scan and decoding one by one find the same frames and the same end in any bytes."""
    scan = scan_frames(buffer, expected_offset=expected_offset)
    found: list[Frame] = []
    position, expected = 0, expected_offset
    for start in scan.starts:
        decoded = decode_frame(buffer, position, expected_offset=expected)
        assert isinstance(decoded, Frame), f"scanned, but does not decode: {decoded}"
        offset, length, crc = _HEADER.unpack_from(buffer, start)
        body = buffer[start + 16 : start + 16 + length]
        assert 0 < length == len(body), "a frame of no size, or cut"
        assert decoded == (offset, body, start + 16 + length), "a frame that its bytes are not"
        assert zlib.crc32(body) == crc, "a body that its crc does not cover"
        assert start == position, "bytes skipped between frames"
        assert expected is None or offset == expected, "offsets not in a row"
        found.append(decoded)
        position, expected = decoded.end, offset + 1
    assert (scan.end, scan.next_offset) == (position, expected), "a boundary off the last frame"
    stop = decode_frame(buffer, position, expected_offset=expected)
    assert not isinstance(stop, Frame), "stopped before a good frame"
    if isinstance(stop, Corrupt):
        assert isinstance(scan.stop, Corrupt), f"{scan.stop} against {stop}"
        assert scan.stop.reason is stop.reason, f"{scan.stop} against {stop}"
    else:
        assert scan.stop == stop, f"{scan.stop} against {stop}"
    return scan, found
