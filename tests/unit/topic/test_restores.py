"""A store that was put back to an older state is noticed, and nothing is lost to it silently."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest

from ister.base.model import TopicName, TopicState
from ister.bucket.terms import ForgottenRuns
from ister.errors import (
    ConflictError,
    CorruptDataError,
    IsterError,
    StoresDifferError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.fs.whole_files import write_file
from ister.topic import stores
from ister.topic.log import Log
from ister.topic.metadata_trust import MetadataTrust
from ister.topic.topic import Topic
from tests.support.backups import BucketBackup, DiskBackup, MetadataBackup
from tests.support.express import Shared
from tests.support.machine import ROOT, payloads
from tests.support.memory_fs import SimulatedCrash
from tests.support.stores import NAME, PREFIX, TTL_SECONDS, Site

TEXT = str(NAME)
DIRECTORY = f"{ROOT}{TEXT}"
DAY_SECONDS = 86_400


def send(topic: Topic, count: int, mark: str) -> list[bytes]:
    """Sends messages, and waits until they are acknowledged and the bucket has the owner's term."""
    sent = [f"{mark} {number}".encode() for number in range(count)]
    offsets = topic.append_many(sent)
    if str(topic.ack) == "tiered":
        topic.flush()
        topic.upload()
    topic.wait(offsets[-1])
    topic.bucket.uploads.begin_term()  # as a thread does soon after the first message
    return sent


def made(log: Log, *, ack: str | None = None) -> Topic:
    return log.topic(TEXT, create=True, ack=ack)


def end(site: Site, log: Log) -> None:
    """Kills a process, and waits until its lease has ended."""
    site.kill(log)
    site.clock.advance(TTL_SECONDS + 1)


def go_on(log: Log, count: int = 10) -> list[bytes] | IsterError:
    """Sends some more: everything that is read then, or the error."""
    try:
        topic = made(log)
        send(topic, count, "after")
    except (ConflictError, CorruptDataError) as error:
        return error
    if topic.state is TopicState.QUARANTINED:
        return CorruptDataError("quarantined")
    return payloads(topic.read("earliest"))


def is_noticed_or_whole(found: list[bytes] | IsterError, acked: list[bytes]) -> bool:
    return isinstance(found, IsterError) or found[: len(acked)] == acked


def aside(site: Site, disk: str = "a") -> list[str]:
    """Directories that were set aside."""
    parent = DIRECTORY.rpartition("/")[0]
    return [name for name in site.disk(disk).list_directory(parent) if ".aside-" in name]


def test_topic_that_the_metadata_has_forgotten_keeps_its_objects(site):
    """Case b: the topic was made again after the backup, and a day later garbage is collected."""
    log = site.open()
    topic = made(log, ack="tiered")
    send(topic, 5, "of the deleted topic")
    log.delete(TEXT)
    backup = MetadataBackup.of(site.metadata)
    acked = send(made(log, ack="tiered"), 30, "again")
    end(site, log)
    backup.put_back(site.metadata)
    kept = {key: site.objects.read(key, 0, 1 << 20) for key in site.bucket_keys()}
    site.clock.advance(DAY_SECONDS)
    log = site.open_diskless()
    assert is_noticed_or_whole(go_on(log), acked)
    site.clock.advance(DAY_SECONDS)
    log.stores.membership.renew()
    for topic in log._open_topics():
        topic.bucket.retention.collect_orphans()
    lost = [key for key in kept if ".dnb1" in key and key not in site.bucket_keys()]
    assert lost == []


def test_accepted_metadata_has_no_seal_of_an_earlier_term(site):
    """The next owner would continue where that term ended, below what the bucket has."""
    log = site.open()
    acked = send(made(log, ack="tiered"), 5, "first")
    log.seal(TEXT)
    log.close()
    backup = MetadataBackup.of(site.metadata)
    log = site.open("b")
    acked += send(made(log), 5, "second")
    end(site, log)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open()
    assert isinstance(go_on(log), ConflictError)
    log.close()
    trust = MetadataTrust(
        site.objects, site.metadata, PREFIX, fs=site.disk(), wal_root=ROOT, clock=site.clock
    )
    assert trust.accept(NAME).status == "accepted"
    trust.finish()
    assert go_on(site.open())[: len(acked)] == acked


def accept(site: Site, disk: str, name: TopicName = NAME) -> str:
    """Accepts older metadata on a node; the topic's status."""
    fs = site.disk(disk)
    trust = MetadataTrust(
        site.objects, site.metadata, PREFIX, fs=fs, wal_root=ROOT, clock=site.clock
    )
    status = trust.accept(name).status
    trust.finish()
    return status


def test_accepting_on_a_second_node_keeps_what_its_predecessor_uploaded(site):
    """The newest messages are on one node's disk, and the bucket has the term before that."""
    log = site.open()
    made(log)
    backup = MetadataBackup.of(site.metadata)
    log.seal(TEXT)
    log.close()
    log = site.open("b")
    acked = send(made(log), 10, "elsewhere")
    log.seal(TEXT)
    log.close()
    log = site.open()
    topic = made(log)
    topic.wait(topic.append(b"here"))
    topic.wal.save_checkpoint(with_term=True)  # the term is not in the bucket yet
    end(site, log)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    assert accept(site, "b") == "accepted"
    log = site.open()
    assert isinstance(go_on(log), ConflictError)
    log.close()
    assert accept(site, "a") == "accepted"
    assert go_on(site.open())[:11] == [*acked, b"here"]


def test_accepting_waits_for_files_whose_uploads_were_put_back(site):
    """Metadata and bucket are older than what was acknowledged at `tiered`; the files have it."""
    log = site.open()
    made(log, ack="tiered")
    metadata, bucket = MetadataBackup.of(site.metadata), BucketBackup.of(site.objects)
    log.close()
    log = site.open()
    acked = send(made(log), 5, "first")
    end(site, log)
    metadata.put_back(site.metadata)
    bucket.put_back(site.objects)
    site.clock.advance(TTL_SECONDS + 1)
    assert accept(site, "a") == "accepted"
    accept(site, "b")
    log = site.open()
    made(log)
    log.close()  # it has not uploaded them again
    log = site.open("b")
    with pytest.raises(WaitsForDiskError):
        made(log)
    log.close()
    assert go_on(site.open())[:5] == acked


def test_topic_that_the_metadata_does_not_have_is_accepted(site):
    """The metadata is older than the topic, and the bucket has its term."""
    log = site.open()
    backup = MetadataBackup.of(site.metadata)
    acked = send(made(log, ack="tiered"), 5, "first")
    end(site, log)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    assert accept(site, "b") == "accepted"
    assert go_on(site.open_diskless())[:5] == acked


def test_running_process_remembers_the_revisions_that_it_saw(site):
    """The bucket is told once a minute; a process that closes its topics compares all the same."""
    log = site.open()
    topic = made(log, ack="tiered")
    acked = send(topic, 5, "first")
    backup = MetadataBackup.of(site.metadata)
    acked += send(topic, 5, "second")
    log.stores.trust.check_revision()
    backup.put_back(site.metadata)
    log.close()
    site.clock.advance(TTL_SECONDS + 1)
    assert is_noticed_or_whole(go_on(site.open_diskless()), acked)


@pytest.mark.parametrize("answers", [True, False], ids=["bucket answers", "bucket is away"])
def test_process_that_closed_what_it_did_not_upload_again_has_not_ended_whole(
    site, answers, monkeypatch
):
    """The older catalog lacks objects that only the files of a process have, which then closes."""
    log = site.open()
    topic = made(log, ack="tiered")
    acked = send(topic, 5, "first")
    backup = MetadataBackup.of(site.metadata)
    acked += send(topic, 10, "second")
    end(site, log)
    backup.put_back(site.metadata, bump=1000)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open()
    if not answers:
        monkeypatch.setattr(stores, "newest_terms", Mock(side_effect=UnavailableError("away")))
    made(log)
    monkeypatch.undo()
    log.close()
    assert is_noticed_or_whole(go_on(site.open("b")), acked)


@pytest.mark.parametrize("has_old_files", [False, True])
def test_topic_deleted_by_older_metadata_is_not_made_again(site, has_old_files):
    """It was made again on another node, and files of the deleted one may be left on this one."""
    if has_old_files:
        log = site.open("b")
        send(made(log, ack="tiered"), 5, "deleted")
        log.close()
    log = site.open()
    made(log)
    log.delete(TEXT)
    backup = MetadataBackup.of(site.metadata)
    acked = send(made(log), 5, "again")
    site.open("c").close()  # it has seen the store's revision
    end(site, log)
    for key in site.bucket_keys():
        if "/terms/" in key:
            site.objects.delete(key)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    assert is_noticed_or_whole(go_on(site.open("b")), acked)


def test_node_whose_uploads_were_put_back_does_not_assign_their_offsets_again(site):
    """Metadata and bucket were put back, another node went on, and the first one returns."""
    log = site.open()
    topic = made(log, ack="tiered")
    send(topic, 5, "first")
    metadata, bucket = MetadataBackup.of(site.metadata), BucketBackup.of(site.objects)
    send(topic, 10, "on the disk and in the lost part of the bucket")
    end(site, log)
    metadata.put_back(site.metadata, bump=1000)
    bucket.put_back(site.objects)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open("b")
    assert len(go_on(log, 3)) == 8
    log.close()
    with pytest.raises(StoresDifferError, match="5 up to, not including, 15"):
        made(site.open())
    assert aside(site) == []


@pytest.mark.parametrize("witness", ["the node", "the bucket"])
def test_older_copy_of_a_topics_directory_is_noticed(site, witness):
    """Case g: it is of an earlier term than another store remembers."""
    log = site.open()
    acked = send(made(log), 5, "first")
    log.close()
    backup = DiskBackup.of(site.disk())
    log = site.open()
    topic = made(log)
    acked += send(topic, 5, "later")
    if witness == "the bucket":
        topic.upload()
    acked += send(topic, 100, "lost")
    if witness == "the node":
        log.close()
    else:
        end(site, log)
    backup.put_back(site.disk(), DIRECTORY)
    assert is_noticed_or_whole(go_on(site.open()), acked)


def test_older_copy_does_not_bring_back_what_was_not_acknowledged(site):
    """At `tiered` the bucket has everything, and the older files another message at an offset."""
    log = site.open()
    topic = made(log, ack="tiered")
    acked = send(topic, 5, "first")
    topic.append(b"never acknowledged")
    topic.flush()
    end(site, log)
    backup = DiskBackup.of(site.disk())
    site.disk().remove(f"{DIRECTORY}/wal.log")
    log = site.open()
    topic = log.topic(TEXT, take_over=True)
    acked += send(topic, 1, "later")
    end(site, log)
    backup.put_back(site.disk(), DIRECTORY)
    assert go_on(site.open())[:6] == acked
    assert aside(site)


def test_files_behind_an_idle_mark_that_was_put_back_are_refused(site):
    """Another node was told that they end there, and assigned the offsets again."""
    log = site.open()
    topic = made(log)
    send(topic, 5, "before the mark")
    topic.upload()
    site.clock.advance(TTL_SECONDS)
    log.stores.membership.renew()
    assert topic.bucket.uploads.idle_mark.set()
    backup = MetadataBackup.of(site.metadata)
    topic.bucket.uploads.idle_mark.clear()
    send(topic, 5, "behind it")
    end(site, log)
    backup.put_back(site.metadata, bump=1000)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open("b")
    for term in site.bucket_keys():
        if "/terms/" in term:
            site.objects.drop(term)
    made(log)
    log.seal(TEXT)
    log.close()
    refused = go_on(site.open())
    assert isinstance(refused, StoresDifferError)
    assert refused.offset == 5


def test_record_that_files_replace_names_the_term_that_they_are_from(site):
    """A copy of the disk that has only the topic's directory is then told from these files."""
    log = site.open()
    send(made(log), 5, "first")
    log.close()
    site.metadata.delete(f"{PREFIX}/topics{TEXT}")
    log = site.open()
    record = made(log).bucket.owned.record
    assert (record.epoch, record.born, record.lineage[0].epoch) == (2, 1, 1)


def test_node_with_files_waits_for_an_operator_if_older_metadata_lacks_their_topic(site):
    """Another node may have continued the topic after it."""
    send(made(site.open("z")), 1, "another topic's store")
    backup = MetadataBackup.of(site.metadata)
    log = site.open()
    acked = send(log.topic("/default/new", create=True), 5, "first")
    log.stores.trust.check()
    log.close()
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open()
    assert log.stores.trust.is_distrusted
    with pytest.raises(StoresDifferError):
        log.topic("/default/new", create=True)
    log.close()
    accept(site, "a", TopicName.parse("/default/new"))
    topic = site.open().topic("/default/new")
    assert payloads(topic.read("earliest")) == acked


def test_run_of_an_earlier_process_is_adopted_although_the_files_have_its_messages(site):
    """A topic of level `tiered` may be continued by a node that does not have these files."""
    shared = Shared(site, topics=1)
    shared.fill(1)
    backup = MetadataBackup.of(site.metadata)
    shared.fill(1, first=1)
    end(site, shared.log)
    backup.put_back(site.metadata, bump=1000)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open()
    log.topic("/default/t0").bucket.uploads.begin_term()  # which removes the term before
    end(site, log)
    assert express_payloads(site.open("b"), 0) == [b"message 0", b"message 1", b"next"]


def test_accepting_keeps_objects_of_the_owner_that_files_do_not_know(site, monkeypatch):
    """Two nodes wrote under one epoch: the older one's files begin before either term did."""
    log = site.open()
    acked = send(made(log, ack="tiered"), 2, "first")
    backup = MetadataBackup.of(site.metadata)
    acked += send(made(log), 1, "forgotten")
    end(site, log)
    log = site.open("b")
    acked += send(made(log), 2, "elsewhere")
    end(site, log)
    backup.put_back(site.metadata, bump=1000)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open()
    monkeypatch.setattr(stores, "newest_terms", Mock(side_effect=UnavailableError("away")))
    made(log).wal.save_checkpoint(with_term=True)
    end(site, log)
    monkeypatch.undo()
    assert accept(site, "a") == "accepted"
    assert go_on(site.open())[:5] == acked


@pytest.mark.parametrize("pattern", [r"wal\..*", r".*\.(log|ckpt)", r".*"])
def test_files_of_a_topic_that_were_removed_are_noticed(site, pattern):
    """Case g: what is left looks like a new directory, or like one that was uploaded."""
    log = site.open()
    topic = made(log)
    acked = send(topic, 5, "uploaded")
    topic.upload()
    acked += send(topic, 5, "lost")
    log.close()
    disk = site.disk()
    for name in disk.list_directory(DIRECTORY):
        if re.fullmatch(pattern, name):
            disk.remove(f"{DIRECTORY}/{name}")
    disk.sync_directory(DIRECTORY)
    assert is_noticed_or_whole(go_on(site.open()), acked)


def test_accepting_goes_on_above_an_object_whose_term_is_not_recorded(site):
    """A pipeline uploads in the name of an owner that has not recorded its term yet."""
    log = site.open()
    acked = send(made(log), 10, "first")
    made(log).upload()
    end(site, log)
    metadata = MetadataBackup.of(site.metadata)
    (term,) = (key for key in site.bucket_keys() if "/terms/" in key)
    data = site.objects.read(term, 0, 1 << 20)
    log = site.open()
    acked += send(made(log), 10, "second")
    made(log).upload()
    end(site, log)
    for key in site.bucket_keys():
        if "/terms/" in key:
            site.objects.delete(key)
    site.objects.put(term, data)
    metadata.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    assert accept(site, "b") == "accepted"
    log = site.open("b")
    assert log.topic(TEXT, take_over=True).bucket.owned.epoch > 3
    assert payloads(log.topic(TEXT).read(0)) == acked


@pytest.mark.parametrize("known", [0, 1])
def test_accepting_keeps_objects_after_a_gap_that_expiry_made(site, known):
    """Objects that the older catalog names have expired since, and others that it lacks."""
    retention = {"cloud": {"retention": {"time_minutes": 5}}}
    log = site.open(storage=retention)
    topic = made(log, ack="tiered")
    for number in range(3):
        if number == known:
            backup = MetadataBackup.of(site.metadata)
        acked = send(topic, 5, f"{number}")
    end(site, log)
    site.clock.advance(3600)
    log = site.open(storage=retention)
    topic = made(log)
    assert topic.bucket.retention.expire() == 2
    acked += send(topic, 5, "later")
    end(site, log)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    assert accept(site, "b") == "accepted"
    topic = site.open("b").topic(TEXT, take_over=True)
    acked += send(topic, 1, "next")
    assert topic.synced == 21
    assert payloads(topic.read("earliest")) == acked


def test_files_whose_node_has_lost_its_name_say_how_to_continue(site):
    log = site.open()
    acked = send(made(log), 10, "first")
    node = log.stores.membership.node
    end(site, log)
    site.disk("a").remove(f"{ROOT}/.node")
    log = site.open()
    with pytest.raises(ConflictError, match=f"newest ones of the node {node}") as caught:
        made(log)
    assert f"write {node} to `.node`" in caught.value.hint
    end(site, log)
    write_file(site.disk("a"), f"{ROOT}/.node", node.encode())
    assert payloads(made(site.open()).read("earliest")) == acked


def test_offsets_are_not_used_again_after_a_crash_while_older_files_are_given_up(site, monkeypatch):
    log = site.open()
    acked = send(made(log), 5, "first")
    log.close()
    backup = DiskBackup.of(site.disk())
    log = site.open()
    send(made(log), 5, "lost")
    log.close()
    backup.put_back(site.disk(), DIRECTORY)
    log = site.open()
    with monkeypatch.context() as patch:
        patch.setattr("ister.topic.log.give_up_lost", Mock(side_effect=SimulatedCrash))
        with pytest.raises(SimulatedCrash):
            log.give_up(TEXT)
    end(site, log)
    log = site.open()
    with pytest.raises(WaitsForDiskError):
        made(log)
    assert log.give_up(TEXT).next_offset == 10
    assert payloads(made(log).read("earliest")) == acked
    assert made(log).append(b"next") == 10


def express_payloads(log: Log, number: int) -> list[bytes]:
    topic = log.topic(f"/default/t{number}")
    topic.append(b"next")
    topic.upload()
    return payloads(topic.read("earliest"))


@pytest.mark.parametrize("disk", ["b", "c"])
def test_runs_of_a_topic_are_adopted_after_those_of_another_one(site, disk):
    """The newest express objects have nothing of the topic that is opened last."""
    shared = Shared(site)
    shared.fill(1)
    shared.fill(1, number=1)
    backup = MetadataBackup.of(site.metadata)
    shared.fill(1, number=1, first=1)
    shared.fill(*[1] * 6, first=1)
    end(site, shared.log)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    log = site.open("b")
    assert len(express_payloads(log, 0)) == 8
    if disk == "b":  # what this process knows of the objects is forgotten
        end(site, log)
    assert express_payloads(site.open(disk), 1) == [b"message 0", b"message 1", b"next"]


def test_runs_of_a_process_that_was_only_cut_off_are_searched_again(site):
    """It is taken for dead, runs again, and ends a second time with metadata that is older."""
    shared = Shared(site)
    shared.fill(1)
    process = shared.log.stores.membership
    forgotten = ForgottenRuns(shared.log.stores.objects, site.metadata, PREFIX, site.clock)
    topic, key = TopicName.parse("/default/t0"), [(process.node, process.instance)]
    site.metadata.delete(f"{PREFIX}/cluster/nodes/{process.node}/process")
    assert [run.end for run in forgotten.runs_of(topic, key)] == [1]
    shared.fill(1, first=1)
    site.clock.advance(60)
    assert max(run.end for run in forgotten.runs_of(topic, key)) == 2


@pytest.mark.parametrize("disk", ["a", "b", "c"])
def test_accepting_keeps_the_runs_of_several_processes(site, disk):
    """The bucket has the term of the last one, and the metadata is older than it."""
    shared = Shared(site, topics=1)
    shared.fill(1)
    backup = MetadataBackup.of(site.metadata)
    shared.fill(1, 1, first=1)
    end(site, shared.log)
    other = Shared(site, "b", topics=1)
    other.fill(1, 1, first=3)
    end(site, other.log)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    assert accept(site, disk, TopicName.parse("/default/t0")) == "accepted"
    wanted = [b"message %d" % number for number in range(5)]
    assert express_payloads(site.open(disk), 0) == [*wanted, b"next"]


@pytest.mark.parametrize("disk", ["b", "c"])
def test_accepting_rebuilds_a_catalog_whose_runs_a_later_owner_has_replaced(site, disk):
    shared = Shared(site, topics=1)
    shared.fill(1, 1)
    backup = MetadataBackup.of(site.metadata)
    end(site, shared.log)
    other = Shared(site, "b", topics=1, storage={"uploader": {"express": {"resort_seconds": 1}}})
    other.fill(1, 1, first=2)
    site.clock.advance(3600)
    other.log.stores.membership.renew()
    runs = other.objects()
    assert other.topics[0].bucket.uploads.resort().end == 4
    for key in runs:
        site.objects.drop(key)
    other.fill(1, first=4)
    end(site, other.log)
    backup.put_back(site.metadata)
    site.clock.advance(TTL_SECONDS + 1)
    assert accept(site, disk, TopicName.parse("/default/t0")) == "accepted"
    wanted = [b"message %d" % number for number in range(5)]
    assert express_payloads(site.open(disk), 0) == [*wanted, b"next"]
