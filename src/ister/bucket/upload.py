"""The upload cycle: synced frames become one object after the other, each committed.

    plan [tiered, synced) ─► session ─► stream ─► complete ─► check ─► commit ─► checkpoint

Owns: the steps and their order, for an owner that does them all by itself. Does not own: when a
cycle runs (`ister.topic`), where frames come from (`FrameSource`), how an object is made
(`object_maker`), who may commit (`OwnedTopic`).

The range is planned before its first byte is sent, so an object has its final name at once.
Planning begins where the last descriptor ends, whatever a checkpoint says, and stops at `synced`:
bytes that a crash could take back are never uploaded. Frames are checked one by one on their way.

Memory: a chunk of frames, its copy for the store, and the store's parts in flight; whatever the
backlog is.

Commit point: the transaction in `OwnedTopic.commit`. What a crash leaves before it: an object, or
parts of one, that no descriptor names. The next cycle plans from the same offset; garbage
collection removes what is left over. After it: a checkpoint that lags, which costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.tracing import span
from ister.bucket.egress import EgressLimit
from ister.bucket.names import format_object_id
from ister.bucket.object_maker import FrameSource, ObjectMaker, UploadSettings
from ister.bucket.ownership import OwnedTopic
from ister.errors import CorruptDataError, IsterError
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import UploadSession
from ister.objectstore.base import ObjectStore

__all__ = ["FrameSource", "UploadSettings", "Uploader"]

_log = logging.getLogger("ister.bucket.upload")


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
        correct_ms: Callable[[int], int] = lambda time_ms: time_ms,
        on_memory: Callable[[int], None] = lambda change: None,
        on_parts: Callable[[int], None] = lambda change: None,
        is_stopping: Callable[[], bool] = lambda: False,
        egress: EgressLimit | None = None,
    ) -> None:
        """An uploader for one owned topic.

        `correct_ms`: corrects times that this node recorded while its clock was wrong.
        `egress`: limits the upload rate; None for no limit.
        `on_memory`: called with each change of the memory in use, in bytes.
        `on_parts`: called with each change of the number of parts in flight.
        `is_stopping`: called between chunks; the upload is aborted if it returns True.
        """
        self._owned = owned
        self._correct_ms = correct_ms
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        # Where the last upload that was not committed began.
        self._unfinished: int | None = None
        self._has_asked = False
        self._maker = ObjectMaker(
            owned.catalog.keys.topic,
            store,
            settings=settings,
            clock=clock,
            metrics=metrics,
            on_memory=on_memory,
            on_parts=on_parts,
            is_stopping=is_stopping,
            egress=egress,
        )

    def upload(self, source: FrameSource, start: int, synced: int) -> ObjectDescriptor | None:
        """Uploads and commits the next object.

        `start`: where the newest object ends; where the topic begins if there is none.
        Returns its descriptor; None if there is nothing to upload.

        Raises:
            FencedError: Another process owns the topic; nothing was published.
            CorruptDataError: The next frame is damaged.
            UnavailableError: A store does not answer; the next cycle continues from here.
            ClosedError: The topic is being closed; nothing was published.
        """
        if start >= synced:
            return None
        with span("upload", topic=self._owned.topic, offset=start):
            return self._upload(source, start, synced)

    def _upload(self, source: FrameSource, start: int, synced: int) -> ObjectDescriptor:
        began = self._clock.monotonic()
        if self._is_resumed(start):
            self._metrics.count("session.resume_events")
        self._unfinished = start
        try:
            descriptor = self._make_object(source, start, self._plan(source, start, synced))
        except CorruptDataError as error:
            if error.offset is None or not start < error.offset < synced:
                raise
            # What precedes the damage is whole, and needs a second copy all the more.
            descriptor = self._make_object(source, start, self._plan(source, start, error.offset))
        self._owned.commit(descriptor)
        self._unfinished = None
        elapsed_ms = (self._clock.monotonic() - began) * 1000
        self._metrics.observe("uploader.object_latency_ms", elapsed_ms)
        self._metrics.observe("upload.batch_bytes", descriptor.size_bytes)
        self._metrics.count("uploader.objects_created_total")
        self._metrics.count("uploader.bytes_uploaded_total", descriptor.size_bytes)
        _log.info(
            "uploaded",
            extra={
                "topic": self._owned.topic,
                "object": descriptor.object_id,
                "bytes": descriptor.size_bytes,
                "offset": descriptor.start,
                "chunks": self._maker.chunks,
                "duration_ms": round(elapsed_ms, 1),
            },
        )
        return descriptor

    def _is_resumed(self, start: int) -> bool:
        """Whether an upload that was not finished, perhaps by an earlier owner, began there."""
        if not self._has_asked:
            self._has_asked = True
            with suppress(IsterError):  # it is only counted
                session = self._owned.session()
                self._unfinished = session.start if session is not None else None
        return self._unfinished == start

    def upload_again(
        self, source: FrameSource, old: ObjectDescriptor, revision: int
    ) -> ObjectDescriptor | None:
        """Uploads the offsets of an object that was lost or damaged, in its place.

        `source`: the topic's frames; has all of the object's.
        Returns the new descriptor; None if the old one has been replaced meanwhile.
        """
        descriptor = self._make_object(source, old.start, old.end, arrived_ms=old.arrived_ms)
        if not self._owned.replace(old, descriptor, revision):
            return None
        failpoints.reach("tier.after_replace")
        self._metrics.count("uploader.objects_repaired_total")
        _log.warning(
            "uploaded again", extra={"topic": self._owned.topic, "object": descriptor.object_id}
        )
        return descriptor

    def fill(self, source: FrameSource, start: int, end: int) -> list[ObjectDescriptor]:
        """Uploads offsets that no object has, between two others."""
        filled: list[ObjectDescriptor] = []
        while start < end:
            descriptor = self._make_object(source, start, self._plan(source, start, end))
            self._owned.insert(descriptor)
            self._metrics.count("uploader.objects_repaired_total")
            filled.append(descriptor)
            start = descriptor.end
        return filled

    def _plan(self, source: FrameSource, start: int, end: int) -> int:
        """The end of the next object, at most `end`."""
        return source.plan(
            start,
            end,
            bytes_max=self._settings.object_bytes_max,
            span_ms_max=self._settings.object_span_ms_max,
        )

    def _make_object(
        self, source: FrameSource, start: int, end: int, *, arrived_ms: int | None = None
    ) -> ObjectDescriptor:
        """Records the upload session, and makes and checks an object; does not commit it."""
        owned = self._owned
        owned.begin(
            UploadSession(
                object_id=format_object_id(start, end, owned.epoch, layout=self._settings.layout),
                start=start,
                end=end,
                epoch=owned.epoch,
                started_at=self._clock.now_ns() // 1_000_000_000,
            )
        )
        if arrived_ms is None and (known_ms := source.arrived_ms(start, end)) is not None:
            arrived_ms = self._correct_ms(known_ms)
        try:
            return self._maker.make(
                source,
                start,
                end,
                epoch=owned.epoch,
                incarnation=owned.record.incarnation,
                arrived_ms=arrived_ms,
            )
        except BaseException:
            self._metrics.count("session.abort_events")
            raise
