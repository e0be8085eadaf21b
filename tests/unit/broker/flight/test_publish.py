"""Bulk publishing by Flight: rows in, answers out, whatever comes from the network."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.cases import each

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import flight

from benchmarks.flight_publisher import publishing
from ister.base import failpoints
from ister.base.limits import MIB
from ister.broker.flight import publish as publish_module
from ister.broker.flight.broker_source import FlightLimits
from ister.broker.flight.publish import check_schema
from ister.client.flight import FlightClient
from ister.config import load_config
from ister.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.topic.log import Log
from ister.wire.contract import PutAck, PutBatch, PutOpen
from ister.wire.errors import decode_error
from tests.servers.flight import (
    PUBLISH,
    FlightServer,
    FlightTopics,
    LogSource,
    cut_connections,
)
from tests.support.waiting import eventually

TOPIC = "/default/orders"
SCHEMA = pa.schema([("payload", pa.binary())])
SECONDS = 60.0


@pytest.fixture
def log(tmp_path):
    config = {"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}
    with Log(load_config(config, {})) as log:
        log.topic(TOPIC, create=True)
        yield log


@pytest.fixture
def topic(log):
    return log.topic(TOPIC)


@pytest.fixture
def server(log):
    with FlightTopics(log) as server:
        yield server


@pytest.fixture
def client(server):
    with FlightClient(server.address) as client:
        yield client


def rows(start, count, size=0):
    texts = [(b"%d" % number).ljust(size, b".") for number in range(start, start + count)]
    return pa.record_batch([pa.array(texts, pa.binary())], schema=SCHEMA)


def numbers_in(topic):
    return [int(message.payload.strip(b".")) for message in topic.read()]


def publish(client, batches, **more):
    """Sends batches of numbers, given as ranges; returns the answers, and how it ended."""
    acks = []
    more = {"producer": "p", "first_sequence": batches[0].start, "topic": TOPIC, **more}
    try:
        with publishing(client, schema=SCHEMA, on_ack=acks.append, **more) as publisher:
            for batch in batches:
                publisher.write(rows(batch.start, len(batch)))
    except IsterError as error:
        return acks, error
    return acks, None


def publish_or_raise(client, batches, **more):
    acks, error = publish(client, batches, **more)
    if error is not None:
        raise error
    return acks


def ack(sequence, start, end, known=0):
    return PutAck(sequence=sequence, start=start, end=end, known=known)


# -- rows and answers -------------------------------------------------------------------------


def test_rows_become_messages_and_each_batch_is_answered(client, topic, server):
    acks = publish_or_raise(client, [range(5), range(5, 6), range(6, 100)])
    assert acks == [ack(0, 0, 5), ack(5, 5, 6), ack(6, 6, 100)]
    assert numbers_in(topic) == list(range(100))
    assert {message.producer_name for message in topic.read()} == {"p"}
    assert server.calls == {PUBLISH: 1}
    # Without a producer's name nothing is known of what came before.
    assert publish_or_raise(client, [range(3)], producer=None) == [ack(0, 100, 103)]
    assert publish_or_raise(client, [range(3)], producer=None) == [ack(0, 103, 106)]


def test_small_batches_do_not_overtake_large_ones(client, topic):
    """Goal: one order, on the loop and in a thread. Method: sizes in turn, many at once."""
    acks, start = [], 0
    with publishing(client, TOPIC, SCHEMA, producer="p", on_ack=acks.append) as publisher:
        for number in range(200):
            count, size = (400, 200) if number % 5 == 0 else (3, 10)
            publisher.write(rows(start, count, size=size))
            start += count
    assert numbers_in(topic) == list(range(start))
    assert [one.start for one in acks] == [one.sequence for one in acks]
    assert len(acks) == 200


def test_batches_before_one_that_is_refused_are_answered_and_none_behind_it_is_taken(client, topic):
    acks = []
    publisher = publishing(client, TOPIC, SCHEMA, producer="p", on_ack=acks.append)
    for number in range(12):
        sequence = number * 400 + (number > 5)  # one is left out
        publisher.write(rows(number * 400, 400, size=200), sequence=sequence)
    with pytest.raises(ConflictError, match="left out"):
        publisher.close()
    assert [one.end for one in acks] == [400 * number for number in range(1, 7)]
    assert numbers_in(topic) == list(range(2400))


def test_small_batch_for_a_topic_that_is_held_waits_and_the_others_go_on(client, log, topic):
    """Goal: the loop waits for nothing. Method: a topic that takes nothing, and one that does."""
    log.topic("/default/other", create=True)
    topic.wal.gate.hold("lag", lambda: CapacityError("too much"), waits=True)
    held = threading.Thread(target=publish, args=(client, [range(3)]))
    held.start()
    try:
        for number in range(20):
            with publishing(client, "/default/other", SCHEMA, producer=f"q{number}") as publisher:
                publisher.write(rows(0, 3))
        assert topic.watermarks.next == 0
    finally:
        topic.wal.gate.unhold("lag")
        held.join(SECONDS)
    assert numbers_in(topic) == [0, 1, 2]


def test_answered_rows_are_synced(client, topic):
    seen = []
    publisher = publishing(
        client,
        TOPIC,
        SCHEMA,
        producer="p",
        on_ack=lambda ack: seen.append(topic.watermarks.synced - ack.end),
    )
    with publisher:
        for start in range(0, 500, 10):
            publisher.write(rows(start, 10))
    assert len(seen) == 50
    assert min(seen) >= 0


def test_all_columns_arrive(client, topic):
    batch = pa.record_batch(
        {
            "payload": pa.array([b"a", b"b"]),
            "publish_time": pa.array([1000, 2000], pa.timestamp("ms")),
            "attributes": pa.array([[("k", "v")], []], pa.map_(pa.string(), pa.string())),
            "routing_key": pa.array(["r", None]),
            "schema_id": pa.array([7, None], pa.int64()),
            "schema_version": pa.array([1, None], pa.int32()),
            "producer_name": pa.array(["x", "y"]),
        }
    )
    with publishing(client, TOPIC, batch.schema) as publisher:
        publisher.write(batch)
    first, second = topic.read()
    assert (first.payload, first.publish_time_ms, first.attributes) == (b"a", 1000, {"k": "v"})
    assert (first.routing_key, first.schema_id, first.schema_version) == ("r", 7, 1)
    assert (first.producer_name, second.producer_name) == ("x", "y")
    assert second.routing_key is None


def test_retried_batches_are_answered_with_their_first_offsets(client, topic):
    publish_or_raise(client, [range(10), range(10, 20)])
    topic.append(b"1000")
    again = publish_or_raise(client, [range(10), range(10, 20), range(20, 30)])
    assert again == [ack(0, 0, 10, 10), ack(10, 10, 20, 10), ack(20, 21, 31)]
    assert publish_or_raise(client, [range(25, 35)]) == [ack(25, 26, 36, 5)]
    assert numbers_in(topic) == [*range(20), 1000, *range(20, 35)]


def test_many_streams_at_once(client, log, server):
    """Goal: producers do not mix, whether they share a topic and a connection or not."""
    names = [TOPIC, "/default/other"]

    def run(number):
        first = number * 1000
        with FlightClient(server.address) as mine:
            publish_or_raise(
                mine if number % 2 else client,
                [range(start, start + 20) for start in range(first, first + 400, 20)],
                topic=names[number % 2],
                producer=f"p{number}",
                create=True,
            )

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(12)))
    for number in range(12):
        topic = log.topic(names[number % 2])
        mine = [int(m.payload) for m in topic.read() if m.producer_name == f"p{number}"]
        assert mine == list(range(number * 1000, number * 1000 + 400))
    eventually(lambda: server.server.streams == 0)


# -- what else comes from the network ---------------------------------------------------------


def raw_put(server, batches, *, command=None, schema=SCHEMA, descriptor=None):
    """Sends batches (or pairs of a batch and its metadata) as they are; returns the answers."""
    opened = PutOpen(topic=TOPIC, producer=None)
    descriptor = descriptor or flight.FlightDescriptor.for_command(command or opened.to_json())
    answers, error = [], None
    with flight.connect(f"grpc://{server.address}") as client:
        writer, reader = client.do_put(descriptor, schema)
        try:
            for number, item in enumerate(batches):
                known = (item, PutBatch(sequence=number).to_json())
                batch, metadata = item if isinstance(item, tuple) else known
                if metadata is None:
                    writer.write_batch(batch)
                elif batch is None:
                    writer.write_metadata(metadata)
                else:
                    writer.write_with_metadata(batch, metadata)
            writer.done_writing()
        except flight.FlightError as caught:
            error = caught
        try:
            while (answer := reader.read()) is not None:
                answers.append(answer.to_pybytes())
            writer.close()
        except flight.FlightError as caught:
            error = caught
    return answers, None if error is None else decode_error(str(error))


def binary(offsets, data, kind=None):
    """An array whose parts are as given, right or wrong."""
    packed = pa.array(offsets, pa.int32()).buffers()[1]
    buffers = [None, packed, pa.py_buffer(data)]
    return pa.Array.from_buffers(kind or pa.binary(), len(offsets) - 1, buffers)


def broken_map():
    kind = pa.map_(pa.string(), pa.string())
    entry = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.string())])
    packed = pa.array([0, 900, 1], pa.int32()).buffers()[1]
    values = [pa.array([{"key": "k", "value": "v"}], entry)]
    return pa.Array.from_buffers(kind, 2, [None, packed], children=values)


@each(
    "columns",
    [
        {"payload": binary([0, 9, 4, 12], b"x" * 12)},
        {"payload": binary([0, -5, 4, 12], b"x" * 12)},
        {"payload": [b"a"], "routing_key": binary([0, 2], b"\xff\xfe", pa.string())},
        {"payload": [b"a"], "producer_name": binary([0, 2], b"\xff\xfe", pa.string())},
        {"payload": [b"a", b"b"], "attributes": broken_map()},
        # Columns that are none of a message's.
        {"value": [b"a"]},
        {"payload": [b"a"], "more": [1]},
        {"routing_key": ["a"]},
        {"payload": pa.array([b"a"]).dictionary_encode()},
        {"payload": [b"a"], "producer_name": pa.array(["a"]).dictionary_encode()},
        {"payload": pa.array([b"a"], pa.binary_view())},
        {"payload": pa.array(["a"], pa.string_view())},
        {"payload": [b"a"], "routing_key": pa.array(["a"], pa.string_view())},
        {"payload": pa.RunEndEncodedArray.from_arrays([1], [b"a"])},
        {"payload": [[[[b"a"]]]]},
        {"payload": [1]},
        {"payload": pa.array([None], pa.binary())},
        {"payload": pa.nulls(1)},
        {"payload": [b"a"], "attributes": [{"a": [1]}]},
        {"payload": [b"a"], "schema_id": ["x"]},
    ],
)
def test_malformed_arrow_is_refused_and_harms_nobody(server, client, topic, columns):
    batch, before = pa.record_batch(columns), topic.watermarks.next
    with publishing(client, TOPIC, SCHEMA, producer=f"p{before}") as good:
        answers, error = raw_put(server, [batch], schema=batch.schema)
        assert type(error) is InvalidRequestError
        assert {type(decode_error(a.decode())) for a in answers} <= {InvalidRequestError}
        good.write(rows(before, 1))
    assert numbers_in(topic) == list(range(before + 1))


def test_rows_that_share_their_bytes_are_not_multiplied(server, topic):
    """A view tells where a payload is, so that all of them may be the same megabyte."""
    count, size = 100, MIB
    view = struct.pack("<i4sii", size, b"xxxx", 0, 0)
    buffers = [None, pa.py_buffer(view * count), pa.py_buffer(b"x" * size)]
    batch = pa.record_batch({"payload": pa.Array.from_buffers(pa.binary_view(), count, buffers)})
    _, error = raw_put(server, [batch], schema=batch.schema)
    assert type(error) is InvalidRequestError
    assert topic.watermarks.next == 0


class _Watched(LogSource):
    """Notes which threads admit rows."""

    def __init__(self, log):
        super().__init__(log)
        self.threads = []

    def admit(self, *_args, **_more):
        self.threads.append(threading.current_thread().name)


@each(
    ("texts", "codec", "is_on_loop"),
    [
        ([b"x" * 100], None, True),
        ([b"x" * 100], "zstd", True),
        ([bytes(MIB)], "zstd", False),
        ([b""] * 2000, None, False),
    ],
)
def test_the_loop_takes_small_batches_alone(log, texts, codec, is_on_loop):
    """Goal: messages that are small, and batches that are not."""
    kind = pa.binary(0) if texts[0] == b"" else pa.binary()
    batch = pa.record_batch({"payload": pa.array(texts, kind)})
    options = flight.FlightCallOptions(write_options=pa.ipc.IpcWriteOptions(compression=codec))
    source = _Watched(log)
    with FlightServer(source) as server, flight.connect(f"grpc://{server.address}") as client:
        descriptor = flight.FlightDescriptor.for_command(
            PutOpen(topic=TOPIC, producer=None).to_json()
        )
        writer, reader = client.do_put(descriptor, batch.schema, options)
        writer.write_with_metadata(batch, PutBatch(sequence=0).to_json())
        writer.done_writing()
        answer = PutAck.from_json(reader.read().to_pybytes())
        assert answer.end - answer.start == len(texts)
        writer.close()
    (thread,) = source.threads
    assert thread.startswith("ister-flight") is not is_on_loop


def test_schema_and_command_are_short(server):
    _, error = raw_put(server, [], schema=SCHEMA.with_metadata({"x": "y" * MIB}))
    assert type(error) is InvalidRequestError
    _, error = raw_put(server, [], command=PutOpen(topic=TOPIC, producer="p" * MIB).to_json())
    assert type(error) is InvalidRequestError
    for fields in ([("payload", pa.binary())] * 2, [(f"c{n}", pa.int8()) for n in range(100_000)]):
        with pytest.raises(InvalidRequestError) as caught:
            check_schema(pa.schema(fields))
        assert len(caught.value.message) < 1000


@each(
    "part",
    [
        (rows(0, 1), None),
        (None, PutBatch(sequence=0).to_json()),
        (rows(0, 1), b""),
        (rows(0, 1), b"{"),
        (rows(0, 1), b'{"version":1}'),
        (rows(0, 1), b'{"version":1,"sequence":-1}'),
        (rows(0, 0), PutBatch(sequence=0).to_json()),
    ],
)
def test_batch_without_its_sequence_or_without_rows_is_refused(server, topic, part):
    before = topic.watermarks.next
    answers, error = raw_put(server, [rows(0, 2), part, rows(9, 1)])
    assert type(error) is InvalidRequestError
    # Flight's client may see the end of the stream before the answers that came with it.
    if answers:
        assert PutAck.from_json(answers[0]) == ack(0, before, before + 2)
    for answer in answers[1:]:
        assert type(decode_error(answer.decode())) is InvalidRequestError
    assert topic.watermarks.next == before + 2


@each(
    "opening",
    [
        {"command": b"x"},
        {"command": b"{}"},
        {"command": b'{"version":1,"topic":"nowhere","producer":null,"epoch":0,"create":true}'},
        {"command": PutOpen(topic=TOPIC, producer="").to_json()},
        {"command": PutOpen(topic=TOPIC, producer="x" * 1000).to_json()},
        {"command": PutOpen(topic=TOPIC, producer="p", epoch=1 << 40).to_json()},
        {"descriptor": flight.FlightDescriptor.for_path("default", "orders")},
    ],
)
def test_opening_that_is_none_is_refused(server, log, opening):
    answers, error = raw_put(server, [rows(0, 1)], **opening)
    assert isinstance(error, InvalidRequestError)
    assert answers == []
    assert log.topics() == [TOPIC]


def test_batches_that_are_too_large_are_refused(log, topic):
    limits = FlightLimits(batch_rows_max=10, batch_bytes_max=1000)
    with (
        FlightTopics(log, limits=limits) as server,
        FlightClient(server.address) as client,
        publishing(client, TOPIC, SCHEMA, producer="good") as good,
    ):
        acks, error = publish(client, [range(10), range(10, 21)])
        assert type(error) is InvalidRequestError
        assert "not 11" in error.message
        assert len(acks) == 1
        publisher = publishing(client, TOPIC, SCHEMA, producer="q")
        publisher.write(rows(0, 10, size=2 * MIB))
        with pytest.raises(MessageTooLargeError):
            publisher.close()
        good.write(rows(10, 5))
    assert numbers_in(topic) == list(range(15))


def test_more_streams_than_allowed_are_refused(log, topic, monkeypatch):
    monkeypatch.setattr(publish_module, "_IDLE_SECONDS", 3600.0)
    with (
        FlightTopics(log, limits=FlightLimits(streams_max=2)) as server,
        FlightClient(server.address) as client,
        publishing(client, TOPIC, SCHEMA, producer="a") as first,
    ):
        service = server.server.service
        first.write(rows(0, 1))
        first.flush()
        with publishing(client, TOPIC, SCHEMA, producer="b") as second:
            second.write(rows(1, 1))
            second.flush()
            acks, error = publish(client, [range(5)], producer="c")
            assert type(error) is CapacityError
            assert "broker.limits.max_flight_streams is 2" in error.hint
            assert (service.streams_refused, acks) == (1, [])
            # One that is idle ends before another one is refused.
            monkeypatch.setattr(publish_module, "_IDLE_SECONDS", 0.0)
            eventually(lambda: service.busy_streams == 0)
            publish_or_raise(client, [range(2, 4)], producer="c")
            second.write(rows(4, 1))
            second.flush()
            assert service.streams_refused == 1
        eventually(lambda: server.server.streams <= 1)
    assert numbers_in(topic) == [0, 1, 2, 3, 4]


# -- slow disks, slow clients -----------------------------------------------------------------


@contextmanager
def held_disk():
    """Nothing is synced before the block ends."""
    gate = threading.Event()
    failpoints.arm("wal.before_sync", lambda: gate.wait(SECONDS))
    try:
        yield gate
    finally:
        gate.set()
        failpoints.disarm()


@each(
    ("limit", "kind", "count", "size", "least", "most"),
    [
        (MIB, pa.binary(), 10, 10_000, 100, 130),
        # Batches of no bytes at all: what the server knows of each of them counts, too.
        (100_000, pa.binary(0), 1, 0, 95, 100),
    ],
)
def test_server_takes_no_more_than_it_may_owe_answers_for(
    tmp_path, limit, kind, count, size, least, most
):
    config = {"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}
    batch = pa.record_batch({"payload": pa.array([bytes(size)] * count, kind)})
    with (
        Log(load_config(config, {})) as log,
        FlightTopics(log, limits=FlightLimits(unacked_bytes_max=limit)) as server,
        FlightClient(server.address) as client,
        publishing(
            client, TOPIC, batch.schema, create=True, unanswered_bytes_max=1 << 30
        ) as publisher,
    ):
        with held_disk():
            for _ in range(300):
                publisher.write(batch)
            topic = eventually(lambda: TOPIC in log.topics() and log.topic(TOPIC))
            eventually(lambda: topic.watermarks.next >= least)
            threading.Event().wait(0.3)
            assert topic.watermarks.next <= most
        publisher.flush()
        assert topic.watermarks.next == 300 * count


def test_client_that_takes_no_answers_harms_nobody(server, client, topic):
    with flight.connect(f"grpc://{server.address}") as rude:
        command = PutOpen(topic=TOPIC, producer=None).to_json()
        writer, _ = rude.do_put(flight.FlightDescriptor.for_command(command), SCHEMA)
        for number in range(2000):
            writer.write_with_metadata(rows(7, 1), PutBatch(sequence=number).to_json())
        assert publish(client, [range(1000, 1010)])[1] is None
        writer.done_writing()
    eventually(lambda: server.server.streams == 0)


def test_failed_sync_is_told(client):
    def fail():
        raise OSError(5, "no disk")

    failpoints.arm("wal.before_sync", fail)
    acks, error = publish(client, [range(3)])
    failpoints.disarm()
    assert isinstance(error, IsterError)
    assert not acks


# -- connections that end ---------------------------------------------------------------------


def test_connection_cut_between_append_and_answer(server, client, topic):
    """Goal: the retry is answered with the offsets of the first time."""
    is_cut = threading.Event()

    def cut():
        if not is_cut.is_set():
            is_cut.set()
            cut_connections(server.port)

    failpoints.arm("wal.after_sync", cut)
    acks, error = publish(client, [range(10)])
    failpoints.disarm()
    assert isinstance(error, UnavailableError)
    assert (acks, is_cut.is_set()) == ([], True)
    topic.append(b"10")
    assert publish_or_raise(client, [range(10)]) == [ack(0, 0, 10, 10)]
    assert numbers_in(topic) == list(range(11))


def test_server_that_ends_tells_its_publishers(log, topic):
    with FlightTopics(log) as server, FlightClient(server.address) as client:
        idle = publishing(client, TOPIC, SCHEMA, producer="p")
        idle.write(rows(0, 5))
        idle.flush()
        server.server.close(SECONDS)
        eventually(lambda: idle.failure is not None)
        assert type(idle.failure) is UnavailableError
        assert "shutting down" in idle.failure.message
        idle.abort()
    assert numbers_in(topic) == list(range(5))


def test_server_ends_although_a_client_does_not(log):
    with FlightTopics(log) as server:
        command = PutOpen(topic=TOPIC, producer=None).to_json()
        with flight.connect(f"grpc://{server.address}") as deaf:
            writer, reader = deaf.do_put(flight.FlightDescriptor.for_command(command), SCHEMA)
            writer.write_with_metadata(rows(0, 1), PutBatch(sequence=0).to_json())
            assert reader.read() is not None
            assert server.server.streams == 1
            server.server.close(grace_seconds=0.2)
            assert server.server.streams == 0
            with pytest.raises(flight.FlightError):
                writer.close()


# -- rights -----------------------------------------------------------------------------------


class Rights:
    """What callers may do: a set of words that a test changes."""

    name = "somebody"

    def __init__(self, *words):
        self.words = set(words)

    def caller(self):
        return self

    def allows(self, permission, *, topic=None):
        return str(permission) in self.words

    def check(self, permission, *, topic=None):
        if str(permission) not in self.words:
            raise PermissionDeniedError(f"no {permission}", topic=topic)


def test_right_that_is_taken_away_ends_the_stream(log, topic):
    rights = Rights("produce")
    with (
        FlightServer(LogSource(log), access=rights) as server,
        FlightClient(server.address) as client,
    ):
        busy = publishing(client, TOPIC, SCHEMA, producer="a")
        idle = publishing(client, TOPIC, SCHEMA, producer="b")
        for publisher in (busy, idle):
            publisher.write(rows(0, 1))
            publisher.flush()
        rights.words.clear()
        busy.write(rows(1, 1))
        for publisher in (busy, idle):
            eventually(lambda publisher=publisher: publisher.failure is not None)
            assert type(publisher.failure) is PermissionDeniedError
            publisher.abort()
    assert topic.watermarks.next == 2


def test_streams_are_counted_by_caller(log, monkeypatch):
    monkeypatch.setattr(publish_module, "_IDLE_SECONDS", 3600.0)
    limits = FlightLimits(streams_per_caller_max=1)
    with (
        FlightServer(LogSource(log), access=Rights("produce"), limits=limits) as server,
        FlightClient(server.address) as client,
        publishing(client, TOPIC, SCHEMA, producer="a") as first,
    ):
        first.write(rows(0, 1))
        first.flush()
        error = publish(client, [range(1)], producer="b")[1]
        assert type(error) is CapacityError
        assert "max_flight_streams_per_principal is 1" in error.hint
