"""Decodes Arrow IPC schemas and batches from Flight messages, with a bound on their memory.

Owns: decoding what comes from the network. Does not own: the protobuf message around it
(`ister.client.flight_data`), nor the checks of the columns' values (`publish`).

The buffers of a batch may be compressed, and then begin with their uncompressed size. Arrow
allocates that size without a check, so the sizes are added up here first, and a batch that would be
too large is refused before it is decompressed. For that, a few fields of its header, a flatbuffer,
are read:

    Message      0 version (4: V5)   1 kind of header (3: RecordBatch)   2 the header
                 4 metadata
    RecordBatch  2 buffers: (offset, length) in the body, 8 bytes each   3 compression, if any

Before V5, compression may also be said in the message's metadata, and Arrow still reads that. Such
batches are refused.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import pyarrow as pa

from ister.client.flight_data import FlightData
from ister.errors import InvalidRequestError, MessageTooLargeError

__all__ = ["read_batch", "read_schema"]

_CONTINUES: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<II")
_ALIGNED: Final = 8
_VERSION, _KIND, _HEADER, _METADATA = 0, 1, 2, 4
_BUFFERS, _COMPRESSION = 2, 3
_V5: Final = 4
_RECORD_BATCH: Final = 3
_I64: Final = struct.Struct("<q")
# What Arrow and this module raise for bytes that are not a valid message.
_NO_MESSAGE: Final = (pa.ArrowException, OSError, ValueError, EOFError, struct.error)


def read_schema(data: FlightData) -> pa.Schema:
    """The schema that a stream begins with.

    Raises:
        InvalidRequestError: The message is not a schema.
    """
    try:
        return pa.ipc.read_schema(_message(data, "schema"))
    except _NO_MESSAGE as error:
        raise InvalidRequestError(f"the stream does not begin with a schema: {error}") from error


def read_batch(data: FlightData, schema: pa.Schema, *, bytes_max: int) -> pa.RecordBatch | None:
    """The rows of a message; None if it has none. Not validated.

    Raises:
        InvalidRequestError: The message is not a record batch.
        MessageTooLargeError: It would take more than `bytes_max` bytes uncompressed.
    """
    if not len(data.header):
        return None
    try:
        size = _inflated_bytes(data.header, data.body)
        batch = (
            pa.ipc.read_record_batch(_message(data, "record batch"), schema)
            if size <= bytes_max
            else None
        )
    except _NO_MESSAGE as error:
        raise InvalidRequestError(f"not a stream of record batches: {error}") from error
    if size > bytes_max:
        raise MessageTooLargeError(f"a batch of {size} bytes", hint=f"at most {bytes_max}")
    return batch


def _message(data: FlightData, kind: str) -> pa.Message:
    """Header and body as one IPC message of a kind; the body stays where it is."""
    header = data.header
    padding = bytes(-len(header) % _ALIGNED)
    prefix = _PREFIX.pack(_CONTINUES, len(header) + len(padding))
    parts = _Parts(memoryview(b"".join((prefix, header, padding))), data.body)
    message = pa.ipc.read_message(pa.PythonFile(parts, mode="r"))
    if message.type != kind:
        # Arrow does not always check the type.
        raise ValueError(f"a {message.type} where a {kind} belongs")
    return message


class _Parts:
    """A file over views of bytes; reads return views, without a copy."""

    closed = False

    def __init__(self, *parts: memoryview) -> None:
        self._parts = parts

    def read(self, size: int) -> memoryview:
        """Reads up to `size` bytes; fewer at the end of a part."""
        while self._parts and not len(self._parts[0]):
            self._parts = self._parts[1:]
        if not self._parts:
            return memoryview(b"")
        found, rest = self._parts[0][:size], self._parts[0][size:]
        self._parts = (rest, *self._parts[1:])
        return found

    def close(self) -> None:
        """Does nothing."""


def _inflated_bytes(header: memoryview, body: memoryview) -> int:
    """The uncompressed size of a batch's buffers, as they state it; 0 if not compressed."""
    message = _Table(header, _unsigned(header, 0))
    if message.byte(_KIND) != _RECORD_BATCH:
        return 0
    if message.byte(_VERSION) != _V5 and message.place(_METADATA) is not None:
        raise ValueError("a batch with metadata, older than Arrow 1.0")
    batch = message.table(_HEADER)
    if batch is None or batch.place(_COMPRESSION) is None:
        return 0
    total = 0
    for offset, length in batch.pairs(_BUFFERS):
        if length >= _I64.size:
            if offset < 0 or offset + length > len(body):
                raise ValueError("a buffer outside of the body")
            # -1 says that this one is not compressed.
            size = _I64.unpack_from(body, offset)[0]
            total += length if size < 0 else size
    return total


def _unsigned(data: memoryview, position: int) -> int:
    if position < 0:
        raise ValueError("a position before the header")
    value: int = struct.unpack_from("<I", data, position)[0]
    return value


class _Table:
    """A table of a flatbuffer; its methods raise ValueError or struct.error if it is invalid."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        self._fields = position - struct.unpack_from("<i", data, position)[0]
        if self._fields < 0:
            raise ValueError("a position before the header")
        (self._fields_bytes,) = struct.unpack_from("<H", data, self._fields)

    def place(self, field: int) -> int | None:
        """Where a field is; None if the table does not have it."""
        at = 4 + 2 * field
        if at + 2 > self._fields_bytes:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._fields + at)
        return self._position + offset if offset else None

    def byte(self, field: int) -> int:
        place = self.place(field)
        value: int = 0 if place is None else struct.unpack_from("<B", self._data, place)[0]
        return value

    def table(self, field: int) -> _Table | None:
        place = self.place(field)
        return None if place is None else _Table(self._data, place + _unsigned(self._data, place))

    def pairs(self, field: int) -> Any:  # noqa: ANN401 - an iterator of pairs of numbers
        place = self.place(field)
        if place is None:
            return iter(())
        start = place + _unsigned(self._data, place)
        count = _unsigned(self._data, start)
        # The pairs follow the count: flatbuffers places it so that they are aligned.
        end = start + 4 + 16 * count
        if end > len(self._data):
            raise ValueError("more buffers than the header has room for")
        return struct.iter_unpack("<qq", self._data[start + 4 : end])
