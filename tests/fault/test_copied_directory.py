"""A data directory that is copied, `.node` included, and started beside its original.

The processes are real, with one bucket and one metadata store: of each copy's clients one is told
errors, and what either of them was told to be stored is in the topic. A SIGSTOP while the files are
copied makes the copy what a snapshot of the disk is.
"""

import contextlib
import shutil
import signal
import time

import pytest

import ister
from ister.errors import ConflictError
from tests.servers.etcd import EtcdServer
from tests.support.oracle import History
from tests.support.tier_checks import TOPIC, memory_directory, tier_settings, verify_topic
from tests.support.waiting import eventually
from tests.support.writer_child import WriterChild

TTL = 3


@pytest.fixture(scope="module")
def etcd():
    with EtcdServer(heartbeat_ms=50, election_ms=500) as server:
        yield server


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


def settings_of(directory, node, etcd, ttl=TTL):
    """Of one of the copies: etcd and the bucket are shared."""
    metadata = {
        "backend": "etcd",
        "endpoints": [etcd.endpoint],
        "root_prefix": f"/{directory.name}",
        "path": None,
        "lease_ttl_seconds": ttl,
    }
    return tier_settings(directory, node=node, metadata=metadata)


def producer(directory, node, etcd, history, **options):
    return WriterChild(
        settings_of(directory, node, etcd, **options),
        history,
        mode="single",
        topics=1,
        session=node,
        pause_ms=2,
        tiered_share=0.3,
    )


def copy_files(directory, child):
    """Copies the original's directory as it is at one moment; the process stays stopped."""
    child.signal(signal.SIGSTOP)
    child.listen_until_stopped(30)
    shutil.copytree(directory / "a", directory / "b")


def has_ended(child):
    return child._process.poll() is not None


def listen(children, seconds, until):
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        for child in children:
            child.listen(0.05)


@pytest.mark.nightly
def test_copy_of_a_directory_in_use_acknowledges_nothing(tmp_path, etcd):
    """Goal: both run, one is told errors, and every acknowledged message is in the topic."""
    history = History()
    with producer(tmp_path, "a", etcd, history) as first:
        listen([first], 60, lambda: len(first.acked) >= 50)
        copy_files(tmp_path, first)
        first.signal(signal.SIGCONT)
        with producer(tmp_path, "b", etcd, history) as second:
            # The copy ends by itself, or, were it let in, is given time to do harm.
            listen([first, second], 60, lambda: second.lines["ack"] >= 50 or has_ended(second))
            acks = len(first.acked)
            listen([first], 60, lambda: len(first.acked) >= acks + 50)
            first.kill()
            second.kill()
            complaints = second.complaints()
    with contextlib.ExitStack() as stack:
        eventually(lambda: open_either(tmp_path, etcd, stack), "one of the two can be opened")
        verify_topic(history, stack.log.topic(TOPIC))
    assert len(first.acked) >= acks + 50, "the original goes on"
    assert not second.acked
    assert "another process uses this directory's identity" in complaints
    assert not first.errors


def open_either(directory, etcd, stack):
    """Opens the newest copy: the other one is refused."""
    for node in ("a", "b"):
        with contextlib.suppress(ConflictError):
            stack.log = stack.enter_context(ister.open(settings_of(directory, node, etcd)))
            return True
    return False


@pytest.mark.nightly
def test_copy_replaces_a_paused_original(tmp_path, etcd):
    """Goal: it waits for the lease; the original, when it wakes up, acknowledges nothing more.

    What the original had acknowledged when it was copied is in the copy.
    """
    history = History()
    with producer(tmp_path, "a", etcd, history) as first:
        listen([first], 60, lambda: len(first.acked) >= 50)
        copy_files(tmp_path, first)
        stopped_at = time.monotonic()
        with producer(tmp_path, "b", etcd, history) as second:
            assert second.listen(60, until="ack"), second.complaints()
            first.signal(signal.SIGCONT)
            listen([first, second], 60, lambda: first.errors["FencedError"] >= 3)
            assert first.errors["FencedError"] >= 3, dict(first.errors)
            acks = len(second.acked)
            listen([first, second], 60, lambda: len(second.acked) >= acks + 50)
            late = [offset for moment, offset in first.acked if moment > stopped_at]
            assert not late, f"acknowledged by a process that was replaced: {late}"
            first.kill()
            second.kill()
    with pytest.raises(ConflictError, match="older copy"):
        ister.open(settings_of(tmp_path, "a", etcd))
    with ister.open(settings_of(tmp_path, "b", etcd)) as log:
        verify_topic(history, log.topic(TOPIC))


def test_next_process_of_the_same_directory_does_not_wait_for_the_lease(tmp_path, etcd):
    ttl = 120
    history = History()
    with producer(tmp_path, "a", etcd, history, ttl=ttl) as child:
        listen([child], 60, lambda: len(child.acked) >= 20)
        child.kill()
    began = time.monotonic()
    with ister.open(settings_of(tmp_path, "a", etcd, ttl=ttl)) as log:
        topic = log.topic(TOPIC)
        topic.wait(topic.append(b"again"), "synced")
        assert time.monotonic() - began < ttl / 2
    # A volume that moved to another machine: closed there, nobody waits either.
    (tmp_path / "a").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "b")
    began = time.monotonic()
    with ister.open(settings_of(tmp_path, "b", etcd, ttl=ttl)) as log:
        topic = log.topic(TOPIC)
        topic.wait(topic.append(b"elsewhere"), "synced")
        assert time.monotonic() - began < ttl / 2
