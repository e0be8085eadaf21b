"""The append buffer: frames one by one and many at once, in one order, with one count of bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ister.base.limits import APPEND_CHUNK_BYTES
from ister.base.model import Codec
from ister.format.frame import scan_frames
from ister.format.frame_encoder import FrameEncoder
from ister.format.message import BodyEncoder
from ister.wal.buffer import AppendBuffer, Chunk, VolatileBuffer
from tests.support.builders import frames

TOPIC = "/a/b"
ENCODER = FrameEncoder(topic_name=TOPIC, codec=Codec.BINCODE2)
BODIES = BodyEncoder(Codec.BINCODE2)
HEAD = BODIES.head(0, 0, TOPIC, "")


def tail_of(producer_name=""):
    return BODIES.tail(producer_name, "", {}, schema_id=None, schema_version=None, routing_key=None)


class Attention:
    """Counts how often somebody was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1


def a_buffer(kind=AppendBuffer, *, next_offset=0, bytes_max=1 << 20, on_sealed=lambda chunk: None):
    attention = Attention()
    buffer = kind(
        next_offset=next_offset,
        bytes_max=bytes_max,
        on_attention=attention,
        on_sealed=on_sealed,
        encoder=ENCODER,
    )
    buffer.attention_at = 1 << 60
    return buffer, attention


def test_frames_that_come_at_once_are_a_chunk():
    buffer, _ = a_buffer(next_offset=7)
    data = frames(7, [b"a", b"bb", b"ccc"])
    buffer.push_frames([(data, 3, 55)])
    assert (buffer.next, buffer.appended_bytes, buffer.pending_bytes) == (10, len(data), len(data))
    (chunk,) = buffer.take()
    assert (chunk.first_offset, chunk.end_offset) == (7, 10)
    assert (chunk.size_bytes, chunk.publish_time_max) == (len(data), 55)
    assert chunk.data() is data, "it is not copied"


def test_somebody_is_called_once_the_bytes_are_reached():
    buffer, attention = a_buffer()
    data = frames(0, [b"a", b"b"])
    buffer.attention_at = len(data) + 1
    buffer.push_frames([(data, 2, 0)])
    assert attention.calls == 0
    buffer.push_frames([(frames(2, [b"c"]), 1, 0)])
    assert attention.calls == 1


def test_whoever_is_called_sees_the_frames():
    seen = []
    buffer = AppendBuffer(
        next_offset=0,
        bytes_max=1 << 20,
        on_attention=lambda: seen.append(buffer.take()),
        on_sealed=lambda chunk: None,
        encoder=ENCODER,
    )
    buffer.push_frames([(frames(0, [b"a", b"b"]), 2, 0)])
    assert [chunk.end_offset for chunk in seen[0]] == [2]
    assert buffer.take() == []


def test_bytes_stay_pending_until_they_are_written():
    buffer, _ = a_buffer(bytes_max=100)
    data = frames(0, [b"x" * 84])
    buffer.push_frames([(data, 1, 0)])
    assert not buffer.has_room(1)
    buffer.take()
    assert buffer.pending_bytes == len(data) == 100
    assert not buffer.has_room(1)
    buffer.mark_written(len(data))
    assert buffer.pending_bytes == 0
    assert buffer.has_room(100)
    assert buffer.has_room(10_000)


def test_dropped_frames_are_gone():
    buffer, _ = a_buffer()
    buffer.push_frames([(frames(0, [b"a"]), 1, 0)])
    buffer.discard()
    assert (buffer.take(), buffer.pending_bytes, buffer.next) == ([], 0, 1)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["frames", "bodies", "messages"]),
            st.lists(
                st.tuples(st.binary(min_size=1, max_size=20), st.integers(0, 99)),
                min_size=1,
                max_size=5,
            ),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_chunks_are_the_frames_in_order_whichever_way_they_came(steps):
    first = 240  # a few before offsets take two bytes more
    buffer, _ = a_buffer(next_offset=first)
    expected, found, times = b"", b"", []
    offset = first
    suffixes = [tail_of(), tail_of("p")]
    for kind, items, takes in steps:
        bodies = [body for body, _ in items]
        if kind == "frames":
            buffer.push_frames([(frames(offset, bodies), len(bodies), max(t for _, t in items))])
        elif kind == "messages":
            for number, (payload, time) in enumerate(items, offset):
                suffix = suffixes[time % 2]
                assert buffer.push_message(payload, time, suffix) == number
                bodies[number - offset] = BODIES.body(HEAD, number, payload, time, suffix)
        else:
            for number, (body, time) in enumerate(items, offset):
                buffer.push(number, body, time)
        expected += frames(offset, bodies)
        offset += len(bodies)
        if takes:
            for chunk in buffer.take():
                found += chunk.data()
                times.append(chunk.publish_time_max)
    chunks = buffer.take()
    for chunk in chunks:
        found += chunk.data()
        times.append(chunk.publish_time_max)
    assert found == expected
    assert (buffer.next, buffer.appended_bytes) == (offset, len(expected))
    assert max(times, default=0) == max((t for _, items, _ in steps for _, t in items), default=0)
    scan = scan_frames(found, expected_offset=first)
    assert len(scan.starts) == offset - first


def test_log_in_memory_passes_chunks_on_and_keeps_none():
    sealed = []
    buffer, _ = a_buffer(VolatileBuffer, next_offset=5, bytes_max=1, on_sealed=sealed.append)
    data = frames(5, [b"a", b"b"])
    buffer.push_frames([(data, 2, 9)])
    buffer.push_message(b"c", 9, tail_of())
    assert (buffer.next, buffer.pending_bytes) == (8, 0)
    assert buffer.has_room(1 << 30)
    buffer.seal()
    assert (buffer.pending_bytes, buffer.take()) == (0, [])
    assert [(c.first_offset, c.end_offset) for c in sealed] == [(5, 7), (7, 8)]
    assert sealed[0].data() == data


def test_each_chunk_is_passed_on_once_and_in_order():
    sealed = []
    buffer, _ = a_buffer(bytes_max=1 << 30, on_sealed=sealed.append)
    suffix = tail_of()
    buffer.push_message(b"a", 1, suffix)
    buffer.push(1, b"b", 1)
    buffer.push_frames([(frames(2, [b"c"]), 1, 1)])
    buffer.push_message(b"x" * APPEND_CHUNK_BYTES, 1, suffix)
    buffer.seal_if_full()
    buffer.push_message(b"e", 1, suffix)
    assert [(c.first_offset, c.end_offset) for c in sealed] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert buffer.sealed_end == 4
    buffer.seal()
    buffer.seal()
    assert sealed == buffer.take()
    assert buffer.sealed_end == 5
    assert not buffer.is_changing


def test_frames_are_joined_by_two_threads_at_once():
    class Overtaken(Chunk):
        """Another thread joins the frames as soon as this one has seen that nobody did."""

        is_overtaken = False

        @property
        def _data(self):
            found = self.joined
            if found is None and not self.is_overtaken:
                self.is_overtaken = True
                assert self.data() == b"ab"
            return found

        @_data.setter
        def _data(self, data):
            self.joined = data

    chunk = Overtaken(0, 2, 2, 2, 0, [b"a", b"b"])
    assert chunk.data() == b"ab"
    assert chunk.data() == b"ab"
