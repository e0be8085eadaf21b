"""Every reader of a topic, held to the same promises.

A reader gives the rows of a range in order. What it has given is right, also when an error follows;
the error says which offset, which file or object, which range. `Rig` makes topics that are in the
bucket alone, so that every reader, whatever else it could use, has to read objects.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow as pa
import pytest

from ister.base.model import COLUMNS, Codec
from ister.client.flight import FlightClient
from ister.config import load_config
from ister.errors import (
    CorruptDataError,
    DataGapError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.format.arrow.schema import HIDDEN
from ister.format.descriptor import encode_descriptor
from ister.format.frame import encode_frame, scan_frames
from ister.format.message import encode_message
from ister.spark import read_task
from ister.spark.owners import Owner
from ister.spark.planner import TopicRange, plan
from ister.spark.read_task import ReadTask, TopicIdentity
from ister.topic.history import BucketLog
from ister.wire.contract import RangeTicket
from tests.servers.flight import FlightTopics
from tests.support.machine import NoThreads
from tests.support.stores import NAME, Site, as_row, merged

TEXT = str(NAME)
COUNT = 60
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EVERY = (*COLUMNS, *HIDDEN)
SMALL = {
    "uploader": {"max_object_bytes": 4096, "index_every_messages": 3},
    "cloud_reader": {"fetch_chunk_size": 65_536, "read_ahead": False},
}
WHOLE = {**SMALL, "uploader": {"index_every_messages": 3}}
"""One object instead of several."""


# -- the readers --------------------------------------------------------------------------------


class Rig:
    """A topic that is in the bucket alone, and whatever its readers need."""

    def __init__(self, storage=None, *, count=COUNT):
        self.stack = ExitStack()
        self.site = self.stack.enter_context(Site())
        self.storage = storage or SMALL
        log = self.site.open("a", scheduler=NoThreads(), storage=self.storage)
        topic = log.topic(TEXT, create=True)
        for number in range(count):
            topic.append(
                b"%03d-" % number * 80,
                publish_time=1000 + 10 * number,
                producer_name="shop",
                routing_key="k" if number % 3 else None,
                attributes={"n": str(number)},
                schema_id=2**63 + number if number % 2 else None,
            )
        topic.flush()
        self.expected = [as_row(message) for message in topic.read()]
        log.seal(TEXT)
        log.close()
        # The next process, on a disk that has nothing of the topic.
        self.log = self.site.open("b", scheduler=NoThreads(), storage=self.storage)
        self.topic = self.log.topic(TEXT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.quiet()
        self.stack.close()

    def quiet(self):
        self.site.objects.before = self.site.metadata.before = lambda kind, key: None

    def history(self, *, ahead=False):
        reading = {**self.storage["cloud_reader"], "read_ahead": ahead}
        tree = {"storage": {**self.storage, "cloud_reader": reading, "wal": {"dir": "/nowhere"}}}
        return self.stack.enter_context(
            BucketLog(
                load_config(tree, {}),
                clock=self.site.clock,
                objects=self.site.objects,
                metadata=self.site.metadata,
            )
        )

    # -- what becomes of objects --

    def objects(self):
        return [described for described, _ in self.site.catalog().descriptors()]

    def frame(self, offset):
        """The key of the object that holds an offset; where its frame begins and ends there."""
        described = self.site.catalog().find(offset)
        key = self.site.key(offset)
        data = self.site.objects.read(key, 0, 1 << 40)
        scan = scan_frames(data, expected_offset=described.start)
        ends = [*scan.starts[1:], scan.end]
        number = offset - described.start
        return key, scan.starts[number], ends[number]

    def damage(self, *offsets):
        """Flips a bit of each frame; the last key."""
        for key, begin, _ in [self.frame(offset) for offset in offsets]:
            self.site.objects.corrupt(key, begin + 20)
        return key

    def describe(self, described):
        key = self.site.catalog().keys.descriptor(described.start)
        self.site.metadata.put(key, encode_descriptor(described))

    def rewrite(self, described, data):
        """Puts other bytes, with their size, in the place of an object."""
        self.site.objects.put(self.site.key(described.start), data)
        self.describe(replace(described, size_bytes=len(data)))


class Reader(NamedTuple):
    """How somebody reads: `rows(rig, start, end, columns)`."""

    name: str
    rows: Callable
    leaves_out: bool = True
    """Whether it goes on behind damage; Flight's clients are told to look elsewhere."""


def by_read(rig, start, end, columns):
    for message in rig.topic.read(start, end=end):
        row = as_row(message)
        yield {name: row[name] for name in columns}


def by_reader(rig, start, end, columns):
    with rig.topic.reader(start, end=end) as reader:
        while reader.next_offset < end:
            found = reader.next_batch(7, timeout=1)
            if not found:
                return
            for row in map(as_row, found):
                yield {name: row[name] for name in columns}


def by_arrow(rig, start, end, columns):
    for batch in rig.topic.read_arrow(start, end=end, columns=columns):
        batch.validate(full=True)
        yield from batch.to_pylist()


def by_history(rig, start, end, columns, ahead=False):
    topic = rig.history(ahead=ahead).topic(TEXT)
    for batch in topic.read_arrow(start, end=end, columns=columns):
        yield from batch.to_pylist()


def by_flight(rig, start, end, columns):
    incarnation = rig.topic.bucket.owned.record.incarnation
    ticket = RangeTicket(topic=TEXT, start=start, end=end, columns=columns, incarnation=incarnation)
    with FlightTopics(rig.log) as server, FlightClient(server.address) as client:
        for batch in client.read(ticket):
            yield from batch.to_pylist()


def by_spark(rig, start, end, columns):
    """As the tasks of a query do, one after the other."""
    history = rig.history()
    topic = history.topic(TEXT)
    incarnation = topic.record().incarnation
    asked = TopicRange(
        topic=TEXT,
        incarnation=incarnation,
        start=start,
        end=end,
        tiered=end,
        descriptors=topic.descriptors(start, end),
        tail_bytes=0,
    )
    place = SimpleNamespace(history=lambda: history, local_tail=lambda *_: None)
    task = ReadTask(place=place, columns=columns, fail_on_data_loss=True)
    for partition in plan([asked], split_bytes=3000):
        for batch in task.read(partition, {TEXT: TopicIdentity(incarnation, "nobody")}):
            yield from batch.to_pylist()


READERS = [
    Reader("read", by_read),
    Reader("reader", by_reader),
    Reader("read_arrow", by_arrow),
    Reader("history", by_history),
    Reader("history that reads ahead", partial(by_history, ahead=True)),
    Reader("flight", by_flight, leaves_out=False),
    Reader("spark", by_spark),
]


@pytest.fixture(params=READERS, ids=lambda reader: reader.name)
def rows(request):
    """Everything that a reader gives; what came before an error is in `found`."""

    def give(rig, start=0, end=COUNT, columns=EVERY, found=None):
        found = [] if found is None else found
        for row in request.param.rows(rig, start, end, columns):
            found.append(row)
        return found

    give.reader = request.param
    return give


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(read_task, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(read_task, "find_owner", lambda *_: Owner(None, []))


def failed(rows, rig, **asked):
    """What a reader gives before it fails, and how it does."""
    found = []
    with pytest.raises(IsterError) as caught:
        rows(rig, found=found, **asked)
    return found, caught.value


# -- ranges and columns -------------------------------------------------------------------------


def test_any_range_and_any_columns_are_read(rows):
    with Rig() as rig:
        assert len(rig.objects()) > 3
        assert rows(rig) == rig.expected
        for start, end in [(0, 1), (7, 20), (20, 20), (33, 34), (59, 60)]:
            assert rows(rig, start, end) == rig.expected[start:end]
        for columns in [("payload",), ("offset", "routing_key"), ("request_id", "schema_id")]:
            expected = [{name: row[name] for name in columns} for row in rig.expected[10:50]]
            assert rows(rig, 10, 50, columns) == expected


@pytest.mark.parametrize("codec", list(Codec))
def test_objects_of_danube_are_read(rows, codec):
    """Without a codec, an index, times or a checksum in their descriptors."""
    with Rig() as rig:
        for described in rig.objects():
            records = [m.record for m in rig.topic.read(described.start, end=described.end)]
            if codec is Codec.BINCODE1:
                records = [replace(r, routing_key=None, schema_id=None) for r in records]
            frames = [
                encode_frame(offset, encode_message(record, codec))
                for offset, record in enumerate(records, described.start)
            ]
            bare = replace(described, codec=None, offset_index=(), publish_time_index=())
            rig.rewrite(
                replace(bare, checksum=None, publish_time_min=None, publish_time_max=None),
                b"".join(frames),
            )
        expected = rig.expected
        if codec is Codec.BINCODE1:
            expected = [{**row, "routing_key": None, "schema_id": None} for row in expected]
        assert rows(rig) == expected
        assert rows(rig, 41, 43) == expected[41:43]


@pytest.mark.parametrize(
    ("by", "shift"), [(0, -40), (0, -1), (0, 1), (0, 13), (0, 1 << 40), (1, 0)]
)
def test_index_is_only_a_hint(rows, by, shift):
    with Rig() as rig:
        for described in rig.objects():
            index = tuple(
                (offset + by, max(0, at + shift)) for offset, at in described.offset_index
            )
            rig.describe(replace(described, offset_index=index))
        assert rows(rig) == rig.expected
        for start, end in [(7, 20), (33, 34), (59, 60)]:
            assert rows(rig, start, end) == rig.expected[start:end]


@pytest.mark.parametrize(
    ("kind", "removed"),
    [
        ("dnb1", []),
        *(("parquet", gone) for gone in ([], range(20, 23), range(10, 40, 2), range(5, 60))),
    ],
    ids=str,
)
def test_merged_objects_are_read_with_the_holes_that_compaction_has_left(rows, kind, removed):
    """Of some objects one is made, in either format; messages may be missing from an archive."""
    with Rig() as rig:
        objects = rig.objects()[1:-1]
        gone = {n for n in removed if objects[0].start <= n < objects[-1].end}

        def survives(batch):
            return pa.array([offset not in gone for offset in batch["offset"].to_pylist()])

        made = merged(
            rig.site.objects,
            objects,
            format=kind,
            survives=survives if gone else None,
            row_group_bytes=2000,
        )
        for described in objects:
            rig.site.metadata.delete(rig.site.catalog().keys.descriptor(described.start))
        rig.describe(made)
        left = [row for row in rig.expected if row["offset"] not in gone]
        assert rows(rig) == left
        for start, end in [(0, 1), (7, 20), (20, 23), (21, 22), (33, 34), (12, 59)]:
            assert rows(rig, start, end) == [row for row in left if start <= row["offset"] < end]


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 29, 59])
def test_rows_before_damage_come_and_those_behind_it_can_be_had(rows, offset):
    with Rig() as rig:
        key = rig.damage(offset)
        found, error = failed(rows, rig)
        assert found == rig.expected[:offset]
        assert isinstance(error, CorruptDataError)
        assert (error.offset, error.path) == (offset, key)
        assert rows(rig, offset + 1) == rig.expected[offset + 1 :]
        assert rows(rig, 0, offset) == rig.expected[:offset]


@pytest.mark.parametrize("bad", [[0], [59], [10, 11, 12], [5, 30, 58], [*range(60)]], ids=len)
def test_damage_is_left_out_where_that_is_wanted(rows, bad):
    skips = {**SMALL, "cloud_reader": {**SMALL["cloud_reader"], "on_damage": "skip"}}
    with Rig(skips) as rig:
        rig.damage(*bad)
        if rows.reader.leaves_out:
            assert rows(rig) == [row for row in rig.expected if row["offset"] not in bad]
        else:
            found, error = failed(rows, rig)
            assert found == rig.expected[: bad[0]]
            assert (type(error), error.offset) == (UnavailableError, bad[0])


def test_frame_that_is_whole_and_no_message_is_damage(rows):
    with Rig(WHOLE) as rig:
        key, begin, end = rig.frame(20)
        data = rig.site.objects.read(key, 0, 1 << 40)
        (described,) = rig.objects()
        rig.rewrite(described, data[:begin] + encode_frame(20, b"\xff" * 30) + data[end:])
        found, error = failed(rows, rig)
        assert found == rig.expected[:20]
        assert type(error) is CorruptDataError


def test_object_that_is_cut_short_is_damage_where_it_ends(rows):
    with Rig(WHOLE) as rig:
        key, begin, _ = rig.frame(30)
        rig.site.objects.put(key, rig.site.objects.read(key, 0, begin + 5))
        found, error = failed(rows, rig)
        assert found == rig.expected[:30]
        assert (type(error), error.offset) == (CorruptDataError, 30)


# -- objects that are not there -----------------------------------------------------------------


def test_lost_object_is_an_error_that_names_it(rows):
    with Rig() as rig:
        key, start = rig.site.key(30), rig.site.catalog().find(30).start
        data = rig.site.objects.read(key, 0, 1 << 40)
        rig.site.objects.drop(key)
        found, error = failed(rows, rig)
        assert found == rig.expected[:start]
        assert isinstance(error, NotFoundError | DataGapError)
        assert error.path == key
        rig.site.objects.put(key, data)
        assert rows(rig) == rig.expected


def test_hole_between_objects_is_an_error_with_its_range(rows):
    with Rig() as rig:
        start, end = rig.site.ranges()[2]
        rig.site.metadata.delete(rig.site.catalog().keys.descriptor(start))
        found, error = failed(rows, rig)
        # Or none of them, where the whole range is looked up before it is read.
        assert found in ([], rig.expected[:start])
        assert isinstance(error, DataGapError)
        assert (error.start, error.end) == (start, end)


def test_silent_bucket_is_an_error_that_passes(rows):
    with Rig() as rig:

        def silent(kind, key):
            raise UnavailableError("silent")

        rig.site.objects.before = silent
        found, error = failed(rows, rig)
        assert (found, type(error)) == ([], UnavailableError)
        rig.quiet()
        assert rows(rig) == rig.expected


def under_a_read(rig, rows, act):
    """Reads; `act` is called when a second object is about to be read."""
    found = []
    keys = set()

    def before(kind, key):
        if kind == "read" and key.startswith("storage/topics/"):
            keys.add(key)
            if len(keys) == 2:
                rig.quiet()
                act()

    rig.site.objects.before = before
    rows(rig, found=found)
    return found


def test_object_that_is_replaced_under_a_read_is_read_from_its_new_place(rows):
    with Rig() as rig:

        def replace_all():
            for described in rig.objects():
                old = rig.site.key(described.start)
                data = rig.site.objects.read(old, 0, 1 << 40)
                rig.describe(
                    replace(described, object_id=described.object_id.replace(".dnb1", "-9.dnb1"))
                )
                rig.site.objects.put(rig.site.key(described.start), data)
                rig.site.objects.drop(old)

        assert under_a_read(rig, rows, replace_all) == rig.expected


def test_object_that_expires_under_a_read_is_an_error(rows):
    with Rig() as rig:
        gone = rig.objects()[:-1]

        def expire():
            keys = [rig.site.key(described.start) for described in gone]
            rig.topic.bucket.owned.expire(gone)
            for key in keys:
                with suppress(NotFoundError):
                    rig.site.objects.drop(key)

        with pytest.raises((DataGapError, NotFoundError, OffsetOutOfRangeError)):
            under_a_read(rig, rows, expire)
        assert rows(rig, gone[-1].end) == rig.expected[gone[-1].end :]
