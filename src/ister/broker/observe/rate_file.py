"""Rates of the last hour and the last day, in a file of fixed size.

Owns: the layout of the file, the mean of each interval, which topics have a series. Does not own:
sampling (`ister.broker.observe.rates`), when the file is written.

    header        magic, sizes, CRC-32
    series 0      all topics together
    series 1 …    one topic each: CRC-32, the time of its last point, a digest of its name
        180 points of 20 s      the last hour
        180 points of 8 min     the last day

A point has a CRC-32, its time, the number of samples and the mean of each value. Its place follows
from its time, so there is no end to remember, and an interval in which the broker was down has no
point. At most `TOPICS_MAX` topics have a series; an active topic takes that of the topic that was
inactive for longest. Size and work do not grow beyond that, whatever the number of topics.

The content is in memory, and `write` brings changed points to the file, without a sync: a crash
costs the points since the last `write`. A point that is torn is ignored. A file of another layout,
or of another program, is replaced. Without a path nothing is written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TOPICS_MAX: Final = 256
"""Topics whose hour and day are kept."""
POINTS: Final = 180
"""In an hour, and in a day."""
VALUES: Final = 5
"""Messages in and out, bytes in, lag in messages, upload lag in bytes."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The points of one window."""

    seconds: int
    """From one point to the next."""
    place: int
    """Which part of a series it is."""


HOUR: Final = Interval(20, 0)
DAY: Final = Interval(480, 1)
_INTERVALS: Final = (HOUR, DAY)

_MAGIC: Final = b"ISTRATE1"
_HEADER: Final = struct.Struct("<8s4II")
_SERIES: Final = struct.Struct("<II16s8x")
_POINT: Final = struct.Struct(f"<III{VALUES}f")
_CRC: Final = struct.Struct("<I")
_SERIES_BYTES: Final = _SERIES.size + len(_INTERVALS) * POINTS * _POINT.size
_FIRST: Final = 4096
SIZE_BYTES: Final = _FIRST + (TOPICS_MAX + 1) * _SERIES_BYTES
"""The size of every file."""

_ALL: Final = bytes(16)


def _header() -> bytes:
    fields = _HEADER.pack(
        _MAGIC, SIZE_BYTES, TOPICS_MAX, POINTS, sum(one.seconds for one in _INTERVALS), 0
    )
    return fields[: -_CRC.size] + _CRC.pack(zlib.crc32(fields[: -_CRC.size]))


def _digest(name: str | None) -> bytes:
    return _ALL if name is None else hashlib.blake2b(name.encode(), digest_size=16).digest()


class RateFile:
    """The rates of all topics and of some. Used by one thread, except `write`."""

    def __init__(self, path: str | None) -> None:
        """Reads what an earlier process has left; nothing is written yet.

        Raises:
            OSError: The file cannot be read.
        """
        self._path = path
        found = _read(path) if path is not None else None
        self._is_new = found is None
        self._data = bytearray(SIZE_BYTES) if found is None else found
        self._data[: _HEADER.size] = _header()
        # Where something has changed, and how many bytes.
        self._changed: dict[int, int] = {}
        self._series: dict[bytes, int] = {}
        for number in range(TOPICS_MAX + 1):
            at = _FIRST + number * _SERIES_BYTES
            if self._is_sound(at, _SERIES.size):
                digest = _SERIES.unpack_from(self._data, at)[2]
                if (digest == _ALL) == (number == 0):
                    self._series.setdefault(digest, at)

    # -- adding -----------------------------------------------------------------------------

    def add(self, name: str | None, now: float, values: Sequence[float]) -> None:
        """Adds a sample of a topic, or of all topics together (None)."""
        at = self._find_or_take(_digest(name), int(now))
        if at is None:
            return
        for interval in _INTERVALS:
            time = int(now) // interval.seconds * interval.seconds
            place = _place(at, interval, time)
            known = self._point(place, time)
            samples, means = (0, (0.0,) * VALUES) if known is None else known
            samples += 1
            sums = [
                mean + (value - mean) / samples for mean, value in zip(means, values, strict=True)
            ]
            _POINT.pack_into(self._data, place, 0, time, samples, *sums)
            self._seal(place, _POINT.size)

    def _find_or_take(self, digest: bytes, now: int) -> int | None:
        """The series of a topic; None if all of them are in use."""
        at = self._series.get(digest)
        if at is None:
            at = _FIRST if digest == _ALL else self._take(now)
            if at is None:
                return None
            # Also in the file: it may have points of another topic.
            self._data[at : at + _SERIES_BYTES] = bytes(_SERIES_BYTES)
            self._changed[at] = _SERIES_BYTES
            self._series[digest] = at
        elif _SERIES.unpack_from(self._data, at)[1] // HOUR.seconds == now // HOUR.seconds:
            return at
        _SERIES.pack_into(self._data, at, 0, now, digest)
        self._seal(at, _SERIES.size)
        return at

    def _take(self, now: int) -> int | None:
        used = set(self._series.values())
        for number in range(1, TOPICS_MAX + 1):
            if (at := _FIRST + number * _SERIES_BYTES) not in used:
                return at
        last, digest = min(
            (_SERIES.unpack_from(self._data, at)[1], digest)
            for digest, at in self._series.items()
            if digest != _ALL
        )
        if last > now - 2 * HOUR.seconds:
            return None  # all of them are active
        return self._series.pop(digest)

    def _seal(self, at: int, size: int) -> None:
        """Sets the CRC of a series or a point, and marks it to be written."""
        _CRC.pack_into(self._data, at, zlib.crc32(self._data[at + _CRC.size : at + size]))
        self._changed.setdefault(at, size)

    def _is_sound(self, at: int, size: int) -> bool:
        content = self._data[at + _CRC.size : at + size]
        found: int = _CRC.unpack_from(self._data, at)[0]
        return any(content) and found == zlib.crc32(content)

    def _point(self, place: int, time: int) -> tuple[int, tuple[float, ...]] | None:
        _, found, samples, *means = _POINT.unpack_from(self._data, place)
        if found != time or not samples or not self._is_sound(place, _POINT.size):
            return None
        return samples, tuple(means)

    # -- reading ----------------------------------------------------------------------------

    def read(
        self, name: str | None, interval: Interval, now: float
    ) -> list[tuple[int, tuple[float, ...]]]:
        """The points of a window up to now, oldest first: the time in seconds, and the means."""
        at = self._series.get(_digest(name))
        if at is None:
            return []
        last = int(now) // interval.seconds * interval.seconds
        found = []
        for time in range(last - (POINTS - 1) * interval.seconds, last + 1, interval.seconds):
            point = self._point(_place(at, interval, time), time)
            if point is not None:
                found.append((time, point[1]))
        return found

    # -- the file ---------------------------------------------------------------------------

    def take_changes(self) -> list[tuple[int, bytes]]:
        """What has changed since the last call, for `write`."""
        changed, self._changed = self._changed, {}
        return [(at, bytes(self._data[at : at + size])) for at, size in sorted(changed.items())]

    def write(self, changes: list[tuple[int, bytes]]) -> None:
        """Brings changes to the file; thread-safe, one call at a time.

        Raises:
            OSError: The file cannot be written.
        """
        if self._path is None:
            return
        descriptor = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640
        )
        try:
            if self._is_new or os.fstat(descriptor).st_size != SIZE_BYTES:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, SIZE_BYTES)
                os.pwrite(descriptor, _header(), 0)
                self._is_new = False
            for at, content in changes:
                os.pwrite(descriptor, content, at)
        finally:
            os.close(descriptor)


def _place(series: int, interval: Interval, time: int) -> int:
    number = interval.place * POINTS + time // interval.seconds % POINTS
    return series + _SERIES.size + number * _POINT.size


def _read(path: str) -> bytearray | None:
    """The content of a file of this layout; None if there is none."""
    try:
        # A pipe of that name must not keep the broker from starting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        content = bytearray(file.read(SIZE_BYTES + 1))
    is_ours = len(content) == SIZE_BYTES and content[: _HEADER.size] == _header()
    return content if is_ours else None
