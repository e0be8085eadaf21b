"""Handles and threads: idle topics hold none, and many topics share a few."""

import threading

import pytest

from ister.base.limits import IDLE_FILE_SECONDS
from tests.support.machine import Calls, ManualClock, eventually


def test_idle_topic_holds_no_open_file(machine):
    clock = ManualClock()
    topic = machine.topic(clock=clock)
    topic.wait(topic.append(b"a"))
    assert topic.wal.committer.has_open_file
    clock.advance(IDLE_FILE_SECONDS + 1)
    topic.wal.committer.on_timer(topic.wal.committer._timer_at)
    eventually(lambda: not topic.wal.committer.has_open_file)
    eventually(lambda: machine.fs.open_files == 0)
    topic.wait(topic.append(b"b"))
    assert topic.watermarks.synced == 2


def test_opened_topic_without_appends_holds_no_file(machine):
    topic = machine.topic()
    topic.wait(topic.append(b"a"))
    machine.kill()
    machine.reopened()
    assert machine.fs.open_files == 0


@pytest.mark.parametrize("ack", ["synced", "written"])
def test_open_files_never_exceed_their_limit(machine, ack):
    log = machine.open(max_open_files=4, writer_threads=1)
    most = 0
    for number in range(40):
        topic = log.topic(f"/default/t{number}", create=True, ack=ack)
        topic.wait(topic.append(b"a"))
        most = max(most, log.metrics.snapshot()["wal.open_files"])
    assert most <= 4 + 2


def test_thousands_of_topics_cost_no_thread_and_no_file_each(machine):
    """Goal: 2,000 topics, each appended to, run on the threads of one log."""
    log = machine.open(writer_threads=3)
    topics = [log.topic(f"/default/t{number}", create=True) for number in range(2000)]
    assert machine.fs.open_files == 0
    for topic in topics[::20]:
        topic.append(b"a")
    eventually(lambda: all(topic.watermarks.written for topic in topics[::20]))
    assert log.metrics.snapshot()["wal.topics"] == 2000
    assert len(log.topics()) == 2000
    names = {t.name for t in threading.enumerate() if t.name.startswith("ister-")}
    # The one that loads the compiled loops is the process's.
    assert len(names - {"ister-kernels"}) == 3 * 3 + 1


def test_closed_log_leaves_no_file_open(machine):
    log = machine.open()
    machine.fs.before = Calls()
    for number in range(10):
        topic = log.topic(f"/default/t{number}", create=True)
        topic.append(b"a")
        next(topic.read())
    log.close()
    assert machine.fs.open_files == 0
