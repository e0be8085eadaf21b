"""Archives: the messages of a range as one Parquet file, every field of them.

    PAR1 ┬ row group ┬ row group ┬ … ┬ ISTR crc32 ┬ footer: schema, ister.* ┬ length ┬ PAR1
         └ 8 to 16 MiB of messages, zstd, sorted by offset

Parquet's footer has no checksum of its own, and a library that is given a damaged one may end the
process. So the crc32 of all that follows lies before it, where Parquet allows for anything.

Any tool that reads Parquet sees the table that `ister.format.columnar.COLUMNS` describes, and some
columns more: the rows can be made into the very frames that they were decoded from
(`restore_frames`). What an archive says about itself, as metadata of the file:

    ister.format_version   1
    ister.topic            /default/orders
    ister.start, ister.end the range, half open
    ister.codec            of the frames
    ister.kept             empty if every offset of the range is there, else which messages are
    ister.row_groups       JSON: for each [first offset, offset after the last, rows, position,
                           bytes, crc32, lowest and highest publish time in ms (or null)]

Owns: the file. Does not own: where it lies, which range it has, what may be left out.

Invariants: rows ascend by offset; without `kept` there is no hole. Every page has a checksum, a row
group has one more over all of its bytes; both are checked when it is read, and so are offsets and
counts. What does not check out is a `CorruptDataError` with position and offset.

Memory: one row group, writing or reading. A file that is not finished has no footer and is none.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ister.errors import CorruptDataError, InvalidRequestError, UnsupportedVersionError
from ister.format.columnar import (
    EVERY_FIELD,
    ColumnarDecoder,
    RestoredFrames,
    arrow_schema,
    restore_frames,
)
from ister.format.crc import Buffer, crc32
from ister.format.descriptor import (
    FORMAT_PARQUET,
    ObjectDescriptor,
    format_checksum,
)
from ister.format.frame import FrameBatch
from ister.limits import KIB, MIB, OBJECT_INDEX_ENTRIES_MAX
from ister.model import Codec

__all__ = [
    "ROW_GROUP_BYTES",
    "ZSTD_LEVEL",
    "ArchiveReader",
    "ArchiveWriter",
    "ArchivedRows",
    "Fetched",
    "RowGroup",
    "WrittenArchive",
]

ROW_GROUP_BYTES: Final = 8 * MIB
"""About how many bytes of messages a row group has at least, before compression."""
ZSTD_LEVEL: Final = 3

_VERSION: Final = 1
_MAGIC: Final = b"PAR1"
_FOOTER_MAGIC: Final = b"ISTR"
"""With four bytes of crc32, before the footer."""
_TAIL_BYTES: Final = 64 * KIB
"""How much of a file's end is fetched at once: most footers are smaller."""
_COALESCED_BYTES: Final = 256 * KIB
"""Columns that lie closer to each other than this are fetched together."""
_TIME_US_CLAMPED: Final = 253_402_300_799_999_999
_TIME_MS_END: Final = 1 << 63

_DICTIONARIES: Final = [
    "topic",
    "producer_name",
    "attributes.key_value.key",
    "schema_id",
    "schema_version",
    "producer_id",
    "message_topic",
    "broker_addr",
    "subscription_name",
]
_DELTAS: Final = dict.fromkeys(("offset", "publish_time", "request_id"), "DELTA_BINARY_PACKED")
_DAMAGE: Final = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)


class Sink(Protocol):
    """Where an archive is written to."""

    def write(self, data: Buffer, /) -> object:
        """Takes the next bytes."""
        ...


class RowGroup(NamedTuple):
    """A row group, as the file's metadata says."""

    first_offset: int
    next_offset: int
    """The offset after the last row's."""
    rows: int
    position: int
    """Where its first page begins."""
    size_bytes: int
    crc: int
    publish_time_min: int | None
    """In milliseconds; None if a message has a time that no clock gives."""
    publish_time_max: int | None

    @property
    def end_position(self) -> int:
        """The position after its last byte."""
        return self.position + self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenArchive:
    """What a descriptor needs to know about an archive."""

    start: int
    end: int
    size_bytes: int
    crc: int
    codec: Codec
    kept: str
    row_groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        """How many messages there are."""
        return sum(group.rows for group in self.row_groups)

    def describe(
        self,
        object_id: str,
        *,
        epoch: int,
        incarnation: str,
        created_at: int,
        etag: str | None,
    ) -> ObjectDescriptor:
        """The descriptor of an object that is this archive."""
        groups = self.row_groups
        lowest = [group.publish_time_min for group in groups if group.publish_time_min is not None]
        highest = [group.publish_time_max for group in groups if group.publish_time_max is not None]
        has_times = len(lowest) == len(highest) == len(groups) > 0
        index = [(group.first_offset, group.position) for group in groups]
        times = [0]
        for time in highest[: len(index) - 1] if has_times else ():
            times.append(max(times[-1], time))
        while len(index) > OBJECT_INDEX_ENTRIES_MAX:
            del index[1::2]
            del times[1::2]
        return ObjectDescriptor(
            object_id=object_id,
            start=self.start,
            end=self.end,
            size_bytes=self.size_bytes,
            etag=etag,
            created_at=created_at,
            offset_index=tuple(index),
            format=FORMAT_PARQUET,
            codec=self.codec,
            epoch=epoch,
            incarnation=incarnation,
            messages=self.rows,
            publish_time_min=min(lowest) if has_times else None,
            publish_time_max=max(highest) if has_times else None,
            publish_time_index=tuple(times) if has_times else (),
            checksum=format_checksum(self.crc),
            kept=self.kept,
        )


# -- writing --------------------------------------------------------------------------------


class ArchiveWriter:
    """Writes one archive. Used by one thread at a time.

    Nothing needs to be closed: an archive that is given up is one that was never finished.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        topic: str,
        codec: Codec,
        zstd_level: int = ZSTD_LEVEL,
        row_group_bytes: int = ROW_GROUP_BYTES,
        on_row_group: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins an archive.

        Args:
            sink: Takes the file's bytes, a row group at a time.
            topic: The topic's name.
            codec: Of the frames that the rows come from, and can be made into again.
            zstd_level: How hard to compress.
            row_group_bytes: About the least size of a row group, before compression.
            on_row_group: Called when one has been handed over.
        """
        self._topic = topic
        self._codec = codec
        self._schema = arrow_schema(EVERY_FIELD)
        self._row_group_bytes = row_group_bytes
        self._on_row_group = on_row_group
        self._sink = sink
        self._file = _Pieces()
        self._writer: Any = pq.ParquetWriter(
            pa.PythonFile(self._file, mode="w"),
            self._schema,
            compression="zstd",
            compression_level=zstd_level,
            use_dictionary=_DICTIONARIES,
            column_encoding=_DELTAS,
            write_statistics=["offset", "publish_time"],
            write_page_checksum=True,
            version="2.6",
        )
        self._decoder: ColumnarDecoder | None = None
        self._batches: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._row_groups: list[RowGroup] = []
        self._size_bytes = 0
        self._crc = 0
        self._next = 0

    @property
    def held_bytes(self) -> int:
        """What is held until the row group is large enough."""
        return self._held_bytes

    def write(self, batch: pa.RecordBatch) -> None:
        """Takes the next rows, which have the columns `EVERY_FIELD`.

        Raises:
            InvalidRequestError: They have other ones, or offsets that do not ascend.
        """
        if not batch.schema.equals(self._schema):
            raise InvalidRequestError("the columns are not those of messages", topic=self._topic)
        if not batch.num_rows:
            return
        first, last = _check_ascending(batch.column("offset"), self._topic)
        if first < self._next:
            raise InvalidRequestError(
                f"offset {first} after {self._next - 1}", topic=self._topic, offset=first
            )
        self._next = last + 1
        # A batch of any size, in parts that fit into row groups.
        parts = max(1, batch.nbytes // self._row_group_bytes)
        rows = -(-batch.num_rows // parts)
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            self._batches.append(part)
            self._held_bytes += part.nbytes
            if self._held_bytes >= self._row_group_bytes:
                self._flush()

    def write_frames(self, frames: FrameBatch) -> None:
        """Takes the next frames, which are whole and checked.

        Raises:
            CorruptDataError: A body is not a message.
            InvalidRequestError: They are of another codec.
        """
        if frames.codec is not self._codec:
            raise InvalidRequestError(f"frames of {frames.codec} in an archive of {self._codec}")
        if self._decoder is None:
            self._decoder = ColumnarDecoder(self._topic, self._codec, EVERY_FIELD)
        decoded = self._decoder.decode(
            memoryview(frames.chunk)[: frames.end],
            frames.starts[0],
            expected_offset=frames.first_offset,
            end_offset=frames.next_offset,
        )
        self.write(decoded.batch)

    def finish(self, *, start: int, end: int, kept: str = "") -> WrittenArchive:
        """Writes what is left and the footer.

        Args:
            start: Where the archive's range begins.
            end: Where it ends.
            kept: Which messages of the range are there, if not all of them.

        Raises:
            InvalidRequestError: The rows are not those of the range.
        """
        if self._batches:
            self._flush()
        groups = tuple(self._row_groups)
        rows = sum(group.rows for group in groups)
        if groups and not start <= groups[0].first_offset <= groups[-1].next_offset <= end:
            raise InvalidRequestError(
                f"rows from {groups[0].first_offset} up to {groups[-1].next_offset} in an archive "
                f"of {start} up to {end}",
                topic=self._topic,
            )
        if not kept and rows != end - start:
            raise InvalidRequestError(
                f"{rows} messages in an archive of {end - start}", topic=self._topic
            )
        self._writer.add_key_value_metadata(
            {
                "ister.format_version": str(_VERSION),
                "ister.topic": self._topic,
                "ister.start": str(start),
                "ister.end": str(end),
                "ister.codec": str(self._codec),
                "ister.kept": kept,
                "ister.row_groups": json.dumps(groups, separators=(",", ":")),
            }
        )
        if not groups:
            self._hand_over()  # the magic number
        self._writer.close()
        footer = self._file.take()
        self._file.write(_FOOTER_MAGIC + crc32(footer).to_bytes(4, "little") + footer)
        self._hand_over()
        return WrittenArchive(
            start=start,
            end=end,
            size_bytes=self._size_bytes,
            crc=self._crc,
            codec=self._codec,
            kept=kept,
            row_groups=groups,
        )

    def _flush(self) -> None:
        """Writes what is held as one row group."""
        table = pa.Table.from_batches(self._batches, self._schema)
        self._batches, self._held_bytes = [], 0
        if not self._row_groups:
            self._hand_over()  # the magic number before the first row group
        position = self._size_bytes
        self._writer.write_table(table, row_group_size=table.num_rows)
        crc = self._hand_over()
        offsets = table.column("offset")
        lowest, highest = _publish_times(table)
        self._row_groups.append(
            RowGroup(
                offsets[0].as_py(),
                offsets[-1].as_py() + 1,
                table.num_rows,
                position,
                self._size_bytes - position,
                crc,
                lowest,
                highest,
            )
        )
        if len(self._row_groups) % OBJECT_INDEX_ENTRIES_MAX == 0:
            # An index has only so many entries: larger row groups from here on.
            self._row_group_bytes = min(2 * self._row_group_bytes, 128 * MIB)
        self._on_row_group()

    def _hand_over(self) -> int:
        """Gives the sink what has been written; returns the crc of that."""
        data = self._file.take()
        self._crc = crc32(data, self._crc)
        self._size_bytes += len(data)
        self._sink.write(data)
        return crc32(data)


class _Pieces:
    """A file that only grows; what is in it can be taken out."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        self._position += len(data)
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """The sink is closed by whoever opened it."""


def _check_ascending(offsets: pa.Array, topic: str) -> tuple[int, int]:
    """The first and the last of some offsets, each larger than the one before.

    Raises:
        InvalidRequestError: They are not.
    """
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    if offsets.null_count or not _ascend(offsets):
        raise InvalidRequestError("offsets do not ascend", topic=topic, offset=first)
    return first, last


def _ascend(offsets: pa.Array) -> bool:
    if len(offsets) < 2:
        return True
    return bool(pc.min(pc.pairwise_diff(offsets)).as_py() > 0)


def _publish_times(table: pa.Table | pa.RecordBatch) -> tuple[int | None, int | None]:
    """The lowest and the highest publish time in milliseconds; None if no clock gives one."""
    times = table.column("publish_time").cast(pa.int64())
    found = pc.min_max(times).as_py()
    lowest, highest = found["min"] // 1000, found["max"] // 1000
    exact = table.column("publish_time_ms")
    if exact.null_count < len(exact):
        beyond = pc.min_max(exact).as_py()
        highest = beyond["max"]
        if found["min"] == _TIME_US_CLAMPED:
            lowest = beyond["min"]
        if highest >= _TIME_MS_END:
            return None, None
    return lowest, highest


# -- reading --------------------------------------------------------------------------------


class Fetched(NamedTuple):
    """Some bytes of a file: where each piece begins, and the pieces."""

    positions: list[int]
    pieces: list[bytes]

    @property
    def size_bytes(self) -> int:
        """How many there are."""
        return sum(map(len, self.pieces))


class ArchivedRows(NamedTuple):
    """The rows of a row group."""

    batch: pa.RecordBatch
    """The wanted columns."""
    offsets: pa.Array
    """The offset of each row."""


class ArchiveReader:
    """Reads an archive, a row group at a time. May be shared by threads."""

    def __init__(
        self, read: Callable[[int, int], bytes], size_bytes: int, *, path: str, topic: str = ""
    ) -> None:
        """Reads the footer.

        Args:
            read: (position, size) → bytes of the file, fewer only at its end.
            size_bytes: The size of the file.
            path: For errors.
            topic: Which topic's it has to be; not looked at if empty.

        Raises:
            CorruptDataError: It is not an archive.
            UnsupportedVersionError: A newer Ister wrote it.
        """
        self._read = read
        self._size_bytes = size_bytes
        self._path = path
        self._schema = arrow_schema(EVERY_FIELD)
        self._metadata = self._read_footer()
        facts = {
            key.decode(errors="replace"): value.decode(errors="replace")
            for key, value in (self._metadata.metadata or {}).items()
            if key.startswith(b"ister.")
        }
        version = facts.get("ister.format_version", "")
        if not version.isascii() or not version.isdigit():
            raise self._damage("a Parquet file that is no archive of messages")
        if int(version) > _VERSION:
            raise UnsupportedVersionError(
                f"an archive of version {version}",
                path=path,
                hint="read it with the newer Ister that wrote it",
            )
        try:
            self.topic = facts["ister.topic"]
            """The topic's name."""
            self.start, self.end = int(facts["ister.start"]), int(facts["ister.end"])
            self.codec = Codec(facts["ister.codec"])
            """Of the frames that the rows were."""
            self.kept = facts["ister.kept"]
            """Which messages of the range are there; empty for all of them."""
            self.row_groups = tuple(
                RowGroup(*group) for group in json.loads(facts["ister.row_groups"])
            )
            self._check_footer()
        except (*_DAMAGE, RecursionError) as error:
            raise self._damage(f"the footer is damaged: {error!r}") from error
        if topic and self.topic != topic:
            raise self._damage(f"an archive of the topic {self.topic}, not of {topic}")

    @property
    def rows(self) -> int:
        """How many messages there are."""
        return sum(group.rows for group in self.row_groups)

    def find(self, offset: int) -> int:
        """The number of the first row group that ends after `offset`; their count if none does."""
        return bisect_right(self.row_groups, offset, key=lambda group: group.next_offset)

    def fetch(self, number: int, columns: Sequence[str] | None = None) -> Fetched:
        """Gets the bytes of a row group, of all or of some columns, for `decode`.

        Raises:
            What `read` does.
        """
        group = self.row_groups[number]
        if columns is None:
            return Fetched([group.position], [self._read(group.position, group.size_bytes)])
        wanted = {"offset", *columns}
        found = self._metadata.row_group(number)
        ranges: list[tuple[int, int]] = []
        for at in range(found.num_columns):
            column = found.column(at)
            if column.path_in_schema.partition(".")[0] in wanted:
                begin = _column_position(column)
                end = begin + column.total_compressed_size
                if ranges and begin - ranges[-1][1] < _COALESCED_BYTES:
                    begin = ranges.pop()[0]
                ranges.append((begin, end))
        return Fetched(
            [begin for begin, _ in ranges],
            [self._read(begin, end - begin) for begin, end in ranges],
        )

    def decode(
        self, number: int, fetched: Fetched, columns: Sequence[str] | None = None
    ) -> ArchivedRows:
        """The rows of a row group, checked.

        Args:
            number: Which one.
            fetched: What `fetch` got for the same columns.
            columns: Names out of `EVERY_FIELD`, in this order; None for all of them.

        Raises:
            CorruptDataError: It is damaged.
            InvalidRequestError: There is no such column.
        """
        group = self.row_groups[number]
        schema = arrow_schema(EVERY_FIELD if columns is None else columns)
        if columns is None and crc32(fetched.pieces[0]) != group.crc:
            raise self._damage("crc mismatch", group)
        try:
            file = pq.ParquetFile(
                pa.PythonFile(_Window(fetched, self._size_bytes), mode="r"),
                metadata=self._metadata,
                page_checksum_verification=True,
            )
            wanted = [*schema.names, *(() if "offset" in schema.names else ("offset",))]
            table = file.read_row_group(number, columns=wanted).combine_chunks()
            batches = table.to_batches()
            if len(batches) != 1:
                raise self._damage(f"a row group of {len(batches)} batches", group)
            offsets = batches[0].column("offset")
            batch = _select(batches[0], schema)
            batch.validate(full=True)
        except _DAMAGE as error:
            raise self._damage(str(error), group) from error
        self._check_rows(batch, offsets, group)
        return ArchivedRows(batch, offsets)

    def read(self, number: int, columns: Sequence[str] | None = None) -> ArchivedRows:
        """Fetches and decodes a row group.

        Raises:
            As `fetch` and `decode`.
        """
        return self.decode(number, self.fetch(number, columns), columns)

    def restore(self, number: int, fetched: Fetched | None = None) -> RestoredFrames:
        """The frames that the rows of a row group were.

        Raises:
            As `fetch` and `decode`.
        """
        group = self.row_groups[number]
        rows = self.decode(number, self.fetch(number) if fetched is None else fetched)
        try:
            return restore_frames(rows.batch, topic=self.topic, codec=self.codec)
        except CorruptDataError as error:
            raise self._damage(error.message, group) from error

    def describe(self, crc: int) -> WrittenArchive:
        """What its writer said, by the footer and the file's crc."""
        return WrittenArchive(
            start=self.start,
            end=self.end,
            size_bytes=self._size_bytes,
            crc=crc,
            codec=self.codec,
            kept=self.kept,
            row_groups=self.row_groups,
        )

    # -- checks -----------------------------------------------------------------------------

    def _read_footer(self) -> Any:  # noqa: ANN401 - pyarrow has no types
        size = self._size_bytes
        begin = max(0, size - _TAIL_BYTES)
        tail = self._read(begin, size - begin)
        if len(tail) != size - begin or size < 12 or tail[-4:] != _MAGIC:
            raise self._damage("not a Parquet file, or one that was cut short")
        footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
        if footer_bytes + 12 > size:
            raise self._damage(f"a footer of {footer_bytes} bytes")
        missing = footer_bytes + 8 - len(tail)
        if missing > 0:
            tail = self._read(begin - missing, missing) + tail
        footer = tail[-footer_bytes:]
        before = tail[-footer_bytes - 8 : -footer_bytes]
        if before != _FOOTER_MAGIC + crc32(footer).to_bytes(4, "little"):
            raise self._damage("the footer is damaged, or not that of an archive")
        try:
            window = _Window(Fetched([size - len(tail)], [tail]), size)
            return pq.read_metadata(pa.PythonFile(window, mode="r"))
        except _DAMAGE as error:
            raise self._damage(f"the footer is damaged: {error}") from error

    def _check_footer(self) -> None:
        """Compares what Parquet's metadata and ours say about the same.

        Raises:
            ValueError: They do not agree.
        """
        metadata = self._metadata
        _insist(metadata.schema.to_arrow_schema().equals(self._schema), "other columns")
        _insist(metadata.num_row_groups == len(self.row_groups), "other row groups")
        _insist(0 <= self.start < self.end, "an impossible range")
        offset, position = self.start, len(_MAGIC)
        for number, group in enumerate(self.row_groups):
            found = metadata.row_group(number)
            # One column after the other, or a page could be read as one of another column.
            behind = position
            for column in (found.column(at) for at in range(found.num_columns)):
                _insist(
                    _column_position(column) == behind and column.compression == "ZSTD",
                    f"a column of row group {number} is not where it should be",
                )
                behind += column.total_compressed_size
            _insist(
                group.rows == found.num_rows
                and group.position == position
                and group.end_position == behind
                and 0 < group.size_bytes <= self._size_bytes - position
                and offset <= group.first_offset
                and 0 < group.rows <= group.next_offset - group.first_offset
                and (
                    bool(self.kept)
                    or (group.first_offset == offset and group.next_offset == offset + group.rows)
                ),
                f"row group {number} is not what it should be",
            )
            offset, position = group.next_offset, group.end_position
        _insist(offset <= self.end and (bool(self.kept) or offset == self.end), "another range")

    def _check_rows(self, batch: pa.RecordBatch, offsets: pa.Array, group: RowGroup) -> None:
        if batch.num_rows != group.rows or offsets.null_count:
            raise self._damage(f"{batch.num_rows} rows instead of {group.rows}", group)
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        if (first, last + 1) != (group.first_offset, group.next_offset) or not _ascend(offsets):
            raise self._damage(f"offsets {first} to {last} are not those of the row group", group)

    def _damage(self, reason: str, group: RowGroup | None = None) -> CorruptDataError:
        return CorruptDataError(
            f"damaged object: {reason}",
            path=self._path,
            position=group.position if group is not None else None,
            offset=group.first_offset if group is not None else None,
            hint="`ister repair` restores it where the local files still have the range",
        )


def _insist(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _column_position(column: Any) -> int:  # noqa: ANN401 - pyarrow has no types
    """Where the first page of a column chunk begins."""
    data: int = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        return min(data, int(column.dictionary_page_offset))
    return data


def _select(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a schema; without any, what is left is how many rows there are."""
    if schema.names:
        return pa.RecordBatch.from_arrays(
            [batch.column(name).cast(schema.field(name).type) for name in schema.names],
            schema=schema,
        )
    return pa.RecordBatch.from_struct_array(
        pa.StructArray.from_buffers(pa.struct([]), batch.num_rows, [None])
    )


class _Window:
    """A file of which only some pieces are there."""

    closed = False

    def __init__(self, fetched: Fetched, size_bytes: int) -> None:
        self._fetched = fetched
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._size_bytes)[whence] + position
        return self._position

    def close(self) -> None:
        """It holds nothing."""

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = self._size_bytes - self._position
        positions, pieces = self._fetched
        at = bisect_right(positions, self._position) - 1
        begin = self._position - positions[at] if at >= 0 else 0
        if at < 0 or begin + size > len(pieces[at]):
            raise OSError(f"{size} bytes at {self._position} are not those of its pages")
        self._position += size
        return pieces[at][begin : begin + size]
