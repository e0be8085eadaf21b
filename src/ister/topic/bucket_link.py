"""A topic's link to the bucket: whether this process owns it, and whether the bucket has a range.

    TopicBucket ── uploads (`uploads`)      synced messages become objects
                └─ retention (`retention`)  what is in the bucket need not stay here

Owns: the claim's effect on the log, checks and repairs of objects. Does not own: threads
(`background`), the local files (`ister.wal`), the bucket's rules (`ister.bucket`).

A process whose lease is not certainly valid acknowledges nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ister.bucket.check import verify_content, verify_size
from ister.bucket.fence import MemberFence
from ister.bucket.history_reader import HistoryReader
from ister.bucket.names import object_key
from ister.bucket.ownership import OwnedTopic
from ister.config import Verify
from ister.errors import (
    ClosedError,
    CorruptDataError,
    DataGapError,
    FencedError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.descriptor import ObjectDescriptor
from ister.topic.retention import ActiveFloor, Retention, no_floor
from ister.topic.stores import Stores
from ister.topic.uploads import TopicUploads, fenced_error
from ister.wal.log import Wal

_log = logging.getLogger("ister.topic.bucket_link")

# Number of objects that are checked when a topic is opened.
_RECENT_OBJECTS: Final = 4


@dataclass(slots=True)
class RepairedObjects:
    """What a repair of a topic's objects has done."""

    objects: list[str] = field(default_factory=list)
    """Uploaded again, or for the first time."""
    errors: list[IsterError] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    """Offsets that the bucket does not have."""


class TopicBucket:
    """The bucket side of one topic. Thread-safe."""

    def __init__(
        self,
        *,
        wal: Wal,
        owned: OwnedTopic,
        stores: Stores,
        backlog_bytes: int = 0,
        floor: ActiveFloor = no_floor,
        settle_batches: Callable[[], None] = lambda: None,
        fence: MemberFence | None = None,
    ) -> None:
        """Takes over a topic that was claimed and whose log was recovered.

        `backlog_bytes`: about how much of the local files is not tiered yet.
        `floor`: returns the lowest cursor of the subscriptions that the broker knows.
        `fence`: lets this process move the cursors of a topic that another one owns: then nothing
        is uploaded or removed here.
        """
        self._wal = wal
        self.owned = owned
        self._stores = stores
        self._fence = fence
        self.on_fenced: Callable[[], None] = lambda: None
        """Called, in any thread, when another node owns the topic by now; set by the broker."""
        self.uploads = TopicUploads(
            wal=wal, owned=owned, stores=stores, backlog_bytes=backlog_bytes
        )
        self.retention = Retention(
            wal=wal,
            uploads=self.uploads,
            stores=stores,
            floor=floor,
            settle=settle_batches,
            check_owner=self.check_owner,
            assure=self.assure,
        )
        owned.on_fenced = self._on_fenced
        owned.on_regained = self._on_regained
        if fence is not None:
            self.uploads.stop()

    # -- what it is -------------------------------------------------------------------------

    @property
    def earliest(self) -> int:
        """The first offset that any tier holds."""
        first = self.owned.first
        trimmed = self._wal.trimmed
        return trimmed if first is None else min(first.start, trimmed)

    @property
    def is_diskless(self) -> bool:
        """Whether the local files are in memory."""
        return self._stores.is_diskless

    def history(self) -> HistoryReader:
        """A reader of the topic's objects."""
        return self._stores.reader(self.owned.catalog)

    # -- the owner --------------------------------------------------------------------------

    def check_owner(self) -> None:
        """Checks that this process may acknowledge messages now.

        Raises:
            UnavailableError: The lease may have expired; the metadata store has not answered.
        """
        # In this order: a renewal in between notices a new owner before it makes the lease valid
        # again.
        fence = self._fence
        is_leased = self.owned.is_leased if fence is None else fence.is_valid
        if self.owned.is_fenced:
            raise fenced_error(self.owned.topic)
        if not is_leased:
            raise self.lapsed_error()

    def lapsed_error(self) -> UnavailableError:
        """The error of waiters while it is uncertain that this process owns the topic."""
        return self._lapsed("whether the message counts is unknown until the store answers")

    def refused_error(self) -> FencedError | UnavailableError:
        """The error of appends without a valid lease; `FencedError` if the topic was lost."""
        if self.owned.is_fenced:
            return fenced_error(self.owned.topic)
        return self._lapsed("nothing was accepted; appends resume when the store answers")

    def _lapsed(self, hint: str) -> UnavailableError:
        return UnavailableError(
            "the metadata store has not answered in time, so the topic may have another owner",
            topic=self.owned.topic,
            hint=hint,
        )

    def _on_fenced(self, error: FencedError) -> None:
        self._wal.gate.hold("fenced", lambda: fenced_error(self.owned.topic), waits=False)
        self._wal.levels.end_tiering(error)
        self.on_fenced()

    def _on_regained(self) -> None:
        self._wal.gate.unhold("lease")

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Stops, and keeps everything that changes objects out while the topic is deleted."""
        self.uploads.stop()
        # A run of it may be on its way, and fail, while this process has the topic open again.
        self.on_fenced = lambda: None
        with self.retention.lock, self.uploads.lock:
            yield

    # -- whether the bucket has a range -----------------------------------------------------

    def recent_start(self, start: int, end: int, *, objects: int, seconds: int) -> int:
        """The first offset of the newest objects in a range: `objects` of them, or more if young.

        `start`: the range's first offset; the result is not below it.
        `objects`: how many objects are wanted at least.
        `seconds`: an object counts if it is at most this much older than the newest.
        """
        width = objects
        while True:
            begin = max(start, end - width)
            found = [described for described, _ in self.owned.catalog.descriptors(begin, end)]
            if not found:
                return begin
            oldest = found[-1].created_at - seconds
            young = next(at for at, one in enumerate(found) if one.created_at >= oldest)
            first = min(young, max(0, len(found) - objects))
            if first > 0 or begin == start:
                return max(start, found[first].start)
            width *= 4

    def prepare_seal(self) -> set[tuple[str, int]]:
        """Uploads and checks what `Log.seal` needs while appends continue, to make that shorter.

        Returns the checked objects, for `Log.seal`.
        """
        assured = set[tuple[str, int]]()
        self.uploads.upload()
        self.assure_local(self._wal.tiered or 0, assured)
        return assured

    def assure_local(self, end: int, assured: set[tuple[str, int]] | None = None) -> None:
        """Makes sure that the bucket holds, whole, all messages in local files below `end`.

        Objects in `assured` were checked a moment ago; those checked now are added to it.

        Raises:
            IsterError: It does not, and could not be made to.
        """
        with self.retention.lock:
            self.check_owner()
            self.assure(self._wal.trimmed, end, assured)

    def assure(self, start: int, end: int, assured: set[tuple[str, int]] | None = None) -> None:
        """Makes sure that the bucket holds a range, whole and readable, and repairs it if not.

        `assured`: objects that were already checked; extended by those checked now.

        Raises:
            DataGapError: The catalog has a hole there.
            IsterError: An object is bad and could not be uploaded again.
        """
        if self._stores.is_diskless:
            # A committed descriptor is enough: everything acknowledged is in the bucket, too.
            return
        content = self._stores.storage.wal.retention.verify is Verify.CONTENT
        assured = set() if assured is None else assured
        # Objects may be merged while they are read: what has replaced them is checked, too.
        while self._assure_new(start, end, assured, content=content):
            pass

    def _assure_new(
        self, start: int, end: int, assured: set[tuple[str, int]], *, content: bool
    ) -> bool:
        """Checks the objects of a range that are not in `assured`; whether there are any."""
        has_new = False
        # What has expired in the bucket is not needed any more. But an expiry is recorded before
        # its objects leave the catalog, and if it is interrupted, those are still read.
        floor = self.owned.record.expired_before
        at = start
        for described, revision in self.owned.catalog.descriptors(start, end):
            if described.start > max(at, floor):
                break
            if (described.object_id, revision) not in assured:
                self._assure_object(described, revision, content=content)
                assured.add((described.object_id, revision))
                has_new = True
            at = described.end
        at = max(at, floor)
        if at < end:
            raise DataGapError(
                "no object holds the offset", start=at, end=end, topic=self.owned.topic
            )
        return has_new

    def _assure_object(self, described: ObjectDescriptor, revision: int, *, content: bool) -> bool:
        """Checks an object, and uploads it again if it is bad; returns whether it was."""
        key = object_key(self.owned.catalog.keys.topic, described.object_id)
        chunk_bytes = self._stores.storage.cloud_reader.fetch_chunk_size
        try:
            if content:
                verify_content(self._stores.objects, key, described, chunk_bytes=chunk_bytes)
            else:
                verify_size(self._stores.objects, key, described.size_bytes)
        except (NotFoundError, CorruptDataError) as error:
            if self.uploads.is_stopping:
                raise ClosedError("the topic is being closed or deleted") from error
            if described.start < self._wal.trimmed or described.kept:
                # Local files may have messages that compaction removed: they would come back.
                raise
            _log.error(
                "an object is lost or damaged; uploading it again from the local files",
                extra={"topic": self.owned.topic, "error": str(error)},
            )
            self._upload_again(described, revision)
            return True
        return False

    def _upload_again(self, described: ObjectDescriptor, revision: int) -> None:
        with self.uploads.lock:
            source = self.uploads.open_files()
            try:
                self.uploads.uploader.upload_again(source, described, revision)
            finally:
                source.close()

    def check_recent(self) -> list[str]:
        """Checks that the newest objects exist whose offsets are still in local files.

        Only a few: retention checks every object before it removes a local file.

        Returns the names of the missing ones, which were uploaded again.

        Raises:
            IsterError: A store does not answer, or a local frame is damaged.
        """
        wal, catalog, last = self._wal, self.owned.catalog, self.owned.last
        if last is None:
            return []
        start = last.start
        for _ in range(_RECENT_OBJECTS - 1):
            before = catalog.find(start - 1) if start > wal.trimmed else None
            if before is None:
                break
            start = before.start
        return [
            described.object_id
            for described, revision in catalog.descriptors(start)
            if described.start >= wal.trimmed
            and self._assure_object(described, revision, content=False)
        ]

    def repair_objects(self, *, content: bool = True) -> RepairedObjects:
        """Checks every object, and restores from local files what is lost, damaged or missing.

        `content`: read them; else only check that they exist, with their size.
        """
        report = RepairedObjects()
        first = self.owned.catalog.first()
        at = first.start if first is not None else 0
        # Before the oldest object, what local files have belongs there too, unless it has expired.
        at = min(at, max(self.owned.record.expired_before, self._wal.trimmed))
        for described, revision in self.owned.catalog.descriptors():
            if described.start > at:
                self._repair(report, at, described.start, partial(self._fill, at, described.start))
            at = described.end
            self._repair(
                report,
                described.start,
                described.end,
                partial(self._restore, described, revision, content),
            )
        return report

    def _repair(
        self, report: RepairedObjects, start: int, end: int, repair: Callable[[], list[str]]
    ) -> None:
        try:
            report.objects += repair()
        except (NotFoundError, CorruptDataError, OffsetOutOfRangeError) as error:
            lost = DataGapError(error.message, start=start, end=end, topic=self.owned.topic)
            lost.path, lost.position = error.path, error.position
            lost.__cause__ = error
            report.errors.append(lost)
            report.bad.append((start, end))

    def _restore(self, described: ObjectDescriptor, revision: int, content: bool) -> list[str]:
        is_restored = self._assure_object(described, revision, content=content)
        return [described.object_id] if is_restored else []

    def _fill(self, start: int, end: int) -> list[str]:
        if start < self._wal.trimmed:
            raise DataGapError(
                "no object holds the offset", start=start, end=end, topic=self.owned.topic
            )
        with self.uploads.lock:
            source = self.uploads.open_files()
            try:
                return [d.object_id for d in self.uploads.uploader.fill(source, start, end)]
            finally:
                source.close()

    def find_local_damage(self) -> IsterError | None:
        """Reads the local files; returns the first damage, or None."""
        wal = self._wal
        source = self.uploads.open_files()
        try:
            at = wal.trimmed
            while at < wal.synced:
                at = source.fetch(at, wal.synced, bytes_max=1 << 30).next_offset
        except (CorruptDataError, NotFoundError) as error:
            return error
        except OffsetOutOfRangeError:
            return None  # trimmed meanwhile: what is left has been read, or was written just now
        finally:
            source.close()
        return None
