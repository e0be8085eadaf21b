"""Real forks of a process with an open log: what the child may do is nothing, and it is told so.

Each scenario is a small program in a process of its own: pytest's own has threads, and Python warns
about forks of such a process. `tests/sim/fork_world.py` has random ones.
"""

import signal
import subprocess
import sys
import textwrap

import pytest

import ister

_BEGIN = """
import os, signal, sys, threading
# For each process; faulthandler's timer is a thread, which a child waits for in vain at its end.
signal.alarm(300)
os.register_at_fork(after_in_child=lambda: signal.alarm(300))
import ister

def refused(call):
    try:
        call()
    except ister.ClosedError as error:
        assert f"opened by process {os.getppid()}" in str(error), error
        assert "spawn" in str(error), error
    else:
        raise AssertionError("not refused")

def end(pid):
    return os.waitpid(pid, 0)[1]

directory = sys.argv[1]
from tests.fault.test_fork import settings_of
settings = settings_of(directory, sys.argv[2])
"""
TIMEOUT = 300


def program(body):
    return [sys.executable, "-W", "error::ResourceWarning", "-c", _BEGIN + textwrap.dedent(body)]


def run(body, directory, mode):
    ended = subprocess.run(
        [*program(body), str(directory), mode],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def settings_of(directory, mode):
    storage = {"mode": mode, "wal": {"dir": f"{directory}/wal"}}
    if mode == "wal_cloud":
        storage["cloud"] = {"backend": "fs", "root": f"{directory}/bucket"}
        storage["metadata"] = {"backend": "sqlite", "path": f"{directory}/metadata.db"}
    return {"storage": storage}


def read_all(directory, mode):
    with ister.open(settings_of(directory, mode)) as log:
        return [bytes(message.payload) for message in log.topic("/default/a").read()]


modes = pytest.mark.parametrize("mode", ["local_only", "wal_cloud"])


@pytest.mark.nightly
@modes
def test_a_fork_in_the_middle_of_other_threads_appends_hangs_nobody(tmp_path, mode):
    run(
        """
        log = ister.open(settings)
        topic = log.topic("/default/a", create=True)
        is_over, counts = threading.Event(), [0, 0]

        def produce(at):
            while not is_over.is_set():
                topic.wait(topic.append(b"x" * 100))
                counts[at] += 1

        producers = [threading.Thread(target=produce, args=(at,)) for at in range(2)]
        for producer in producers:
            producer.start()
        for _ in range(40):
            pid = os.fork()
            if pid == 0:
                refused(lambda: topic.append(b"child"))
                refused(lambda: topic.wait(topic.wal.next - 1))
                refused(lambda: log.topic("/default/b", create=True))
                log.close()
                sys.exit(0)
            assert end(pid) == 0
        is_over.set()
        for producer in producers:
            producer.join()
        log.close()
        print(sum(counts), topic.wal.next)
        assert sum(counts) == topic.wal.next
        """,
        tmp_path,
        mode,
    )


@pytest.mark.nightly
@modes
def test_an_idle_child_of_a_killed_parent_does_not_keep_the_directory(tmp_path, mode):
    parent = subprocess.Popen(
        [
            *program(
                """
                log = ister.open(settings)
                topic = log.topic("/default/a", create=True)
                topic.append(b"kept")
                topic.flush()
                if os.fork() == 0:
                    # Printed by the child: it has run its fork hooks by now.
                    print(os.getpid(), flush=True)
                    sys.stdin.read()
                    os._exit(0)
                signal.pause()
                """
            ),
            str(tmp_path),
            mode,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        # It is there: only the pipe's end lets it go.
        with open(f"/proc/{child}/stat", encoding="ascii") as stat:
            assert stat.read().split()[2] in "SR"
        assert read_all(tmp_path, mode) == [b"kept"]
    finally:
        parent.stdin.close()
        parent.stdout.close()


def test_the_start_method_fork_of_multiprocessing(tmp_path):
    out = run(
        """
        import multiprocessing

        log = ister.open(settings)
        topic = log.topic("/default/a", create=True)

        def work(number):
            try:
                return topic.append(b"child")
            except ister.ClosedError as error:
                return str(error)

        with multiprocessing.get_context("fork").Pool(2) as pool:
            for answer in pool.map(work, range(8)):
                assert "in its forked child" in answer, answer
        assert topic.append(b"parent") == 0
        log.close()
        """,
        tmp_path,
        "wal_cloud",
    )
    assert out == ""
    assert read_all(tmp_path, "wal_cloud") == [b"parent"]


def test_a_child_opens_a_log_of_its_own(tmp_path):
    run(
        """
        log = ister.open(settings)
        log.topic("/default/a", create=True).append(b"parent")
        pid = os.fork()
        if pid == 0:
            with ister.open({"storage": {"mode": "local_only",
                                         "wal": {"dir": directory + "/child"}}}) as own:
                topic = own.topic("/default/a", create=True)
                topic.wait(topic.append(b"child"))
                assert [m.payload for m in topic.read()] == [b"child"]
            sys.exit(0)
        assert end(pid) == 0
        log.close()
        """,
        tmp_path,
        "local_only",
    )


def test_libraries_that_do_not_survive_a_fork_are_refused_and_do_not_hang(tmp_path):
    """opendal's threads are not in the child, and SQLite's locks are not the child's."""
    run(
        """
        log = ister.open(settings)
        log.topic("/default/a", create=True).append(b"parent")
        pid = os.fork()
        if pid == 0:
            from ister.base.clock import SystemClock
            from ister.metadata.sqlite import SqliteMetadata
            from ister.objectstore.opendal_store import open_store

            for call in (
                lambda: SqliteMetadata(directory + "/metadata.db", clock=SystemClock()),
                lambda: open_store("fs", directory + "/other", {}, clock=SystemClock()),
            ):
                try:
                    call()
                except ister.ClosedError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError("not refused")
            other = SqliteMetadata(directory + "/other.db", clock=SystemClock())
            other.put("/a", b"b")
            other.close()
            sys.exit(0)
        assert end(pid) == 0
        log.close()
        """,
        tmp_path,
        "wal_cloud",
    )


def test_a_client_after_a_fork_is_refused(tmp_path):
    run(
        """
        from ister.client import Client

        client = Client("127.0.0.1:1", timeout=1)
        pid = os.fork()
        if pid == 0:
            refused(lambda: client.admin.create_topic("/default/a"))
            refused(lambda: client.producer("/default/a"))
            client.close()
            sys.exit(0)
        assert end(pid) == 0
        client.close()
        """,
        tmp_path,
        "local_only",
    )
