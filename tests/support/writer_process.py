"""A process that appends until somebody kills it, and says over a pipe what it was promised.

    python -m tests.support.writer_process DIR --topics 3 --threads 3 --level synced --session s1

Every line goes out with one write(2), so a kill loses no line and tears none. A `send` stands
there before the append is made, an `ack` after `wait` has returned:

    ready                            all topics are open
    send TOPIC ID
    ack TOPIC ID OFFSET LEVEL
    error TOPIC ID ERROR             the append raised, nothing was accepted
    unknown TOPIC ID ERROR           accepted, and the wait raised
    state TOPIC STATE                after an error
    trim TOPIC BEFORE                about to be made
    reopened TOPIC                   after its writer had stopped
    end                              clean end, everything closed

What it does after an error is what a program is told to do: go on after CapacityError, open the
topic again after DiskError and ClosedError. Payloads are those of `oracle.payload_of`.

`--break sync` makes every file sync do nothing, `--break wait` acknowledges without waiting: broken
products that the tests have to catch.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import threading
import time
from types import FrameType

import ister
from ister.fs import local
from tests.support.oracle import payload_of, settings_of

_PAUSE_AFTER_ERROR_SECONDS = 0.01


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--topics", type=int, default=3)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--level", choices=["written", "synced", "mixed"], default="synced")
    parser.add_argument("--session", default="s0", help="makes this process's ids its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--burst", type=int, default=6, help="at most so many appends per wait")
    parser.add_argument("--size", type=int, default=0, help="payload bytes; many sizes if 0")
    parser.add_argument("--messages", type=int, default=0, help="per thread; without an end if 0")
    parser.add_argument("--rotate-bytes", type=int, default=16384)
    parser.add_argument("--fsync-interval-ms", type=int, default=50)
    parser.add_argument("--trim-keep", type=int, default=0, help="trim beyond so many messages")
    parser.add_argument("--break", dest="broken", choices=["sync", "wait"], default=None)
    parser.add_argument("--limit-file-size", type=int, default=0, help="RLIMIT_FSIZE, in bytes")
    parser.add_argument(
        "--limit-free-files", type=int, default=-1, help="RLIMIT_NOFILE: so many beyond those open"
    )
    return parser.parse_args(arguments)


def say(*words: object) -> None:
    """One line, one write."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def public_name(error: ister.IsterError) -> str:
    """The class as users know it."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ister.__all__)


class Writer:
    """The topics of one log, shared by the threads."""

    def __init__(self, log: ister.Log, options: argparse.Namespace) -> None:
        self._log = log
        self._options = options
        self._topics: dict[str, ister.Topic] = {}
        self._trimming = threading.Lock()

    def open_topics(self) -> None:
        for number in range(self._options.topics):
            name = f"/fault/t{number}"
            self._topics[name] = self._log.topic(name, create=True)

    def run(self, thread: int) -> None:
        """Appends in bursts, one topic after the other by chance."""
        options = self._options
        chance = random.Random(f"{options.seed}/{options.session}/{thread}")
        names = list(self._topics)
        suffix = f"#{options.size}" if options.size else ""
        number = 0
        while not options.messages or number < options.messages:
            name = chance.choice(names)
            # Another thread may open the topic anew; offsets belong to the one they came from.
            topic = self._topics[name]
            burst: list[tuple[str, int]] = []
            for _ in range(chance.randint(1, options.burst)):
                message_id = f"{options.session}.{thread}.{number}{suffix}"
                number += 1
                offset = self._append(topic, message_id)
                if offset is not None:
                    burst.append((message_id, offset))
            level = options.level
            if level == "mixed":
                level = chance.choice(["written", "synced"])
            self._wait(topic, burst, level)
            self._trim(name)

    def _append(self, topic: ister.Topic, message_id: str) -> int | None:
        say("send", topic.name, message_id)
        try:
            return topic.append(payload_of(message_id))
        except ister.IsterError as error:
            say("error", topic.name, message_id, public_name(error))
            self._after(topic, error)
        return None

    def _wait(self, topic: ister.Topic, burst: list[tuple[str, int]], level: str) -> None:
        """Waits for the last one, which says the same of those before it."""
        if not burst:
            return
        try:
            topic.wait(burst[-1][1], level)
        except ister.IsterError as error:
            for message_id, _ in burst:
                say("unknown", topic.name, message_id, public_name(error))
            self._after(topic, error)
        else:
            for message_id, offset in burst:
                say("ack", topic.name, message_id, offset, level)

    def _after(self, topic: ister.Topic, error: ister.IsterError) -> None:
        name = topic.name
        say("state", name, topic.state.value)
        if not isinstance(error, ister.CapacityError):
            try:
                reopened = self._log.topic(name)
            except ister.IsterError as again:
                say("state", name, public_name(again))
            else:
                if reopened is not self._topics[name]:
                    say("reopened", name)
                self._topics[name] = reopened
        time.sleep(_PAUSE_AFTER_ERROR_SECONDS)

    def _trim(self, name: str) -> None:
        keep = self._options.trim_keep
        topic = self._topics[name]
        if not keep or topic.watermarks.synced - topic.earliest < 2 * keep:
            return
        if self._trimming.acquire(blocking=False):
            try:
                before = topic.watermarks.synced - keep
                say("trim", name, before)
                topic.wal.trim(before)
            except ister.IsterError as error:
                say("state", name, public_name(error))
            finally:
                self._trimming.release()


def lower_limits(options: argparse.Namespace) -> None:
    """Sets the limits asked for; SIGUSR1 lifts them."""
    lowered: list[tuple[int, tuple[int, int]]] = []

    def lower(kind: int, value: int) -> None:
        soft, hard = resource.getrlimit(kind)
        lowered.append((kind, (soft, hard)))
        resource.setrlimit(kind, (value, hard))

    if options.limit_file_size:
        lower(resource.RLIMIT_FSIZE, options.limit_file_size)
    if options.limit_free_files >= 0:
        open_now = max(map(int, os.listdir("/proc/self/fd")))
        lower(resource.RLIMIT_NOFILE, open_now + options.limit_free_files)

    def lift(number: int, frame: FrameType | None) -> None:
        for kind, before in lowered:
            resource.setrlimit(kind, before)
        say("lifted")

    signal.signal(signal.SIGUSR1, lift)


def main() -> int:
    options = parse_arguments()
    sys.setswitchinterval(0.001)
    if options.broken == "sync":
        local._LocalFile.sync = lambda file: None
    elif options.broken == "wait":
        ister.Topic.wait = lambda topic, offset, level: None
    settings = settings_of(
        options.directory,
        level=options.level,
        rotate_max_bytes=options.rotate_bytes,
        fsync_interval_ms=options.fsync_interval_ms,
    )
    with ister.open(settings) as log:
        writer = Writer(log, options)
        writer.open_topics()
        say("ready")
        lower_limits(options)
        threads = [
            threading.Thread(target=writer.run, args=(number,)) for number in range(options.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
