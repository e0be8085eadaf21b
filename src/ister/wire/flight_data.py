"""Flight's protobuf messages as bytes, without a copy of their columns.

All fields are bytes or text, except the descriptor's type:

    FlightData   1 descriptor   2 the IPC message's header   3 application metadata   1000 its body
    Ticket       1 ticket             Action       1 type   2 body
    PutResult    1 metadata           Result       1 body
    ActionType   1 type   2 text      FlightDescriptor   1 type (a number)   2 command

Owns: these bytes. Does not own: what Arrow makes of a header and a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

_DESCRIPTOR, _HEADER, _METADATA, _BODY = 1, 2, 3, 1000
_COMMAND: Final = 2
_COMMAND_TYPE: Final = b"\x08\x02"  # FlightDescriptor.type = CMD
_VARINT, _EIGHT_BYTES, _LENGTH_DELIMITED, _FOUR_BYTES = 0, 1, 2, 5
# Far more than a message has, with those of later versions: millions of empty ones would be looked
# at one by one.
_FIELDS_MAX: Final = 1_000

_Bytes: TypeAlias = bytes | memoryview


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, data: _Bytes) -> tuple[bytes, _Bytes]:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(data)), data


def encode_fields(*fields: tuple[int, bytes]) -> bytes:
    """A message of fields of bytes, given with their numbers."""
    return b"".join(part for number, data in fields for part in _field(number, data))


def decode_fields(data: bytes | memoryview) -> dict[int, memoryview]:
    """The fields of bytes in a message; the last one of each number, as protobuf has it.

    Raises:
        ValueError: The bytes are not a protobuf message, or it has too many fields.
    """
    view = memoryview(data)
    found: dict[int, memoryview] = {}
    position, end, count = 0, len(view), 0
    while position < end:
        count += 1
        if count > _FIELDS_MAX:
            raise ValueError(f"more than {_FIELDS_MAX} fields")
        tag, position = _read_varint(view, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _read_varint(view, position)
            continue
        if kind == _LENGTH_DELIMITED:
            size, position = _read_varint(view, position)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError("a field of an unknown type")
        if position + size > end:
            raise ValueError("a field that extends beyond its message")
        if kind == _LENGTH_DELIMITED:
            found[tag >> 3] = view[position : position + size]
        position += size
    return found


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a number that does not end")


def encode_data(
    message: pa.Buffer, *, metadata: bytes = b"", command: bytes | None = None
) -> bytes:
    """An IPC message as FlightData.

    `message` is as `pa.Schema.serialize` and `pa.RecordBatch.serialize` give it; `command` is the
    descriptor's, for the first message of a stream.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    parts: list[_Bytes] = []
    if command is not None:
        descriptor = _COMMAND_TYPE + b"".join(_field(_COMMAND, command))
        parts += _field(_DESCRIPTOR, descriptor)
    ipc = pa.ipc.read_message(message)
    parts += _field(_HEADER, memoryview(ipc.metadata))
    if metadata:
        parts += _field(_METADATA, metadata)
    if ipc.body is not None and ipc.body.size:
        parts += _field(_BODY, memoryview(ipc.body))
    return b"".join(parts)


class FlightData:
    """One message of a stream of record batches; its parts are views of the bytes received."""

    __slots__ = ("body", "command", "header", "metadata")

    def __init__(self, data: bytes) -> None:
        """Decodes the message.

        Raises:
            ValueError: The bytes are not a FlightData message.
        """
        fields = decode_fields(data)
        empty = memoryview(b"")
        self.header = fields.get(_HEADER, empty)
        """Of the IPC message; empty if there is none."""
        self.body = fields.get(_BODY, empty)
        self.metadata = fields.get(_METADATA, empty)
        self.command: bytes | None = None
        """The descriptor's; None if there is no descriptor."""
        if _DESCRIPTOR in fields:
            self.command = bytes(decode_fields(fields[_DESCRIPTOR]).get(_COMMAND, empty))
