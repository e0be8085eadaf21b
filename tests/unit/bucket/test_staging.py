"""Staged rows that nobody finishes: what goes, what must stay, and when."""

import pytest

from ister.base.model import TopicName
from ister.bucket.names import object_key, staging_prefix
from ister.bucket.orphans import JOB_PREFIX, sweep_staging
from ister.errors import CorruptDataError, FencedError, UnsupportedVersionError
from ister.format.manifest import StagedFile, encode_manifest
from ister.format.records import WriterRecord, decode_writer, encode_writer
from tests.support.stores import NAME, TTL_SECONDS

GRACE = 3600
WRITER = "query-1"


@pytest.fixture
def node(cluster):
    return cluster.node("a")


@pytest.fixture
def owned(cluster, node):
    return cluster.claim(node)


def sweep(cluster, owned, grace=GRACE):
    return sweep_staging(owned, cluster.objects, grace_seconds=grace, clock=cluster.clock)


def grow_old(cluster, node, seconds=10 * GRACE):
    """Time goes by for a process that keeps its lease."""
    cluster.clock.advance(seconds)
    node.renew()


def put_files(cluster, count=2, *, writer=WRITER, batch=0, first=0):
    """Staged files, of which only the names matter."""
    prefix = staging_prefix(NAME, writer, batch)
    keys = [f"{prefix}part-{number}.arrow" for number in range(first, first + count)]
    for key in keys:
        cluster.objects.put(key, b"rows")
    return keys


def put_batch(cluster, owned, *, writer=WRITER, batch=0, is_done=False, first=0):
    """A batch as a crash leaves it: its record, its manifest, its files; the last two's keys."""
    files = put_files(cluster, writer=writer, batch=batch, first=first)
    manifest = f"{staging_prefix(NAME, writer, batch)}manifest-{first}.json"
    listed = [StagedFile(key=key, rows=1, size_bytes=4) for key in files]
    cluster.objects.put(manifest, encode_manifest(listed))
    record = WriterRecord(
        batch=batch,
        is_done=is_done,
        start=0,
        end=2 if is_done else 0,
        rows=2,
        manifest=manifest,
        epoch=owned.epoch,
        incarnation=owned.record.incarnation,
        updated_at=int(cluster.clock.now_ns() // 1_000_000_000),
    )
    cluster.metadata.put(cluster.keys.writer(writer), encode_writer(record))
    return [*files, manifest]


def staged(cluster):
    return [key for key in map(str, cluster.objects.keys()) if key.startswith("staging/")]


def writers(cluster):
    """The names of the writers that are remembered."""
    prefix = cluster.keys.writer("")
    return sorted(found.key.removeprefix(prefix) for found in cluster.metadata.range(prefix))


# -- files --------------------------------------------------------------------------------------


def test_files_that_nobody_asked_for_go_after_their_grace_period(cluster, node, owned):
    old = put_files(cluster)
    grow_old(cluster, node, GRACE)
    young = put_files(cluster, batch=1)
    assert sweep(cluster, owned) == []
    grow_old(cluster, node, 1)
    assert sorted(sweep(cluster, owned)) == old
    assert staged(cluster) == young
    assert sweep(cluster, owned) == []


def test_what_an_unfinished_batch_needs_stays(cluster, node, owned):
    """Goal: it can be finished, however long nobody asks for it."""
    needed = put_batch(cluster, owned)
    left = put_files(cluster, first=7)  # of another asking for it
    grow_old(cluster, node, 1000 * GRACE)
    assert sorted(sweep(cluster, owned)) == left
    assert staged(cluster) == sorted(needed)
    assert writers(cluster) == [WRITER]


def test_unfinished_job_stays_while_it_may_be_running_and_then_goes(cluster, node, owned):
    """Goal: nobody asks again for a job that died in the middle of its commit."""
    left = put_batch(cluster, owned, writer=f"{JOB_PREFIX}1")
    assert sweep(cluster, owned) == []
    grow_old(cluster, node)
    assert sorted(sweep(cluster, owned)) == sorted(left)
    assert writers(cluster) == []


def test_files_of_an_earlier_batch_go(cluster, node, owned):
    """A writer's newest batch is the one that is remembered."""
    old = put_batch(cluster, owned)
    needed = put_batch(cluster, owned, batch=1)
    grow_old(cluster, node)
    assert sorted(sweep(cluster, owned)) == sorted(old)
    assert staged(cluster) == sorted(needed)


def test_files_of_a_batch_that_is_done_go(cluster, node, owned):
    left = put_batch(cluster, owned, is_done=True)
    assert sweep(cluster, owned) == []
    grow_old(cluster, node)
    assert sorted(sweep(cluster, owned)) == sorted(left)
    assert staged(cluster) == []


def test_manifest_that_is_lost_keeps_nothing(cluster, node, owned):
    *files, manifest = put_batch(cluster, owned)
    cluster.objects.drop(manifest)
    grow_old(cluster, node)
    assert sorted(sweep(cluster, owned)) == files


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"[]", CorruptDataError), (b'{"version":3}', UnsupportedVersionError)],
    ids=["garbled", "newer"],
)
def test_manifest_that_cannot_be_read_keeps_everything(cluster, node, owned, content, error):
    """Goal: what is not known to be a leftover stays."""
    *_, manifest = put_batch(cluster, owned)
    cluster.objects.put(manifest, content)
    grow_old(cluster, node)
    before = staged(cluster)
    with pytest.raises(error):
        sweep(cluster, owned)
    assert staged(cluster) == before


def test_other_topics_and_other_objects_stay(cluster, node, owned):
    longer = TopicName(namespace=NAME.namespace, topic=f"{NAME.topic}2")
    keys = [
        f"{staging_prefix(longer, WRITER, 0)}part-0.arrow",
        "staging/default/o",
        object_key(NAME, "data-0-9.dnb1"),
        "other",
    ]
    for key in keys:
        cluster.objects.put(key, b"kept")
    grow_old(cluster, node)
    assert sweep(cluster, owned) == []
    assert set(keys) <= set(cluster.objects.keys())


# -- records ------------------------------------------------------------------------------------


def test_job_that_is_done_is_forgotten_after_the_grace_period(cluster, node, owned):
    """Nobody asks for it again: its name is new each time, and records would pile up."""
    for name in (f"{JOB_PREFIX}1", f"{JOB_PREFIX}2"):
        put_batch(cluster, owned, writer=name, is_done=True)
    grow_old(cluster, node, GRACE)
    put_batch(cluster, owned, writer=f"{JOB_PREFIX}3", is_done=True)
    sweep(cluster, owned)
    assert writers(cluster) == [f"{JOB_PREFIX}{number}" for number in (1, 2, 3)]
    grow_old(cluster, node, 1)
    sweep(cluster, owned)
    assert writers(cluster) == [f"{JOB_PREFIX}3"]


@pytest.mark.parametrize("name", [WRITER, "job", "jobs-1", "my-job-1", "Job-1"])
def test_query_is_remembered_for_good(cluster, node, owned, name):
    """Goal: a query that comes back after a year does not append its last batch again."""
    put_batch(cluster, owned, writer=name, is_done=True)
    grow_old(cluster, node, 365 * 86_400)
    sweep(cluster, owned)
    assert writers(cluster) == [name]


def test_job_that_is_asked_for_again_meanwhile_is_not_forgotten(cluster, node, owned):
    name = f"{JOB_PREFIX}1"
    put_batch(cluster, owned, writer=name, is_done=True)
    grow_old(cluster, node)
    key = cluster.keys.writer(name)

    def begin_again(kind, changed):
        if kind == "transact" and changed == key:
            cluster.metadata.before = lambda kind, key: None
            put_batch(cluster, owned, writer=name, batch=1)

    cluster.metadata.before = begin_again
    sweep(cluster, owned)
    assert decode_writer(cluster.metadata.get(key).value, key=key).batch == 1


def test_record_that_cannot_be_read_keeps_everything(cluster, node, owned):
    before = put_files(cluster)
    cluster.metadata.put(cluster.keys.writer(WRITER), b"{}")
    grow_old(cluster, node)
    with pytest.raises(CorruptDataError):
        sweep(cluster, owned)
    assert staged(cluster) == before


# -- stores, owners -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["files", "a job"])
def test_owner_that_was_replaced_removes_nothing(cluster, owned, what):
    """Goal: what is needed is the next owner's to say."""
    if what == "files":
        put_files(cluster)
    else:
        put_batch(cluster, owned, writer=f"{JOB_PREFIX}1", is_done=True)
    cluster.clock.advance(10 * GRACE + TTL_SECONDS)
    cluster.claim("b", take_over=True)
    before = staged(cluster), writers(cluster)
    with pytest.raises(FencedError):
        sweep(cluster, owned)
    assert (staged(cluster), writers(cluster)) == before
