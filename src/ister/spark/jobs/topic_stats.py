"""What a topic's messages are like: counts that are gathered in tasks and added up on the driver.

    record batches ─► TopicStats of a partition ─► merge, merge, … ─► TopicStats of a topic

Owns: the numbers, and how two of them are added. Does not own: reading and tables.

Everything is exact but for three things: producers beyond `PRODUCERS_MAX` of one partition, of
which the smallest become `rest`; distinct keys beyond `KEYS_EXACT_MAX`, which are estimated from
the smallest of their hashes (about 2 % off); and the compression, which is measured on a sample.

Memory: what is returned of a partition is a few hundred kilobytes at most, however many messages it
has.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

import pyarrow as pa
import pyarrow.compute as pc

from ister.format.crc import Buffer
from ister.limits import MIB
from ister.positions import format_time

COLUMNS: Final = ("publish_time", "producer_name", "payload", "routing_key")
"""What is read of each message."""
PRODUCERS_MAX: Final = 2000
KEYS_EXACT_MAX: Final = 2048
_HASH_END: Final = 1 << 64
_HOUR_US: Final = 3_600_000_000
SAMPLE_BYTES: Final = MIB
"""How much is compressed of a partition, about."""
_ZSTD_LEVEL: Final = 3
_TOP: Final = 20


class MessageCountJson(TypedDict):
    """Messages, and the bytes of their payloads."""

    messages: int
    bytes: int


class HourJson(MessageCountJson):
    """The messages of an hour."""

    hour: str


class _ProducerJson(MessageCountJson):
    producer: str


class _OthersJson(MessageCountJson):
    producers: int
    is_exact: bool


class SizeJson(TypedDict):
    """How many messages have payloads of a size."""

    from_bytes: int
    below_bytes: int
    messages: int


class _KeysJson(TypedDict):
    messages: int
    distinct: int
    is_exact: bool


class _CompressionJson(TypedDict):
    codec: str
    ratio: float | None
    sample_bytes: int


class StatsJson(MessageCountJson):
    """The statistics as a report has them."""

    first_publish_time: str | None
    last_publish_time: str | None
    hours: list[HourJson]
    producers: list[_ProducerJson]
    other_producers: _OthersJson
    sizes: list[SizeJson]
    keys: _KeysJson
    compression: _CompressionJson


@dataclass(slots=True)
class MessageCount:
    """Messages, and the bytes of their payloads."""

    messages: int = 0
    bytes: int = 0

    def add(self, messages: int, size: int) -> None:
        """Counts some more."""
        self.messages += messages
        self.bytes += size

    def as_json(self) -> MessageCountJson:
        """As a report has it."""
        return {"messages": self.messages, "bytes": self.bytes}


@dataclass(slots=True)
class TopicStats:
    """See the module header. Pickled."""

    total: MessageCount = field(default_factory=MessageCount)
    first_us: int | None = None
    """Publish times, in microseconds since the Unix epoch."""
    last_us: int | None = None
    hours: dict[int, MessageCount] = field(default_factory=dict)
    """By the number of the hour since the Unix epoch."""
    producers: dict[str, MessageCount] = field(default_factory=dict)
    other_producers: MessageCount = field(default_factory=MessageCount)
    """Those that were too many to keep apart."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Messages by the number of bits of their size: 0; 1; 2 and 3; 4 to 7; …"""
    keyed: int = 0
    """Messages with a routing key."""
    key_hashes: list[int] = field(default_factory=list)
    """The smallest hashes of different keys, ascending, `KEYS_EXACT_MAX` of them at most."""
    sample_bytes: int = 0
    sample_compressed_bytes: int = 0

    # -- gathering --------------------------------------------------------------------------

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts the messages of a batch with the columns `COLUMNS`."""
        if not batch.num_rows:
            return
        sizes = pc.binary_length(batch.column("payload")).cast(pa.int64())
        times = batch.column("publish_time").cast(pa.timestamp("us", "UTC")).view(pa.int64())
        producers = batch.column("producer_name")
        self.total.add(batch.num_rows, pc.sum(sizes).as_py())
        low, high = pc.min_max(times).as_py().values()
        self.first_us = low if self.first_us is None else min(self.first_us, low)
        self.last_us = high if self.last_us is None else max(self.last_us, high)
        hours = pc.divide(times, _HOUR_US)
        for hour, count, size in _grouped(hours, sizes):
            self.hours.setdefault(hour, MessageCount()).add(count, size)
        for name, count, size in _grouped(producers, sizes):
            self.producers.setdefault(name or "", MessageCount()).add(count, size)
        self._bound_producers()
        for bits, count, _ in _grouped(_bits(sizes), sizes):
            self.sizes[bits] = self.sizes.get(bits, 0) + count
        keys = batch.column("routing_key")
        self.keyed += batch.num_rows - keys.null_count
        if keys.null_count < batch.num_rows:
            found = pc.unique(keys.drop_null()).to_pylist()
            self._add_hashes(map(_hash, found))

    def _bound_producers(self) -> None:
        if len(self.producers) <= 2 * PRODUCERS_MAX:
            return
        ranked = sorted(self.producers.items(), key=lambda item: -item[1].messages)
        for _, counted in ranked[PRODUCERS_MAX:]:
            self.other_producers.add(counted.messages, counted.bytes)
        self.producers = dict(ranked[:PRODUCERS_MAX])

    def _add_hashes(self, hashes: Iterable[int]) -> None:
        self.key_hashes = heapq.nsmallest(KEYS_EXACT_MAX, {*self.key_hashes, *hashes})

    def add_sample(self, data: Buffer) -> None:
        """Sees how well some payloads, one after the other, compress."""
        if data:
            codec = pa.Codec("zstd", compression_level=_ZSTD_LEVEL)
            self.sample_bytes += len(data)
            self.sample_compressed_bytes += len(codec.compress(bytes(data)))

    def merge(self, other: TopicStats) -> None:
        """Adds what was gathered elsewhere."""
        self.total.add(other.total.messages, other.total.bytes)
        times = [t for t in (self.first_us, other.first_us) if t is not None]
        self.first_us = min(times, default=None)
        times = [t for t in (self.last_us, other.last_us) if t is not None]
        self.last_us = max(times, default=None)
        for hour, counted in other.hours.items():
            self.hours.setdefault(hour, MessageCount()).add(counted.messages, counted.bytes)
        for name, counted in other.producers.items():
            self.producers.setdefault(name, MessageCount()).add(counted.messages, counted.bytes)
        self.other_producers.add(other.other_producers.messages, other.other_producers.bytes)
        self._bound_producers()
        for bits, count in other.sizes.items():
            self.sizes[bits] = self.sizes.get(bits, 0) + count
        self.keyed += other.keyed
        self._add_hashes(other.key_hashes)
        self.sample_bytes += other.sample_bytes
        self.sample_compressed_bytes += other.sample_compressed_bytes

    # -- what it says -----------------------------------------------------------------------

    @property
    def distinct_keys(self) -> int:
        """How many different routing keys there are; an estimate where they are many."""
        if len(self.key_hashes) < KEYS_EXACT_MAX:
            return len(self.key_hashes)
        return round((KEYS_EXACT_MAX - 1) * _HASH_END / max(self.key_hashes[-1], 1))

    @property
    def compression_ratio(self) -> float | None:
        """How many times smaller the sample became."""
        if not self.sample_compressed_bytes:
            return None
        return self.sample_bytes / self.sample_compressed_bytes

    def top_producers(self) -> tuple[list[tuple[str, MessageCount]], MessageCount, int]:
        """Those with the most messages, the rest of them together, and how many those are."""
        ranked = sorted(self.producers.items(), key=lambda item: (-item[1].messages, item[0]))
        rest = MessageCount(self.other_producers.messages, self.other_producers.bytes)
        for _, counted in ranked[_TOP:]:
            rest.add(counted.messages, counted.bytes)
        return ranked[:_TOP], rest, len(ranked[_TOP:])

    def as_json(self) -> StatsJson:
        """As a report has it."""
        top, rest, others = self.top_producers()
        ratio = self.compression_ratio
        return {
            "messages": self.total.messages,
            "bytes": self.total.bytes,
            "first_publish_time": None
            if self.first_us is None
            else format_time(self.first_us // 1000),
            "last_publish_time": None
            if self.last_us is None
            else format_time(self.last_us // 1000),
            "hours": [
                {"hour": format_time(hour * _HOUR_US // 1000), **self.hours[hour].as_json()}
                for hour in sorted(self.hours)
            ],
            "producers": [{"producer": name, **counted.as_json()} for name, counted in top],
            "other_producers": {
                "producers": others,
                "is_exact": not self.other_producers.messages,
                **rest.as_json(),
            },
            "sizes": [
                {
                    "from_bytes": (1 << bits) >> 1,
                    "below_bytes": 1 << bits,
                    "messages": self.sizes[bits],
                }
                for bits in sorted(self.sizes)
            ],
            "keys": {
                "messages": self.keyed,
                "distinct": self.distinct_keys,
                "is_exact": len(self.key_hashes) < KEYS_EXACT_MAX,
            },
            "compression": {
                "codec": f"zstd-{_ZSTD_LEVEL}",
                "ratio": round(ratio, 2) if ratio is not None else None,
                "sample_bytes": self.sample_bytes,
            },
        }


# Any: whatever type the column has.
def _grouped(by: pa.Array, sizes: pa.Array) -> list[tuple[Any, int, int]]:
    """(value, how many, bytes) of each different value."""
    table = pa.table({"by": by, "size": sizes})
    found = table.group_by("by").aggregate([("size", "count"), ("size", "sum")])
    columns = (found.column(name).to_pylist() for name in ("by", "size_count", "size_sum"))
    return list(zip(*columns, strict=True))


def _bits(sizes: pa.Array) -> pa.Array:
    """How many bits each number has."""
    logs = pc.floor(pc.log2(pc.max_element_wise(sizes, 1)))
    return pc.if_else(pc.equal(sizes, 0), 0, pc.add(logs.cast(pa.int64()), 1))


def take_sample(batch: pa.RecordBatch, sample: bytearray) -> None:
    """Adds payloads of a batch to a sample, until it is large enough."""
    for payload in batch.column("payload"):
        if len(sample) >= SAMPLE_BYTES:
            return
        sample += payload.as_buffer() or b""


def _hash(key: str) -> int:
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
