"""The owner of a log's topics as a Flight server, for tests: what the broker will serve.

`FlightTopics` serves an open log from this process, and counts what it is asked for:

    with ister.open(directory) as log, FlightTopics(log) as server:
        FlightClient(server.address)

`FlightProcess` serves a directory, or an `ister.yml`, from a process of its own that can be killed,
stopped and started again at the same port. It is `python -m servers.flight <directory>`, which
prints its address as one line and ends with its standard input.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import flight

import ister
from ister.client.contract import (
    Action,
    AppendStaged,
    FindTime,
    FoundTime,
    RangeTicket,
    TopicNames,
    TopicStatus,
    WatermarksRequest,
    encode_appended,
    encode_error,
    encode_settings,
)
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OffsetOutOfRangeError,
)
from ister.format.columnar import arrow_schema
from ister.topic.log import Log
from ister.topic.topic import Topic

__all__ = ["FlightProcess", "FlightTopics"]

# Far beyond all calendars, and microseconds still fit into 64 bits.
_TIME_MS_MAX = 1 << 52

READ = "read"
"""What reads are counted as; actions are counted by their own names."""


class FlightTopics:
    """A log, served on a loopback port until the block ends.

    Args:
        log: An open one.
        port: Where to listen; any free one by default.
    """

    def __init__(self, log: Log, *, port: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        """How often the server was asked for what."""
        self._lock = threading.Lock()
        self._server = _Server(log, port, self._count)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Waits for the calls under way, and ends. May be called twice."""
        self._server.shutdown()
        self._server.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, what: str) -> None:
        with self._lock:
            self.calls[what] += 1


class _Server(flight.FlightServerBase):
    """Serves as soon as it is made, on threads of gRPC."""

    def __init__(self, log, port, count):
        self._log = log
        self._count = count
        self._actions = {
            Action.WATERMARKS: self._watermarks,
            Action.TOPICS: self._topics,
            Action.FIND_TIME: self._find_time,
            Action.APPEND_STAGED: self._append_staged,
            Action.STORAGE: self._storage,
        }
        super().__init__(f"grpc://127.0.0.1:{port}")

    def do_get(self, context, ticket):
        self._count(READ)
        with _sent():
            asked = RangeTicket.from_json(ticket.ticket)
            topic = self._log.topic(asked.topic)
            if asked.incarnation != _incarnation(topic):
                raise ConflictError(
                    "the topic is another one of the same name",
                    topic=asked.topic,
                    hint="it was deleted and made again: ask for its watermarks",
                )
            _check_range(topic, asked.start, asked.end)
            schema = arrow_schema(asked.columns)
            return flight.GeneratorStream(schema, _batches(topic, asked))

    def do_action(self, context, action):
        self._count(action.type)
        with _sent():
            answer = self._actions.get(action.type)
            if answer is None:
                raise InvalidRequestError(
                    f"there is no action {action.type!r}", hint=f"one of: {', '.join(Action)}"
                )
            return [flight.Result(item) for item in answer(action.body.to_pybytes())]

    def list_actions(self, context):
        return [(str(action), action.name) for action in Action]

    # -- actions ----------------------------------------------------------------------------

    def _watermarks(self, body: bytes) -> list[bytes]:
        request = WatermarksRequest.from_json(body)
        return [_status(self._log.topic(name)).to_json() for name in request.topics]

    def _topics(self, body: bytes) -> list[bytes]:
        return [TopicNames(topics=tuple(self._log.topics())).to_json()]

    def _find_time(self, body: bytes) -> list[bytes]:
        asked = FindTime.from_json(body)
        topic = self._log.topic(asked.topic)
        _check_range(topic, asked.start, asked.end)
        return [FoundTime(offset=_find(topic, asked)).to_json()]

    def _append_staged(self, body: bytes) -> list[bytes]:
        asked = AppendStaged.from_json(body)
        try:
            self._log.topic(asked.topic)
        except NotFoundError:
            if not asked.create:
                raise
            self._log.topic(asked.topic, create=True, ack=asked.ack, codec=asked.codec)
        return [encode_appended(self._log.append_staged(asked.topic, asked.staged))]

    def _storage(self, body: bytes) -> list[bytes]:
        return [encode_settings(self._log.config)]


@contextmanager
def _sent() -> Iterator[None]:
    """Sends errors to the client."""
    try:
        yield
    except Exception as error:
        raise flight.FlightServerError(encode_error(error)) from error


def _batches(topic: Topic, asked: RangeTicket) -> Iterator[pa.RecordBatch]:
    with _sent():
        if asked.start < asked.end:
            yield from topic.read_arrow(asked.start, end=asked.end, columns=asked.columns)


def _check_range(topic: Topic, start: int, end: int) -> None:
    """Refuses what is not there, not visible, or not safe from a crash."""
    earliest, readable = topic.earliest, min(topic.wal.visible, topic.watermarks.synced)
    if not earliest <= start <= end <= readable:
        raise OffsetOutOfRangeError(
            f"offsets {start} up to {end} are not all there",
            earliest=earliest,
            next=readable,
            topic=topic.name,
            offset=start if start < earliest else end,
        )


def _incarnation(topic: Topic) -> str:
    return topic.tier.owned.record.incarnation if topic.tier is not None else ""


def _status(topic: Topic) -> TopicStatus:
    marks = topic.watermarks
    return TopicStatus(
        topic=topic.name,
        incarnation=_incarnation(topic),
        earliest=topic.earliest,
        trimmed=marks.trimmed,
        tiered=marks.tiered,
        synced=marks.synced,
        written=marks.written,
        next=marks.next,
        codec=topic.codec,
        ack=topic.ack,
    )


def _find(topic: Topic, asked: FindTime) -> int | None:
    """Looks at every message of the range, which is slow and right."""
    if asked.start == asked.end:
        return None
    time_ms = max(-_TIME_MS_MAX, min(asked.publish_time_ms, _TIME_MS_MAX))
    wanted = pa.scalar(time_ms * 1000, pa.int64())
    for batch in topic.read_arrow(asked.start, end=asked.end, columns=("offset", "publish_time")):
        times = batch["publish_time"].cast(pa.int64())
        found = pc.index(pc.greater_equal(times, wanted), True).as_py()
        if found >= 0:
            return batch["offset"][found].as_py()
    return None


class FlightProcess:
    """The same in a process of its own.

    Args:
        source: A directory for data or the path of an `ister.yml`.
        port: Where to listen; any free one by default, and the same one when it is started again.
    """

    def __init__(self, source: str | os.PathLike[str], *, port: int = 0) -> None:
        self._source = os.fspath(source)
        self._port = port
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "servers.flight", self._source, "--port", str(self._port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parent.parent,
        )
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.stop()
            raise RuntimeError(f"the server of {self._source} did not start")
        self._port = int(self.address.rpartition(":")[2])

    def pause(self) -> None:
        """It keeps its connections and answers nothing any more."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def stop(self) -> None:
        """Ends it in order: the log is closed."""
        if self._process is not None:
            self._process.stdin.close()
            self._reap()

    def _reap(self) -> None:
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Whatever state it is in: nobody looks at it any more.
        self.kill()


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m servers.flight")
    parser.add_argument("source", help="a directory for data, or an ister.yml")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with ister.open(arguments.source) as log, FlightTopics(log, port=arguments.port) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
