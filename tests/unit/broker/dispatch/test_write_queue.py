"""Which streams may write: within the budget, in order, and however many clients do not read."""

import asyncio

import pytest

from ister.base.limits import MIB
from ister.broker.dispatch import write_queue as module
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.dispatch.write_queue import STALLED, StreamMemory
from tests.support.broker import eventually

BUDGET = 16 * MIB
LARGE = 2 * MIB
"""Of one message; with gRPC's copy of it, three fit into three quarters of the budget."""


class Stream:
    """A stream that writes messages of one size, one after the other, to a client that may read."""

    def __init__(self, budget, consumer, *, size=LARGE, count=1, reads=True, is_proven=False):
        self.memory = StreamMemory(budget.writes, consumer)
        self.memory.written_bytes = 16 * MIB if is_proven else 0
        self.is_writing = False
        self.done = 0
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()
        self._size, self._count = size, count
        self.task = asyncio.ensure_future(self._run())

    async def _run(self):
        try:
            for _ in range(self._count):
                await self.memory.reserve(self._size)
                self.memory.begin(self._size)
                self.is_writing = True
                await self._reads.wait()
                await asyncio.sleep(0)
                self.is_writing = False
                self.memory.written()
                self.done += 1
        finally:
            self.memory.set(0)

    def read(self):
        self._reads.set()


@pytest.fixture
def patient(monkeypatch):
    """No stream is ended."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 3600.0)


async def ended(*streams):
    for stream in streams:
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


async def test_writes_that_do_not_fit_wait_in_order(patient):
    budget = Budget(BUDGET)
    streams = [Stream(budget, n, reads=False, is_proven=True) for n in range(5)]
    await eventually(lambda: sum(one.is_writing for one in streams) == 3)
    assert [one.is_writing for one in streams] == [True] * 3 + [False] * 2
    assert budget.used == budget.writes.used == 3 * 2 * LARGE
    streams[1].read()
    await eventually(lambda: streams[3].is_writing)
    assert not streams[4].is_writing
    await ended(streams[0], streams[4])
    for one in streams[2:4]:
        one.read()
    await eventually(lambda: streams[2].done == streams[3].done == 1)
    assert budget.used == 0


async def test_a_message_larger_than_the_budget_goes_alone(patient):
    budget = Budget(BUDGET)
    streams = [Stream(budget, n, size=BUDGET) for n in range(3)]
    await eventually(lambda: all(one.done for one in streams))
    assert budget.used == 0


async def test_clients_that_do_not_read_leave_half_to_those_that_do(patient):
    budget = Budget(BUDGET)
    stalled = [Stream(budget, n, reads=False) for n in range(50)]
    await eventually(lambda: any(one.is_writing for one in stalled))
    assert budget.writes.used <= BUDGET * 3 // 8
    readers = [Stream(budget, 100 + n, count=20, is_proven=True) for n in range(5)]
    await eventually(lambda: all(one.done == 20 for one in readers))
    await ended(*stalled)
    assert budget.used == 0


@pytest.mark.parametrize("others", [10, 200])
async def test_a_new_reader_is_served_behind_clients_that_never_read(monkeypatch, others):
    """Goal: it waits for a few of them, however many came before it."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)

    budget = Budget(BUDGET)
    stalled = [Stream(budget, n, reads=False) for n in range(others)]
    reader = Stream(budget, 1000, count=3)
    await eventually(lambda: reader.done == 3)
    assert 1 <= budget.writes.ended == sum(one.memory.is_ended for one in stalled) <= 7
    for one in stalled:
        if one.memory.is_ended:
            with pytest.raises(asyncio.CancelledError, match=STALLED):
                await one.task
    assert not reader.memory.is_ended
    await ended(*stalled)


async def test_whoever_came_first_has_every_other_turn(monkeypatch):
    """Goal: newcomers, however many, do not keep an older reader waiting.

    Method: there is always one behind it that came later, none of which reads.
    """
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)

    budget = Budget(BUDGET)
    first = Stream(budget, 0, reads=False)
    await eventually(lambda: first.is_writing)
    reader, crowd = Stream(budget, 1), [first]

    def is_served():
        crowd.append(Stream(budget, 1000 + len(crowd), reads=False))
        return reader.done

    await eventually(is_served)
    assert budget.writes.ended <= 3
    await ended(*crowd)


async def test_proven_readers_wait_for_no_newcomer(patient):
    """Not even for one whose turn it is, and that does not fit."""
    budget = Budget(BUDGET)
    unproven = Stream(budget, 1, size=LARGE // 8, is_proven=False)
    await eventually(lambda: unproven.done == 1)
    writing = [Stream(budget, n, reads=False, is_proven=True) for n in (2, 3)]
    await eventually(lambda: all(one.is_writing for one in writing))
    proven = Stream(budget, 4, size=LARGE * 2, is_proven=True)
    newcomer = Stream(budget, 5, size=LARGE * 3)
    await eventually(lambda: len(budget.writes._waiting) == 2)
    budget.writes._is_turn_of_last = True
    writing[0].read()
    await eventually(lambda: proven.done == 1)
    await ended(newcomer, *writing)


async def test_a_consumer_whose_stream_was_ended_comes_in_its_turn(monkeypatch):
    """Goal: clients that do not read, and connect again at once, keep no newcomer waiting.

    Method: two that were ended before come again behind the newcomer.
    """
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)

    budget = Budget(BUDGET)
    crowd = [Stream(budget, n, reads=False) for n in range(20)]
    await eventually(lambda: budget.writes.ended >= 2)
    before = [n for n, one in enumerate(crowd) if one.memory.is_ended]
    reader = Stream(budget, 1000, count=3)
    crowd += [Stream(budget, n, reads=False) for n in before]
    await eventually(lambda: reader.done == 3)
    assert budget.writes.ended <= len(before) + 7
    await ended(*crowd)


@pytest.mark.parametrize("is_proven", [False, True])
async def test_the_patience_is_shared_by_those_who_wait(monkeypatch, is_proven):
    """Goal: behind clients that do not read, a new reader does not wait for each in full.

    Method: some of them have read before, and the limits are an hour; for one alone, and for many.
    """
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr(module, "_PROVEN_PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)

    budget = Budget(BUDGET)
    stalled = [Stream(budget, n, reads=False, is_proven=is_proven) for n in range(10)]
    await eventually(lambda: any(one.is_writing for one in stalled))
    monkeypatch.setattr(module, "_CROWD", 1e-5)  # one that waits is a large crowd
    reader = Stream(budget, 100, count=3)
    await eventually(lambda: reader.done == 3)
    assert budget.writes.ended >= 1
    await ended(*stalled)


async def test_the_patience_with_a_consumer_grows_until_it_has_read(monkeypatch):
    """A client with a slow network gets its message, however many others wait."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_BYTES_PER_SECOND", 1 << 40)

    budget = Budget(BUDGET)
    crowd = [Stream(budget, n, reads=False, size=BUDGET) for n in range(100, 104)]
    for attempt in range(20):
        slow = Stream(budget, 1, reads=False, size=BUDGET)
        await eventually(lambda slow=slow: slow.is_writing)
        timer = asyncio.get_running_loop().call_later(0.5, slow.read)
        crowd.append(Stream(budget, 200 + attempt, reads=False, size=BUDGET))
        await asyncio.wait({slow.task})
        timer.cancel()
        if slow.done:
            break
    assert slow.done == 1
    assert attempt > 0
    await ended(*crowd)


async def test_a_closed_stream_waits_no_longer(patient):
    budget = Budget(BUDGET)
    first = Stream(budget, 1, reads=False, size=BUDGET)
    second = Stream(budget, 2, size=BUDGET)
    third = Stream(budget, 3, size=BUDGET)
    await eventually(lambda: first.is_writing)
    second.memory.close()
    await eventually(lambda: second.done == 1)
    assert third.done == 0
    first.read()
    await eventually(lambda: third.done == 1)
    assert budget.used == 0
