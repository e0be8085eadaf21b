"""Archives: the messages of a range as one Parquet file, every field of them.

    PAR1 ┬ row group ┬ row group ┬ … ┬ ISTR crc32 ┬ footer: schema, ister.* ┬ length ┬ PAR1
         └ 8 to 16 MiB of messages, zstd, sorted by offset

Parquet's footer has no checksum of its own, and a library that is given a damaged one may end the
process. So the crc32 of all that follows lies before it, where Parquet allows for anything.

Any tool that reads Parquet sees the columns `ister.format.arrow.schema.EVERY_FIELD`, from which the
original frames can be restored (`restore_frames`). The file's own metadata:

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

Memory: one row group, writing or reading. An unfinished file has no footer and is invalid.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ister.base.limits import KIB, OBJECT_INDEX_ENTRIES_MAX
from ister.base.model import Codec
from ister.errors import CorruptDataError, UnsupportedVersionError
from ister.format.arrow.encode import RestoredFrames, restore_frames
from ister.format.arrow.schema import EVERY_FIELD, arrow_schema, make_batch
from ister.format.crc import crc32
from ister.format.descriptor import FORMAT_PARQUET, ObjectDescriptor, format_checksum

ARCHIVE_VERSION: Final = 1
_MAGIC: Final = b"PAR1"
FOOTER_MAGIC: Final = b"ISTR"
"""With four bytes of crc32, before the footer."""
_TAIL_BYTES: Final = 64 * KIB
"""How much of a file's end is fetched at once: most footers are smaller."""
_COALESCED_BYTES: Final = 256 * KIB
"""Columns that lie closer to each other than this are fetched together."""

_DAMAGE: Final = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)


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
    uncompressed_bytes: int
    """The size of the row groups before compression, as Parquet's footer has it."""

    @property
    def rows(self) -> int:
        """How many messages there are."""
        return sum(group.rows for group in self.row_groups)

    def describe(
        self, object_id: str, *, epoch: int, incarnation: str, created_at: int, etag: str | None
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
            uncompressed_bytes=self.uncompressed_bytes,
        )


def count_uncompressed(metadata: pq.FileMetaData) -> int:
    """The size of a file's row groups before compression."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    return sum(group.total_byte_size for group in groups)


def offsets_ascend(offsets: pa.Array) -> bool:
    """Whether each offset is larger than the one before."""
    if len(offsets) < 2:
        return True
    return bool(pc.min(pc.pairwise_diff(offsets)).as_py() > 0)


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
            topic: The expected topic; not checked if empty.

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
        if int(version) > ARCHIVE_VERSION:
            raise UnsupportedVersionError(
                f"unsupported archive version {version}",
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
            """Which messages of the range were kept; empty for all."""
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
            uncompressed_bytes=count_uncompressed(self._metadata),
        )

    # -- checks -----------------------------------------------------------------------------

    def _read_footer(self) -> pq.FileMetaData:
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
        if before != FOOTER_MAGIC + crc32(footer).to_bytes(4, "little"):
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
        is_range = (first, last + 1) == (group.first_offset, group.next_offset)
        if not is_range or not offsets_ascend(offsets):
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


def _column_position(column: pq.ColumnChunkMetaData) -> int:
    """Where the first page of a column chunk begins."""
    data: int = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        return min(data, int(column.dictionary_page_offset))
    return data


def _select(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a schema."""
    columns = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
    return make_batch(columns, schema, batch.num_rows)


class _Window:
    """A file of which only some pieces are loaded."""

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
        """Has no resources to release."""

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
