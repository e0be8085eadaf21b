"""A bucket has an id, and a metadata store knows the one of its bucket."""

import shutil
import threading
from contextlib import closing, suppress

import pytest
import yaml

import ister
from ister.base.clock import SystemClock
from ister.bucket import identity
from ister.bucket.identity import BUCKET_KEY, BucketIdentity, check_bucket
from ister.bucket.members import Member, encode_member, member_key
from ister.cli.main import main
from ister.errors import ConflictError, CorruptDataError, UnavailableError
from ister.topic import stores
from ister.topic.log import Log
from ister.topic.stores import open_identity, open_metadata
from tests.support.machine import PATIENCE_SECONDS, Task
from tests.support.memory_fs import SimulatedCrash
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

ROOT = "/danube"
KEY = f"{ROOT}/storage/bucket"


def identity_of(objects, metadata):
    return BucketIdentity(objects, metadata, root_prefix=ROOT)


def storage(tmp_path, bucket, *, wal="wal"):
    return {
        "wal": {"dir": str(tmp_path / wal)},
        "cloud": {"backend": "fs", "root": str(tmp_path / bucket)},
        "metadata": {"backend": "sqlite", "path": str(tmp_path / "metadata.db")},
    }


def open_log(tmp_path, bucket="bucket", **more):
    return ister.open({"storage": storage(tmp_path, bucket, **more)})


def fill(tmp_path, bucket="bucket"):
    """A log with an object in its bucket."""
    with open_log(tmp_path, bucket) as log:
        topic = log.topic("/default/orders", create=True)
        topic.append(b"a")
        topic.upload()


def id_file(tmp_path, bucket="bucket"):
    return tmp_path / bucket / BUCKET_KEY


def read_ids(tmp_path, bucket="bucket"):
    config = ister.load_config({"storage": storage(tmp_path, bucket)})
    with open_identity(config.storage, SystemClock()) as identity:
        return tuple(one and one.id for one in identity.read())


def test_process_with_another_bucket_is_refused_and_both_are_named(tmp_path):
    fill(tmp_path)
    (tmp_path / "two").mkdir()
    fill(tmp_path / "two")
    with pytest.raises(ConflictError) as caught:
        open_log(tmp_path, "two/bucket")
    found, expected = read_ids(tmp_path, "two/bucket")
    assert found != expected == read_ids(tmp_path)[0]
    for text in (found, expected, str(tmp_path / "bucket"), str(tmp_path / "two" / "bucket")):
        assert text in str(caught.value)
    assert "--accept" in caught.value.hint
    with open_log(tmp_path) as log:  # and nothing has changed
        assert len(list(log.topic("/default/orders").read(follow=False))) == 1


def test_copied_and_moved_buckets_and_metadata_are_the_same(tmp_path):
    fill(tmp_path)
    shutil.copytree(tmp_path / "bucket", tmp_path / "copy")
    (tmp_path / "metadata.db").rename(tmp_path / "copy" / "metadata.db")
    tree = storage(tmp_path, "copy")
    tree["metadata"]["path"] = str(tmp_path / "copy" / "metadata.db")
    with ister.open({"storage": tree}) as log:
        log.topic("/default/orders").append(b"b")


def test_emptied_bucket_is_refused_and_gets_no_other_id(tmp_path):
    fill(tmp_path)
    shutil.rmtree(tmp_path / "bucket")
    with pytest.raises(ConflictError, match="none of the objects"):
        open_log(tmp_path)
    assert not id_file(tmp_path).exists()


def test_empty_bucket_beside_one_that_has_the_objects_is_refused(tmp_path):
    """Two brokers, one metadata store: the second one's bucket is new."""
    fill(tmp_path)
    with pytest.raises(ConflictError, match="has no id"):
        open_log(tmp_path, "other", wal="wal2")
    assert not id_file(tmp_path, "other").exists()


@pytest.mark.parametrize("lost", ["bucket", "metadata", "both"])
def test_data_without_ids_is_adopted(tmp_path, lost):
    """Goal: data that was written before ids existed, or that lost one of the two, opens."""
    fill(tmp_path)
    was, _ = read_ids(tmp_path)
    if lost != "metadata":
        id_file(tmp_path).unlink()
    if lost != "bucket":
        config = ister.load_config({"storage": storage(tmp_path, "bucket")}).storage.metadata
        with closing(open_metadata(config, SystemClock())) as metadata:
            assert metadata.delete(KEY)
    with open_log(tmp_path):
        found, expected = read_ids(tmp_path)
    assert found == expected
    assert (found == was) is (lost != "both")


def test_first_start_without_objects_may_have_lost_the_bucket(tmp_path):
    with open_log(tmp_path):
        pass
    shutil.rmtree(tmp_path / "bucket")
    expected = read_ids(tmp_path)[1]
    with open_log(tmp_path):
        pass
    assert read_ids(tmp_path) == (expected, expected)


@pytest.mark.parametrize("is_up", [False, True])
def test_cluster_without_objects_has_one_bucket_as_well(tmp_path, is_up):
    """Goal: a second broker of a new cluster is refused, whether its bucket has another name or is
    a directory of the same name on another machine."""
    with open_log(tmp_path):
        pass
    config = ister.load_config({"storage": storage(tmp_path, "bucket")}).storage.metadata
    if is_up:
        shutil.rmtree(tmp_path / "bucket")
        member = Member(node="n1", broker_url="a", connect_url="a", flight_url="")
        with closing(open_metadata(config, SystemClock())) as metadata:
            metadata.put(member_key(ROOT, "n1"), encode_member(member))
    with pytest.raises(ConflictError, match=r"has no id .* expects the bucket"):
        open_log(tmp_path, "bucket" if is_up else "other", wal="wal2")
    assert not id_file(tmp_path, "bucket" if is_up else "other").exists()


# -- the two stores ---------------------------------------------------------------------------


@pytest.mark.parametrize("conditional_create", [True, False])
def test_processes_that_start_together_agree(conditional_create):
    """Goal: one id, also in a store without conditional puts.

    Method: a second process runs completely at each operation of the first.
    """
    for at in range(8):
        objects = MemoryObjectStore(conditional_create=conditional_create)
        metadata = MemoryMetadata()
        steps = iter(range(100))

        def second(kind, key, objects=objects, metadata=metadata, steps=steps, at=at):
            if next(steps) == at:
                identity_of(objects, metadata).check()

        objects.before = metadata.before = second
        identity_of(objects, metadata).check()
        found, recorded = identity_of(objects, metadata).read()
        assert found.id == recorded.id
        assert (recorded.location, found.location) == (objects.location, "")


def test_crash_at_any_operation_is_completed_by_the_next_process():
    for at in range(8):
        objects, metadata = MemoryObjectStore(), MemoryMetadata()
        steps = iter(range(100))

        def crash(kind, key, steps=steps, at=at):
            if next(steps) == at:
                raise SimulatedCrash

        objects.before = objects.after = crash
        with suppress(SimulatedCrash):
            identity_of(objects, metadata).check()
        objects.before = objects.after = lambda kind, key: None
        identity_of(objects, metadata).check()
        found, recorded = identity_of(objects, metadata).read()
        assert found.id == recorded.id


def test_bucket_that_does_not_answer_is_checked_before_the_first_change(caplog):
    """Goal: a broker starts without its bucket, and changes nothing in a wrong one later."""
    ours, other, metadata = MemoryObjectStore(), MemoryObjectStore(), MemoryMetadata()
    identity_of(ours, metadata).check()
    identity_of(other, MemoryMetadata()).check()

    def fail(kind, key):
        raise UnavailableError("no route to host")

    for store, is_right in ((ours, True), (other, False)):
        store.before = fail
        checked = check_bucket(store, metadata, root_prefix=ROOT)
        with pytest.raises(UnavailableError):
            checked.put("a", b"")
        store.before = lambda kind, key: None
        assert checked.read(BUCKET_KEY, 0, 100)
        if is_right:
            checked.put("a", b"")
            assert check_bucket(store, metadata, root_prefix=ROOT) is store
        else:
            with pytest.raises(ConflictError):
                checked.put("a", b"")
            with pytest.raises(ConflictError):
                checked.delete("a")
            with pytest.raises(ConflictError):
                check_bucket(store, metadata, root_prefix=ROOT)
    assert "bucket not checked" in caplog.text


def test_start_does_not_wait_for_a_bucket_that_hangs(monkeypatch):
    monkeypatch.setattr(identity, "_START_SECONDS", 0.05)
    objects, metadata, goes_on = MemoryObjectStore(), MemoryMetadata(), threading.Event()
    objects.before = lambda kind, key: goes_on.wait(PATIENCE_SECONDS)
    checked = check_bucket(objects, metadata, root_prefix=ROOT)
    changing = Task(lambda: checked.put("a", b""))
    assert changing.is_running
    goes_on.set()
    changing.result()
    assert metadata.get(KEY) is not None


def test_bucket_that_hangs_at_the_start_is_waited_for_once(tmp_path, monkeypatch):
    fill(tmp_path)
    objects, goes_on = MemoryObjectStore(), threading.Event()
    objects.before = lambda kind, key: goes_on.wait(PATIENCE_SECONDS)
    monkeypatch.setattr(identity, "_START_SECONDS", 0.05)
    monkeypatch.setattr(stores, "_PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(stores, "open_objects", lambda storage, clock: objects)
    config = ister.load_config({"storage": storage(tmp_path, "bucket")})

    def publish():
        log = Log(config, background=False)
        topic = log.topic("/default/orders")
        topic.wait(topic.append(b"b"), "synced")
        return log, goes_on.is_set()

    publishing = Task(publish)
    waiting = threading.Timer(PATIENCE_SECONDS / 10, goes_on.set)
    waiting.start()
    log, has_waited = publishing.result()
    goes_on.set()
    waiting.cancel()
    with suppress(ConflictError):
        log.close()
    assert not has_waited


@pytest.mark.parametrize("action", ["check", "accept"])
def test_metadata_is_not_compared_with_another_bucket(tmp_path, action, capsys):
    fill(tmp_path)
    (tmp_path / "two").mkdir()
    fill(tmp_path / "two")
    config = tmp_path / "ister.yml"
    config.write_text(yaml.safe_dump({"storage": storage(tmp_path, "two/bucket")}))
    yes = ["--yes"] if action == "accept" else []
    assert main(["metadata", action, "--config", str(config), *yes]) == 1
    assert "expects the bucket" in capsys.readouterr().err
    with open_log(tmp_path) as log:
        assert [message.payload for message in log.topic("/default/orders").read()] == [b"a"]


def test_damaged_id_is_an_error_that_says_what_to_do():
    objects, metadata = MemoryObjectStore(), MemoryMetadata()
    objects.put(BUCKET_KEY, b"{")
    with pytest.raises(CorruptDataError, match="id cannot be read") as caught:
        check_bucket(objects, metadata, root_prefix=ROOT)
    assert "--accept" in caught.value.hint
    accepted = identity_of(objects, metadata).accept()
    identity_of(objects, metadata).check()
    assert identity_of(objects, metadata).read()[0].id == accepted.id


def test_another_bucket_is_accepted_when_no_broker_is_up():
    ours, other, metadata = MemoryObjectStore(), MemoryObjectStore(), MemoryMetadata()
    identity_of(ours, metadata).check()
    identity_of(other, MemoryMetadata()).check()
    member = Member(node="n1", broker_url="a", connect_url="a", flight_url="")
    metadata.put(member_key(ROOT, "n1"), encode_member(member))
    with pytest.raises(ConflictError, match="n1"):
        identity_of(other, metadata).accept()
    metadata.delete(member_key(ROOT, "n1"))
    with pytest.raises(ConflictError):
        identity_of(other, metadata).check()
    identity_of(other, metadata).accept()
    identity_of(other, metadata).check()
    with pytest.raises(ConflictError):
        identity_of(ours, metadata).check()
