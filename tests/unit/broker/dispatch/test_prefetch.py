"""How much is read to deliver: each byte once, and for a redelivery what it takes.

The log has files in memory and caches one message, so that everything that is not held is read from
them. What counts are the log's own counters of bytes read, as `benchmarks broker` uses them.
"""

from ister.broker.dispatch import prefetch as module
from ister.broker.dispatch.frame_sizes import FrameSizes
from ister.broker.dispatch.outbox import OUTBOX_MESSAGES
from ister.topic.message import stored_body
from tests.support.broker import eventually
from tests.support.cases import each
from tests.support.dispatch import Consumers, counted_log

SIZE = 500
ENCODED = SIZE + 100
AMPLIFICATION = 2.0


@each("kind", ["exclusive", "failover", "shared", "key_shared"])
async def test_a_backlog_is_read_once(kind, monkeypatch):
    """Larger than what may be held, so that reading has to pause."""
    monkeypatch.setattr(module, "_HELD_BYTES_MAX", 400_000)

    async with counted_log() as place:
        place.fill_keys(1500, size=4000)
        dispatch = place.open(kind, window=300)
        consumers = Consumers(dispatch, [1] if kind in ("exclusive", "failover") else [1, 2, 3])
        await consumers.take(lambda: dispatch.delivery.cursor == 1500)
        assert place.bytes_read / consumers.bytes < AMPLIFICATION
        assert len(consumers.received) == 1500


@each("kept", [0, module._KEPT_BYTES_MAX])
@each("kind", ["exclusive", "failover", "shared", "key_shared"])
async def test_what_is_sent_again_after_a_reconnect_is_read_together(kind, kept, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES_MAX", kept)

    async with counted_log() as place:
        place.fill_keys(4000, size=SIZE, keys=1000)
        dispatch = place.open(kind, window=1000)
        total = 0
        for turn in range(3):
            consumers = Consumers(dispatch, [1])
            await consumers.take(
                lambda c=consumers: len(c.received) == 1000, answer=lambda *_: None
            )
            assert sorted(consumers.offsets) == list(range(1000)), turn
            total += consumers.bytes
            consumers.leave()
        assert place.bytes_read / total < AMPLIFICATION


@each("step", [1, 10, 97])
@each("kept", [0, module._KEPT_BYTES_MAX])
async def test_refused_messages_are_read_alone_or_together_and_nothing_else(
    step, kept, monkeypatch
):
    """Each message that is read again costs no more than itself and as much again."""
    monkeypatch.setattr(module, "_KEPT_BYTES_MAX", kept)

    async with counted_log() as place:
        place.fill_keys(3000, size=SIZE)
        dispatch = place.open("shared", window=1000)
        consumers = Consumers(dispatch, [1, 2])
        await consumers.take(
            lambda: dispatch.delivery.cursor == 3000,
            answer=lambda offset, attempt: attempt > 1 or offset % step != 0,
        )
        again = [offset for _, offset, attempt in consumers.received if attempt == 2]
        assert sorted(again) == list(range(0, 3000, step))
        once = 3000 * ENCODED
        assert place.bytes_read < once * 1.1 + AMPLIFICATION * len(again) * ENCODED + 300_000


async def test_a_consumer_that_takes_little_and_leaves_has_little_read_for_it():
    async with counted_log() as place:
        place.fill_keys(8000, size=SIZE)
        dispatch = place.open("exclusive", window=4000)
        consumers = Consumers(dispatch, [1])
        await eventually(lambda: not dispatch.prefetcher.wanted.is_set())
        assert place.bytes_read < 400_000
        consumers.leave()


async def test_a_message_in_an_object_is_fetched_alone():
    """Of an object only the frames that are due are fetched, neighbours with one request."""

    async with counted_log(is_tiered=True) as place:
        count = 3000
        place.fill_bucket(count, size=SIZE)
        dispatch = place.open("shared", window=2 * count)
        consumers = Consumers(dispatch, [1])
        await consumers.take(lambda: len(consumers.received) == count, answer=lambda *_: None)
        dispatch.prefetcher.release()
        size, requests = "cloud_reader.bytes_read_total", "cloud_reader.range_requests_total"
        before = place.count(size), place.count(requests)
        refused = range(5, 2300, 500)
        for offset in refused:
            dispatch.nack(offset, delay_ms=None, reason="again")
        await consumers.take(lambda: len(consumers.received) == count + len(refused))
        assert place.count(size) - before[0] < AMPLIFICATION * len(refused) * ENCODED
        assert place.count(requests) - before[1] <= len(refused)
        # Neighbours come with one request.
        before = place.count(requests)
        for offset in range(1010, 1110):
            dispatch.nack(offset, delay_ms=None, reason="again")
        await consumers.take(lambda: len(consumers.received) == count + len(refused) + 100)
        assert place.count(requests) - before <= 3


async def test_what_nobody_takes_is_let_go_and_comes_all_the_same(monkeypatch):
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.1)

    async with counted_log() as place:
        place.fill_keys(500, size=SIZE)
        dispatch = place.open("exclusive", window=200)
        consumers = Consumers(dispatch, [1])
        await eventually(lambda: dispatch.delivery.stats().pending > 0)
        await eventually(lambda: dispatch.prefetcher.held_bytes == 0)
        await consumers.take(lambda: dispatch.delivery.cursor == 500)
        assert consumers.offsets == list(range(500))
        assert place.bytes_read / consumers.bytes < AMPLIFICATION


async def test_reading_again_survives_sizes_that_are_not_known():
    """The sizes are a hint: without them, and with other ones, the same messages come."""

    async with counted_log() as place:
        place.fill_keys(1000, size=SIZE)
        dispatch = place.open("shared", window=1000)
        consumers = Consumers(dispatch, [1])
        await consumers.take(lambda: len(consumers.received) == 1000, answer=lambda *_: None)
        for spoil in (
            dispatch.prefetcher._sizes.clear,
            lambda: dispatch.prefetcher._sizes.record(0, [77] * 1000),
        ):
            dispatch.prefetcher.release()
            spoil()
            found = [await dispatch.prefetcher.message(offset) for offset in (3, 700, 12, 701)]
            assert [m.offset for m in found] == [3, 700, 12, 701]
            assert found[1].payload.startswith(b"700")


def test_sizes_are_known_from_block_to_block_and_forgotten_below_the_cursor():
    sizes = FrameSizes()
    sizes.record(4000, range(100, 300))
    assert sizes.of(4000) == 116
    assert sizes.of(4199) == 315
    assert sizes.of(4200) == sizes.of(3999) == 0
    assert sizes.span(4090, 4100) == sum(16 + size for size in range(190, 200))
    assert sizes.span(4190, 4201) is None
    assert sizes.span(3999, 4001) is None
    assert sizes.span(17, 17) == 0
    for first in range(0, 100_000, 4096):
        sizes.record(first, [10])
    sizes.forget_below(90_000)
    assert sizes.of(4000) == 0
    assert sizes.of(20 * 4096) == 26
    assert len(sizes) <= 6 * 4096


@each("how", ["does not read", "has left with its filter"])
async def test_a_consumer_of_keys_that_stands_still_stops_nobody_else(how):
    """Ten times the usual bound goes past it; its own messages come in order when it comes back."""

    async with counted_log() as place:
        place.fill_keys(12_000, size=100, keys=40)
        dispatch = place.open("key_shared", window=10)
        slow = Consumers(dispatch, [1], filters=["k?"])
        fast = Consumers(dispatch, [2, 3], filters=["k1?", "k2?", "k3?"])
        if how == "has left with its filter":
            slow.leave()
        others = {offset for offset in range(12_000) if offset % 40 >= 10}
        await fast.take(lambda: others <= set(fast.offsets))
        assert dispatch.delivery.cursor == 0
        assert len(fast.received) == len(others)
        assert dispatch.prefetcher.held_bytes <= module._HELD_BYTES_MAX
        if how == "has left with its filter":
            slow = Consumers(dispatch, [1], filters=["k?"])
        await slow.take(lambda: dispatch.delivery.cursor == 12_000)
        for key in range(10):
            own = [offset for offset in slow.offsets if offset % 40 == key]
            assert own == list(range(key, 12_000, 40))
        assert place.bytes_read / (slow.bytes + fast.bytes) < AMPLIFICATION


@each("size", [1000, 3000, 140_000])
async def test_a_shared_consumer_goes_on_beside_one_whose_stream_stands_still(size):
    """What waits for that one may be all that is held in memory."""

    async with counted_log() as place:
        place.fill_keys(400, size=size)
        dispatch = place.open("shared", window=1000)
        still = dispatch.attach(2, ())
        consumers = Consumers(dispatch, [1])
        left = 400 - OUTBOX_MESSAGES
        await consumers.take(lambda: len(consumers.received) >= left)
        consumers.leave()
        dispatch.detach(still)


async def test_messages_that_were_never_taken_are_due_once():
    """Of consumers that come and go before they take their messages nothing is left."""

    async with counted_log() as place:
        place.fill_keys(64, size=SIZE)
        dispatch = place.open("shared", window=1000)
        for _ in range(6):
            outbox = dispatch.attach(1, ())
            await eventually(lambda: dispatch.delivery.stats().in_flight == 64)
            dispatch.prefetcher.release()
            dispatch.detach(outbox)
        consumers = Consumers(dispatch, [1])
        await consumers.take(lambda: dispatch.delivery.cursor == 64)
        assert dispatch.prefetcher._due == []
        assert dispatch.prefetcher.held_bytes == dispatch.prefetcher._unheld_bytes == 0
        consumers.leave()


async def test_what_was_held_for_filters_of_before_is_let_go():
    async with counted_log() as place:
        place.fill_keys(300, size=SIZE, keys=3)
        dispatch = place.open("key_shared", window=1000)
        outbox = dispatch.attach(1, ("k0",))
        await eventually(lambda: dispatch.delivery.next_offset == 300)
        held = dispatch.prefetcher.held_bytes
        assert held > 0
        dispatch.detach(outbox)
        consumers = Consumers(dispatch, [1], ("k1",))
        assert dispatch.prefetcher.held_bytes == 0
        consumers.leave()


async def test_messages_that_wait_for_an_answer_do_not_keep_their_chunks():
    """Goal: one message of each chunk that is not answered holds that message, not the chunk."""

    async with counted_log() as place:
        place.fill_keys(400, size=1000, keys=1)
        dispatch = place.open("shared", window=1000)
        consumers = Consumers(dispatch, [1])
        await consumers.take(
            lambda: len(consumers.received) == 400,
            answer=lambda offset, _: True if offset % 50 else None,
        )
        kept = dispatch.prefetcher.kept
        assert list(kept) == list(range(0, 400, 50))
        assert {len(stored_body(one)[0]) for one in kept.values()} <= {*range(1000, 1100)}


async def test_messages_that_wait_for_their_key_do_not_keep_their_chunks():
    async with counted_log() as place:
        place.fill_keys(400, size=1000, keys=50)
        dispatch = place.open("key_shared", window=1000)
        consumers = Consumers(dispatch, [1])
        await consumers.take(
            lambda: len(consumers.received) == 1 + 49 * 8,
            answer=lambda offset, _: True if offset % 50 else None,
        )
        held = dispatch.prefetcher.held
        assert list(held) == list(range(50, 400, 50))
        assert {len(stored_body(one)[0]) for one in held.values()} <= {*range(1000, 1100)}


@each("is_held", [True, False])
async def test_what_leaves_at_once_is_bounded_by_what_was_written_before(is_held):
    """Goal: a consumer that takes nothing gets little; later streams get more at a time."""

    async with counted_log() as place:
        place.fill_keys(600, size=4000, keys=1)
        dispatch = place.open("exclusive", window=1000)
        outbox = dispatch.attach(1, ())
        sizes = []
        while sum(sizes) < 600:
            items = await outbox.take()
            count = len(items)
            if not is_held:
                dispatch.prefetcher.release()
            while items:
                messages = await dispatch.next_messages(outbox, items)
                sizes.append(len(messages))
                assert place.budget.used >= outbox.memory.size >= 2 * 4000 * len(messages)
                outbox.memory.written()
                assert outbox.memory.size == 0
            dispatch.written(outbox, count)
        assert sizes[0] <= 17
        assert not is_held or max(sizes) > 50
        dispatch.detach(outbox)
