"""Topics by Arrow Flight: a real server in this process or its own, and one that lies.

The server is the one of `servers.flight`; the broker has to pass the same tests.
"""

import json
import random
import threading
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import flight

import ister
from ister.base.model import AckLevel, Codec, TopicName
from ister.broker.security.rights import Permission
from ister.bucket.merge import merge_objects
from ister.bucket.names import staging_prefix
from ister.client.flight import FlightClient
from ister.config import load_config
from ister.errors import (
    ClosedError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    InvariantError,
    NoAnswerError,
    NotFoundError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    TopicNameError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.arrow.schema import HIDDEN, arrow_schema
from ister.format.manifest import StagedFile
from ister.format.staged_rows import STAGED_SCHEMA, encode_block
from ister.topic.batches import StagedBatch
from ister.topic.log import Log
from ister.wire.contract import Action, AppendStaged, RangeTicket, TopicStatus
from ister.wire.errors import decode_error, encode_error
from tests.servers.flight import FlightProcess, FlightServer, FlightTopics, LogSource
from tests.support.builders import flip_byte
from tests.support.cases import each

TOPIC = "/default/orders"
WRITER = "query-1"
SECONDS = 60.0


def settings_of(directory, **sections):
    """A log below `directory` in which nothing is uploaded or trimmed by itself."""
    return {
        "storage": {
            "wal": {
                "dir": str(directory / "wal"),
                "rotate_max_bytes": 4096,
                "retention": {"time_minutes": 0},
                **sections.pop("wal", {}),
            },
            "uploader": {"engine": "none", "max_object_bytes": 8192},
            **sections,
        }
    }


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


def fill(topic, count, seed=0):
    """Messages of every kind; durable when it returns."""
    chance = random.Random(seed)
    for number in range(count):
        more = {}
        if topic.codec is Codec.BINCODE2:
            more = {
                "routing_key": chance.choice([None, "", "küche"]),
                "schema_id": chance.choice([None, 0, 1 << 40]),
                "schema_version": chance.choice([None, 3]),
            }
        topic.append(
            chance.randbytes(chance.randrange(200)),
            producer_name=chance.choice(["", "p", "ä" * 20]),
            publish_time=1_700_000_000_000 + number * 1000,
            attributes={f"k{i}": "v" * i for i in range(chance.randrange(3))},
            **more,
        )
        if number % 40 == 39:
            topic.flush()  # files are rotated between writes
    topic.flush()


def in_both_tiers(log, *, codec=None, count=300):
    """A topic whose beginning is in the bucket alone, and whose end is in local files alone."""
    topic = log.topic(TOPIC, create=True, codec=codec)
    fill(topic, count * 2 // 3, seed=1)
    topic.upload()
    topic.bucket.retention.trim()
    fill(topic, count - count * 2 // 3, seed=2)
    marks = topic.watermarks
    assert 0 < marks.trimmed <= marks.tiered < marks.synced == count
    return topic


def a_ticket(client, start, end, columns=None, topic=TOPIC):
    incarnation = client.watermarks([topic])[topic].incarnation
    return RangeTicket(topic=topic, start=start, end=end, columns=columns, incarnation=incarnation)


def rows_of(batches):
    return [row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict")]


def collect(batches):
    """What comes out, and the error at its end."""
    found = []
    try:
        found.extend(batches)
    except ister.IsterError as error:
        return found, error
    return found, None


def as_rows(topic, start, end):
    """What `Topic.read` gives, as rows."""
    return [
        {
            "topic": TOPIC,
            "offset": message.offset,
            "publish_time": message.publish_time,
            "producer_name": message.producer_name,
            "payload": message.payload,
            "attributes": dict(message.attributes),
            "routing_key": message.routing_key,
            "schema_id": message.schema_id,
            "schema_version": message.schema_version,
        }
        for message in topic.read(start, end=end)
    ]


# -- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", Codec)
def test_ranges_over_both_tiers_are_what_the_topic_reads(log, client, codec):
    topic = in_both_tiers(log, codec=codec)
    expected = as_rows(topic, 0, 300)
    tiered = topic.watermarks.tiered
    chance = random.Random(3)
    ranges = [(0, 300), (tiered - 1, tiered + 1), (tiered, 300), (0, tiered), (299, 300)]
    ranges += [sorted(chance.choices(range(301), k=2)) for _ in range(10)]
    for start, end in ranges:
        batches = list(client.read(a_ticket(client, start, end)))
        assert all(batch.schema == arrow_schema() for batch in batches)
        assert rows_of(batches) == expected[start:end], (start, end)


@pytest.mark.parametrize(
    "columns", [(), ("payload",), ("offset",), ("attributes", "topic"), (*HIDDEN, "offset")]
)
def test_columns_are_those_asked_for(log, client, columns):
    topic = in_both_tiers(log)
    batches = list(client.read(a_ticket(client, 10, 290, columns)))
    assert all(batch.schema == arrow_schema(columns) for batch in batches)
    assert sum(batch.num_rows for batch in batches) == 280
    expected = [
        {name: {**row, "request_id": 0, "producer_id": 0}[name] for name in columns}
        for row in as_rows(topic, 10, 290)
    ]
    assert rows_of(batches) == expected


def thin_out(topic, gone):
    """Has compaction leave messages out of the bucket's part of a topic."""
    owned = topic.bucket.owned
    objects = list(owned.catalog.descriptors())
    new = merge_objects(
        TopicName.parse(topic.name),
        [described for described, _ in objects],
        store=topic.bucket._stores.objects,
        settings=topic.bucket._stores.uploader(owned, lambda: False)._settings,
        format="parquet",
        epoch=owned.epoch,
        incarnation=owned.record.incarnation,
        tag="0123abcd",
        created_at=1,
        survives=lambda batch: pc.invert(pc.is_in(batch["offset"], pa.array(gone, pa.int64()))),
    )
    assert owned.swap(objects, new, until=0)


@pytest.mark.parametrize("columns", [None, ("payload",)], ids=["all", "without offsets"])
def test_messages_that_were_left_out_on_purpose_are_no_loss(log, client, columns):
    topic = in_both_tiers(log)
    wanted = as_rows(topic, 0, 300)
    trimmed = topic.watermarks.trimmed
    gone = [0, 1, 5, *range(10, trimmed - 3), trimmed - 1]
    thin_out(topic, gone)
    left = [row for row in wanted if row["offset"] not in set(gone)]
    rows = rows_of(client.read(a_ticket(client, 0, 300, columns)))
    assert rows == [{k: v for k, v in row.items() if k in (columns or row)} for row in left]
    assert list(client.read(a_ticket(client, 10, trimmed - 3, columns))) == []


class Interrupted:
    """May do everything; something happens when its first rows are on their way."""

    name = "reader"

    def __init__(self, happens):
        self._happens = happens
        self._looks = 0

    def check(self, permission, *, topic=None):
        if permission is Permission.CONSUME:
            self._looks += 1
            if self._looks == 2:
                self._happens()

    def allows(self, permission, *, topic):
        return True


@pytest.mark.parametrize("columns", [None, ("payload",), ()], ids=["all", "payload", "none"])
@pytest.mark.parametrize("is_at_end", [False, True], ids=["inside", "at its end"])
def test_messages_that_are_left_out_meanwhile_end_the_stream(log, columns, is_at_end):
    """Goal: compaction during a stream makes nobody take a hole for damage, or for no hole."""
    topic = in_both_tiers(log)
    wanted = as_rows(topic, 0, 300)
    trimmed = topic.watermarks.trimmed
    gone = list(range(trimmed - 15, trimmed - 5))
    end = trimmed - 5 if is_at_end else 300
    caller = Interrupted(lambda: thin_out(topic, gone))
    access = SimpleNamespace(caller=lambda: caller)

    def as_asked(rows):
        return [{k: v for k, v in row.items() if columns is None or k in columns} for row in rows]

    with (
        FlightServer(LogSource(log), access=access) as server,
        FlightClient(server.address) as client,
    ):
        ticket = a_ticket(client, 0, end, columns)
        found, error = collect(client.read(ticket))
        assert rows_of(found) == as_asked(wanted[: gone[0]])
        assert type(error) is UnavailableError
        assert (error.offset, error.topic) == (gone[0], TOPIC)
        assert "left out" in error.message
        rest = rows_of(client.read(replace(ticket, start=error.offset)))
    assert rest == as_asked(wanted[gone[-1] + 1 : end])


def test_one_client_serves_many_threads(log, server, client):
    topic = in_both_tiers(log)
    expected = as_rows(topic, 0, 300)
    ticket = a_ticket(client, 0, 300)
    failures = []

    def read():
        try:
            for _ in range(5):
                assert rows_of(client.read(ticket)) == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert server.calls == {"read": 20, "watermarks": 1}


def test_read_of_a_topic_made_anew_is_refused(log, client):
    fill(log.topic(TOPIC, create=True), 10)
    ticket = a_ticket(client, 0, 10)
    assert sum(batch.num_rows for batch in client.read(ticket)) == 10
    log.delete(TOPIC)
    fill(log.topic(TOPIC, create=True), 10)
    with pytest.raises(ConflictError):
        list(client.read(ticket))
    assert sum(batch.num_rows for batch in client.read(a_ticket(client, 0, 10))) == 10


def test_what_is_not_there_is_refused(log, server, client):
    in_both_tiers(log)
    for start, end in ((0, 301), (300, 301), (301, 301), (500, 600)):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            list(client.read(a_ticket(client, start, end)))
        assert (caught.value.earliest, caught.value.next, caught.value.offset) == (0, 300, end)
    with pytest.raises(NotFoundError) as caught:
        list(client.read(RangeTicket(topic="/default/none", start=0, end=0, incarnation="")))
    assert caught.value.topic == "/default/none"
    unknown = a_ticket(client, 0, 0, columns=("offset", "value"))
    before = server.calls["read"]
    with pytest.raises(InvalidRequestError, match="value"):
        client.read(unknown)
    assert server.calls["read"] == before, "refused before the call"
    with raises_sent(InvalidRequestError), flight.FlightClient(f"grpc://{server.address}") as raw:
        raw.do_get(flight.Ticket(unknown.to_json())).read_all()


def test_messages_that_a_crash_could_take_back_are_refused(tmp_path):
    """Goal: what readers in the process see is not given to others before it is synced."""
    wal = {"fsync_interval_ms": 3_600_000, "fsync_max_batch_bytes": 1 << 30}
    with (
        Log(load_config(settings_of(tmp_path, wal=wal), {})) as log,
        FlightTopics(log) as server,
        FlightClient(server.address) as client,
    ):
        topic = log.topic(TOPIC, create=True, ack="memory")
        fill(topic, 5)
        topic.append(b"not synced")
        status = client.watermarks([TOPIC])[TOPIC]
        assert (status.synced, status.next, status.ack) == (5, 6, AckLevel.MEMORY)
        assert len(list(topic.read())) == 6
        with pytest.raises(OffsetOutOfRangeError):
            list(client.read(a_ticket(client, 0, 6)))
        topic.flush()
        assert sum(batch.num_rows for batch in client.read(a_ticket(client, 0, 6))) == 6


def test_rows_before_a_damaged_message_come_out_before_the_error(tmp_path):
    config = load_config(settings_of(tmp_path, wal={"rotate_max_bytes": 1 << 20}), {})
    with Log(config) as log:
        topic = log.topic(TOPIC, create=True)
        fill(topic, 50)
        expected = as_rows(topic, 0, 50)
    (file,) = (tmp_path / "wal/default/orders").glob("wal*.log")
    flip_byte(file, file.stat().st_size // 2)
    with Log(config) as log, FlightTopics(log) as server, FlightClient(server.address) as client:
        found, error = collect(client.read(a_ticket(client, 0, 50)))
        found = rows_of(found)
        assert type(error) is CorruptDataError
        assert 0 < len(found) < 50
        assert found == expected[: len(found)]
        assert (error.offset, error.topic) == (len(found), TOPIC)


def large(log, mebibytes=48):
    """A topic that is larger than everything that a connection buffers."""
    topic = log.topic(TOPIC, create=True)
    for _ in range(mebibytes // 4):
        topic.append_many([b"x" * 65_536] * 64)
    topic.flush()
    return topic.watermarks.synced


def test_reading_may_end_early(log, server, client):
    end = large(log)
    batches = client.read(a_ticket(client, 0, end, ("offset", "payload")))
    assert next(batches).num_rows > 0
    batches.close()
    # The server is rid of it too: it would not end before its calls have ended.
    server.close()
    assert log.topic(TOPIC).readers == []


@pytest.mark.nightly
def test_reader_may_take_longer_than_the_timeout_for_a_batch(log, server, client):
    end = large(log)
    ticket = a_ticket(client, 0, end, ("offset", "payload"))
    list(client.read(ticket))  # whatever has to be loaded first is
    with FlightClient(server.address, timeout_seconds=2) as hasty:
        seen = 0
        for batch in hasty.read(ticket):
            if seen == 0:
                threading.Event().wait(2.5)
            seen += batch.num_rows
        assert seen == end


# -- other calls ------------------------------------------------------------------------------


def test_watermarks_are_the_topics_own(log, client):
    topic = in_both_tiers(log)
    other = log.topic("/default/other", create=True, ack="written", codec="bincode1")
    found = client.watermarks(["/default/other", TOPIC])
    assert list(found) == ["/default/other", TOPIC]
    marks = topic.watermarks
    assert found[TOPIC] == TopicStatus(
        topic=TOPIC,
        incarnation=topic.bucket.owned.record.incarnation,
        earliest=0,
        codec=Codec.BINCODE2,
        ack=AckLevel.SYNCED,
        **asdict(marks),
    )
    assert found["/default/other"].incarnation != found[TOPIC].incarnation
    assert (found["/default/other"].ack, found["/default/other"].codec) == (other.ack, other.codec)
    assert client.watermarks([]) == {}
    with pytest.raises(NotFoundError):
        client.watermarks([TOPIC, "/default/nowhere"])
    with pytest.raises(TopicNameError):
        client.watermarks(["nowhere"])


def test_log_without_a_bucket_is_served(tmp_path):
    config = load_config({"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}, {})
    with Log(config) as log, FlightTopics(log) as server, FlightClient(server.address) as client:
        topic = log.topic(TOPIC, create=True)
        fill(topic, 20)
        assert client.watermarks([TOPIC])[TOPIC].incarnation == ""
        assert rows_of(client.read(a_ticket(client, 5, 20))) == as_rows(topic, 5, 20)
        assert load_config(client.storage(), {}) == config


def test_time_is_found_in_a_range(log, client):
    in_both_tiers(log)
    first = 1_700_000_000_000
    # The second part of the topic begins with the first one's times again.
    for time_ms, start, end, found in (
        (0, 0, 300, 0),
        (-5, 7, 300, 7),
        (first + 10_000, 0, 300, 10),
        (first + 9_001, 0, 300, 10),
        (first + 10_000, 11, 300, 11),
        (first + 150_000, 0, 300, 150),
        (first + 150_000, 0, 150, None),
        (first + 50_000, 200, 300, 250),
        (first + 500_000, 0, 300, None),
        (1 << 62, 0, 300, None),
        (0, 300, 300, None),
    ):
        assert client.find_time(TOPIC, time_ms, start, end) == found, (time_ms, start, end)
    with pytest.raises(OffsetOutOfRangeError):
        client.find_time(TOPIC, 0, 0, 301)
    with pytest.raises(NotFoundError):
        client.find_time("/default/nowhere", 0, 0, 0)


# -- batches ----------------------------------------------------------------------------------


def stage(log, payloads, *, batch=0, name="part-0", topic=TOPIC):
    """Rows in the bucket."""
    rows = [{"payload": payload} for payload in payloads]
    header, body = encode_block(pa.RecordBatch.from_pylist(rows, STAGED_SCHEMA), "")
    data = header + body.to_pybytes()
    key = f"{staging_prefix(TopicName.parse(topic), WRITER, batch)}{name}"
    log.stores.objects.put(key, data)
    file = StagedFile(key=key, rows=len(rows), size_bytes=len(data))
    return StagedBatch(writer=WRITER, batch=batch, files=(file,))


def test_batch_counts_once_however_often_it_is_asked_for(log, server, client):
    payloads = [b"%d" % number for number in range(100)]
    first = client.append_staged(
        TOPIC, stage(log, payloads), create=True, ack=AckLevel.WRITTEN, codec=Codec.BINCODE1
    )
    assert (first.start, first.end, first.rows, first.is_known) == (0, 100, 100, False)
    again = client.append_staged(TOPIC, stage(log, payloads, name="other"), create=True)
    assert (again.rows, again.is_known) == (100, True)
    later = client.append_staged(TOPIC, stage(log, [b"later"], batch=1))
    assert (later.start, later.is_known) == (100, False)
    topic = log.topic(TOPIC)
    assert [message.payload for message in topic.read()] == [*payloads, b"later"]
    assert server.calls["append_staged"] == 3
    # As it was made, whatever a later batch wants.
    more = {"ack": AckLevel.MEMORY, "codec": Codec.BINCODE2}
    client.append_staged(TOPIC, stage(log, [b"last"], batch=2), create=True, **more)
    assert (topic.ack, topic.codec) == (AckLevel.WRITTEN, Codec.BINCODE1)


def test_batch_without_its_topic_or_its_files_is_refused(log, client):
    staged = stage(log, [b"a"])
    with pytest.raises(NotFoundError) as caught:
        client.append_staged(TOPIC, staged)
    assert (caught.value.topic, client.topics()) == (TOPIC, [])
    log.stores.objects.delete(staged.files[0].key)
    with pytest.raises(NotFoundError):
        client.append_staged(TOPIC, staged, create=True)
    assert log.topic(TOPIC).watermarks.next == 0


def test_batch_cannot_have_a_topics_objects_removed(log, client):
    """Goal: not even when a client does not look at what it sends."""
    topic = in_both_tiers(log)
    (key, *_) = [info.key for info in log.stores.objects.list("storage/topics/default/orders/")]
    staged = StagedBatch(writer=WRITER, batch=0, files=(StagedFile(key=key, rows=1, size_bytes=9),))
    with pytest.raises(InvalidRequestError):
        client.append_staged(TOPIC, staged)
    message = {
        **json.loads(AppendStaged(topic=TOPIC, staged=replace(staged, files=())).to_json()),
        "files": [{"key": key, "rows": 1, "size": 9}],
    }
    with raises_sent(InvalidRequestError):
        raw_action(client.address, Action.APPEND_STAGED, json.dumps(message).encode())
    assert len(as_rows(topic, 0, 300)) == 300


# -- what else a server may be asked ------------------------------------------------------------


@contextmanager
def raises_sent(kind):
    """Expects a Flight error that carries an error of ours."""
    with pytest.raises(flight.FlightServerError) as caught:
        yield
    assert isinstance(decode_error(str(caught.value)), kind), caught.value


def raw_action(address, action, body):
    with flight.FlightClient(f"grpc://{address}") as client:
        return list(client.do_action(flight.Action(str(action), body)))


STRANGE = [
    b"",
    b"\xff\xfe\x00",
    b"[]",
    b"{}",
    b'{"version":1}',
    b"[" * 100_000,
    b'{"a":"' + b"x" * (1 << 20) + b'"}',
    b'{"version":1,"topic":"/default/orders","start":5,"end":1,"incarnation":"","columns":null}',
    b'{"version":1,"topic":"orders","start":0,"end":1,"incarnation":"","columns":null}',
    b'{"version":1,"topic":"/default/orders","start":0,"end":1,"incarnation":"","columns":[7]}',
]


@each("body", STRANGE)
def test_strange_requests_are_refused_and_the_server_goes_on(server, client, body):
    with raises_sent(InvalidRequestError), flight.FlightClient(f"grpc://{server.address}") as raw:
        raw.do_get(flight.Ticket(body)).read_all()
    for action in (Action.WATERMARKS, Action.FIND_TIME, Action.APPEND_STAGED, "measure"):
        with raises_sent(InvalidRequestError):
            raw_action(server.address, action, body)
    assert client.topics() == []


# -- servers that fail --------------------------------------------------------------------------


@pytest.fixture
def yml(tmp_path):
    """The settings of a log as a file, for a process of its own."""
    file = tmp_path / "ister.yml"
    file.write_text(json.dumps(settings_of(tmp_path, wal={"rotate_max_bytes": 1 << 25})))
    return file


@pytest.mark.nightly
def test_server_that_dies_while_it_is_read_is_unavailable_and_read_on_when_it_is_back(yml):
    with ister.open(yml) as log:
        end = large(log)
    with FlightProcess(yml) as process, FlightClient(process.address) as client:
        ticket = a_ticket(client, 0, end, ("offset", "payload"))
        batches = client.read(ticket)
        seen = next(batches)["offset"].to_pylist()
        process.kill()
        more, error = collect(batches)
        assert type(error) is NoAnswerError
        assert error.hint
        seen += [offset for batch in more for offset in batch["offset"].to_pylist()]
        assert seen == list(range(len(seen)))
        assert 0 < len(seen) < end
        with pytest.raises(UnavailableError):
            client.watermarks([TOPIC])
        process.start()
        rest = replace(ticket, start=len(seen))
        for batch in patiently(lambda: list(client.read(rest))):
            seen += batch["offset"].to_pylist()
        assert seen == list(range(end))


def patiently(call):
    """Calls again until the client has noticed that the server is back."""
    for _ in range(100):
        with suppress(UnavailableError):
            return call()
        threading.Event().wait(0.1)
    return call()


@pytest.mark.nightly
def test_server_that_hangs_is_unavailable_in_time(yml):
    with ister.open(yml) as log:
        end = large(log)
        payloads = [b"a", b"b"]
        staged = stage(log, payloads)
    with FlightProcess(yml) as process, FlightClient(process.address) as client:
        ticket = a_ticket(client, 0, end, ("offset", "payload"))
        list(client.read(ticket))  # whatever has to be loaded first is
        with (
            FlightClient(process.address, timeout_seconds=3) as reading,
            FlightClient(process.address, timeout_seconds=0.5) as hasty,
        ):
            batches = reading.read(ticket)
            next(batches)
            process.pause()
            try:
                for call in (
                    lambda: list(batches),
                    lambda: list(hasty.read(ticket)),
                    lambda: hasty.watermarks([TOPIC]),
                    lambda: client.append_staged(TOPIC, staged, timeout_seconds=0.5),
                ):
                    with pytest.raises(NoAnswerError) as caught:
                        call()
                    assert caught.value.reason == "time-out"
            finally:
                process.resume()
        # It may have heard the last one, or not: asked again it does what is left to do.
        appended = patiently(lambda: client.append_staged(TOPIC, staged))
        assert appended.rows == 2
        found = patiently(lambda: list(client.read(a_ticket(client, end, end + 2))))
        assert [row["payload"] for row in rows_of(found)] == payloads
        assert client.watermarks([TOPIC])[TOPIC].next == end + 2
    wait_for_reads_to_end()


def wait_for_reads_to_end():
    """Reads that were given up end with the connection."""
    for thread in threading.enumerate():
        if thread.name == "ister-flight-read":
            thread.join(SECONDS)


def test_server_that_is_not_there_is_unavailable(server):
    with FlightClient(server.address) as client:
        server.close()
        ticket = RangeTicket(topic=TOPIC, start=0, end=1, incarnation="")
        for call in (
            client.topics,
            client.storage,
            lambda: client.watermarks([TOPIC]),
            lambda: client.find_time(TOPIC, 0, 0, 1),
            lambda: list(client.read(ticket)),
        ):
            with pytest.raises(UnavailableError) as caught:
                call()
            assert server.address in caught.value.message
            assert "runs and can be reached" in caught.value.hint
            assert "debug context" not in str(caught.value)


def test_closed_client_is_closed(server):
    client = FlightClient(server.address)
    ticket = RangeTicket(topic=TOPIC, start=0, end=0, incarnation="")
    client.close()
    client.close()
    for call in (client.topics, lambda: client.read(ticket)):
        with pytest.raises(ClosedError):
            call()


NO_PLACES = ["", "localhost", "localhost:", ":6651", "localhost:0", "localhost:65536", None, 6651]
NO_ADDRESSES = ["http://h:1", "grpc://h:1/x", "user:secret@h:1", "local host:1", "unix:///tmp/x"]


@each("address", [*NO_PLACES, *NO_ADDRESSES])
def test_address_that_is_none_is_refused(address):
    with pytest.raises(InvalidRequestError):
        FlightClient(address)


def test_address_may_be_of_any_kind(server):
    for form in ("{}", "grpc://{}", "grpc+tcp://{}"):
        with FlightClient(form.format(server.address)) as client:
            assert client.topics() == []
    for address in ("[::1]:6651", "broker-1.example.com:6651", "grpc+tls://a:1"):
        FlightClient(address).close()


def test_timeout_has_to_be_a_time():
    for seconds in (0, -1, float("nan")):
        with pytest.raises(InvalidRequestError):
            FlightClient("127.0.0.1:1", timeout_seconds=seconds)


# -- a server that lies -------------------------------------------------------------------------


class Liar(flight.FlightServerBase):
    """Answers whatever a test says."""

    def __init__(self):
        super().__init__("grpc://127.0.0.1:0")
        self.schema = arrow_schema(("offset",))
        self.batches = []
        self.results = []

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def do_get(self, context, ticket):
        return flight.GeneratorStream(self.schema, self._said(self.batches))

    def do_action(self, context, action):
        return [flight.Result(item) for item in self._said(self.results)]

    def _said(self, items):
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item


@pytest.fixture
def liar():
    with Liar() as liar:
        yield liar


def offsets(*numbers):
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=arrow_schema(("offset",)))


def read_from(liar, columns=("offset",)):
    """Asks for the offsets 5 up to 10; what has come out, and how it ended."""
    ticket = RangeTicket(topic=TOPIC, start=5, end=10, incarnation="", columns=columns)
    with FlightClient(liar.address) as client:
        found, error = collect(client.read(ticket))
    return [value for batch in found for value in batch.columns[0].to_pylist()], error


def test_answer_may_come_in_pieces(liar):
    liar.batches = [offsets(), offsets(5, 6), offsets(), offsets(7), offsets(8, 9), offsets()]
    assert read_from(liar) == ([5, 6, 7, 8, 9], None)


@each("pieces", [[], [()], [(5, 6)], [(5,), (6, 7, 8)]])
def test_answer_that_ends_early_is_to_be_asked_for_again(liar, pieces):
    liar.batches = [offsets(*numbers) for numbers in pieces]
    found, error = read_from(liar)
    assert type(error) is UnavailableError
    assert error.offset == 5 + len(found) == 5 + sum(map(len, pieces))
    assert error.topic == TOPIC


@each(
    ("pieces", "good"),
    [
        ([(0, 1, 2, 3, 4)], 0),
        ([(6, 7, 8, 9, 10)], 0),
        ([(5, 7, 8, 9, 10)], 0),
        ([(5, 6, 6, 7, 8)], 0),
        ([(5, 6, 8, 7, 9)], 0),
        ([(5, 6), (8, 9)], 2),
        ([(5, 6), (5, 6, 7)], 2),
        ([(5, 6), (7, None, 9)], 2),
        ([(5, 6), (None, 8, 9)], 2),
        ([(5, 6, 7, 8, 9, 10)], 0),
        ([(5, 6, 7, 8, 9), (10,)], 5),
        ([(9, 8, 7, 6, 5)], 0),
    ],
)
def test_offsets_that_were_not_asked_for_are_refused(liar, pieces, good):
    liar.batches = [offsets(*numbers) for numbers in pieces]
    found, error = read_from(liar)
    assert found == list(range(5, 5 + good))
    assert type(error) is CorruptDataError
    assert liar.address in error.message
    if len(pieces) == 1 and len(pieces[0]) > 5:  # too many are seen without their offsets, too
        liar.schema = arrow_schema(("payload",))
        liar.batches = [pa.record_batch([pa.array([b"x"] * 6)], schema=liar.schema)]
        assert read_from(liar, ("payload",)) == ([], matching(CorruptDataError, "from 10 on"))
        liar.schema = arrow_schema(("offset",))


class matching:  # noqa: N801 - reads as a word of the assertion
    """Equal to errors of a class with a text."""

    def __init__(self, kind, text):
        self._kind = kind
        self._text = text

    def __eq__(self, other):
        return type(other) is self._kind and self._text in str(other)

    def __hash__(self):
        return hash(self._kind)

    def __repr__(self):
        return f"{self._kind.__name__} with {self._text!r}"


@pytest.mark.parametrize(
    "schema",
    [
        arrow_schema(("payload",)),
        arrow_schema(("offset", "payload")),
        arrow_schema(()),
        pa.schema([pa.field("offset", pa.int32())]),
        pa.schema([pa.field("offset", pa.int64(), nullable=False)]),
    ],
)
def test_other_columns_are_refused(liar, schema):
    liar.schema = schema
    assert read_from(liar) == ([], matching(CorruptDataError, "other columns"))


def test_batch_that_would_crash_whoever_uses_it_is_refused(liar):
    """Goal: no text that is no UTF-8, and no position outside of the values, comes out."""
    lying = pa.StringArray.from_buffers(
        1, pa.py_buffer(b"\0\0\0\0\x02\0\0\0"), pa.py_buffer(b"\xff\xfe")
    )
    beyond = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\xff\xff\xff\0\x02\0\0\0"), pa.py_buffer(b"abcdefgh")
    )
    liar.schema = arrow_schema(("producer_name",))
    for array in (lying, beyond):
        liar.batches = [pa.RecordBatch.from_arrays([array], schema=liar.schema)]
        found, error = read_from(liar, ("producer_name",))
        assert found == []
        assert error == matching(CorruptDataError, "a broken batch")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ZeroDivisionError("oops"), UnavailableError),
        (flight.FlightServerError("oops"), UnavailableError),
        (NotImplementedError("oops"), UnsupportedOperationError),
        (flight.FlightInternalError("oops"), NoAnswerError),
        (flight.FlightUnavailableError("oops"), NoAnswerError),
        (flight.FlightTimedOutError("oops"), NoAnswerError),
        (flight.FlightUnauthenticatedError("oops"), PermissionDeniedError),
        (flight.FlightUnauthorizedError("oops"), PermissionDeniedError),
        (flight.FlightUnauthorizedError(encode_error(NotFoundError("gone"))), NotFoundError),
        (flight.FlightServerError(encode_error(ZeroDivisionError("oops"))), InvariantError),
        (pa.ArrowInvalid("oops"), CorruptDataError),
        (KeyError("oops"), CorruptDataError),
    ],
)
def test_every_way_to_fail_is_an_error_of_ours(liar, raised, kind):
    liar.batches = [offsets(5, 6), raised]
    liar.results = [raised]
    found, error = read_from(liar)
    assert (found, type(error)) == ([5, 6], kind)
    with FlightClient(liar.address) as client, pytest.raises(kind) as caught:
        client.topics()
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("call", "results"),
    [
        (lambda client: client.topics(), [b"{}"]),
        (lambda client: client.topics(), []),
        (lambda client: client.topics(), [b'{"version":1,"topics":[]}'] * 2),
        (lambda client: client.storage(), [b'{"version":1,"settings":{"a":"${HOME}"}}']),
        (lambda client: client.watermarks([TOPIC]), []),
        (lambda client: client.watermarks([TOPIC]), [b"x"]),
        (lambda client: client.find_time(TOPIC, 0, 5, 9), [b'{"version":1,"offset":9}']),
        (lambda client: client.find_time(TOPIC, 0, 5, 9), [b'{"version":1}']),
    ],
)
def test_answers_that_are_none_are_refused(liar, call, results):
    liar.results = results
    with FlightClient(liar.address) as client, pytest.raises(CorruptDataError) as caught:
        call(client)
    assert liar.address in caught.value.message
    assert caught.value.hint
