"""Batches that count once: whatever crashes, whoever asks again, with whichever files."""

import itertools
import json
import random
import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa
import pytest

from ister.base import failpoints
from ister.base.model import Layout
from ister.bucket.merge import merge_objects
from ister.bucket.names import TopicKeys, staging_prefix
from ister.bucket.writer_files import find_open_batch, read_files
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedVersionError,
)
from ister.format.manifest import StagedFile, encode_manifest
from ister.format.records import decode_writer, encode_writer
from ister.format.staged_rows import (
    BLOCK_HEADER_SIZE,
    STAGED_SCHEMA,
    decode_block,
    encode_block,
    parse_block_size,
)
from ister.topic import batches
from ister.topic.batches import StagedBatch, check_writer_name
from ister.topic.history import BucketLog
from tests.support.cases import case
from tests.support.machine import NoThreads, Task, payloads
from tests.support.memory_fs import SimulatedCrash
from tests.support.scale import first_seed, scaled
from tests.support.stores import NAME, PREFIX, TTL_SECONDS, Site

TEXT = str(NAME)
WRITER = "query-1"
KEYS = TopicKeys(PREFIX, NAME)
KEY = KEYS.writer(WRITER)
DAY_SECONDS = 86_400
POINTS = (
    "batch.after_manifest",
    "batch.after_begin",
    "batch.after_rows",
    "batch.before_done",
    "batch.after_done",
)

ROUNDS = scaled(60, 5_000)
KEEPS_NOTHING = {
    "rotate_max_bytes": 4096,
    "cache_capacity": 1,
    "retention": {"time_minutes": 0, "size_mb": 0},
}
EXPIRING = {
    **KEEPS_NOTHING,
    "storage": {
        "cloud": {"retention": {"time_minutes": 1}},
        "uploader": {"max_object_bytes": 4096},
    },
}
_MERGE = SimpleNamespace(
    chunk_bytes=1 << 16, concurrent_parts=2, index_every_messages=10, layout=Layout.OBJECTS
)


class Desk(Site):
    """A site at which rows are staged, and batches are asked for by one process after another."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self._numbers = itertools.count()
        self.compacted = {}
        """Offset and payload of what compaction has removed."""

    # -- processes --

    def process(self, disk="a", *, take_over=False, ack=None, codec=None, storage=None, **wal):
        """A process without threads that has the topic open."""
        storage = {"cloud_reader": {"read_ahead": False}, **(storage or {})}
        log = self.open(disk, scheduler=NoThreads(), storage=storage, **wal)
        log.topic(TEXT, create=True, take_over=take_over, ack=ack, codec=codec)
        return log

    def cut_power(self, log, seed=0):
        """Ends a process and its machine: what was not synced may be gone."""
        ((disk, _),) = [item for item in self._logs if item[1] is log]
        self.kill(log)
        self.disks[disk].crash(random.Random(seed))

    def lose_disk(self, log):
        """Ends a process for good; nobody opens its disk again, and its lease ends."""
        self.kill(log)
        self.clock.advance(TTL_SECONDS + 1)

    # -- rows --

    def stage_file(self, blocks, *, writer=WRITER, batch=0):
        """A staged file with these blocks of payloads."""
        key = f"{staging_prefix(NAME, writer, batch)}part-{next(self._numbers)}.arrow"
        data = b"".join(map(a_block, blocks))
        self.objects.put(key, data)
        return StagedFile(key=key, rows=sum(map(len, blocks)), size_bytes=len(data))

    def stage(self, files, *, writer=WRITER, batch=0, **fields):
        """A batch of files, which are blocks of payloads each."""
        staged = tuple(self.stage_file(blocks, writer=writer, batch=batch) for blocks in files)
        return StagedBatch(writer=writer, batch=batch, files=staged, **fields)

    def stage_rows(self, rows, *, batch=0, writer=WRITER, blocks=2, **fields):
        """Rows in two files of some blocks."""
        half = (len(rows) + 1) // 2
        files = [cut(part, blocks) for part in (rows[:half], rows[half:])]
        return self.stage(files, batch=batch, writer=writer, **fields)

    def staged_keys(self):
        """What is staged in the bucket."""
        return [key for key in self.bucket_keys() if key.startswith("staging/")]

    def writer_record(self, writer=WRITER):
        """What the metadata store remembers of a writer."""
        found = self.metadata.get(KEYS.writer(writer))
        return None if found is None else decode_writer(found.value, key=found.key)

    def put_record(self, **changes):
        """Changes what is remembered of the writer."""
        self.metadata.put(KEY, encode_writer(replace(self.writer_record(), **changes)))

    def put_manifest_apart(self):
        """Makes the manifest of the begun batch an object, as it is if it is long."""
        record = self.writer_record()
        if record.files is not None:
            self.objects.put(record.manifest, encode_manifest(record.files))
            self.put_record(files=None)
        return record.manifest

    def compact(self, log, *, heeds_batches=True):
        """What `compact --keep latest-per-key` does to the bucket; the number of removed rows."""
        owned = log.topic(TEXT).bucket.owned
        found = list(owned.catalog.descriptors())
        waits = find_open_batch(owned.catalog, owned.record.incarnation)
        before = waits.counted_from if waits is not None and heeds_batches else owned.tiered
        history = BucketLog(log.config, objects=self.objects, metadata=self.metadata)
        columns = ("offset", "routing_key", "payload")
        table = history.topic(TEXT).read_arrow(columns=columns).read_all()
        rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
        latest = set({key: offset for offset, key, _ in rows if key is not None}.values())
        stay = latest | {offset for offset, key, _ in rows if key is None}
        removed = 0
        for described, revision in found:
            there = {at: said for at, _, said in rows if described.start <= at < described.end}
            gone = there.keys() - stay
            if described.end > before or not gone:
                continue
            made = merge_objects(
                NAME,
                [described],
                store=self.objects,
                settings=_MERGE,
                format="parquet",
                epoch=owned.epoch,
                incarnation=owned.record.incarnation,
                tag=secrets.token_hex(4),
                created_at=described.created_at,
                survives=lambda batch: pa.array([o in stay for o in batch["offset"].to_pylist()]),
            )
            now = self.clock.now_ns() // 1_000_000_000
            assert owned.swap([(described, revision)], made, until=now)
            removed += len(gone)
            self.compacted |= {at: there[at] for at in gone}
        return removed

    def rows_of_batch(self, record):
        """The payloads of the files of a begun batch, in their order."""
        found = []
        for file in read_files(self.objects, record):
            data, position = self.objects.read(file.key, 0, 1 << 30), 0
            while position < len(data):
                header = data[position : position + BLOCK_HEADER_SIZE]
                position += BLOCK_HEADER_SIZE
                size = parse_block_size(header)
                block = decode_block(
                    header, data[position : position + size], key=file.key, topic=""
                )
                found += block["payload"].to_pylist()
                position += size
        return found


def a_block(rows):
    """Payloads, or whole rows, as a block."""
    fields = [row if isinstance(row, dict) else {"payload": row} for row in rows]
    batch = pa.RecordBatch.from_pylist(
        [{"producer_name": "spark", **row} for row in fields], schema=STAGED_SCHEMA
    )
    header, body = encode_block(batch, "")
    return header + body.to_pybytes()


def cut(rows, count):
    """Rows in so many parts, or fewer."""
    size = max(1, -(-len(rows) // count))
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def rows_of(batch=0, count=8, *, writer=WRITER):
    return [f"{writer}/{batch}/{number}".encode() for number in range(count)]


def shuffled(rows, seed=1):
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows


@pytest.fixture
def desk():
    with Desk() as desk:
        yield desk


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Appends each block of a batch by itself, so that a crash can come between few rows."""
    monkeypatch.setattr(batches, "_JOINED_BYTES_MIN", 0)


def ask(log, staged):
    """Asks for a batch; what is said about it has to be true."""
    answer = log.append_staged(TEXT, staged)
    assert log.topic(TEXT).watermarks.synced >= answer.end >= answer.start
    return answer


def contents(log, start="earliest"):
    return payloads(log.topic(TEXT).read(start))


def marks(log):
    """(payload, producer_id, request_id) of everything."""
    table = log.topic(TEXT).read_arrow(columns=("payload", "producer_id", "request_id")).read_all()
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def crash_at(point, visit=1, *, error=SimulatedCrash, before=lambda: None):
    """Arms a point: `before` runs at every visit, and the chosen one ends the process."""
    visits = itertools.count(1)

    def act():
        before()
        if next(visits) == visit:
            raise error

    failpoints.arm(point, act)


def ask_and_crash(log, staged, point, visit=1, **options):
    crash_at(point, visit, **options)
    with pytest.raises(options.get("error", SimulatedCrash)):
        log.append_staged(TEXT, staged)
    failpoints.disarm()


def appends_foreign(log, *, prefix=b"foreign", flush=False):
    """Something for `crash_at`: another producer."""
    numbers = itertools.count()

    def act():
        topic = log.topic(TEXT)
        topic.append(b"%s-%d" % (prefix, next(numbers)))
        if flush:
            topic.flush()

    return act


def without_foreign(found):
    return [payload for payload in found if not payload.startswith(b"foreign")]


# -- asking once, and again ---------------------------------------------------------------------


def test_rows_become_messages_with_their_batch_and_their_number(desk):
    log = desk.process()
    log.topic(TEXT).append_many([b"foreign x", b"foreign y"])
    answer = ask(log, desk.stage_rows(rows_of()))
    assert (answer.start, answer.end, answer.rows, answer.is_known) == (2, 10, 8, False)
    assert {message.producer_name for message in log.topic(TEXT).read(2)} == {"spark"}
    crash_at("batch.after_rows", 99, before=appends_foreign(log))
    ask(log, desk.stage_rows(rows_of(1), batch=1))
    found = [row for row in marks(log) if not row[0].startswith(b"foreign")]
    assert [payload for payload, _, _ in found] == rows_of() + rows_of(1)
    assert [number for _, _, number in found] == [*range(8), *range(8)]
    first, second = {row[1] for row in found[:8]}, {row[1] for row in found[8:]}
    assert len(first) == len(second) == 1
    assert len({0} | first | second) == 3
    assert {row[1:] for row in marks(log) if row[0].startswith(b"foreign")} == {(0, 0)}


def test_lower_number_is_a_conflict_that_says_what_to_do(desk):
    """Goal: whoever restores an older checkpoint, or copies one, loses no rows unawares."""
    log = desk.process()
    ask(log, desk.stage_rows(rows_of(5), batch=5))
    ask(log, desk.stage_rows(rows_of(6), batch=6))
    ask(log, desk.stage_rows(rows_of(6), batch=6))
    for batch in (0, 5):
        refuse_older(log, desk.stage_rows(rows_of(batch), batch=batch), newest=6)
    assert contents(log) == rows_of(5) + rows_of(6)
    assert desk.staged_keys() == []
    other = desk.stage_rows(rows_of(), writer="query-1b")
    assert not ask(log, other).is_known
    assert contents(log) == rows_of(5) + rows_of(6) + rows_of()


def refuse_older(log, staged, *, newest):
    """A request for an older batch: an error with both numbers and the way out."""
    match = rf"batch {staged.batch} is older than .* {newest}: its {staged.rows} rows were not"
    with pytest.raises(ConflictError, match=match) as caught:
        log.append_staged(TEXT, staged)
    assert "`writer`" in caught.value.hint
    assert "new checkpoint" in caught.value.hint


def test_older_batch_of_which_no_row_is_in_is_forgotten(desk):
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(rows_of()), "batch.after_begin")
    lose(desk, "garbled manifest")
    assert not ask(log, desk.stage_rows(rows_of(1), batch=1)).is_known
    assert contents(log) == rows_of(1)
    # What it had staged is nobody's now.
    grow_old(desk, log, 30 * DAY_SECONDS)
    log.topic(TEXT).bucket.retention.collect_orphans()
    assert desk.staged_keys() == []


def test_large_block_is_appended_in_pieces_that_let_others_in(desk, monkeypatch):
    monkeypatch.setattr(batches, "_ENCODE_BYTES", 200)
    log = desk.process()
    crash_at("batch.after_rows", 99, before=appends_foreign(log))
    ask(log, desk.stage([[rows_of(count=40)]]))
    found = contents(log)
    assert without_foreign(found) == rows_of(count=40)
    assert len(found) - 40 >= 5
    assert found[-1].startswith(b"foreign")


@pytest.mark.parametrize(("bytes_min", "appends"), [(100_000, 1), (300, 2), (0, 4)])
def test_small_blocks_of_several_files_are_appended_at_once(desk, monkeypatch, bytes_min, appends):
    rows = [b"%d-%s" % (number, b"x" * 60) for number in range(8)]
    monkeypatch.setattr(batches, "_JOINED_BYTES_MIN", bytes_min)
    log = desk.process()
    crash_at("batch.after_rows", 99, before=appends_foreign(log))
    ask(log, desk.stage([[rows[:2], rows[2:4]], [rows[4:6]], [rows[6:]]]))
    found = contents(log)
    assert without_foreign(found) == rows
    assert len(found) - len(rows) == appends
    numbers = [number for payload, _, number in marks(log) if not payload.startswith(b"foreign")]
    assert numbers == list(range(8))


@pytest.mark.parametrize("ack", ["memory", "written", "synced"])
@pytest.mark.parametrize("codec", ["bincode1", "bincode2"])
def test_all_rows_are_durable_on_return_at_any_level(desk, ack, codec):
    log = desk.process(ack=ack, codec=codec)
    ask(log, desk.stage_rows(rows_of()))
    desk.cut_power(log)
    log = desk.process()
    assert contents(log) == rows_of()
    assert ask(log, desk.stage_rows(rows_of())).is_known


@pytest.mark.parametrize("count", [1, 8, 200])
def test_rows_of_a_topic_that_answers_when_tiered_are_tiered_on_return(desk, count):
    """Nobody else uploads them: a process that is there for one batch has no background."""
    log = desk.process(ack="tiered", storage={"uploader": {"max_object_bytes": 4096}})
    rows = [row + b"." * 100 for row in rows_of(count=count)]
    answer = ask(log, desk.stage_rows(rows))
    assert answer.rows == count
    assert log.topic(TEXT).watermarks.tiered == answer.end == count
    desk.lose_disk(log)
    log = desk.process("b", take_over=True)
    assert len(contents(log)) == count
    assert ask(log, desk.stage_rows(rows)).is_known


def test_batch_is_not_done_before_its_rows_are_tiered_where_that_is_asked_for(desk):
    log = desk.process(ack="tiered")
    staged = desk.stage_rows(rows_of())

    def silent(kind, key):
        if kind != "read" and not key.startswith("staging/"):
            raise UnavailableError("silent")

    desk.objects.before = silent
    with pytest.raises(UnavailableError):
        log.append_staged(TEXT, staged)
    assert not desk.writer_record().is_done
    desk.objects.before = lambda kind, key: None
    assert not ask(log, staged).is_known
    topic = log.topic(TEXT)
    assert topic.watermarks.tiered == topic.watermarks.next == 8
    assert contents(log) == rows_of()


def test_two_that_ask_at_once_append_once(desk):
    log = desk.process()
    staged = [desk.stage_rows(shuffled(rows_of(), seed)) for seed in range(4)]
    tasks = [Task(log.append_staged, TEXT, item) for item in staged]
    answers = [task.result() for task in tasks]
    assert sorted(answer.is_known for answer in answers) == [False, True, True, True]
    assert sorted(contents(log)) == rows_of()


def test_batch_that_will_not_be_repeated_leaves_no_record(desk):
    log = desk.process()
    staged = desk.stage_rows(rows_of(), is_repeatable=False)
    assert not ask(log, staged).is_known
    assert desk.metadata.get(KEY) is None
    assert desk.staged_keys() == []
    assert contents(log) == rows_of()


# -- refusals -----------------------------------------------------------------------------------


def test_writer_has_a_name_that_can_be_part_of_a_key(desk):
    for name in ("a", "A-b_9", "9", "x" * 120):
        check_writer_name(name)
    log = desk.process()
    for name in ("", "-a", "_a", "a/b", "a.b", "é", "a\n", "x" * 121, "..", "a b"):
        with case(name), pytest.raises(InvalidRequestError):
            log.append_staged(TEXT, StagedBatch(writer=name, batch=0, files=()))


def test_topic_has_to_exist(desk):
    log = desk.process()
    with pytest.raises(NotFoundError):
        log.append_staged("/default/other", desk.stage_rows(rows_of()))


@pytest.mark.parametrize("mode", ["local_only", "memory"])
def test_log_without_a_bucket_takes_no_staged_rows(desk, mode):
    wal = {} if mode == "local_only" else {"dir": None}
    log = desk.open(scheduler=NoThreads(), storage={"mode": mode}, **wal)
    log.topic(TEXT, create=True)
    with pytest.raises(InvalidRequestError, match="no object store"):
        log.append_staged(TEXT, desk.stage_rows(rows_of()))


@pytest.mark.parametrize("change", [None, -1, 1, -1000])
def test_staged_file_that_is_lost_or_of_another_size_is_noticed_before_anything_happens(
    desk, change
):
    log = desk.process()
    staged = desk.stage_rows(rows_of())
    key = staged.files[1].key
    data = desk.objects.read(key, 0, 1 << 20)
    if change is None:
        desk.objects.drop(key)
    else:
        desk.objects.put(key, data + b"x" if change > 0 else data[:change])
    with pytest.raises(NotFoundError if change is None else CorruptDataError):
        log.append_staged(TEXT, staged)
    assert contents(log) == []
    assert desk.writer_record() is None


@pytest.mark.parametrize("when", ["new", "known", "lower number", "goes on"])
@pytest.mark.parametrize(
    "key",
    [
        "storage/topics/default/orders/objects/data-0-7.dnb1",
        "staging/default/orders2/query-1/0/part",
        "staging/default/orders",
        "other",
    ],
)
def test_object_that_is_not_staged_for_the_topic_is_not_touched(desk, key, when):
    """Goal: staged files are removed in the end, so nobody may name something else as one."""
    log = desk.process()
    if when == "goes on":
        ask_and_crash(log, desk.stage_rows(rows_of(3), batch=3), "batch.after_rows")
    elif when != "new":
        ask(log, desk.stage_rows(rows_of(3), batch=3))
    before = contents(log)
    data = a_block(rows_of())
    desk.objects.put(key, data)
    file = StagedFile(key=key, rows=8, size_bytes=len(data))
    batch = 2 if when == "lower number" else 3
    with pytest.raises(InvalidRequestError):
        log.append_staged(TEXT, StagedBatch(writer=WRITER, batch=batch, files=(file,)))
    assert key in desk.bucket_keys()
    assert contents(log) == before


TOO_EARLY = {"payload": b"bad", "publish_time": datetime(1960, 1, 1, tzinfo=UTC)}
BAD_ROWS = {
    "publish_time": TOO_EARLY,
    "attribute 'a' that is null": {"payload": b"bad", "attributes": [("a", None)]},
    "no payload": {"payload": None},
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_batch_whose_first_rows_are_no_messages_can_be_mended(desk, what):
    """Goal: nothing of it is in, so whoever asks again may bring rows that are messages."""
    log = desk.process()
    log.topic(TEXT).append(b"foreign")
    first = desk.stage([[[*rows_of()[:3], BAD_ROWS[what]], rows_of()[3:]]])
    with pytest.raises(InvalidRequestError, match=what):
        log.append_staged(TEXT, first)
    assert contents(log) == [b"foreign"]
    assert not desk.writer_record().is_done
    mended = shuffled(rows_of(count=9))
    assert not ask(log, desk.stage_rows(mended)).is_known
    assert contents(log) == [b"foreign", *mended]
    assert ask(log, first).is_known


@pytest.mark.parametrize("is_same_file", [True, False], ids=["same file", "next file"])
def test_bad_row_behind_rows_that_are_in_is_the_same_error_each_time(desk, is_same_file):
    """Goal: what is in cannot be taken back: the batch stays as it is, and nothing is doubled."""
    log = desk.process()
    good, bad = rows_of()[:4], [*rows_of()[4:6], TOO_EARLY, *rows_of()[6:]]
    first = desk.stage([[good, bad]] if is_same_file else [[good], [bad]])
    second, next_one = desk.stage_rows(shuffled(rows_of())), desk.stage_rows(rows_of(1), batch=1)
    for staged in (first, first, second, next_one):
        with pytest.raises(InvalidRequestError, match=r"row 2 has .*publish_time"):
            log.append_staged(TEXT, staged)
        log.topic(TEXT).flush()
        desk.cut_power(log)
        log = desk.process()
        assert contents(log) == good
        record = desk.writer_record()
        assert (record.batch, record.is_done) == (0, False)


KEYED = {
    "routing_key": {"payload": b"keyed", "routing_key": "k"},
    "schema_id": {"payload": b"keyed", "schema_id": 7},
    "schema_version": {"payload": b"keyed", "schema_version": 2},
}


@pytest.mark.parametrize("is_same_file", [True, False], ids=["same file", "next file"])
@pytest.mark.parametrize("what", KEYED)
def test_field_that_the_older_codec_lacks_is_noticed_before_the_first_row(desk, what, is_same_file):
    """Goal: whoever staged rows without knowing the topic's codec can ask again with others."""
    log = desk.process(codec="bincode1")
    good, bad = rows_of()[:4], [*rows_of()[4:6], KEYED[what], *rows_of()[6:]]
    first = desk.stage([[good, bad]] if is_same_file else [[good], [bad]])
    with pytest.raises(InvalidRequestError, match=what) as caught:
        log.append_staged(TEXT, first)
    assert "bincode2" in caught.value.hint
    assert contents(log) == []
    assert desk.writer_record() is None
    mended = shuffled(rows_of())
    assert not ask(log, desk.stage_rows(mended)).is_known
    with pytest.raises(ConflictError):
        log.append_staged(TEXT, first)
    assert contents(log) == mended


def test_record_of_a_writer_that_is_no_record_is_an_error(desk):
    log = desk.process()
    desk.metadata.put(KEY, b"{}")
    with pytest.raises(CorruptDataError, match="writer's record"):
        log.append_staged(TEXT, desk.stage_rows(rows_of()))
    assert contents(log) == []


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["length", "crc", "first byte", "middle", "last byte"])
@pytest.mark.parametrize("block", [0, 1])
def test_damaged_block_appends_nothing_of_it(desk, where, block):
    log = desk.process()
    blocks = [rows_of()[:4], rows_of()[4:]]
    staged = desk.stage([blocks])
    begin = len(a_block(blocks[0])) * block
    size = len(a_block(blocks[block]))
    at = {
        "length": 1,
        "crc": 5,
        "first byte": BLOCK_HEADER_SIZE,
        "middle": size // 2,
        "last byte": size - 1,
    }[where]
    desk.objects.corrupt(staged.files[0].key, begin + at)
    with pytest.raises(CorruptDataError) as caught:
        log.append_staged(TEXT, staged)
    assert caught.value.path == staged.files[0].key
    assert contents(log) == rows_of()[: 4 * block]
    assert not desk.writer_record().is_done


def test_length_that_no_block_has_is_not_read(desk, monkeypatch):
    log = desk.process()
    staged = desk.stage([[rows_of()]])
    key = staged.files[0].key
    desk.objects.put(key, b"\xff" * 4 + desk.objects.read(key, 4, 1 << 20))
    sizes = []
    read = desk.objects.read
    monkeypatch.setattr(
        desk.objects, "read", lambda key, start, size: sizes.append(size) or read(key, start, size)
    )
    with pytest.raises(CorruptDataError):
        log.append_staged(TEXT, staged)
    assert max(sizes) < 1 << 30
    assert contents(log) == []


def with_rows(staged, number, change):
    """A batch one of whose files is said to have more or fewer rows than it has."""
    files = list(staged.files)
    files[number] = replace(files[number], rows=files[number].rows + change)
    return replace(staged, files=tuple(files))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("change", [-2, -1, 1], ids=["ends with a block", "too few", "too many"])
def test_count_of_rows_that_is_wrong_never_makes_a_batch_done(desk, change, number):
    """Goal: rows are numbered by these counts, so nothing goes on behind a wrong one."""
    log = desk.process()
    staged = with_rows(desk.stage_rows(rows_of()), number, change)
    # Rows up to the block that is too much, or to the end of the file, are in.
    have = rows_of()[: 4 * number + (2 if change < 0 else 4)]
    asked = [staged, staged] + [desk.stage_rows(shuffled(rows_of()))] * (change != -2)
    for again in asked:
        with pytest.raises(CorruptDataError) as caught:
            log.append_staged(TEXT, again)
        assert caught.value.path == staged.files[number].key
        assert contents(log) == have
        assert not desk.writer_record().is_done


@pytest.mark.parametrize("change", [-1, -7, -8])
def test_wrong_count_of_the_first_block_can_be_mended(desk, change):
    log = desk.process()
    staged = desk.stage([[rows_of()]])
    with pytest.raises(CorruptDataError):
        log.append_staged(TEXT, with_rows(staged, 0, change))
    assert contents(log) == []
    assert not ask(log, staged).is_known
    assert contents(log) == rows_of()


# -- a crash at each step -----------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("is_joined", [False, True])
def test_block_that_is_half_in_is_finished(desk, at, is_joined, monkeypatch):
    """A crash in the middle of blocks, whose pieces are appended one after the other."""
    monkeypatch.setattr(batches, "_ENCODE_BYTES", 1)
    monkeypatch.setattr(batches, "_JOINED_BYTES_MIN", 10_000 if is_joined else 0)
    log = desk.process()
    staged = desk.stage([[rows_of()[:3]], [rows_of()[3:]]])
    ask_and_crash(log, staged, "batch.after_rows", at, before=lambda: log.topic(TEXT).flush())
    desk.cut_power(log)
    log = desk.process()
    assert contents(log) == rows_of()[:at]
    monkeypatch.undo()
    ask(log, staged)
    assert contents(log) == rows_of()


@pytest.mark.parametrize("point", ["batch.after_begin", "batch.after_rows"])
def test_messages_that_a_power_cut_took_do_not_hide_rows(desk, point):
    """Others' messages were accepted, not synced, when the batch began; the power went, and with
    them the offsets below which no row of the batch was to be. Its rows lie there now.
    """
    log = desk.process()
    log.topic(TEXT).append_many([b"foreign-%d" % number for number in range(20)])
    staged = desk.stage([[[row] for row in rows_of()]])
    ask_and_crash(log, staged, point)
    desk.kill(log)
    log = desk.process()
    have = len(without_foreign(contents(log)))
    ask_and_crash(log, staged, "batch.after_rows", 3, before=lambda: log.topic(TEXT).flush())
    desk.kill(log)
    log = desk.process()
    assert without_foreign(contents(log)) == rows_of()[: have + 3]
    ask(log, staged)
    assert without_foreign(contents(log)) == rows_of()
    assert ask(log, staged).is_known


# -- leftovers ----------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["object", "record"])
def is_apart(request, monkeypatch):
    """Whether manifests are objects, or a part of the record."""
    if request.param:
        monkeypatch.setattr(batches, "_SHORT_MANIFEST_BYTES_MAX", 0)
    return request.param


def test_file_that_cannot_be_removed_is_no_error(desk, is_apart):
    log = desk.process()
    staged = desk.stage_rows(rows_of())

    def refuse(kind, key):
        if kind == "delete":
            raise UnavailableError("silent")

    desk.objects.before = refuse
    assert ask(log, staged).rows == 8
    assert ask(log, staged).is_known
    assert len(desk.staged_keys()) == 2 + is_apart


def grow_old(desk, log, seconds):
    desk.clock.advance(seconds)
    log.stores.membership.renew()


def test_sweep_keeps_what_an_unfinished_batch_needs_and_no_earlier_asking(desk, is_apart):
    """What was asked for first has not become the batch: nobody needs its files any more."""
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(rows_of()), "batch.after_begin")
    left = desk.staged_keys()
    second = shuffled(rows_of())
    ask_and_crash(log, desk.stage_rows(second), "batch.after_rows")
    needed = sorted(set(desk.staged_keys()) - set(left))
    assert len(needed) == 2 + is_apart
    grow_old(desk, log, 30 * DAY_SECONDS)
    assert len(log.topic(TEXT).bucket.retention.collect_orphans()) == 2 + is_apart
    assert desk.staged_keys() == needed
    ask(log, desk.stage_rows(rows_of()))
    assert contents(log) == second


# -- staged files that are lost -----------------------------------------------------------------


LOSSES = ["manifest", "garbled manifest", "all files", "one file", "short file"]


def lose(desk, what):
    files = read_files(desk.objects, desk.writer_record())
    if what == "manifest":
        desk.objects.drop(desk.put_manifest_apart())
    elif what == "garbled manifest":
        desk.objects.put(desk.put_manifest_apart(), b"[]")
    elif what == "short file":
        desk.objects.put(files[1].key, desk.objects.read(files[1].key, 0, 20))
    else:
        for file in files if what == "all files" else files[1:]:
            desk.objects.drop(file.key)


@pytest.mark.parametrize("what", LOSSES)
def test_begun_batch_without_rows_begins_anew_whatever_is_left_of_its_files(desk, what):
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(rows_of()), "batch.after_begin")
    lose(desk, what)
    second = shuffled(rows_of())
    assert not ask(log, desk.stage_rows(second)).is_known
    assert contents(log) == second


@pytest.mark.parametrize("batch", [0, 1], ids=["asked again", "the next one"])
@pytest.mark.parametrize("what", LOSSES)
def test_half_a_batch_whose_files_are_lost_is_a_conflict(desk, what, batch):
    """Goal: half a batch is not passed over in silence."""
    log = desk.process()
    log.topic(TEXT).append(b"foreign")
    ask_and_crash(log, desk.stage_rows(rows_of()), "batch.after_rows", 2)
    lose(desk, what)
    record = desk.writer_record()
    for _ in range(2):
        with pytest.raises(ConflictError, match="4 of 8 rows of batch 0") as caught:
            log.append_staged(TEXT, desk.stage_rows(rows_of(batch), batch=batch))
        assert caught.value.offset == 1
        assert contents(log) == [b"foreign", *rows_of()[:4]]
        assert desk.writer_record() == record


@pytest.mark.parametrize("what", LOSSES)
def test_whole_batch_does_not_need_its_files(desk, what):
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(rows_of()), "batch.after_rows", 4)
    lose(desk, what)
    for is_known in (False, True):
        answer = ask(log, desk.stage_rows(shuffled(rows_of())))
        assert (answer.rows, answer.is_known) == (8, is_known)
    assert contents(log) == rows_of()


@pytest.mark.parametrize("point", ["batch.after_begin", "batch.after_rows"])
def test_manifest_of_a_newer_ister_is_left_to_it_if_a_row_is_in(desk, point):
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(rows_of()), point)
    manifest = desk.put_manifest_apart()
    fields = json.loads(desk.objects.read(manifest, 0, 1 << 20))
    desk.objects.put(manifest, json.dumps({**fields, "version": 3}).encode())
    record, again = desk.writer_record(), desk.stage_rows(shuffled(rows_of()))
    if point == "batch.after_begin":
        assert not ask(log, again).is_known
        return
    for _ in range(2):
        with pytest.raises(UnsupportedVersionError):
            log.append_staged(TEXT, again)
        assert contents(log) == rows_of()[:2]
        assert desk.writer_record() == record


# -- rows that jobs have removed ----------------------------------------------------------------

KEYS_OF_ROWS = ("a", "b", "c", "d")


def keyed(batch=0, *, keys=KEYS_OF_ROWS, writer=WRITER):
    """Rows with keys."""
    rows = rows_of(batch, len(keys), writer=writer)
    return [{"payload": row, "routing_key": key} for row, key in zip(rows, keys, strict=True)]


def supersede(log, keys=KEYS_OF_ROWS):
    """Newer values of keys, by another producer."""
    for key in keys:
        log.topic(TEXT).append(b"foreign newer " + key.encode(), routing_key=key)


def hand_over(desk, log, disk="b"):
    """Another owner, which has what is in the bucket, and no local files."""
    log.seal(TEXT)
    log.close()
    return desk.process(disk)


@pytest.mark.parametrize("keys", ["abcd", "d", "ac"], ids=["all rows", "the last row", "some"])
@pytest.mark.parametrize("is_earlier", [False, True], ids=["now", "record of an earlier version"])
def test_batch_whose_rows_compaction_has_removed_is_known(desk, keys, is_earlier):
    """Goal: older values never come back over newer ones, and the batch is no error for ever."""
    log = desk.process()
    first = ask(log, desk.stage_rows(keyed()))
    if is_earlier:
        desk.put_record(runs=(), digest=None)
    supersede(log, keys)
    log.topic(TEXT).upload()
    assert desk.compact(log) == len(keys)
    log = hand_over(desk, log)
    left = contents(log)
    assert ask(log, desk.stage_rows(shuffled(keyed()))) == replace(first, is_known=True)
    assert contents(log) == left
    assert left[-len(keys) :] == [b"foreign newer " + key.encode() for key in keys]


@pytest.mark.parametrize("heeds_batches", [True, False])
def test_compaction_leaves_the_rows_of_an_open_batch(desk, heeds_batches):
    """Goal: how many rows are in is counted in the log, so that none of them may be removed.

    With a compaction that does not care, the same steps append rows a second time.
    """
    log = desk.process()
    supersede(log)
    log.topic(TEXT).upload()
    ask_and_crash(log, desk.stage_rows(keyed()), "batch.after_rows", 2)
    log.topic(TEXT).upload()
    supersede(log)
    log.topic(TEXT).upload()
    removed = desk.compact(log, heeds_batches=heeds_batches)
    log = hand_over(desk, log)
    ask(log, desk.stage_rows(shuffled(keyed())))
    is_whole = without_foreign(contents(log)) == rows_of(count=4)
    assert (removed, is_whole) == ((4, True) if heeds_batches else (6, False))
    if heeds_batches:
        assert desk.compact(log) > 0


@pytest.mark.parametrize("visit", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 3])
def test_open_batch_is_settled_so_that_compaction_goes_on(desk, visit, times):
    """Goal: a batch that nobody finishes does not hold up a topic for ever, and can be finished."""
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(keyed()), "batch.after_rows", visit)
    for number in range(times):
        supersede(log)
        log.topic(TEXT).upload()
        assert desk.compact(log) == (0 if number == 0 else 4)  # those below the end of last time
        log.topic(TEXT).bucket.retention.collect_orphans()
        record = desk.writer_record()
        assert (record.is_done, record.end) == (False, log.topic(TEXT).watermarks.synced)
        assert record.runs == ((0, 0, visit),)
        assert desk.compact(log) == (visit if number == 0 else 0)
    log = hand_over(desk, log)
    ask(log, desk.stage_rows(shuffled(keyed())))
    assert without_foreign(contents(log)) == rows_of(count=4)[visit:]
    assert desk.writer_record().is_done
    assert ask(log, desk.stage_rows(keyed())).is_known


def test_batch_that_is_being_appended_is_not_settled(desk):
    log = desk.process()
    seen = []

    def collect():
        log.topic(TEXT).upload()
        log.topic(TEXT).bucket.retention.collect_orphans()
        seen.append(desk.writer_record())

    failpoints.arm("batch.after_rows", collect)
    ask(log, desk.stage_rows(rows_of()))
    failpoints.disarm()
    assert [(record.end, record.runs) for record in seen] == [(0, ())] * 4
    assert contents(log) == rows_of()


@pytest.mark.parametrize("cut", range(1, 8))
def test_take_over_behind_a_settled_batch_takes_its_rows_away(desk, cut):
    """Goal: what a record says about rows ends where a later owner began."""
    log = desk.process()
    ask_and_crash(log, desk.stage([[[row] for row in rows_of()]]), "batch.after_rows", cut)
    log.topic(TEXT).upload()
    log.topic(TEXT).append(b"lost")
    log.topic(TEXT).flush()
    log.topic(TEXT)._settle_batches(desk.objects)
    assert desk.writer_record().runs == ((0, 0, cut),)
    desk.put_record(end=cut + 1, runs=((0, 0, cut), (cut, cut, 1)))  # a row that was not tiered
    desk.lose_disk(log)
    log = desk.process("b", take_over=True)
    ask(log, desk.stage_rows(shuffled(rows_of())))
    assert contents(log) == rows_of()


@pytest.mark.parametrize("runs_max", [1, 2, 256])
@pytest.mark.parametrize("tiered", range(2, 9, 2))
def test_runs_say_how_many_rows_a_take_over_has_left(desk, monkeypatch, runs_max, tiered):
    """Goal: the rows below the cut are those that the runs say, whatever compaction has removed."""
    monkeypatch.setattr(batches, "_RUNS_MAX", runs_max)
    log = desk.process()
    visits = itertools.count(1)

    def others():
        if next(visits) * 2 == tiered:
            log.topic(TEXT).upload()
        log.topic(TEXT).append(b"foreign", routing_key="other")

    failpoints.arm("batch.after_rows", others)
    keys = [f"k{number}" for number in range(8)]
    first = ask(log, desk.stage_rows(keyed(keys=keys)))
    failpoints.disarm()
    assert desk.writer_record().runs == ((0, 0, 2), (2, 3, 2), (4, 6, 2), (6, 9, 2))[:runs_max]
    desk.lose_disk(log)
    log = desk.process("b", take_over=True)
    left = contents(log)
    if tiered == 8:
        assert ask(log, desk.stage_rows(keyed(keys=keys))) == replace(first, is_known=True)
    else:
        for _ in range(2):
            with pytest.raises(ConflictError, match=f"{tiered} of 8 rows of batch 0"):
                log.append_staged(TEXT, desk.stage_rows(keyed(keys=keys)))
    assert contents(log) == left


def test_compacted_rows_below_a_take_over_count(desk):
    """Goal: a batch of which some rows were compacted away and others lost is not repeated."""
    log = desk.process()
    failpoints.arm("batch.after_rows", log.topic(TEXT).upload)
    ask(log, desk.stage([[keyed()[:2]], [keyed()[2:3]]]))
    failpoints.disarm()
    ask(log, desk.stage([[keyed(1, keys="a")], [keyed(1, keys="bcd")[1:]]], batch=1))
    supersede(log, "a")
    log.topic(TEXT).upload()
    assert desk.compact(log) > 0
    desk.lose_disk(log)
    log = desk.process("b", take_over=True)
    left = contents(log)
    desk.put_record(end=log.topic(TEXT).watermarks.synced + 1)  # one more message was lost
    desk.put_record(rows=4)
    with pytest.raises(ConflictError, match="3 of 4 rows of batch 1"):
        log.append_staged(TEXT, desk.stage_rows(keyed(1), batch=1))
    assert contents(log) == left


@pytest.mark.parametrize("is_settled", [True, False])
def test_retention_settles_an_open_batch_before_it_takes_its_rows(desk, is_settled, monkeypatch):
    """Goal: rows of a batch that is not finished are not forgotten with the objects they were in.

    Where they cannot be counted, the objects stay.
    """
    log = desk.process(**EXPIRING)
    topic = log.topic(TEXT)
    sent = [row + b"." * 500 for row in rows_of(count=8)]
    staged = desk.stage([[[row] for row in sent]])
    ask_and_crash(log, staged, "batch.after_rows", 5, before=topic.flush)
    for number in range(60):
        topic.append(b"foreign-%d" % number + b"." * 500)
        topic.flush()
    topic.upload()
    grow_old(desk, log, DAY_SECONDS)
    if not is_settled:
        topic.bucket.retention._settle = lambda: None
        assert (topic.bucket.retention.expire(), topic.earliest) == (0, 0)
        return
    assert topic.bucket.retention.trim() > 0
    assert topic.bucket.retention.expire() > 0
    assert topic.earliest > 5
    assert desk.writer_record().runs == ((0, 0, 5),)
    ask(log, desk.stage([[[row] for row in shuffled(sent)]]))
    assert without_foreign(contents(log)) == sent[5:]


@pytest.mark.parametrize("rows", [7, 9])
def test_same_number_with_another_count_of_rows_is_a_conflict(desk, rows):
    log = desk.process()
    ask(log, desk.stage_rows(rows_of()))
    match = f"batch 0 of the writer 'query-1' is in the topic with 8 rows, .* {rows},"
    with pytest.raises(ConflictError, match=match) as caught:
        log.append_staged(TEXT, desk.stage_rows(rows_of(count=rows)))
    assert "`writer`" in caught.value.hint
    assert contents(log) == rows_of()
    assert desk.staged_keys() == []


def digested(staged, *digests):
    files = zip(staged.files, digests, strict=True)
    return replace(staged, files=tuple(replace(file, digest=digest) for file, digest in files))


@pytest.mark.parametrize("is_crash", [False, True], ids=["done", "begun"])
def test_same_number_with_other_rows_is_said(desk, is_crash):
    """Goal: a repeated batch with other values (now, uuid) is told from the same one."""
    log = desk.process()
    first = digested(desk.stage_rows(rows_of()), 3, 4)
    if is_crash:
        ask_and_crash(log, first, "batch.after_rows", 2)
    else:
        assert not ask(log, first).is_other
    # In another order, or divided differently, the digest is the same.
    assert not ask(log, digested(desk.stage_rows(shuffled(rows_of())), 7, 0)).is_other
    assert ask(log, digested(desk.stage_rows(rows_of()), 3, 5)).is_other
    # Staged by an earlier version.
    assert not ask(log, desk.stage_rows(rows_of())).is_other
    assert contents(log) == rows_of()
    assert desk.writer_record().digest == 7


@pytest.mark.parametrize("point", POINTS[1:4])
def test_begun_batch_that_is_finished_with_its_own_rows_says_that_others_were_brought(desk, point):
    log = desk.process()
    ask_and_crash(log, digested(desk.stage_rows(rows_of()), 3, 4), point)
    answer = ask(log, digested(desk.stage_rows(rows_of()), 1, 1))
    assert (answer.is_known, answer.is_other) == (False, point != "batch.after_begin")


def test_finished_batch_of_a_job_is_forgotten_once_its_driver_says_so(desk):
    log = desk.process()
    receipt = StagedBatch(writer=WRITER, batch=0, files=(), is_repeatable=False)
    for _ in range(2):
        assert ask(log, receipt).is_known
    staged = desk.stage_rows(rows_of())
    ask_and_crash(log, staged, "batch.after_rows")
    ask(log, receipt)
    assert desk.writer_record() is not None
    ask(log, staged)
    for _ in range(2):
        ask(log, receipt)
        assert desk.writer_record() is None
    ask(log, desk.stage_rows(rows_of(1), batch=1))
    ask(log, receipt)
    assert desk.writer_record().batch == 1
    assert contents(log) == rows_of() + rows_of(1)


def test_job_that_appends_for_hours_is_not_taken_for_an_old_one(desk):
    """Goal: whatever the grace period is, a batch that is being appended stays."""
    log = desk.process(storage={"cloud": {"orphan_grace_minutes": 0}})

    def sweep():
        grow_old(desk, log, 3000)
        log.topic(TEXT).bucket.retention.collect_orphans()

    failpoints.arm("batch.after_rows", sweep)
    ask(log, desk.stage_rows(rows_of(), writer="job-1"))
    failpoints.disarm()
    assert contents(log) == rows_of()
    grow_old(desk, log, 3601)
    log.topic(TEXT).bucket.retention.collect_orphans()
    assert desk.writer_record("job-1") is None


def test_staged_files_without_a_batch_outlive_a_grace_period_of_none(desk):
    """Goal: tasks that stage for a commit to come are not robbed by somebody else's commit."""
    log = desk.process(storage={"cloud": {"orphan_grace_minutes": 0}})
    staged = desk.stage_rows(rows_of())
    grow_old(desk, log, 3600)
    assert log.topic(TEXT).bucket.retention.collect_orphans() == []
    assert not ask(log, staged).is_known
    desk.stage_rows(rows_of(1), batch=1)
    grow_old(desk, log, 3601)
    assert len(log.topic(TEXT).bucket.retention.collect_orphans()) == 2


# -- other owners -------------------------------------------------------------------------------


@pytest.mark.parametrize("others", ["nothing", "messages", "fewer messages", "a batch"])
def test_batch_that_went_with_its_owners_disk_is_appended_again(desk, others):
    """Goal: what has its offsets now is not taken for it: the last row tells by what it carries."""
    log = desk.process()
    log.topic(TEXT).append(b"foreign")
    log.topic(TEXT).upload()
    first = ask(log, desk.stage_rows(rows_of()))
    desk.lose_disk(log)
    log = desk.process("b", take_over=True)
    if others == "a batch":
        taken = rows_of(writer="other")
        assert ask(log, desk.stage_rows(taken, writer="other")) == first
    else:
        count = {"nothing": 0, "messages": 12, "fewer messages": 5}[others]
        taken = [b"other-%d" % number for number in range(count)]
        log.topic(TEXT).append_many(taken)
    second = shuffled(rows_of())
    assert not ask(log, desk.stage_rows(second)).is_known
    assert contents(log) == [b"foreign", *taken, *second]
    assert ask(log, desk.stage_rows(rows_of())).is_known
    assert contents(log) == [b"foreign", *taken, *second]


@pytest.mark.parametrize("rows", [8, 60])
def test_batch_that_retention_took_is_known(desk, rows):
    """Goal: what is not there any more because it is old is not appended again."""
    log = desk.process(**EXPIRING)
    topic = log.topic(TEXT)
    sent = [row + b"." * 500 for row in rows_of(count=rows)]
    failpoints.arm("batch.after_rows", topic.flush)  # so that there is more than one file
    first = ask(log, desk.stage([[[row] for row in sent]]))
    failpoints.disarm()
    others = [b"foreign-%d" % number + b"." * 500 for number in range(60 - rows)]
    for payload in others:
        topic.append(payload)
        topic.flush()
    topic.upload()
    grow_old(desk, log, DAY_SECONDS)
    assert topic.bucket.retention.trim() > 0
    assert topic.bucket.retention.expire() > 0
    # Either the whole batch is gone, or its first rows are.
    assert (topic.earliest >= 8) if rows == 8 else (0 < topic.earliest < 60)
    left = [*sent, *others][topic.earliest :]
    assert contents(log) == left
    assert ask(log, desk.stage_rows(shuffled(sent))) == replace(first, is_known=True)
    assert contents(log) == left


def test_batch_is_not_lost_with_what_others_appended_behind_it(desk):
    """All rows are in the bucket. Messages of others, between them and the end of the batch, went
    with the disk: the batch did not.
    """
    log = desk.process()
    topic = log.topic(TEXT)

    def others():
        topic.upload()
        topic.append_many([b"foreign-a", b"foreign-b"])
        topic.flush()

    failpoints.arm("batch.before_done", others)
    ask(log, desk.stage_rows(rows_of()))
    failpoints.disarm()
    desk.lose_disk(log)
    log = desk.process("b", take_over=True)
    assert contents(log) == rows_of()
    assert ask(log, desk.stage_rows(shuffled(rows_of()))).is_known
    assert contents(log) == rows_of()


@pytest.mark.parametrize("tiered", [0, 2, 4, 8])
def test_unfinished_batch_survives_its_owners_disk(desk, tiered):
    """Goal: whatever part of it was in the bucket, the rest comes behind it, and it stays known;
    if no part was, it is what is brought now.
    """
    log = desk.process()
    topic = log.topic(TEXT)
    visits = itertools.count(1)
    staged = desk.stage_rows(rows_of())
    ask_and_crash(
        log,
        staged,
        "batch.after_rows",
        4,
        before=lambda: next(visits) * 2 == tiered and topic.upload(),
    )
    topic.flush()
    desk.lose_disk(log)
    log = desk.process("b", take_over=True)
    assert contents(log) == rows_of()[:tiered]
    second = shuffled(rows_of())
    assert not ask(log, desk.stage_rows(second)).is_known
    expected = rows_of() if tiered else second
    assert contents(log) == expected
    desk.kill(log)
    log = desk.process("b")
    assert ask(log, desk.stage_rows(shuffled(rows_of(), 2))).is_known
    assert contents(log) == expected


def test_deleting_a_topic_forgets_its_batches_and_removes_what_is_staged(desk):
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(rows_of()), "batch.after_rows")
    ask(log, desk.stage_rows(rows_of(), writer="query-2"))
    desk.stage_rows(rows_of(1), batch=1)
    others = ["staging/default/orders2/q/0/x", "staging/default/o"]
    for key in others:
        desk.objects.put(key, b"x")
    assert len(desk.staged_keys()) == 6
    log.delete(TEXT)
    assert desk.staged_keys() == sorted(others)
    assert desk.metadata.get(KEY) is None
    log.topic(TEXT, create=True)
    assert not ask(log, desk.stage_rows(rows_of(), writer="query-2")).is_known
    assert contents(log) == rows_of()


@pytest.mark.parametrize("is_done", [True, False])
def test_record_of_an_earlier_topic_of_that_name_does_not_count(desk, is_done):
    log = desk.process()
    ask_and_crash(log, desk.stage_rows(rows_of()), "batch.before_done")
    desk.put_record(incarnation="0000000000000000", is_done=is_done, batch=9)
    assert not ask(log, desk.stage_rows(rows_of(1), batch=1)).is_known
    assert contents(log) == rows_of() + rows_of(1)
    assert desk.writer_record().batch == 1


@pytest.mark.parametrize("is_tiered", [True, False], ids=["tiered", "on its disk"])
@pytest.mark.parametrize("point", POINTS[:4])
def test_owner_that_was_replaced_cannot_make_a_batch_count(desk, point, is_tiered):
    """Goal: at whichever step another node takes the topic, the rows are in it once: those that
    the replaced owner began with if it has handed one of them on, else those brought later.
    """
    slow = desk.process("a")
    slow.topic(TEXT).append(b"foreign")
    slow.topic(TEXT).upload()
    others = []

    def take():
        if not others:
            if is_tiered:
                slow.topic(TEXT).upload()
            desk.clock.advance(TTL_SECONDS + 1)
            others.append(desk.process("b", take_over=True))

    failpoints.arm(point, take)
    with pytest.raises((FencedError, UnavailableError)):
        slow.append_staged(TEXT, desk.stage_rows(rows_of()))
    failpoints.disarm()
    (log,) = others
    record = desk.writer_record()
    assert record is None or not record.is_done
    second = shuffled(rows_of())
    assert not ask(log, desk.stage_rows(second)).is_known
    is_first = is_tiered and point in ("batch.after_rows", "batch.before_done")
    expected = rows_of() if is_first else second
    assert without_foreign(contents(log)) == expected
    assert ask(log, desk.stage_rows(rows_of())).is_known
    with pytest.raises((FencedError, ConflictError, UnavailableError)):
        slow.append_staged(TEXT, desk.stage_rows(rows_of(1), batch=1))
    assert without_foreign(contents(log)) == expected
    assert desk.writer_record().batch == 0


def test_lapsed_lease_is_no_answer(desk):
    log = desk.process()
    failpoints.arm("batch.after_rows", lambda: desk.clock.advance(TTL_SECONDS + 1))
    staged = desk.stage_rows(rows_of())
    with pytest.raises(UnavailableError):
        log.append_staged(TEXT, staged)
    failpoints.disarm()
    assert not desk.writer_record().is_done
    log.stores.membership.renew()
    ask(log, staged)
    assert contents(log) == rows_of()


@pytest.mark.parametrize("first", [1, 2], ids=["begin", "done"])
def test_store_that_never_answers_is_a_reason_to_ask_again(desk, first):
    """Goal: what the caller is told is that trying later helps, not that somebody interferes."""
    log = desk.process()
    staged = desk.stage_rows(rows_of())
    seen = itertools.count(1)

    def lose_answer(kind, key):
        if kind == "transact" and key == KEY and next(seen) >= first:
            raise CommitUnknownError("the answer was lost")

    desk.metadata.before = lose_answer
    with pytest.raises(UnavailableError) as caught:
        log.append_staged(TEXT, staged)
    assert caught.value.retriable
    desk.metadata.before = lambda kind, key: None
    ask(log, desk.stage_rows(shuffled(rows_of())))
    assert sorted(contents(log)) == rows_of()


# -- lost answers of the metadata store ---------------------------------------------------------


@pytest.mark.parametrize("lands", ["before", "between", "after", "never"])
@pytest.mark.parametrize("step", [1, 2], ids=["begin", "done"])
def test_change_that_lands_late_leaves_the_rows_once(desk, lands, step):
    """The answer to a change is lost and its process dies; the change lands when it likes."""
    log = desk.process()
    seen = itertools.count(1)

    def delay(kind, key):
        if desk.metadata.delayed:
            raise SimulatedCrash  # whatever comes after the lost answer
        if kind == "transact" and key == KEY and next(seen) == step:
            desk.metadata.delay_next_change()

    staged = desk.stage_rows(rows_of())
    desk.metadata.before = delay
    with pytest.raises(SimulatedCrash):
        log.append_staged(TEXT, staged)
    desk.metadata.before = lambda kind, key: None
    desk.kill(log)
    if lands == "before":
        desk.metadata.deliver_delayed()
    log = desk.process()
    if lands == "between":
        failpoints.arm("batch.after_rows", desk.metadata.deliver_delayed)
        failpoints.arm("batch.after_manifest", desk.metadata.deliver_delayed)
    for _ in range(3):
        with suppress(ConflictError):
            ask(log, desk.stage_rows(shuffled(rows_of())))
    failpoints.disarm()
    if lands == "after":
        desk.metadata.deliver_delayed()
    assert ask(log, desk.stage_rows(rows_of())).is_known
    assert Counter(contents(log)) == Counter(rows_of())


def test_somebody_else_under_the_same_name_is_a_conflict(desk):
    log = desk.process()
    failpoints.arm("batch.before_done", lambda: desk.put_record(updated_at=1))
    with pytest.raises(ConflictError) as caught:
        log.append_staged(TEXT, desk.stage_rows(rows_of()))
    assert caught.value.path == KEY
    failpoints.disarm()
    ask(log, desk.stage_rows(rows_of()))
    assert contents(log) == rows_of()


# -- everything at once -------------------------------------------------------------------------


class Query:
    """A writer in the random world: asks for one batch until it is in, then for the next.

    Each asking brings rows of its own, which say which one it was: rows of two of them in one batch
    are seen at once.
    """

    def __init__(self, name, rng):
        self.name = name
        self.rng = rng
        self.batch = -1
        self.count = 0
        self.asked = 0
        self.orders = []
        """The rows of each asking whose rows can be in, in their order."""
        self.newest = None
        """Of the last asking; None if they cannot be in, as one is not a message."""
        self.pinned = None
        """What the batch has to be in the end, since a row of it is in the topic."""
        self.is_looked_at = True
        """Whether nothing was asked for since `pinned` was found out."""
        self.left = []
        """Batches that it went on without: (prefix, orders, pinned) of each."""
        self.done = []
        """The rows of each batch that is in."""
        self.is_repeatable = True
        self.begin()

    def begin(self):
        self.batch += self.rng.choice((1, 1, 1, 3))
        self.count = self.rng.choice((0, 1, 2, 3, 5, 9))
        self.asked = 0
        self.orders, self.newest, self.pinned, self.is_looked_at = [], None, None, True
        self.is_repeatable = self.rng.random() < 0.85

    def go_on(self):
        """Asks for the next batch from here on, whatever has become of this one."""
        self.left.append((self.prefix, self.orders, self.pinned))
        self.begin()

    def settle(self, found):
        """A batch is in: each one that was left before it is in whole, or not at all."""
        for prefix, orders, pinned in self.left:
            rows = [payload for payload in found if payload.startswith(prefix + b"/")]
            assert rows in ([pinned] if pinned is not None else [[], *orders]), f"{prefix}: {rows}"
            self.done.append(rows)
        count = sum(bool(rows) for rows in self.done[-len(self.left) :]) if self.left else 0
        self.left = []
        return count

    def bring(self):
        """The rows of the next asking, mostly as many as before."""
        count = self.rng.randint(0, 9) if self.rng.random() < 0.2 else self.count
        # Without rows, a batch that is not repeated would be a receipt.
        count = max(count, not self.is_repeatable)
        rows = [b"%s/%d/%d" % (self.prefix, self.asked, number) for number in range(count)]
        self.rng.shuffle(rows)
        self.asked += 1
        return rows

    @property
    def prefix(self):
        return f"{self.name}/{self.batch}".encode()

    def mine(self, found):
        """Those of the batch at hand."""
        return [payload for payload in found if payload.startswith(self.prefix + b"/")]


class World:
    """Random crashes, retries, foreign messages, hand-overs; what must hold is asked at the end.

    Messages have keys, and compaction removes those that were replaced. What it has removed is kept
    here: with that, each row has been in the topic once.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.desk = Desk()
        self.disks = itertools.count()
        self.disk = f"disk-{next(self.disks)}"
        self.log = self.desk.process(self.disk)
        self.queries = [Query(name, self.rng) for name in ("one", "two")]
        self.sent = itertools.count()
        self.acked = []
        self.crashes = Counter()
        self.is_ending = False

    # -- the parts --

    def topic(self):
        return self.log.topic(TEXT)

    def append_foreign(self):
        payload = b"foreign-%d" % next(self.sent)
        topic = self.topic()
        topic.append(payload, routing_key=self.rng.choice((None, *KEYS_OF_ROWS)))
        if self.rng.random() < 0.5:
            topic.flush()
            self.acked.append(payload)

    def stage(self, query):
        rng = self.rng
        rows = query.bring()
        files = [cut(part, rng.randint(1, 4)) for part in cut(rows, rng.randint(1, 3)) if part]
        query.newest = rows
        if files and rng.random() < 0.15:
            # With the first block none of these can be in, whatever is asked for later.
            block = files[0][0]
            block.insert(rng.randint(0, len(block)), TOO_EARLY)
            query.newest = None
        else:
            query.orders.append(rows)
        keyed = [[[self.with_key(row) for row in block] for block in file] for file in files]
        return self.desk.stage(
            keyed, writer=query.name, batch=query.batch, is_repeatable=query.is_repeatable
        )

    def with_key(self, row):
        """A row, with a key or without one."""
        key = self.rng.choice((None, *KEYS_OF_ROWS)) if isinstance(row, bytes) else None
        return row if key is None else {"payload": row, "routing_key": key}

    def everything(self):
        """Offsets and payloads of all messages, those that compaction has removed as well."""
        there = {message.offset: message.payload for message in self.topic().read()}
        both = there.keys() & self.desk.compacted.keys()
        assert all(there[at] == self.desk.compacted[at] for at in both)
        return sorted((self.desk.compacted | there).items())

    def contents(self):
        return [payload for _, payload in self.everything()]

    def look(self, query):
        """Finds out what a batch has to be: a row that is in the topic has decided that."""
        found = query.mine(self.contents())
        query.is_looked_at = True
        if not found:
            assert query.pinned is None, f"rows of {query.prefix} are lost"
            return
        record = self.desk.writer_record(query.name)
        rows = found
        if record is not None and record.batch == query.batch and not record.is_done:
            rows = self.desk.rows_of_batch(record)
        assert rows in query.orders, f"{query.prefix}: {rows}"
        assert found == rows[: len(found)]
        assert query.pinned in (None, rows), f"{query.prefix} was begun anew"
        query.pinned = rows

    def fault(self, query):
        """Something that goes wrong at a random moment of an asking."""
        rng, desk = self.rng, self.desk
        kind = rng.choice(("point", "point", "bucket", "metadata", "unknown", "none"))
        left = [rng.randint(1, 6)]
        error = rng.choice((SimulatedCrash, UnavailableError))

        def count_down():
            left[0] -= 1
            return left[0] == 0

        if kind == "point":
            name = rng.choice(POINTS)

            def act():
                if rng.random() < 0.4:
                    self.append_foreign()
                if count_down():
                    self.crashes[name] += 1
                    raise SimulatedCrash

            left[0] = rng.randint(1, 4) if name == "batch.after_rows" else 1
            failpoints.arm(name, act)
        elif kind in ("bucket", "metadata"):
            store = desk.objects if kind == "bucket" else desk.metadata

            def hook(what, key):
                if count_down():
                    self.crashes[f"{kind} {what}"] += 1
                    raise error("fault")

            setattr(store, rng.choice(("before", "after")), hook)
        elif kind == "unknown":

            def lose_answer(what, key):
                if what == "transact" and count_down():
                    self.crashes["lost answer"] += 1
                    raise CommitUnknownError("lost")

            setattr(desk.metadata, rng.choice(("before", "after")), lose_answer)

    def repair(self):
        failpoints.disarm()
        for store in (self.desk.objects, self.desk.metadata):
            store.before = store.after = lambda kind, key: None

    # -- turns --

    def ask(self, query):
        if self.rng.random() < 0.5:
            # Not always: who reads waits for what was appended to be synced.
            self.look(query)
        staged = self.stage(query)
        self.fault(query)
        try:
            answer = self.log.append_staged(TEXT, staged)
        except (SimulatedCrash, IsterError) as error:
            self.repair()
            self.crashes["bad row"] += isinstance(error, InvalidRequestError)
            query.is_looked_at = False
            if isinstance(error, ConflictError):
                # The batch is what it was before; this one had another number of rows.
                assert "comes again with" in error.message, error
                self.crashes["other count"] += 1
                found = self.contents()
                self.crashes["carried on"] += query.settle(found)
                rows = query.mine(found)
                assert rows in query.orders
                assert len(rows) != staged.rows
                query.done.append(rows)
                query.begin()
                return
            if isinstance(error, SimulatedCrash) or self.rng.random() < 0.5:
                self.end()
            if not query.is_repeatable and self.is_in(query):
                # It is in, and nobody remembers it: such a batch is not asked for again.
                found = self.contents()
                self.crashes["carried on"] += query.settle(found)
                query.done.append(query.mine(found))
                query.begin()
            elif not self.is_ending and self.rng.random() < 0.2:
                self.crashes["left"] += 1
                query.go_on()
        else:
            self.repair()
            if answer.is_known and not query.is_repeatable:
                raise AssertionError("nothing is known of a batch that is not repeated")
            self.finish(query, answer)

    def is_in(self, query):
        """Whether a batch has come to its end, as far as the topic tells."""
        if self.desk.writer_record(query.name) is not None:
            return False
        self.look(query)
        found = query.mine(self.contents())
        if found:
            assert found == query.pinned
        return found in query.orders

    def finish(self, query, answer):
        found = self.everything()
        rows = query.mine(payload for _, payload in found)
        self.crashes["carried on"] += query.settle([payload for _, payload in found])
        assert rows in query.orders, f"{query.prefix}: {rows}"
        if query.pinned is not None:
            self.crashes["went on"] += 1
            assert rows == query.pinned
        elif query.is_looked_at:
            # No row was in: it is what was brought now, or it was done without any.
            self.crashes["began anew"] += query.asked > 1
            assert rows == ([] if answer.is_known else query.newest)
        assert answer.rows == len(rows)
        at = [offset for offset, payload in found if payload in set(rows)]
        assert all(answer.start <= offset < answer.end for offset in at)
        if query.is_repeatable and self.rng.random() < 0.4:
            staged = self.stage(query)
            if staged.rows == answer.rows:
                again = self.log.append_staged(TEXT, staged)
                assert again == replace(answer, is_known=True)
            else:
                with pytest.raises(ConflictError, match="comes again with"):
                    self.log.append_staged(TEXT, staged)
            assert query.mine(self.contents()) == rows
        query.done.append(rows)
        query.begin()

    def end(self, how=None):
        """The process ends in some way, and another one begins."""
        ways = ("kill", "kill", "power", "power", "close", "hand over", "new disk")
        how = self.rng.choice(ways) if how is None else how
        desk, log = self.desk, self.log
        self.crashes[how] += 1
        if how == "kill":
            desk.kill(log)
        elif how == "power":
            desk.cut_power(log, self.rng.randrange(1 << 30))
        elif how == "close":
            log.close()
        elif how == "hand over":
            log.seal(TEXT)
            log.close()
            self.disk = f"disk-{next(self.disks)}"
        else:
            # Everything is in the bucket when the disk goes.
            log.topic(TEXT).upload()
            desk.lose_disk(log)
            self.disk = f"disk-{next(self.disks)}"
        self.log = desk.process(self.disk, take_over=how == "new disk")
        for query in self.queries:
            self.look(query)

    def sweep(self):
        """Nothing that is needed is taken, however old it is."""
        grow_old(self.desk, self.log, 30 * DAY_SECONDS)
        self.crashes["swept"] += len(self.log.topic(TEXT).bucket.retention.collect_orphans())

    def compact(self):
        """Messages that were replaced go, where no batch needs them."""
        self.topic().upload()
        self.crashes["compacted"] += self.desk.compact(self.log)
        if self.rng.random() < 0.7:
            # Local files would still have what is gone.
            self.end("hand over")
            for query in self.queries:
                self.restore(query)

    def restore(self, query):
        """An older copy of a checkpoint is put back: nothing of it is appended, in no case."""
        record = self.desk.writer_record(query.name)
        if record is None or (record.batch == 0 and not record.is_done):
            return
        newest = record.batch - (not record.is_done)
        batch = self.rng.randint(max(0, newest - 2), newest)
        count = self.rng.choice((record.rows, self.rng.randint(0, 5)))
        rows = [b"restored-%d" % number for number in range(count)]
        staged = self.desk.stage([[rows]], writer=query.name, batch=batch)
        before = self.contents()
        if batch == record.batch and staged.rows == record.rows:
            assert self.log.append_staged(TEXT, staged).is_known
        else:
            with pytest.raises(ConflictError, match=r"older than|comes again with"):
                self.log.append_staged(TEXT, staged)
            self.crashes["restored"] += 1
        assert self.contents() == before

    def copy(self, query):
        """A checkpoint is copied, and goes on under another name: all of it is appended."""
        if len(self.queries) < 4:
            copied = Query(f"copy{len(self.queries)}", self.rng)
            copied.batch = query.batch
            self.queries.append(copied)
            self.crashes["copied"] += 1

    def turn(self):
        choice = self.rng.random()
        if choice < 0.6:
            self.ask(self.rng.choice(self.queries))
        elif choice < 0.8:
            self.append_foreign()
        elif choice < 0.81:
            self.topic().upload()
        elif choice < 0.85:
            self.compact()
        elif choice < 0.87:
            self.restore(self.rng.choice(self.queries))
        elif choice < 0.88:
            self.copy(self.rng.choice(self.queries))
        elif choice < 0.92:
            self.sweep()
        else:
            self.end()

    def check(self):
        """Ends all that is open, and looks at everything."""
        self.is_ending = True
        for query in self.queries:
            batch = query.batch
            for _ in range(200):
                if query.batch != batch:
                    break
                self.ask(query)
            assert query.batch != batch, "an asking never succeeds"
        found = self.contents()
        expected = Counter(row for query in self.queries for rows in query.done for row in rows)
        rows = without_foreign(found)
        assert Counter(rows) == expected
        for query in self.queries:
            mine = [row for row in rows if row.startswith(query.name.encode() + b"/")]
            assert mine == [row for rows in query.done for row in rows]
        foreign = [payload for payload in found if payload.startswith(b"foreign")]
        assert len(foreign) == len(set(foreign))
        assert [payload for payload in foreign if payload in set(self.acked)] == self.acked
        self.sweep()
        assert self.desk.staged_keys() == []


@pytest.mark.timeout(3000)
def test_random_crashes_and_retries_end_in_every_row_once(monkeypatch):
    """Goal: two writers, foreign messages, any crash at any step: every row once, in its order.

    Method: small worlds from consecutive seeds, beginning with `first_seed`, which is printed.
    """
    first = first_seed()
    print(f"ISTER_SIM_SEED={first}")
    # Some manifests are a part of the record, and others are not.
    monkeypatch.setattr(batches, "_SHORT_MANIFEST_BYTES_MAX", 200)
    crashes = Counter()
    for seed in range(first, first + ROUNDS):
        world = World(seed)
        with world.desk:
            try:
                for _ in range(12):
                    world.turn()
                world.check()
            except BaseException as error:
                error.add_note(f"replay with ISTER_SIM_SEED={seed}")
                raise
            finally:
                world.repair()
        crashes += world.crashes
    print(dict(crashes))
    assert all(crashes[point] for point in POINTS), "a step was never interrupted"
    wanted = ("lost answer", "bad row", "went on", "began anew", "swept", "left", "carried on")
    for what in (*wanted, "compacted", "restored", "copied", "other count"):
        assert crashes[what], f"not one: {what}"
