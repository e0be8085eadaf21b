"""A real S3 server that fails under a real log: what producers, readers and uploads see of it.

rclone verifies signatures and keeps objects as files, which tests can damage; moto has its own way
with multipart uploads. A proxy in front of them misbehaves by rule. Every scenario ends alike: the
fault ends, and `settle` finds nothing lost, both tiers in agreement and readable from the bucket.
"""

import contextlib
import logging
import threading
import time
from itertools import count

import pytest

import ister
from ister.base.clock import SystemClock
from ister.errors import (
    ConflictError,
    CorruptDataError,
    IsterError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.objectstore.opendal_store import open_store
from tests.servers.fault_proxy import Action, FaultProxy
from tests.servers.s3 import BUCKET, moto_server, rclone_server
from tests.support.oracle import History, payload_of, read_all
from tests.support.tier_checks import (
    TOPIC,
    Producer,
    converge,
    memory_directory,
    orphans,
    read_bucket,
    tier_settings,
    verify_topic,
)
from tests.support.waiting import eventually

MIB = 1024 * 1024
DATA = "objects/data-"
PART = DATA + r".*partNumber="
INITIATE = DATA + r".*\?uploads"
COMPLETE = DATA + r".*\?uploadId="
MULTIPART = {
    "wal": {"rotate_max_bytes": 4 * MIB},
    "uploader": {"engine": "none", "stream_chunk_size": 5 * MIB, "max_object_bytes": 64 * MIB},
    "cloud_reader": {"fetch_chunk_size": MIB},
}
IN_TIME_SECONDS = 120
"""For what has a deadline of a second or so, and would take for ever without: machines are busy."""
_CANARY = "CANARY-7f3a91-"
_places = count()


@pytest.fixture(scope="module")
def rclone():
    with rclone_server() as server:
        yield server


@pytest.fixture(scope="module")
def moto():
    with moto_server() as server:
        yield server


@pytest.fixture
def tmp_path():
    """In memory; see there."""
    with memory_directory() as directory:
        yield directory


class Place:
    """A log on a bucket of its own, behind a proxy of its own."""

    def __init__(self, server, proxy, directory):
        self.server = server
        self.proxy = proxy
        self.directory = directory
        self.prefix = f"place{next(_places)}"
        self.history = History()
        self.producer = Producer(self.history)
        self.log = None
        self.topic = None
        self.direct = open_store(
            "s3", f"s3://{BUCKET}/{self.prefix}", server.options(), clock=SystemClock()
        )
        """The bucket past the proxy, for what happens behind our back."""

    def settings(self, *, bucket=BUCKET, options=None, **sections):
        sections.setdefault("uploader", {"engine": "none"})
        cloud = {
            "backend": "s3",
            "root": f"s3://{bucket}/{self.prefix}",
            "options": {**self.server.options(endpoint=self.proxy.endpoint), **(options or {})},
            "call_timeout_seconds": 1,
            "orphan_grace_minutes": 0,
            **sections.pop("cloud", {}),
        }
        return tier_settings(self.directory, cloud=cloud, **sections)

    def open(self, **settings):
        """Opens the log, makes the topic, and forgets the requests that it took."""
        self.log = ister.open(self.settings(**settings))
        self.topic = self.log.topic(TOPIC, create=True)
        eventually(lambda: not probing(), "the probe ends")
        self.proxy.clear()
        return self.topic

    def close(self):
        if self.log is not None:
            self.log.close()
            self.log = None

    def send(self, messages=20, **options):
        return self.producer.send(self.topic, messages, **options)

    def objects(self):
        """The keys of the topic's objects, past the proxy."""
        return [info.key for info in self.direct.list("storage/topics/fault/t0/objects/")]

    def settle(self):
        """The fault is over: everything comes together, and can be read from the bucket alone."""
        self.proxy.clear()
        converge(self.history, self.topic)
        self.topic.bucket.retention.trim()
        converge(self.history, self.topic)


def probing():
    return [thread for thread in threading.enumerate() if "probe" in thread.name]


@contextlib.contextmanager
def place_on(server, directory):
    with FaultProxy(server.port) as proxy:
        place = Place(server, proxy, directory)
        try:
            yield place
        finally:
            proxy.rules.clear()
            with contextlib.suppress(IsterError):
                place.close()


@pytest.fixture
def place(rclone, tmp_path):
    with place_on(rclone, tmp_path) as place:
        yield place


@pytest.fixture
def any_place(request, tmp_path):
    server = request.getfixturevalue(request.param)
    with place_on(server, tmp_path) as place:
        yield place


on_both = pytest.mark.parametrize(
    "any_place", ["rclone", pytest.param("moto", marks=pytest.mark.nightly)], indirect=True
)


class Timed:
    """A call on a thread of its own, so that one that hangs does not hang the test."""

    def __init__(self, call):
        self.error = None
        self.seconds = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        began = time.monotonic()
        try:
            self._call()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - began

    def join(self, seconds):
        """Whether it ended in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


# -- faults that pass ---------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("action", "method"),
    [
        (Action.SLOW_DOWN, "PUT"),
        (Action.INTERNAL_ERROR, "PUT"),
        (Action.RESET, "PUT"),
        (Action.LOST_REPLY, "PUT"),
        (Action.DELAY, "PUT"),
        (Action.INTERNAL_ERROR, "HEAD"),
        (Action.RESET, "HEAD"),
        (Action.LOST_REPLY, "HEAD"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_request_that_fails_once_is_repeated_within_the_upload(place, action, method):
    topic = place.open()
    place.send(30)
    rule = place.proxy.add(action, method=method, path=DATA, seconds=0.5)
    moved = topic.upload()
    assert rule.hits == 1
    assert (moved.start, moved.end) == (0, 30)
    place.settle()
    assert not orphans(topic)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["PUT", "HEAD"])
def test_storm_fails_the_upload_and_not_the_producers(place, method):
    """503 for everything: a bounded number of requests, UnavailableError, messages stay here."""
    topic = place.open()
    place.send(20)
    place.proxy.add(Action.SLOW_DOWN, method=method, path=DATA, count=None)
    with pytest.raises(UnavailableError) as caught:
        topic.upload()
    assert DATA in str(caught.value)
    assert place.proxy.count(method, DATA) <= 10
    place.send(20)
    assert topic.bucket.uploads.last_error is not None
    assert topic.watermarks.tiered == 0
    verify_topic(place.history, topic)
    place.settle()
    assert topic.bucket.uploads.last_error is None


@pytest.mark.nightly
def test_storm_meets_uploads_in_the_background_that_back_off(place):
    """Uploads that see to themselves: not a request storm, and they go on when it is over."""
    place.open(uploader={"engine": "auto", "max_batch_bytes": 1})
    place.proxy.add(Action.SLOW_DOWN, path=DATA, count=None)
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        place.send(2)
        time.sleep(0.05)
    assert 2 <= place.proxy.count("PUT", DATA) <= 25, "a few attempts, each repeated a few times"
    place.proxy.clear()
    place.send(1, level="tiered")
    place.settle()


PART_FAULTS = {
    "part-503": (Action.SLOW_DOWN, "PUT", PART),
    "part-reset": (Action.RESET, "PUT", PART),
    "part-lost": (Action.LOST_REPLY, "PUT", PART),
    "begin-500": (Action.INTERNAL_ERROR, "POST", INITIATE),
    "end-500": (Action.INTERNAL_ERROR, "POST", COMPLETE),
    "end-200-error": (Action.OK_WITH_ERROR, "POST", COMPLETE),
    "end-lost": (Action.LOST_REPLY, "POST", COMPLETE),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("any_place", "fault"),
    [
        *(("rclone", fault) for fault in PART_FAULTS),
        # Where the two differ; the others take their time.
        ("moto", "end-lost"),
        ("moto", "end-200-error"),
        *(
            pytest.param("moto", fault, marks=pytest.mark.nightly)
            for fault in PART_FAULTS
            if fault not in ("end-lost", "end-200-error")
        ),
    ],
    indirect=["any_place"],
)
def test_large_object_survives_one_failed_request(any_place, fault):
    """A multipart upload: whatever fails, there is one whole object and one descriptor of it."""
    place = any_place
    action, method, path = PART_FAULTS[fault]
    topic = place.open(**MULTIPART)
    place.send(6, size=MIB)
    rule = place.proxy.add(action, method=method, path=path)
    topic.upload()
    assert rule.hits == 1
    assert [d.messages for d, _ in topic.bucket.owned.catalog.descriptors()] == [6]
    place.settle()


@on_both
def test_complete_that_keeps_failing_publishes_nothing(any_place):
    place = any_place
    topic = place.open(**MULTIPART)
    place.send(6, size=MIB)
    place.proxy.add(Action.OK_WITH_ERROR, method="POST", path=COMPLETE, count=None)
    with pytest.raises(UnavailableError):
        topic.upload()
    assert topic.bucket.owned.last is None
    assert not orphans(topic), "what was not completed is no object"
    place.settle()


@pytest.mark.nightly
@on_both
def test_complete_whose_answers_are_all_lost_is_found_done(any_place):
    """The store has the object; the uploader looks, compares, and commits it."""
    place = any_place
    topic = place.open(**MULTIPART)
    place.send(6, size=MIB)
    place.proxy.add(Action.LOST_REPLY, method="POST", path=COMPLETE, count=None)
    with contextlib.suppress(UnavailableError):
        topic.upload()
    place.settle()
    assert len(list(topic.bucket.owned.catalog.descriptors())) == 1


def test_put_whose_answers_are_all_lost_is_found_done(place):
    topic = place.open()
    place.send(20)
    rule = place.proxy.add(Action.LOST_REPLY, method="PUT", path=DATA, count=None)
    topic.upload()
    assert rule.hits >= 2
    assert topic.watermarks.tiered == 20
    place.settle()


# -- reading ------------------------------------------------------------------------------------


def tier_and_trim(place, messages=60):
    """A topic whose older messages are in the bucket alone."""
    topic = place.topic
    for _ in range(messages // 20):
        place.send(20)
    topic.upload()
    assert topic.bucket.retention.trim() > 0
    assert topic.wal.trimmed > 20
    place.proxy.clear()
    return topic.wal.trimmed


def read_some(reader, right):
    """Reads until something is raised or the end comes; everything read is right."""
    got = []
    for message in reader:
        assert message.payload == right[message.offset], f"wrong data at {message.offset}"
        got.append(message.offset)
    return got


@pytest.mark.parametrize(
    "action",
    [Action.INTERNAL_ERROR, Action.RESET, Action.TRUNCATED, Action.CORRUPTED, Action.LOST_REPLY],
    ids=lambda action: action.name,
)
def test_get_that_fails_once_is_not_seen_by_the_reader(place, action):
    topic = place.open()
    tier_and_trim(place)
    rule = place.proxy.add(action, method="GET", path=DATA)
    verify_topic(place.history, topic)
    assert rule.hits == 1
    place.settle()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("action", "error"),
    [
        (Action.INTERNAL_ERROR, UnavailableError),
        pytest.param(Action.RESET, UnavailableError, marks=pytest.mark.nightly),
        (Action.TRUNCATED, UnavailableError),
        (Action.CORRUPTED, CorruptDataError),
        (Action.DENIED, PermissionDeniedError),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", value)),
)
def test_get_that_keeps_failing_raises_and_the_reader_goes_on_later(place, action, error):
    """No wrong data and nothing left out; the same reader goes on from the same place."""
    topic = place.open(cloud_reader={"fetch_chunk_size": 65536, "read_ahead": False})
    tier_and_trim(place)
    right = dict(read_bucket(topic))
    place.proxy.add(action, method="GET", path=DATA, count=None)
    with topic.reader("earliest", end=topic.watermarks.synced) as reader:
        with pytest.raises(error) as caught:
            read_some(reader, right)
        assert DATA in (caught.value.path or str(caught.value))
        stopped_at = reader.next_offset
        # Asked again, it says the same; and what is here can be read all the while.
        with pytest.raises(error):
            reader.next_batch(timeout=60)
        local = [m.offset for m in topic.read(topic.wal.trimmed)]
        assert local == list(range(topic.wal.trimmed, 60))
        place.proxy.clear()
        rest = [message.offset for message in reader]
        assert rest == list(range(stopped_at, 60))
    place.settle()


def test_history_that_drips_past_the_deadline_is_unavailable(place):
    """A byte at a time, each within its own deadline: the whole has one, too."""
    topic = place.open()
    tier_and_trim(place)
    place.proxy.add(Action.DRIP, method="GET", path=DATA, count=None, seconds=0.05)
    with topic.reader("earliest") as reader:
        timed = Timed(lambda: reader.next_batch(timeout=300))
        assert timed.join(IN_TIME_SECONDS), "a read of 1 s is still under way"
        assert isinstance(timed.error, UnavailableError), timed.error
        place.proxy.clear()
        assert reader.next_batch(timeout=60)[0].offset == 0
    place.settle()


def test_history_that_hangs_ends_at_its_deadline(place):
    """`storage.cloud.call_timeout_seconds` is 1 here."""
    topic = place.open()
    tier_and_trim(place)
    place.proxy.add(Action.HANG, method="GET", path=DATA, count=None)
    with topic.reader("earliest") as reader:
        timed = Timed(lambda: reader.next_batch(timeout=300))
        is_in_time = timed.join(IN_TIME_SECONDS)
        place.proxy.__exit__()
        assert timed.join(60)
        assert is_in_time, f"a call with a deadline of 1 s took {timed.seconds:.1f} s"
        assert isinstance(timed.error, UnavailableError), timed.error


@pytest.mark.nightly
def test_upload_that_hangs_ends_at_its_deadline(place):
    """The same for a request that is never answered, and producers do not notice it."""
    topic = place.open()
    place.send(20)
    place.proxy.add(Action.HANG, method="PUT", path=DATA, count=None)
    timed = Timed(topic.upload)
    place.send(20)
    verify_topic(place.history, topic)
    is_in_time = timed.join(IN_TIME_SECONDS)
    place.proxy.__exit__()
    assert timed.join(60)
    assert is_in_time, f"an upload with calls of 1 s took {timed.seconds:.1f} s"
    assert isinstance(timed.error, UnavailableError), timed.error


def test_request_that_hangs_once_is_repeated(place):
    topic = place.open()
    place.send(20)
    rule = place.proxy.add(Action.HANG, method="PUT", path=DATA)
    timed = Timed(topic.upload)
    is_in_time = timed.join(IN_TIME_SECONDS)
    if not is_in_time:
        place.proxy.__exit__()
        timed.join(60)
    assert is_in_time, f"a request that hung once kept an upload for {timed.seconds:.1f} s"
    assert rule.hits == 1
    assert timed.error is None, timed.error
    place.settle()


# -- objects that are not what they were --------------------------------------------------------


def read_whole(place, key):
    return place.direct.read(key, 0, 64 * MIB)


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = {
    "flipped": flip,
    "cut": lambda data: data[:-10],
    "grown": lambda data: data + b"more",
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}


def damage_object(place, key, damage):
    if damage == "lost":
        place.direct.delete(key)
    else:
        place.direct.put(key, DAMAGES[damage](read_whole(place, key)))


@pytest.mark.parametrize(
    "damage",
    [
        *("flipped", "cut", "lost"),
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("grown", "empty", "zeros")),
    ],
)
def test_object_that_went_bad_is_uploaded_again_before_local_files_go(place, damage, caplog):
    """The last good copy is here: it is never removed for a bad one."""
    topic = place.open()
    for _ in range(3):
        place.send(20)
        topic.upload()
    damage_object(place, place.objects()[0], damage)
    verify_topic(place.history, topic)
    assert topic.wal.trimmed == 0
    assert topic.bucket.retention.trim() > 0
    assert "lost or damaged" in caplog.text
    place.settle()
    assert topic.wal.trimmed > 0


def test_object_in_the_place_of_another_one_is_found_out(place):
    """The right size, whole frames, and the wrong ones: another object's."""
    topic = place.open()
    for _ in range(3):
        place.send(20, size=200)
        topic.upload()
    first, second, *_ = place.objects()
    size = len(read_whole(place, first))
    place.direct.put(first, read_whole(place, second)[:size].ljust(size))
    verify_topic(place.history, topic)
    assert topic.bucket.retention.trim() > 0
    place.settle()


def read_all_right(place):
    """What was acknowledged where, from the history itself."""
    sent = place.history._topics[TOPIC].sent
    return [(one.offset, payload_of(name)) for name, one in sent.items() if one.offset is not None]


# -- the other requests -------------------------------------------------------------------------


# -- who may -------------------------------------------------------------------------------------


def test_denied_upload_is_told_at_once_and_messages_stay(place):
    """403: PermissionDeniedError, one request, no retries; it goes on when rights are back."""
    topic = place.open()
    place.send(20)
    place.proxy.add(Action.DENIED, path=DATA, count=None)
    with pytest.raises(PermissionDeniedError) as caught:
        topic.upload()
    assert not caught.value.retriable
    assert place.proxy.count("PUT", DATA) == 1
    place.send(20)
    verify_topic(place.history, topic)
    with pytest.raises(ister.WaitTimeoutError) as waited:
        topic.wait(39, "tiered", timeout=0.3)
    assert "complete failed" in str(waited.value)
    place.settle()


def test_denied_uploads_in_the_background_are_no_storm(place):
    topic = place.open(uploader={"engine": "auto", "max_batch_bytes": 1})
    place.proxy.add(Action.DENIED, path=DATA, count=None)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        place.send(2)
        time.sleep(0.02)
    eventually(
        lambda: isinstance(topic.bucket.uploads.last_error, PermissionDeniedError), "it is told"
    )
    assert 1 <= place.proxy.count("PUT", DATA) <= 5
    place.settle()


def test_credentials_that_no_longer_hold_are_told_and_replaced_later(place):
    """A log opened with keys that the store refuses: appends and reads work, uploads say why."""
    place.open()
    place.send(2)
    place.close()
    options = {"access_key": "EXPIREDKEY12345", "secret_key": "EXPIREDSECRET12345"}
    topic = place.open(options=options)
    place.send(2)
    with pytest.raises(PermissionDeniedError, match="credentials"):
        topic.upload()
    assert place.proxy.count("PUT", DATA) <= 1
    verify_topic(place.history, topic)
    place.close()
    place.open()
    place.settle()


def test_wrong_bucket_is_told_by_name_and_messages_stay(place):
    place.open()
    place.send(2)
    place.close()
    with pytest.raises(ConflictError) as caught:
        place.open(bucket="nosuchbucket")
    assert "nosuchbucket" in str(caught.value)
    assert "config bucket" in (caught.value.hint or "")
    verify_topic(place.history, place.open())
    place.settle()


# -- the store is down ---------------------------------------------------------------------------


@pytest.mark.nightly
def test_log_opened_during_an_outage_serves_what_is_here(place):
    """Opening needs no bucket where the topic is known; a new topic is refused, not begun twice."""
    place.open()
    place.send(20)
    place.close()
    place.proxy.add(Action.RESET, count=None)
    with ister.open(place.settings()) as log:
        topic = log.topic(TOPIC)
        place.producer.send(topic, 20)
        verify_topic(place.history, topic)
        with pytest.raises(UnavailableError):
            log.topic("/fault/new", create=True)
        with pytest.raises(UnavailableError):
            topic.upload()
        place.proxy.clear()
        log.topic("/fault/new", create=True)
        place.topic = topic
        place.settle()


# -- secrets -------------------------------------------------------------------------------------


def test_credentials_are_in_no_log_and_no_error(place, caplog):
    """Canaries as keys, every kind of refusal and failure, every text that comes of it."""
    caplog.set_level(logging.DEBUG)
    options = {
        "access_key": f"{_CANARY}ACCESS",
        "secret_key": f"{_CANARY}SECRET",
        "session_token": f"{_CANARY}TOKEN",
    }
    place.open()
    place.send(2)
    place.close()
    topic = place.open(options=options)
    texts = [repr(place.log), repr(place.log.config), str(place.log.config), repr(topic)]
    calls = (
        topic.upload,
        topic.bucket.retention.collect_orphans,
        lambda: place.log.topic("/fault/other", create=True),
        lambda: place.log.stores.objects.read("x", 0, 10),
    )
    for action, tried in (
        (None, calls),
        (Action.DENIED, calls),
        (Action.OK_WITH_ERROR, calls[3:]),
        (Action.INTERNAL_ERROR, calls[:1]),
        (Action.RESET, calls[3:]),
    ):
        place.proxy.clear()
        if action is not None:
            place.proxy.add(action, count=None)
        for call in tried:
            try:
                call()
            except IsterError as error:
                chain = error
                while chain is not None:
                    texts += [str(chain), repr(chain), repr(chain.__dict__)]
                    chain = chain.__cause__ or chain.__context__
    place.close()
    assert len(texts) > 25, "hardly anything has failed"
    texts += [str(vars(record)) + record.getMessage() for record in caplog.records]
    leaks = [text for text in texts if _CANARY in text]
    assert not leaks, leaks[:3]
    place.open()
    place.settle()


@pytest.mark.nightly
def test_everything_read_during_faults_was_right(place):
    """A last one: random faults on a tenth of all requests, uploads, trims and reads beside."""
    topic = place.open()
    for number in range(8):
        for action, method in (
            (Action.SLOW_DOWN, "PUT"),
            (Action.LOST_REPLY, "PUT"),
            (Action.TRUNCATED, "GET"),
            (Action.CORRUPTED, "GET"),
            (Action.RESET, "HEAD"),
        ):
            place.proxy.add(action, method=method, path=DATA, skip=number)
        place.send(20)
        with contextlib.suppress(UnavailableError):
            topic.upload()
            topic.bucket.retention.trim()
        with contextlib.suppress(UnavailableError):
            verify_topic(place.history, topic)
    assert dict(read_all(topic)) == dict(read_all_right(place))
    place.settle()
