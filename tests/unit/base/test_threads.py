"""Background threads: an unexpected exception is recorded, and the work of others goes on."""

import logging
import threading

import pytest

import ister
from ister.base import threads
from ister.base.clock import SystemClock
from ister.base.model import TopicState
from ister.errors import ClosedError
from ister.topic.background import Background
from ister.wal.checkpointer import Checkpointer
from ister.wal.commit import Committer

WAIT_SECONDS = 60


def wait_for(condition):
    """Waits for a condition; the time is for a machine that hangs."""
    clock, gave_up = SystemClock(), threading.Event()
    deadline = clock.monotonic() + WAIT_SECONDS
    while not condition():
        assert clock.monotonic() < deadline, "it never came true"
        gave_up.wait(0.01)


def found():
    return {one.thread: (one.count, one.error, one.has_ended) for one in threads.failures()}


def test_a_guarded_loop_goes_on_and_each_failure_is_logged_and_counted(caplog):
    done = []
    with caplog.at_level(logging.ERROR, logger="ister"):
        for number in range(3):
            with threads.guard("ister-loop", topic="/default/a"):
                done.append(number)
                raise KeyError(number)
    assert done == [0, 1, 2]
    assert found() == {"ister-loop": (3, "KeyError: 2", False)}
    assert len(caplog.records) == 3
    assert caplog.records[0].topic == "/default/a"
    assert caplog.records[0].exc_info[0] is KeyError


def test_a_thread_that_ends_by_an_error_is_known_as_ended():
    thread = threads.start("ister-short", lambda: 1 / 0)
    thread.join()
    assert found() == {"ister-short": (1, "ZeroDivisionError: division by zero", True)}


def test_the_number_of_names_is_bounded():
    for number in range(200):
        threads.record(f"ister-{number}", ValueError())
    assert len(threads.failures()) == 64
    assert threads.failures()[-1].thread == "ister-199"


@pytest.mark.parametrize("where", ["run", "on_timer", "track_open_file"])
def test_a_commit_that_fails_unexpectedly_stops_that_topic_and_no_other(
    tmp_path, monkeypatch, where
):
    """Nobody waits for ever for a topic whose commits do not go on."""
    settings = {"mode": "local_only", "wal": {"dir": str(tmp_path), "writer_threads": 1}}
    with ister.open({"storage": settings}) as log:
        bad, good = log.topic("/default/bad", create=True), log.topic("/default/good", create=True)
        if where == "run":
            real = Checkpointer.due_at

            def due_at(self):
                if self is bad.wal._checkpointer:
                    raise ValueError("planted")
                return real(self)

            monkeypatch.setattr(Checkpointer, "due_at", due_at)
        elif where == "on_timer":
            real = Committer.on_timer

            def on_timer(self, when):
                if self is bad.wal.committer:
                    raise ValueError("planted")
                real(self, when)

            monkeypatch.setattr(Committer, "on_timer", on_timer)
        else:
            real = Committer.has_open_file

            def has_open_file(self):
                name = threading.current_thread().name
                if self is bad.wal.committer and name.startswith("ister-commit"):
                    raise ValueError("planted")
                return real.fget(self)

            monkeypatch.setattr(Committer, "has_open_file", property(has_open_file))
        bad.append(b"x")
        wait_for(lambda: bad.state is TopicState.FAILED)
        with pytest.raises(ClosedError, match="planted"):
            bad.append(b"y")
        for _ in range(3):
            good.wait(good.append(b"z"), timeout=WAIT_SECONDS)
        [(count, error, has_ended)] = found().values()
        assert (error, has_ended) == ("ValueError: planted", False)
        assert count >= 1
        monkeypatch.undo()
        again = log.topic("/default/bad")
        again.wait(again.append(b"z"))


def test_retention_that_fails_unexpectedly_is_recorded(tmp_path, monkeypatch):
    with ister.open(tmp_path) as log:
        log.topic("/default/a", create=True)
        monkeypatch.setattr(Background, "_retain", lambda *_: 1 / 0)
        log._background._retention_at = 0.0
        log._background._due.set()
        wait_for(lambda: "ister-retention" in found())


def test_health_tells_of_failed_threads_and_names_no_topic_to_strangers(tmp_path):
    from ister.broker.observe.health import BrokerHealth  # noqa: PLC0415

    check = BrokerHealth._check_threads(names=True)
    assert (check.state, check.words) == ("ok", "no background thread has failed")
    threads.record("ister-tender", KeyError("/default/secret"))
    check = BrokerHealth._check_threads(names=True)
    assert check.state == "attention"
    assert "ister-tender failed (1 error, latest 0 s ago: KeyError" in check.words
    assert "secret" not in BrokerHealth._check_threads(names=False).words
    threads.record("ister-timer", KeyError(), has_ended=True)
    assert BrokerHealth._check_threads(names=True).state == "bad"
