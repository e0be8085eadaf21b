"""The ring of recent messages: what it holds, what it lets go, where it begins anew."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.model import Codec
from ister.format.frame import FRAME_HEADER_SIZE
from ister.format.message import encode_message
from ister.topic.cache import Cache
from ister.wal.buffer import Chunk
from tests.support.builders import a_message, frames
from tests.support.cases import each


def a_cache(*, capacity=8, bytes_max=1 << 30, next_offset=0):
    return Cache(
        capacity=capacity, bytes_max=bytes_max, next_offset=next_offset, codec=Codec.BINCODE2
    )


def a_body(offset, payload=b"x"):
    return encode_message(a_message(topic_offset=offset, payload=payload), Codec.BINCODE2)


def fill(cache, count, payload=b"x"):
    """Appends the next messages; their bodies."""
    bodies = [a_body(offset, payload) for offset in range(cache.end, cache.end + count)]
    for body in bodies:
        cache.append(a_chunk(cache.end, [body]))
    return bodies


def a_chunk(first, bodies):
    """A sealed chunk of these messages."""
    data = frames(first, bodies)
    return Chunk(first, first + len(bodies), len(data), 0, 0, [data])


def test_bodies_end_with_the_bytes_and_one_comes_always():
    cache = a_cache()
    bodies = fill(cache, 5, payload=b"x" * 100)
    size = len(bodies[0])
    assert cache.bodies(0, 5, bytes_max=1) == bodies[:1]
    assert cache.bodies(0, 5, bytes_max=2 * size) == bodies[:2]
    assert cache.bodies(0, 5, bytes_max=2 * size + 1) == bodies[:2]
    assert cache.bodies(3, 5, bytes_max=0) == bodies[3:4]


def test_what_was_skipped_counts_as_having_left():
    cache = a_cache(next_offset=100)
    fill(cache, 5)
    cache.skip_to(120)
    assert cache.evictions == 20


def fill_run(cache, count, payload=b"x"):
    """Appends the next messages as one run of frames; their bodies."""
    first = cache.end
    bodies = [a_body(offset, payload) for offset in range(first, first + count)]
    cache.append(a_chunk(first, bodies))
    return bodies


def test_run_counts_with_its_bytes_until_its_last_message_has_left():
    cache = a_cache(capacity=4)
    run = sum(len(body) + FRAME_HEADER_SIZE for body in fill_run(cache, 3))
    assert cache.size_bytes == run
    size = len(fill(cache, 3)[0]) + FRAME_HEADER_SIZE
    assert (cache.start, cache.size_bytes) == (2, run + 3 * size)
    fill(cache, 1)
    assert (cache.start, cache.size_bytes) == (3, 4 * size)


@each("came", [False, True])
def test_interrupted_append_leaves_what_was_accepted(came):
    """Goal: a chunk that was sealed is here after the repair, whether it had come here or not."""
    cache = a_cache(capacity=16)
    bodies = fill(cache, 4) + fill_run(cache, 2)
    sealed = [a_body(offset) for offset in range(6, 9)]
    chunks = [a_chunk(4, bodies[4:]), a_chunk(6, sealed)]
    if came:
        cache.append(chunks[1])
    for _ in range(2):
        cache.mend(9, chunks)
        assert (cache.start, cache.end) == (0, 9)
        assert cache.bodies(0, 9, bytes_max=1 << 20) == bodies + sealed
        assert cache.size_bytes == sum(len(body) + FRAME_HEADER_SIZE for body in bodies + sealed)


def test_repair_without_the_chunk_begins_anew():
    cache = a_cache(capacity=16)
    fill(cache, 4)
    cache.mend(9, [])
    assert (cache.start, cache.end, cache.size_bytes) == (9, 9, 0)


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 60)),
        st.tuples(st.just("run"), st.integers(1, 9)),
        st.tuples(st.just("skip"), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(_ACTIONS, st.integers(1, 6), st.integers(1, 400))
def test_cache_is_a_suffix_of_what_was_appended_within_its_bounds(actions, capacity, bytes_max):
    """Goal: bodies and messages agree, are the newest ones, and never lie before a skip."""
    cache = a_cache(capacity=capacity, bytes_max=bytes_max)
    known, sent = {}, {}
    floor = 0
    for what, number in actions:
        first, payload = cache.end, b"%d" % cache.end + b"y" * number
        if what == "append":
            known[first] = a_body(first, payload)
            cache.append(a_chunk(first, [known[first]]))
        elif what == "run":
            known.update(enumerate(fill_run(cache, number, payload), first))
        else:
            floor = first + number
            cache.skip_to(floor)
            assert (cache.start, cache.end, len(cache)) == (floor, floor, 0)
        sent.update(dict.fromkeys(range(first, cache.end), payload))
        assert cache.start >= floor
        assert len(cache) <= capacity
        held = cache.bodies(cache.start, cache.end, bytes_max=1 << 30)
        assert held == [known[offset] for offset in range(cache.start, cache.end)]
        assert cache.bodies(cache.start, cache.end + 9, bytes_max=1) == held[:1]
        assert cache.bodies(cache.start + 1, cache.end - 1, bytes_max=1 << 30) == held[1:-1]
        assert cache.bodies(cache.end, cache.end + 9, bytes_max=1 << 30) == []
        if cache.start > 0:
            assert cache.bodies(cache.start - 1, cache.end, bytes_max=1 << 30) == []
            assert cache.read(cache.start - 1, cache.end, bytes_max=1 << 30) == []
        assert cache.size_bytes >= sum(map(len, held))
        size = cache.size_bytes
        cache.mend(cache.end, [])  # counts all that it holds
        assert cache.size_bytes == size
        assert cache.size_bytes <= bytes_max or len(held) == 1
        read = cache.read(cache.start, cache.end, bytes_max=1 << 30)
        assert [(m.offset, m.payload) for m in read] == [
            (offset, sent[offset]) for offset in range(cache.start, cache.end)
        ]
        assert [message.size_bytes for message in read] == list(map(len, held))
