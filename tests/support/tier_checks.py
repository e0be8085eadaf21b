"""Settings of logs with a bucket, and the judge of both tiers.

`converge` is what every fault test ends with: everything that was acknowledged can be read, once,
with the same bytes, from the earliest offset on; what is synced gets into the bucket; the
descriptors follow each other without an overlap; each names an object that is there, byte for byte.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ister
from ister.bucket.check import verify_content
from ister.bucket.names import object_key, objects_prefix
from ister.topic.message import MessageBatch
from tests.support.oracle import Entry, History, Report, payload_of, read_all

SURVIVES = frozenset({"written", "synced", "tiered"})
"""What nothing here may take: no disk is lost, and no page cache."""

TOPIC = "/fault/t0"
_READ_BYTES = 1 << 20


def tier_settings(
    directory: str | Path,
    *,
    node: str = "wal",
    ack: str = "synced",
    storage: Mapping[str, object] | None = None,
    **sections: Mapping[str, object],
) -> dict:
    """A tree of settings: small files, small objects, short times.

    Args:
        directory: Where everything is, unless a section says otherwise.
        node: The name of the log's own directory in it; the bucket and the metadata are shared.
        ack: The topics' ack level.
        storage: More keys directly below `storage`.
        sections: More keys below `storage.wal`, `storage.uploader`, and so on.
    """
    tree: dict[str, dict] = {
        "wal": {
            "dir": f"{directory}/{node}",
            "rotate_max_bytes": 8192,
            "cache_capacity": 4,
            "fsync_interval_ms": 50,
            # Every rotated file that the bucket has goes.
            "retention": {"size_mb": 0},
        },
        "uploader": {
            "interval_seconds": 1,
            "max_batch_bytes": 1,
            "max_object_bytes": 8192,
            "stream_chunk_size": 65536,
        },
        "cloud": {"root": f"{directory}/objects", "call_timeout_seconds": 2},
        "cloud_reader": {"fetch_chunk_size": 65536},
        "metadata": {"path": f"{directory}/metadata.db", "lease_ttl_seconds": 30},
    }
    for name, values in sections.items():
        tree[name].update(values)
    return {"storage": {"ack": ack, **(storage or {}), **tree}}


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory where there is one, gone afterwards.

    Nothing here cuts the power, so that nothing is proved by waiting for a disk.
    """
    there = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="ister-fault-", dir=there)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Producer:
    """Sends messages that the oracle knows, and tells it what became of them."""

    def __init__(self, history: History, name: str = TOPIC, session: str = "p") -> None:
        self.history = history
        self._name = name
        self._session = session
        self._number = 0

    def send(
        self, topic: ister.Topic, count: int = 1, *, level: str | None = "synced", size: int = 0
    ) -> range:
        """Appends, waits for the last one and records; `level` None does not wait.

        Raises:
            IsterError: What the append or the wait raised, after it was recorded.
        """
        sent: list[tuple[str, int]] = []
        for _ in range(count):
            message_id = f"{self._session}.{self._number}" + (f"#{size}" if size else "")
            self._number += 1
            self.history.send(self._name, message_id)
            try:
                sent.append((message_id, topic.append(payload_of(message_id))))
            except ister.IsterError:
                self.history.error(self._name, message_id)
                raise
        offsets = range(sent[0][1], sent[-1][1] + 1)
        if level is None:
            for message_id, _ in sent:
                self.history.unknown(self._name, message_id)
            return offsets
        try:
            topic.wait(offsets[-1], level, timeout=60)
        except ister.IsterError:
            for message_id, _ in sent:
                self.history.unknown(self._name, message_id)
            raise
        for message_id, offset in sent:
            self.history.ack(self._name, message_id, offset, level)
        return offsets


def read_bucket(topic: ister.Topic) -> Iterator[Entry]:
    """Every message of a topic's objects, past the local files."""
    bucket = topic.bucket
    assert bucket is not None
    first = bucket.owned.first
    if first is None:
        return
    history = bucket.history()
    offset, end = first.start, bucket.owned.tiered
    try:
        while offset < end:
            batch = history.fetch(offset, end, bytes_max=_READ_BYTES)
            assert batch.first_offset == offset, f"{batch.first_offset} instead of {offset}"
            ends = [*batch.starts[1:], batch.end]
            for message in MessageBatch(batch.chunk, batch.starts, ends, offset, batch.codec):
                yield message.offset, message.payload
            offset = batch.next_offset
    finally:
        history.close()


def check_catalog(topic: ister.Topic, *, content: bool = True) -> list[str]:
    """The descriptors follow each other, and each names an object that is what it says.

    Returns:
        The names of the objects.
    """
    bucket = topic.bucket
    assert bucket is not None
    owned = bucket.owned
    store = bucket._stores.objects
    names: list[str] = []
    at: int | None = None
    for described, _ in owned.catalog.descriptors():
        assert described.start < described.end
        assert at in (None, described.start), f"{described.object_id} begins there, not at {at}"
        at = described.end
        names.append(described.object_id)
        if content:
            key = object_key(owned.catalog.keys.topic, described.object_id)
            verify_content(store, key, described, chunk_bytes=_READ_BYTES)
    assert len(set(names)) == len(names), "an object is named twice"
    if at is not None:
        assert at == owned.tiered == topic.watermarks.tiered
    return names


def orphans(topic: ister.Topic) -> list[str]:
    """The objects in the bucket that no descriptor names."""
    bucket = topic.bucket
    assert bucket is not None
    prefix = objects_prefix(bucket.owned.catalog.keys.topic)
    there = {info.key.removeprefix(prefix) for info in bucket._stores.objects.list(prefix)}
    return sorted(there - {d.object_id for d, _ in bucket.owned.catalog.descriptors()})


def verify_topic(history: History, topic: ister.Topic) -> Report:
    """The chained read from the earliest offset on is what was acknowledged."""
    assert not topic.damage, f"{topic.name} is quarantined: {topic.damage}"
    report = history.check(topic.name, read_all(topic), survives=SURVIVES, first=topic.earliest)
    assert report.is_clean, str(report)
    return report


def converge(history: History, topic: ister.Topic) -> Report:
    """Nothing is lost, and what is synced gets into the bucket; see the module header."""
    report = verify_topic(history, topic)
    topic.upload()
    marks = topic.watermarks
    assert marks.tiered == marks.synced == marks.next, marks
    check_catalog(topic)
    chained = dict(read_all(topic))
    bucket = dict(read_bucket(topic))
    assert bucket == chained, "the bucket and the chained read differ"
    return report
