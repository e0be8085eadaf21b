"""One directory, one owner: a second process or handle is refused, and a dead owner is no owner."""

import os
import signal
import subprocess
import sys

import pytest

import ister
from tests.support.oracle import History, settings_of
from tests.support.writer_child import WriterChild


@pytest.fixture
def holder(tmp_path):
    """A process that has `tmp_path` open and does nothing: a writer stopped at its first append."""
    with WriterChild(tmp_path, History(), topics=1, threads=1) as child:
        assert child.listen(20.0, until="ready"), child.complaints()
        child.signal(signal.SIGSTOP)
        yield child


def test_second_process_is_refused_and_told_the_owner(tmp_path, holder):
    with pytest.raises(ister.DirectoryLockedError) as caught:
        ister.open(settings_of(str(tmp_path)))
    assert f"process {holder.pid}" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert not caught.value.retriable
    # A refusal changes nothing: the next one names the owner too.
    with pytest.raises(ister.DirectoryLockedError, match=f"process {holder.pid}"):
        ister.open(settings_of(str(tmp_path)))


def test_refused_process_ends_with_the_error(tmp_path):
    """The other way round: this process owns the directory, a new one comes."""
    with ister.open(settings_of(str(tmp_path))) as log:
        log.topic("/fault/t0", create=True)
        with WriterChild(tmp_path, History(), topics=1, threads=1, messages=1) as child:
            assert child.ended() == 1
            assert f"in use by process {os.getpid()}" in child.complaints()
    with WriterChild(tmp_path, History(), topics=1, threads=1, messages=1) as child:
        assert child.ended() == 0, child.complaints()


def test_directory_of_a_killed_process_can_be_opened(tmp_path, holder):
    """A stopped process still owns its directory, a killed one no longer does."""
    with pytest.raises(ister.DirectoryLockedError):
        ister.open(settings_of(str(tmp_path)))
    assert holder.kill() == -signal.SIGKILL
    with ister.open(settings_of(str(tmp_path))) as log:
        topic = log.topic("/fault/t0")
        topic.wait(topic.append(b"mine now"))
        assert [m.payload for m in topic.read("earliest")][-1] == b"mine now"


def test_second_open_in_the_same_process_is_refused(tmp_path):
    settings = settings_of(str(tmp_path))
    log = ister.open(settings)
    with pytest.raises(ister.DirectoryLockedError, match=f"process {os.getpid()}"):
        ister.open(settings)
    log.close()
    with ister.open(settings) as again:
        assert again.topics() == []


def test_refused_opens_leave_no_handles_behind(tmp_path):
    settings = settings_of(str(tmp_path))
    with ister.open(settings):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with pytest.raises(ister.DirectoryLockedError):
                ister.open(settings)
        assert len(os.listdir("/proc/self/fd")) == before


def test_process_started_meanwhile_does_not_give_the_directory_away(tmp_path):
    """A program that starts others while it has a log open goes on owning it afterwards."""
    settings = settings_of(str(tmp_path))
    with ister.open(settings):
        subprocess.run([sys.executable, "-c", "pass"], check=True, cwd=tmp_path)
        code = "import sys, ister\ntry:\n    ister.open(sys.argv[1])\n"
        code += "except ister.DirectoryLockedError:\n    sys.exit(3)\n"
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
        assert done.returncode == 3
