"""Numbers that are counted while messages pass: of a topic, of a subscription, of a kind of call.

Owns: what is counted. Does not own: names and labels (`ister.metrics`), how it is told
(`ister.broker.exposition`), rates (`ister.broker.history`).

They are plain numbers on plain objects, because each message passes here. All of them are of the
broker's loop, but for what comes by Flight: its threads count whole batches, under a lock. They
begin at 0 when a topic is opened, and only ever grow.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ister.metrics import Histogram, bounds_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["CallCounters", "Calls", "SubscriptionCounters", "TopicCounters"]

_SIZES: Final = bounds_of("danube_topic_message_size_bytes")
_SEND_LATENCIES: Final = bounds_of("danube_producer_send_latency_ms")
_CALL_LATENCIES: Final = bounds_of("ister_rpc_latency_seconds")
# The steps of sizes are powers of four, and this is the first one's exponent.
_FIRST_EXPONENT: Final = 2
# So few rows are looked at one by one: each call of Arrow's gives the interpreter lock away, and on
# a busy broker waiting for it again takes longer than all of the work.
_FEW_ROWS: Final = 32


class TopicCounters:
    """What has come into a topic, and gone out of it, since it was opened."""

    __slots__ = (
        "_bulk_bytes",
        "_bulk_messages",
        "_bulk_sizes",
        "_lock",
        "_sent_bytes",
        "_sent_messages",
        "_sent_sizes",
        "bytes_out",
        "messages_out",
        "refused",
        "send_latency",
        "sends",
        "streams",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent_messages = 0
        self._sent_bytes = 0
        self._sent_sizes = Histogram(_SIZES)
        self._bulk_messages = 0
        self._bulk_bytes = 0
        self._bulk_sizes = Histogram(_SIZES)
        self.messages_out = 0
        """Messages handed to consumers, of all subscriptions."""
        self.bytes_out = 0
        self.sends = 0
        """Calls of gRPC that were acknowledged."""
        self.send_latency = Histogram(_SEND_LATENCIES)
        """How long these took, in milliseconds."""
        self.streams = 0
        """Producers that publish by Flight now."""
        self.refused: Counter[str] = Counter()
        """Those that were not, by status."""

    @property
    def messages_in(self) -> int:
        """Messages published."""
        return self._sent_messages + self._bulk_messages

    @property
    def bytes_in(self) -> int:
        """Their payloads."""
        return self._sent_bytes + self._bulk_bytes

    @property
    def sizes(self) -> Histogram:
        """The sizes of these, as of now."""
        found = self._sent_sizes.copy()
        with self._lock:
            found.add(self._bulk_sizes)
        return found

    def note_message(self, size: int) -> None:
        """A message has been appended. On the loop."""
        self._sent_messages += 1
        self._sent_bytes += size
        self._sent_sizes.observe(size)

    def note_batch(self, batch: pa.RecordBatch) -> None:
        """Rows have been appended. In any thread."""
        sizes = _count_sizes(batch)
        with self._lock:
            self._bulk_messages += sizes.count
            self._bulk_bytes += int(sizes.sum)
            self._bulk_sizes.add(sizes)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """A producer publishes by Flight meanwhile. In any thread."""
        with self._lock:
            self.streams += 1
        try:
            yield
        finally:
            with self._lock:
                self.streams -= 1

    def note_send(self, seconds: float) -> None:
        """A call of gRPC was acknowledged. On the loop."""
        self.sends += 1
        self.send_latency.observe(seconds * 1000)


def _count_sizes(batch: pa.RecordBatch) -> Histogram:
    """The sizes of the payloads in a batch, without looking at them one by one."""
    import pyarrow.compute as pc  # noqa: PLC0415 - only those who have it get here

    counted = Histogram(_SIZES)
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
        one = Histogram(_SIZES)
        one.observe(span["max"])
        counted.counts = [counted.count * number for number in one.counts]
        return counted
    # Of 0 it is minus infinity.
    for found in pc.value_counts(pc.ceil(pc.log2(lengths))).to_pylist():
        exponent = (int(max(found["values"], 0.0)) + 1) // 2
        at = min(max(exponent - _FIRST_EXPONENT, 0), len(_SIZES))
        counted.counts[at] += found["counts"]
    return counted


class SubscriptionCounters:
    """What a subscription has done since its topic was opened. Of the loop."""

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
        """Messages given up after their last attempt, or that nobody had room for."""
        self.passed_over = 0
        """Messages that are not kept any more, or are damaged."""

    def note_out(self, size: int) -> None:
        """A message leaves for a consumer."""
        self.messages_out += 1
        self.bytes_out += size
        topic = self._topic
        topic.messages_out += 1
        topic.bytes_out += size


class CallCounters:
    """One method of one service. Of the loop."""

    __slots__ = ("answered", "latency", "refused")

    def __init__(self) -> None:
        self.answered = 0
        self.refused: Counter[str] = Counter()
        """Those that ended with a status, by its name."""
        self.latency = Histogram(_CALL_LATENCIES)
        """Seconds until a call was answered; streams have none."""

    def note_answer(self, seconds: float) -> None:
        """A call was answered."""
        self.answered += 1
        self.latency.observe(seconds)


class Calls:
    """All methods, by service and name."""

    def __init__(self) -> None:
        self.by_method: dict[tuple[str, str], CallCounters] = {}

    def of(self, service: str, method: str) -> CallCounters:
        """The counters of a method; there is one of each."""
        return self.by_method.setdefault((service, method), CallCounters())
