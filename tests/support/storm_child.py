"""Appends, waits, reads and closes while a signal handler raises again and again.

The main thread makes every kind of call; a timer's handler raises `Interrupt` wherever it is.
Beside it one thread appends and another one reads. In the end everything is read back and compared.
Prints one line of JSON. `python storm_child.py DIRECTORY INTERRUPTS SEED`.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import threading
import time

import pyarrow as pa

import ister
import ister.topic.columns  # before the storm: an interrupted import is Python's own affair
from ister import kernels
from ister.base.model import StreamMessage

CLOSE_EVERY = 400
THREADS = ("ister-commit", "ister-timer", "ister-call")
LIBRARY = ister.__file__.removesuffix("__init__.py")


class Interrupt(BaseException):
    """What the handler raises."""


class Storm:
    """A timer whose handler raises, at random short intervals, while it blows."""

    def __init__(self, seed):
        self.count = 0
        self._random = random.Random(seed)
        self._is_on = False
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number, frame):
        if not self._is_on:
            return
        self._arm()
        # Anywhere below a call of the library; the test's own lines are not what is tested.
        while frame is not None:
            if LIBRARY in frame.f_code.co_filename:
                self.count += 1
                raise Interrupt
            frame = frame.f_back

    def _arm(self):
        # Mostly within a call or two; now and then long enough for a sync.
        longest = self._random.choice([0.0001, 0.0003, 0.001, 0.005])
        signal.setitimer(signal.ITIMER_REAL, 0.00002 + self._random.random() * longest)

    def begin(self):
        self._is_on = True
        self._arm()

    def end(self):
        self._is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)


class Beside:
    """Another thread that appends, and one that reads everything while it comes."""

    def __init__(self, topic):
        self.topic = topic
        self.sent = {}
        self.got = []
        self.failure = None
        self._first = topic.watermarks.next
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(f,)) for f in (self._append, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, function):
        try:
            function()
        except BaseException as error:
            self.failure = repr(error)

    def _append(self):
        number = 0
        while not self._is_over.wait(0.001):
            payload = b"beside %d %d" % (self._first, number)
            offset = self.topic.append(payload)
            self.sent[offset] = payload
            if number % 16 == 0:
                self.topic.wait(offset)
            number += 1

    def _read(self):
        with self.topic.reader(self._first) as reader:
            while not (self._is_over.is_set() and reader.next_offset >= self.end):
                for message in reader.next_batch(timeout=0.05):
                    self.got.append((message.offset, message.payload))

    end = 1 << 62

    def stop(self):
        self._is_over.set()
        self._threads[0].join()
        self.topic.flush()
        self.end = self.topic.watermarks.synced
        self._threads[1].join()


def main(directory, wanted, seed):
    # Before the storm: starting a thread that is interrupted raises whatever Python makes of it.
    kernels.request()
    storm = Storm(seed)
    chance = random.Random(seed + 1)
    stored = []  # what the topic has to hold, known after each round
    kinds = {}
    rounds = 0
    while storm.count < wanted:
        log = ister.open(
            {
                "storage": {
                    "mode": "local_only",
                    "wal": {"dir": directory, "cache_capacity": 64, "rotate_max_bytes": 1 << 20},
                }
            }
        )
        topic = log.topic("/default/storm", create=True, ack="synced")
        first = topic.watermarks.next
        assert first == len(stored), (first, len(stored))
        beside = Beside(topic)
        reader = topic.reader(first)
        offered, accepted, got = {}, {}, []
        number = 0
        target = min(wanted, storm.count + CLOSE_EVERY)
        storm.begin()
        while storm.count < target:
            try:
                kind = chance.choice(["append", "many", "arrow", "record", "wait", "next", "next"])
                number += 1
                payload = b"%d of round %d " % (number, rounds) + b"." * chance.randrange(200)
                if kind == "append":
                    offered[number] = [payload]
                    accepted[number] = topic.append(payload)
                elif kind == "many":
                    offered[number] = [payload, payload + b"b", payload + b"c"]
                    accepted[number] = topic.append_many(offered[number]).start
                elif kind == "arrow":
                    offered[number] = [payload, payload + b"b"]
                    batch = pa.RecordBatch.from_pydict(
                        {"payload": pa.array(offered[number], pa.binary())}
                    )
                    accepted[number] = topic.append_arrow(batch).start
                elif kind == "record":
                    offered[number] = [payload]
                    accepted[number] = topic.appender.append_record(
                        StreamMessage(payload=payload, publish_time=number)
                    )
                elif kind == "wait" and topic.watermarks.next > first:
                    topic.wait(topic.watermarks.next - 1)
                elif kind == "next":
                    got.append(reader.next_batch(chance.choice([1, 7, 4096]), timeout=0.001))
            except Interrupt:
                kinds[kind] = kinds.get(kind, 0) + 1
        storm.end()
        beside.stop()
        while reader.next_offset < topic.watermarks.synced:
            got.append(reader.next_batch(timeout=10))
        now = [m.payload for m in topic.read(start=first)]
        # What came out of the reader, the other reader and a new one is the same.
        flat = [(m.offset, m.payload) for batch in got for m in batch]
        assert flat == [*enumerate(now, first)], "the reader skipped or repeated"
        assert beside.failure is None, beside.failure
        assert beside.got == flat, "the reader beside skipped or repeated"
        assert len(now) == topic.watermarks.next - first
        # Each call is in once and whole, or not at all.
        place = {payload: n for n, payload in enumerate(now, first)}
        assert len(place) == len(now), "a message is there twice"
        for offset, payload in beside.sent.items():
            assert now[offset - first] == payload, "of the thread beside"
        expected = set(beside.sent.values())
        for n, payloads in offered.items():
            at = place.get(payloads[0])
            if n in accepted:
                assert at == accepted[n], "an accepted message is elsewhere"
            if at is not None:
                assert now[at - first : at - first + len(payloads)] == payloads, "torn"
                expected.update(payloads)
            else:
                assert not any(payload in place for payload in payloads), "torn"
        assert set(now) == expected, "something that nobody sent"
        stored += now
        # Closing, interrupted until it comes through.
        storm.begin()
        is_closed = False
        while not is_closed:
            try:
                chance.choice([topic, log]).close()
                log.close()
                is_closed = True
            except Interrupt:
                kinds["close"] = kinds.get("close", 0) + 1
        storm.end()
        log.close()
        left = [t.name for t in threading.enumerate() if t.name.startswith(THREADS)]
        deadline = time.monotonic() + 60
        while left and time.monotonic() < deadline:
            left = [t.name for t in threading.enumerate() if t.name.startswith(THREADS)]
        if left:
            faulthandler.dump_traceback()
        assert not left, left
        rounds += 1
    with ister.open({"storage": {"mode": "local_only", "wal": {"dir": directory}}}) as log:
        found = [m.payload for m in log.topic("/default/storm").read()]
    assert found == stored, "what was stored is not what is read back"
    print(
        json.dumps({"interrupts": storm.count, "rounds": rounds, "messages": len(stored), **kinds})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
