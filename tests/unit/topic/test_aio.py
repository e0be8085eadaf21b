"""The asyncio edge: the same promises, and no task disturbs another."""

import asyncio
import errno
import gc
import threading

import pytest

from ister.base.model import AckLevel
from ister.errors import (
    CapacityError,
    ClosedError,
    DiskError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    WaitTimeoutError,
)
from tests.support.machine import Calls, Gate, Task, numbered, payloads

SMALL = {"cache_capacity": 4, "rotate_max_bytes": 4096}


def _run(coroutine):
    """Runs a coroutine to its end, for a bounded time."""

    async def bounded():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


async def _until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def _waiting(topic, level=AckLevel.SYNCED):
    """How many tasks wait at a level."""
    return sum(
        len([future for _, _, future in hub._heap if not future.done()])
        for key, hub in topic.aio._hubs.items()
        if level in key
    )


@pytest.mark.parametrize("level", [None, "memory", "written", "synced"])
def test_wait_returns_once_the_level_is_reached(machine, level):
    topic = machine.topic()

    async def work():
        offset = topic.append(b"a")
        await topic.aio.wait(offset, level)

    _run(work())
    assert topic.watermarks.next == 1
    if level in (None, "synced"):
        assert topic.watermarks.synced == 1


@pytest.mark.parametrize(
    ("offset", "level", "error"),
    [
        (1, None, OffsetOutOfRangeError),
        (-1, None, OffsetOutOfRangeError),
        (0, "tiered", InvalidRequestError),
        (0, "never", InvalidRequestError),
    ],
)
def test_bad_wait_is_refused(machine, offset, level, error):
    topic = machine.topic()
    topic.append(b"a")
    with pytest.raises(error):
        _run(topic.aio.wait(offset, level))


def test_hundreds_of_tasks_wait_and_few_syncs_are_made(machine):
    topic = machine.topic()
    machine.fs.before = calls = Calls()

    async def work():
        async def one():
            await topic.aio.wait(topic.append(b"a"))

        await asyncio.gather(*(one() for _ in range(200)))

    _run(work())
    assert topic.watermarks.synced == 200
    assert calls.count("sync", ".log") < 50


def test_read_follows_and_ends(machine):
    topic = machine.topic(**SMALL)
    sent = numbered(60, size=300)
    topic.append_many(sent[:40])
    topic.flush()

    async def work():
        async def consume(start, end):
            return [m.payload async for m in topic.aio.read(start, follow=True, end=end)]

        tasks = [asyncio.create_task(consume(start, 60)) for start in (0, 10, 40)]
        await asyncio.sleep(0)
        for payload in sent[40:]:
            topic.append(payload)
            await asyncio.sleep(0)
        assert await asyncio.gather(*tasks) == [sent, sent[10:], sent[40:]]
        assert [m.payload async for m in topic.aio.read()] == sent
        assert [m.payload async for m in topic.aio.read("latest")] == []

    _run(work())
    assert not topic.readers


def test_timeout_of_a_read_ends_it_and_of_a_wait_raises(machine):
    topic = machine.topic()
    machine.fs.before = gate = Gate("sync")

    async def work():
        reader = topic.aio.reader()
        assert await reader.next_batch(timeout=0.01) == []
        offset = topic.append(b"a")
        with pytest.raises(WaitTimeoutError) as late:
            await topic.aio.wait(offset, timeout=0.05)
        assert late.value.offset == offset
        assert await reader.next_batch(timeout=0.01) == []
        gate.open()
        await topic.aio.wait(offset)
        assert payloads(await reader.next_batch(timeout=60)) == [b"a"]
        assert payloads([m async for m in topic.aio.read(follow=True, timeout=0.01)]) == [b"a"]
        reader.close()

    _run(work())


def test_cancelled_reader_leaves_the_others_alone(machine):
    """Goal: cancelling tasks that wait, the first and the last among them, wakes nobody else."""
    topic = machine.topic()

    async def work():
        readers = [topic.aio.reader() for _ in range(6)]
        tasks = [asyncio.create_task(reader.next_batch()) for reader in readers]
        await _until(lambda: _waiting(topic) == 6)
        for place in (0, 3, 5):
            tasks[place].cancel()
        await asyncio.gather(*tasks[::3], tasks[5], return_exceptions=True)
        assert not any(tasks[place].done() for place in (1, 2, 4))
        topic.append(b"a")
        for place in (1, 2, 4):
            assert payloads(await tasks[place]) == [b"a"]
        for reader in readers:
            assert reader.core.next_offset in (0, 1)
            reader.close()

    _run(work())


def test_cancelled_wait_leaves_the_message_and_the_other_waits(machine):
    topic = machine.topic()
    machine.fs.before = gate = Gate("sync")

    async def work():
        waits = [asyncio.create_task(topic.aio.wait(topic.append(b"a"))) for _ in range(3)]
        await _until(lambda: _waiting(topic) == 3)
        waits[0].cancel()
        await asyncio.gather(waits[0], return_exceptions=True)
        assert waits[0].cancelled()
        gate.open()
        await asyncio.gather(*waits[1:])

    _run(work())
    assert topic.watermarks.synced == 3


def test_failing_writer_reaches_every_task(machine):
    """Goal: 200 tasks that wait are all told, readers among them."""
    topic = machine.topic()
    machine.fs.before = gate = Gate(
        "sync",
        fail=lambda kind, path: (
            OSError(errno.EIO, "no") if kind == "sync" and path.endswith(".log") else None
        ),
    )

    async def work():
        waits = [asyncio.create_task(topic.aio.wait(topic.append(b"a"))) for _ in range(200)]
        readers = [asyncio.create_task(topic.aio.reader().next_batch()) for _ in range(5)]
        await _until(lambda: _waiting(topic) == 205)
        gate.open()
        results = await asyncio.gather(*waits, *readers, return_exceptions=True)
        assert all(isinstance(result, DiskError) for result in results)
        with pytest.raises(DiskError):
            await topic.aio.wait(0)

    _run(work())


@pytest.mark.parametrize("what", ["topic", "reader"])
def test_close_while_waiting_wakes_the_task(machine, what):
    topic = machine.topic()

    async def work():
        readers = [topic.aio.reader() for _ in range(3)]
        tasks = [asyncio.create_task(reader.next_batch()) for reader in readers]
        await _until(lambda: _waiting(topic) == 3)
        if what == "topic":
            await asyncio.to_thread(topic.close)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, ClosedError) for result in results)
            return
        readers[0].close()
        done, _ = await asyncio.wait(tasks, timeout=0.5)
        for task in tasks[1:]:
            task.cancel()
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(done) == 1, "the task of the closed reader still waits"
        assert isinstance(results[0], ClosedError)

    _run(work())


def test_loops_in_several_threads_share_a_topic(machine):
    topic = machine.topic()

    def consume():
        async def work():
            return [m.payload async for m in topic.aio.read(follow=True, end=30)]

        return _run(work())

    tasks = [Task(consume) for _ in range(4)]
    for payload in numbered(30):
        topic.append(payload)
    assert [task.result() for task in tasks] == [numbered(30)] * 4


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_read_given_up_while_a_file_is_read_skips_no_message(machine, how):
    """Goal: a call that did not return messages has not consumed them.

    Method: the file is held back until the timeout (or a cancellation) has ended the call.
    """
    topic = machine.topic(**SMALL)
    sent = numbered(30, size=300)
    topic.append_many(sent)
    topic.flush()
    gate = Gate("open_read")

    async def work():
        reader = topic.aio.reader()
        machine.fs.before = gate
        first = asyncio.create_task(reader.next_batch(timeout=0.05 if how == "timeout" else None))
        await asyncio.to_thread(gate.wait_reached)
        if how == "cancel":
            first.cancel()
        await asyncio.wait([first], timeout=0.5)
        gate.open()
        got = [] if first.cancelled() or first.exception() else payloads(await first)
        await _until(lambda: not _reading(machine))
        while batch := await reader.next_batch(timeout=0.2):
            got += payloads(batch)
        reader.close()
        return got

    assert _run(work()) == sent


def _reading(machine):
    """Whether a worker thread is still inside of a read."""
    return any(
        thread.name.startswith("asyncio_") and machine.fs.open_files > 1
        for thread in threading.enumerate()
    )


def test_polling_an_idle_topic_leaves_nothing_behind(machine):
    topic = machine.topic()

    async def work():
        reader = topic.aio.reader()
        for _ in range(200):
            assert await reader.next_batch(timeout=0.0001) == []
        reader.close()
        return sum(len(hub._heap) for hub in topic.aio._hubs.values())

    assert _run(work()) < 100


def test_loops_that_ended_are_forgotten(machine):
    topic = machine.topic()
    for _ in range(10):
        _run(topic.aio.wait(topic.append(b"a")))
    assert len(topic.aio._hubs) < 5


def test_a_read_that_was_left_behind_by_a_closed_reader_is_no_complaint(machine):
    """A consumer goes away while its read is in a worker thread: nobody has to hear of it."""
    topic = machine.topic(**SMALL)
    complaints = []

    async def work():
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        for number in range(50):
            topic.append(b"%d" % number)
        await topic.aio.flush()
        reader = topic.aio.reader("earliest")
        with reader.core._reading:  # the worker waits here
            task = asyncio.create_task(reader.next_batch())
            await _until(lambda: reader._left_behind is not None)
            left_behind = reader._left_behind
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            reader.close()
        await _until(left_behind.done)
        # Once nobody has it any more, the loop says so if nobody has looked at what it raised.
        reader._left_behind = None
        del left_behind, task
        gc.collect()

    _run(work())
    assert complaints == []


# -- appends that are kept back ---------------------------------------------------------------


def _lag():
    return CapacityError("too much waits for its upload", hint="it goes on later")


@pytest.mark.parametrize(
    ("append", "result"),
    [
        (lambda topic: topic.aio.append(b"x"), 0),
        (lambda topic: topic.aio.append_many([b"x", b"y"]), range(2)),
        (lambda topic: topic.aio.publish(b"x"), 0),
    ],
    ids=["append", "append_many", "publish"],
)
def test_held_append_leaves_the_loop_free_and_goes_on(machine, append, result):
    topic = machine.topic()
    topic.wal.gate.hold("lag", _lag, waits=True)

    async def work():
        task = asyncio.create_task(append(topic))
        for _ in range(100):  # the loop turns
            await asyncio.sleep(0)
        assert not task.done()
        assert topic.watermarks.next == 0
        await asyncio.to_thread(topic.wal.gate.unhold, "lag")
        assert await task == result

    _run(work())


def test_held_append_on_the_loop_itself_is_refused_and_says_what_waits(machine):
    topic = machine.topic()
    topic.wal.gate.hold("lag", _lag, waits=True)

    async def work():
        with pytest.raises(CapacityError, match="too much") as refused:
            topic.append(b"x")
        assert "await topic.aio.append" in refused.value.hint

    _run(work())
    assert topic.watermarks.next == 0


def test_cancelled_held_append_has_appended_nothing(machine):
    topic = machine.topic()
    topic.wal.gate.hold("lag", _lag, waits=True)

    async def work():
        cancelled, stays = (asyncio.create_task(topic.aio.append(b"%d" % n)) for n in range(2))
        await _until(lambda: len(topic.wal.gate.callbacks) == 2)
        cancelled.cancel()
        topic.wal.gate.unhold("lag")
        assert await stays == 0
        assert [m.payload async for m in topic.aio.read()] == [b"1"]

    _run(work())


def test_held_append_ends_with_its_topic(machine):
    topic = machine.topic()
    topic.wal.gate.hold("lag", _lag, waits=True)

    async def work():
        task = asyncio.create_task(topic.aio.append(b"x"))
        await _until(lambda: topic.wal.gate.callbacks)
        await asyncio.to_thread(topic.close)
        with pytest.raises(ClosedError):
            await task

    _run(work())


def test_full_buffer_leaves_the_loop_free(machine):
    """While a write is stuck, an append that finds the buffer full waits, and the loop turns."""
    topic = machine.topic(buffer_max_bytes=65536)
    machine.fs.before = gate = Gate("write")

    async def work():
        tasks = [asyncio.create_task(topic.aio.append(bytes(30_000))) for _ in range(6)]
        await _until(gate._reached.is_set)
        for _ in range(100):
            await asyncio.sleep(0)
        assert 0 < topic.watermarks.next < 6
        gate.open()
        assert sorted(await asyncio.gather(*tasks)) == list(range(6))

    _run(work())
