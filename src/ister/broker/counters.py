"""Counters of a topic, of a subscription, of an RPC method.

Owns: what is counted. Does not own: names and labels (`ister.base.metrics`), output
(`ister.broker.observe.prometheus`), rates (`ister.broker.observe.rates`).

Counters are plain numbers on plain objects, because every message is counted here. Messages are
published by several threads, which count whole batches under a lock; everything else is counted on
the broker's loop. Counters begin at 0 when a topic is opened, and only grow.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ister.base.metrics import Histogram, bounds_of
from ister.format.payloads import FEW_ROWS, Payloads

if TYPE_CHECKING:
    import pyarrow as pa

_SIZES: Final = bounds_of("danube_topic_message_size_bytes")
_SEND_LATENCIES: Final = bounds_of("danube_producer_send_latency_ms")
_CALL_LATENCIES: Final = bounds_of("ister_rpc_latency_seconds")
# The steps of sizes are powers of four, and this is the first one's exponent.
_FIRST_EXPONENT: Final = 2
# So few rows are counted one by one: each call of Arrow's gives the interpreter lock away, and on
# a busy broker waiting for it again takes longer than all of the work.
_FEW_ROWS: Final = 32


class TopicCounters:
    """Counts what a topic received and delivered since it was opened."""

    __slots__ = (
        "_lock",
        "_sizes",
        "_streams",
        "bytes_in",
        "bytes_out",
        "messages_in",
        "messages_out",
        "refused",
        "send_latency",
        "sends",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.messages_in = 0
        """Messages published."""
        self.bytes_in = 0
        """Bytes of their payloads."""
        self._sizes = Histogram(_SIZES)
        self.messages_out = 0
        """Messages handed to consumers, of all subscriptions."""
        self.bytes_out = 0
        self.sends = 0
        """Calls of gRPC that were acknowledged."""
        self.send_latency = Histogram(_SEND_LATENCIES)
        """How long these took, in milliseconds."""
        self._streams: Counter[object] = Counter()
        self.refused: Counter[str] = Counter()
        """Calls that were refused, by status."""

    @property
    def sizes(self) -> Histogram:
        """A copy of the histogram of payload sizes."""
        with self._lock:
            return self._sizes.copy()

    def count_messages(self, sizes: Sequence[int]) -> None:
        """Counts messages that were appended. Thread-safe."""
        with self._lock:
            self.messages_in += len(sizes)
            self.bytes_in += sum(sizes)
            for size in sizes:
                self._sizes.observe(size)

    def count_batch(self, batch: pa.RecordBatch | Payloads) -> None:
        """Counts rows that were appended. Thread-safe."""
        if isinstance(batch, Payloads) and batch.num_rows <= FEW_ROWS:
            self.count_messages(batch.sizes())
            return
        sizes = _count_sizes(batch)
        with self._lock:
            self.messages_in += sizes.count
            self.bytes_in += int(sizes.sum)
            self._sizes.add(sizes)

    @contextmanager
    def publishing(self, producer: str | None) -> Iterator[None]:
        """Counts a Flight producer while the block runs. Thread-safe."""
        name: object = object() if producer is None else producer
        with self._lock:
            self._streams[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams[name] -= 1
                if not self._streams[name]:
                    del self._streams[name]

    @property
    def streams(self) -> tuple[object, ...]:
        """The names of producers that publish by Flight now, each once. Thread-safe.

        One without a name is another object for each stream.
        """
        with self._lock:
            return tuple(self._streams)

    def count_sends(self, count: int, seconds: float) -> None:
        """Counts gRPC sends that were acknowledged together, after `seconds`. Thread-safe."""
        with self._lock:
            self.sends += count
            self.send_latency.observe(seconds * 1000, count)

    def count_refused(self, status: str, count: int = 1) -> None:
        """Counts gRPC sends that were refused with a status. Thread-safe."""
        with self._lock:
            self.refused[status] += count


def _count_sizes(batch: pa.RecordBatch | Payloads) -> Histogram:
    """Returns the histogram of a batch's payload sizes."""
    counted = Histogram(_SIZES)
    if isinstance(batch, Payloads):
        for size, count in Counter(batch.sizes()).items():
            counted.observe(size, count)
        return counted
    import pyarrow.compute as pc  # noqa: PLC0415 - optional

    if batch.num_rows <= _FEW_ROWS:
        for value in batch.column("payload"):
            counted.observe(value.as_buffer().size)
        return counted
    lengths = pc.binary_length(batch.column("payload"))
    span = pc.min_max(lengths).as_py()
    if span["max"] is None:
        return counted
    counted.max, counted.sum = float(span["max"]), float(pc.sum(lengths).as_py())
    counted.count = batch.num_rows
    if span["min"] == span["max"]:
        counted = Histogram(_SIZES)
        counted.observe(span["max"], batch.num_rows)
        return counted
    # Of 0 it is minus infinity.
    for found in pc.value_counts(pc.ceil(pc.log2(lengths))).to_pylist():
        exponent = (int(max(found["values"], 0.0)) + 1) // 2
        at = min(max(exponent - _FIRST_EXPONENT, 0), len(_SIZES))
        counted.counts[at] += found["counts"]
    return counted


class SubscriptionCounters:
    """Counts what a subscription did since its topic was opened. Used on the loop."""

    __slots__ = (
        "_topic",
        "acks_refused",
        "bytes_out",
        "dead_letters",
        "dropped",
        "messages_out",
        "nacks",
        "passed_over",
        "redeliveries",
    )

    def __init__(self, topic: TopicCounters) -> None:
        self._topic = topic
        self.messages_out = 0
        """Messages handed to consumers."""
        self.bytes_out = 0
        self.acks_refused = 0
        """Acknowledgements of messages that were not delivered."""
        self.nacks = 0
        self.redeliveries = 0
        self.dead_letters = 0
        self.dropped = 0
        """Messages given up after their last attempt, or that no consumer had room for."""
        self.passed_over = 0
        """Messages that were skipped: deleted by retention, or damaged."""

    def count_out(self, size: int) -> None:
        """Counts a message that is sent to a consumer."""
        self.messages_out += 1
        self.bytes_out += size
        topic = self._topic
        topic.messages_out += 1
        topic.bytes_out += size


class CallCounters:
    """Counts the calls of one method. Thread-safe."""

    __slots__ = ("_lock", "answered", "latency", "refused")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answered = 0
        self.refused: Counter[str] = Counter()
        """Calls that ended with an error, by status."""
        self.latency = Histogram(_CALL_LATENCIES)
        """Seconds until a call was answered; streams have none."""

    def count_answers(self, count: int, seconds: float | None) -> None:
        """Counts calls that were answered together, after `seconds`; None for streams."""
        with self._lock:
            self.answered += count
            if seconds is not None:
                self.latency.observe(seconds, count)

    def count_refused(self, status: str) -> None:
        """Counts a call that ended with an error status."""
        with self._lock:
            self.refused[status] += 1


class Calls:
    """All methods, by service and name."""

    def __init__(self) -> None:
        self.by_method: dict[tuple[str, str], CallCounters] = {}

    def of(self, service: str, method: str) -> CallCounters:
        """Returns the counters of a method."""
        return self.by_method.setdefault((service, method), CallCounters())
