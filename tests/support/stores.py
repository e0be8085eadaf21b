"""Stores in memory, frames made to measure, and nodes that own topics: for tests of the bucket."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import AckLevel, Codec, TopicName
from ister.base.positions import EPOCH
from ister.bucket.catalog import Catalog
from ister.bucket.claim import NewTopic, act_outside, claim
from ister.bucket.fence import Fence
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.membership import Membership
from ister.bucket.merge import merge_objects
from ister.bucket.names import TopicKeys, format_object_id, object_key
from ister.bucket.object_maker import ObjectMaker, UploadSettings
from ister.bucket.ownership import OwnedTopic
from ister.bucket.pipeline import PipelineKeys
from ister.bucket.upload import Uploader
from ister.config import UploaderConfig, load_config
from ister.errors import CorruptDataError, IsterError, UnavailableError
from ister.format.crc import crc32
from ister.format.descriptor import ObjectDescriptor, format_checksum
from ister.format.frame import FrameBatch, encode_frame
from ister.format.message import encode_message
from ister.format.records import Progress, decode_current, encode_progress
from ister.metadata.base import Put
from ister.objectstore.base import ObjectStore
from ister.topic.local_tail import LocalTail
from ister.topic.log import Log
from ister.topic.stores import upload_settings
from ister.wal.scheduler import Threads
from tests.support.builders import a_message
from tests.support.clock import ManualClock
from tests.support.machine import ROOT, Disk
from tests.support.memory_fs import MemoryFileSystem
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore
from tests.support.waiting import PATIENCE_SECONDS

NAME = TopicName(namespace="default", topic="orders")
PREFIX = "/danube"
KIB = 1024
TTL_SECONDS = 15.0
NOW_MS = 1_700_000_000_000


def silent(*_: object) -> None:
    """As a hook: the store does not answer."""
    raise UnavailableError("silent")


def calm(*_: object) -> None:
    """As a hook: everything passes."""


UPLOADS = UploadSettings(
    copies=False,
    chunk_bytes=128 * KIB,
    concurrent_parts=2,
    index_every_messages=10,
    object_bytes_max=1 << 30,
    object_span_ms_max=1 << 40,
)
"""In small pieces, without limits of objects."""


def merged(
    store: ObjectStore, objects: Sequence[ObjectDescriptor], **options: Any
) -> ObjectDescriptor:
    """An object made of others of the topic, which nothing names yet."""
    defaults = {
        "settings": UPLOADS,
        "format": "dnb1",
        "epoch": 1,
        "incarnation": objects[0].incarnation,
        "tag": "0123abcd",
        "created_at": 5,
    }
    return merge_objects(NAME, objects, store=store, **{**defaults, **options})


def failing(
    kind: str, *, at: int = 1, times: int = 1 << 60, error: type[IsterError] = UnavailableError
) -> Callable[[str, str], None]:
    """A hook of a store: operations of a kind raise, `times` of them from number `at` on.

    As `before`, nothing has happened; as `after`, only the answer is lost.
    """
    seen = 0

    def hook(operation: str, key: str) -> None:
        nonlocal seen
        seen += operation == kind
        if operation == kind and at <= seen < at + times:
            raise error("injected")

    return hook


def once(kind: str, act: Callable[[], object]) -> Callable[[str, str], None]:
    """A hook of a store: something else happens at the first operation of a kind."""
    is_done = False

    def hook(operation: str, key: str) -> None:
        nonlocal is_done
        if operation == kind and not is_done:
            is_done = True
            act()

    return hook


class SlowReads:
    """Makes a store's reads wait until `wanted` of them overlap, and counts how many do.

    The first `alone` reads do not wait: nothing can overlap with them.
    """

    def __init__(self, store: MemoryObjectStore, wanted: int, *, alone: int = 0) -> None:
        self.most = 0
        self._wanted = wanted
        self._alone = alone
        self._waiting = 0
        self._gives_up = False
        self._changed = threading.Condition()
        store.before = self._wait

    def _wait(self, kind: str, key: str) -> None:
        if kind != "read":
            return
        with self._changed:
            if self._alone:
                self._alone -= 1
                return
            self._waiting += 1
            self.most = max(self.most, self._waiting)
            self._changed.notify_all()
            self._gives_up |= not self._changed.wait_for(self._may_go, PATIENCE_SECONDS)
            self._waiting -= 1

    def _may_go(self) -> bool:
        return self._gives_up or self.most >= self._wanted


class KeptMetadata(MemoryMetadata):
    """Metadata that outlives the processes that use it, as a server does."""

    def close(self) -> None:
        """Only the connection ends."""


class Directory:
    """A node's data directory, as far as memberships are concerned."""

    def __init__(self, identity: str, instances: Sequence[str] = ()) -> None:
        self.identity = identity
        self.holder = f"process 1 on {identity}"
        self.is_lasting = True
        self._instances = list(instances)

    def instances(self) -> list[str]:
        """The processes that had it."""
        return list(self._instances)

    def remember(self, instance: str) -> None:
        """Makes a process the newest one."""
        self._instances.append(instance)

    def copied(self, identity: str) -> "Directory":
        """The same files, elsewhere."""
        return Directory(identity, self._instances)


class Cluster:
    """One bucket, one metadata store, one clock; and the nodes that share them."""

    def __init__(self, **store) -> None:
        self.clock = ManualClock(now_ms=NOW_MS)
        self.metrics = Metrics()
        self.objects = MemoryObjectStore(clock=self.clock, **store)
        self.metadata = KeptMetadata(self.clock)
        self.keys = TopicKeys(PREFIX, NAME)
        self.directories: dict[str, Directory] = {}

    def node(self, name: str) -> Membership:
        """A process that has just joined."""
        return Membership(
            self.metadata,
            root_prefix=PREFIX,
            node=name,
            directory=self.directories.setdefault(name, Directory(name)),
            ttl_seconds=TTL_SECONDS,
            clock=self.clock,
        )

    def catalog(self, name: TopicName = NAME) -> Catalog:
        """What the metadata store knows about a topic."""
        return Catalog(
            self.metadata, TopicKeys(PREFIX, name), clock=self.clock, metrics=self.metrics
        )

    def claim(
        self,
        node: Membership | str = "a",
        *,
        name: TopicName = NAME,
        create: bool = True,
        take_over: bool = False,
        ack: AckLevel = AckLevel.SYNCED,
        codec: Codec = Codec.BINCODE2,
    ) -> OwnedTopic:
        """Makes a node the topic's owner."""
        return claim(
            self.catalog(name),
            self.node(node) if isinstance(node, str) else node,
            new=NewTopic(ack=ack, codec=codec) if create else None,
            take_over=take_over,
            clock=self.clock,
            metrics=self.metrics,
        )

    def uploader(self, owned: OwnedTopic, *, on_memory=lambda change: None, **settings) -> Uploader:
        """What uploads a topic, in small pieces."""
        return Uploader(
            owned,
            self.objects,
            settings=replace(UPLOADS, **settings),
            clock=self.clock,
            metrics=self.metrics,
            on_memory=on_memory,
        )

    def reader(self, *, chunk_bytes: int = 64 * KIB, ahead=None, **settings) -> HistoryReader:
        """A reader of the topic's objects."""
        return HistoryReader(
            self.catalog(),
            self.objects,
            settings=ReaderSettings(chunk_bytes=chunk_bytes, **settings),
            clock=self.clock,
            metrics=self.metrics,
            ahead=ahead,
        )

    def heal(self) -> None:
        """Takes all hooks away."""
        for store in (self.objects, self.metadata):
            store.before = store.after = calm

    def fence(
        self, key: str = "/danube/pipeline/jobs/job", *, ttl_seconds: float = TTL_SECONDS
    ) -> Fence:
        """A job's lease."""
        return Fence.take(
            self.metadata, key, id="job", about={}, ttl_seconds=ttl_seconds, clock=self.clock
        )

    def outside(self, fence: Fence | None = None) -> OwnedTopic:
        """The right of a job to change the topic in its owner's name."""
        fence = self.fence() if fence is None else fence
        return act_outside(self.catalog(), fence, clock=self.clock, metrics=self.metrics)

    def maker(self, name: TopicName = NAME) -> ObjectMaker:
        """What makes objects of the topic, in small pieces."""
        return ObjectMaker(
            name, self.objects, settings=UPLOADS, clock=self.clock, metrics=self.metrics
        )

    def descriptors(self, start: int = 0, end: int | None = None) -> list[ObjectDescriptor]:
        """What the catalog has."""
        return [described for described, _ in self.catalog().descriptors(start, end)]

    def ranges(self) -> list[tuple[int, int]]:
        """The offsets of every object, as the catalog has them."""
        return [(described.start, described.end) for described in self.descriptors()]

    def current(self) -> int:
        """Where the newest object begins, as the pointer has it."""
        found = self.metadata.get(self.keys.current)
        return decode_current(found.value, key=found.key)

    def everything(self) -> dict[str, bytes]:
        """All keys and values of the metadata store."""
        return {found.key: found.value for found in self.metadata.range("/")}

    def filled(self, frames: "Frames", *ends: int, **settings) -> OwnedTopic:
        """A topic whose objects end at `ends`; the first one begins with the frames."""
        owned = self.claim("a")
        start = frames.first
        for end in ends:
            assert self.uploader(owned, **settings).upload(frames, start, end).end == end
            start = end
        return owned

    def key(self, object_id: str) -> str:
        """An object's key."""
        return object_key(NAME, object_id)

    def object_bytes(self, object_id: str) -> bytes:
        """An object whole."""
        return self.objects.read(self.key(object_id), 0, 1 << 40)

    def data_keys(self) -> list[str]:
        """The names of all objects of the topic."""
        prefix = self.key("")
        return [
            key.removeprefix(prefix)
            for key in map(str, self.objects.keys())
            if key.startswith(prefix)
        ]


class Frames:
    """Frames of messages with consecutive offsets, as an uploader's source."""

    def __init__(
        self,
        payloads: Sequence[bytes],
        *,
        first: int = 0,
        times: Sequence[int] | None = None,
        codec: Codec = Codec.BINCODE2,
        batch: int = 7,
    ) -> None:
        self.first = first
        self.end = first + len(payloads)
        self.payloads = list(payloads)
        self.codec = codec
        self.times = list(times) if times is not None else [NOW_MS] * len(payloads)
        self.frames = [
            encode_frame(
                first + number,
                encode_message(
                    a_message(
                        topic_offset=first + number,
                        payload=payload,
                        publish_time=self.times[number],
                    ),
                    codec,
                ),
            )
            for number, payload in enumerate(payloads)
        ]
        self.batch = batch
        """Frames that one fetch gives at the most."""
        self.damaged_at: int | None = None
        """Fetching this offset raises."""
        self.is_closed = False

    def __len__(self) -> int:
        return len(self.frames)

    def arrived_ms(self, start: int, end: int) -> int | None:
        return None

    def between(self, start: int, end: int) -> bytes:
        """The bytes of a range."""
        return b"".join(self.frames[start - self.first : end - self.first])

    def size(self, offset: int) -> int:
        """The size of a frame."""
        return len(self.frames[offset - self.first])

    def plan(self, start: int, end: int, *, bytes_max: int, span_ms_max: int) -> int:
        """See `FrameSource.plan`."""
        at, size = start + 1, self.size(start)
        first_time = self.times[start - self.first]
        while (
            at < end
            and size + self.size(at) <= bytes_max
            and self.times[at - self.first] - first_time <= span_ms_max
        ):
            size += self.size(at)
            at += 1
        return at

    def fetch(self, start: int, end: int, *, bytes_max: int) -> FrameBatch:
        """See `FrameSource.fetch`."""
        upto = min(end, start + self.batch)
        if self.damaged_at is not None:
            if start == self.damaged_at:
                raise CorruptDataError("damaged", offset=start)
            if start < self.damaged_at:
                upto = min(upto, self.damaged_at)
        return a_batch(self.frames[start - self.first : upto - self.first], start, self.codec)

    def close(self) -> None:
        """See `FrameSource.close`."""
        self.is_closed = True


def a_batch(frames: Sequence[bytes], first: int, codec: Codec = Codec.BINCODE2) -> FrameBatch:
    """Frames in a chunk with other bytes around them."""
    starts, position = [], 3
    for frame in frames:
        starts.append(position)
        position += len(frame)
    return FrameBatch(b"xyz" + b"".join(frames) + b"uvw", starts, position, first, codec)


def frames_of(batch: FrameBatch) -> list[bytes]:
    """The frames of a batch, apart."""
    ends = [*batch.starts[1:], batch.end]
    return [batch.chunk[head:tail] for head, tail in zip(batch.starts, ends, strict=True)]


def read_all(reader: HistoryReader, start: int, end: int, *, bytes_max: int = 1 << 20) -> list:
    """(offset, frame) of everything between two offsets."""
    found: list[tuple[int, bytes]] = []
    while start < end:
        batch = reader.fetch(start, end, bytes_max=bytes_max)
        found += enumerate(frames_of(batch), batch.first_offset)
        start = batch.next_offset
    return found


def a_descriptor(start: int, end: int, *, epoch: int = 1, **fields) -> ObjectDescriptor:
    """A descriptor of an object that nobody has looked at."""
    described = ObjectDescriptor(
        object_id=format_object_id(start, end, epoch),
        start=start,
        end=end,
        size_bytes=100 * (end - start),
        created_at=NOW_MS // 1000,
        codec=Codec.BINCODE2,
        epoch=epoch,
        incarnation="0123456789abcdef",
        messages=end - start,
        checksum=format_checksum(crc32(b"%d" % start, 0)),
    )
    return replace(described, **fields)


class Site:
    """Machines with disks of their own that share a bucket and a metadata store."""

    def __init__(self, *, clock: Clock | None = None, **store) -> None:
        self.clock = ManualClock(now_ms=NOW_MS) if clock is None else clock
        self.objects = MemoryObjectStore(clock=self.clock, **store)
        self.metadata = KeptMetadata(self.clock)
        self.disks: dict[str, MemoryFileSystem] = {}
        self._logs: list[tuple[str | None, Log]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.objects.before = self.objects.after = lambda kind, key: None
        self.metadata.before = self.metadata.after = lambda kind, key: None
        for disk, log in self._logs:
            if disk is not None:
                self.disks[disk].before = lambda kind, path: None
            with suppress(IsterError):
                log.close()

    def disk(self, name: str = "a") -> MemoryFileSystem:
        """A machine's disk."""
        if name not in self.disks:
            self.disks[name] = fs = MemoryFileSystem()
            fs.now_ms = lambda: self.clock.now_ns() // 1_000_000
        return self.disks[name]

    def open(
        self,
        disk: str = "a",
        *,
        background: bool = False,
        scheduler: Threads | None = None,
        storage: dict | None = None,
        **wal,
    ) -> Log:
        """A process on a machine; `wal` are settings below `storage.wal`."""
        tree = {"storage": {**(storage or {}), "wal": {"dir": ROOT, **wal}}}
        is_tiered = tree["storage"].get("mode", "wal_cloud") == "wal_cloud"
        stores = {"objects": self.objects, "metadata": self.metadata} if is_tiered else {}
        log = Log(
            load_config(tree, {}),
            fs=self.disk(disk),
            clock=self.clock,
            background=background,
            scheduler=scheduler,
            **stores,
        )
        self._logs.append((disk, log))
        return log

    def open_diskless(
        self,
        *,
        background: bool = False,
        scheduler: Threads | None = None,
        memory_max_bytes: int = 1 << 20,
        storage: dict | None = None,
        **wal,
    ) -> Log:
        """A process without a disk; `wal` are settings below `storage.wal`."""
        tree = {
            "mode": "bucket",
            "cloud": {"backend": "memory"},
            "metadata": {"backend": "memory"},
            "bucket": {"memory_max_bytes": memory_max_bytes},
            **(storage or {}),
            "wal": wal,
        }
        log = Log(
            load_config({"storage": tree}, {}),
            clock=self.clock,
            background=background,
            scheduler=scheduler,
            objects=self.objects,
            metadata=self.metadata,
        )
        self._logs.append((None, log))
        return log

    def kill(self, log: Log) -> None:
        """Ends a process: nothing of it touches disk or stores again."""
        ((disk, _),) = [item for item in self._logs if item[1] is log]
        self._logs.remove((disk, log))
        log._scheduler.stop()
        if log._background is not None:
            log._background.stop()
        if log.room.memory is not None:
            log.room.memory.stop()
        if log.stores is not None and log.stores._ahead is not None:
            log.stores._ahead.shutdown(wait=True)
        if disk is not None:
            self.disks[disk].kill()

    def pass_time(self, log: Log, seconds: float = 3600) -> None:
        """Time passes, and a process that was awake has renewed its lease."""
        self.clock.advance(seconds)
        log.stores.membership.renew()

    def files(self, name: str = "a") -> Disk:
        """A machine's files, to look at and to harm."""
        return Disk(self.disk(name))

    def catalog(self, name: TopicName = NAME) -> Catalog:
        """What the metadata store knows about a topic."""
        return Catalog(self.metadata, TopicKeys(PREFIX, name), clock=self.clock, metrics=Metrics())

    def bucket_keys(self) -> list[str]:
        """The keys of everything in the bucket, but for the metadata store's revision."""
        keys = self.objects.keys()
        return [key for key in keys if not key.startswith("storage/metadata/")]

    def ranges(self) -> list[tuple[int, int]]:
        """The offsets of every object, as the catalog has them."""
        return [(d.start, d.end) for d, _ in self.catalog().descriptors()]

    def key(self, offset: int) -> str:
        """The key of the object that holds an offset."""
        return object_key(NAME, self.catalog().find(offset).object_id)


class Pipeline:
    """Somebody who uploads a site's topics in their owners' names, with the pipeline's lease."""

    def __init__(self, site: Site, *, key: str | None = None, ttl_seconds: float = 15.0) -> None:
        self._site = site
        self.fence = Fence.take(
            site.metadata,
            key if key is not None else PipelineKeys(PREFIX).lease,
            id=key or "pipeline",
            about={},
            ttl_seconds=ttl_seconds,
            clock=site.clock,
        )

    def acting(self, name: TopicName = NAME) -> OwnedTopic:
        """The right to change a topic."""
        return act_outside(
            self._site.catalog(name), self.fence, clock=self._site.clock, metrics=Metrics()
        )

    def upload(
        self, *, end: int | None = None, disk: str = "a", name: TopicName = NAME, **uploader
    ) -> list[ObjectDescriptor]:
        """Uploads what a disk's checkpoint calls synced, up to `end`; what was committed."""
        site, owned = self._site, self.acting(name)
        config = UploaderConfig(**uploader)
        settings = upload_settings(config)
        tail = LocalTail.find(
            ROOT,
            name,
            owned.record.node,
            owned.record.incarnation,
            clock=site.clock,
            metrics=Metrics(),
            fs=site.disk(disk),
        )
        source, snapshot = tail.source(chunk_bytes=config.stream_chunk_size // 2)
        maker = ObjectMaker(
            name, site.objects, settings=settings, clock=site.clock, metrics=Metrics()
        )
        made: list[ObjectDescriptor] = []
        try:
            start = owned.tiered if owned.last is not None else snapshot.trimmed
            stop = snapshot.synced if end is None else min(end, snapshot.synced)
            while start < stop:
                upto = source.plan(
                    start,
                    stop,
                    bytes_max=settings.object_bytes_max,
                    span_ms_max=settings.object_span_ms_max,
                )
                described = maker.make(
                    source, start, upto, epoch=owned.epoch, incarnation=owned.record.incarnation
                )
                owned.commit(described)
                made.append(described)
                start = upto
        finally:
            source.close()
        return made


def save_cursor(owned: OwnedTopic, subscription: str, offset: int) -> str:
    """Writes a subscription's cursor as its topic's owner; returns the key."""
    key = owned.catalog.keys.progress(subscription)
    progress = Progress(offset=offset, timestamp=1, incarnation=owned.record.incarnation)
    assert owned.transact([], [Put(key, encode_progress(progress))])
    return key


def as_row(message) -> dict[str, object]:
    """What a message of the topic is in a table, hidden columns included."""
    record = message.record

    def signed(value: int | None, bits: int) -> int | None:
        return value - (1 << bits) if value is not None and value >> (bits - 1) else value

    return {
        "topic": str(NAME),
        "offset": message.offset,
        "publish_time": EPOCH + timedelta(milliseconds=record.publish_time),
        "producer_name": record.producer_name,
        "payload": record.payload,
        "attributes": list(record.attributes.items()),
        "routing_key": record.routing_key,
        "schema_id": signed(record.schema_id, 64),
        "schema_version": signed(record.schema_version, 32),
        "request_id": record.request_id,
        "producer_id": record.msg_id.producer_id,
    }
