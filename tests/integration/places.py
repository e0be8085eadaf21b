"""Places for a topic's history: a bucket and a metadata store, and the nodes that share them.

Each node has a `wal.dir` of its own, so two nodes are two owners on two machines:

    with Place(tmp_path, cloud=…, metadata=…) as place:
        one = place.node("one")
        one.flush_and_seal(TOPIC)
        two = place.node("two")

Uploads run only when a test asks for them, unless a node is opened with `uploads=True`. `Shelf` has
the same stores in memory, for faults that have to be injected.
"""

import os
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from ister.base.model import StreamMessage, TopicName
from ister.config import load_config
from ister.errors import IsterError
from ister.format.descriptor import ObjectDescriptor
from ister.format.frame import scan_frames
from tests.support.danube_storage import StartPosition, TopicStream, WalStorage, WalStorageFactory
from tests.support.machine import PATIENCE_SECONDS, numbered
from tests.support.memory_fs import MemoryFileSystem
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

TOPIC = "/default/orders"
PUBLISHED_MS = 1_700_000_000_000


class _Nodes:
    """Factories on the same stores, all closed at the end."""

    def __init__(self) -> None:
        self._factories: list[WalStorageFactory] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for factory in self._factories:
            with suppress(IsterError):
                factory.shutdown()

    def _opened(self, tree: dict, **seams) -> WalStorageFactory:
        factory = WalStorageFactory(load_config({"storage": tree}, {}), **seams)
        self._factories.append(factory)
        return factory

    def kill(self, factory: WalStorageFactory) -> None:
        """Ends a node as kill -9 does: nothing is written, handed over or released any more.

        What a dead process no longer holds is let go of: threads, the directory's lock, handles.
        """
        self._factories.remove(factory)
        log = factory.log
        log._is_closed = True  # nobody closes what is dropped here
        if log._background is not None:
            log._background.stop()
        if log.room.disk is not None:
            log.room.disk.stop()
        log._scheduler.stop()
        for topic in log._open_topics():
            for reader in topic.readers:
                reader.close()
            with suppress(IsterError):
                topic.wal.writer.close_file()
        stores = log.stores
        if stores._ahead is not None:
            stores._ahead.shutdown(wait=True, cancel_futures=True)
        stores.metadata.close()
        stores.objects.close()
        log._directories.unlock()


class Place(_Nodes):
    """A bucket and a metadata store, with a prefix of their own, and nodes below `directory`."""

    def __init__(self, directory: Path, *, s3=None, etcd=None) -> None:
        """A directory and SQLite, or a server for either."""
        super().__init__()
        self._directory = directory
        prefix = uuid.uuid4().hex[:12]
        if s3 is None:
            self._cloud = {"backend": "fs", "root": str(directory / "bucket")}
        else:
            self._cloud = {
                "backend": "s3",
                "root": f"s3://{s3.bucket}/{prefix}",
                "options": s3.options(),
            }
        if etcd is None:
            self._metadata = {"backend": "sqlite", "path": str(directory / "metadata.db")}
        else:
            self._metadata = {"backend": "etcd", "endpoints": [etcd.endpoint]}
        self._metadata["root_prefix"] = f"/{prefix}"

    def node(
        self,
        name: str = "one",
        *,
        uploads: bool = False,
        clock=None,
        ack: str = "synced",
        **sections: dict,
    ) -> WalStorageFactory:
        """A node's process; `sections` are settings below those of `storage`."""
        return self._opened(self.settings(name, uploads=uploads, ack=ack, **sections), clock=clock)

    def settings(self, name: str, *, uploads: bool = False, ack: str = "synced", **sections):
        """The settings of a node."""
        return {
            "ack": ack,
            "wal": {
                "dir": str(self._directory / name),
                "rotate_max_bytes": 4096,
                **sections.pop("wal", {}),
            },
            "uploader": {
                "engine": "embedded" if uploads else "none",
                "interval_seconds": 1,
                "max_object_bytes": 64 * 1024,
                **sections.pop("uploader", {}),
            },
            "cloud": {**self._cloud, **sections.pop("cloud", {})},
            "metadata": {**self._metadata, **sections.pop("metadata", {})},
            **sections,
        }

    def files(self, node: str = "one", topic: str = TOPIC) -> Path:
        """Where a node keeps a topic's files."""
        return self._directory / node / topic.removeprefix("/")

    def logs(self, node: str = "one", topic: str = TOPIC) -> list[Path]:
        """A topic's log files on a node, oldest first."""
        found = self.files(node, topic).glob("wal*.log")
        return sorted(found, key=lambda path: (len(path.name), path.name))


class _LastingMetadata(MemoryMetadata):
    """Metadata that outlives the processes that use it."""

    def close(self) -> None:
        """Only that process is gone."""


class Shelf(_Nodes):
    """Stores and disks in memory that fail on command."""

    def __init__(self, *, clock=None, **store) -> None:
        super().__init__()
        self._clock = clock
        self.objects = MemoryObjectStore(clock=clock, **store)
        self.metadata = _LastingMetadata(clock)
        self.disks: dict[str, MemoryFileSystem] = {}

    def node(self, name: str = "one", *, ack: str = "synced", **sections) -> WalStorageFactory:
        """A node's process, without anything that happens by itself."""
        tree = {
            "ack": ack,
            **sections,
            "wal": {"dir": "/wal", "rotate_max_bytes": 4096, **sections.get("wal", {})},
            "uploader": {"max_object_bytes": 64 * 1024, **sections.get("uploader", {})},
        }
        return self._opened(
            tree,
            fs=self.disks.setdefault(name, MemoryFileSystem()),
            clock=self._clock,
            objects=self.objects,
            metadata=self.metadata,
            background=False,
        )

    def kill(self, factory: WalStorageFactory) -> None:
        """Ends a node; see `_Nodes.kill`."""
        super().kill(factory)
        factory.log._fs.kill()


# -- messages -----------------------------------------------------------------------------------


def record(payload: bytes, **fields) -> StreamMessage:
    """A message as it comes from a producer: its offset is not known yet."""
    return StreamMessage(
        payload=payload, producer_name="p", **{"publish_time": PUBLISHED_MS, **fields}
    )


def fill(storage: WalStorage, payloads: Sequence[bytes], *, every: int | None = None) -> range:
    """Appends and waits until all is durable; each `every` messages become one write."""
    name = storage.topic.name
    first = storage.topic.wal.next
    for number, payload in enumerate(payloads, 1):
        offset = storage.append_message(name, record(payload))
        if every is not None and number % every == 0:
            storage.wait(offset)
    storage.flush(name)
    return range(first, storage.topic.wal.next)


def take(stream: TopicStream, count: int) -> list[StreamMessage]:
    """The next messages of a stream, exactly so many; waits for those that are to come."""
    found: list[StreamMessage] = []
    while len(found) < count:
        batch = stream.next_batch(count - len(found), timeout=PATIENCE_SECONDS)
        assert batch, f"{len(found)} messages came, and not {count}"
        found += batch
    return found


def has_nothing(stream: TopicStream) -> bool:
    """Whether no further message can be read now."""
    return stream.next_batch(timeout=0) == []


def read_from(storage: WalStorage, start: int) -> list[StreamMessage]:
    """Everything from an offset on that has been appended so far."""
    name = storage.topic.name
    with storage.create_reader(name, StartPosition.at(start)) as stream:
        found = take(stream, storage.topic.wal.next - start)
        assert has_nothing(stream)
    assert offsets(found) == list(range(start, start + len(found)))
    return found


def offsets(messages: Iterable[StreamMessage]) -> list[int]:
    """Their offsets, as stamped into them."""
    return [message.msg_id.topic_offset for message in messages]


def three_files(storage: WalStorage) -> None:
    """200 messages: 100 in the first file, 50 in the second, 50 in the active one."""
    for count in (100, 50, 50):
        fill(storage, numbered(count, first=storage.topic.wal.next, size=100))
    assert [file.first_offset for file in storage.topic.wal.files] == [0, 100, 150]


# -- files --------------------------------------------------------------------------------------


def grow_old(path: Path) -> None:
    """Has a file last written to an hour ago."""
    status = path.stat()
    os.utime(path, (status.st_atime - 3600, status.st_mtime - 3600))


def flip_byte(path: Path, position: int) -> None:
    """Changes one byte of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


# -- what the stores hold -----------------------------------------------------------------------


def catalog(factory: WalStorageFactory, topic: str = TOPIC):
    """What the metadata store knows about a topic."""
    return factory.log.stores.catalog(TopicName.parse(topic))


def descriptors(factory: WalStorageFactory, topic: str = TOPIC) -> list[ObjectDescriptor]:
    """A topic's objects, oldest first."""
    return [described for described, _ in catalog(factory, topic).descriptors()]


def tiered_offsets(factory: WalStorageFactory, topic: str = TOPIC) -> list[int]:
    """The offsets in a topic's objects, read from the objects themselves."""
    found: list[int] = []
    for described in descriptors(factory, topic):
        key = f"storage/topics{topic}/objects/{described.object_id}"
        data = factory.log.stores.objects.read(key, 0, described.size_bytes + 1)
        assert len(data) == described.size_bytes
        scan = scan_frames(data, expected_offset=described.start)
        assert scan.end == len(data)
        assert scan.next_offset == described.end
        found += range(described.start, described.end)
    return found


def stored_keys(factory: WalStorageFactory, topic: str = TOPIC) -> list[str]:
    """The keys of everything that the bucket holds of a topic."""
    prefix = f"storage/topics{topic}/"
    return [info.key.removeprefix(prefix) for info in factory.log.stores.objects.list(prefix)]


def object_names(factory: WalStorageFactory, topic: str = TOPIC) -> list[str]:
    """The names of a topic's objects in the bucket, whether or not anything refers to them."""
    return [
        key.removeprefix("objects/")
        for key in stored_keys(factory, topic)
        if key.startswith("objects/")
    ]


def counted(factory: WalStorageFactory, name: str) -> int:
    """A counter of a node."""
    return factory.log.metrics.snapshot()[name]
