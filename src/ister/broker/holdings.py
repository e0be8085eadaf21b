"""What each topic holds: its local files and its objects, counted in threads and remembered.

Owns: the counts, and how old they may become. Does not own: files and objects (`ister.wal`,
`ister.tier`), how they are shown (`ister.broker.views`).

A topic may have a hundred thousand objects, and a broker thousands of topics, and somebody asks
every two seconds. So a topic is counted from where its count ended; all of it only now and then:
objects are merged and expire behind the count. What is told about objects one by one is bounded:
the oldest, the newest, and runs of neighbours between them.

Everything here blocks, and is called in threads.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ister.clock import Clock
from ister.errors import NotFoundError, UnavailableError
from ister.format.descriptor import ObjectDescriptor, count_messages, encode_descriptor
from ister.tier.catalog import Catalog
from ister.topic.topic import Topic
from ister.wal.directory import format_log_name

__all__ = ["FILES_SHOWN", "Counted", "Holdings", "count_files", "describe_objects"]

FILES_SHOWN: Final = 1000
"""Of more files than this, the newest are told of."""

_OLDEST_SHOWN: Final = 100
_NEWEST_SHOWN: Final = 300
_RUNS_MAX: Final = 256
# A count is as good as new for so long; one that took long, for so many times as long.
_FRESH_SECONDS: Final = 1.0
_WHOLE_SECONDS: Final = 30.0
_WHOLE_TIMES: Final = 50
_COUNTS_HELD: Final = 10_000
_DETAILS_HELD: Final = 16
# Others get a turn between the pages of a long count.
_PAGE: Final = 256
_PAUSE_SECONDS: Final = 0.002
# Whoever asks waits no longer than this, and sees the rest the next time.
_COUNT_SECONDS_MAX: Final = 1.5
# A store that did not answer is not asked for so long: each question would wait for its time.
_SILENT_SECONDS: Final = 5.0
_INDEX_FIELDS: Final = ("offset_index", "publish_time_index")


@dataclass(slots=True)
class _Run:
    """Objects that follow each other, told of as one."""

    start: int
    end: int
    size_bytes: int
    messages: int
    objects: int

    def take(self, following: _Run) -> None:
        """Becomes both."""
        self.end = max(self.end, following.end)
        self.size_bytes += following.size_bytes
        self.messages += following.messages
        self.objects += following.objects


@dataclass(slots=True)
class Counted:
    """A topic's objects up to an offset."""

    objects: int = 0
    size_bytes: int = 0
    messages: int = 0
    start: int | None = None
    """Where the oldest one begins; None if there is none."""
    end: int = 0
    """Where the count goes on."""
    at: float = -float("inf")
    """When it was brought up to date."""
    whole_at: float = -float("inf")
    """When it was last begun anew."""
    seconds: float = 0.0
    """How long it has taken since."""
    is_complete: bool = False
    """Whether it has come to the end; else there are more objects than could be counted yet."""
    oldest: list[ObjectDescriptor] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    newest: deque[ObjectDescriptor] = field(default_factory=deque)

    def add(self, described: ObjectDescriptor, *, with_details: bool) -> None:
        """Counts one more, which lies behind all others."""
        self.objects += 1
        self.size_bytes += described.size_bytes
        self.messages += count_messages(described)
        self.start = described.start if self.start is None else self.start
        self.end = described.end
        if with_details:
            self.newest.append(described)
            if len(self.newest) > _NEWEST_SHOWN:
                self._put_away(self.newest.popleft())

    def copy(self) -> Counted:
        """One that can be counted on while others look at this one."""
        return replace(
            self,
            oldest=list(self.oldest),
            runs=[replace(run) for run in self.runs],
            newest=deque(self.newest),
        )

    def _put_away(self, described: ObjectDescriptor) -> None:
        if len(self.oldest) < _OLDEST_SHOWN:
            self.oldest.append(described)
            return
        self.runs.append(
            _Run(
                described.start,
                described.end,
                described.size_bytes,
                count_messages(described),
                1,
            )
        )
        if len(self.runs) > 2 * _RUNS_MAX:
            merged = self.runs[::2]
            for run, following in zip(merged, self.runs[1::2], strict=False):
                run.take(following)
            self.runs = merged


@dataclass(slots=True)
class _Known:
    """The count of one topic, and the one that is to take its place."""

    incarnation: str
    counted: Counted
    anew: Counted | None = None


def describe_objects(counted: Counted, tiered: int = 0) -> list[dict[str, Any]]:
    """A topic's objects, ascending: descriptors without their index, and runs of many.

    A run has `merged_objects`, and no `object_id`. `end_offset` is inclusive, as in a descriptor.
    What is not counted yet, up to `tiered`, is a run of an unknown number.
    """
    rest: list[dict[str, Any]] = []
    if not counted.is_complete and tiered > counted.end:
        rest.append(
            {
                "object_id": None,
                "start_offset": counted.end,
                "end_offset": tiered - 1,
                "size": None,
                "messages": None,
                "merged_objects": None,
            }
        )
    return [
        *(_as_json(one) for one in counted.oldest),
        *(
            {
                "object_id": None,
                "start_offset": run.start,
                "end_offset": run.end - 1,
                "size": run.size_bytes,
                "messages": run.messages,
                "merged_objects": run.objects,
            }
            for run in counted.runs
        ),
        *(_as_json(one) for one in counted.newest),
        *rest,
    ]


def _as_json(described: ObjectDescriptor) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode_descriptor(described))
    for name in _INDEX_FIELDS:
        fields.pop(name, None)
    return fields


def count_files(topic: Topic) -> list[dict[str, Any]]:
    """A topic's local files, ascending."""
    wal = topic.wal
    directory, files, end = wal.directory, wal.files, wal.written
    if directory is None:
        return []
    found: list[dict[str, Any]] = []
    for at, file in enumerate(files):
        is_active = at == len(files) - 1
        try:
            handle = directory.fs.open_read(directory.log_path(file.seq))
        except NotFoundError:
            continue  # trimmed meanwhile, or not written yet
        try:
            size = handle.size()
        finally:
            handle.close()
        found.append(
            {
                "name": format_log_name(file.seq),
                "first_offset": file.first_offset,
                "next_offset": max(end, file.first_offset)
                if is_active
                else files[at + 1].first_offset,
                "bytes": size,
                "is_active": is_active,
            }
        )
    return found


class Holdings:
    """The counts of all topics; see the module header. Thread-safe."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._counting: dict[str, threading.Lock] = {}
        self._counts: OrderedDict[str, _Known] = OrderedDict()
        self._details: OrderedDict[str, _Known] = OrderedDict()
        self._files: OrderedDict[str, tuple[float, tuple[int, int], int]] = OrderedDict()
        self._silence: tuple[float, UnavailableError] | None = None

    def end(self) -> None:
        """Has counts under way end soon."""
        self._ending.set()

    def objects(
        self,
        name: str,
        incarnation: str,
        catalog: Catalog,
        *,
        tiered: int = 0,
        with_details: bool = False,
    ) -> Counted:
        """What a topic has in the bucket.

        Args:
            name: The topic's.
            incarnation: Which topic of that name.
            catalog: Where its objects are written down.
            tiered: How far they reach at least: a count that does not is too old.
            with_details: Whether they are to be told of one by one, too.

        Raises:
            UnavailableError: The metadata store does not answer.
            CorruptDataError: A descriptor is damaged.
        """
        self._check_silence()
        with self._lock:
            # Whoever has counted with details has counted.
            with_details = with_details or name in self._details
            held = self._details if with_details else self._counts
            counting = self._counting.setdefault(name, threading.Lock())
        with counting:
            # Whoever had it before may have found out that the store is silent.
            self._check_silence()
            with self._lock:
                known = held.get(name)
            if known is None or known.incarnation != incarnation:
                known = _Known(incarnation, Counted(whole_at=self._clock.monotonic()))
            now = self._clock.monotonic()
            if now - known.counted.at < _FRESH_SECONDS and known.counted.end >= tiered:
                return known.counted
            try:
                self._bring_up(catalog, known, now, with_details=with_details)
            except UnavailableError as error:
                self._silence = (self._clock.monotonic() + _SILENT_SECONDS, error)
                raise
            with self._lock:
                held[name] = known
                held.move_to_end(name)
                while len(held) > (_DETAILS_HELD if with_details else _COUNTS_HELD):
                    gone, _ = held.popitem(last=False)
                    self._counting.pop(gone, None)
            return known.counted

    def _bring_up(self, catalog: Catalog, known: _Known, now: float, *, with_details: bool) -> None:
        """Counts on, and from the beginning where that is due, for as long as one may wait."""
        counted = known.counted
        is_old = now - counted.whole_at > max(_WHOLE_SECONDS, _WHOLE_TIMES * counted.seconds)
        # A few are read again each time: nothing is told that has changed meanwhile.
        if counted.is_complete and (is_old or counted.objects < _PAGE):
            anew = known.anew if known.anew is not None else Counted(whole_at=now)
            self._count(catalog, anew, with_details=with_details)
            # Until it has come to the end, the old one is better.
            known.counted, known.anew = (anew, None) if anew.is_complete else (counted, anew)
        if known.counted is counted:
            # Others may look at the one before.
            known.counted = counted.copy()
            self._count(catalog, known.counted, with_details=with_details)

    def _check_silence(self) -> None:
        silence = self._silence
        if silence is not None and self._clock.monotonic() < silence[0]:
            raise silence[1].again()

    def _count(self, catalog: Catalog, counted: Counted, *, with_details: bool) -> None:
        began = self._clock.monotonic()
        counted.is_complete = True
        for number, (described, _) in enumerate(catalog.descriptors(counted.end), 1):
            # Objects that are merged under the walk may come as they were, and merged.
            if described.start >= counted.end or not counted.objects:
                counted.add(described, with_details=with_details)
            if number % _PAGE:
                continue
            is_ending = self._ending.wait(_PAUSE_SECONDS)
            if is_ending or self._clock.monotonic() - began > _COUNT_SECONDS_MAX:
                counted.is_complete = False
                break
        counted.at = self._clock.monotonic()
        counted.seconds += counted.at - began

    def files(self, topic: Topic) -> tuple[int, int]:
        """How many local files a topic has, and their bytes, as of a moment ago."""
        wal = topic.wal
        last = wal.files[-1].seq if wal.files else 0
        mark = (last, wal.written)
        now = self._clock.monotonic()
        with self._lock:
            known = self._files.get(topic.name)
        if known is not None and known[1] == mark and now - known[0] < _WHOLE_SECONDS:
            return len(wal.files), known[2]
        size = sum(file["bytes"] for file in count_files(topic))
        with self._lock:
            self._files[topic.name] = (now, mark, size)
            self._files.move_to_end(topic.name)
            while len(self._files) > _COUNTS_HELD:
                self._files.popitem(last=False)
        return len(wal.files), size

    def forget(self, name: str) -> None:
        """Drops what is known of a topic."""
        with self._lock:
            for held in (self._counts, self._details, self._files):
                held.pop(name, None)
            self._counting.pop(name, None)
