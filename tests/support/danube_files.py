"""Files as Danube writes them, made by an encoder of the tests' own: nothing of `ister.format`.

Bodies by the version that introduced them: `0.5` (bincode 1), `0.5.1` (bincode 2), `0.6` (with
schema ids), `0.12` (with the routing key). Layouts of a bucket by theirs: `0.5`, `0.6.2`, `0.9`.
"""

import struct
import zlib
from pathlib import Path

from ister.base.model import MessageId, StreamMessage

TOPIC = "/default/orders"
BODY_OF_LAYOUT = {"0.5": "0.5", "0.6.2": "0.6", "0.9": "0.12"}
SECONDS = 1_790_000_000
"""When the first object is exported."""


def a_danube_message(offset: int, body: str = "0.12") -> StreamMessage:
    """A message with every field that a version has, and values of several widths."""
    has_schema, has_key = body in ("0.6", "0.12"), body == "0.12"
    return StreamMessage(
        request_id=(offset, 300, 70_000, 2**40)[offset % 4],
        msg_id=MessageId(
            producer_id=offset * 1000,
            topic_name=TOPIC,
            broker_addr="http://broker:6650",
            topic_offset=offset,
        ),
        payload=(b"", b"%d" % offset, b"\xff\x00" * offset, b"x" * 300)[offset % 4],
        publish_time=1_760_745_600_000 + offset,
        producer_name=f"producer-{offset % 3}",
        subscription_name="",
        attributes={"käse": str(offset), "k": ""} if offset % 2 else {},
        schema_id=2**33 + offset if has_schema and offset % 3 else None,
        schema_version=offset if has_schema and offset % 3 else None,
        routing_key=f"key-{offset}" if has_key and offset % 5 else None,
    )


def danube_body(message: StreamMessage, body: str) -> bytes:
    """The message in bincode, as a version of Danube encodes it."""

    def integer(value: int, width: int = 8) -> bytes:
        if body == "0.5":
            return value.to_bytes(width, "little")
        if value < 251:
            return bytes([value])
        for tag, size in ((0xFB, 2), (0xFC, 4), (0xFD, 8)):
            if value < 256**size:
                return bytes([tag]) + value.to_bytes(size, "little")
        raise ValueError(value)

    def blob(value: bytes) -> bytes:
        return integer(len(value)) + value

    def text(value: str) -> bytes:
        return blob(value.encode())

    def option(value: bytes | None) -> bytes:
        return b"\0" if value is None else b"\1" + value

    identity = message.msg_id
    data = integer(message.request_id) + integer(identity.producer_id)
    data += text(identity.topic_name) + text(identity.broker_addr) + integer(identity.topic_offset)
    data += blob(message.payload) + integer(message.publish_time) + text(message.producer_name)
    name = message.subscription_name
    data += option(None if name is None else text(name)) + integer(len(message.attributes))
    for key, value in message.attributes.items():
        data += text(key) + text(value)
    if body in ("0.6", "0.12"):
        schema, version = message.schema_id, message.schema_version
        data += option(None if schema is None else integer(schema))
        data += option(None if version is None else integer(version, 4))
    if body == "0.12":
        key = message.routing_key
        data += option(None if key is None else text(key))
    return data


def danube_frame(offset: int, data: bytes) -> bytes:
    """One frame: offset, length, CRC-32, body."""
    return struct.pack("<QII", offset, len(data), zlib.crc32(data)) + data


def danube_frames(messages: list[StreamMessage], body: str = "0.12") -> bytes:
    """The frames of messages, at their own offsets."""
    return b"".join(
        danube_frame(message.msg_id.topic_offset, danube_body(message, body))
        for message in messages
    )


class DanubeBucket:
    """A directory that is a bucket of Danube's, for the backend `fs`."""

    def __init__(self, root: Path, topic: str = TOPIC) -> None:
        self.root = root
        self.folder = root / "storage" / "topics" / topic.strip("/")
        self.seconds = SECONDS

    def put(
        self, layout: str, start: int, end: int, *, body: str | None = None, data: bytes = b""
    ) -> Path:
        """Writes the object of a range as a version does; returns where it is.

        Args:
            layout: The version.
            start: The first offset.
            end: The offset after the last one.
            body: The form of the bodies; that of the version by default.
            data: Other bytes than those of the messages.
        """
        self.seconds += 300
        body = body or BODY_OF_LAYOUT[layout]
        folder = self.folder / ("segments" if layout == "0.9" else "objects")
        number = end - 1 if layout == "0.5" else self.seconds
        path = folder / f"data-{start}-{number}.dnb1"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data or danube_frames(messages_of(start, end, body), body))
        return path


def messages_of(start: int, end: int, body: str) -> list[StreamMessage]:
    """The messages of a range."""
    return [a_danube_message(offset, body) for offset in range(start, end)]


def write_wal(directory: Path, body: str, *files: tuple[int, int], torn: bytes = b"") -> None:
    """Writes a topic's WAL directory with Danube's checkpoint.

    Args:
        directory: `<wal root>/<namespace>/<topic>`.
        body: The form of the bodies: `0.5` has the checkpoint of bincode 1.
        files: Ranges of offsets; the last file is the active one.
        torn: Bytes behind the last frame.
    """
    directory.mkdir(parents=True)
    names = ["wal.log", *(f"wal.{number}.log" for number in range(1, len(files)))]
    for name, (start, end) in zip(names, files, strict=True):
        (directory / name).write_bytes(danube_frames(messages_of(start, end, body), body))
    with (directory / names[-1]).open("ab") as active:
        active.write(torn)

    def integer(value: int) -> bytes:
        if body == "0.5":
            return value.to_bytes(8, "little")
        return bytes([value]) if value < 251 else b"\xfb" + value.to_bytes(2, "little")

    def text(value: str) -> bytes:
        return integer(len(value.encode())) + value.encode()

    def path(name: str) -> bytes:
        return text(f"/var/lib/danube/{name}")

    rotated = list(zip(names[:-1], files[:-1], strict=True))
    data = integer(files[0][0]) + integer(files[-1][1] - 1) + integer(len(rotated))
    data += path(names[-1]) + integer(len(rotated))
    for number, (name, (start, _)) in enumerate(rotated):
        data += integer(number) + path(name) + integer(start)
    data += b"\1" + text(names[-1]) + b"\0" + b"\1" + integer(files[-1][0])
    (directory / "wal.ckpt").write_bytes(data)
