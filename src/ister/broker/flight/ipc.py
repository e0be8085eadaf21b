"""Decodes Arrow IPC schemas and batches from Flight messages, with a bound on their memory.

Owns: decoding what comes from the network. Does not own: the protobuf message around it
(`ister.wire.flight_data`), nor the checks of the columns' values (`publish`).

The buffers of a batch may be compressed, and then begin with their uncompressed size. Arrow
allocates that size without a check, so the sizes are added up here first, and a batch that would be
too large is refused before it is decompressed. For that, a few fields of its header, a flatbuffer,
are read:

    Message      0 version (4: V5)   1 kind of header (3: RecordBatch)   2 the header
                 3 bytes of the body   4 metadata
    RecordBatch  0 rows   1 columns: (rows, nulls), 8 bytes each
                 2 buffers: (offset, length) in the body, 8 bytes each   3 compression, if any

Before V5, compression may also be said in the message's metadata, and Arrow still reads that. Such
batches are refused.

Rows that are payloads alone, which most are, are found by the same fields, without Arrow: it takes
longer to make its objects than to append a few rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Final, cast

import pyarrow as pa

from ister.errors import InvalidRequestError, MessageTooLargeError
from ister.format.payloads import Payloads
from ister.wire.flight_data import FlightData

_CONTINUES: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<II")
_ALIGNED: Final = 8
_VERSION, _KIND, _HEADER, _BODY_BYTES, _METADATA = 0, 1, 2, 3, 4
_ROWS, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3
_V5: Final = 4
_RECORD_BATCH: Final = 3
_I64: Final = struct.Struct("<q")
# What Arrow and this module raise for bytes that are not a valid message.
_NO_MESSAGE: Final = (pa.ArrowException, OSError, ValueError, EOFError, struct.error)


def read_schema(data: FlightData) -> pa.Schema:
    """The schema that a stream begins with."""
    try:
        return pa.ipc.read_schema(_message(data, "schema"))
    except _NO_MESSAGE as error:
        raise InvalidRequestError(f"the stream does not begin with a schema: {error}") from error


def read_batch(data: FlightData, schema: pa.Schema, *, bytes_max: int) -> pa.RecordBatch | None:
    """The rows of a message; None if it has none. Not validated.

    Raises:
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
        raise MessageTooLargeError(f"a batch has {size} bytes", hint=f"the maximum is {bytes_max}")
    return batch


class PlainRows:
    """Reads the batches of one stream whose rows have only a payload, without Arrow.

    The headers of a stream's batches differ only in a few numbers, at the same positions. These are
    found in the first header. If a later header differs elsewhere, it is examined as the first one
    was. Not thread-safe.
    """

    def __init__(self, schema: pa.Schema) -> None:
        """Prepares for a stream with this schema; `read` returns None for others than `payload`."""
        width = 0
        if schema.names == ["payload"]:
            width = {pa.binary(): 4, pa.large_binary(): 8}.get(schema.field(0).type, 0)
        self._width = width
        self._header = struct.Struct("")
        self._numbers: Callable[[Sequence[int]], tuple[int, ...]] = itemgetter(0)
        self._around: Callable[[Sequence[object]], object] = itemgetter(0)
        self._known: object = None

    def read(self, data: FlightData) -> Payloads | None:
        """Returns the rows of a message.

        Returns:
            None if the rows have more than a payload or are damaged: use `read_batch`.
        """
        header, body = data.header, data.body
        if not self._width:
            return None
        try:
            found = self._header.unpack(header) if len(header) == self._header.size else ()
            if not found or self._around(found) != self._known:
                self._learn(header)
                found = self._header.unpack(header)
            # The second pair is the bitmap of nulls.
            body_bytes, count, rows, nulls, _, _, *places = self._numbers(found)
            if body_bytes != len(body) or rows != count or nulls:
                return None
            offsets, payloads = _part(body, *places[:2]), _part(body, *places[2:])
            return Payloads.of(offsets, self._width, payloads, count)
        except (ValueError, struct.error):
            return None

    def _learn(self, header: memoryview) -> None:
        """Finds the positions of the numbers in headers of this kind."""
        message = _Table(header, _unsigned(header, 0))
        batch = message.table(_HEADER)
        if (
            message.byte(_KIND) != _RECORD_BATCH
            or message.byte(_VERSION) != _V5
            or batch is None
            or batch.place(_COMPRESSION) is not None
        ):
            raise ValueError("not a plain batch")
        (nodes, node_count), (buffers, buffer_count) = batch.vector(_NODES), batch.vector(_BUFFERS)
        body_bytes, rows = message.place(_BODY_BYTES), batch.place(_ROWS)
        if (node_count, buffer_count) != (1, 3) or body_bytes is None or rows is None:
            raise ValueError("not one plain column")
        numbers: dict[int, list[int]] = {}
        around, layout, end, item = [], "<", 0, 0
        for place, count in sorted([(body_bytes, 1), (rows, 1), (nodes, 2), (buffers, 6)]):
            if place < end or place + 8 * count > len(header):
                raise ValueError("numbers within each other, or outside of the header")
            layout += f"{place - end}s{count}q"
            around.append(item)
            numbers[place] = list(range(item + 1, item + 1 + count))
            item, end = item + 1 + count, place + 8 * count
        self._header = struct.Struct(f"{layout}{len(header) - end}s")
        self._around = itemgetter(*around, item)
        self._numbers = itemgetter(
            *numbers[body_bytes], *numbers[rows], *numbers[nodes], *numbers[buffers]
        )
        self._known = self._around(self._header.unpack(header))


def _part(body: memoryview, offset: int, length: int) -> memoryview:
    if offset < 0 or length < 0 or offset + length > len(body):
        raise ValueError("a buffer outside of the body")
    return body[offset : offset + length]


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
            # -1 says that this one is not compressed.
            size = _I64.unpack_from(_part(body, offset, length))[0]
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

    def vector(self, field: int) -> tuple[int, int]:
        """Where the pairs of numbers of a field begin, and how many there are."""
        place = self.place(field)
        if place is None:
            return 0, 0
        start = place + _unsigned(self._data, place)
        # The pairs follow the count: flatbuffers places it so that they are aligned.
        return start + 4, _unsigned(self._data, start)

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        start, count = self.vector(field)
        end = start + 16 * count
        if end > len(self._data):
            raise ValueError("more buffers than the header has room for")
        return cast("Iterator[tuple[int, int]]", struct.iter_unpack("<qq", self._data[start:end]))
