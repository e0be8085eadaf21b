"""Which consumer has a key: a hash ring, and filters that say which keys a consumer takes.

A consumer has 100 points on a ring of 2**32; a key belongs to the consumer whose point comes next
at or after the key's own. Most keys stay where they are when a consumer comes or goes. Points and
keys are hashed as Danube hashes them, so that the same consumers share the same keys alike.

Filters are globs over the whole key: `*` is any run of characters, also an empty one, and `?` is
exactly one. Matching takes one step a character, whatever the pattern: all the ways to match are
followed at once, as the bits of one number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from ister.errors import InvalidRequestError

POINTS: Final = 100
"""Points of one consumer on the ring."""

FILTERS_MAX: Final = 64
"""Patterns of one consumer: each is tried against each new key."""

FILTER_CHARACTERS_MAX: Final = 256
"""Of one pattern: what a step costs grows with it."""

_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_MASK_64: Final = 2**64 - 1
_MASK_32: Final = 2**32 - 1


def hash_key(key: str) -> int:
    """A key's place on the ring: FNV-1a of 64 bits, folded to 32, and mixed (fmix32)."""
    value = _FNV_BASIS
    # A key that has no UTF-8 form is hashed all the same; it only has to be the same each time.
    for byte in key.encode("utf-8", "surrogatepass"):
        value = ((value ^ byte) * _FNV_PRIME) & _MASK_64
    mixed = (value >> 32) ^ (value & _MASK_32)
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK_32
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK_32
    return mixed ^ (mixed >> 16)


class HashRing:
    """Consumers on a ring. The same consumers give the same answers, whatever their order."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, consumer: int) -> bool:
        return consumer in self._members

    def add(self, consumer: int) -> None:
        """Puts a consumer's points on the ring; one that is there stays."""
        if consumer not in self._members:
            self._members.add(consumer)
            self._points += [(hash_key(f"{consumer}-{n}"), consumer) for n in range(POINTS)]
            self._points.sort()

    def remove(self, consumer: int) -> None:
        """Takes a consumer's points off the ring; one that is not there is fine."""
        if consumer in self._members:
            self._members.remove(consumer)
            self._points = [point for point in self._points if point[1] != consumer]

    def find(self, key: str, takes: Callable[[int], bool]) -> int | None:
        """The first consumer at or after the key's place that takes it; None if none does.

        `takes` says whether a consumer takes it; asked at most once for each.
        """
        points = self._points
        if not points:
            return None
        start = bisect_left(points, (hash_key(key), -(2**63)))
        refused: set[int] = set()
        for at in range(start, start + len(points)):
            consumer = points[at % len(points)][1]
            if consumer in refused:
                continue
            if takes(consumer):
                return consumer
            refused.add(consumer)
            if len(refused) == len(self._members):
                break
        return None


class _Glob:
    """One pattern. Bit `n` of a state: the first `n` characters of the pattern have matched."""

    __slots__ = ("_advance", "_any", "_final", "_stay")

    def __init__(self, pattern: str) -> None:
        self._advance: dict[str, int] = {}
        self._any = 0
        self._stay = 0
        at = 0
        for character in pattern:
            if character == "*":
                self._stay |= 1 << at
                continue
            if character == "?":
                self._any |= 1 << at
            else:
                self._advance[character] = self._advance.get(character, 0) | 1 << at
            at += 1
        self._final = 1 << at

    def matches(self, key: str) -> bool:
        state = 1
        advance, anything, stay = self._advance, self._any, self._stay
        for character in key:
            state = (state & (advance.get(character, 0) | anything)) << 1 | state & stay
            if not state:
                return False
        return bool(state & self._final)


class KeyFilter:
    """Which keys a consumer takes: those that match one of its patterns; without any, all.

    Raises:
        InvalidRequestError: Too many patterns, or too long a one.
    """

    __slots__ = ("_globs", "patterns")

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        if isinstance(patterns, str):
            raise InvalidRequestError("key filters must be a list of patterns, not a string")
        if len(patterns) > FILTERS_MAX:
            raise InvalidRequestError(
                f"{len(patterns)} key filters", hint=f"a consumer has at most {FILTERS_MAX}"
            )
        for pattern in patterns:
            if not isinstance(pattern, str) or len(pattern) > FILTER_CHARACTERS_MAX:
                raise InvalidRequestError(
                    f"the key filter {pattern!r:.40}",
                    hint=f"a pattern is a text of at most {FILTER_CHARACTERS_MAX} characters",
                )
        self.patterns = tuple(patterns)
        # A pattern that takes everything makes the others needless.
        takes_all = any(pattern and not pattern.strip("*") for pattern in self.patterns)
        self._globs = () if takes_all else tuple(_Glob(pattern) for pattern in self.patterns)

    @property
    def takes_all(self) -> bool:
        """Whether every key matches."""
        return not self._globs

    def matches(self, key: str) -> bool:
        """Whether the consumer takes messages of this key."""
        return not self._globs or any(glob.matches(key) for glob in self._globs)
