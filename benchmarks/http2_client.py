"""Producers and consumers of Danube's protocol that cost little, so that the broker is measured.

    send        producers, each on a connection of its own, each with one send under way
    consume     a backlog by ReceiveMessages, acknowledged one message at a time
    flow        sends at a steady rate, each delivered to a consumer and acknowledged

`python -m benchmarks.http2_client --address HOST:PORT --mode send --producers 64 --seconds 3`
prints one JSON object; with the `--pid` of the server also its CPU time per message.

Owns: the workloads and what they count. A send counts when it is answered, and the answer has to be
that of its request; a consumed message counts when its acknowledgement is answered. A message that
fails, is missing or comes twice ends the workload with an error. Does not own: calls (`http2`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.http2 import Connection, Loop, Method
from benchmarks.measurement import MESSAGE_BYTES, quantile
from ister.broker.dispatch.encoder import varint
from ister.errors import InvariantError
from ister.wire import danube

TOPIC: Final = "/default/bench"
ACKS_AT_ONCE: Final = 16
_PRODUCERS: Final = 64
_CREATE: Final = Method("/danube.ProducerService/CreateProducer")
_SEND: Final = Method("/danube.ProducerService/SendMessage")
_SUBSCRIBE: Final = Method("/danube.ConsumerService/Subscribe")
_RECEIVE: Final = Method("/danube.ConsumerService/ReceiveMessages")
_ACK: Final = Method("/danube.ConsumerService/Ack")
_STAMP: Final = struct.Struct("<d")
_REQUEST_ID: Final = 7
_WARM_UP: Final = 20
"""Calls that each producer makes before its calls count."""


@dataclass(slots=True)
class Outcome:
    """The figures of a workload."""

    count: int = 0
    seconds: float = 0.0
    cpu_us: float | None = None
    """CPU time of the server per message, in microseconds, all of its threads."""
    client_cpu_us: float = 0.0
    times_ms: list[float] = field(default_factory=list, repr=False)
    """The latency of each message: to the answer of a send, or in a flow to the consumer."""

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.count / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        shown: dict[str, Any] = {
            "messages": self.count,
            "seconds": round(self.seconds, 3),
            "msg_per_s": round(self.rate, 1),
            "client_cpu_us": round(self.client_cpu_us, 1),
        }
        if self.cpu_us is not None:
            shown["server_cpu_us"] = round(self.cpu_us, 1)
        if self.times_ms:
            shown["p50_ms"] = round(quantile(self.times_ms, 0.5), 3)
            shown["p99_ms"] = round(quantile(self.times_ms, 0.99), 3)
        return shown


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process, all of its threads, in seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _measured(outcome: Outcome, pid: int | None) -> Iterator[None]:
    """Sets the times of `outcome` to those of the block, whose messages `outcome.count` counts."""
    gc.collect()
    gc.disable()
    server = 0.0 if pid is None else cpu_seconds(pid)
    own, began = time.process_time(), time.perf_counter()
    try:
        yield
    finally:
        gc.enable()
    outcome.seconds = time.perf_counter() - began
    done = max(1, outcome.count)
    outcome.client_cpu_us = (time.process_time() - own) * 1e6 / done
    if pid is not None:
        outcome.cpu_us = (cpu_seconds(pid) - server) * 1e6 / done


# -- sends ----------------------------------------------------------------------------------


class _Producer:
    """A producer on a connection; its requests differ in their payloads alone."""

    def __init__(self, loop: Loop, address: str, topic: str, name: str) -> None:
        self.connection = loop.connect(address)
        request = danube.ProducerRequest(
            request_id=_REQUEST_ID,
            producer_name=name,
            topic_name=topic,
            dispatch_strategy=danube.DispatchStrategy.Reliable,
        )
        answer = loop.ask(self.connection, _CREATE, request.SerializeToString())
        self._message = danube.StreamMessage(
            request_id=_REQUEST_ID,
            msg_id=danube.MsgID(
                producer_id=danube.ProducerResponse.FromString(answer).producer_id,
                topic_name=topic,
                broker_addr=f"http://{address}",
            ),
            payload=os.urandom(MESSAGE_BYTES),
            publish_time=time.time_ns() // 1_000_000,
            producer_name=name,
        )
        self.request: bytes = self._message.SerializeToString()
        head, _, self._tail = self.request.partition(self._message.payload)
        self._head = head
        self._padding = self._message.payload[_STAMP.size :]

    def stamped(self, now: float) -> bytes:
        """Returns a request whose payload begins with a time."""
        return b"".join((self._head, _STAMP.pack(now), self._padding, self._tail))


_ANSWER: Final[bytes] = danube.MessageResponse(request_id=_REQUEST_ID).SerializeToString()


def _check_answer(answer: bytes) -> None:
    if answer != _ANSWER:
        raise InvariantError(f"a send has the answer {answer!r}")


def send(
    address: str,
    *,
    producers: int = _PRODUCERS,
    seconds: float | None = None,
    count: int | None = None,
    pid: int | None = None,
    topic: str = TOPIC,
    warm_up: int = _WARM_UP,
) -> Outcome:
    """Sends for a time or a number of messages; each producer has one send in progress.

    Raises:
        UnavailableError: A call failed.
        InvariantError: An answer is not that of its request.
    """
    outcome = Outcome()
    with Loop() as loop:
        lanes = [
            _Lane(_Producer(loop, address, topic, f"bench-{number}"), outcome)
            for number in range(producers)
        ]
        _send_while(loop, lanes, lambda begun: begun < warm_up * producers)
        outcome.count = 0
        outcome.times_ms.clear()
        with _measured(outcome, pid):
            if count is not None:
                _send_while(loop, lanes, lambda begun: begun < count)
            else:
                end = time.perf_counter() + (seconds or 1.0)
                _send_while(loop, lanes, lambda begun: time.perf_counter() < end)
    return outcome


class _Lane:
    """One producer's sends, one after the other."""

    def __init__(self, producer: _Producer, outcome: Outcome) -> None:
        self._connection = producer.connection
        self._request = producer.request
        self._outcome = outcome
        self._began = 0.0
        self.may_begin: Callable[[], bool] = bool

    def begin(self) -> None:
        if self.may_begin():
            self._began = time.perf_counter()
            self._connection.call(_SEND, self._request, self._end)

    def _end(self, answer: bytes) -> None:
        _check_answer(answer)
        self._outcome.count += 1
        self._outcome.times_ms.append((time.perf_counter() - self._began) * 1e3)
        self.begin()

    def flush(self, loop: Loop) -> None:
        loop.flush(self._connection)

    @property
    def is_idle(self) -> bool:
        return not self._connection.calls


def _send_while(loop: Loop, lanes: list[_Lane], go_on: Callable[[int], bool]) -> None:
    """Sends while `go_on`, which is told how many were begun, and waits for the last ones."""
    begun = 0

    def may_begin() -> bool:
        nonlocal begun
        if not go_on(begun):
            return False
        begun += 1
        return True

    for lane in lanes:
        lane.may_begin = may_begin
        lane.begin()
        lane.flush(loop)
    while not all(lane.is_idle for lane in lanes):
        loop.turn()


# -- consuming ------------------------------------------------------------------------------


class _Consumer:
    """A consumer on a connection: its stream, and its acknowledgements of one message each."""

    def __init__(
        self, loop: Loop, address: str, topic: str, subscription: str, *, acks_at_once: int
    ) -> None:
        self._loop = loop
        self._connection = loop.connect(address)
        request = danube.ConsumerRequest(
            request_id=_REQUEST_ID,
            topic_name=topic,
            consumer_name="bench",
            subscription=subscription,
            subscription_type=danube.ConsumerRequest.SubscriptionType.Value("Exclusive"),
        )
        answer = loop.ask(self._connection, _SUBSCRIBE, request.SerializeToString())
        self._id = danube.ConsumerResponse.FromString(answer).consumer_id
        self._tail = danube.AckRequest(subscription_name=subscription).SerializeToString()
        self._acks_at_once = acks_at_once
        self._waiting: deque[bytes] = deque()
        self._under_way = 0
        self._seen: set[bytes] = set()
        self.acked = 0
        self.on_payload: Callable[[bytes], object] = len

    def open(self) -> None:
        """Opens the stream; messages arrive from now on."""
        request = danube.ReceiveRequest(request_id=_REQUEST_ID, consumer_id=self._id)
        self._connection.call(_RECEIVE, request.SerializeToString(), self._ended, self._take)
        self._loop.flush(self._connection)

    def _ended(self, _: bytes) -> None:
        raise InvariantError("the stream of a consumer has ended")

    def _take(self, message: bytes) -> None:
        msg_id, payload = _parts(message)
        self.on_payload(payload)
        if msg_id in self._seen:
            raise InvariantError("a message was delivered twice")
        self._seen.add(msg_id)
        self._waiting.append(msg_id)
        if self._under_way < self._acks_at_once:
            self._ack()

    def _ack(self) -> None:
        msg_id = self._waiting.popleft()
        self._under_way += 1
        request = b"".join((_ACK_HEAD, varint(len(msg_id)), msg_id, self._tail))
        self._connection.call(_ACK, request, self._acked)

    def _acked(self, answer: bytes) -> None:
        _check_answer(answer)
        self.acked += 1
        self._under_way -= 1
        if self._waiting:
            self._ack()


_ACK_HEAD: Final[bytes] = danube.AckRequest(request_id=_REQUEST_ID).SerializeToString() + b"\x12"


def _parts(message: bytes) -> tuple[bytes, bytes]:
    """The msg_id and the payload of a StreamMessage, which are its fields 2 and 3."""
    at, msg_id, payload = 0, b"", b""
    while at < len(message):
        tag, at = message[at], at + 1
        size = shift = 0
        while True:
            byte, at = message[at], at + 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if tag == 0x12:
            msg_id = message[at : at + size]
        elif tag == 0x1A:
            payload = message[at : at + size]
        if tag & 7 == 2:
            at += size
        if msg_id and payload:
            break
    return msg_id, payload


def consume(
    address: str,
    *,
    count: int,
    pid: int | None = None,
    topic: str = TOPIC,
    subscription: str = "bench",
    acks_at_once: int = ACKS_AT_ONCE,
    fill: bool = True,
) -> Outcome:
    """Consumes a backlog of `count` messages, which is published first if `fill` says so.

    Raises:
        UnavailableError: A call failed.
        InvariantError: A message came twice.
    """
    outcome = Outcome(count=count)
    with Loop() as loop:
        _Producer(loop, address, topic, "bench-0")  # makes the topic
        consumer = _Consumer(loop, address, topic, subscription, acks_at_once=acks_at_once)
        if fill:
            send(address, count=count, topic=topic, warm_up=0)
        with _measured(outcome, pid):
            consumer.open()
            while consumer.acked < count:
                loop.turn()
    return outcome


# -- a steady flow --------------------------------------------------------------------------


def flow(
    address: str,
    *,
    rate: float,
    seconds: float,
    pid: int | None = None,
    topic: str = TOPIC,
    subscription: str = "flow",
) -> Outcome:
    """Sends at a steady rate, whether or not answers come, to one consumer that acknowledges.

    It is over when every acknowledgement is answered: `rate` is what was held.

    Raises:
        UnavailableError: A call failed.
        InvariantError: A message came twice.
    """
    count = max(1, int(rate * seconds))
    outcome = Outcome(count=count)
    clock = time.perf_counter
    times = outcome.times_ms
    answered = 0

    def arrived(payload: bytes) -> None:
        times.append((clock() - _STAMP.unpack_from(payload)[0]) * 1e3)

    def answer(data: bytes) -> None:
        nonlocal answered
        _check_answer(data)
        answered += 1

    with Loop() as loop:
        producer = _Producer(loop, address, topic, "bench-flow")
        consumer = _Consumer(loop, address, topic, subscription, acks_at_once=1 << 30)
        consumer.on_payload = arrived
        consumer.open()
        connection: Connection = producer.connection
        with _measured(outcome, pid):
            began, sent = clock(), 0
            while consumer.acked < count or answered < count:
                now = clock()
                while sent < count and began + sent / rate <= now:
                    connection.call(_SEND, producer.stamped(clock()), answer)
                    sent += 1
                loop.flush(connection)
                loop.turn(began + sent / rate - clock() if sent < count else None)
    return outcome


def main() -> None:
    """Runs a workload against a server and prints its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http2_client")
    parser.add_argument("--address", required=True, metavar="HOST:PORT")
    parser.add_argument("--mode", choices=("send", "consume", "flow"), default="send")
    parser.add_argument("--producers", type=int, default=_PRODUCERS, help="of mode send")
    parser.add_argument("--seconds", type=float, default=3.0, help="of modes send and flow")
    parser.add_argument("--count", type=int, default=20_000, help="messages of mode consume")
    parser.add_argument("--rate", type=float, default=1000.0, help="messages a second of mode flow")
    parser.add_argument("--pid", type=int, help="the server's process, for its processor time")
    parser.add_argument("--topic", default=TOPIC)
    options = parser.parse_args()
    address, pid, topic = options.address, options.pid, options.topic
    if options.mode == "send":
        found = send(
            address, producers=options.producers, seconds=options.seconds, pid=pid, topic=topic
        )
    elif options.mode == "consume":
        found = consume(address, count=options.count, pid=pid, topic=topic)
    else:
        found = flow(address, rate=options.rate, seconds=options.seconds, pid=pid, topic=topic)
    print(json.dumps({"mode": options.mode, **found.as_json()}))


if __name__ == "__main__":
    main()
