"""Writes archives; see `ister.format.archive` for the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ister.base.limits import MIB, OBJECT_INDEX_ENTRIES_MAX
from ister.base.model import Codec
from ister.errors import InvalidRequestError
from ister.format.archive import (
    ARCHIVE_VERSION,
    FOOTER_MAGIC,
    RowGroup,
    WrittenArchive,
    count_uncompressed,
    offsets_ascend,
)
from ister.format.arrow.decode import ColumnarDecoder
from ister.format.arrow.loops import TIME_US_CLAMPED
from ister.format.arrow.schema import EVERY_FIELD, arrow_schema
from ister.format.crc import Buffer, crc32
from ister.format.frame import FrameBatch

ROW_GROUP_BYTES: Final = 8 * MIB
"""The least size of a row group's messages before compression, about."""
ZSTD_LEVEL: Final = 3

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


class Sink(Protocol):
    """Where an archive is written to."""

    def write(self, data: Buffer, /) -> object:
        """Takes the next bytes."""
        ...


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
        self._footers: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._file, mode="w"),
            self._schema,
            compression="zstd",
            compression_level=zstd_level,
            use_dictionary=_DICTIONARIES,
            column_encoding=_DELTAS,
            write_statistics=["offset", "publish_time"],
            write_page_checksum=True,
            version="2.6",
            metadata_collector=self._footers,
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
                "ister.format_version": str(ARCHIVE_VERSION),
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
        self._file.write(FOOTER_MAGIC + crc32(footer).to_bytes(4, "little") + footer)
        self._hand_over()
        return WrittenArchive(
            start=start,
            end=end,
            size_bytes=self._size_bytes,
            crc=self._crc,
            codec=self._codec,
            kept=kept,
            row_groups=groups,
            uncompressed_bytes=count_uncompressed(self._footers[0]),
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
        """Does nothing: writes are not buffered."""

    def close(self) -> None:
        """Does nothing: the caller closes the sink."""


def _check_ascending(offsets: pa.Array, topic: str) -> tuple[int, int]:
    """The first and the last of some offsets, each larger than the one before.

    Raises:
        InvalidRequestError: They are not.
    """
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    if offsets.null_count or not offsets_ascend(offsets):
        raise InvalidRequestError("offsets do not ascend", topic=topic, offset=first)
    return first, last


def _publish_times(table: pa.Table | pa.RecordBatch) -> tuple[int | None, int | None]:
    """The lowest and the highest publish time in milliseconds; None if no clock gives one."""
    times = table.column("publish_time").cast(pa.int64())
    found = pc.min_max(times).as_py()
    lowest, highest = found["min"] // 1000, found["max"] // 1000
    exact = table.column("publish_time_ms")
    if exact.null_count < len(exact):
        beyond = pc.min_max(exact).as_py()
        highest = beyond["max"]
        if found["min"] == TIME_US_CLAMPED:
            lowest = beyond["min"]
        if highest >= _TIME_MS_END:
            return None, None
    return lowest, highest
