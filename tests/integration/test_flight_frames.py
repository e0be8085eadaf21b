"""Frames and plans by Flight: what an upload on another machine is made of."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import flight

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import Codec, TopicName
from ister.broker.security.rights import Permission
from ister.bucket.names import object_key
from ister.bucket.object_maker import ObjectMaker
from ister.client.flight import FlightClient
from ister.client.frames import BrokerFrames
from ister.config import load_config
from ister.errors import (
    ConflictError,
    CorruptDataError,
    DataGapError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.topic.log import Log
from ister.topic.stores import upload_settings
from ister.wire.contract import FRAMES_COLUMN, Action, FramesTicket, PlanUpload, UploadPlanned
from ister.wire.errors import decode_error
from tests.integration.test_flight import TOPIC, Liar, fill, settings_of
from tests.servers.flight import FlightServer, FlightTopics, LogSource
from tests.support.builders import flip_byte
from tests.support.cases import each


@pytest.fixture
def log(tmp_path):
    with Log(load_config(settings_of(tmp_path), {})) as log:
        yield log


@pytest.fixture
def server(log):
    with FlightTopics(log) as server:
        yield server


@pytest.fixture
def client(server):
    with FlightClient(server.address) as client:
        yield client


def incarnation_of(topic):
    return topic.bucket.owned.record.incarnation


def a_ticket(topic, start, end, **fields):
    ticket = FramesTicket(
        topic=topic.name,
        start=start,
        end=end,
        incarnation=incarnation_of(topic),
        epoch=topic.bucket.owned.epoch,
    )
    return replace(ticket, **fields)


def a_question(topic, start=None, **fields):
    settings = upload_settings(topic.bucket._stores.storage.uploader)
    asked = PlanUpload(
        topic=topic.name,
        incarnation=incarnation_of(topic),
        epoch=topic.bucket.owned.epoch,
        start=start,
        bytes_max=settings.object_bytes_max,
        span_ms_max=settings.object_span_ms_max,
        objects_max=100,
    )
    return replace(asked, **fields)


def stored(tmp_path, name=TOPIC):
    """The bytes of a topic's files, one after the other."""
    files = sorted(
        (tmp_path / "wal" / name[1:]).glob("wal*.log"),
        key=lambda path: int(path.name.split(".")[1]) if path.name != "wal.log" else 0,
    )
    return b"".join(path.read_bytes() for path in files)


def bytes_of(batches):
    return b"".join(batch.chunk[batch.starts[0] : batch.end] for batch in batches)


# -- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
def test_frames_are_those_of_the_files(log, client, tmp_path, codec):
    topic = log.topic(TOPIC, create=True, codec=codec)
    fill(topic, 300)
    batches = list(client.frames(a_ticket(topic, 0, 300)))
    assert bytes_of(batches) == stored(tmp_path)
    assert {batch.codec for batch in batches} == {codec}
    assert [batch.first_offset for batch in batches[1:]] == [
        batch.next_offset for batch in batches[:-1]
    ]
    part = list(client.frames(a_ticket(topic, 70, 71)))
    assert bytes_of(part) in stored(tmp_path)
    assert (part[0].first_offset, part[-1].next_offset) == (70, 71)


def test_large_frames_come_whole(log, client, tmp_path):
    topic = log.topic(TOPIC, create=True)
    for size in (9_000_000, 10, 5_000_000, 3_000_000, 3_000_000):
        topic.append(b"x" * size)
    topic.flush()
    batches = list(client.frames(a_ticket(topic, 0, 5)))
    assert bytes_of(batches) == stored(tmp_path)
    assert len(batches) >= 4
    assert all(batch.end < 10_000_000 for batch in batches)


def test_frames_that_were_trimmed_are_refused(log, client):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 200)
    topic.upload()
    assert topic.bucket.retention.trim()
    with pytest.raises(OffsetOutOfRangeError) as raised:
        list(client.frames(a_ticket(topic, 0, 200)))
    assert raised.value.earliest == topic.watermarks.trimmed
    assert list(client.frames(a_ticket(topic, 199, 199))) == []
    with pytest.raises(OffsetOutOfRangeError):
        list(client.frames(a_ticket(topic, 199, 201)))
    list(client.frames(a_ticket(topic, topic.watermarks.trimmed, 200)))


def test_damaged_frame_comes_with_its_place(log, client, tmp_path):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 200)
    path = tmp_path / "wal" / TOPIC[1:] / "wal.1.log"
    flip_byte(path, path.stat().st_size // 2)
    found = []
    with pytest.raises(CorruptDataError) as raised:
        found.extend(client.frames(a_ticket(topic, 0, 200)))
    assert 0 < raised.value.offset < 200
    assert found[-1].next_offset == raised.value.offset


@pytest.mark.parametrize("ask", ["frames", "plan"])
def test_topic_that_was_made_anew_is_another_one(log, client, ask):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 5)
    ticket, asked = a_ticket(topic, 0, 5), a_question(topic)
    log.delete(TOPIC)
    calls = {
        "frames": lambda: list(client.frames(ticket)),
        "plan": lambda: client.plan_upload(asked),
    }
    with pytest.raises(NotFoundError):
        calls[ask]()
    fill(log.topic(TOPIC, create=True), 5)
    with pytest.raises(ConflictError):
        calls[ask]()


def test_owner_of_another_epoch_is_refused(log, client):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 5)
    other = topic.bucket.owned.epoch + 1
    with pytest.raises(ConflictError, match="epoch"):
        list(client.frames(a_ticket(topic, 0, 5, epoch=other)))
    with pytest.raises(ConflictError, match="epoch"):
        list(client.frames(a_ticket(topic, 5, 5, epoch=other)))
    with pytest.raises(ConflictError, match="epoch"):
        client.plan_upload(a_question(topic, epoch=other))
    source = BrokerFrames(client, TOPIC, incarnation_of(topic), other)
    with pytest.raises(ConflictError):
        source.fetch(0, 5, bytes_max=1)
    with pytest.raises(ConflictError):
        source.plan(0, 5, bytes_max=1, span_ms_max=1)
    source.close()


# -- plans ----------------------------------------------------------------------------------------


def test_plan_is_what_an_upload_makes(log, client):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 300)
    planned = client.plan_upload(a_question(topic))
    first = client.plan_upload(a_question(topic, objects_max=1))
    assert first.objects == planned.objects[:1]
    made = topic.upload().objects
    assert len(made) > 2
    assert planned.objects == tuple((d.end, d.size_bytes) for d in made)
    assert (planned.start, planned.synced, planned.codec) == (0, 300, topic.codec)
    assert client.plan_upload(a_question(topic, 300)).objects == ()


def test_plan_ends_before_damage_and_says_so(log, client, tmp_path):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 200)
    path = tmp_path / "wal" / TOPIC[1:] / "wal.1.log"
    flip_byte(path, 20)
    planned = client.plan_upload(a_question(topic, bytes_max=4096))
    error = decode_error(planned.error)
    assert type(error) is CorruptDataError
    assert planned.objects[-1][0] == error.offset


def test_plan_for_what_was_trimmed_is_a_gap(log, client):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 200)
    topic.upload()
    assert topic.bucket.retention.trim()
    with pytest.raises(DataGapError):
        client.plan_upload(a_question(topic, 3))


# -- objects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
def test_object_made_through_flight_is_the_owners(log, client, codec):
    topic = log.topic(TOPIC, create=True, codec=codec)
    fill(topic, 300)
    planned = client.plan_upload(a_question(topic))
    stores, owned = topic.bucket._stores, topic.bucket.owned
    maker = ObjectMaker(
        TopicName.parse(TOPIC),
        stores.objects,
        settings=upload_settings(stores.storage.uploader),
        clock=SystemClock(),
        metrics=Metrics(),
    )
    source = BrokerFrames(client, TOPIC, incarnation_of(topic), topic.bucket.owned.epoch)
    made, start = [], planned.start
    try:
        for end, _ in planned.objects:
            assert source.plan(start, 300, bytes_max=8192, span_ms_max=300_000) == end
            described = maker.make(
                source, start, end, epoch=owned.epoch, incarnation=owned.record.incarnation
            )
            key = object_key(TopicName.parse(TOPIC), described.object_id)
            made.append((described, stores.objects.read(key, 0, 1 << 20)))
            stores.objects.delete(key)
            start = end
    finally:
        source.close()
    for (described, data), own in zip(made, topic.upload().objects, strict=True):
        key = object_key(TopicName.parse(TOPIC), own.object_id)
        assert stores.objects.read(key, 0, 1 << 20) == data
        times = {"created_at": 0, "arrival_time_max": None}
        assert replace(described, **times, etag=None) == replace(own, **times, etag=None)


def test_source_goes_on_from_any_offset(log, client, tmp_path):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 100)
    source = BrokerFrames(client, TOPIC, incarnation_of(topic), topic.bucket.owned.epoch)
    try:
        first = source.fetch(0, 100, bytes_max=1 << 20)
        again = source.fetch(0, 100, bytes_max=1 << 20)
        assert bytes_of([first]) == bytes_of([again])
        other = source.fetch(50, 60, bytes_max=1 << 20)
        assert (other.first_offset, other.next_offset) == (50, 60)
    finally:
        source.close()
        source.close()


# -- rights ---------------------------------------------------------------------------------------


class Reader:
    """May look topics up, and read them for as long as it is told."""

    name = "reader"

    def __init__(self, batches):
        self._left = batches

    def check(self, permission, *, topic=None):
        if permission is Permission.CONSUME:
            self._left -= 1
            if self._left < 0:
                raise PermissionDeniedError("no", topic=topic)

    def allows(self, permission, *, topic):
        return True


@contextmanager
def a_reader(log, batches):
    """A client whose right to read ends after so many looks at it."""
    reader = Reader(batches)
    access = SimpleNamespace(caller=lambda: reader)
    with (
        FlightServer(LogSource(log), access=access) as server,
        FlightClient(server.address) as client,
    ):
        yield client


def test_frames_and_plans_are_for_those_who_may_read(log):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 300)
    with a_reader(log, 0) as client:
        with pytest.raises(PermissionDeniedError):
            client.plan_upload(a_question(topic))
        with pytest.raises(PermissionDeniedError):
            list(client.frames(a_ticket(topic, 0, 300)))


def test_frames_end_when_the_right_to_read_does(log):
    topic = log.topic(TOPIC, create=True)
    fill(topic, 300)
    with a_reader(log, 1 << 30) as client:
        assert len(list(client.frames(a_ticket(topic, 0, 300)))) > 1
    found = []
    with a_reader(log, 2) as client, pytest.raises(PermissionDeniedError):
        found.extend(client.frames(a_ticket(topic, 0, 300)))
    assert len(found) == 1


# -- servers that lie -----------------------------------------------------------------------------


TICKET = FramesTicket(topic=TOPIC, start=0, end=10, incarnation="a", epoch=1)
ASKED = PlanUpload(
    topic=TOPIC, incarnation="a", epoch=1, start=0, bytes_max=1, span_ms_max=1, objects_max=3
)
PLAN = UploadPlanned(start=0, synced=10, codec=Codec.BINCODE2, objects=())


def frames_of(name=FRAMES_COLUMN, kind=None, codec="bincode2"):
    fields = [pa.field(name, kind or pa.binary())]
    return pa.schema(fields, None if codec is None else {"codec": codec})


@each(
    ("schema", "rows", "error"),
    [
        *((frames_of(), [row], CorruptDataError) for row in (b"", b"x", b"\0" * 100, None)),
        (frames_of(), [], UnavailableError),
        (frames_of("other"), [b"x"], CorruptDataError),
        (frames_of(kind=pa.string()), ["x"], CorruptDataError),
        (frames_of(codec="bincode9"), [b"x"], CorruptDataError),
        (frames_of(codec=None), [b"x"], CorruptDataError),
    ],
)
def test_what_is_no_frame_is_not_taken(schema, rows, error):
    with Liar() as liar, FlightClient(liar.address) as client:
        liar.schema = schema
        liar.batches = [
            pa.record_batch([pa.array([row], schema.field(0).type)], schema=schema) for row in rows
        ]
        with pytest.raises(error):
            list(client.frames(TICKET))


@each(
    "planned",
    [
        {"start": 1},
        {"objects": ((5, 1), (5, 1))},
        {"objects": ((11, 1),)},
        {"objects": ((1, 1), (2, 1), (3, 1), (4, 1))},
    ],
)
def test_plan_that_makes_no_sense_is_not_taken(planned):
    with Liar() as liar, FlightClient(liar.address) as client:
        liar.results = [replace(PLAN, **planned).to_json()]
        with pytest.raises(CorruptDataError):
            client.plan_upload(ASKED)


@each("body", [b"", b"{}", b'{"version":1,"kind":"frames"}', b'{"version":1}'])
def test_strange_questions_are_refused(server, client, body):
    with flight.FlightClient(f"grpc://{server.address}") as raw:
        for ask in (
            lambda: list(raw.do_action(flight.Action(str(Action.PLAN_UPLOAD), body))),
            lambda: raw.do_get(flight.Ticket(body)).read_all(),
        ):
            with pytest.raises(flight.FlightServerError) as caught:
                ask()
            assert isinstance(decode_error(str(caught.value)), InvalidRequestError)
    assert client.topics() == []
