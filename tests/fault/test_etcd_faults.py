"""A real etcd of three nodes under a real log: nodes die, networks part, answers get lost.

The bucket is a directory, so that whatever goes wrong here is the metadata's. Every scenario ends
alike: the cluster is whole again, and `converge` finds nothing lost, every descriptor once, each
with its object.
"""

import contextlib
import json
import threading
import time
import urllib.request
from itertools import count
from types import SimpleNamespace

import pytest

import ister
from ister.base import failpoints
from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.errors import (
    CapacityError,
    ConflictError,
    FencedError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.metadata.etcd import EtcdMetadata
from ister.topic.log import Log
from tests.servers.etcd import EtcdCluster
from tests.support.oracle import History
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

CALL_SECONDS = 2.0
TTL = 3
MIB = 1024 * 1024
PATIENCE_SECONDS = 60
"""For what has to happen, however busy the machine is."""
_places = count()


@pytest.fixture(scope="module")
def cluster():
    with EtcdCluster(heartbeat_ms=50, election_ms=500) as cluster:
        yield cluster


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


class Place:
    """Logs that share a bucket and a part of the cluster's keys."""

    def __init__(self, cluster, directory):
        self.cluster = cluster
        self.directory = directory
        self.prefix = f"/place{next(_places)}"
        self.history = History()
        self.producer = Producer(self.history)
        self._logs = []

    def open(self, node="a", *, ttl=TTL, endpoints=None, **sections):
        """A log of a node of its own; its calls to etcd take two seconds at most."""
        sections.setdefault("uploader", {"engine": "none"})
        # The garbage of a moment ago may go at once.
        sections.setdefault("cloud", {"orphan_grace_minutes": 0})
        settings = tier_settings(
            self.directory,
            node=node,
            metadata={
                "backend": "etcd",
                "endpoints": endpoints or self.cluster.endpoints,
                "root_prefix": self.prefix,
                "lease_ttl_seconds": ttl,
            },
            **sections,
        )
        settings["storage"]["metadata"].pop("path")
        config = ister.load_config(settings, {})

        def attempt():
            metadata = EtcdMetadata(
                config.storage.metadata.endpoints,
                clock=SystemClock(),
                call_timeout_seconds=CALL_SECONDS,
            )
            try:
                return Log(config, metadata=metadata)
            except UnavailableError:
                # A machine that is busy with other work may take longer to elect a leader.
                metadata.close()
                return None
            except BaseException:
                metadata.close()
                raise

        log = eventually(attempt, "etcd does not answer")
        self._logs.append(log)
        return log

    def keys(self):
        """A look at the keys past the cables."""
        return contextlib.closing(EtcdMetadata(self.cluster.direct_endpoints, clock=SystemClock()))

    def owner(self):
        """The node that etcd has as the topic's owner, or None."""
        with self.keys() as store:
            found = store.get(f"{self.prefix}/cluster/owners/fault/t0")
        return None if found is None else json.loads(found.value)["node"]

    def close(self):
        for log in self._logs:
            with contextlib.suppress(IsterError):
                log.close()


def heal(cluster):
    for number in range(3):
        cluster.rejoin(number)
        cluster.client_cables[number].heal()
        if number not in cluster._running():
            # Not `start`, which waits for an answer: a first node has none without a second.
            cluster._spawn(number)
        cluster.resume(number)
    cluster.wait_ready()


@pytest.fixture
def place(cluster, tmp_path):
    place = Place(cluster, tmp_path)
    try:
        yield place
    finally:
        failpoints.disarm()
        heal(cluster)
        place.close()
        cluster.check_members_agree()


class Busy:
    """Appends and uploads on a thread of its own until it is stopped."""

    def __init__(self, place, topic, pause=0.005):
        self.uploads = 0
        self.upload_errors = []
        self.append_errors = []
        self.acked_at = []
        self._place = place
        self._topic = topic
        self._pause = pause
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._append, daemon=True),
            threading.Thread(target=self._upload, daemon=True),
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads), "still busy"

    def _append(self):
        while not self._stopping.wait(self._pause):
            try:
                self._place.producer.send(self._topic)
            except IsterError as error:
                self.append_errors.append((time.monotonic(), error))
            else:
                self.acked_at.append(time.monotonic())

    def _upload(self):
        while not self._stopping.wait(self._pause):
            try:
                if self._topic.upload().objects:
                    self.uploads += 1
            except IsterError as error:
                self.upload_errors.append(error)

    def wait_uploads(self, more):
        wanted = self.uploads + more
        eventually(lambda: self.uploads >= wanted, f"{more} more uploads", within=PATIENCE_SECONDS)


def kinds(errors):
    return {type(error).__name__ for error in errors}


# -- nodes that die, networks that part ----------------------------------------------------------


def kill_leader(cluster):
    number = cluster.leader()
    cluster.kill(number)
    return lambda: cluster.start(number)


def kill_follower(cluster):
    number = (cluster.leader() + 1) % 3
    cluster.kill(number)
    return lambda: cluster.start(number)


def part_leader(cluster):
    number = cluster.leader()
    cluster.isolate(number)
    return lambda: cluster.rejoin(number)


def pause_leader(cluster):
    number = cluster.leader()
    cluster.pause(number)
    return lambda: cluster.resume(number)


def cut_one_client_cable(cluster):
    number = cluster.leader()
    cluster.client_cables[number].cut()
    return cluster.client_cables[number].heal


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strike", [kill_leader, kill_follower, part_leader, pause_leader, cut_one_client_cable]
)
def test_commits_go_on_without_one_node(place, cluster, strike):
    """Goal: what hits one node of three costs time at the most: everything is committed once.

    Method: appends and uploads all the while; a longer lease, so that an election fits into it.
    """
    topic = place.open(ttl=8).topic(TOPIC, create=True)
    with Busy(place, topic) as busy:
        busy.wait_uploads(5)
        undo = strike(cluster)
        busy.wait_uploads(5)
        undo()
        busy.wait_uploads(5)
    assert kinds(busy.upload_errors) <= {"UnavailableError", "CommitUnknownError", "ConflictError"}
    assert not busy.append_errors, busy.append_errors[:3]
    heal(cluster)
    converge(place.history, topic)


@pytest.mark.nightly
def test_all_nodes_down_lets_appends_go_on_while_the_lease_holds(place, cluster):
    """The log works on from what it knows; uploads say that etcd is away, and go on after."""
    topic = place.open(ttl=8).topic(TOPIC, create=True)
    place.producer.send(topic, 20)
    topic.upload()
    for number in range(3):
        cluster.kill(number)
    began = time.monotonic()
    while time.monotonic() < began + 1:
        place.producer.send(topic, 5)
    with pytest.raises(UnavailableError):
        topic.upload()
    # What is here can be read; where the bucket's copy is, only etcd knows.
    local = [message.offset for message in topic.read(topic.wal.trimmed)]
    assert local == list(range(topic.wal.trimmed, topic.watermarks.synced))
    heal(cluster)
    # At once, unless to start them has taken longer than the lease.
    eventually(lambda: sends(place, topic), "it goes on", within=PATIENCE_SECONDS)
    converge(place.history, topic)


@pytest.mark.nightly
def test_restart_of_the_whole_cluster_past_the_lease_is_waited_out(place, cluster):
    """Acknowledgements stop with the lease, and go on when etcd is back: nobody else took over."""
    log = place.open()
    topic = log.topic(TOPIC, create=True)
    place.producer.send(topic, 20)
    topic.upload()
    for number in range(3):
        cluster.kill(number)
    wait_for_lapse(log)
    with pytest.raises(UnavailableError):
        place.producer.send(topic)
    heal(cluster)
    eventually(lambda: sends(place, topic), "it goes on", within=PATIENCE_SECONDS)
    eventually(lambda: is_owner(place, log), "the owner's key is back", within=PATIENCE_SECONDS)
    converge(place.history, topic)


def wait_for_lapse(log):
    """The owner's own clock says when: within the lease's time, whatever etcd does."""
    membership = log.stores.membership
    assert membership.valid_until < SystemClock.boottime() + TTL
    eventually(lambda: not membership.is_valid, "the lease lapses", within=PATIENCE_SECONDS)


def is_owner(place, log):
    """Asked again and again: a lease of a few seconds may end once more on a busy machine."""
    return place.owner() == log.stores.membership.node


def sends(place, topic):
    try:
        place.producer.send(topic)
    except UnavailableError:
        return False
    return True


def test_minority_answers_no_reads(place, cluster):
    """A node without its cluster is not believed: an error, and never what it remembers."""
    lonely = (cluster.leader() + 1) % 3
    topic = place.open(ttl=60).topic(TOPIC, create=True)
    place.producer.send(topic, 5)
    topic.upload()
    cluster.isolate(lonely)
    topic.upload()
    store = EtcdMetadata([cluster.endpoints[lonely]], clock=SystemClock(), call_timeout_seconds=0.5)
    with contextlib.closing(store), pytest.raises(UnavailableError):
        store.get(f"{place.prefix}/topics/fault/t0")
    cluster.rejoin(lonely)
    converge(place.history, topic)


# -- the lease -----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["cut", "swallow"])
def test_owner_cut_off_stops_before_its_lease_ends_and_goes_on_later(place, cluster, how):
    """Goal: the last acknowledgement comes before anybody could take the topic over.

    Method: appends all the while; the client's cables are cut, or swallow everything; etcd itself
    is asked when the owner's key goes.
    """
    log = place.open()
    topic = log.topic(TOPIC, create=True)
    place.producer.send(topic, 20)
    topic.upload()
    with Busy(place, topic, pause=0.01) as busy:
        busy.wait_uploads(2)
        for cable in cluster.client_cables:
            getattr(cable, how)()
        eventually(lambda: place.owner() is None, "the owner's key goes", within=PATIENCE_SECONDS)
        gone_at = time.monotonic()
        time.sleep(0.5)
        last_ack = busy.acked_at[-1]
        assert last_ack < gone_at, f"acknowledged {last_ack - gone_at:.3f} s after the end"
        for cable in cluster.client_cables:
            cable.heal()
        eventually(lambda: busy.acked_at[-1] > gone_at, "it goes on", within=PATIENCE_SECONDS)
        assert kinds(error for _, error in busy.append_errors) == {"UnavailableError"}
        busy.wait_uploads(1)
    eventually(lambda: is_owner(place, log), "the owner's key is back", within=PATIENCE_SECONDS)
    converge(place.history, topic)


@pytest.mark.nightly
def test_owner_cut_off_and_replaced_is_fenced(place, cluster):
    """Goal: after another node has taken over, the first acknowledges and publishes nothing.

    Method: only the first one's cables are cut; the second goes past them, waits for the lease,
    and takes over what is in the bucket.
    """
    log_a = place.open("a")
    topic_a = log_a.topic(TOPIC, create=True)
    place.producer.send(topic_a, 20)
    topic_a.upload()
    for cable in cluster.client_cables:
        cable.cut()
    log_b = place.open("b", endpoints=cluster.direct_endpoints)
    with pytest.raises(ConflictError):
        log_b.topic(TOPIC)
    acked_by_a = []
    refused = []
    topic_b = None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while topic_b is None:
        assert time.monotonic() < deadline, "nobody can take over"
        # What it still acknowledges lies behind what B takes over, and is given up with A's disk.
        try:
            topic_a.wait(topic_a.append(b"given up"))
            acked_by_a.append(time.monotonic())
        except IsterError as error:
            refused.append(error)
        with contextlib.suppress(ConflictError):
            topic_b = log_b.topic(TOPIC, take_over=True)
    claimed_at = time.monotonic()
    assert not acked_by_a or acked_by_a[-1] < claimed_at
    assert kinds(refused) == {"UnavailableError"}
    assert topic_b.watermarks.next == 20
    place.producer.send(topic_b, 20)
    topic_b.upload()
    for cable in cluster.client_cables:
        cable.heal()
    eventually(lambda: topic_a.bucket.owned.is_fenced, "A finds out", within=PATIENCE_SECONDS)
    with pytest.raises(FencedError):
        topic_a.append(b"no")
    with pytest.raises(FencedError):
        topic_a.wait(0)
    with pytest.raises(FencedError):
        topic_a.upload()
    with pytest.raises(ConflictError):
        log_a.topic(TOPIC)
    assert [d.epoch for d, _ in topic_b.bucket.owned.catalog.descriptors()] == [1, 2]
    converge(place.history, topic_b)


# -- answers that are lost, requests that come late ------------------------------------------------


def armed_once(point, action):
    """Runs `action` at the next visit of a point, and never again."""

    def act():
        failpoints.disarm()
        action()

    failpoints.arm(point, act)


@pytest.mark.parametrize("point", ["tier.before_commit", "tier.before_session"])
def test_lost_answer_to_a_change_is_looked_up(place, cluster, point):
    """The change is done, the answer is gone: it is done once, and the upload ends well."""
    cable = cluster.client_cables[0]
    # One endpoint and a long lease: the next request on the cable is the one that is meant.
    topic = place.open(ttl=60, endpoints=[cluster.endpoints[0]]).topic(TOPIC, create=True)
    for _ in range(3):
        place.producer.send(topic, 10)
        armed_once(point, cable.drop_next_reply)
        moved = topic.upload()
        assert cable.reply_dropped.is_set()
        assert len(moved.objects) == 1
    assert len(list(topic.bucket.owned.catalog.descriptors())) == 3
    converge(place.history, topic)
    assert not orphans(topic)


# -- room ----------------------------------------------------------------------------------------


def ask(cluster, number, path, body):
    """etcd's own JSON gateway."""
    request = urllib.request.Request(
        f"http://{cluster.direct_endpoints[number]}/v3/{path}",
        data=json.dumps(body).encode(),
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def make_room(cluster, store):
    """What an operator does: remove, compact, defragment every node, end the alarm."""
    store.delete_prefix("/filler/")
    revision = ask(cluster, 0, "maintenance/status", {})["header"]["revision"]
    ask(cluster, 0, "kv/compaction", {"revision": revision, "physical": True})
    for number in range(3):
        ask(cluster, number, "maintenance/defragment", {})
    for alarm in ask(cluster, 0, "maintenance/alarm", {"action": "GET"}).get("alarms", []):
        body = {"action": "DEACTIVATE", "alarm": "NOSPACE", "memberID": alarm["memberID"]}
        ask(cluster, 0, "maintenance/alarm", body)


@pytest.mark.nightly
def test_full_etcd_pauses_uploads_and_takes_nothing(tmp_path):
    """Goal: NOSPACE stops uploads, not producers, not readers; with room they go on.

    Method: a cluster with a small quota, filled by somebody else, then cleaned by its operator.
    """
    with EtcdCluster(quota_bytes=16 * MIB, heartbeat_ms=50, election_ms=500) as cluster:
        place = Place(cluster, tmp_path)
        try:
            log = place.open()
            topic = log.topic(TOPIC, create=True)
            place.producer.send(topic, 20)
            topic.upload()
            with place.keys() as store:
                with contextlib.suppress(CapacityError):
                    for number in range(100):
                        store.put(f"/filler/{number}", bytes(MIB - 1024))
                place.producer.send(topic, 20)
                with pytest.raises(CapacityError, match="space"):
                    topic.upload()
                assert topic.watermarks.tiered == 20
                # Past the lease's time: renewals are no changes, so the owner stays the owner.
                end = time.monotonic() + TTL + 1
                while time.monotonic() < end:
                    place.producer.send(topic, 1)
                    time.sleep(0.05)
                verify_topic(place.history, topic)
                make_room(cluster, store)
            place.producer.send(topic, 5)
            converge(place.history, topic)
        finally:
            place.close()


# -- hand-over -----------------------------------------------------------------------------------


def test_race_for_a_sealed_topic_has_one_winner(place):
    """Two nodes open what a third has handed over, at the same moment; six rounds of it."""
    logs = {name: place.open(name, ttl=120) for name in "abc"}
    owner = "a"
    topic = logs[owner].topic(TOPIC, create=True)
    for number in range(6):
        place.producer.send(topic, 5)
        sealed_at = logs[owner].seal(TOPIC)
        others = [name for name in logs if name != owner]
        start = threading.Barrier(2)
        outcomes = {}

        def claim(name, start=start, outcomes=outcomes):
            start.wait()
            try:
                outcomes[name] = logs[name].topic(TOPIC)
            except IsterError as error:
                outcomes[name] = error

        threads = [threading.Thread(target=claim, args=(name,)) for name in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (owner,) = [n for n, outcome in outcomes.items() if isinstance(outcome, ister.Topic)]
        (loser,) = [n for n in others if n != owner]
        assert isinstance(outcomes[loser], ConflictError), outcomes
        topic = outcomes[owner]
        assert topic.watermarks.next == sealed_at == 5 * (number + 1)
        assert topic.bucket.owned.epoch == number + 2
    converge(place.history, topic)


def test_hand_over_under_the_death_of_the_leader(place, cluster):
    """A seals, B opens, with the leader killed in between; then the same back."""
    logs = SimpleNamespace(a=place.open("a", ttl=120), b=place.open("b", ttl=120))
    topic = logs.a.topic(TOPIC, create=True)
    catalog = logs.a.stores.catalog(TopicName.parse(TOPIC))
    for source, target in ((logs.a, logs.b), (logs.b, logs.a)):
        place.producer.send(topic, 20)
        end = topic.watermarks.next
        undo = kill_leader(cluster)
        persist(lambda source=source: source.seal(TOPIC), lost=ConflictError)
        undo()
        # Whether or not its answer came: the topic is handed over where it ended.
        seal, _ = persist(catalog.sealed)
        assert seal.next_offset == end
        undo = kill_leader(cluster)
        topic = persist(lambda target=target: target.topic(TOPIC))
        undo()
        assert topic.watermarks.next == end
        place.producer.send(topic, 5)
    heal(cluster)
    converge(place.history, topic)


def persist(call, *, lost=()):
    """Tries again while a store does not answer, as its caller is told to.

    Args:
        call: What to do.
        lost: What another try may raise when the answer to the one before it was lost.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    is_again = False
    while True:
        try:
            return call()
        except (NotFoundError, UnavailableError):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        except lost:
            assert is_again, "refused although nothing was lost"
            return None
        is_again = True
