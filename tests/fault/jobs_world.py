"""A small log that jobs of the pipeline work on, what has to be true of it, and who checks that.

    /jobs/a, /jobs/b    payloads of JSON, some of which is none
    /jobs/k             the same with keys, and messages without a payload that end them
    /jobs/r<n>          where replays go
    tables/<format>/…   a table for each topic, and one for what does not fit

Now and then a query has begun a batch of rows in `/jobs/k`, and is dead (`jobs_batch.py`).

`World` knows every message that was sent, which of `/jobs/k` are left, and which offsets each table
has. `Work` is a job with what it needs: something to do, arguments, and what is true when it was
killed, and when it is done. `WORKS` has them all, with the steps that each comes by.

Nothing is ever trimmed, so that local files can heal the bucket; what the bucket has is read
without them.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml
from deltalake import DeltaTable

import ister
from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.identity import BUCKET_KEY
from ister.bucket.names import STAGING_PREFIX, manifest_key, object_key, objects_prefix
from ister.bucket.pipeline import PipelineKeys
from ister.bucket.trust import TRUST_PREFIX
from ister.config import load_config
from ister.format.descriptor import FORMAT_FRAMES, ObjectDescriptor
from ister.format.frame import scan_frames
from ister.topic.history import BucketLog
from ister.topic.log import Log
from ister.topic.stores import open_metadata
from tests.fault.jobs_batch import OpenBatch, Sent
from tests.support.exports import (
    commit_nothing,
    forget_history,
    iceberg_catalog,
    offsets_in,
    roll_back,
    state_of,
    where,
)
from tests.support.grace import without_least_grace
from tests.support.scrub_faults import Patient

__all__ = ["KEYED", "LEASE_SECONDS", "PLAIN", "WORKS", "Step", "Work", "World"]

PLAIN = ("/jobs/a", "/jobs/b")
KEYED = "/jobs/k"
LEASE_SECONDS = 5

_HOUR_MS = 3_600_000
_KEYS = (None, *(f"key {number}" for number in range(12)))
_WAIT_SECONDS_MAX = 600.0
_LETTERS = "_dead_letters"
_FUNCTIONS = str(Path(__file__).resolve().parents[1] / "support" / "replay_functions.py")
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "text": {"type": "string"}},
}


class TableState(NamedTuple):
    """What the tables of a topic were once."""

    rows: int
    letters: int
    exported: frozenset[int]
    """The offsets that both had together."""


class World:
    """See the module header.

    Args:
        directory: An existing one.
        chance: Where all choices come from.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory = directory
        self.chance = chance
        self.tables = directory / "tables"
        self.config = self._save("ister.yml")
        self.copying = self._save("copying.yml", uploader={"finalize": "copy"})
        """The same, where objects get their names by a copy."""
        self.sweeping = self._save("sweeping.yml", cloud={"orphan_grace_minutes": 0})
        """The same, where nothing that is left is too young to be collected."""
        self._now_ms = SystemClock().now_ns() // 1_000_000
        self.sent: dict[str, list[Sent]] = {name: [] for name in (*PLAIN, KEYED)}
        self.kept: dict[int, bool] = {}
        """Of `/jobs/k`, what was looked at by a compaction: whether it is still there."""
        self.exported: dict[str, dict[str, set[int]]] = {}
        """By format and topic: the offsets that its table has."""
        self.states: dict[tuple[str, str], list[TableState]] = {}
        """By format and topic: states that its tables can be put back to."""
        self.rollbacks: Counter[str] = Counter()
        """By format: how often that was done, and how often a history was cleaned."""
        self.replays: dict[str, list[bytes]] = {}
        """The payloads that each target has."""
        self.batch: OpenBatch | None = None
        """Of a query that writes to `/jobs/k`, if its driver is dead."""
        self.batches: Counter[str] = Counter()
        """How many were begun and finished, and how many rows a dead driver has left."""
        self._log: Log | None = None
        self.send(uploads=chance.randint(1, 3))

    def _save(self, name: str, **sections: Mapping[str, object]) -> str:
        root = self.directory
        tree: dict[str, dict[str, object]] = {
            "wal": {
                "dir": str(root / "wal"),
                "rotate_max_bytes": 4096,
                "retention": {"time_minutes": None, "size_mb": None},
            },
            "uploader": {
                "engine": "none",
                "max_object_bytes": 4096,
                # Messages of all times are in one object.
                "max_object_seconds": 1_000_000,
                "index_every_messages": 5,
            },
            "cloud": {"backend": "fs", "root": str(root / "objects")},
            "metadata": {
                "path": str(root / "metadata.db"),
                "lease_ttl_seconds": LEASE_SECONDS,
            },
        }
        for section, values in sections.items():
            tree[section] |= values
        path = root / name
        path.write_text(yaml.safe_dump({"storage": tree}))
        return str(path)

    # -- the log ------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[Log]:
        """The log; the one that is open already, if there is one."""
        if self._log is not None:
            yield self._log
            return
        with self._open(self.config) as log:
            yield log

    @contextmanager
    def owned(self, is_open: bool) -> Iterator[None]:
        """Somebody has all topics open, if that is wanted."""
        if not is_open:
            yield
            return
        with self._open(self.config) as log:
            self._log = log
            try:
                for name in self.sent:
                    log.topic(name)
                yield
            finally:
                self._log = None

    def _open(self, config: str) -> Log:
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while True:
            try:
                return ister.open(config)
            except ister.DirectoryLockedError:
                assert time.monotonic() < deadline, "somebody keeps the log"
            time.sleep(0.01)

    def send(self, *, uploads: int = 0, topics: Sequence[str] = (*PLAIN, KEYED)) -> None:
        """New messages in each topic, and so many uploads between them.

        Without one they are all in the owner's files, and durable.
        """
        with self.opened() as log:
            for name in topics:
                topic = log.topic(name, create=True)
                for number in range(max(uploads, 1)):
                    for message in self._messages(name):
                        topic.append(
                            message.payload,
                            routing_key=message.key,
                            publish_time=message.time_ms,
                            producer_name="p",
                        )
                        self.sent[name].append(message)
                    topic.flush()
                    if number < uploads:
                        topic.upload()
                topic.wal.save_checkpoint()

    def turn_batch(self) -> None:
        """A query begins a batch of `/jobs/k` and dies, or goes on with it; or nothing happens."""
        if self.chance.random() < 0.5:
            return
        if self.batch is None:
            self.begin_batch()
        else:
            self.finish_batch()

    def begin_batch(self) -> None:
        """Some rows of a batch are in `/jobs/k`, and nothing says how many."""
        rows = self._messages(KEYED, least=6, most=15)
        number = self.batches["begun"]
        self.batch = OpenBatch(self.directory / "objects", KEYED, number, rows, self.chance)
        with self.opened() as log:
            self.batch.begin(log)
            log.topic(KEYED).flush()
            log.topic(KEYED).wal.save_checkpoint()
        self.sent[KEYED] += rows[: self.batch.have]
        self.batches["begun"] += 1
        self.batches["rows left"] += self.batch.have

    def finish_batch(self) -> None:
        """The next driver of the query: the batch is in, once and in its order."""
        batch, self.batch = self.batch, None
        if batch is None:
            return
        with self.opened() as log:
            first = batch.finish(log)
            assert first == len(self.sent[KEYED])
            self.sent[KEYED] += batch.rows[batch.have :]
            topic = log.topic(KEYED)
            topic.wal.save_checkpoint()
            end = topic.watermarks.next
            assert end == len(self.sent[KEYED])
            found = {message.offset: bytes(message.payload) for message in topic.read("earliest")}
        wanted = self.left_of_keyed(end)
        # The owner's files still have what a compaction took out of the bucket.
        assert wanted <= found.keys(), f"missing: {sorted(wanted - found.keys())}"
        strange = {o: p for o, p in found.items() if p != self.sent[KEYED][o].payload}
        assert not strange
        assert set(range(batch.start, end)) <= wanted, "rows of an open batch were removed"
        self.batches["finished"] += 1

    def held_back(self, end: int) -> set[int]:
        """The offsets up to `end` of `/jobs/k` that may be rows of the open batch."""
        return set(range(self.batch.start, end)) if self.batch is not None else set()

    def _messages(self, name: str, *, least: int = 20, most: int = 50) -> list[Sent]:
        chance, first = self.chance, len(self.sent[name])
        messages = []
        for number in range(first, first + chance.randint(least, most)):
            text = "x" * chance.randrange(100)
            payload = json.dumps({"n": number, "text": text}).encode()
            if number == first or chance.random() < 0.1:
                payload = b"" if name == KEYED else b"%d is not JSON" % number
            key = chance.choice(_KEYS) if name == KEYED else None
            # Far from the day's end that a tombstone has.
            hours = chance.choice((1, 2, 10, 30, 40))
            messages.append(Sent(payload, key, self._now_ms - hours * _HOUR_MS - number))
        return messages

    # -- what should be -------------------------------------------------------------------------

    def left_of_keyed(self, end: int) -> set[int]:
        """The offsets of `/jobs/k` up to `end` that are to be there."""
        return {offset for offset in range(end) if self.kept.get(offset, True)}

    def latest(self, end: int) -> set[int]:
        """The same after a compaction of everything up to `end`."""
        messages = self.sent[KEYED][:end]
        newest = {message.key: number for number, message in enumerate(messages)}
        before = self._now_ms - 24 * _HOUR_MS
        return {
            number
            for number, message in enumerate(messages)
            if message.key is None
            or (newest[message.key] == number and (message.payload or message.time_ms >= before))
        }

    def alive(self, name: str, end: int) -> set[int]:
        """The offsets of a topic up to `end`."""
        return self.left_of_keyed(end) if name == KEYED else set(range(end))

    # -- what is --------------------------------------------------------------------------------

    def patient(self, name: str) -> Patient:
        """A topic to plant faults in."""
        return Patient(self.config, self.directory / "objects", name)

    def descriptors(self, name: str) -> list[ObjectDescriptor]:
        """A topic's objects."""
        with ister.open_bucket(self.config) as history:
            return [found for found, _ in history.topic(name).catalog.descriptors()]

    def offsets_in_bucket(self, name: str) -> set[int]:
        """The offsets of a topic's messages that the bucket has."""
        with ister.open_bucket(self.config) as history:
            rows = history.topic(name).read_arrow(columns=("offset",)).read_all()
        return set(rows["offset"].to_pylist())

    def tiered(self, name: str) -> int:
        """How far the bucket has a topic."""
        return max((found.end for found in self.descriptors(name)), default=0)

    def check(self, *, hurt: Iterable[str] = (), keyed: tuple[set[int], set[int]] | None = None):
        """Every topic reads as it should, from the bucket and as a whole.

        Args:
            hurt: Topics that somebody has planted faults in: only as a whole.
            keyed: What has to be in `/jobs/k` at least, and at most, if a job was killed that
                removes messages.
        """
        with ister.open_bucket(self.config) as history:
            for name in sorted(set(self.sent) - set(hurt)):
                self._check_bucket(history, name, keyed)
        with self.opened() as log:
            for name in PLAIN:
                self._check_payloads(log, name, [sent.payload for sent in self.sent[name]])
            for name, payloads in self.replays.items():
                self._check_payloads(log, name, payloads)

    def _check_bucket(
        self, history: BucketLog, name: str, keyed: tuple[set[int], set[int]] | None
    ) -> None:
        topic = history.topic(name)
        found = [described for described, _ in topic.catalog.descriptors()]
        if not found:
            return
        assert found[0].start == 0, f"{name} begins with {found[0].start}"
        for before, after in pairwise(found):
            assert before.end == after.start, f"{name}: {before.object_id}, {after.object_id}"
        for described in found:
            info = history.objects.stat(object_key(TopicName.parse(name), described.object_id))
            assert info.size == described.size_bytes, described
        end = found[-1].end
        assert end <= len(self.sent[name])
        rows = topic.read_arrow().read_all().select(["offset", "payload"]).to_pylist()
        offsets = [row["offset"] for row in rows]
        assert offsets == sorted(set(offsets)), f"{name}: doubled or out of order"
        least = most = self.alive(name, end)
        if name == KEYED and keyed is not None:
            least, most = keyed
        assert least <= set(offsets) <= most, (
            f"{name}: missing {sorted(least - set(offsets))[:9]}, "
            f"too many {sorted(set(offsets) - most)[:9]}"
        )
        wrong = [row["offset"] for row in rows if row["payload"] != self._payload(name, row)]
        assert not wrong, f"{name}: other payloads at {wrong[:9]}"

    def _payload(self, name: str, row: Mapping[str, Any]) -> bytes:
        return self.sent[name][row["offset"]].payload

    @staticmethod
    def _check_payloads(log: Log, name: str, payloads: list[bytes]) -> None:
        found = [bytes(message.payload) for message in log.topic(name).read("earliest")]
        assert found == payloads, f"{name}: {len(found)} messages, not {len(payloads)}"

    # -- tables ---------------------------------------------------------------------------------

    def table(self, format: str, name: str, *, letters: bool = False) -> list[int]:
        """The offsets of a table's rows; none if there is no table."""
        short = TopicName.parse(name).topic + ("_dead_letters" if letters else "")
        place = where(self.tables, format, short)
        if format == "delta" and not DeltaTable.is_deltatable(place):
            return []
        if format == "iceberg" and not self._has_iceberg(short):
            return []
        return offsets_in(self.tables, format, short)

    def _has_iceberg(self, short: str) -> bool:
        if not (self.tables / "iceberg" / "catalog.db").exists():
            return False
        with iceberg_catalog(self.tables) as catalog:
            return catalog.table_exists(f"default.{short}")

    def check_table(self, format: str, name: str, least: set[int], most: set[int]) -> None:
        """A table has these offsets, each once: what fits in it, the rest with the dead letters."""
        for letters in (False, True):
            found = self.table(format, name, letters=letters)
            assert len(found) == len(set(found)), f"{format} {name}: offsets are doubled"
            low, high = (
                {offset for offset in some if self.sent[name][offset].fits is not letters}
                for some in (least, most)
            )
            assert low <= set(found) <= high, (
                f"{format} {name}, dead letters {letters}: missing {sorted(low - set(found))[:9]}, "
                f"too many {sorted(set(found) - high)[:9]}"
            )
            if low == high:
                assert (len(found), sum(found)) == (len(low), sum(low))

    def remember_tables(self, format: str) -> None:
        """Notes what state tables are in, to put them back to."""
        if format == "parquet":
            return  # it has one state
        for name, offsets in self.exported[format].items():
            short = TopicName.parse(name).topic
            rows = state_of(self.tables, format, short)
            letters = state_of(self.tables, format, short + _LETTERS)
            if rows is not None and letters is not None:
                state = TableState(rows, letters, frozenset(offsets))
                self.states.setdefault((format, name), []).append(state)

    def roll_back_some(self, format: str) -> None:
        """Somebody puts tables back to what they were once, rows and dead letters together."""
        for name, offsets in self.exported[format].items():
            states = self.states.get((format, name))
            if not states or self.chance.random() < 0.4:
                continue
            state = self.chance.choice(states)
            short = TopicName.parse(name).topic
            roll_back(self.tables, format, state.rows, short)
            roll_back(self.tables, format, state.letters, short + _LETTERS)
            self.rollbacks[f"{format} rollbacks"] += 1
            self.rollbacks[f"{format} offsets rolled back"] += len(offsets - state.exported)
            self.exported[format][name] = set(state.exported)
            self.check_table(format, name, set(state.exported), set(state.exported))

    def clean_some(self, format: str) -> None:
        """Somebody else commits to tables, and then their upkeep forgets what they were."""
        for name in self.exported[format]:
            if (format, name) not in self.states or self.chance.random() < 0.5:
                continue
            for table in (TopicName.parse(name).topic, TopicName.parse(name).topic + _LETTERS):
                for _ in range(self.chance.randint(0, 2)):
                    commit_nothing(self.tables, format, table)
                forget_history(self.tables, format, table)
            del self.states[format, name]
            self.rollbacks[f"{format} histories cleaned"] += 1

    # -- leftovers ------------------------------------------------------------------------------

    def wait_for_leases(self) -> None:
        """Returns when nobody has anything that ends with a lease."""
        config = load_config(self.config).storage.metadata
        keys = PipelineKeys(config.root_prefix)
        store = open_metadata(config, SystemClock(), read_only=True)
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        try:
            while (
                keys.has_jobs(store)
                or store.range(keys.export(""), limit=1)
                or store.get(keys.gc) is not None
            ):
                assert time.monotonic() < deadline, "a dead job keeps its lease"
                time.sleep(0.05)
        finally:
            store.close()

    def sweep(self) -> dict[str, int]:
        """Collects what deaths have left, and then there is nothing that nobody names; figures."""
        self.wait_for_leases()
        collected = 0
        with self._open(self.sweeping) as log, without_least_grace():
            # A file's time is not finer than this, and "old" begins now.
            time.sleep(0.02)
            for name in (*self.sent, *self.replays):
                bucket = log.topic(name).bucket
                collected += len(bucket.retention.collect_orphans()) + len(
                    bucket.retention.collect_shared_staging()
                )
            stale = log.stores.objects.remove_stale_parts(0)
            staged = [info.key for info in log.stores.objects.list(STAGING_PREFIX)]
        assert not staged, f"staged files that nobody removes: {staged}"
        named = {BUCKET_KEY}
        for name in (*self.sent, *self.replays):
            topic = TopicName.parse(name)
            prefix = objects_prefix(topic)
            named.add(manifest_key(topic))
            named.update(prefix + found.object_id for found in self.descriptors(name))
        bucket = self.directory / "objects"
        there = {str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()}
        # What the bucket remembers of owners and of the metadata store.
        there = {key for key in there if "/terms/" not in key and not key.startswith(TRUST_PREFIX)}
        assert there == named, f"left: {sorted(there - named)}, gone: {sorted(named - there)}"
        return {"objects": len(named), "collected": collected, "stale_parts": stale}

    def age_tables(self) -> None:
        """Two days go by for whatever dead exports have left in directories of Parquet."""
        then = time.time() - 2 * 86_400
        for path in (self.tables / "parquet").rglob("*"):
            if path.is_file():
                os.utime(path, (then, then))

    def check_files_of_tables(self) -> int:
        """Every file of every table is named by it, or is for the table's own cleaning.

        Returns:
            How many of the latter there are.
        """
        strangers = 0
        for kind, topics in self.exported.items():
            for name in topics:
                for letters in ("", "_dead_letters"):
                    short = TopicName.parse(name).topic + letters
                    strangers += self._strangers(kind, short)
        return strangers

    def _strangers(self, format: str, short: str) -> int:
        place = Path(where(self.tables, format, short))
        there = _data_files(place)
        if format == "parquet":
            names = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
            kept = ("publish_date=", "_ister/commits/", "_ister/published/")
            left = [name for name in names if not name.startswith(kept)]
            assert not left, f"left behind in {place}: {left}"
            return 0
        if format == "delta":
            table = DeltaTable(str(place))
            named = {Path(path.removeprefix("file://")) for path in table.file_uris()}
            assert named <= there
            count = len(there - named)
            # "Lite", its default, looks only at what the log has removed.
            table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
            assert _data_files(place) == named
            return count
        with iceberg_catalog(self.tables) as catalog:
            tasks = catalog.load_table(f"default.{short}").scan().plan_files()
            named = {Path(task.file.file_path.removeprefix("file://")) for task in tasks}
        files = set((self.tables / "iceberg").rglob(f"{short}/data/**/*.parquet"))
        assert named <= files
        return len(files - named)


def _data_files(place: Path) -> set[Path]:
    """The Parquet files of a table; a cleaned history of Delta has one of its own in its log."""
    found = (path for path in place.rglob("*.parquet") if "_delta_log" not in path.parts)
    return {path for path in found if path.is_file()}


# -- jobs -------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Where something dies."""

    work: str
    """The name of a `Work`."""
    point: str
    visits: int
    """It may come by that often, for certain."""
    is_task: bool


class Work:
    """A job that has something to do."""

    job: ClassVar[str]
    is_alone: ClassVar[bool] = False
    """Nobody else may have the log open."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def config(self) -> str:
        """Where it works."""
        return self.world.config

    def prepare(self) -> None:
        """Gives it something to do."""
        raise NotImplementedError

    def arguments(self) -> dict[str, object]:
        """What it is called with, besides where it works."""
        return {}

    def check_killed(self) -> None:
        """What is true whenever it was killed."""
        self.world.check()

    def check_done(self, report: Mapping[str, Any]) -> None:
        """What is true once it is done; may be called again after it was run again."""
        assert report["ok"], report["errors"]
        self.world.check()


class Tier(Work):
    """Everything gets into the bucket."""

    job = "tier"

    def prepare(self) -> None:
        self.world.send()

    def check_done(self, report: Mapping[str, Any]) -> None:
        super().check_done(report)
        for name, sent in self.world.sent.items():
            assert self.world.tiered(name) == len(sent), name


class TierByCopy(Tier):
    """The same with objects that are copied to their names."""

    @property
    def config(self) -> str:
        return self.world.copying


class Compact(Work):
    """Small objects become large ones."""

    job = "compact"
    format: ClassVar[str] = "dnb1"

    def prepare(self) -> None:
        self.world.send(uploads=3, topics=PLAIN)
        self._before = {name: len(self.world.descriptors(name)) for name in PLAIN}

    def arguments(self) -> dict[str, object]:
        return {
            "topics": list(PLAIN),
            "format": self.format,
            "min_objects": 2,
            "target_mb": 1,
            "grace_minutes": 0,
        }

    def check_done(self, report: Mapping[str, Any]) -> None:
        super().check_done(report)
        for name, before in self._before.items():
            found = self.world.descriptors(name)
            assert len(found) < before, f"{name} still has {len(found)} objects"


class CompactToParquet(Compact):
    """The same, as Parquet."""

    format = "parquet"


class CompactByKey(Work):
    """The latest message of each key is left."""

    job = "compact"

    def prepare(self) -> None:
        self.world.send(uploads=3, topics=[KEYED])
        end = self.world.tiered(KEYED)
        self._before = self.world.left_of_keyed(end)
        self._wanted = self.world.latest(end) | self.world.held_back(end)

    def arguments(self) -> dict[str, object]:
        return {
            "topics": [KEYED],
            "format": "parquet",
            "keep": "latest-per-key",
            "min_objects": 2,
            "target_mb": 1,
            "grace_minutes": 0,
            "tombstone_hours": 24,
        }

    def check_killed(self) -> None:
        self.world.check(keyed=(self._wanted, self._before))

    def check_done(self, report: Mapping[str, Any]) -> None:
        world, end = self.world, self.world.tiered(KEYED)
        if world.batch is None:
            left = self._wanted
        else:
            # Objects that end above its start lose nothing, whatever else they have.
            left = world.offsets_in_bucket(KEYED)
            assert self._wanted <= left <= self._before, "the wrong messages were removed"
        world.kept = {offset: offset in left for offset in range(end)}
        super().check_done(report)


class Export(Work):
    """Every offset gets into a table, once."""

    job = "export"
    format: ClassVar[str]

    def prepare(self) -> None:
        world = self.world
        self._tail = world.chance.random() < 0.3
        world.send(uploads=0 if self._tail else world.chance.randint(1, 2))
        world.exported.setdefault(self.format, {name: set() for name in world.sent})
        if world.chance.random() < 0.4:
            world.roll_back_some(self.format)
        self._expect()

    def _expect(self) -> None:
        """Works out what has to be in the tables when it is done."""
        world = self.world
        known = world.exported[self.format]
        self._before = {name: set(offsets) for name, offsets in known.items()}
        self._after = {}
        for name, before in self._before.items():
            end = len(world.sent[name]) if self._tail else world.tiered(name)
            # What was exported stays in the table when a compaction removes it from the topic.
            first = max(before, default=-1) + 1
            new = {offset for offset in world.alive(name, end) if offset >= first}
            self._after[name] = before | new

    def arguments(self) -> dict[str, object]:
        return {
            "topics": sorted(self.world.sent),
            "to": where(self.world.tables, self.format, "{topic}"),
            "format": self.format,
            "schema": _SCHEMA,
            "include_tail": self._tail,
        }

    def check_killed(self) -> None:
        super().check_killed()
        for name, before in self._before.items():
            self.world.check_table(self.format, name, before, self._after[name])
        if self.world.chance.random() < 0.3:
            # The next run begins with other tables than the dead one has left.
            self.world.roll_back_some(self.format)
            self._expect()

    def check_done(self, report: Mapping[str, Any]) -> None:
        super().check_done(report)
        self.world.exported[self.format] = self._after
        for name, after in self._after.items():
            self.world.check_table(self.format, name, after, after)
        self.world.remember_tables(self.format)
        if self.world.chance.random() < 0.2:
            self.world.clean_some(self.format)


class ExportToParquet(Export):
    """A directory."""

    format = "parquet"


class ExportToIceberg(Export):
    """A table in a catalog."""

    format = "iceberg"


class ExportToDelta(Export):
    """A table with a log."""

    format = "delta"


class Scrub(Work):
    """Faults are planted, and healed."""

    job = "scrub"
    is_alone = True

    def prepare(self) -> None:
        self.world.send(uploads=3, topics=PLAIN)
        for name in PLAIN:
            self._plant(name)

    def _plant(self, name: str) -> None:
        chance, patient = self.world.chance, self.world.patient(name)
        # Not the last one: that nobody has it yet is no fault.
        found = patient.descriptors()[:-1]
        frames = [one for one in found if one.format == FORMAT_FRAMES and one.end - one.start > 2]
        chance.shuffle(frames)
        kinds = [self._flip, Patient.lose, Patient.forget, self._shorten, self._overlap]
        chance.shuffle(kinds)
        hurt: list[ObjectDescriptor] = []
        for described in frames:
            beside = any(
                described.start in (o.end, o.start) or described.end == o.start for o in hurt
            )
            if kinds and not beside:
                kinds.pop()(patient, described)
                hurt.append(described)
        assert hurt, f"nothing to plant a fault in: {found}"

    @staticmethod
    def _flip(patient: Patient, described: ObjectDescriptor) -> None:
        data = patient.path(described.object_id).read_bytes()
        starts = scan_frames(data, expected_offset=described.start).starts
        patient.flip_bit(described, starts[1] + 20)

    @staticmethod
    def _shorten(patient: Patient, described: ObjectDescriptor) -> None:
        patient.truncate(described, described.size_bytes - 10)

    @staticmethod
    def _overlap(patient: Patient, described: ObjectDescriptor) -> None:
        patient.put(patient.overlap(described, 1))

    def arguments(self) -> dict[str, object]:
        return {"topics": list(PLAIN), "repair": True}

    def check_killed(self) -> None:
        self.world.check(hurt=PLAIN)


class Gc(Work):
    """Copies that nobody names go, and nothing else does."""

    job = "gc"
    is_alone = True
    _TAGS: ClassVar = ("0123abcd", "4567abcd")

    @property
    def config(self) -> str:
        return self.world.sweeping

    def prepare(self) -> None:
        self.world.send(uploads=2, topics=PLAIN)
        for name in PLAIN:
            patient = self.world.patient(name)
            # Not of the last one: other works may leave one ahead of it.
            described = self.world.chance.choice(patient.descriptors()[:-1])
            for tag in self._TAGS:
                patient.copy(described, tag)

    def arguments(self) -> dict[str, object]:
        return {"topics": list(PLAIN)}

    def check_done(self, report: Mapping[str, Any]) -> None:
        super().check_done(report)
        for name in PLAIN:
            left = [path.name for path in self._copies(name)]
            assert not left, f"{name} still has {left}"

    def _copies(self, name: str) -> list[Path]:
        folder = self.world.directory / "objects" / objects_prefix(TopicName.parse(name))
        named = {one.object_id for one in self.world.descriptors(name)}
        tagged = [path for tag in self._TAGS for path in folder.glob(f"*-c{tag}.*")]
        return [path for path in tagged if path.name not in named]


class Replay(Work):
    """A topic gets into another one, once and in its order."""

    job = "replay"
    is_alone = True

    def prepare(self) -> None:
        world = self.world
        self._source = world.chance.choice(PLAIN)
        world.send(uploads=world.chance.randint(0, 1), topics=[self._source])
        self._target = f"/jobs/r{len(world.replays)}"
        self._is_halved = world.chance.random() < 0.5
        payloads = [sent.payload for sent in world.sent[self._source]]
        self._wanted = payloads[::2] if self._is_halved else payloads

    def arguments(self) -> dict[str, object]:
        return {
            "source": self._source,
            "target": self._target,
            "transform": f"{_FUNCTIONS}:only_even" if self._is_halved else None,
            "chunk_bytes": 1500,
        }

    def check_killed(self) -> None:
        super().check_killed()
        with self.world.opened() as log:
            if self._target in log.topics():
                read = log.topic(self._target).read("earliest")
                found = [bytes(message.payload) for message in read]
                assert found == self._wanted[: len(found)], f"{self._target}: not a part of it"

    def check_done(self, report: Mapping[str, Any]) -> None:
        self.world.replays[self._target] = self._wanted
        super().check_done(report)


WORKS: dict[str, type[Work]] = {
    "tier": Tier,
    "tier by copy": TierByCopy,
    "compact": Compact,
    "compact to parquet": CompactToParquet,
    "compact by key": CompactByKey,
    "export to parquet": ExportToParquet,
    "export to iceberg": ExportToIceberg,
    "export to delta": ExportToDelta,
    "gc": Gc,
    "scrub": Scrub,
    "replay": Replay,
}
