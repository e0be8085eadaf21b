"""kill -9 of a process with a bucket, while it uploads, trims, reads, seals, expires and deletes.

A bucket on a directory and metadata in SQLite: both outlive the process, as they would in
production. What a death leaves (parts, objects without a descriptor, descriptors that no local file
knows, half-made changes) has to end in the same place as if it had not happened.
"""

import json
import random
import shutil
import signal

import pytest

import ister
from ister.base.failpoints import FAILPOINTS
from tests.fault.test_kill import tear_tail
from tests.support.oracle import History
from tests.support.scale import nightly
from tests.support.tier_checks import (
    TOPIC,
    Producer,
    converge,
    memory_directory,
    orphans,
    tier_settings,
    verify_topic,
)
from tests.support.waiting import eventually
from tests.support.writer_child import WriterChild, new_seed, say_replay

_LARGE = {"wal": {"rotate_max_bytes": 65536}, "uploader": {"max_object_bytes": 131072}}

MODES = {
    # Where plain load does not come: what the child does, and with which settings.
    "tier.after_copy": ("load", {"uploader": {"finalize": "copy"}}),
    "tier.after_delete_pending": ("load", {"uploader": {"finalize": "copy"}}),
    "tier.after_expire": ("expire", {**_LARGE, "cloud": {"retention": {"size_mb": 1}}}),
    "tier.after_mark_deleting": ("delete", {}),
    "tier.after_delete_object": ("delete", {}),
    "tier.after_seal": ("seal", {}),
    "tier.after_set_aside": ("take_over", {}),
    "tier.after_remove_local": ("seal", {}),
    "tier.after_replace": ("repair", {"wal": {"retention": {"size_mb": 10}}}),
}
VISITS_MAX = {
    "tier.after_claim": 2,
    "tier.after_expire": 1,
    "tier.after_set_aside": 1,
    "tier.after_replace": 2,
    "tier.after_mark_deleting": 2,
    "tier.after_seal": 2,
    "tier.after_remove_local": 2,
    "wal.recovery_before_cut": 1,
    "wal.recovery_after_cut": 1,
    "wal.recovery_before_checkpoint": 2,
    "wal.after_rotate": 3,
    "wal.after_remove_file": 3,
}
# Objects are merged by jobs (`test_jobs_kill.py`), not by the program that dies here.
OF_JOBS = {"tier.before_swap", "tier.after_swap"}
POINTS = sorted(point for point in FAILPOINTS - OF_JOBS if point.startswith(("tier.", "wal.")))
GROUPS = 4
ACKS = 12


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


def check(settings: dict, history: History, session: str) -> None:
    """Opens the log in this process, compares, goes on, and has both tiers agree."""
    with ister.open(settings) as log:
        there = [name for name in log.topics() if not name.startswith("/gone/")]
        for name in there:
            topic = log.topic(name)
            verify_topic(history, topic)
            before = topic.watermarks.next
            sent = Producer(history, name, session).send(topic, 3)
            assert sent[0] == before, "an append gets the next offset"
            converge(history, topic)
        lost = set(history.topics()) - set(there)
        assert not lost, f"topics that are gone: {lost}"


def options_of(mode: str, size: int = 0) -> dict:
    """How much of what."""
    if mode == "expire":
        return {"mode": mode, "topics": 1, "size": 65536}
    return {"mode": mode, "topics": 2 if mode == "load" else 1, "size": size, "pause_ms": 5}


@pytest.mark.parametrize("group", range(GROUPS))
def test_kill_at_every_failpoint_loses_nothing(tmp_path, request, group):
    """Goal: each failpoint is reached, and after a death at it both tiers come together again.

    Method: a quarter of the points, one after the other in the same directory, each in a process
    that does what comes there; this process opens the log after each death, and compares.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/{group}")
    history = History()
    with ister.open(tier_settings(tmp_path)) as log:
        Producer(history, TOPIC, "first").send(log.topic(TOPIC, create=True), 3)
    for number, point in enumerate(POINTS[group::GROUPS]):
        mode, more = MODES.get(point, ("load", {}))
        visit = chance.randint(1, VISITS_MAX.get(point, 5))
        settings = tier_settings(tmp_path, **more)
        if "_cut" in point:
            tear_tail(tmp_path, chance)
        if point == "tier.after_set_aside":
            put_older_files_back(tmp_path, settings, history)
        with WriterChild(
            settings,
            history,
            failpoints=f"{point}=kill@{visit}",
            session=f"c{number}",
            seed=seed,
            **options_of(mode),
        ) as child:
            assert not child.listen(120.0), f"{point} was not reached {visit} times"
            assert child.ended() == -signal.SIGKILL, child.complaints()
        if mode == "delete":
            finish_deletion(settings, child.begun[-1].split(" ")[1])
        check(settings, history, f"p{number}")


def put_older_files_back(tmp_path, settings: dict, history: History) -> None:
    """The topic's local files become those of a moment ago; the bucket has what came since."""
    files, copy = tmp_path / "wal" / "fault" / "t0", tmp_path / "older"
    for session in ("before", "since"):
        with ister.open(settings) as log:
            topic = log.topic(TOPIC)
            Producer(history, TOPIC, session).send(topic, 10)
            topic.upload()
        if session == "before":
            shutil.copytree(files, copy)
    shutil.rmtree(files)
    copy.rename(files)


def finish_deletion(settings: dict, name: str) -> None:
    """A topic whose deletion was interrupted is deleted by the next call, and can be made again."""
    with ister.open(settings) as log:
        try:
            log.delete(name)
        except ister.NotFoundError:
            assert name not in log.topics()
        topic = log.topic(name, create=True)
        assert (topic.earliest, topic.watermarks.next) == (0, 0)
        assert not orphans(topic)
        topic.wait(topic.append(b"anew"), "tiered", timeout=60)
        assert [m.payload for m in topic.read("earliest")] == [b"anew"]
        log.delete(name)


def kill_cycles(tmp_path, seed: int, cycles: int) -> dict:
    """Children one after the other in the same directory, each killed at a random moment."""
    chance = random.Random(f"{seed}/random")
    history = History()
    settings = tier_settings(tmp_path)
    done: dict[str, int] = {}
    with ister.open(settings) as log:
        log.topic(TOPIC, create=True)
    for cycle in range(cycles):
        with WriterChild(
            settings, history, session=f"c{cycle}", seed=seed, **options_of("load")
        ) as child:
            assert child.listen(60.0, until="ready"), child.complaints()
            if cycle % 2 == 0:
                child.listen_for(lambda: has_done_all(child), "its first upload and removal")
            child.listen(chance.uniform(0.03, 0.3))
            assert child.kill() == -signal.SIGKILL, child.complaints()
        for what, count in child.did.items():
            done[what] = done.get(what, 0) + count
        assert not child.errors, child.errors
        # Now and then the next child's own recovery has to cope.
        if chance.random() < 0.6 or cycle == cycles - 1:
            check(settings, history, f"p{cycle}")
    return {"acked": history.acks, "sent": history.sends, **done}


def has_done_all(child: WriterChild) -> bool:
    """Whether a child has acknowledged, uploaded and trimmed something."""
    return child.lines["ack"] >= ACKS and child.did["upload"] > 0 and child.did["removal"] > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("cycles", "rounds"), [(6, 1), nightly(20, 12)])
def test_repeated_kill_loses_nothing(tmp_path, request, cycles, rounds):
    """Goal: nothing acknowledged at `synced` or `tiered` is lost, doubled or changed by kill -9.

    Method: processes that append to two topics from two threads, upload in the background and on
    demand, trim, read and collect garbage, each killed after 30 to 300 ms; every other one only
    when it has done some of that. By night in twelve directories, with 20 kills each.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    for number in range(rounds):
        told = kill_cycles(tmp_path / str(number), seed + number, cycles)
        assert told["acked"] >= ACKS * cycles // 2, "hardly anything was acknowledged"
        assert told.get("upload", 0) >= cycles // 2, "hardly anything was uploaded"
        assert told.get("removal", 0) >= cycles // 2, "hardly anything was trimmed"
        print(json.dumps({"test": "kill -9 with a bucket", "seed": seed + number, **told}))


def test_product_that_trims_too_early_is_caught(tmp_path, request):
    """Goal: the cycles above can fail: local files that go before the bucket has them are missed.

    Method: a child whose trims do not ask what is tiered, and whose uploads come late.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    for cycle in range(10):
        history = History()
        settings = tier_settings(tmp_path / str(cycle), uploader={"engine": "none"})
        options = {**options_of("load"), "break": "trim", "tiered_share": 0.0}
        with WriterChild(settings, history, session=f"c{cycle}", seed=seed, **options) as child:
            child.listen_for(lambda: child.did["removal"] > 0, "a trim")
            child.kill()
        try:
            check(settings, history, f"p{cycle}")
        except (AssertionError, ister.CorruptDataError) as caught:
            print(f"caught by kill {cycle + 1}: {caught}")
            return
    pytest.fail("10 kills and no loss seen: the harness proves nothing")


@pytest.mark.parametrize(
    "point", [nightly("tier.after_claim"), nightly("tier.after_commit"), "tier.after_complete"]
)
def test_repeated_kill_at_the_same_point_goes_on(tmp_path, request, point):
    """Goal: deaths in a row, without anybody looking in between, add nothing wrong.

    Method: four children that die at the first visit of a point, then the comparison; what the
    deaths left in the bucket without a descriptor is found and removed.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    history = History()
    settings = tier_settings(tmp_path, cloud={"orphan_grace_minutes": 0})
    with ister.open(settings) as log:
        Producer(history, TOPIC, "first").send(log.topic(TOPIC, create=True), 3)
    for number in range(4):
        with WriterChild(
            settings, history, failpoints=f"{point}=kill@1", session=f"c{number}", topics=1
        ) as child:
            assert child.ended() == -signal.SIGKILL, child.complaints()
    with ister.open(settings) as log:
        topic = log.topic(TOPIC)
        converge(history, topic)
        garbage = orphans(topic)
        if point == "tier.after_complete":
            assert garbage, "an object that nobody committed is left"
        removed = []

        def is_clean():
            # The grace period is nothing; a file's time is a little coarser.
            removed.extend(topic.bucket.retention.collect_orphans())
            return not orphans(topic)

        eventually(is_clean)
        assert sorted(removed) == garbage
        converge(history, topic)
