"""How far an upload's range goes: within bytes and time, by the index, and never over damage."""

from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ister.errors import CorruptDataError, InvariantError, OffsetOutOfRangeError
from ister.format.frame import encode_frame
from ister.wal.reader import WalReader
from tests.support.clock import ManualClock
from tests.support.machine import ROOT, Calls, Machine

PATH = f"{ROOT}/default/orders"
EVER = 1 << 50


def reader_of(topic, *, chunk_bytes=64 * 1024):
    return WalReader(topic.wal, chunk_bytes=chunk_bytes, metrics=topic._metrics, clock=topic._clock)


def plan(topic, start, end, *, bytes_max=EVER, span_ms_max=EVER, **options):
    reader = reader_of(topic, **options)
    try:
        return reader.plan(start, end, bytes_max=bytes_max, span_ms_max=span_ms_max)
    finally:
        reader.close()


def frame_sizes(topic):
    """The size of every frame, by its offset."""
    reader = reader_of(topic)
    sizes = []
    while len(sizes) < topic.wal.synced:
        batch = reader.fetch(len(sizes), topic.wal.synced, bytes_max=1 << 20)
        ends = [*batch.starts[1:], batch.end]
        sizes += [end - start for start, end in zip(batch.starts, ends, strict=True)]
    reader.close()
    return sizes


def expected(sizes, times, start, end, *, bytes_max=EVER, span_ms_max=EVER):
    """The same by counting."""
    at, total = start, 0
    while at < end:
        total += sizes[at]
        if at > start and (total > bytes_max or times[at] - times[start] > span_ms_max):
            break
        at += 1
    return at


def filled(machine, sizes, times=None, **settings):
    """A topic whose messages arrive at `times`: whole seconds, in milliseconds, ascending."""
    clock = ManualClock(now_ms=0)
    topic = machine.topic(clock=clock, **settings)
    for number, size in enumerate(sizes):
        if times:
            clock.advance(times[number] / 1000 - clock.monotonic())
        # Whatever producers say about time.
        topic.append(b"x" * size, publish_time=number * 7919 % 100_000_000)
        if number % 10 == 9 or (times and times[number + 1 : number + 2] != times[number:][:1]):
            topic.flush()  # files end between writes
    topic.flush()
    return topic


def test_what_another_process_wrote_is_told_apart_by_file(machine):
    fs = machine.fs
    fs.now_ms = lambda: 0
    clock = ManualClock(now_ms=0)
    topic = machine.topic(clock=clock, rotate_max_bytes=4096)
    for at in (0, 1000, 9000):
        fs.now_ms = lambda at=at: at
        topic.append(b"x" * 5000)
        topic.flush()
    machine.kill()
    topic = machine.reopened(clock=clock, rotate_max_bytes=4096)
    clock.advance(9)
    topic.append(b"y")
    topic.flush()
    assert plan(topic, 0, 4, span_ms_max=1000) == 2
    assert plan(topic, 0, 4, span_ms_max=8999) == 2
    assert plan(topic, 0, 4, span_ms_max=9000) == 4
    assert plan(topic, 2, 4, span_ms_max=0) == 4
    assert reader_of(topic).arrived_ms(0, 2) == 1000
    assert reader_of(topic).arrived_ms(0, 4) == 9000


@pytest.mark.parametrize("chunk_kib", [64, 256, 4096])
def test_range_over_several_files_and_index_blocks_is_the_counted_one(machine, chunk_kib):
    sizes = [(7919 * number) % 60_000 for number in range(400)]
    times = [1000 + number // 3 * 1000 for number in range(400)]
    topic = filled(machine, sizes, times, rotate_max_bytes=3 << 20)
    assert len(topic.wal.files) >= 3
    real = frame_sizes(topic)
    for start in (0, 1, 99, 250, 399):
        for bytes_max in (1, 70_000, 300_000, 1 << 20, 5 << 20, EVER):
            for span in (0, 3000, 50_000, EVER):
                limits = {"bytes_max": bytes_max, "span_ms_max": span}
                found = plan(topic, start, 400, chunk_bytes=chunk_kib << 10, **limits)
                assert found == expected(real, times, start, 400, **limits), (start, limits)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3)), min_size=1, max_size=40),
    bytes_max=st.integers(1, 20_000),
    span_ms_max=st.integers(0, 20_000),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_range_is_the_counted_one(shapes, bytes_max, span_ms_max, data):
    with Machine() as machine:
        times = [1000 * time for time in accumulate(pause for _, pause in shapes)]
        topic = filled(machine, [size for size, _ in shapes], times, rotate_max_bytes=4096)
        real = frame_sizes(topic)
        start = data.draw(st.integers(0, len(shapes) - 1))
        end = data.draw(st.integers(start + 1, len(shapes)))
        limits = {"bytes_max": bytes_max, "span_ms_max": span_ms_max}
        assert plan(topic, start, end, **limits) == expected(real, times, start, end, **limits)


def test_long_range_is_planned_by_the_index_alone(machine):
    topic = machine.topic()
    topic.append_many([b"x" * 1000] * 20_000)
    topic.flush()
    machine.fs.before = calls = Calls()
    assert plan(topic, 0, 20_000) == 20_000
    # 20 MB in chunks of 64 KiB would be over three hundred reads.
    assert 0 < calls.count("read", ".log") < 40


def test_plan_of_nothing_is_refused(machine):
    topic = filled(machine, [10] * 5)
    with pytest.raises(InvariantError):
        plan(topic, 3, 3)


def test_plan_from_what_was_trimmed_is_out_of_range(machine):
    topic = filled(machine, [1000] * 50, rotate_max_bytes=4096)
    topic.wal.trim(topic.wal.files[3].first_offset)
    with pytest.raises(OffsetOutOfRangeError):
        plan(topic, 0, 50)
    assert plan(topic, topic.earliest, 50) == 50


def test_plan_at_a_damaged_message_is_an_error(machine):
    topic = filled(machine, [100] * 50)
    starts = machine.frame_starts(f"{PATH}/wal.log")
    machine.overwrite(f"{PATH}/wal.log", starts[20] + 30, b"?")
    with pytest.raises(CorruptDataError) as refused:
        plan(topic, 20, 50)
    assert refused.value.offset == 20


def test_message_that_tells_no_time_stops_nothing(machine):
    topic = filled(machine, [100] * 10)
    starts = [*machine.frame_starts(f"{PATH}/wal.log")]
    size = starts[6] - starts[5]
    machine.overwrite(f"{PATH}/wal.log", starts[5], encode_frame(5, b"\xff" * (size - 16)))
    assert plan(topic, 0, 10, span_ms_max=0) == 10


def test_place_is_where_the_last_fetch_ended(machine):
    topic = filled(machine, [1000] * 50, rotate_max_bytes=4096)
    reader = reader_of(topic)
    last = topic.wal.files[2]
    reader.fetch(last.first_offset, last.first_offset + 1, bytes_max=1)
    starts = machine.frame_starts(topic.wal.directory.log_path(last.seq))
    assert reader.place[0] == last.seq
    assert reader.place[1] in starts[1:]
    reader.close()
