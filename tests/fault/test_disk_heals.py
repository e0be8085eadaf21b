"""A disk that is full, with the metadata beside the log: it heals when the bucket is back.

Real tmpfs, real SQLite; the bucket is in memory and may be silent. What every test ends with:
everything acknowledged is there, in order, also for the next process.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import ister
from ister.base.limits import MIB
from ister.base.model import TopicState
from ister.client import AsyncClient
from ister.config import load_config
from ister.errors import CapacityError, UnavailableError
from ister.topic.disk import RESERVE_NAME
from ister.topic.log import Log
from tests.support.broker import a_broker, run
from tests.support.disks import fill, mounted_tmpfs, skip_if, why_no_tmpfs
from tests.support.memory_store import MemoryObjectStore
from tests.support.waiting import eventually

NAME = "/fault/t0"
SIZE_KIB = 64 * 1024
MESSAGE_BYTES = 100_000
HEAL_SECONDS_MAX = 60.0
_PATIENCE_SECONDS = 120.0


class Bucket(MemoryObjectStore):
    """A bucket that outlives the processes, and may be silent."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self._before
        self.is_silent = False

    def _before(self, kind: str, key: str) -> None:
        if self.is_silent:
            raise UnavailableError(f"{kind}: the bucket is silent")

    def close(self) -> None:
        """It stays."""


class Site:
    """A small disk with a log and its metadata on it, and what was acknowledged."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.bucket = Bucket()
        self.acked: dict[str, list[bytes]] = {}
        self.ballast = where / "ballast"

    @contextmanager
    def open(self, *, disk: dict | None = None, **wal):
        storage = {
            "wal": {"dir": str(self.where / "wal"), **wal},
            "metadata": {"path": str(self.where / "metadata.db"), "lease_ttl_seconds": 8},
            "uploader": {"interval_seconds": 1, "stream_chunk_size": MIB},
            "cloud": {"root": "/nowhere", "backend": "memory"},
            "disk": disk or {},
        }
        with Log(load_config({"storage": storage}, {}), objects=self.bucket) as log:
            yield log

    def put(self, topic: ister.Topic) -> None:
        """Appends a message, and notes it when it is acknowledged."""
        acked = self.acked.setdefault(topic.name, [])
        payload = b"%s:%d:" % (topic.name.encode(), len(acked)) + os.urandom(MESSAGE_BYTES)
        topic.wait(topic.append(payload), timeout=_PATIENCE_SECONDS)
        acked.append(payload)

    def put_patiently(self, topic: ister.Topic) -> None:
        """As `put`, by a producer that comes again when it is refused."""
        acked = self.acked.setdefault(topic.name, [])
        payload = b"%s:%d:" % (topic.name.encode(), len(acked)) + os.urandom(MESSAGE_BYTES)
        offset = _patiently(lambda: topic.append(payload))
        _patiently(lambda: topic.wait(offset))
        acked.append(payload)

    def put_until_full(self, log: Log, topic: ister.Topic) -> CapacityError:
        try:
            for _ in range(2 * SIZE_KIB * 1024 // MESSAGE_BYTES):
                self.put(topic)
                log.room.disk.measure()  # not after a while: a tmpfs fills in no time
        except CapacityError as error:
            return error
        raise AssertionError("the disk took more than it has")

    def heal(self, topic: ister.Topic) -> float:
        """How long it takes until a message is acknowledged again."""
        started = time.monotonic()
        offset = _patiently(lambda: topic.append(b"after"))
        _patiently(lambda: topic.wait(offset))
        return time.monotonic() - started

    def check(self, log: Log) -> None:
        for name, acked in self.acked.items():
            found = [m.payload for m in log.topic(name).read() if m.payload != b"after"]
            # What was accepted and not acknowledged may be there, once, where it was refused.
            assert [one for one in found if one in set(acked)] == acked


def _patiently(call):
    """What a call returns when it is not refused any more for lack of room, or of a lease."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return call()
        except (CapacityError, UnavailableError):
            assert time.monotonic() < deadline, "it does not heal"
            time.sleep(0.02)


@pytest.fixture
def site():
    skip_if(why_no_tmpfs())
    with mounted_tmpfs(size_kib=SIZE_KIB) as where:
        yield Site(where)


def free(where: Path) -> int:
    found = os.statvfs(where)
    return found.f_bavail * found.f_frsize


def reserve_bytes(where: Path) -> int:
    return (where / "wal" / RESERVE_NAME).stat().st_blocks * 512


@pytest.mark.nightly
@pytest.mark.parametrize("rotate", [MIB, 512 * MIB], ids=["many files", "one file"])
@pytest.mark.parametrize(
    "disk", [{}, {"min_free": 0}], ids=["to the watermark", "to the last byte"]
)
def test_disk_that_an_outage_has_filled_heals_when_the_bucket_is_back(site, disk, rotate):
    """Goal: a full disk with metadata on it heals within a minute of the bucket's return.

    Method: the bucket is silent while a producer fills a tmpfs of 64 MiB, up to the watermark or to
    the last byte; then it answers, and nobody does anything.
    """
    with site.open(disk=disk, rotate_max_bytes=rotate) as log:
        topic = log.topic(NAME, create=True)
        site.bucket.is_silent = True
        assert reserve_bytes(site.where) == MIB
        refused = site.put_until_full(log, topic)
        print(f"{len(site.acked[NAME])} messages, {free(site.where)} bytes free: {refused}")
        if not disk:
            assert "appends stop below 3.2 MiB" in str(refused)
            assert "appends resume when" in refused.hint
            assert topic.state is TopicState.OPEN
        assert len(site.acked[NAME]) * MESSAGE_BYTES > 40 * MIB
        site.bucket.is_silent = False
        seconds = site.heal(topic)
        print(f"healed after {seconds:.1f} s")
        assert seconds < HEAL_SECONDS_MAX
        eventually(lambda: reserve_bytes(site.where) == MIB, "the reserve is taken again")
        # It goes on: what is uploaded makes room for more.
        for _ in range(300):
            site.put_patiently(topic)
        site.check(log)
    with site.open(disk=disk, rotate_max_bytes=rotate) as log:
        site.check(log)


@pytest.mark.nightly
@pytest.mark.parametrize("leave", [0, 8192], ids=["not a byte", "two pages"])
def test_disk_that_somebody_else_has_filled_heals_when_the_bucket_is_back(site, leave):
    """Goal: not a byte of room, taken by another program at once, is healed by what the log itself
    can free, although the other one keeps what it has.

    Method: two topics with 20 MiB and the bucket silent; a file that takes the rest of the disk.
    Then the bucket answers. The file stays.
    """
    with site.open() as log:
        topics = [log.topic(name, create=True) for name in (NAME, "/fault/t1")]
        site.bucket.is_silent = True
        for _ in range(100):
            for topic in topics:
                site.put(topic)
        fill(site.ballast, leave=leave)
        eventually(log.room.disk.is_low, "the watermark is noticed")
        for topic in topics:
            with pytest.raises(CapacityError, match="are free on the disk"):
                topic.append(b"refused")
        site.check(log)
        site.bucket.is_silent = False
        seconds = max(site.heal(topic) for topic in topics)
        print(f"healed after {seconds:.1f} s, the reserve is {log.room.disk.reserve_bytes} bytes")
        assert seconds < HEAL_SECONDS_MAX
        assert log.metrics.snapshot()["disk.reserve_used_total"] >= (leave == 0)
        site.check(log)
    with site.open() as log:
        site.check(log)


@pytest.mark.nightly
def test_appends_go_on_when_somebody_else_gives_room_back(site):
    """Goal: a log that has nothing to free goes on by itself when there is room.

    Method: everything is in the bucket and trimmed, another program fills the disk and removes its
    file again.
    """
    with site.open() as log:
        topic = log.topic(NAME, create=True)
        site.put(topic)
        fill(site.ballast)
        eventually(log.room.disk.is_low, "the watermark is noticed")
        with pytest.raises(CapacityError):
            topic.append(b"refused")
        # Longer than the lease: it is renewed on a full disk.
        ends = time.monotonic() + 10.0
        while time.monotonic() < ends:
            with pytest.raises(CapacityError):
                topic.append(b"refused")
            time.sleep(0.1)
        site.ballast.unlink()
        assert site.heal(topic) < 5.0
        site.check(log)


def test_log_is_opened_on_a_full_disk_and_heals(site):
    """Goal: a process that begins on a full disk, with SQLite beside the log, heals it.

    Method: a log with much that the bucket does not have is closed, another program fills the disk
    up to the last byte, and the log is opened again.
    """
    with site.open() as log:
        topic = log.topic(NAME, create=True)
        site.bucket.is_silent = True
        for _ in range(200):
            site.put(topic)
    fill(site.ballast)
    with site.open() as log:
        topic = log.topic(NAME)
        with pytest.raises(CapacityError):
            topic.append(b"refused")
        site.check(log)
        site.bucket.is_silent = False
        seconds = site.heal(topic)
        print(f"healed after {seconds:.1f} s")
        assert seconds < HEAL_SECONDS_MAX
        site.check(log)


def test_consumers_go_on_where_a_disk_without_a_bucket_is_full(site):
    """Cursors are on the full disk: what consumers have read is all that can make room."""

    name = "/default/t0"

    async def consume():
        settings = {"storage": {"wal": {"dir": str(site.where / "wal")}}}
        async with a_broker(site.where, settings, mode="local_only") as (_, _, listening):
            address = f"http://127.0.0.1:{listening.grpc}"
            async with AsyncClient(address) as client:
                async with client.producer(name, create=True) as producer:
                    await producer.send(b"kept")
                    await producer.flush()
                fill(site.ballast)
                async with client.consumer(
                    name, "late", start="earliest", timeout=_PATIENCE_SECONDS
                ) as consumer:
                    message = await consumer.receive(timeout=_PATIENCE_SECONDS)
                    consumer.ack(message)
                    await consumer.flush()
            assert reserve_bytes(site.where) == 0
            return message.payload

    assert run(consume()) == b"kept"
