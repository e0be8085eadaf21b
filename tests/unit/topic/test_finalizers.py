"""Logs that are dropped, finalizers that call a log wherever they run, and interpreter exit."""

import gc
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest

import ister
from ister.errors import ClosedError, DirectoryLockedError, InvalidRequestError, IsterError
from ister.metadata.sqlite import SqliteMetadata
from tests.support.cases import each
from tests.support.stores import Site
from tests.support.waiting import eventually

PATIENCE = 60.0


class Garbage:
    """Calls a function when it is collected."""

    def __init__(self, call):
        self._call = call
        self._cycle = self
        self.errors = []

    def __del__(self):
        try:
            self._call()
        except IsterError as error:
            self.errors.append(error)


def collect(call):
    """Has the garbage collector call a function here and now; returns its errors."""
    errors = Garbage(call).errors
    gc.collect()
    return errors


def in_thread(work):
    """Runs `work` in a thread that must end."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


# -- finalizers that wait -------------------------------------------------------------------


def test_finalizer_in_a_thread_that_commits_is_refused(tmp_path, monkeypatch):
    with ister.open(tmp_path) as log:
        topic = log.topic("/default/t", create=True)
        writer, errors = topic.wal.writer, []
        sync = writer.sync

        def collect_and_sync(position):
            monkeypatch.setattr(writer, "sync", sync)
            errors.extend(collect(lambda: topic.wait(topic.append(b"from __del__"))))
            sync(position)

        monkeypatch.setattr(writer, "sync", collect_and_sync)
        topic.wait(topic.append(b"x"), timeout=PATIENCE)
        assert [type(error) for error in errors] == [InvalidRequestError]
        assert [message.payload for message in topic.read()] == [b"x", b"from __del__"]


@each(
    "late",
    [
        lambda log, topic: topic.wait(topic.append(b"z"), "tiered"),
        lambda log, topic: log.topic("/default/late", create=True),
        lambda log, topic: log.stores.metadata.put("/late", b""),
    ],
)
def test_finalizer_in_a_thread_that_changes_the_metadata_is_refused(tmp_path, monkeypatch, late):
    """Goal: it does not hold up the leases of this process, which are in the same store."""
    with ister.open(tmp_path) as log:
        topic = log.topic("/default/t", create=True)
        errors, change = [], SqliteMetadata._try_changes

        def collect_and_change(*args):
            monkeypatch.undo()
            errors.extend(collect(lambda: late(log, topic)))
            change(*args)

        monkeypatch.setattr(SqliteMetadata, "_try_changes", collect_and_change)
        log.topic("/default/other", create=True)
        assert [type(error) for error in errors] == [InvalidRequestError]


@each("call", [lambda topic: topic.wait(1), lambda topic: topic.append(b"z"), list])
def test_finalizer_in_a_thread_that_has_the_lock_is_refused(tmp_path, call):
    with ister.open(tmp_path) as log:
        topic = log.topic("/default/t", create=True)
        topic.append_many([b"x", b"y"])

        def interrupt():
            with topic.wal.lock:
                return collect(lambda: call(topic.read()) if call is list else call(topic))

        errors = in_thread(interrupt)
        assert [type(error) for error in errors] == [InvalidRequestError]
        assert topic.flush(PATIENCE) == 2


@each(
    "call",
    [
        lambda topic: topic.upload(),
        # What a thread does that writes an express object, before it reads the messages.
        lambda topic: topic.bucket.uploads.begin_term(),
    ],
)
@each("late", [lambda topic: topic.wait(0, level="tiered"), lambda topic: topic.upload()])
def test_finalizer_in_a_thread_that_uploads_is_refused(call, late):
    with Site() as site, site.open("a") as log:
        topic = log.topic("/default/t", create=True)
        last = topic.append(b"x")
        errors = []

        def before(kind, key):
            site.objects.before = lambda kind, key: None
            errors.extend(collect(lambda: late(topic)))

        site.objects.before = before
        in_thread(lambda: call(topic))
        assert [type(error) for error in errors] == [InvalidRequestError]
        topic.upload()
        topic.wait(last, level="tiered", timeout=0)


# -- logs that are dropped ------------------------------------------------------------------


def drop(path):
    """A topic of a log that was dropped."""
    log = ister.open(path)
    topic = log.topic("/default/t", create=True)
    topic.append(b"x")
    return topic


@each("mode", ["wal_cloud", "local_only"])
def test_dropped_log_is_told_and_can_be_opened_again(tmp_path, mode):
    settings = {"storage": {"mode": mode, "wal": {"dir": str(tmp_path / "wal")}}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        topic = drop(settings)
        eventually(lambda: gc.collect() >= 0 and told)
    assert [(one.category, "unclosed log" in str(one.message)) for one in told] == [
        (ResourceWarning, True)
    ]
    # A topic that the program still has goes on.
    topic.wait(topic.append(b"y"), timeout=PATIENCE)
    with ister.open(settings) as log:
        again = log.topic("/default/t")
        assert [message.payload for message in again.read()] == [b"x", b"y"]
        with pytest.raises(ClosedError):
            topic.append(b"z")
        with pytest.raises(DirectoryLockedError):
            ister.open(settings)


# -- the end of the interpreter -------------------------------------------------------------


def run(script, tmp_path):
    """What a program prints that ends by itself."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout


@each("is_loaded", [False, True])
def test_log_is_not_opened_at_exit(tmp_path, is_loaded):
    script = f"""
        import atexit, os, sys
        import ister

        def at_exit():
            try:
                ister.open(sys.argv[1])
            except ister.InvalidRequestError as error:
                print("shutting down" in str(error), os.listdir(sys.argv[1]))

        atexit.register(at_exit)
        {is_loaded} and ister.open
        """
    assert run(script, tmp_path) == "True []\n"


def test_client_at_exit_is_refused_and_one_that_is_open_says_what_fails(tmp_path):
    script = """
        import atexit
        import ister
        from ister.client import Client

        client = Client("127.0.0.1:1", timeout=1)

        def at_exit():
            for call in (lambda: Client("127.0.0.1:1"), client.topics):
                try:
                    call()
                except ister.IsterError as error:
                    print(type(error).__name__)

        atexit.register(at_exit)
        """
    assert run(script, tmp_path) == "InvalidRequestError\nNoAnswerError\n"


def test_wait_for_an_upload_after_the_main_thread_is_refused(tmp_path):
    """Goal: it would never end, as Python's pools of threads have ended."""
    script = """
        import sys, threading
        import ister

        log = ister.open(sys.argv[1])
        topic = log.topic("/default/t", create=True, ack="tiered")
        main = threading.main_thread()

        def work():
            main.join()
            try:
                topic.wait(topic.append(b"x"))
            except ister.ClosedError as error:
                print("main thread" in str(error))
            topic.wait(0, "synced")
            log.close()

        threading.Thread(target=work).start()
        """
    assert run(script, tmp_path) == "True\n"


def test_the_end_of_pools_is_seen_while_they_wait_for_their_threads(tmp_path):
    script = """
        import threading, time
        from concurrent.futures import ThreadPoolExecutor
        from ister.base import threads

        pool, other = ThreadPoolExecutor(), ThreadPoolExecutor()

        def work():
            try:
                while True:
                    other.submit(int)
                    time.sleep(0.01)
            except RuntimeError:
                print(threads.have_pools_ended(), threading.main_thread().is_alive())

        pool.submit(work)
        """
    assert run(script, tmp_path) == "True True\n"


@each("call", ["topic.wait(topic.append(b'x'))", "topic.close()", "log.close()"])
def test_finalizer_at_the_end_of_the_interpreter_is_refused(tmp_path, call):
    """Goal: a program whose globals are finalized while its daemon threads are gone ends."""
    script = f"""
        import os, sys
        import ister

        log = ister.open(sys.argv[1])
        topic = log.topic("/default/t", create=True)

        class Late:
            def __init__(self, *needs):
                self.needs = needs

            def __del__(self):
                log, topic, error, write = self.needs
                try:
                    {call}
                except error as found:
                    write(1, str(found).encode())

        late = Late(log, topic, ister.ClosedError, os.write)
        """
    assert run(script, tmp_path).startswith("the interpreter is shutting down")
