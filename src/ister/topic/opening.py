"""Opens a topic: claims it, recovers its files, and puts the local log and the bucket together.

Without a bucket, making a topic ends with its first checkpoint, which records its ack level and
codec; a crash before that leaves an empty topic with the configured ones. With a bucket, both are
in the topic's record; a directory without one, made before there was a bucket, is adopted.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, Codec, TopicName
from ister.bucket.claim import ClaimCheck, NewTopic
from ister.bucket.cursors import clip_progress
from ister.bucket.fence import MemberFence
from ister.bucket.ownership import OwnedTopic
from ister.config import BufferFull, StorageConfig, StorageMode
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    UnavailableError,
    WaitsForDiskError,
    check,
)
from ister.format.records import TopicRecord
from ister.fs.base import FileSystem
from ister.topic.bucket_link import TopicBucket
from ister.topic.cache import Cache
from ister.topic.directories import TopicDirectories
from ister.topic.heads import Heads, compare_with_head, read_local
from ister.topic.known_topics import KnownTopics
from ister.topic.read_only import ReadOnlyTopic
from ister.topic.reconcile import finish_set_aside, measure_backlog, recover_tiered, set_aside
from ister.topic.room import SpaceGuards
from ister.topic.stores import Stores
from ister.topic.topic import Topic
from ister.wal.directory import WalDirectory
from ister.wal.log import ReadOnlyLog, Wal
from ister.wal.recovery import Recovered, UntrustedTailError, recover
from ister.wal.scheduler import Threads
from ister.wal.settings import WalSettings

_log = logging.getLogger("ister.topic.opening")


class _Events:
    """Passes on what a log reports: to its cache, its disk's guard, and the bucket's side."""

    def __init__(self, cache: Cache, room: SpaceGuards) -> None:
        self.on_sealed = cache.append
        self.on_repaired = cache.mend
        self.on_disk_full = room.free_reserve
        self.may_retry = room.may_write
        self.bucket: TopicBucket | None = None
        """What uploads the log's messages, once it is there."""

    def on_synced(self) -> None:
        """Has the bucket's side take what was synced."""
        if self.bucket is not None:
            self.bucket.uploads.on_synced()

    def on_tier_wanted(self) -> None:
        """Has an upload begin soon."""
        if self.bucket is not None:
            self.bucket.uploads.want_upload()


class TopicOpener:
    """Opens the topics of one log; the caller opens one of a name at a time."""

    def __init__(
        self,
        storage: StorageConfig,
        *,
        fs: FileSystem,
        directories: TopicDirectories | None,
        stores: Stores | None,
        known: KnownTopics,
        heads: Heads,
        room: SpaceGuards,
        scheduler: Threads,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._storage = storage
        self._room = room
        self._heads = heads
        self._fs = fs
        self._directories = directories
        self._stores = stores
        self._known = known
        self._scheduler = scheduler
        self._clock = clock
        self._metrics = metrics
        # What a failed sync left behind, by topic: see `ister.wal.recovery`, step 7.
        self._untrusted_from: dict[str, int] = {}

    def open(
        self,
        name: TopicName,
        ack: AckLevel | None,
        codec: Codec | None,
        *,
        create: bool,
        take_over: bool,
    ) -> Topic:
        """Opens a topic that is not open; the arguments are those of `Log.topic`."""
        if self._stores is None:
            return self._open_local(name, ack, codec, create=create)
        return self._claim(self._stores, name, ack, codec, create=create, take_over=take_over)

    def distrust(self, topic: Topic) -> None:
        """Remembers the offset from which the files of a topic with a failed sync are untrusted."""
        if topic.wal.has_failed_sync:
            self._untrusted_from[topic.name] = topic.wal.synced

    def _open_local(
        self, name: TopicName, ack: AckLevel | None, codec: Codec | None, *, create: bool
    ) -> Topic:
        text = str(name)
        storage = self._storage
        directories = self._directories
        if directories is None:
            if not create:
                raise _not_found(text)
            self._known.check_new(name)
            topic, _ = self._make_topic(
                text, None, Recovered(), ack or AckLevel.MEMORY, codec or storage.codec
            )
            return topic
        directory = directories.directory_of(name)
        is_new = not self._fs.exists(directory.path)
        if is_new:
            if not create:
                raise _not_found(text)
            self._known.check_new(name)
            directories.refuse_twin(name)
            directories.add(name)
        try:
            recovered = recover(directory, untrusted_from=self._untrusted_from.get(text))
        except UntrustedTailError as error:
            self._untrusted_from[text] = error.synced
            raise
        self._untrusted_from.pop(text, None)
        recovered = compare_with_head(recovered, directory, self._heads.get(text))
        state = recovered.state
        if state is not None:
            ack = ack if is_new else AckLevel(state.ack)
        topic, _ = self._make_topic(
            text,
            directory,
            recovered,
            ack or storage.ack,
            recovered.codec or codec or storage.codec,
        )
        self._report(topic, recovered)
        if not recovered.damage:
            self._save_first_checkpoint(topic, is_new=is_new)
        return topic

    def _claim(
        self,
        stores: Stores,
        name: TopicName,
        ack: AckLevel | None,
        codec: Codec | None,
        *,
        create: bool,
        take_over: bool,
    ) -> Topic:
        directories = self._directories
        check(directories is not None, "a log with a bucket has files")
        if directories is None:
            raise _not_found(str(name))
        directory = directories.directory_of(name)
        finish_set_aside(directory)
        try:
            claimed = None
            while claimed is None:
                claimed = self._try_claim(
                    stores,
                    name,
                    directory,
                    ack,
                    codec,
                    directories=directories,
                    create=create,
                    take_over=take_over,
                )
        except NotFoundError as error:
            if error.topic is None:
                raise  # the bucket is missing, not the topic
            raise _not_found(str(name)) from None
        owned, before = claimed
        try:
            return self._take(stores, owned, directory, before)
        except BaseException:
            stores.membership.is_whole = False
            stores.membership.remove(owned)
            with suppress(IsterError):
                if owned.sealed_before is not None:
                    # Nothing was appended: another node, perhaps with more room, may open it.
                    owned.seal(owned.sealed_before.next_offset)
                else:
                    owned.release()
            raise

    def _try_claim(
        self,
        stores: Stores,
        name: TopicName,
        directory: WalDirectory,
        ack: AckLevel | None,
        codec: Codec | None,
        *,
        directories: TopicDirectories,
        create: bool,
        take_over: bool,
    ) -> tuple[OwnedTopic, ClaimCheck] | None:
        """Reads the keys, prepares the directory, and claims; None if the record has changed.

        The directory comes first: after the claim old files look like new ones.
        """
        local = read_local(directory, self._heads.get(str(name)))
        has_files = local.is_there
        if create and not has_files:
            directories.refuse_twin(name)
        view = stores.view(name)
        is_unknown = view.record is None
        if create and is_unknown and not has_files:
            self._known.check_new(name)
        new: NewTopic | None = None
        if create or (is_unknown and has_files and not local.is_new):
            # Files without a record were made before there was a bucket, or the record was lost:
            # they say what they are.
            state = directory.load_state() if has_files and is_unknown else None
            new = NewTopic(
                ack=AckLevel(state.ack) if state is not None else ack or self._storage.ack,
                codec=state.codec if state is not None else codec or self._storage.codec,
                incarnation=local.incarnation if state is not None else "",
                epoch=local.term.epoch if local.term is not None else 0,
            )
        seen = stores.check_claim(name, view, new=new, local=local, take_over=take_over)
        if stores.is_diskless:
            _check_diskless(view.known, str(name))
        if not has_files:
            directories.add(name)
            directory.mark()
        elif not seen.is_current and not local.is_new:
            older = "they are an older copy, and the bucket has everything that was acknowledged"
            newer = "another node has written the topic since"
            set_aside(directory, older if seen.is_older_copy else newer)
        owned = stores.claim(name, new=new, take_over=take_over, seen=seen)
        return None if owned is None else (owned, seen)

    def _take(
        self, stores: Stores, owned: OwnedTopic, directory: WalDirectory, before: ClaimCheck
    ) -> Topic:
        """Opens the files of a topic that was claimed, and puts the two tiers together."""
        text = owned.topic
        try:
            recovered = recover_tiered(
                directory,
                owned,
                stores,
                before=before,
                untrusted_from=self._untrusted_from.get(text),
            )
        except UntrustedTailError as error:
            self._untrusted_from[text] = error.synced
            raise
        self._untrusted_from.pop(text, None)
        topic, events = self._make_topic(
            text,
            directory,
            recovered,
            owned.record.ack,
            recovered.codec or owned.record.codec,
            record=owned.record,
        )
        self._report(topic, recovered)
        if not recovered.damage:
            prefix = owned.catalog.keys.subscriptions
            if clipped := clip_progress(
                stores.metadata, prefix, recovered.next_offset, owned=owned
            ):
                _log.warning("cursors put back to the end", extra={"topic": text, "keys": clipped})
        topic.bucket = events.bucket = TopicBucket(
            wal=topic.wal,
            owned=owned,
            stores=stores,
            backlog_bytes=measure_backlog(directory, recovered, owned.tiered),
            floor=topic._subscription_floor,  # noqa: SLF001 - of this package
            settle_batches=partial(topic._settle_batches, stores.objects),  # noqa: SLF001 - of this package
        )
        if not recovered.damage:
            is_new = not recovered.files
            # The first offset of a log without files is in its checkpoint alone, unless it is 0.
            is_known = is_new and recovered.state is None and recovered.next_offset == 0
            self._save_first_checkpoint(topic, is_new=is_new, is_synced=not is_known)
        try:
            # Recovery may have taken longer than the lease. And a process with a copy of this
            # directory is the same node, so it could take the topic over without waiting.
            owned.check()
        except IsterError:
            topic.close_quietly()
            raise
        return topic

    def _save_first_checkpoint(self, topic: Topic, *, is_new: bool, is_synced: bool = True) -> None:
        """Records what recovery found; for a new topic, its ack level and codec."""
        failpoints.reach("wal.recovery_before_checkpoint")
        try:
            topic.wal.save_checkpoint(is_synced=is_synced)
        except IsterError as error:
            if is_new:
                topic.wal.close_quietly()
                raise
            # The next opening takes longer. Reading must stay possible on a full disk.
            self._metrics.count("wal.checkpoint_errors")
            _log.warning("checkpoint not saved", extra={"topic": topic.name, "error": str(error)})

    def foresee_take_over(self, stores: Stores, name: TopicName) -> tuple[ClaimCheck, WalDirectory]:
        """The check before a take-over, and the topic's directory; changes nothing."""
        directories = self._directories
        if directories is None:
            raise InvalidRequestError("this log has no local files", topic=str(name))
        directory = directories.directory_of(name)
        local = read_local(directory, self._heads.get(str(name)))
        seen = stores.check_claim(name, stores.view(name), new=None, local=local, take_over=True)
        return seen, directory

    def open_read_only(self, name: TopicName) -> ReadOnlyTopic:
        """Opens the history of a topic that waits for a disk; see `Log.read_only_topic`."""
        stores, directories, text = self._stores, self._directories, str(name)
        if stores is None or directories is None:
            raise InvalidRequestError("this log has no object store", topic=text)
        view = stores.view(name)
        local = read_local(directories.directory_of(name), self._heads.get(text))
        try:
            stores.check_claim(name, view, new=None, local=local, take_over=False)
        except WaitsForDiskError as error:
            waits = error
        else:
            raise ConflictError(
                "the topic does not wait for a disk", topic=text, hint="open it with `log.topic`"
            )
        known, fence = view.known, stores.take_reader_key(name)
        try:
            owned = stores.act_outside(name, fence)
            _check_unclaimed(owned, known)
            return self._make_read_only(stores, owned, fence, waits)
        except BaseException:
            fence.release()
            raise

    def _make_read_only(
        self, stores: Stores, owned: OwnedTopic, fence: MemberFence, waits: WaitsForDiskError
    ) -> ReadOnlyTopic:
        record, end = owned.record, owned.tiered
        cache = self._cache(end, record.codec)
        wal = ReadOnlyLog(
            end=end,
            settings=self._settings(owned.topic, record.ack, record.codec, record),
            listener=_Events(cache, self._room),
            schedule=self._scheduler,
            clock=self._clock,
            metrics=self._metrics,
        )
        return ReadOnlyTopic(
            wal=wal,
            cache=cache,
            bucket=TopicBucket(wal=wal, owned=owned, stores=stores, fence=fence),
            waits=waits,
            fence=fence,
            max_message_size=self._storage.max_message_size,
            stream_chunk_size=self._storage.wal.stream_chunk_size,
            clock=self._clock,
            metrics=self._metrics,
        )

    def _make_topic(
        self,
        name: str,
        directory: WalDirectory | None,
        recovered: Recovered,
        ack: AckLevel,
        codec: Codec,
        *,
        record: TopicRecord | None = None,
    ) -> tuple[Topic, _Events]:
        cache = self._cache(recovered.next_offset, codec)
        events = _Events(cache, self._room)
        wal = Wal(
            directory=directory,
            recovered=recovered,
            settings=self._settings(name, ack, codec, record),
            listener=events,
            schedule=self._scheduler,
            clock=self._clock,
            metrics=self._metrics,
        )
        topic = Topic(
            wal=wal,
            cache=cache,
            max_message_size=self._storage.max_message_size,
            stream_chunk_size=self._storage.wal.stream_chunk_size,
            clock=self._clock,
            metrics=self._metrics,
        )
        return topic, events

    def _settings(
        self, name: str, ack: AckLevel, codec: Codec, record: TopicRecord | None
    ) -> WalSettings:
        settings = self._storage.wal
        return WalSettings(
            topic=name,
            ack=ack,
            codec=codec,
            incarnation=record.incarnation if record is not None else "",
            epoch=record.epoch if record is not None else 0,
            claim=record.claim if record is not None else "",
            fsync_interval_seconds=settings.fsync_interval_ms / 1000,
            fsync_max_batch_bytes=settings.fsync_max_batch_bytes,
            rotate_max_bytes=settings.rotate_max_bytes,
            rotate_max_seconds=settings.rotate_max_seconds,
            buffer_max_bytes=settings.buffer_max_bytes,
            blocks_when_full=settings.buffer_full is BufferFull.BLOCK,
            # Files in memory come and go several times a second.
            routine_level=logging.DEBUG
            if self._storage.mode is StorageMode.BUCKET
            else logging.INFO,
        )

    def _cache(self, next_offset: int, codec: Codec) -> Cache:
        settings = self._storage.wal
        return Cache(
            capacity=settings.cache_capacity,
            bytes_max=settings.cache_max_bytes,
            next_offset=next_offset,
            codec=codec,
        )

    def _report(self, topic: Topic, recovered: Recovered) -> None:
        if recovered.cut_bytes:
            self._metrics.count("wal.recovery_cut_bytes", recovered.cut_bytes)
        for damage in recovered.damage:
            self._metrics.count("wal.recovery_damage")
            _log.error(
                "topic quarantined",
                extra={
                    "topic": topic.name,
                    "path": damage.path,
                    "position": damage.position,
                    "offset": damage.offset,
                    "reason": damage.reason,
                },
            )


def _not_found(name: str) -> NotFoundError:
    return NotFoundError(
        f"topic {name} does not exist", topic=name, hint="pass create=True to create it"
    )


def _check_diskless(known: TopicRecord | None, name: str) -> None:
    """Refuses a topic whose producers expect local files."""
    if known is not None and known.is_open and known.ack is not AckLevel.TIERED:
        raise InvalidRequestError(
            f"the topic's ack level is {known.ack}, and storage.mode 'bucket' keeps messages only "
            "in the bucket",
            topic=name,
            hint="open it at a broker with storage.mode 'wal_cloud'; new topics get ack 'tiered'",
        )


def _check_unclaimed(owned: OwnedTopic, known: TopicRecord | None) -> None:
    if known is None or owned.record.claim != known.claim:
        raise UnavailableError("the topic was opened meanwhile", topic=owned.topic)


def check_same(topic: Topic, ack: AckLevel | None, codec: Codec | None) -> None:
    """Raises ConflictError if a topic has another ack level or codec than the caller wants."""
    for what, wanted, actual in (("ack level", ack, topic.ack), ("codec", codec, topic.codec)):
        if wanted is not None and wanted is not actual:
            raise ConflictError(
                f"the topic exists with {what} {actual}, not {wanted}",
                topic=topic.name,
                hint="leave it out to open the topic as it is",
            )
