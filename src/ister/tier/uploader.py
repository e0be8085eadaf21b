"""The upload cycle: synced frames become one object after the other, each committed.

    plan [tiered, synced) ─► session ─► stream ─► complete ─► check ─► commit ─► checkpoint

Owns: the steps and their order. Does not own: when a cycle runs (`ister.topic`, or a Spark job),
where frames come from (`FrameSource`), who may commit (`OwnedTopic`).

The range is planned before its first byte is sent, so an object has its final name at once.
Planning begins where the last descriptor ends, whatever a checkpoint says, and stops at `synced`:
bytes that a crash could take back are never uploaded. Frames are checked one by one on their way.

Memory: a chunk of frames, its copy for the store, and the store's parts in flight; whatever the
backlog is.

Commit point: the transaction in `OwnedTopic.commit`. What a crash leaves before it: an object, or
parts of one, that no descriptor names. The next cycle plans from the same offset; garbage
collection takes what is left over. After it: a checkpoint that lags, which costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ister import failpoints
from ister.clock import Clock
from ister.errors import (
    ClosedError,
    CorruptDataError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.descriptor import ObjectDescriptor
from ister.format.frame import FrameBatch
from ister.format.records import UploadSession
from ister.metrics import Metrics
from ister.objectstore.base import ObjectStore
from ister.tier.names import format_object_id, format_pending_id, object_key
from ister.tier.ownership import OwnedTopic
from ister.tier.summary import ObjectSummary
from ister.tier.verify import verify_content, verify_size

__all__ = ["FrameSource", "UploadSettings", "Uploader"]

_log = logging.getLogger("ister.tier.uploader")


class FrameSource(Protocol):
    """Where an upload's frames come from. Used by one thread at a time."""

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """Where a range from `start` on has to end to stay within the limits of an object."""
        ...

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """Checked frames from `start` on, at least one, none at or after `end`."""
        ...

    def close(self) -> None:
        """Lets go of files. May be called twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSettings:
    """What an uploader is told."""

    copies: bool
    """Write under a pending name and copy, for stores that show objects under way."""
    chunk_bytes: int
    concurrent_parts: int
    index_every_messages: int
    object_bytes_max: int
    object_span_ms_max: int

    @property
    def read_bytes(self) -> int:
        """How much is read from the source at once: with its copy it takes up one part."""
        return max(self.chunk_bytes // 2, 64 * 1024)


class Uploader:
    """Uploads one topic. Used by one thread at a time."""

    def __init__(
        self,
        owned: OwnedTopic,
        store: ObjectStore,
        *,
        settings: UploadSettings,
        clock: Clock,
        metrics: Metrics,
        on_memory: Callable[[int], None] = lambda change: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._owned = owned
        self._store = store
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._on_memory = on_memory
        self._is_stopping = is_stopping
        self._name = owned.catalog.keys.topic

    def upload(self, source: FrameSource, start: int, synced: int) -> ObjectDescriptor | None:
        """Uploads and commits the next object.

        Args:
            source: The topic's frames.
            start: Where the newest object ends; where the topic begins if there is none.
            synced: Nothing at or after this offset is uploaded.

        Returns:
            Its descriptor; None if there is nothing to upload.

        Raises:
            FencedError: Somebody else owns the topic; nothing was published.
            CorruptDataError: The next frame is damaged.
            UnavailableError: A store does not answer; the next cycle goes on from here.
            PermissionDeniedError: A store refuses.
            ClosedError: The topic is being closed; nothing was published.
        """
        if start >= synced:
            return None
        settings = self._settings
        try:
            end = source.plan(
                start,
                synced,
                bytes_max=settings.object_bytes_max,
                span_ms_max=settings.object_span_ms_max,
            )
            descriptor = self._make_object(source, start, end)
        except CorruptDataError as error:
            if error.offset is None or not start < error.offset < synced:
                raise
            # What lies before the damage is whole, and all the more worth a second copy.
            end = source.plan(
                start,
                error.offset,
                bytes_max=settings.object_bytes_max,
                span_ms_max=settings.object_span_ms_max,
            )
            descriptor = self._make_object(source, start, end)
        self._owned.commit(descriptor)
        self._metrics.count("uploader.objects_created_total")
        self._metrics.count("uploader.bytes_uploaded_total", descriptor.size_bytes)
        _log.info(
            "uploaded",
            extra={
                "topic": self._owned.topic,
                "object": descriptor.object_id,
                "bytes": descriptor.size_bytes,
                "offset": descriptor.start,
            },
        )
        return descriptor

    def upload_again(
        self, source: FrameSource, old: ObjectDescriptor, revision: int
    ) -> ObjectDescriptor | None:
        """Uploads the offsets of an object that was lost or damaged, in its place.

        Args:
            source: The topic's frames; has all of the object's.
            old: The object's descriptor.
            revision: Of the descriptor's key.

        Returns:
            The new descriptor; None if the old one has been replaced meanwhile.

        Raises:
            As `upload`.
        """
        descriptor = self._make_object(source, old.start, old.end)
        if not self._owned.replace(old, descriptor, revision):
            return None
        failpoints.reach("tier.after_replace")
        self._metrics.count("uploader.objects_repaired_total")
        _log.warning(
            "uploaded again", extra={"topic": self._owned.topic, "object": descriptor.object_id}
        )
        return descriptor

    def fill(self, source: FrameSource, start: int, end: int) -> list[ObjectDescriptor]:
        """Uploads offsets that no object has, between two others.

        Raises:
            As `upload`.
        """
        settings = self._settings
        filled: list[ObjectDescriptor] = []
        while start < end:
            upto = source.plan(
                start,
                end,
                bytes_max=settings.object_bytes_max,
                span_ms_max=settings.object_span_ms_max,
            )
            descriptor = self._make_object(source, start, upto)
            self._owned.insert(descriptor)
            self._metrics.count("uploader.objects_repaired_total")
            filled.append(descriptor)
            start = upto
        return filled

    # -- one object -------------------------------------------------------------------------

    def _make_object(self, source: FrameSource, start: int, end: int) -> ObjectDescriptor:
        """Streams a range into an object that is complete and checked, and not yet committed."""
        owned = self._owned
        object_id = format_object_id(start, end, owned.epoch)
        owned.begin(
            UploadSession(
                object_id=object_id,
                start=start,
                end=end,
                epoch=owned.epoch,
                started_at=self._clock.now_ns() // 1_000_000_000,
            )
        )
        key = object_key(self._name, object_id)
        if self._settings.copies:
            pending = object_key(self._name, format_pending_id(start, owned.epoch))
            summary = self._stream(source, pending, start, end)
            self._copy(pending, key, summary)
        else:
            summary = self._stream(source, key, start, end)
        etag = verify_size(self._store, key, summary.size_bytes)
        failpoints.reach("tier.after_complete")
        return self._describe(summary, object_id, etag)

    def _describe(
        self, summary: ObjectSummary, object_id: str, etag: str | None
    ) -> ObjectDescriptor:
        return summary.describe(
            object_id,
            epoch=self._owned.epoch,
            incarnation=self._owned.record.incarnation,
            created_at=self._clock.now_ns() // 1_000_000_000,
            etag=etag,
        )

    def _stream(self, source: FrameSource, key: str, start: int, end: int) -> ObjectSummary:
        settings = self._settings
        summary = ObjectSummary(start, index_every_messages=settings.index_every_messages)
        held = settings.chunk_bytes * (settings.concurrent_parts + 2)
        writer = self._store.open_writer(
            key, chunk_bytes=settings.chunk_bytes, concurrent_parts=settings.concurrent_parts
        )
        self._on_memory(held)
        try:
            while summary.end < end:
                if self._is_stopping():
                    raise ClosedError("the topic is being closed", topic=self._owned.topic)
                batch = source.fetch(summary.end, end, bytes_max=settings.read_bytes)
                data = summary.add(batch)
                writer.write(data)
                self._metrics.observe("uploader.stream_chunk_bytes", len(data))
                failpoints.reach("tier.after_part")
            failpoints.reach("tier.before_complete")
            self._complete(writer.close, key, summary)
        finally:
            # After a close that succeeded this does nothing.
            writer.abort()
            self._on_memory(-held)
        return summary

    def _complete(self, complete: Callable[[], None], key: str, summary: ObjectSummary) -> None:
        """Completes an object; where the answer is lost, looks whether it is there."""
        try:
            complete()
        except UnavailableError:
            probe = self._describe(summary, "unknown", None)
            try:
                verify_content(self._store, key, probe, chunk_bytes=self._settings.read_bytes)
            except (NotFoundError, CorruptDataError):
                pass
            else:
                return
            raise

    # -- finalize: copy ---------------------------------------------------------------------

    def _copy(self, pending: str, key: str, summary: ObjectSummary) -> None:
        verify_size(self._store, pending, summary.size_bytes)
        try:
            self._store.copy(pending, key)
        except UnsupportedOperationError:
            self._copy_by_hand(pending, key, summary)
        failpoints.reach("tier.after_copy")
        try:
            self._store.delete(pending)
        except IsterError as error:
            # Garbage collection finds it; the object itself is in place.
            _log.warning("pending object not removed", extra={"error": str(error)})
        failpoints.reach("tier.after_delete_pending")

    def _copy_by_hand(self, pending: str, key: str, summary: ObjectSummary) -> None:
        settings = self._settings
        writer = self._store.open_writer(
            key, chunk_bytes=settings.chunk_bytes, concurrent_parts=settings.concurrent_parts
        )
        try:
            position = 0
            while position < summary.size_bytes:
                chunk = self._store.read(pending, position, settings.read_bytes)
                if not chunk:
                    raise CorruptDataError("the pending object is too short", path=pending)
                writer.write(chunk)
                position += len(chunk)
            self._complete(writer.close, key, summary)
        finally:
            writer.abort()
