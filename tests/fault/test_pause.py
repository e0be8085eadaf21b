"""A writer that is stopped in the middle of its load and goes on later, as under a debugger."""

import random
import signal

import pytest

import ister
from tests.support.oracle import SURVIVES_KILL, History, settings_of, verify
from tests.support.writer_child import WriterChild, new_seed, say_replay


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["synced", "mixed"])
def test_paused_writer_loses_nothing(tmp_path, request, level):
    """Goal: a pause of the whole process neither loses nor doubles nor reorders anything.

    Method: SIGSTOP after some load, a while in which not a line comes, SIGCONT, more load, twice;
    then a kill while paused, so that what it was about to do never happens.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(seed)
    history = History()
    with WriterChild(tmp_path, history, level=level, session="a", seed=seed) as child:
        assert child.listen(20.0, until="ready"), child.complaints()
        for _ in range(2):
            child.listen(chance.uniform(0.05, 0.15))
            child.signal(signal.SIGSTOP)
            child.listen(0.1)
            before = history.acks
            child.listen(chance.uniform(0.2, 0.5))
            assert history.acks == before, "a paused process acknowledges nothing"
            child.signal(signal.SIGCONT)
            assert child.listen(10.0, until="ack"), "nothing was acknowledged after the pause"
        child.listen(0.1)
        child.signal(signal.SIGSTOP)
        assert child.kill() == -signal.SIGKILL
        assert not child.errors, child.errors
    with ister.open(settings_of(str(tmp_path), level=level)) as log:
        verify(history, log, survives=SURVIVES_KILL)
    print(f"acked {history.acks}, sent {history.sends}")


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["wal.before_sync", "wal.after_write"])
def test_writer_paused_inside_of_a_commit_goes_on(tmp_path, request, point):
    """The pause comes at a failpoint, while its thread holds what others wait for."""
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    history = History()
    with WriterChild(
        tmp_path, history, failpoints=f"{point}=pause@5", session="a", seed=seed, messages=200
    ) as child:
        child.listen_until_stopped(60)
        before = history.acks
        child.listen(0.2)
        assert history.acks == before < history.sends
        child.signal(signal.SIGCONT)
        assert child.ended() == 0, child.complaints()
        assert not child.errors, child.errors
    assert history.acks == history.sends
    with ister.open(settings_of(str(tmp_path))) as log:
        verify(history, log, survives=SURVIVES_KILL)
