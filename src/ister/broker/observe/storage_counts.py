"""Counts each topic's local files and objects, in threads, and caches the counts.

Does not own: files and objects (`ister.wal`, `ister.bucket`), how they are shown (`observe.views`).

A topic may have a hundred thousand objects, a broker thousands of topics, and the dashboard asks
every two seconds. So a count continues where the last one ended, and starts over only now and then,
since objects are merged and expire behind it. Objects are listed up to a limit: the oldest, the
newest, and runs of neighbours between them.

Every call blocks and belongs into a thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Final

from ister.base.clock import Clock
from ister.base.model import JsonObject
from ister.bucket.catalog import Catalog
from ister.errors import UnavailableError
from ister.format.descriptor import ObjectDescriptor, count_messages
from ister.topic.describe import describe_descriptor
from ister.topic.topic import Topic

FILES_SHOWN: Final = 1000
"""The most files that are listed, the newest ones."""

_OLDEST_SHOWN: Final = 100
_NEWEST_SHOWN: Final = 300
_RUNS_MAX: Final = 256
# A count is valid for this long; a slow one for a multiple of the time it took.
_FRESH_SECONDS: Final = 1.0
_WHOLE_SECONDS: Final = 30.0
_WHOLE_TIMES: Final = 50
_COUNTS_HELD: Final = 10_000
_DETAILS_HELD: Final = 16
# A long count pauses between pages, for other threads.
_PAGE: Final = 256
_PAUSE_SECONDS: Final = 0.002
# A request waits no longer than this; the next one continues the count.
_COUNT_SECONDS_MAX: Final = 1.5
# A store that did not answer is not asked again for this long.
_SILENT_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Run:
    """Neighbouring objects, listed as one."""

    start: int
    end: int
    size_bytes: int
    messages: int
    objects: int

    def take(self, following: _Run) -> None:
        """Adds the next run to this one."""
        self.end = max(self.end, following.end)
        self.size_bytes += following.size_bytes
        self.messages += following.messages
        self.objects += following.objects


@dataclass(slots=True)
class ObjectCount:
    """The count of a topic's objects up to an offset."""

    objects: int = 0
    size_bytes: int = 0
    messages: int = 0
    start: int | None = None
    """The first offset of the oldest object; None without objects."""
    end: int = 0
    """Where the count continues."""
    at: float = -float("inf")
    """When it was last continued."""
    whole_at: float = -float("inf")
    """When it last started over."""
    seconds: float = 0.0
    """The time spent counting since then."""
    is_complete: bool = False
    """Whether it has reached the end."""
    oldest: list[ObjectDescriptor] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    newest: deque[ObjectDescriptor] = field(default_factory=deque)

    def add(self, described: ObjectDescriptor, *, with_details: bool) -> None:
        """Counts the next object."""
        self.objects += 1
        self.size_bytes += described.size_bytes
        self.messages += count_messages(described)
        self.start = described.start if self.start is None else self.start
        self.end = described.end
        if with_details:
            self.newest.append(described)
            if len(self.newest) > _NEWEST_SHOWN:
                self._put_away(self.newest.popleft())

    def copy(self) -> ObjectCount:
        """A copy to continue, while other threads read this one."""
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
    """The count of a topic, and the one that will replace it."""

    incarnation: str
    counted: ObjectCount
    anew: ObjectCount | None = None


def describe_objects(counted: ObjectCount, tiered: int = 0) -> list[JsonObject]:
    """A topic's objects in ascending order: descriptors without indexes, and runs of objects.

    A run has `merged_objects` and no `object_id`. `end_offset` is inclusive, as in a descriptor.
    Objects up to `tiered` that are not counted yet are a run of unknown size.
    """

    def describe_run(
        start: int, end: int, size: int | None, messages: int | None, objects: int | None
    ) -> JsonObject:
        return {
            "object_id": None,
            "start_offset": start,
            "end_offset": end - 1,
            "size": size,
            "messages": messages,
            "merged_objects": objects,
        }

    found = [describe_descriptor(one) for one in counted.oldest]
    found += [
        describe_run(run.start, run.end, run.size_bytes, run.messages, run.objects)
        for run in counted.runs
    ]
    found += [describe_descriptor(one) for one in counted.newest]
    if not counted.is_complete and tiered > counted.end:
        found.append(describe_run(counted.end, tiered, None, None, None))
    return found


class StorageCounts:
    """The counts of all topics. Thread-safe."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._counting: dict[str, threading.Lock] = {}
        self._counts: OrderedDict[str, _Known] = OrderedDict()
        self._details: OrderedDict[str, _Known] = OrderedDict()
        self._files: OrderedDict[str, tuple[float, tuple[int, int, int], int]] = OrderedDict()
        self._silence: tuple[float, UnavailableError] | None = None

    def end(self) -> None:
        """Ends running counts soon."""
        self._ending.set()

    def objects(
        self,
        name: str,
        incarnation: str,
        catalog: Catalog,
        *,
        tiered: int = 0,
        with_details: bool = False,
    ) -> ObjectCount:
        """Counts a topic's objects in the bucket.

        A cached count that ends before `tiered` is too old. `with_details` lists the objects too.
        """
        self._check_silence()
        with self._lock:
            # A count with details is a count.
            with_details = with_details or name in self._details
            held = self._details if with_details else self._counts
            counting = self._counting.setdefault(name, threading.Lock())
        with counting:
            # The thread before may have found that the store does not answer.
            self._check_silence()
            with self._lock:
                known = held.get(name)
            if known is None or known.incarnation != incarnation:
                known = _Known(incarnation, ObjectCount(whole_at=self._clock.monotonic()))
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
        """Continues the count, or starts over if it is due, within the time limit."""
        counted = known.counted
        is_old = now - counted.whole_at > max(_WHOLE_SECONDS, _WHOLE_TIMES * counted.seconds)
        # Small counts always start over, so they are never outdated.
        if counted.is_complete and (is_old or counted.objects < _PAGE):
            anew = known.anew if known.anew is not None else ObjectCount(whole_at=now)
            self._count(catalog, anew, with_details=with_details)
            # The old count stays until the new one is complete.
            known.counted, known.anew = (anew, None) if anew.is_complete else (counted, anew)
        if known.counted is counted:
            # Other threads may read the old count.
            known.counted = counted.copy()
            self._count(catalog, known.counted, with_details=with_details)

    def _check_silence(self) -> None:
        silence = self._silence
        if silence is not None and self._clock.monotonic() < silence[0]:
            raise silence[1].again()

    def _count(self, catalog: Catalog, counted: ObjectCount, *, with_details: bool) -> None:
        began = self._clock.monotonic()
        counted.is_complete = True
        for number, (described, _) in enumerate(catalog.descriptors(counted.end), 1):
            # Objects that are merged during the walk may appear twice.
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
        """The number and bytes of a topic's local files, cached for a moment."""
        mark = topic.wal.file_mark
        now = self._clock.monotonic()
        with self._lock:
            known = self._files.get(topic.name)
        if known is not None and known[1] == mark and now - known[0] < _WHOLE_SECONDS:
            return mark[0], known[2]
        size = sum(file.bytes for file in topic.local_files())
        with self._lock:
            self._files[topic.name] = (now, mark, size)
            self._files.move_to_end(topic.name)
            while len(self._files) > _COUNTS_HELD:
                self._files.popitem(last=False)
        return mark[0], size

    def forget(self, name: str) -> None:
        """Drops the counts of a topic."""
        with self._lock:
            for held in (self._counts, self._details, self._files):
                held.pop(name, None)
            self._counting.pop(name, None)
