"""Parts of objects in chunks: where they are cut, what is fetched ahead, what is counted."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.metrics import Metrics
from ister.base.model import Codec
from ister.bucket.chunks import FirstRange, ObjectPart, ObjectsAhead, fetch_chunks
from ister.errors import UnavailableError
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.machine import PATIENCE_SECONDS
from tests.support.memory_store import MemoryObjectStore
from tests.support.stores import a_descriptor

KEY = "storage/topics/default/orders/objects/data-0-9.dnb1"


def a_part(position, end_position, boundaries=()):
    return ObjectPart(
        topic="/default/orders",
        object_id="data-0-9.dnb1",
        codec=Codec.BINCODE2,
        start=0,
        end=10,
        index_offset=0,
        position=position,
        end_position=end_position,
        boundaries=tuple(boundaries),
    )


class Bucket:
    """A store with one object, and what was fetched from it."""

    def __init__(self, data):
        self.store = MemoryObjectStore()
        self.store.put(KEY, data)
        self.metrics = Metrics()

    def chunks(self, part, *, chunk_bytes=64, ahead=None):
        return fetch_chunks(
            self.store,
            KEY,
            part,
            chunk_bytes=chunk_bytes,
            ahead=ahead,
            clock=ManualClock(),
            metrics=self.metrics,
        )

    def counted(self, name):
        return self.metrics.snapshot().get(f"cloud_reader.{name}", 0)

    @property
    def reads(self):
        return [(start, size) for _, start, size in self.store.reads]


@pytest.fixture
def ahead():
    with ThreadPoolExecutor(2, thread_name_prefix="test-ahead") as pool:
        yield pool


# -- objects that follow ------------------------------------------------------------------------


class Fetches:
    """Fetches that tests start and end."""

    def __init__(self):
        self.started = []

    def submit(self, fetch, key, start, size, object_bytes):
        future = Future()
        self.started.append((key, future))
        return future

    @property
    def keys(self):
        return "".join(key for key, _ in self.started)


def ranges(keys, size=10, *, is_all=True):
    return [FirstRange(key, 0, size, is_all, size) for key in keys]


def test_objects_ahead_are_bounded_in_number_and_bytes():
    fetches = Fetches()
    upcoming = ObjectsAhead(None, fetches, bytes_max=1000)
    upcoming.expect(ranges("abcdefghijkl"))
    upcoming.top_up()
    upcoming.top_up()
    assert fetches.keys == "abcdefgh"
    assert upcoming.held_bytes == 80
    assert upcoming.take(*ranges("a")) is fetches.started[0][1]
    upcoming.top_up()
    assert fetches.keys == "abcdefghi"
    large = ObjectsAhead(None, more := Fetches(), bytes_max=25)
    large.expect(ranges("abcd"))
    large.top_up()
    assert more.keys == "ab"
    assert large.held_bytes == 20


def test_objects_ahead_of_which_more_is_needed_come_alone():
    upcoming = ObjectsAhead(None, fetches := Fetches(), bytes_max=1000)
    upcoming.expect([*ranges("a"), *ranges("b", is_all=False), *ranges("c")])
    upcoming.top_up()
    assert fetches.keys == "ab"


def test_objects_ahead_that_are_passed_over_are_forgotten():
    upcoming = ObjectsAhead(None, fetches := Fetches(), bytes_max=1000)
    upcoming.expect(ranges("abcdefghijklm"))
    upcoming.top_up()
    assert upcoming.take(*ranges("x")) is None
    assert upcoming.take(*ranges("c")) is fetches.started[2][1]
    assert [future.cancelled() for _, future in fetches.started[:4]] == [True, True, False, False]
    assert upcoming.take(*ranges("k")) is None, "not begun yet"
    assert upcoming.held_bytes == 0
    upcoming.top_up()
    assert fetches.keys == "abcdefghlm"
    upcoming.clear()
    assert (upcoming.held_bytes, upcoming.is_idle) == (0, True)


def test_what_is_held_can_be_asked_for_while_another_thread_takes_a_range():
    """The broker's loop counts memory while a thread reads."""

    class Taken(FirstRange):
        @property
        def size(self):
            if upcoming is not None:
                upcoming.clear()  # as if the other thread had its turn here
            return 10

    upcoming = None
    ahead = ObjectsAhead(None, Fetches(), bytes_max=1000)
    ahead.expect([Taken(str(number), 0, 10, True, 10) for number in range(3)])
    ahead.top_up()
    upcoming = ahead
    assert ahead.held_bytes == 30
    assert ahead.held_bytes == 0


def test_an_old_failure_is_not_told():
    upcoming = ObjectsAhead(None, fetches := Fetches(), bytes_max=1000)
    upcoming.expect(ranges("ab"))
    upcoming.top_up()
    fetches.started[0][1].set_exception(UnavailableError("silent"))
    assert upcoming.take(*ranges("a")) is None
    assert upcoming.take(*ranges("b")) is not None


# -- which part ---------------------------------------------------------------------------------

INDEX = ((100, 0), (110, 1000), (120, 2000), (130, 3000))
DESCRIBED = a_descriptor(100, 140, size_bytes=4000, offset_index=INDEX)


@each(
    ("start", "end", "expected"),
    [
        pytest.param(0, 1000, (100, 140, 100, 0, 4000, (1000, 2000, 3000)), id="all"),
        pytest.param(100, 140, (100, 140, 100, 0, 4000, (1000, 2000, 3000)), id="exactly"),
        pytest.param(110, 120, (110, 120, 110, 1000, 2000, ()), id="between entries"),
        pytest.param(115, 116, (115, 116, 110, 1000, 2000, ()), id="inside a block"),
        pytest.param(109, 121, (109, 121, 100, 0, 3000, (1000, 2000)), id="around"),
        pytest.param(131, 200, (131, 140, 130, 3000, 4000, ()), id="the end"),
        pytest.param(50, 101, (100, 101, 100, 0, 1000, ()), id="the beginning"),
    ],
)
def test_part_is_what_the_index_tells_of_a_range(start, end, expected):
    part = ObjectPart.overlapping("/default/orders", DESCRIBED, start, end)
    assert part.object_id == DESCRIBED.object_id
    assert part.codec is Codec.BINCODE2
    found = (
        part.start,
        part.end,
        part.index_offset,
        part.position,
        part.end_position,
        part.boundaries,
    )
    assert found == expected


def test_part_of_an_object_without_an_index_is_read_from_its_beginning():
    described = a_descriptor(100, 140, size_bytes=4000, offset_index=(), codec=None)
    part = ObjectPart.overlapping("/default/orders", described, 120, 130)
    assert (part.index_offset, part.position, part.end_position) == (100, 0, 4000)
    assert part.boundaries == ()
    assert part.codec is None


@settings(deadline=None)
@given(
    st.lists(st.integers(101, 199), unique=True, max_size=8).map(sorted),
    st.integers(100, 199),
    st.integers(1, 100),
)
def test_part_covers_its_offsets_whatever_the_index(offsets, start, count):
    index = ((100, 0), *((offset, (offset - 100) * 7) for offset in offsets))
    described = a_descriptor(100, 200, size_bytes=700, offset_index=index)
    part = ObjectPart.overlapping("/default/orders", described, start, start + count)
    assert part.position <= (part.start - 100) * 7
    assert part.end_position >= (part.end - 100) * 7
    assert part.position == (part.index_offset - 100) * 7
    assert all(low < high for low, high in pairwise((part.position, *part.boundaries)))
    assert all(at < part.end_position for at in part.boundaries)


# -- which bytes --------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    size=st.integers(0, 500),
    bounds=st.tuples(st.integers(0, 500), st.integers(0, 500)).map(sorted),
    boundaries=st.lists(st.integers(0, 500), unique=True, max_size=12).map(sorted),
    chunk_bytes=st.integers(1, 200),
    is_ahead=st.booleans(),
)
def test_chunks_are_the_bytes_of_the_part_in_order(size, bounds, boundaries, chunk_bytes, is_ahead):
    """Goal: whatever the cuts, each byte comes once; and no chunk is larger than allowed."""
    begin, end = bounds
    end = min(end, size)
    data = bytes(number % 251 for number in range(size))
    bucket = Bucket(data)
    part = a_part(begin, end, [at for at in boundaries if begin < at < end])
    pool = ThreadPoolExecutor(1) if is_ahead else None
    try:
        chunks = list(bucket.chunks(part, chunk_bytes=chunk_bytes, ahead=pool))
    finally:
        if pool is not None:
            pool.shutdown()
    assert b"".join(chunks) == data[begin:end]
    assert all(0 < len(chunk) <= chunk_bytes for chunk in chunks)
    assert bucket.counted("bytes_read_total") == max(0, end - begin)
    assert bucket.counted("range_requests_total") == len(chunks)
    assert bucket.counted("objects_opened_total") == 1


def test_cuts_fall_on_index_entries():
    bucket = Bucket(bytes(1000))
    part = a_part(0, 1000, [90, 180, 270, 500, 900])
    list(bucket.chunks(part, chunk_bytes=200))
    # 270 to 470 has no entry, so that chunk is as large as it may be; then on to an entry again.
    assert bucket.reads == [
        (0, 180),
        (180, 90),
        (270, 200),
        (470, 30),
        (500, 200),
        (700, 200),
        (900, 100),
    ]


def test_one_chunk_is_fetched_ahead_and_no_more(ahead):
    bucket = Bucket(bytes(1000))
    chunks = bucket.chunks(a_part(0, 1000), chunk_bytes=100, ahead=ahead)
    for number in range(1, 4):
        next(chunks)
        ahead.submit(lambda: None).result()
        ahead.submit(lambda: None).result()
        assert number <= len(bucket.reads) <= number + 1
    chunks.close()
    assert len(bucket.reads) <= 4


def test_next_chunk_is_on_its_way_while_one_is_used(ahead):
    bucket = Bucket(bytes(1000))
    fetched = threading.Event()

    def note(kind, key):
        if kind == "read" and len(bucket.reads) == 2:
            fetched.set()

    bucket.store.after = note
    chunks = bucket.chunks(a_part(0, 1000), chunk_bytes=100, ahead=ahead)
    next(chunks)
    assert fetched.wait(PATIENCE_SECONDS), "nothing was fetched ahead"
    chunks.close()


def test_without_threads_nothing_is_fetched_ahead():
    bucket = Bucket(bytes(1000))
    chunks = bucket.chunks(a_part(0, 1000), chunk_bytes=100)
    next(chunks)
    assert bucket.reads == [(0, 100)]
    chunks.close()
    assert bucket.reads == [(0, 100)]


def test_nothing_is_fetched_before_the_first_chunk_is_wanted(ahead):
    bucket = Bucket(bytes(1000))
    chunks = bucket.chunks(a_part(0, 1000), ahead=ahead)
    chunks.close()
    assert bucket.reads == []


def test_part_of_nothing_has_no_chunks():
    bucket = Bucket(bytes(1000))
    assert list(bucket.chunks(a_part(500, 500))) == []
    assert list(bucket.chunks(a_part(500, 400))) == []


@pytest.mark.parametrize("with_ahead", [True, False])
def test_silent_store_raises_once_it_is_noticed(ahead, with_ahead):
    bucket = Bucket(bytes(1000))
    chunks = bucket.chunks(a_part(0, 1000), chunk_bytes=100, ahead=ahead if with_ahead else None)

    def silent(kind, key):
        if len(bucket.store.calls) > 4:
            raise UnavailableError("silent")

    bucket.store.before = silent
    found = []
    with pytest.raises(UnavailableError):
        found.extend(chunks)
    assert 0 < len(found) < 10


def test_object_that_is_shorter_than_it_says_gives_what_it_has():
    bucket = Bucket(bytes(250))
    chunks = list(bucket.chunks(a_part(0, 1000), chunk_bytes=100))
    assert [len(chunk) for chunk in chunks[:3]] == [100, 100, 50]
    assert not any(chunks[3:])
