"""Express objects: runs of many topics, one put, transactions of some topics each."""

from contextlib import suppress

import pytest

from ister.base.model import AckLevel, TopicName
from ister.bucket.express import (
    TOPICS_PER_TRANSACTION,
    ExpressObject,
    commit_runs,
    find_runs,
    find_runs_from,
    read_footer,
)
from ister.bucket.history_reader import HistoryReader, ReaderSettings
from ister.bucket.names import express_name
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    UnavailableError,
    UnsupportedVersionError,
)
from ister.format.descriptor import FORMAT_EXPRESS
from ister.format.express import FOOTER
from ister.objectstore.slices import SlicedStore
from ister.rescue.rebuild import find_continuation
from tests.support.stores import TTL_SECONDS, Frames, failing, read_all, silent

FRAMES = Frames([b"x" * 50] * 30)


def topic_name(number):
    return TopicName(namespace="default", topic=f"t{number:03d}")


class Node:
    """A process with some topics."""

    def __init__(self, cluster, topics=3, node="a"):
        self.cluster = cluster
        self.membership = cluster.node(node)
        self.topics = [
            cluster.claim(self.membership, name=topic_name(number), ack=AckLevel.TIERED)
            for number in range(topics)
        ]
        self.sequence = 0

    def make(self, ends, *, start=0):
        """An object with the frames from `start` on, up to an end for each topic (or None)."""
        name = express_name("a", self.membership.instance, self.sequence)
        self.sequence += 1
        made = ExpressObject(name, index_every_messages=10, created_at=1)
        for owned, end in zip(self.topics, ends, strict=True):
            if end is not None:
                batches = [
                    FRAMES.fetch(at, min(end, at + 7), bytes_max=1) for at in range(start, end, 7)
                ]
                made.add(owned, start, batches, arrived_ms=9, is_first=start == 0)
        return made

    def write(self, ends, *, start=0):
        """Puts and commits an object; what became of each run."""
        made = self.make(ends, start=start)
        presence = self.membership.presence()
        made.put(self.cluster.objects)
        return list(commit_runs(self.cluster.metadata, made.runs, presence))

    def read(self, number):
        catalog = self.cluster.catalog(topic_name(number))
        reader = HistoryReader(
            catalog,
            SlicedStore(self.cluster.objects),
            settings=ReaderSettings(chunk_bytes=64 * 1024),
            clock=self.cluster.clock,
            metrics=self.cluster.metrics,
        )
        last = catalog.last()
        return [] if last is None else read_all(reader, 0, last.end)


@pytest.fixture
def node(cluster):
    return Node(cluster)


def outcomes(found):
    return [None if error is None else type(error) for _, error in found]


def frames(end):
    return list(enumerate(FRAMES.frames[:end]))


def test_runs_are_part_of_their_topics(node):
    assert outcomes(node.write([10, 3, 30])) == [None] * 3
    assert [owned.tiered for owned in node.topics] == [10, 3, 30]
    assert [node.read(number) for number in range(3)] == [frames(10), frames(3), frames(30)]
    described = node.cluster.catalog(topic_name(1)).last()
    assert (described.format, described.arrival_time_max) == (FORMAT_EXPRESS, 9)


def test_footer_has_every_run(node):
    node.write([10, 3, 30])
    (info,) = node.cluster.objects.list("storage/express/")
    runs = read_footer(node.cluster.objects, info)
    assert [run.topic for run in runs] == [topic_name(number) for number in range(3)]
    assert [run.descriptor for run in runs] == [owned.last for owned in node.topics]


def test_large_footer_is_read_in_two_steps(cluster):
    node = Node(cluster, 300)
    node.write([1] * 300)
    (info,) = cluster.objects.list("storage/express/")
    assert info.size > 128 * 1024
    assert len(read_footer(cluster.objects, info)) == 300


def test_transactions_have_forty_topics(cluster):
    node = Node(cluster, 100)
    seen = []
    cluster.metadata.before = lambda kind, key: seen.append(kind)
    assert outcomes(node.write([1] * 100)) == [None] * 100
    assert seen.count("transact") == -(-100 // TOPICS_PER_TRANSACTION)


def test_fenced_topic_fails_alone(cluster, node):
    cluster.metadata.delete(node.topics[1].catalog.keys.owner)
    other = cluster.claim("b", name=topic_name(1), create=False)
    assert outcomes(node.write([5, 5, 5])) == [None, FencedError, None]
    assert other.epoch == 2
    assert cluster.catalog(topic_name(1)).last() is None


def test_topic_that_somebody_else_committed_fails_alone(cluster, node):
    made = node.make([5, 5, 5])
    presence = node.membership.presence()
    uploader = cluster.uploader(node.topics[0])
    uploader.upload(FRAMES, 0, 7)
    found = list(commit_runs(cluster.metadata, made.runs, presence))
    assert outcomes(found) == [ConflictError, None, None]
    assert cluster.catalog(topic_name(0)).last().end == 7


def test_commit_in_the_owners_name_that_it_does_not_know_of_fails_alone(cluster, node):
    """Goal: the pointer that this process remembers is an old one."""
    same = node.topics[0]
    first, last, revision = same.first, same.last, same._current_revision
    cluster.uploader(same).upload(FRAMES, 0, 7)
    same.first, same.last, same._current_revision = first, last, revision
    assert outcomes(node.write([5, 5, 5])) == [ConflictError, None, None]
    assert same.tiered == 7


def test_run_that_continues_nothing_is_refused(cluster, node):
    """Goal: the first object of a topic failed, and the next one was on its way."""
    assert outcomes(node.write([10, None, None], start=5)) == [ConflictError]
    assert cluster.catalog(topic_name(0)).last() is None


def test_lost_answer_is_resolved(cluster, node):
    made = node.make([5, 5, 5])
    presence = node.membership.presence()
    cluster.metadata.after = failing("transact", times=1, error=CommitUnknownError)
    assert outcomes(commit_runs(cluster.metadata, made.runs, presence)) == [None] * 3
    assert [owned.tiered for owned in node.topics] == [5, 5, 5]


def test_store_that_does_not_answer_fails_all_of_a_transaction(cluster, node):
    made = node.make([5, 5, 5])
    presence = node.membership.presence()
    cluster.metadata.before = silent
    assert outcomes(commit_runs(cluster.metadata, made.runs, presence)) == [UnavailableError] * 3
    cluster.metadata.before = lambda kind, key: None
    assert outcomes(node.write([6, 6, 6])) == [None] * 3


def test_object_from_before_the_lease_ended_is_never_committed(cluster, node):
    """Goal: others may have removed it meanwhile."""
    made = node.make([5, 5, 5])
    presence = node.membership.presence()
    cluster.clock.advance(2 * TTL_SECONDS)
    node.membership.renew()
    assert not any(owned.is_fenced for owned in node.topics)
    found = outcomes(commit_runs(cluster.metadata, made.runs, presence))
    assert None not in found
    assert [cluster.catalog(topic_name(n)).last() for n in range(3)] == [None] * 3
    # Under the new lease, it works again.
    assert outcomes(node.write([5, 5, 5])) == [None] * 3


def test_presence_is_read_once_per_lease(cluster, node):
    seen = []
    node.membership.presence()
    cluster.metadata.before = lambda kind, key: seen.append(kind)
    node.membership.presence()
    assert seen == []
    cluster.clock.advance(2 * TTL_SECONDS)
    node.membership.renew()
    seen.clear()
    node.membership.presence()
    assert seen == ["get"]


def test_presence_without_a_lease_is_refused(cluster, node):
    cluster.clock.advance(2 * TTL_SECONDS)
    with pytest.raises(UnavailableError, match="lease"):
        node.membership.presence()


def test_upload_session_of_another_upload_stays(cluster, node):
    owned = node.topics[0]
    uploader = cluster.uploader(owned)
    with suppress(CorruptDataError):
        damaged = Frames([b"x"] * 5)
        damaged.damaged_at = 0
        uploader.upload(damaged, 0, 5)
    assert owned.session() is not None
    node.write([5, 5, 5])
    assert owned.session() is not None


# -- what continues a topic -----------------------------------------------------------------


def continuation(node, number, start):
    objects, record = node.cluster.objects, node.topics[number].record
    runs = find_runs_from(objects, topic_name(number), start, record.incarnation)
    found = find_continuation(objects, topic_name(number), start, record=record, runs=runs)
    return [(described.start, described.end) for described in found]


def renew(objects, key, footer=None):
    """Makes it an object of version 2, with another footer if one is given."""
    data = objects.read(key, 0, 1 << 20)
    if footer is not None:
        position = int.from_bytes(data[-32:-24], "little")
        data = data[:position] + FOOTER.encode(footer, position)
    objects.put(key, data[:-12] + (2).to_bytes(4, "little") + data[-8:])


def keys_of(node):
    return [info.key for info in node.cluster.objects.list("storage/express/")]


def test_object_of_a_newer_version_concerns_only_its_topics(node, caplog):
    node.write([10, 3, None])
    node.write([20, None, None], start=10)
    node.write([None, None, 5])
    first, _, last = keys_of(node)
    renew(node.cluster.objects, last)
    assert continuation(node, 0, 0) == [(0, 10), (10, 20)]
    assert [record.path for record in caplog.records if record.levelname == "WARNING"] == [last]
    with pytest.raises(UnsupportedVersionError) as refused:
        continuation(node, 2, 0)
    assert (refused.value.topic, refused.value.path) == (str(topic_name(2)), last)
    runs = find_runs(node.cluster.objects, on_damage=pytest.fail)
    assert [run.end for run in runs.runs_of(topic_name(0))] == [10, 20]
    with pytest.raises(UnsupportedVersionError):
        runs.runs_of(topic_name(2))
    # The catalog knows the run after it.
    renew(node.cluster.objects, first)
    assert continuation(node, 0, 20) == []


@pytest.mark.parametrize("footer", [b"\x00", b"[]", b'{"runs": 1}', b'{"runs": [{"topic": 1}]}'])
def test_object_of_a_newer_version_without_known_topics_concerns_all(node, footer):
    node.write([10, None, None])
    renew(node.cluster.objects, keys_of(node)[0], footer)
    with pytest.raises(UnsupportedVersionError, match="newer Ister"):
        continuation(node, 1, 0)


@pytest.mark.parametrize("known", [3, 14])
def test_only_objects_after_the_known_ones_are_read(cluster, known):
    """Goal: the cost of a search does not grow with what the catalog knows."""
    node, at = Node(cluster, topics=1), 0
    for more in (known, known, 2):
        for _ in range(more):
            node.write([at + 1], start=at)
            at += 1
        if more == known:
            cluster.clock.advance(TTL_SECONDS + 1)
            node = Node(cluster, topics=1, node=f"b{at}")
    end = at - 2
    read = set()
    cluster.objects.before = lambda kind, key: read.add(key) if kind == "read" else None
    assert continuation(node, 0, end) == [(end, end + 1), (end + 1, end + 2)]
    assert len(read) == 2 + 2  # what is new, and the last object of each earlier process
