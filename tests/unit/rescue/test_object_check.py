"""What is wrong with an object, and with its descriptor: told apart, and told precisely."""

import errno
import random
from dataclasses import replace

import pytest

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import Codec, MessageId, StreamMessage
from ister.bucket.names import object_key, parse_object_id
from ister.errors import DiskError, UnavailableError
from ister.format.frame import encode_frame
from ister.format.message import encode_message
from ister.rescue.object_check import ObjectChecker, ObjectProblem
from ister.rescue.rebuild import describe_object
from tests.support.cases import case, each
from tests.support.memory_store import MemoryObjectStore
from tests.support.stores import NAME, merged, silent

PUBLISHED_MS = 1_700_000_000_000


class Bench:
    """One object of frames in a store, with its descriptor."""

    def __init__(self, *, start=100, count=40, size=50, codec=Codec.BINCODE2, times=None) -> None:
        self.store = MemoryObjectStore()
        self.start, self.end = start, start + count
        self.frames = [
            encode_frame(
                offset,
                encode_message(
                    StreamMessage(
                        payload=bytes([offset % 251]) * size,
                        producer_name="p",
                        publish_time=PUBLISHED_MS + offset if times is None else times[offset],
                        msg_id=MessageId(topic_name=str(NAME), topic_offset=offset),
                    ),
                    codec,
                ),
            )
            for offset in range(start, self.end)
        ]
        self.data = b"".join(self.frames)
        self.object_id = f"data-{start}-{self.end - 1}.dnb1"
        self.save(self.data)
        described = describe_object(
            self.store,
            NAME,
            self.object_id,
            parse_object_id(self.object_id),
            incarnation="i",
            created_at=7,
        )
        # An index with more than one entry.
        every = range(0, count, 10)
        self.described = replace(
            described,
            etag=None,
            offset_index=tuple((start + at, self.position(start + at)) for at in every),
            publish_time_index=tuple(
                max(
                    (
                        PUBLISHED_MS + offset if times is None else times[offset]
                        for offset in range(start, start + at)
                    ),
                    default=0,
                )
                for at in every
            )
            if described.publish_time_index
            else (),
        )

    def position(self, offset: int) -> int:
        return sum(map(len, self.frames[: offset - self.start]))

    def save(self, data: bytes) -> None:
        self.store.put(object_key(NAME, self.object_id), bytes(data))

    def check(self, described=None, *, chunk_bytes=1 << 20):
        checker = ObjectChecker(
            NAME,
            self.store,
            chunk_bytes=chunk_bytes,
            index_every_messages=10,
            ahead=None,
            clock=SystemClock(),
            metrics=Metrics(),
        )
        return checker.check(described or self.described)

    def damaged(self, *changes, **options):
        """Checks the object with bytes changed: (position, value)."""
        data = bytearray(self.data)
        for position, value in changes:
            data[position] = value
        self.save(data)
        return self.check(**options)


def spans(checked):
    return [(problem.kind, problem.start, problem.end) for problem in checked.problems]


def test_a_whole_object():
    for chunk_bytes in [64, 333, 1 << 20]:
        for codec in list(Codec):
            with case(chunk_bytes, codec):
                bench = Bench(codec=codec)
                checked = bench.check(chunk_bytes=chunk_bytes)
                assert checked.problems == ()
                assert (checked.bytes, checked.messages, checked.right) == (
                    len(bench.data),
                    40,
                    None,
                )
    assert Bench(count=3, size=5000).check(chunk_bytes=100).problems == ()


def test_a_flipped_bit_costs_one_message():
    for chunk_bytes in [200, 1 << 20]:
        with case(chunk_bytes):
            bench = Bench()
            position = bench.position(117)
            checked = bench.damaged((position + 30, 0), chunk_bytes=chunk_bytes)
            (problem,) = checked.problems
            assert problem == ObjectProblem(
                kind="damaged",
                reason=problem.reason,
                start=117,
                end=118,
                position=position,
                offset=117,
            )
            assert "crc mismatch" in problem.reason
            assert checked.messages == 39
            assert checked.right is None


@each("left, start", [(-1, 139), (-50, 139), (-200, 138), (20, 120), (0, 100)])
def test_a_truncated_object(left, start):
    """Cut by some bytes, at a frame, or to nothing."""
    bench = Bench()
    bench.save(bench.data[: left if left < 0 else bench.position(100 + left)])
    (problem,) = bench.check().problems
    assert (problem.kind, problem.start, problem.end) == ("truncated", start, 140)
    assert problem.position == bench.position(start)


def test_an_object_that_is_truncated_while_it_is_checked():
    for left in [0, 1, 500]:
        with case(left):
            bench = Bench()
            stat = bench.store.stat

            def stat_and_cut(key, stat=stat, bench=bench, left=left):
                info = stat(key)
                bench.save(bench.data[:left])
                return info

            bench.store.stat = stat_and_cut
            (problem,) = bench.check(chunk_bytes=333).problems
            assert (problem.kind, problem.end) == ("truncated", 140)
            assert problem.position <= left


def test_a_missing_object():
    bench = Bench()
    bench.store.delete(object_key(NAME, bench.object_id))
    assert spans(bench.check()) == [("missing", 100, 140)]


def test_an_object_on_a_bad_sector_is_damaged():
    """A finding, so that it can be repaired; other errors of the disk are none."""
    bench = Bench()

    def fail(number):
        def read(*arguments):
            raise DiskError("read failed", errno=number)

        bench.store.read = bench.store.view = read

    fail(errno.EIO)
    assert spans(bench.check()) == [("damaged", 100, 140)]
    fail(errno.EACCES)
    with pytest.raises(DiskError):
        bench.check()


def test_bytes_after_the_last_frame():
    bench = Bench()
    bench.save(bench.data + b"more")
    (problem,) = bench.check().problems
    assert (problem.kind, problem.position) == ("damaged", len(bench.data))


def test_a_wrong_field_is_the_descriptors_fault():
    for field, value in [
        ("size_bytes", 17),
        ("checksum", "crc32:00000000"),
        ("messages", 39),
        ("codec", Codec.BINCODE1),
        ("publish_time_min", 1),
        ("publish_time_max", 1),
        ("publish_time_index", (0, 1, 2, 3)),
        ("offset_index", ((100, 0), (110, 1))),
        ("offset_index", ((100, 0), (139, 10**9))),
        ("offset_index", ((50, 0),)),
        ("end", 139),
        ("end", 145),
    ]:
        with case(field, value):
            bench = Bench()
            checked = bench.check(replace(bench.described, **{field: value}))
            (problem,) = checked.problems
            assert problem.kind == "wrong_descriptor"
            assert (problem.start, problem.end) == (100, value if field == "end" else 140)
            assert field == "end" or checked.messages == 40
            assert checked.right == replace(bench.described, etag=checked.right.etag)


def test_a_descriptor_of_danubes_says_little_and_is_right():
    bench = Bench(codec=Codec.BINCODE1)
    little = replace(
        bench.described,
        codec=None,
        checksum=None,
        messages=0,
        publish_time_min=None,
        publish_time_max=None,
        publish_time_index=(),
    )
    assert bench.check(little).problems == ()


def test_times_that_no_calendar_has():
    times = dict.fromkeys(range(100, 140), PUBLISHED_MS)
    times[120] = 253_402_300_800_000
    bench = Bench(times=times)
    assert bench.described.publish_time_max == 253_402_300_800_000
    assert bench.check().problems == ()
    times[121] = 1 << 63
    bench = Bench(times=times)
    assert bench.described.publish_time_max is None
    assert bench.check().problems == ()


def test_a_body_that_is_no_message():
    bench = Bench()
    bench.frames[5] = encode_frame(105, b"\xff\xff\xff")
    bench.save(b"".join(bench.frames))
    (problem,) = bench.check().problems
    assert (problem.kind, problem.start, problem.end) == ("damaged", 105, 106)
    assert problem.position == bench.position(105)


def test_a_store_that_does_not_answer_is_no_finding():
    bench = Bench()
    bench.store.before = silent
    with pytest.raises(UnavailableError):
        bench.check()


@pytest.mark.parametrize("seed", range(30))
def test_random_damage_is_found_and_never_understated(seed):
    rng = random.Random(seed)
    bench = Bench(count=30, size=rng.choice((0, 20, 300)))
    data = bytearray(bench.data)
    hit = set()
    for _ in range(rng.randrange(1, 4)):
        position = rng.randrange(len(data))
        data[position] ^= rng.randrange(1, 256)
        hit.add(next(o for o in range(129, 99, -1) if bench.position(o) <= position))
    bench.save(data)
    checked = bench.check(chunk_bytes=rng.choice((64, 500, 1 << 20)))
    if bytes(data) == bench.data:
        return  # the same byte was flipped back
    found = {offset for item in checked.problems for offset in range(item.start, item.end)}
    changed = {
        offset
        for offset in hit
        if data[bench.position(offset) : bench.position(offset) + len(bench.frames[offset - 100])]
        != bench.frames[offset - 100]
    }
    assert changed <= found
    assert checked.messages == 30 - len(found)


# -- Parquet ------------------------------------------------------------------------------------


@pytest.fixture
def archive():
    """The same messages as an object in Parquet."""
    bench = Bench(count=400)
    bench.described = merged(bench.store, [bench.described], format="parquet")
    bench.object_id = bench.described.object_id
    bench.data = bench.store.read(object_key(NAME, bench.object_id), 0, 1 << 30)
    return bench


def test_a_whole_archive(archive):
    checked = archive.check()
    assert checked.problems == ()
    assert (checked.messages, checked.bytes) == (400, len(archive.data))


def test_a_damaged_row_group(archive):
    checked = archive.damaged((200, archive.data[200] ^ 1))
    (problem,) = checked.problems
    assert (problem.kind, problem.start, problem.end) == ("damaged", 100, 500)
    assert problem.position == 4
    assert checked.right is None


def test_a_truncated_archive(archive):
    archive.save(archive.data[:-40])
    assert spans(archive.check()) == [("truncated", 100, 500)]


def test_an_archive_that_is_truncated_while_it_is_checked(archive):
    read, reads = archive.store.read, []

    def read_and_cut(*arguments):
        reads.append(arguments)
        if len(reads) == 3:
            archive.save(archive.data[:100])
        return read(*arguments)

    archive.store.read = read_and_cut
    checked = archive.check()
    assert spans(checked) == [("truncated", 100, 500)]
    assert checked.right is None


@each("wrong", [{"checksum": "crc32:00000000", "messages": 3}, {"uncompressed_bytes": 1}])
def test_a_wrong_descriptor_of_an_archive(archive, wrong):
    assert archive.described.uncompressed_bytes > 0
    assert archive.check(replace(archive.described, uncompressed_bytes=None)).problems == ()
    checked = archive.check(replace(archive.described, **wrong))
    (problem,) = checked.problems
    assert problem.kind == "wrong_descriptor"
    assert all(field in problem.reason for field in wrong)
    assert checked.right == archive.described
