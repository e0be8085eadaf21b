"""Messages as Arrow record batches, wherever they are read from.

    bucket ─► chunks ──┐
    local files ───────┼─► ColumnarDecoder ─► pyarrow.RecordBatch
    memory ────────────┘                           ▲
    bucket ─► row groups of Parquet ───────────────┘

Owns: the way from frames to batches, and what happens when a chunk is not what it should be: the
part is then read again, from the first frame in doubt on, by the careful reader of `ister.bucket`,
which knows about replaced objects, wrong indexes and damage that may be left out.

Invariants: batches are in the order of offsets, without a gap (unless messages were left out of an
object on purpose, or damaged ones are by configuration) and without a repeat; rows before a damaged
one come out before it raises.

Memory: one chunk or row group, as much again fetched ahead, one batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.bucket.chunks import FirstRange, ObjectPart, ObjectsAhead, await_bytes, fetch_chunks
from ister.bucket.history_reader import HistoryReader
from ister.errors import CorruptDataError, NotFoundError
from ister.format.archive import ArchivedRows, ArchiveReader, Fetched
from ister.format.arrow.decode import ColumnarDecoder, FrameFeed
from ister.format.arrow.encode import encode_frames
from ister.format.arrow.text import Projection
from ister.format.crc import Buffer
from ister.format.descriptor import FORMAT_PARQUET
from ister.format.frame import FrameBatch, NothingLeftError
from ister.objectstore.base import ObjectStore
from ister.objectstore.measured import MeasuredReads
from ister.topic.reader import Reader

__all__ = [
    "Decoders",
    "RecordBatch",
    "Rows",
    "as_arrow_reader",
    "decode_frames",
    "encode_frames",
    "read_part",
    "read_range",
]

_log = logging.getLogger("ister.topic.columns")


RecordBatch = pa.RecordBatch


class Rows(NamedTuple):
    """Some messages."""

    batch: pa.RecordBatch
    next_offset: int
    """The offset after the last of them, or a later one: nothing is there in between, because it
    was left out on purpose, or is damaged and left out by configuration. There may be no rows."""


class Decoders:
    """The decoders of one topic's frames into the same columns: one for each codec that occurs."""

    def __init__(self, topic: str, columns: Sequence[str] | None = None) -> None:
        self._topic = topic
        self._columns = columns
        self._by_codec: dict[Codec, ColumnarDecoder] = {}
        self.schema: pa.Schema = self.decoder_for(Codec.BINCODE2).schema

    def decoder_for(self, codec: Codec) -> ColumnarDecoder:
        """The decoder for bodies in `codec`."""
        decoder = self._by_codec.get(codec)
        if decoder is None:
            decoder = ColumnarDecoder(self._topic, codec, self._columns)
            self._by_codec[codec] = decoder
        return decoder


def decode_frames(frames: FrameBatch, decoders: Decoders) -> Iterator[Rows]:
    """The frames of a batch, which are whole and checked, as one record batch.

    Raises:
        CorruptDataError: A body is not a message; the rows before it were returned.
    """
    decoder = decoders.decoder_for(frames.codec)
    buffer = memoryview(frames.chunk)[: frames.end]
    position, start = frames.starts[0], frames.first_offset
    try:
        decoded = decoder.decode(
            buffer, position, expected_offset=start, end_offset=frames.next_offset
        )
    except CorruptDataError as error:
        if error.offset is not None and error.offset > start:
            good = decoder.decode(buffer, position, expected_offset=start, end_offset=error.offset)
            yield Rows(good.batch, good.next_offset)
        raise
    yield Rows(decoded.batch, decoded.next_offset)


def as_arrow_reader(
    topic: str, columns: Sequence[str] | None, open_reader: Callable[[], Reader]
) -> pa.RecordBatchReader:
    """Everything before a reader's end, as Arrow; the reader is closed at its end."""
    projection = Projection(columns)
    decoders = Decoders(topic, projection.stored)
    reader = open_reader()

    def batches() -> Iterator[pa.RecordBatch]:
        with reader:
            while (frames := reader.next_frames()) is not None:
                for rows in decode_frames(frames, decoders):
                    yield projection.apply(rows.batch)

    return pa.RecordBatchReader.from_batches(projection.schema, batches())


def read_part(
    store: ObjectStore,
    key: str,
    part: ObjectPart,
    decoders: Decoders,
    *,
    open_careful: Callable[[], HistoryReader],
    chunk_bytes: int,
    ahead: Executor | None,
    clock: Clock,
    metrics: Metrics,
    upcoming: ObjectsAhead[Buffer] | None = None,
) -> Iterator[Rows]:
    """The messages of a part of an object.

    `open_careful`: opens a reader that looks the offsets up again, if this fails.

    Raises:
        DataGapError: No object holds an offset.
        NotFoundError: The object that does is lost.
    """
    offset = part.start
    if part.format == FORMAT_PARQUET:
        try:
            for rows in _read_archived(
                store, key, part, decoders, ahead, clock, metrics, upcoming, chunk_bytes
            ):
                yield rows
                offset = rows.next_offset
        except (NotFoundError, CorruptDataError) as error:
            _log.info("read again with care", extra={"path": key, "error": str(error)})
    elif part.codec is not None:
        feed = FrameFeed(
            decoders.decoder_for(part.codec), expected_offset=part.index_offset, end_offset=part.end
        )
        chunks = fetch_chunks(
            store,
            key,
            part,
            chunk_bytes=chunk_bytes,
            ahead=ahead,
            clock=clock,
            metrics=metrics,
            upcoming=upcoming,
        )
        try:
            for chunk in chunks:
                for batch in feed.feed(chunk):
                    end = feed.next_offset
                    begin = end - batch.num_rows
                    if end <= offset:
                        continue  # frames between the index entry and the part's start
                    yield Rows(batch.slice(offset - begin) if begin < offset else batch, end)
                    offset = end
                if feed.corrupt is not None or feed.is_done:
                    break
        except (NotFoundError, CorruptDataError) as error:
            _log.info("read again with care", extra={"path": key, "error": str(error)})
        finally:
            chunks.close()
    if offset < part.end:
        yield from read_range(open_careful, offset, part.end, decoders, bytes_max=chunk_bytes)


def _read_archived(  # noqa: PLR0917
    store: ObjectStore,
    key: str,
    part: ObjectPart,
    decoders: Decoders,
    ahead: Executor | None,
    clock: Clock,
    metrics: Metrics,
    upcoming: ObjectsAhead[Buffer] | None,
    chunk_bytes: int,
) -> Iterator[Rows]:
    """The messages of a part of a Parquet object: the wanted columns, a row group at a time."""
    read = partial(
        MeasuredReads(store, clock=clock, metrics=metrics).read, key, object_bytes=part.object_bytes
    )
    metrics.count("cloud_reader.objects_opened_total")
    first = FirstRange.of_part(key, part, chunk_bytes)
    whole: Buffer | None = None
    if upcoming is not None and first is not None:
        fetch = upcoming.take(first)
        upcoming.top_up()
        if (whole := await_bytes(fetch)) is not None:
            read = partial(_read_fetched, memoryview(whole))
    archive = ArchiveReader(read, part.object_bytes, path=key)
    if not archive.start <= part.start < part.end <= archive.end:
        raise CorruptDataError(
            f"damaged object: it has the offsets {archive.start} up to {archive.end}",
            path=key,
            offset=part.start,
        )
    columns = decoders.schema.names
    numbers = range(archive.find(part.start), archive.find(part.end - 1) + 1)
    wanted = [
        number
        for number in numbers
        if number < len(archive.row_groups) and archive.row_groups[number].first_offset < part.end
    ]
    coming: Future[Fetched] | None = None
    try:
        for at, number in enumerate(wanted):
            fetched = coming.result() if coming is not None else archive.fetch(number, columns)
            coming = None
            if upcoming is not None and at + 1 == len(wanted):
                upcoming.top_up()
            if ahead is not None and whole is None and at + 1 < len(wanted):
                with suppress(RuntimeError):  # the executor is being closed
                    coming = ahead.submit(archive.fetch, wanted[at + 1], columns)
            rows = archive.decode(number, fetched, columns)
            next_offset = archive.row_groups[number].next_offset
            yield Rows(_within(rows, part), min(next_offset, part.end))
    finally:
        if coming is not None:
            coming.cancel()
    if not wanted or archive.row_groups[wanted[-1]].next_offset < part.end:
        yield Rows(_no_rows(decoders), part.end)


def _read_fetched(fetched: memoryview, position: int, size: int) -> bytes:
    return bytes(fetched[position : position + size])


def _within(rows: ArchivedRows, part: ObjectPart) -> pa.RecordBatch:
    """The rows of a row group that are in a part."""
    first = 0
    if rows.offsets[0].as_py() < part.start:
        first = pc.sum(pc.less(rows.offsets, part.start)).as_py()
    count = rows.batch.num_rows - first
    if rows.offsets[-1].as_py() >= part.end:
        count = pc.sum(pc.less(rows.offsets, part.end)).as_py() - first
    return rows.batch.slice(first, count)


def _no_rows(decoders: Decoders) -> pa.RecordBatch:
    schema = decoders.schema
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def read_range(
    open_careful: Callable[[], HistoryReader],
    start: int,
    end: int,
    decoders: Decoders,
    *,
    bytes_max: int,
) -> Iterator[Rows]:
    """The messages of a range of offsets in the bucket, whichever objects hold them now."""
    reader = open_careful()
    try:
        while start < end:
            try:
                frames = reader.fetch(start, end, bytes_max=bytes_max)
            except NothingLeftError as nothing:
                start = min(nothing.next_offset, end)
                yield Rows(_no_rows(decoders), start)
                continue
            yield from decode_frames(frames, decoders)
            start = frames.next_offset
    finally:
        reader.close()
