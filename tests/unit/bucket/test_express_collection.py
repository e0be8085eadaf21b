"""Which express objects are removed, and which must stay."""

from dataclasses import replace

import pytest

from ister.base.model import AckLevel, Codec
from ister.bucket.express import commit_runs
from ister.bucket.express_collection import collect_express, is_needed
from ister.bucket.names import EXPRESS_PREFIX, object_key
from ister.errors import ConflictError, CorruptDataError
from ister.format.descriptor import FORMAT_EXPRESS
from ister.format.records import TopicRecord
from tests.support.cases import each
from tests.support.stores import PREFIX, TTL_SECONDS, Cluster, a_descriptor
from tests.unit.bucket.test_express import FRAMES, Node, topic_name

GRACE = 3600


@pytest.fixture
def node(cluster):
    return Node(cluster)


def collect(cluster, **arguments):
    return collect_express(
        cluster.objects,
        cluster.metadata,
        PREFIX,
        grace_seconds=GRACE,
        clock=cluster.clock,
        metrics=cluster.metrics,
        **arguments,
    )


def keys(cluster):
    return [info.key for info in cluster.objects.list(EXPRESS_PREFIX)]


def resort(cluster, owned, end, *, until=0):
    """Puts one object of the topic's own in the place of its runs below `end`."""
    maker = cluster.maker(owned.catalog.keys.topic)
    made = maker.make(FRAMES, 0, end, epoch=owned.epoch, incarnation=owned.record.incarnation)
    assert owned.swap(list(owned.catalog.descriptors(0, end)), made, until=until)


def pass_time(cluster, node, seconds=GRACE + 1):
    """So much time, in which the node keeps its lease."""
    while seconds > 0:
        cluster.clock.advance(min(seconds, TTL_SECONDS / 3))
        node.membership.renew()
        seconds -= TTL_SECONDS / 3


def test_object_goes_when_its_last_run_was_replaced(cluster, node):
    node.write([5, 5, 5])
    pass_time(cluster, node)
    own = node.membership.instance
    for owned in node.topics:
        assert collect(cluster, process=own).removed == []
        resort(cluster, owned, 5)
    (key,) = keys(cluster)
    found = collect(cluster, process=own)
    assert (found.removed, found.kept, found.errors) == ([key], 0, [])
    assert found.removed_bytes > 0
    assert keys(cluster) == []
    assert cluster.metrics.snapshot()["cloud.orphans_removed"] == 1


def test_run_stays_when_the_object_that_replaced_it_is_gone(cluster, node):
    """Goal: the bucket was rolled back to before the merge, and the metadata was not."""
    node.write([5, None, None])
    pass_time(cluster, node)
    resort(cluster, node.topics[0], 5)
    ((described, _),) = node.topics[0].catalog.descriptors()
    cluster.objects.delete(object_key(topic_name(0), described.object_id))
    assert collect(cluster, process=node.membership.instance).removed == []
    assert len(keys(cluster)) == 1


def test_dry_run_removes_nothing(cluster, node):
    node.make([5, 5, 5]).put(cluster.objects)
    node.write([6, 6, 6])
    pass_time(cluster, node)
    found = collect(cluster, process=node.membership.instance, dry_run=True)
    assert len(found.removed) == 1
    assert len(keys(cluster)) == 2


def test_young_object_stays(cluster, node):
    node.make([5, 5, 5]).put(cluster.objects)
    node.write([6, 6, 6])
    pass_time(cluster, node, GRACE - 60)
    assert collect(cluster, process=node.membership.instance).removed == []


def test_replaced_runs_stay_for_their_readers(cluster, node):
    node.write([5, None, None])
    pass_time(cluster, node)
    now = cluster.clock.now_ns() // 10**9
    resort(cluster, node.topics[0], 5, until=now + 600)
    own = node.membership.instance
    assert collect(cluster, process=own).removed == []
    pass_time(cluster, node, 601)
    assert len(collect(cluster, process=own).removed) == 1


def test_objects_of_another_process_stay_while_it_runs(cluster, node):
    """Goal: it may be about to commit them, however old they seem to this clock."""
    node.make([5, 5, 5]).put(cluster.objects)
    node.write([6, 6, 6])
    pass_time(cluster, node)
    assert collect(cluster).removed == []
    assert collect(cluster, process="another").removed == []
    cluster.clock.advance(2 * TTL_SECONDS)
    assert len(collect(cluster).removed) == 1


def test_object_under_way_stays(cluster, node):
    made = node.make([5, 5, 5])
    made.put(cluster.objects)
    node.write([6, 6, 6])
    pass_time(cluster, node)
    own = node.membership.instance
    assert collect(cluster, process=own, is_under_way=lambda key: key == made.key).removed == []
    assert collect(cluster, process=own).removed == [made.key]


def test_committed_before_the_process_was_found_to_have_ended_stays(cluster, node):
    """Goal: descriptors are read after the processes, not before."""
    made = node.make([5, 5, 5])
    presence = node.membership.presence()
    made.put(cluster.objects)
    pass_time(cluster, node)

    def commit_late(kind, key):
        if key.endswith("/cluster/nodes/"):
            cluster.metadata.before = lambda kind, key: None
            assert all(
                error is None for _, error in commit_runs(cluster.metadata, made.runs, presence)
            )
            node.membership.end()

    cluster.metadata.before = commit_late
    assert collect(cluster).removed == []
    assert node.topics[0].tiered == 5


def test_only_one_process_collects(cluster, node):
    with_key = cluster.fence(f"{PREFIX}/cluster/express")
    with pytest.raises(ConflictError):
        collect(cluster)
    with_key.release()
    collect(cluster)
    collect(cluster)


def test_what_is_not_ours_stays(cluster, node):
    strange = f"{EXPRESS_PREFIX}notes.txt"
    cluster.objects.put(strange, b"x")
    cluster.clock.advance(10 * GRACE)
    assert collect(cluster).removed == []
    assert keys(cluster) == [strange]


def test_damaged_object_stays_and_is_an_error(cluster, node):
    made = node.make([5, 5, 5])
    made.put(cluster.objects)
    cluster.objects.put(made.key, b"damaged" * 10)
    node.membership.end()
    cluster.clock.advance(10 * GRACE)
    found = collect(cluster)
    assert (found.removed, found.kept) == ([], 1)
    assert [type(error) for error in found.errors] == [CorruptDataError]


def test_cost_grows_with_topics_not_with_runs(cluster):
    """Goal: a few reads of the metadata store per topic, however many objects there are."""
    counts = []
    for objects in (4, 28):
        world = Cluster()
        node = Node(world, 5)
        for number in range(objects):
            node.write([number + 1] * 5, start=number)
        pass_time(world, node)
        calls = []
        world.metadata.before = lambda kind, key, calls=calls: calls.append(kind)
        collect(world, process=node.membership.instance)
        counts.append(len(calls))
    assert counts[1] <= counts[0] + 10


RECORD = TopicRecord(
    epoch=3, incarnation="0123456789abcdef", ack=AckLevel.TIERED, codec=Codec.BINCODE2, created_at=0
)
RUN = replace(
    a_descriptor(10, 20, epoch=3),
    object_id="a/0000000000000000/00000000000000000000.dnbx@0+1000",
    format=FORMAT_EXPRESS,
)


def needed(run=RUN, record=RECORD, described=(), last=None, kept=()):
    return is_needed(run, record, described=described, last=last, kept=set(kept))


@each(
    ("wanted", "arguments"),
    [
        (True, {"record": None}),
        (True, {"record": replace(RECORD, epoch=2)}),
        (False, {"record": replace(RECORD, state="deleted")}),
        (False, {"record": replace(RECORD, incarnation="ffffffffffffffff")}),
        (True, {"record": replace(RECORD, incarnation="ffffffffffffffff", epoch=2)}),
        (True, {"kept": [RUN.object_id], "described": [a_descriptor(0, 30)]}),
        (False, {"described": [a_descriptor(10, 20)], "last": a_descriptor(10, 20)}),
        (False, {"described": [a_descriptor(0, 15), a_descriptor(15, 40)]}),
        # A hole in the catalog.
        (True, {"described": [a_descriptor(0, 15)], "last": a_descriptor(30, 40)}),
        (True, {"described": [a_descriptor(12, 20)], "last": a_descriptor(12, 20)}),
        # It continues the topic.
        (True, {}),
        (True, {"described": [a_descriptor(0, 15, epoch=3)], "last": a_descriptor(0, 15, epoch=3)}),
        # A later owner has written on.
        (
            False,
            {
                "record": replace(RECORD, epoch=5),
                "described": [a_descriptor(0, 15, epoch=4)],
                "last": a_descriptor(0, 15, epoch=4),
            },
        ),
        (
            True,
            {
                "record": replace(RECORD, epoch=5),
                "described": [a_descriptor(0, 15, epoch=3)],
                "last": a_descriptor(0, 15, epoch=3),
            },
        ),
        # It has expired.
        (False, {"record": replace(RECORD, expired_before=20), "last": a_descriptor(20, 30)}),
        (True, {"record": replace(RECORD, expired_before=15), "last": a_descriptor(20, 30)}),
    ],
)
def test_run_is_needed(wanted, arguments):
    assert needed(**arguments) is wanted


def test_collection_that_takes_longer_than_its_lease_is_finished(cluster):
    """Goal: with thousands of topics, a batch takes longer than the lease without renewals."""
    node = Node(cluster, 30)
    node.make([5] * 30).put(cluster.objects)
    node.write([6] * 30)
    pass_time(cluster, node)
    own = node.membership.instance

    def take_time(kind, key):
        if kind != "renew":
            cluster.clock.advance(1)

    cluster.metadata.before = take_time
    assert len(collect(cluster, process=own).removed) == 1
    assert len(keys(cluster)) == 1
