"""Messages as Arrow record batches, wherever they are read from.

    bucket ─► chunks ──┐
    local files ───────┼─► ColumnarDecoder ─► pyarrow.RecordBatch
    memory ────────────┘

Owns: the way from frames to batches, and what happens when a chunk is not what it should be: the
part is then read again, from the first frame in doubt on, by the careful reader of `ister.tier`,
which knows about replaced objects, wrong indexes and damage that may be left out.

Invariants: batches are in the order of offsets, without a gap (unless damaged messages are left out
by configuration) and without a repeat; rows before a damaged one come out before it raises.

Memory: one chunk, one chunk fetched ahead, one batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import pyarrow as pa

from ister.clock import Clock
from ister.errors import CorruptDataError, NotFoundError
from ister.format.columnar import ColumnarDecoder, FrameFeed, encode_frames
from ister.format.frame import FrameBatch
from ister.metrics import Metrics
from ister.model import Codec
from ister.objectstore.base import ObjectStore
from ister.tier.chunks import ObjectPart, fetch_chunks
from ister.tier.reader import DamageSkippedError, HistoryReader
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
    """The offset after the last of them. (Damaged ones may have been left out before it.)"""


class Decoders:
    """The decoders of one topic's frames into the same columns: one for each codec that occurs."""

    def __init__(self, topic: str, columns: Sequence[str] | None = None) -> None:
        self._topic = topic
        self._columns = columns
        self._by_codec: dict[Codec, ColumnarDecoder] = {}
        self.schema: pa.Schema = self.of(Codec.BINCODE2).schema

    def of(self, codec: Codec) -> ColumnarDecoder:
        """The decoder for bodies in `codec`."""
        decoder = self._by_codec.get(codec)
        if decoder is None:
            decoder = ColumnarDecoder(self._topic, codec, self._columns)
            self._by_codec[codec] = decoder
        return decoder


def decode_frames(frames: FrameBatch, decoders: Decoders) -> Iterator[Rows]:
    """The frames of a batch, which are whole and checked, as one record batch.

    Raises:
        CorruptDataError: A body is not a message; the rows before it have come out.
    """
    decoder = decoders.of(frames.codec)
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


def as_arrow_reader(reader: Reader, decoders: Decoders) -> pa.RecordBatchReader:
    """Everything before a reader's end, as Arrow; the reader is closed at its end."""

    def batches() -> Iterator[pa.RecordBatch]:
        with reader:
            while (frames := reader.next_frames()) is not None:
                for rows in decode_frames(frames, decoders):
                    yield rows.batch

    return pa.RecordBatchReader.from_batches(decoders.schema, batches())


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
) -> Iterator[Rows]:
    """The messages of a part of an object.

    Args:
        store: Where the object is.
        key: Of the object.
        part: Which offsets, and where their bytes lie.
        decoders: What to make of them.
        open_careful: Opens a reader that finds the offsets anew, should this not work.
        chunk_bytes: How much to fetch at once.
        ahead: Where the next chunk is fetched meanwhile.
        clock: For metrics.
        metrics: What was fetched is counted there.

    Raises:
        DataGapError: No object holds an offset.
        NotFoundError: The object that does is lost.
        CorruptDataError: A frame is damaged.
        UnavailableError: A store does not answer.
    """
    offset = part.start
    if part.codec is not None:
        feed = FrameFeed(
            decoders.of(part.codec), expected_offset=part.index_offset, end_offset=part.end
        )
        chunks = fetch_chunks(
            store, key, part, chunk_bytes=chunk_bytes, ahead=ahead, clock=clock, metrics=metrics
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


def read_range(
    open_careful: Callable[[], HistoryReader],
    start: int,
    end: int,
    decoders: Decoders,
    *,
    bytes_max: int,
) -> Iterator[Rows]:
    """The messages of a range of offsets in the bucket, whichever objects hold them now.

    Raises:
        As `read_part`.
    """
    reader = open_careful()
    try:
        while start < end:
            try:
                frames = reader.fetch(start, end, bytes_max=bytes_max)
            except DamageSkippedError as skipped:
                start = skipped.next_offset
                continue
            yield from decode_frames(frames, decoders)
            start = frames.next_offset
    finally:
        reader.close()
