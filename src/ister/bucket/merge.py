"""Makes one object of several that follow each other: frames or Parquet in, either one out.

    data-0-999.dnb1 ─┐
    data-1000-1499.dnb1 ─┼─► read, check ─► [survives] ─► data-0-2999-c1f0a2b3c.parquet
    data-1500-2999-c….parquet ─┘

Owns: reading the inputs, every byte of them checked, and one new object under its final name. Does
not own: which objects go together, and the commit: until the returned descriptor is
committed, the new object is garbage in the bucket.

Invariants: without `survives` the new object has exactly the messages of its inputs; between frames
and Parquet they keep their bytes. An input that does not check out ends the merge and nothing is
completed. An object has one codec, so its inputs do.

Memory: a chunk and a row group of the inputs, a row group of the new object, the store's parts in
flight. What a crash leaves: parts of an object, or an object that no descriptor names; its tag is
random, so that its name is never written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from ister.base import failpoints
from ister.base.limits import FRAME_BODY_BYTES_MAX, MIB, OBJECT_INDEX_ENTRIES_MAX
from ister.base.model import Codec, Layout, TopicName
from ister.bucket.check import load_archives, open_archive, verify_content, verify_size
from ister.bucket.names import format_object_id, object_key
from ister.bucket.object_maker import ObjectSummary, complete_object
from ister.errors import ClosedError, CorruptDataError, InvalidRequestError, check
from ister.format.crc import Buffer, crc32
from ister.format.descriptor import (
    FORMAT_FRAMES,
    FORMAT_PARQUET,
    KEPT_LATEST,
    ObjectDescriptor,
    format_checksum,
)
from ister.format.frame import Corrupt, Frame, FrameBatch, decode_frame, scan_frames
from ister.format.message import recognise
from ister.objectstore.base import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.format.archive import ArchiveReader

_ROW_GROUP_BYTES_MAX: Final = 128 * MIB
_Item = TypeVar("_Item")

Survives: TypeAlias = "Callable[[pa.RecordBatch], pa.BooleanArray]"
"""A record batch with the columns `ister.format.arrow.schema.EVERY_FIELD` → a boolean array: which
of its rows the new object keeps."""


class MergeSettings(Protocol):
    """Settings of a merge; `ister.bucket.upload.UploadSettings` has them too."""

    @property
    def chunk_bytes(self) -> int:
        """How much is read at once, and the size of a part that is written."""
        ...

    @property
    def concurrent_parts(self) -> int:
        """How many parts are on their way at once."""
        ...

    @property
    def index_every_messages(self) -> int:
        """How far apart the index entries of frames are."""
        ...

    @property
    def layout(self) -> Layout:
        """Where an object of frames goes."""
        ...


def merge_objects(
    topic: TopicName,
    objects: Sequence[ObjectDescriptor],
    *,
    store: ObjectStore,
    settings: MergeSettings,
    format: str,
    epoch: int,
    incarnation: str,
    tag: str,
    created_at: int,
    survives: Survives | None = None,
    zstd_level: int = 3,
    row_group_bytes: int | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ObjectDescriptor:
    """Writes one object with the messages of several; does not commit it.

    `objects`: their descriptors, ascending, each beginning where the one before it ends.
    `tag`: eight random hexadecimal digits, new for every call.
    `survives`: which messages to keep; all of them by default. Is given every record batch once, in
    the order of offsets.
    `row_group_bytes`: about the size of a row group before compression; by default what suits the
    size of the whole.
    Returns the new object's descriptor. It is complete in the store, under its final name.

    Raises:
        InvalidRequestError: The objects do not follow each other or differ in their codec, or
            messages are to be left out of an object of frames.
        CorruptDataError: An input is damaged; names object, position and offset.
    """
    _check_inputs(topic, objects, format, survives)
    start, end = objects[0].start, objects[-1].end
    object_id = format_object_id(start, end, epoch, format=format, tag=tag, layout=settings.layout)
    merge = _Merge(topic, objects, store, settings, zstd_level, row_group_bytes, is_stopping)

    def write(writer: Writer) -> Callable[..., ObjectDescriptor]:
        with ThreadPoolExecutor(1, thread_name_prefix="ister-merge") as ahead:
            if format == FORMAT_PARQUET:
                return merge.write_archive(writer, ahead, survives)
            return merge.write_frames(writer, ahead)

    described = write_object(
        topic,
        object_id,
        write,
        store=store,
        settings=settings,
        epoch=epoch,
        incarnation=incarnation,
        created_at=created_at,
    )
    failpoints.reach("compact.after_object")
    return replace(described, arrival_time_max=find_newest_arrival(objects))


def write_object(
    topic: TopicName,
    object_id: str,
    write: Callable[[Writer], Callable[..., ObjectDescriptor]],
    *,
    store: ObjectStore,
    settings: MergeSettings,
    epoch: int,
    incarnation: str,
    created_at: int,
) -> ObjectDescriptor:
    """Writes an object that takes the place of others, and reads it back; does not commit it.

    `write` writes it, and returns what describes it.

    Raises:
        CorruptDataError: The store returns other bytes than it was given.
    """
    key = object_key(topic, object_id)
    writer = store.open_writer(
        key, chunk_bytes=settings.chunk_bytes, concurrent_parts=settings.concurrent_parts
    )
    try:
        describe = write(writer)
        described = describe(
            object_id, epoch=epoch, incarnation=incarnation, created_at=created_at, etag=None
        )
        complete_object(writer, store, key, described, chunk_bytes=settings.chunk_bytes)
    finally:
        # After a close that succeeded this does nothing.
        writer.abort()
    # Those that it replaces go some day, and then this is the only copy: nothing that was only
    # written is taken for one.
    verify_content(store, key, described, chunk_bytes=settings.chunk_bytes)
    return replace(described, etag=verify_size(store, key, described.size_bytes))


def find_newest_arrival(objects: Sequence[ObjectDescriptor]) -> int | None:
    """The latest possible arrival time of the messages of objects; None if one's is unknown.

    An object that replaces others has this one: replacing them must not postpone retention.
    """
    arrived = [one.arrived_ms for one in objects]
    newest = max((ms for ms in arrived if ms is not None), default=None)
    return None if None in arrived else newest


def read_frames(
    topic: TopicName,
    described: ObjectDescriptor,
    codec: Codec,
    *,
    store: ObjectStore,
    chunk_bytes: int,
) -> Iterator[FrameBatch]:
    """The frames of an object of frames, each checked, and its checksum at the end."""
    carry, at, position = b"", described.start, 0
    for chunk in _read_chunks(topic, described, store=store, chunk_bytes=chunk_bytes):
        data = carry + chunk if carry else chunk
        scan = scan_frames(data, expected_offset=at, end_offset=described.end)
        if scan.starts:
            frames = FrameBatch(data, scan.starts, scan.end, at, codec)
            yield frames
            at = frames.next_offset
            position += scan.end
        carry = data[scan.end :]
        if isinstance(scan.stop, Corrupt):
            reason = f"{scan.stop.reason} ({scan.stop.detail})"
            raise _damage(topic, described, reason, at, position)
    if at != described.end or carry:
        raise _damage(topic, described, "the object ends before its frames do", at, position)


def _read_chunks(
    topic: TopicName, described: ObjectDescriptor, *, store: ObjectStore, chunk_bytes: int
) -> Iterator[bytes]:
    """The bytes of an object; its size and checksum are compared at the end."""
    key = object_key(topic, described.object_id)
    crc = position = 0
    while position < described.size_bytes:
        size = min(chunk_bytes, described.size_bytes - position)
        chunk = store.read(key, position, size)
        if len(chunk) != size:
            raise _damage(topic, described, "the object is too short", None, position)
        crc = crc32(chunk, crc)
        position += size
        yield chunk
    if described.checksum not in (None, format_checksum(crc)):
        raise _damage(
            topic,
            described,
            f"its checksum is {format_checksum(crc)}, not {described.checksum}",
            described.start,
            None,
        )


def _damage(
    topic: TopicName,
    described: ObjectDescriptor,
    reason: str,
    offset: int | None,
    position: int | None,
) -> CorruptDataError:
    return CorruptDataError(
        f"damaged object: {reason}",
        topic=str(topic),
        path=object_key(topic, described.object_id),
        offset=offset,
        position=position,
        hint="`ister repair` restores it where the local files still have the range",
    )


def _check_inputs(
    topic: TopicName, objects: Sequence[ObjectDescriptor], kind: str, survives: Survives | None
) -> None:
    check(kind in (FORMAT_FRAMES, FORMAT_PARQUET), f"an object of the format {kind!r}")
    if not objects:
        raise InvalidRequestError("no objects to merge", topic=str(topic))
    for before, after in pairwise(objects):
        if before.end != after.start:
            raise InvalidRequestError(
                f"{after.object_id} does not begin where {before.object_id} ends",
                topic=str(topic),
                offset=before.end,
            )
    codecs = {described.codec for described in objects if described.codec is not None}
    if len(codecs) > 1:
        raise InvalidRequestError(
            f"objects of different codecs cannot be merged: {', '.join(sorted(codecs))}",
            topic=str(topic),
        )
    if kind == FORMAT_FRAMES:
        if survives is not None:
            raise InvalidRequestError(
                "--keep latest-per-key needs --format parquet", topic=str(topic)
            )
        if any(described.kept for described in objects):
            raise InvalidRequestError(
                "an object that some messages were left out of cannot become one of frames",
                topic=str(topic),
                hint="merge it with --format parquet",
            )


class Writer(Protocol):
    """Takes the bytes of an object."""

    def write(self, data: Buffer, /) -> object:
        """Takes the next bytes."""
        ...


class _Merge:
    """A merge in progress."""

    def __init__(  # noqa: PLR0917
        self,
        topic: TopicName,
        objects: Sequence[ObjectDescriptor],
        store: ObjectStore,
        settings: MergeSettings,
        zstd_level: int,
        row_group_bytes: int | None,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._topic = topic
        self._objects = objects
        self._store = store
        self._settings = settings
        self._zstd_level = zstd_level
        self._row_group_bytes = row_group_bytes
        self._is_stopping = is_stopping
        self._codec = next((item.codec for item in objects if item.codec is not None), None)

    def write_frames(self, writer: Writer, ahead: Executor) -> Callable[..., ObjectDescriptor]:
        """Copies all frames; returns what describes the object."""
        every = self._settings.index_every_messages
        summary = ObjectSummary(self._objects[0].start, index_every_messages=every)
        for frames in _ahead(self._all_frames(), ahead):
            self._check_stopping()
            writer.write(summary.add(frames))
            failpoints.reach("compact.after_part")
        return summary.describe

    def write_archive(
        self, writer: Writer, ahead: Executor, survives: Survives | None
    ) -> Callable[..., ObjectDescriptor]:
        """Writes all messages that survive as Parquet; returns what describes the object."""
        load_archives()  # or says which extra is missing
        from ister.format import archive_writer as archive  # noqa: PLC0415 - needs pyarrow, an extra

        total = sum(described.size_bytes for described in self._objects)
        # Few enough for the index of a descriptor.
        even = total * 5 // 4 // OBJECT_INDEX_ENTRIES_MAX
        output = archive.ArchiveWriter(
            writer,
            topic=str(self._topic),
            codec=self._known_codec(),
            zstd_level=self._zstd_level,
            row_group_bytes=self._row_group_bytes
            or min(max(archive.ROW_GROUP_BYTES, even), _ROW_GROUP_BYTES_MAX),
            on_row_group=lambda: failpoints.reach("compact.after_part"),
        )
        for batch in _ahead(self._all_batches(), ahead):
            self._check_stopping()
            output.write(batch if survives is None else batch.filter(survives(batch)))
        kept = {described.kept for described in self._objects if described.kept}
        if survives is not None:
            kept.add(KEPT_LATEST)
        written = output.finish(
            start=self._objects[0].start,
            end=self._objects[-1].end,
            kept=KEPT_LATEST if KEPT_LATEST in kept else next(iter(kept), ""),
        )
        describe: Callable[..., ObjectDescriptor] = written.describe
        return describe

    # -- inputs -----------------------------------------------------------------------------

    def _all_frames(self) -> Iterator[FrameBatch]:
        for described in self._objects:
            if described.format != FORMAT_PARQUET:
                yield from self._frames_of(described)
            else:
                yield from self._restored_frames_of(described)

    def _all_batches(self) -> Iterator[pa.RecordBatch]:
        for described in self._objects:
            if described.format != FORMAT_PARQUET:
                yield from self._decoded_frames_of(described)
            else:
                reader = self._open_archive(described)
                for number in range(len(reader.row_groups)):
                    yield reader.read(number).batch

    def _frames_of(self, described: ObjectDescriptor) -> Iterator[FrameBatch]:
        """The frames of an object, checked."""
        return read_frames(
            self._topic,
            described,
            self._known_codec(),
            store=self._store,
            chunk_bytes=self._settings.chunk_bytes,
        )

    def _decoded_frames_of(self, described: ObjectDescriptor) -> Iterator[pa.RecordBatch]:
        """The messages of an object of frames, as rows with every field."""
        from ister.format.arrow.decode import ColumnarDecoder, FrameFeed  # noqa: PLC0415 - needs pyarrow, an extra
        from ister.format.arrow.schema import EVERY_FIELD  # noqa: PLC0415 - needs pyarrow, an extra

        decoder = ColumnarDecoder(str(self._topic), self._known_codec(), EVERY_FIELD)
        feed = FrameFeed(decoder, expected_offset=described.start, end_offset=described.end)
        try:
            for chunk in self._chunks(described):
                yield from feed.feed(chunk)
                if feed.corrupt is not None:
                    reason = f"{feed.corrupt.reason} ({feed.corrupt.detail})"
                    raise _damage(self._topic, described, reason, feed.next_offset, None)
        except CorruptDataError as error:
            if error.path is None:
                error.path = object_key(self._topic, described.object_id)
            raise
        if not feed.is_done:
            raise _damage(
                self._topic,
                described,
                "the object ends before its frames do",
                feed.next_offset,
                None,
            )

    def _restored_frames_of(self, described: ObjectDescriptor) -> Iterator[FrameBatch]:
        """The frames that the rows of an archive were."""
        reader = self._open_archive(described)
        for number, group in enumerate(reader.row_groups):
            frames = reader.restore(number)
            yield FrameBatch(
                frames.data, frames.starts, len(frames.data), group.first_offset, reader.codec
            )

    def _open_archive(self, described: ObjectDescriptor) -> ArchiveReader:
        key = object_key(self._topic, described.object_id)
        return open_archive(
            lambda position, size: self._store.read(key, position, size),
            described,
            path=key,
            topic=str(self._topic),
        )

    def _chunks(self, described: ObjectDescriptor) -> Iterator[bytes]:
        return _read_chunks(
            self._topic, described, store=self._store, chunk_bytes=self._settings.chunk_bytes
        )

    def _known_codec(self) -> Codec:
        """The codec of all inputs, from a descriptor or else from the first frame."""
        if self._codec is None:
            first = self._objects[0]
            key = object_key(self._topic, first.object_id)
            size = 16 + FRAME_BODY_BYTES_MAX
            frame = decode_frame(self._store.read(key, 0, min(size, first.size_bytes)))
            if not isinstance(frame, Frame):
                raise _damage(self._topic, first, "its first frame is damaged", first.start, 0)
            self._codec = recognise(frame.body, offset=first.start) or Codec.BINCODE2
        return self._codec

    def _check_stopping(self) -> None:
        if self._is_stopping():
            raise ClosedError("the merge was stopped", topic=str(self._topic))


def _ahead(items: Iterator[_Item], executor: Executor) -> Iterator[_Item]:
    """The items, each made on the executor while the caller is busy with the one before it."""
    coming: Future[_Item | None] = executor.submit(next, items, None)
    try:
        while (item := coming.result()) is not None:
            coming = executor.submit(next, items, None)
            yield item
    finally:
        coming.cancel()
        with suppress(Exception):
            coming.result()
