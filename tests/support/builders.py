"""Builders that tests share: messages, frames and damage that read as sentences."""

import tracemalloc
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ister.base.model import Codec, MessageId, StreamMessage
from ister.format.frame import encode_frame

_GOLDEN = Path(__file__).resolve().parents[1] / "golden"

VARINT_BOUNDARIES = (0, 250, 251, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
"""The first and last values of every width that bincode 2 gives an integer."""


def a_message(
    *,
    producer_id: int = 2,
    topic_name: str = "/default/t",
    broker_addr: str = "b:1",
    topic_offset: int = 7,
    **fields,
) -> StreamMessage:
    """The message of Danube's worked example without the fields of 0.12, and with changes."""
    message = StreamMessage(
        request_id=1,
        msg_id=MessageId(
            producer_id=producer_id,
            topic_name=topic_name,
            broker_addr=broker_addr,
            topic_offset=topic_offset,
        ),
        payload=b"hi",
        publish_time=1760745600000,
        producer_name="p",
        subscription_name="",
        attributes={"k": "v"},
    )
    return replace(message, **fields)


def frames(first_offset: int, bodies: Iterable[bytes]) -> bytes:
    """The bodies as frames with ascending offsets, one after the other."""
    return b"".join(encode_frame(first_offset + index, body) for index, body in enumerate(bodies))


def golden(name: str) -> bytes:
    """The bytes of a golden file: hex digits, free white space, `#` up to the end of a line."""
    lines = (_GOLDEN / f"{name}.hex").read_text().splitlines()
    return bytes.fromhex(" ".join(line.partition("#")[0] for line in lines))


def flip_byte(path: Path, position: int) -> None:
    """Changes one byte of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def with_bit_flipped(data: bytes, bit: int) -> bytes:
    """A copy in which bit `bit`, counted from the first byte's lowest, is the other one."""
    copy = bytearray(data)
    copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


def with_bytes_at(data: bytes, position: int, new: bytes) -> bytes:
    """A copy in which the bytes from `position` on are `new`; the size stays."""
    assert position + len(new) <= len(data)
    return data[:position] + new + data[position + len(new) :]


def with_valid_crc(content: bytes) -> bytes:
    """The content and its crc32 behind it, as checkpoints and index entries end."""
    return content + zlib.crc32(content).to_bytes(4, "little")


def bincode_integer(value: int, codec: Codec, *, size_bytes: int = 8) -> bytes:
    """An integer in a codec, written a second time and apart from the code under test."""
    if codec is Codec.BINCODE1:
        return value.to_bytes(size_bytes, "little")
    if value <= 250:
        return value.to_bytes(1, "little")
    for tag, width in ((251, 2), (252, 4), (253, 8)):
        if value < 256**width:
            return bytes([tag]) + value.to_bytes(width, "little")
    raise OverflowError(value)


def bincode_body(message: StreamMessage, codec: Codec) -> bytes:
    """A message's body, written a second time and apart from the code under test."""

    def integer(value):
        return bincode_integer(value, codec)

    def blob(value):
        return integer(len(value)) + value

    def text(value):
        return blob(value.encode("utf-8"))

    def optional(value, encode):
        return b"\0" if value is None else b"\1" + encode(value)

    identity = message.msg_id
    body = integer(message.request_id) + integer(identity.producer_id)
    body += text(identity.topic_name) + text(identity.broker_addr) + integer(identity.topic_offset)
    body += blob(message.payload) + integer(message.publish_time) + text(message.producer_name)
    body += optional(message.subscription_name, text) + integer(len(message.attributes))
    for key, value in message.attributes.items():
        body += text(key) + text(value)
    if codec is Codec.BINCODE2:
        body += optional(message.schema_id, integer)
        body += optional(message.schema_version, integer)
        body += optional(message.routing_key, text)
    return body


class Allocation:
    """What a block of code allocated, once it has ended."""

    peak_bytes = 0
    """The most it held at a time."""
    kept_bytes = 0
    """What it still holds."""


@contextmanager
def measured_allocation() -> Iterator[Allocation]:
    """Counts the bytes that the block allocates from Python."""
    allocation = Allocation()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield allocation
        current, peak = tracemalloc.get_traced_memory()
        allocation.peak_bytes, allocation.kept_bytes = peak - before, current - before
    finally:
        tracemalloc.stop()
