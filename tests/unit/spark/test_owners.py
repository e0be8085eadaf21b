"""Which broker is asked about a topic: entries in the metadata store, and given addresses."""

import json
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

import ister
from ister.base.clock import SystemClock
from ister.base.model import COLUMNS
from ister.bucket.catalog import Catalog
from ister.bucket.members import member_key
from ister.cli.main import main
from ister.client.flight import FlightClient, parse_brokers
from ister.errors import (
    ClosedError,
    ConflictError,
    IsterError,
    NotFoundError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.metadata.sqlite import SqliteMetadata
from ister.spark import IsterDataSource, location, owners, read_task
from ister.spark.batch import BatchReader
from ister.spark.compat import ReadAllAvailable
from ister.spark.jobs.job import find_job_place
from ister.spark.jobs.tier_job import tier
from ister.spark.location import find_place
from ister.spark.offset_resolver import OffsetResolver
from ister.spark.options import ReadOptions
from ister.spark.owners import Owner, ask, ask_any, find_owner, has_brokers, read_watermarks
from ister.spark.rows import row_schema
from ister.topic import local_tail
from tests.servers.flight import FlightServer, FlightTopics, LogSource
from tests.servers.ports import free_port
from tests.support.cluster import enter
from tests.support.machine import Task
from tests.support.spark_here import SparkHere
from tests.support.streams import A, B, Home, Query, a_reader, offsets_of, publish, rows_of

HERE = SparkHere()


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """Nothing that is remembered of brokers, or connected to, outlives a test."""
    monkeypatch.setattr(owners, "_silent", {})
    monkeypatch.setattr(owners, "_brokers_seen", set())
    monkeypatch.setattr(owners, "_MEMBERS_SECONDS", 0.0)
    monkeypatch.setattr(read_task, "_PAUSE_SECONDS", 0.01)
    yield
    location._close_all()


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture
def place(home):
    """The log, as a machine sees it that has no files."""
    home.append(B, 1, upload=True)
    return find_place(home.remote_config())


def leave(log):
    """Its entry ends."""
    log.stores.metadata.delete(member_key("/danube", log.stores.membership.node))


@contextmanager
def broker(home, *, port=0):
    """A log that is served, with an entry."""
    with home.open() as log, FlightTopics(log, port=port) as server:
        enter(log, server.address)
        yield log, server


def head_of(place, topic, **options):
    parsed = ReadOptions.parse({"topic": topic, "config": "-", **options}, is_streaming=False)
    return OffsetResolver(place, parsed).heads()[topic]


# -- addresses --------------------------------------------------------------------------------


def test_the_owners_entry_has_its_address(home, place):
    with broker(home) as (log, server):
        log.topic(A, create=True)
        node = log.stores.membership.node
        assert find_owner(place, A) == Owner(node, (f"grpc://{server.address}",))
        assert ask(place, A, lambda client: client.watermarks([A])[A].topic) == A


def test_each_topic_has_its_own_broker(home, place):
    with ExitStack() as stack:
        log, first = stack.enter_context(broker(home))
        other = stack.enter_context(home.second_node().open())
        second = stack.enter_context(FlightTopics(other))
        enter(other, second.address)
        publish(log.topic(A, create=True), 3)
        publish(other.topic("/default/c", create=True), 4)
        assert find_owner(place, A).addresses == (f"grpc://{first.address}",)
        assert find_owner(place, "/default/c").addresses == (f"grpc://{second.address}",)
        found, errors = read_watermarks(place, [A, "/default/c"])
        assert {name: status.synced for name, status in found.items()} == {A: 3, "/default/c": 4}
        assert not errors
        assert (first.calls["watermarks"], second.calls["watermarks"]) == (1, 1)


def test_given_addresses_come_after_the_owners(home):
    home.append(B, 1, upload=True)
    given = ("grpc://x:1", "grpc://y:1")
    place = find_place(home.remote_config(), given)
    with ExitStack() as stack:
        log, server = stack.enter_context(broker(home))
        log.topic(A, create=True)
        own = f"grpc://{server.address}"
        # The only broker that there is must be the one that is given.
        assert find_owner(place, A).addresses == (*given, own)
        other = stack.enter_context(home.second_node().open())
        enter(other, "z:1")
        assert find_owner(place, A).addresses == (own, *given)
        owners._silent[own] = float("inf")
        assert find_owner(place, A).addresses == (*given, own)


def test_address_that_does_not_answer_is_tried_last_for_a_while(home):
    dead = f"grpc://127.0.0.1:{free_port()}"
    with home.open() as log, FlightTopics(log) as server:
        log.topic(A, create=True)
        place = find_place(home.remote_config(), (dead, f"grpc://{server.address}"))
        assert ask(place, A, FlightClient.topics) == [A]
        assert find_owner(place, A).addresses == (f"grpc://{server.address}", dead)


def test_broker_that_does_not_have_the_topic_is_passed_over(home):
    with ExitStack() as stack:
        log = stack.enter_context(home.open())
        right = stack.enter_context(FlightTopics(log))
        log.topic(A, create=True)
        (home.path / "stranger").mkdir()
        stranger = Home(home.path / "stranger")
        wrong = stack.enter_context(FlightTopics(stack.enter_context(stranger.open())))
        brokers = parse_brokers(f"{wrong.address},{right.address}")
        place = find_place(home.remote_config(), brokers)
        assert ask(place, A, lambda client: list(client.watermarks([A]))) == [A]
        with pytest.raises(NotFoundError):
            ask(find_place(home.remote_config(), brokers[:1]), A, lambda c: c.watermarks([A]))


def test_settings_come_from_any_broker_that_answers(home):
    dead = f"grpc://127.0.0.1:{free_port()}"
    with home.open() as log, FlightTopics(log) as server:
        place = find_place(None, (dead, f"grpc://{server.address}"))
    assert place.config.storage.metadata.path == log.config.storage.metadata.path


def test_owner_without_an_entry_is_asked_only_at_given_addresses(home, place):
    with home.open() as log, FlightTopics(log) as server:
        log.topic(A, create=True)
        assert find_owner(place, A).addresses == ()
        with pytest.raises(UnavailableError, match="not a broker"):
            ask(place, A, FlightClient.topics)
        given = find_place(home.remote_config(), (f"grpc://{server.address}",))
        assert ask(given, A, FlightClient.topics) == [A, B]


def test_broker_that_has_lost_its_entry_is_waited_for(home, place):
    """It is ending, or its lease has ended: no reason to call it something else for good."""
    with broker(home) as (log, _):
        log.topic(A, create=True)
        assert find_owner(place, A).addresses
        leave(log)
        with pytest.raises(UnavailableError, match="has lost its lease"):
            find_owner(place, A)


def test_broker_that_starts_is_waited_for(home, place):
    """It has its node for a while before it has an entry; a query ended in that moment."""
    home.append(A, 3)
    with home.open() as log, FlightTopics(log) as server:
        for look in (find_owner, head_of):
            with pytest.raises(UnavailableError, match="has not opened the topic"):
                look(place, A)
        given = find_place(home.remote_config(), (f"grpc://{server.address}",))
        assert head_of(given, A).end == 3
        enter(log, server.address)
        assert head_of(place, A).end == 3


def test_whether_there_are_brokers(home, place, tmp_path):
    assert not has_brokers(place)
    with pytest.raises(UnavailableError, match="no broker is known"):
        ask_any(place, FlightClient.topics)
    with broker(home):
        assert has_brokers(place)
        assert ask_any(place, FlightClient.topics) == [B]
    (tmp_path / "new").mkdir()
    new = Home(tmp_path / "new")
    assert not has_brokers(find_place(new.config))
    assert has_brokers(find_place(new.config, ("grpc://h:1",)))
    assert find_owner(find_place(new.config, ("grpc://h:1",)), A).addresses == ("grpc://h:1",)


def test_jobs_take_brokers_as_a_list_and_from_the_settings(home):
    home.append(A, 1)
    config = ister.load_config(home.config)
    assert find_job_place(config, None).brokers == ()
    assert find_job_place(config, "a:1, b:2").brokers == ("grpc://a:1", "grpc://b:2")
    place = find_place(home.config, ("grpc://a:1",))
    assert find_job_place(place, None).brokers == ("grpc://a:1",)
    assert find_job_place(place, "b:2").brokers == ("grpc://b:2",)
    tree = {"storage": {"wal": {"dir": str(home.path / "wal")}}, "pipeline": {"broker": "c:3,d:4"}}
    assert find_job_place(tree, None).brokers == ("grpc://c:3", "grpc://d:4")
    for wrong in ("a", "a:1,", "http://a:1"):
        with pytest.raises(IsterError, match="invalid Flight address"):
            find_job_place(config, wrong)


# -- topics that need no broker ---------------------------------------------------------------


def test_topic_of_a_node_that_is_down_waits_for_its_disk(home, place):
    with home.open() as log:
        topic = log.topic(A, create=True)
        publish(topic, 6)
        topic.upload()
        publish(topic, 3)
        node = log.stores.membership.node
    owner = find_owner(place, A)
    assert (owner.node, owner.addresses) == (node, ())
    assert (owner.waits.node, owner.waits.offset) == (node, 6)
    with pytest.raises(UnavailableError, match=f"node {node} is not running"):
        ask(place, A, FlightClient.topics)
    head = head_of(place, A)
    assert (head.end, head.is_cut) == (6, True)
    assert f"node {node}" in head.cut_error.message
    assert head_of(place, A, includeTail="false").cut_error is None
    with broker(home) as (_, server):
        # It is up, and has not opened the topic yet.
        assert find_owner(place, A) == Owner(node, (f"grpc://{server.address}",))
        assert head_of(place, A).end == 9


@pytest.mark.parametrize("how", ["sealed", "recovered", "tiered", "marked"])
def test_topic_that_is_wholly_in_the_bucket_needs_nobody(home, caplog, how):
    """After `ister recover`, a read said that messages are on another machine."""
    with home.open() as log:
        topic = log.topic(A, create=True, ack="tiered" if how == "tiered" else None)
        publish(topic, 6)
        topic.upload()
        if how == "sealed":
            log.seal(A)
        elif how == "marked":
            topic.bucket.owned.set_acked_end(6)
    if how == "recovered":
        (home.path / "metadata.db").unlink()
        assert main(["recover", "--config", home.config]) == 0
    place = find_place(home.remote_config())
    head = head_of(place, A)
    assert (head.end, head.is_cut, head.broker) == (6, False, None)
    assert find_owner(place, A).waits is None
    assert not [r for r in caplog.records if "is not running" in r.getMessage()]
    report = tier(HERE, home.remote_config())
    assert report.ok, report.errors
    assert report.topics[A]["skipped"] == "everything is in the bucket"


def test_marked_topic_is_not_asked_for_while_its_broker_runs(home, place):
    with broker(home) as (log, server):
        topic = log.topic(A, create=True)
        publish(topic, 6)
        topic.upload()
        topic.bucket.owned.set_acked_end(6)
        assert head_of(place, A).end == 6
        assert tier(HERE, home.remote_config(), topics=A).ok
        assert server.calls["watermarks"] == 0


def test_topic_handed_over_while_it_is_looked_at_is_seen_whole(home, place, monkeypatch):
    """The seal was read after the objects: what was uploaded in between was missing."""
    with broker(home) as (log, _):
        topic = log.topic(A, create=True)
        publish(topic, 6)
        topic.upload()
        publish(topic, 3)
        is_sealed = Catalog.sealed

        def hand_over(catalog):
            monkeypatch.setattr(Catalog, "sealed", is_sealed)
            log.seal(A)
            return is_sealed(catalog)

        monkeypatch.setattr(Catalog, "sealed", hand_over)
        assert head_of(place, A).end == 9


# -- messages that cannot be read now ---------------------------------------------------------


def batch(home, **options):
    """The offsets that a batch read on a machine without files yields."""
    config = options.pop("config", None) or home.remote_config()
    given = {"topic": A, "columns": "offset", "config": config, **options}
    parsed = ReadOptions.parse(given, is_streaming=False)
    reader = BatchReader(parsed, row_schema(parsed.columns))
    return read(reader, reader.partitions())


@pytest.fixture
def stopped(home):
    """A topic of nine messages; the last three are on the disk of a node that has stopped."""
    with home.open() as log:
        topic = log.topic(A, create=True)
        publish(topic, 6)
        topic.upload()
        publish(topic, 3)
        return log.stores.membership.node


def test_batch_that_would_leave_out_acknowledged_messages_fails(home, stopped):
    """It gave 6 of 9 messages, succeeded, and a warning was on the driver's stderr."""
    for options in ({}, {"startingOffsets": f'{{"{A}": 8}}'}, {"endingOffsets": f'{{"{A}": 9}}'}):
        with pytest.raises(WaitsForDiskError) as caught:
            batch(home, **options)
        assert (caught.value.topic, caught.value.offset, caught.value.node) == (A, 6, stopped)
        for text in (f"node {stopped} is not running", "from offset 6 on"):
            assert text in caught.value.message
        assert "includeUnreachableTail=false" in caught.value.hint
    with pytest.raises(WaitsForDiskError):
        batch(home, endingTimestamp="32503680000000")
    # Nothing is left out of these.
    assert batch(home, endingOffsets=f'{{"{A}": 6}}') == list(range(6))
    assert batch(home, endingTimestamp="1") == []
    assert batch(home, includeTail="false") == list(range(6))
    assert batch(home, includeUnreachableTail="false") == list(range(6))
    with broker(home):
        assert batch(home) == list(range(9))


def test_unreachable_messages_are_in_the_comments_of_columns(home, stopped):
    options = {"topic": A, "config": home.remote_config(), "includeUnreachableTail": "false"}
    schema = IsterDataSource(options).schema()
    said = {"ister.unreachable": {A: {"node": stopped, "offset": 6}}}
    assert [json.loads(field.metadata["comment"]) for field in schema] == [said] * len(COLUMNS)
    reader = IsterDataSource(options).reader(schema)
    assert read(reader, reader.partitions()) == list(range(6))
    with broker(home):
        found = IsterDataSource(options).schema()
        assert json.loads(found[0].metadata["comment"]) == {"ister.unreachable": {}}
    # What the DataFrame says would not be true.
    late = IsterDataSource(options).reader(found)
    with pytest.raises(WaitsForDiskError) as caught:
        late.partitions()
    assert "load() again" in caught.value.hint


def test_stream_waits_for_messages_that_cannot_be_read(home, stopped):
    query = Query(partial(a_reader, home), config=home.remote_config(), startingOffsets="earliest")
    assert offsets_of(query.run()) == list(range(6))
    assert not query.plan()
    with pytest.raises(WaitsForDiskError, match=f"node {stopped} is not running") as caught:
        query.available_now()
    assert "includeUnreachableTail=false" in caught.value.hint
    query.restart(includeUnreachableTail="false")
    assert query.available_now() == []
    query.restart(includeUnreachableTail=None)
    with broker(home):
        assert offsets_of(query.run()) == [6, 7, 8]


def test_files_of_a_killed_owner_are_not_read_without_their_end(home, monkeypatch):
    """What it synced after its last checkpoint is invisible until the topic is opened again."""
    monkeypatch.setattr(local_tail, "_CATCH_UP_SECONDS", 0.1)
    monkeypatch.setattr("ister.spark.batch.retry_unavailable", lambda ask: ask())
    checkpoint = home.path / "wal" / "default" / "a" / "wal.ckpt"
    with home.open() as log:
        topic = log.topic(A, create=True)
        publish(topic, 6)
        topic.upload()
        publish(topic, 1)
        older = checkpoint.read_bytes()
        owner = log.stores.metadata.get(topic.bucket.owned.catalog.keys.owner)
        publish(topic, 2)
    checkpoint.write_bytes(older)
    with pytest.raises(WaitsForDiskError, match="from offset 7 on") as caught:
        batch(home, config=home.config)
    assert (caught.value.topic, caught.value.offset) == (A, 7)
    options = {"config": home.config, "includeUnreachableTail": "false"}
    assert batch(home, **options) == list(range(7))
    store = SqliteMetadata(str(home.path / "metadata.db"), clock=SystemClock())
    store.put(owner.key, owner.value)
    store.close()
    # Its lease has not ended: it may only be slow.
    with pytest.raises(UnavailableError, match="not recorded as durable"):
        batch(home, **options)
    checkpoint.write_bytes(older)
    home.append(A, 1)
    assert batch(home, config=home.config) == list(range(10))


# -- topics that move -------------------------------------------------------------------------


def plan(home):
    """What a driver plans now, for tasks that run later."""
    reader = a_reader(home, config=home.remote_config(), startingOffsets="earliest")
    start = reader.initialOffset()
    return reader, reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))


def read(reader, partitions):
    """The offsets that tasks read."""
    return [
        offset
        for part in partitions
        for batch in reader.read(part)
        for offset in batch.column("offset").to_pylist()
    ]


def test_task_waits_for_a_broker_that_comes_back(home):
    home.append(A, 6)
    with broker(home) as (log, _):
        log.topic(A)
        planned = plan(home)
    # Its lease has ended, and nobody else has the messages.
    reading = Task(read, *planned)
    reading.join(0.3)
    assert reading.is_running
    with broker(home):
        assert reading.result() == list(range(6))


def test_task_gives_up_on_a_broker_that_does_not_come_back(home, monkeypatch):
    monkeypatch.setattr(read_task, "_OWNER_SECONDS", 0.2)
    home.append(A, 6)
    with broker(home) as (log, _):
        log.topic(A)
        planned = plan(home)
    with pytest.raises(UnavailableError, match="is not running"):
        read(*planned)


def remote_query(home, **options):
    """A stream on a machine without files."""
    make = partial(a_reader, home, config=home.remote_config(), startingOffsets="earliest")
    return Query(make, **options)


def test_stream_goes_on_while_its_topic_moves_to_and_fro(home):
    """Between the plan of a batch and its tasks, and between two batches."""
    with ExitStack() as stack:
        other = stack.enter_context(home.second_node().open())
        log = stack.enter_context(home.open())
        for one in (log, other):
            server = stack.enter_context(FlightTopics(one))
            enter(one, server.address)
        publish(log.topic(A, create=True), 6)
        query, end = remote_query(home), 6
        for holder, next_one in ((log, other), (other, log), (log, other)):
            assert query.plan()
            holder.seal(A)
            publish(next_one.topic(A), 4)
            query.finish(query.collect())
            assert offsets_of(query.rows) == list(range(end)), "as it was planned"
            end += 4
        query.run()
        assert query.rows == rows_of(A, range(end))


@pytest.mark.parametrize("has_read", [False, True])
def test_stream_whose_topic_is_taken_over_says_what_it_has_passed(home, has_read):
    """Goal: messages of the new owner are never taken for the lost ones without a word."""
    with broker(home) as (log, _):
        topic = log.topic(A, create=True)
        publish(topic, 6)
        topic.upload()
        publish(topic, 3)
        query = remote_query(home)
        assert query.plan()
        if has_read:
            query.finish(query.collect())
    with ExitStack() as stack:
        other = stack.enter_context(home.second_node().open())
        server = stack.enter_context(FlightTopics(other))
        enter(other, server.address)
        topic = other.topic(A, take_over=True)
        topic.append_many([b"new"] * 5)
        topic.flush()
        with pytest.raises(ConflictError, match=r"went on from 6|lost messages"):
            query.run()
        query.restart(failOnDataLoss="false")
        found = [row for _ in range(3) for row in query.run()]
    assert [row.payload for row in found if row.payload == b"new"] == [b"new"] * 5
    assert [row.offset for row in found if row.payload == b"new"] == list(range(6, 11))
    lost = [row for row in query.rows if row.payload != b"new"]
    assert lost == rows_of(A, range(9 if has_read else 6))


def test_one_broker_that_is_silent_is_asked_once_for_all_its_topics(home, place, monkeypatch):
    names = [f"/default/t{number}" for number in range(5)]
    with broker(home) as (log, server):
        for name in names:
            log.topic(name, create=True)
        calls = []
        asked = FlightClient.watermarks

        def watermarks(client, topics, **more):
            calls.append(list(topics))
            return asked(client, topics, **more)

        monkeypatch.setattr(FlightClient, "watermarks", watermarks)
        server.close()
        found, errors = read_watermarks(place, names)
        assert (found, set(errors)) == ({}, set(names))
        assert len(calls) == 1
        report = tier(HERE, home.remote_config(), topics="/default/t*")
    assert not report.ok
    assert sorted(error["topic"] for error in report.errors) == names
    assert {error["code"] for error in report.errors} == {"UNAVAILABLE"}


def test_topic_that_is_closed_at_its_broker_can_be_asked_for_again(home):
    """It is being handed over: `ClosedError` would mean that the client is closed."""

    class Closing(LogSource):
        def open(self, name, **_):
            raise ClosedError("the topic is closed", topic=name)

    with home.open() as log:
        server = FlightServer(Closing(log))
        try:
            with (
                FlightClient(server.address) as client,
                pytest.raises(UnavailableError, match="the topic is closed"),
            ):
                client.watermarks([A])
        finally:
            server.close()
