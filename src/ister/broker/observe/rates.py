"""Rates of all topics: their counters are sampled regularly, and the last minutes are kept.

Owns: samples, the rates between two of them, the rings that keep them, the means that are kept for
an hour and a day. Does not own: what is counted (`topics.served_topic`), how it is shown
(`ister.broker.observe.views`).

A sample reads a few numbers of each topic that are in memory, and nothing else: no file, no store.
Thousands of topics are sampled in parts, so that calls are answered in between. An unused topic has
no ring, and costs a comparison.

Everything is in memory and starts empty: Prometheus is for longer, and for restarts. The hour and
the day are kept of all topics together and of at most `TOPICS_MAX` topics; an active topic takes
the place of the topic that was inactive for longest.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Final

from ister.base import threads
from ister.base.clock import Clock
from ister.base.model import JsonObject
from ister.base.partitions import base_of_partition
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import Topics
from ister.errors import InvalidRequestError

EVERY_SECONDS: Final = 2.0
"""From one sample to the next."""
POINTS: Final = 150
"""How many are kept: five minutes."""
TOPICS_MAX: Final = 256
"""Topics whose hour and day are kept."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The points of one window."""

    seconds: int
    """From one point to the next."""
    points: int
    """How many are kept."""


MINUTES: Final = Interval(round(EVERY_SECONDS), POINTS)
HOUR: Final = Interval(20, 180)
DAY: Final = Interval(480, 180)
WINDOWS: Final = {"5m": MINUTES, "1h": HOUR, "1d": DAY}
"""What can be shown: the last five minutes, hour or day."""

_RATE_POINTS: Final = 5
_TOPICS_AT_ONCE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Messages and bytes a second, over the last ten seconds or so."""

    messages_in: float = 0.0
    bytes_in: float = 0.0
    messages_out: float = 0.0
    bytes_out: float = 0.0

    def as_json(self) -> dict[str, float]:
        """The rates as a JSON object."""
        return {item.name: round(getattr(self, item.name), 2) for item in fields(self)}


@dataclass(slots=True, kw_only=True)
class OpenTotals:
    """Totals of all topics that are open here."""

    topics: int = 0
    producers: int = 0
    consumers: int = 0
    subscriptions: int = 0
    messages: int = 0
    lag_messages: int = 0
    upload_lag_bytes: int = 0


def parse_window(text: str) -> Interval:
    """A window by its name."""
    window = WINDOWS.get(text)
    if window is None:
        raise InvalidRequestError(f"invalid window {text[:40]!r}: use {', '.join(WINDOWS)}")
    return window


# Of a point: messages in, messages out and bytes in a second, lag, upload lag, bytes out a second.
_VALUES: Final = 6
_WIDTH: Final = 2 + _VALUES


class _Ring:
    """The last points of one thing, in the order of time: means of the samples of an interval.

    A point is its time in seconds, how many samples it is of, and `_VALUES` numbers.
    """

    __slots__ = ("_at", "_count", "_interval", "_numbers")

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._numbers = array("d", bytes(8 * _WIDTH * interval.points))
        self._at = 0
        self._count = 0

    def add(self, now: float, values: Sequence[float]) -> None:
        """Adds a sample. One of the last minutes is a point of its own."""
        seconds = self._interval.seconds
        time = now if self._interval is MINUTES else now // seconds * seconds
        last = self.last(1)
        count = 1.0
        if last and last[0][0] == time:
            count, known = last[0][1] + 1, last[0][2:]
            values = [mean + (new - mean) / count for mean, new in zip(known, values, strict=True)]
        else:
            self._at = (self._at + 1) % self._interval.points
            self._count = min(self._count + 1, self._interval.points)
        start = self._at * _WIDTH
        self._numbers[start : start + _WIDTH] = array("d", (time, count, *values))

    def last(self, count: int) -> list[list[float]]:
        """The last `count` points, or as many as there are."""
        found = []
        for back in range(min(count, self._count) - 1, -1, -1):
            start = (self._at - back) % self._interval.points * _WIDTH
            found.append(list(self._numbers[start : start + _WIDTH]))
        return found

    def read(self, now: float) -> list[list[float]]:
        """The points of the window that ends now."""
        if self._interval is MINUTES:
            return self.last(self._interval.points)
        seconds = self._interval.seconds
        oldest = (now // seconds - self._interval.points + 1) * seconds
        return [one for one in self.last(self._interval.points) if one[0] >= oldest]


class _Watched:
    """One topic as it was at the last sample."""

    __slots__ = ("counted", "idle_looks", "ring", "topic")

    def __init__(self, topic: ServedTopic, counted: tuple[int, ...], ring: _Ring | None) -> None:
        self.topic = topic
        self.counted = counted
        self.ring = ring
        """The last minutes; None while it is not used."""
        self.idle_looks = 0


class RateHistory:
    """Samples topics and keeps their rates. Used on the broker's loop alone."""

    def __init__(self, topics: Topics, *, clock: Clock) -> None:
        """Begins without samples."""
        self._topics = topics
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._all = {window: _Ring(window) for window in WINDOWS.values()}
        # The hour and the day of some topics; the one that was inactive for longest comes first.
        self._kept: dict[str, dict[Interval, _Ring]] = {}
        self._sampled_at: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self.totals = OpenTotals()
        """As of the last sample."""

    # -- sampling ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to sample."""
        self._looking = asyncio.get_running_loop().create_task(self._keep_looking())

    async def stop(self) -> None:
        """Stops sampling. May be called twice."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    async def _keep_looking(self) -> None:
        while True:
            # A failure here costs the dashboard a chart; it must not end the broker.
            with threads.guard("ister-rates"):
                await self.sample()
            await asyncio.sleep(EVERY_SECONDS)

    async def sample(self) -> None:
        """Samples every topic once."""
        now, wall = self._clock.monotonic(), self._clock.now_ns() / 1e9
        seconds = 0.0 if self._sampled_at is None else max(now - self._sampled_at, 1e-3)
        self._sampled_at = now
        loop_now = asyncio.get_running_loop().time()
        totals, sums = OpenTotals(), [0.0] * 4
        spread: _Spread = {}
        served = self._topics.served
        for at, topic in enumerate(served):
            if at % _TOPICS_AT_ONCE == _TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            lag = _add(totals, topic, loop_now, spread)
            self._sample_topic(topic, wall, seconds, lag, sums)
        names = {topic.name for topic in served}
        for name in [name for name in self._watched if name not in names]:
            del self._watched[name]
        totals.producers += sum(map(len, spread.values()))
        self.totals = totals
        if seconds:
            values = _values(sums, seconds, totals.lag_messages, totals.upload_lag_bytes)
            for ring in self._all.values():
                ring.add(wall, values)

    def _sample_topic(
        self, topic: ServedTopic, wall: float, seconds: float, lag: int, sums: list[float]
    ) -> None:
        counted = _count(topic)
        watched = self._watched.get(topic.name)
        if watched is None or watched.topic is not topic:
            ring = watched.ring if watched is not None else None
            self._watched[topic.name] = _Watched(topic, counted, ring)
            return
        if counted == watched.counted and watched.ring is None:
            return
        gained = [max(0, new - old) for new, old in zip(counted, watched.counted, strict=True)]
        watched.counted = counted
        if not seconds:
            return
        for number, gain in enumerate(gained):
            sums[number] += gain
        watched.idle_looks = 0 if any(gained) else watched.idle_looks + 1
        if watched.idle_looks >= POINTS:
            # A constant rate needs no ring.
            watched.ring = None
            return
        values = _values(gained, seconds, lag, 0)
        if watched.ring is None:
            watched.ring = _Ring(MINUTES)
        watched.ring.add(wall, values)
        if any(gained):
            self._keep(topic.name, wall, values)

    def _keep(self, name: str, now: float, values: Sequence[float]) -> None:
        """Adds a sample to the hour and the day of a topic, if there is room for it."""
        rings = self._kept.pop(name, None)
        if rings is None:
            oldest = next(iter(self._kept), "")
            if len(self._kept) >= TOPICS_MAX:
                if self._kept[oldest][HOUR].last(1)[0][0] > now - 2 * HOUR.seconds:
                    return  # all of them are active
                del self._kept[oldest]
            rings = {window: _Ring(window) for window in (HOUR, DAY)}
        self._kept[name] = rings
        for ring in rings.values():
            ring.add(now, values)

    # -- results ----------------------------------------------------------------------------

    def rates(self, name: str) -> Rates:
        """Returns a topic's current rates."""
        watched = self._watched.get(name)
        return _mean(watched.ring if watched is not None else None)

    def points(self, name: str, window: Interval = MINUTES) -> list[list[float]]:
        """A topic's last minutes, hour or day: `[unix_ms, messages in/s, messages out/s, lag]`.

        Empty for a topic that was unused for that long.
        """
        now, watched = self._clock.now_ns() / 1e9, self._watched.get(name)
        if window is MINUTES:
            ring = watched.ring if watched is not None else None
            points = [] if ring is None else ring.read(now)
        else:
            points = self._kept_points(name, window, now)
        return [
            [round(time * 1000), round(came, 2), round(gone, 2), round(lag)]
            for time, _, came, gone, _, lag, *_ in points
        ]

    def _kept_points(self, name: str, window: Interval, now: float) -> list[list[float]]:
        rings = self._kept.get(name)
        known = {one[0]: one for one in rings[window].read(now)} if rings is not None else {}
        found: list[list[float]] = []
        lag = 0.0
        # A topic without a point while the broker ran was unused then.
        for time, *_ in self._all[window].read(now) if known else ():
            found.append(known.get(time, [time, 0, 0.0, 0.0, 0.0, lag]))
            lag = found[-1][5]
        return found

    def recent(self, name: str, count: int) -> list[float]:
        """A topic's last messages in/s, for a small line; empty if it was unused."""
        watched = self._watched.get(name)
        if watched is None or watched.ring is None:
            return []
        return [round(one[2], 1) for one in watched.ring.last(count)]

    @property
    def all_rates(self) -> Rates:
        """Returns the rates of all topics together."""
        return _mean(self._all[MINUTES])

    def all_points(self, window: Interval = MINUTES) -> list[list[float]]:
        """The last minutes, hour or day of all topics.

        `[unix_ms, messages in/s, messages out/s, bytes in/s, lag in messages, upload lag in bytes]`
        """
        points = self._all[window].read(self._clock.now_ns() / 1e9)
        return [
            [round(one[0] * 1000), *(round(value, 2) for value in one[2:5]), *map(round, one[5:7])]
            for one in points
        ]

    def totals_of(self, topics: Iterable[ServedTopic]) -> OpenTotals:
        """Returns the current totals of some topics."""
        totals, now = OpenTotals(), asyncio.get_running_loop().time()
        spread: _Spread = {}
        for topic in topics:
            _add(totals, topic, now, spread)
        totals.producers += sum(map(len, spread.values()))
        return totals

    def as_json(self, points: list[list[float]], window: Interval = MINUTES) -> JsonObject:
        """Points as the views have them."""
        name = next(name for name, one in WINDOWS.items() if one is window)
        return {"window": name, "every_seconds": float(window.seconds), "points": points}


_Spread = dict[str, set[object]]
"""The producers of each partitioned topic: one publishes to several partitions."""


def _add(totals: OpenTotals, topic: ServedTopic, now: float, spread: _Spread) -> int:
    """Adds a topic, except the producers of a partition, which go to `spread`; returns its lag."""
    totals.topics += 1
    if topic.producers or topic.counters.streams:
        base = base_of_partition(topic.name)
        if base is None:
            totals.producers += topic.count_producers(now)
        else:
            spread.setdefault(base, set()).update(topic.live_producers(now))
    lag = 0
    for one in topic.subscriptions.values():
        totals.subscriptions += 1
        totals.consumers += len(one.attached)
        if isinstance(one, Dispatcher):
            lag += one.lag
    core = topic.topic
    if core is not None:
        totals.messages += max(0, core.next_offset - core.earliest)
        if core.bucket is not None:
            totals.upload_lag_bytes += core.bucket.uploads.lag_bytes
    totals.lag_messages += lag
    return lag


def _count(topic: ServedTopic) -> tuple[int, int, int, int]:
    """Returns the topic's counts: messages in, bytes in, messages out, bytes out."""
    counters = topic.counters
    return topic.next_offset, counters.bytes_in, counters.messages_out, counters.bytes_out


def _values(gained: Sequence[float], seconds: float, lag: int, upload_lag: int) -> list[float]:
    """The numbers of a point."""
    came, bytes_in, gone, bytes_out = (one / seconds for one in gained)
    return [came, gone, bytes_in, lag, upload_lag, bytes_out]


def _mean(ring: _Ring | None) -> Rates:
    points = ring.last(_RATE_POINTS) if ring is not None else []
    if not points:
        return Rates()
    means = [sum(column) / len(points) for column in zip(*points, strict=True)][2:]
    return Rates(messages_in=means[0], messages_out=means[1], bytes_in=means[2], bytes_out=means[5])
