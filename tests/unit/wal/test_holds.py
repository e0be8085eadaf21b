"""Appends that are kept back for a while, and the watermark of what is in the bucket."""

import asyncio

import pytest

from ister.base.model import AckLevel, TopicState
from ister.errors import (
    CapacityError,
    ClosedError,
    InvariantError,
    UnavailableError,
    WaitTimeoutError,
)
from tests.support.machine import Task, eventually, numbered, payloads, waiting


def reason(text="not now"):
    return lambda: CapacityError(text)


# -- holds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True], ids=["append", "append_many"])
def test_hold_that_does_not_wait_refuses_with_its_reason(machine, many):
    topic = machine.topic()
    topic.wal.gate.hold("lease", lambda: UnavailableError("the lease"), waits=False)
    with pytest.raises(UnavailableError, match="the lease"):
        topic.append_many([b"x"]) if many else topic.append(b"x")
    assert topic.watermarks.next == 0
    topic.wal.gate.unhold("lease")
    assert topic.append(b"x") == 0


@pytest.mark.parametrize("many", [False, True], ids=["append", "append_many"])
def test_hold_that_waits_keeps_appends_until_it_ends(machine, many):
    topic = machine.topic()
    topic.wal.gate.hold("lag", reason(), waits=True)
    task = Task(topic.append_many, [b"x"]) if many else Task(topic.append, b"x")
    eventually(lambda: len(topic.wal.gate.waiting) == 1)
    assert topic.watermarks.next == 0
    topic.wal.gate.unhold("lag")
    assert task.result() in (0, range(1))


def test_hold_that_waits_refuses_where_the_policy_is_to_refuse(machine):
    topic = machine.topic(buffer_full="refuse")
    topic.wal.gate.hold("lag", reason("too far behind"), waits=True)
    with pytest.raises(CapacityError, match="too far behind"):
        topic.append(b"x")


def test_holds_of_two_names_end_apart(machine):
    topic = machine.topic()
    topic.wal.gate.hold("lag", reason("lag"), waits=False)
    topic.wal.gate.hold("lease", reason("lease"), waits=False)
    topic.wal.gate.unhold("lag")
    with pytest.raises(CapacityError, match="lease"):
        topic.append(b"x")
    topic.wal.gate.unhold("nothing of that name")
    with pytest.raises(CapacityError, match="lease"):
        topic.append(b"x")
    topic.wal.gate.unhold("lease")
    assert topic.append(b"x") == 0


def test_hold_that_refuses_is_not_hidden_by_one_that_waits(machine):
    topic = machine.topic()
    topic.wal.gate.hold("lag", reason("lag"), waits=True)
    topic.wal.gate.hold("fenced", reason("fenced"), waits=False)
    task = Task(topic.append, b"x")
    with pytest.raises(CapacityError, match="fenced"):
        task.result()


def test_hold_does_not_keep_what_was_accepted_from_becoming_durable(machine):
    topic = machine.topic()
    offset = topic.append(b"x")
    topic.wal.gate.hold("lag", reason(), waits=True)
    topic.wait(offset, "synced")
    assert payloads(topic.read()) == [b"x"]


def test_close_ends_the_wait_of_a_held_append(machine):
    topic = machine.topic()
    topic.wal.gate.hold("lag", reason(), waits=True)
    task = Task(topic.append, b"x")
    eventually(lambda: len(topic.wal.gate.waiting) == 1)
    topic.close()
    assert isinstance(task.error(), ClosedError)


def held(topic, **hold):
    """A thread whose append is kept back, and a message before it that nobody waits for."""
    topic.append(b"before")
    topic.wal.gate.hold("lag", reason(), waits=True, **hold)
    task = Task(topic.append, b"x")
    eventually(lambda: len(topic.wal.gate.waiting) == 1)
    return task


def test_held_append_makes_nobody_commit(machine):
    topic = machine.topic()
    task = held(topic)
    topic.flush()
    commits = []
    commit = topic.wal.committer.commit
    topic.wal.committer.commit = lambda **how: (commits.append(how), commit(**how))
    Task(topic.wal.committer.run).result()
    assert not topic.wal.committer._is_scheduled
    assert commits == []
    topic.wal.gate.unhold("lag")
    assert task.result() == 1


def test_held_append_does_not_keep_trim_and_other_topics_waiting(machine):
    log = machine.open(rotate_max_bytes=4096)
    topic, other = (log.topic(f"/default/{name}", create=True) for name in ("a", "b"))
    for payload in numbered(30, size=1000):
        topic.wait(topic.append(payload))
    task = held(topic)
    Task(topic.wal.committer.run)
    assert Task(topic.wal.trim, 20).result() > 0
    for payload in numbered(200):
        Task(other.wait, other.append(payload)).result()
    assert task.is_running
    topic.wal.gate.unhold("lag")
    assert task.result() == 31


def test_what_is_in_the_buffer_is_written_while_appends_are_held(machine):
    topic = machine.topic(fsync_interval_ms=1)
    task = held(topic)
    eventually(lambda: topic.watermarks.synced == 1)
    topic.wal.gate.unhold("lag")
    assert task.result() == 1


def test_hold_outlives_a_full_disk(machine):
    topic = machine.topic(fsync_interval_ms=1)
    topic.append(b"x")
    topic.flush()
    topic.wal.gate.hold("lease", reason("lease"), waits=False)
    topic.wal.gate.unhold("lease")
    machine.fs.write_limit_bytes = machine.used_bytes()
    offset = topic.append(b"y" * 5000)
    with pytest.raises(CapacityError):
        topic.wait(offset, "synced")
    assert topic.state is TopicState.STALLED
    topic.wal.gate.hold("lease", reason("lease"), waits=False)
    machine.fs.write_limit_bytes = None
    eventually(lambda: topic.state is TopicState.OPEN)
    with pytest.raises(CapacityError, match="lease"):
        topic.append(b"z")
    topic.wal.gate.unhold("lease")
    topic.append(b"z")


def test_end_of_a_hold_does_not_open_a_log_that_is_closed(machine):
    topic = machine.topic()
    topic.wal.gate.hold("lag", reason(), waits=False)
    topic.close()
    topic.wal.gate.unhold("lag")
    with pytest.raises(ClosedError):
        topic.append(b"x")


# -- tiered -------------------------------------------------------------------------------------


@pytest.fixture
def topic(machine):
    topic = machine.topic()
    topic.append_many(numbered(10))
    topic.flush()
    return topic


def test_tiered_only_ever_rises_up_to_what_is_synced(topic):
    assert topic.wal.tiered is None
    assert topic.wal.levels.watermark(AckLevel.TIERED) == 0
    for told, known in ((0, 0), (4, 4), (2, 4), (4, 4), (10, 10)):
        topic.wal.levels.advance_tiered(told)
        assert topic.wal.tiered == topic.watermarks.tiered == known
    with pytest.raises(InvariantError):
        topic.wal.levels.advance_tiered(11)


def test_waiter_is_told_when_its_message_is_tiered_and_not_before(topic):
    tasks = [Task(topic.wal.wait, offset, AckLevel.TIERED) for offset in (0, 4, 9)]
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 3)
    topic.wal.levels.advance_tiered(5)
    for task in tasks[:2]:
        task.result()
    assert tasks[2].is_running
    topic.wal.levels.advance_tiered(10)
    tasks[2].result()


def test_wait_for_tiered_syncs_first_and_asks_for_an_upload(machine):
    topic = machine.topic(fsync_interval_ms=3_600_000)
    asked = []

    def upload():
        asked.append(topic.wal.synced)

    topic.wal._listener.on_tier_wanted = upload
    offset = topic.append(b"x")
    task = Task(topic.wal.wait, offset, AckLevel.TIERED)
    eventually(lambda: asked)
    assert asked == [1]
    topic.wal.levels.advance_tiered(1)
    task.result()


def test_wait_for_tiered_gives_up_after_its_time(topic):
    with pytest.raises(WaitTimeoutError, match="tiered"):
        topic.wal.wait(3, AckLevel.TIERED, 0.02)
    topic.wal.levels.advance_tiered(10)
    topic.wal.wait(3, AckLevel.TIERED, 0.02)


def test_close_ends_the_wait_for_tiered(topic):
    task = Task(topic.wal.wait, 3, AckLevel.TIERED)
    eventually(lambda: waiting(topic, AckLevel.TIERED) == 1)
    topic.close()
    assert isinstance(task.error(), ClosedError)


def test_synced_bytes_are_counted_over_rotations(machine):
    topic = machine.topic(rotate_max_bytes=4096)
    assert topic.wal.committer.synced_bytes_total == 0
    for payload in numbered(30, size=1000):
        topic.wait(topic.append(payload))
    directory = topic.wal.directory
    total = sum(len(machine.read(directory.log_path(file.seq))) for file in topic.wal.files)
    assert len(topic.wal.files) > 3
    assert topic.wal.committer.synced_bytes_total == total


def test_async_wait_for_tiered_is_told(topic):
    async def scenario():
        waits = asyncio.create_task(topic.aio._passed(4, AckLevel.TIERED, None))
        await asyncio.sleep(0)
        await asyncio.to_thread(topic.wal.levels.advance_tiered, 5)
        await asyncio.wait_for(waits, 60)

    asyncio.run(scenario())
