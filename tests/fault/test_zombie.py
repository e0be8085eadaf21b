"""An owner that is stopped in the middle of an upload and wakes up after somebody took its topic.

The first one is a real process, stopped by SIGSTOP at a failpoint for longer than its lease; this
process takes the topic over with a directory of its own, from what the bucket holds. What the first
one had acknowledged and not uploaded is given up with it: that is what `take_over` says. What must
never be: an acknowledgement of its after that, a descriptor of its, or its objects in the topic.

A process that is stopped inside of a SQLite transaction keeps the file locked for everybody, and
nobody can take anything over until it is ended; so the stops are where it has none under way (its
lease is renewed after two thirds of a second at the earliest), or metadata is in etcd.
"""

import contextlib
import random
import signal
import time

import pytest

import ister
from ister.base import failpoints
from ister.base.model import TopicName
from ister.bucket.ownership import OwnedTopic
from ister.errors import ConflictError, FencedError, UnavailableError
from ister.topic.log import Log
from tests.servers.etcd import EtcdServer
from tests.support.oracle import History
from tests.support.scale import scaled
from tests.support.tier_checks import (
    TOPIC,
    Producer,
    check_catalog,
    converge,
    memory_directory,
    orphans,
    tier_settings,
    verify_topic,
)
from tests.support.waiting import eventually
from tests.support.writer_child import WriterChild, new_seed, say_replay

TTL = 2
ETCD_TTL = 3
SHORT_TTL = 8
"""Of an owner that has to do something before it ends, and whose end is waited for."""
LONG_TTL = 300
"""Does not end within a test."""
TOLD = {"FencedError", "UnavailableError"}


@pytest.fixture(scope="module")
def etcd():
    with EtcdServer(heartbeat_ms=50, election_ms=500) as server:
        yield server


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


def settings_of(directory, node, etcd=None, *, ttl=TTL):
    """Of one of two nodes on the same bucket and metadata."""
    metadata = {"lease_ttl_seconds": ttl}
    if etcd is not None:
        metadata |= {
            "backend": "etcd",
            "endpoints": [etcd.endpoint],
            "root_prefix": f"/{directory.name}",
            "path": None,
            "lease_ttl_seconds": ETCD_TTL,
        }
    return tier_settings(directory, node=node, metadata=metadata, cloud={"orphan_grace_minutes": 0})


def take_over(log, seconds=60.0):
    """Opens the topic as soon as its owner's lease has ended, and not before."""
    deadline = time.monotonic() + seconds
    refusals = 0
    while True:
        try:
            return log.topic(TOPIC, take_over=True), refusals
        except ConflictError as error:
            assert "open on node" in str(error)
            refusals += 1
            assert time.monotonic() < deadline, "the lease never ends"
            time.sleep(0.05)


def give_up(history, start):
    """Strikes out what the first owner acknowledged and had not uploaded."""
    given_up = 0
    for sent in history._topics[TOPIC].sent.values():
        if sent.offset is not None and sent.offset >= start:
            assert "tiered" not in sent.levels, f"{sent.offset} was acknowledged as tiered"
            sent.levels = {"given up"}
            given_up += 1
    return given_up


def epochs(topic):
    return [(d.start, d.epoch) for d, _ in topic.bucket.owned.catalog.descriptors()]


def replaced_while_stopped(directory, history, child, etcd=None):
    """The parent becomes the owner while the child stands still, and the child goes on then."""
    sent_before = history.sends
    stopped_at = time.monotonic()
    log = ister.open(settings_of(directory, "b", etcd))
    try:
        committed = log.stores.catalog(TopicName.parse(TOPIC)).last()
        # On a busy machine, the lease may end before the log is open.
        is_soon = time.monotonic() - stopped_at < (TTL if etcd is None else ETCD_TTL) / 3
        topic, refusals = take_over(log)
        assert refusals or not is_soon, "the owner had a lease"
        start = topic.watermarks.next
        before = epochs(topic)
        adopted = [at for at, _ in before if committed is None or at >= committed.end]
        give_up(history, start)
        producer = Producer(history, TOPIC, "b")
        producer.send(topic, 20)
        topic.upload()
        assert history.sends == sent_before + 20, "a stopped process sends nothing"
        child.signal(signal.SIGCONT)
        deadline = time.monotonic() + 60
        while child.errors["FencedError"] < 3:
            assert child.listen(0.1), child.complaints()
            assert time.monotonic() < deadline, f"its producers are told {dict(child.errors)}"
        child.listen(0.3)
        late = [offset for moment, offset in child.acked if moment > stopped_at]
        assert not late, f"acknowledged by an owner that is none: {late}"
        # A line that was about to be written when the stop came may have come now, of a wait that
        # had ended before.
        give_up(history, start)
        told = {name for name in child.errors if ":" not in name}
        assert told <= TOLD, dict(child.errors)
        producer.send(topic, 20)
        topic.upload()
        after = epochs(topic)
        assert after[: len(before)] == before
        assert {epoch for _, epoch in after[len(before) :]} == {topic.bucket.owned.epoch}
        verify_topic(history, topic)
        child.kill()
        check_catalog(topic)
        garbage = orphans(topic)
        time.sleep(0.02)
        assert sorted(topic.bucket.retention.collect_orphans()) == garbage
        assert not orphans(topic)
        converge(history, topic)
    finally:
        log.close()
    return adopted, garbage


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("point", "leaves"),
    [
        ("tier.before_commit", "garbage"),
        ("tier.after_part", "either"),
        ("tier.before_session", "nothing"),
    ],
)
def test_owner_stopped_in_an_upload_and_replaced_publishes_nothing(tmp_path, point, leaves):
    history = History()
    with WriterChild(
        settings_of(tmp_path, "a"),
        history,
        failpoints=f"{point}=pause@2",
        mode="single",
        topics=1,
        session="a",
        pause_ms=5,
        tiered_share=0.0,
    ) as child:
        child.listen_until_stopped(60)
        assert history.acks
        adopted, garbage = replaced_while_stopped(tmp_path, history, child)
    # An object that was whole is in the topic as the new owner's copy, and the first one's own is
    # garbage. In the middle of an object the next part and the news of the new owner race: it is
    # finished and never published, or given up.
    assert bool(adopted) == (leaves == "garbage"), adopted
    if leaves != "either":
        assert bool(garbage) == (leaves == "garbage"), garbage


def test_owner_stopped_and_replaced_publishes_nothing_in_etcd(tmp_path, etcd):
    history = History()
    with WriterChild(
        settings_of(tmp_path, "a", etcd),
        history,
        failpoints="tier.before_commit=pause@2",
        mode="single",
        topics=1,
        session="a",
        pause_ms=5,
        tiered_share=0.0,
    ) as child:
        child.listen_until_stopped(60)
        _, garbage = replaced_while_stopped(tmp_path, history, child, etcd)
    assert garbage


@pytest.mark.nightly
def test_producer_that_waits_for_the_bucket_is_told_of_the_new_owner(tmp_path):
    """Waits up to `tiered` do not last for ever where uploads have ended for good."""
    history = History()
    with WriterChild(
        settings_of(tmp_path, "a"),
        history,
        failpoints="tier.before_commit=pause@2",
        mode="single",
        topics=1,
        session="a",
        tiered_share=1.0,
    ) as child:
        child.listen_until_stopped(60)
        assert history.acks
        replaced_while_stopped(tmp_path, history, child)


def test_owner_stopped_for_less_than_its_lease_goes_on(tmp_path):
    """Nobody can take the topic, and after the pause everything is acknowledged as before."""
    history = History()
    settings = settings_of(tmp_path, "a", ttl=LONG_TTL)
    with WriterChild(
        settings,
        history,
        failpoints="tier.before_commit=pause@2",
        mode="single",
        topics=1,
        session="a",
        pause_ms=5,
    ) as child:
        child.listen_until_stopped(60)
        with (
            ister.open(settings_of(tmp_path, "b", ttl=LONG_TTL)) as log,
            pytest.raises(ConflictError, match="open on node"),
        ):
            log.topic(TOPIC, take_over=True)
        acks = history.acks
        child.signal(signal.SIGCONT)
        for _ in range(20):
            assert child.listen(60.0, until="ack"), child.complaints()
        assert history.acks >= acks + 20
        assert not child.errors, child.errors
        child.kill()
    with ister.open(settings) as log:
        converge(history, log.topic(TOPIC))


@pytest.mark.nightly
def test_stopped_owner_that_nobody_replaced_goes_on_after_its_lease(tmp_path):
    """It says that it is not sure, takes its lease anew, and goes on; its messages stay its own."""
    history = History()
    settings = settings_of(tmp_path, "a")
    with WriterChild(
        settings,
        history,
        failpoints="tier.before_commit=pause@2",
        mode="single",
        topics=1,
        session="a",
        pause_ms=5,
        tiered_share=0.0,
    ) as child:
        child.listen_until_stopped(60)
        time.sleep(TTL + 0.5)
        acks = history.acks
        child.signal(signal.SIGCONT)
        eventually(lambda: child.listen(0.05) and history.acks >= acks + 20, "it goes on")
        assert set(child.errors) <= {"UnavailableError"}, child.errors
        child.kill()
    with ister.open(settings) as log:
        converge(history, log.topic(TOPIC))


def test_owner_replaced_between_two_looks_at_its_rights_acknowledges_nothing(tmp_path, monkeypatch):
    """Goal: a wait that returns has found the topic its own, at one moment.

    Method: the lease has ended and another node has the topic; the thread that renews the lease
    runs just when a waiting one has seen that nobody has fenced it yet, and before it looks at the
    lease, as it may after the process was stopped there.
    """
    settings = settings_of(tmp_path, "a", ttl=SHORT_TTL)
    log_a = Log(ister.load_config(settings, {}), background=False)
    log_b = ister.open(settings_of(tmp_path, "b"))
    try:
        topic_a = log_a.topic(TOPIC, create=True)
        topic_a.wait(topic_a.append(b"before"))
        topic_a.upload()
        take_over(log_b)
        offset = topic_a.append(b"after")
        look = OwnedTopic.is_leased.fget

        def is_leased(owned):
            monkeypatch.undo()
            log_a.stores.membership.renew()
            return look(owned)

        monkeypatch.setattr(OwnedTopic, "is_leased", property(is_leased))
        with pytest.raises((FencedError, UnavailableError)):
            topic_a.wait(offset)
        # On a busy machine the lease may have ended once more.
        log_a.stores.membership.renew()
        with pytest.raises(FencedError):
            topic_a.wait(offset)
    finally:
        log_a.close()
        log_b.close()


def test_late_deletion_of_a_replaced_owner_takes_nothing_of_the_next_one(tmp_path, monkeypatch):
    """Goal: garbage collection that wakes up late removes nothing of the next owner's.

    Method: an object that is whole and not committed, and no longer the one under way; its owner
    has found it to be garbage, and is stopped before it deletes it, while the next one takes over.
    """
    history = History()
    settings = settings_of(tmp_path, "a", ttl=SHORT_TTL)
    settings["storage"]["uploader"]["engine"] = "none"
    log_a = Log(ister.load_config(settings, {}), background=False)
    log_b = ister.open(settings_of(tmp_path, "b"))
    try:
        topic_a = log_a.topic(TOPIC, create=True)
        producer = Producer(history, TOPIC, "a")
        producer.send(topic_a, 10)
        topic_a.upload()
        for point in ("tier.before_commit", "tier.before_complete"):
            producer.send(topic_a, 5)
            failpoints.arm(point, fail)
            with pytest.raises(UnavailableError):
                topic_a.upload()
            failpoints.disarm()
        time.sleep(0.02)
        objects = log_a.stores.objects
        delete, taken = objects.delete, []

        def stopped_before(key):
            if not taken:
                taken.append(take_over(log_b)[0])
            delete(key)

        monkeypatch.setattr(objects, "delete", stopped_before)
        with contextlib.suppress(FencedError):
            topic_a.bucket.retention.collect_orphans()
        (topic_b,) = taken or [take_over(log_b)[0]]
        give_up(history, topic_b.watermarks.next)
        Producer(history, TOPIC, "b").send(topic_b, 5)
        converge(history, topic_b)
    finally:
        log_a.close()
        log_b.close()


def fail():
    raise UnavailableError("the store does not answer")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_owners_stopped_at_any_moment_publish_nothing(tmp_path, request, etcd):
    """The same under full load and without a failpoint: stopped wherever it is."""
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(seed)
    for number in range(scaled(2, 12)):
        directory = tmp_path / f"{tmp_path.name}-{number}"
        directory.mkdir()
        history = History()
        with WriterChild(
            settings_of(directory, "a", etcd),
            history,
            mode="load",
            topics=1,
            session="a",
            seed=seed + number,
            tiered_share=0.1,
        ) as child:
            assert child.listen(60, until="ready"), child.complaints()
            child.listen(chance.uniform(0.2, 0.8))
            child.signal(signal.SIGSTOP)
            child.listen_until_stopped(60)
            replaced_while_stopped(directory, history, child, etcd)
