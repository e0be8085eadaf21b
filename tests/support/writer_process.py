"""A process that appends until somebody kills or stops it, and says over a pipe what it was told.

    python -m tests.support.writer_process SETTINGS --mode write --topics 3 --session s1

SETTINGS is a tree of settings as JSON. Every line goes out with one write(2), so a kill loses no
line and tears none. A `send` stands there before the append is made, an `ack` after `wait` has
returned:

    ready                            all topics are open
    send TOPIC ID
    ack TOPIC ID OFFSET LEVEL WHEN   when the wait ended, on the machine's monotonic clock
    error TOPIC ID ERROR             the append raised, nothing was accepted
    unknown TOPIC ID ERROR           accepted, and the wait raised
    state TOPIC STATE                after an error
    trim TOPIC BEFORE                about to be made
    reopened TOPIC                   after its writer had stopped
    did WHAT                         an upload, a trim, a read… has ended well
    failed WHAT ERROR                it raised
    begin WHAT TOPIC                 it is about to begin
    wrong TEXT                       something that must never be
    end                              clean end, everything closed

Payloads are those of `oracle.payload_of`. Modes:

    write      producers that trim what they have sent, and do after an error what a program is told
               to do: go on after CapacityError, open the topic again after DiskError, ClosedError
    load       producers, and beside them uploads, trims, reads and collections
    take_over  the same with topics that another node had
    share      producers of topics that share express objects, and beside them re-sorting,
               collections of express objects, trims and reads
    single     one producer that waits for each message, and says of every error what it was
    seal       appends, hands the topic over, opens it again, and so on
    expire     appends large messages and removes old objects, and so on
    delete     makes a topic of its own, uploads, deletes it, and so on
    repair     damages an object of its own that local files still have, repairs, and so on

Broken products that the tests have to catch: `--break sync` makes every file sync do nothing,
`--break wait` acknowledges without waiting, `--break trim` removes local files that the bucket does
not have.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import ister
from ister import errors
from ister.fs import local
from tests.support.oracle import payload_of

_PAUSE_AFTER_ERROR_SECONDS = 0.02
Sent = list[tuple[str, int]]
"""Messages that were accepted, and their offsets."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings")
    parser.add_argument("--mode", default="load")
    parser.add_argument("--topics", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", choices=["written", "synced", "mixed"], default="synced")
    parser.add_argument("--tiered-share", type=float, default=0.3, help="waits up to `tiered`")
    parser.add_argument("--session", default="s0", help="makes this process's ids its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--burst", type=int, default=8, help="at most so many appends per wait")
    parser.add_argument("--size", type=int, default=0, help="payload bytes; many sizes if 0")
    parser.add_argument("--messages", type=int, default=0, help="per thread; without an end if 0")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between two bursts")
    parser.add_argument("--trim-keep", type=int, default=0, help="trim beyond so many messages")
    parser.add_argument("--break", dest="broken", choices=["sync", "wait", "trim"])
    parser.add_argument("--limit-file-size", type=int, default=0, help="RLIMIT_FSIZE, in bytes")
    parser.add_argument(
        "--limit-free-files", type=int, default=-1, help="RLIMIT_NOFILE: so many beyond those open"
    )
    return parser.parse_args()


def say(*words: object) -> None:
    """One line, one write."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def public_name(error: ister.IsterError) -> str:
    """The class as users know it."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)


class Worker:
    """What the modes are made of: the topics of one log, shared by threads."""

    def __init__(self, log: ister.Log, options: argparse.Namespace) -> None:
        self.log = log
        self.options = options
        self.topics: dict[str, ister.Topic] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._trimming = threading.Lock()

    def open_topics(self) -> None:
        for number in range(self.options.topics):
            name = f"/fault/t{number}"
            self.topics[name] = self._open(name)

    def _open(self, name: str) -> ister.Topic:
        while True:
            try:
                is_taken = self.options.mode == "take_over"
                return self.log.topic(name, create=True, take_over=is_taken)
            except ister.ConflictError:
                if self.options.mode != "share":
                    raise
                time.sleep(0.05)  # the node that had it is gone, and its lease is not

    def chance(self, *of: object) -> random.Random:
        return random.Random("/".join(map(str, (self.options.seed, self.options.session, *of))))

    def append(self, topic: ister.Topic, sender: str) -> tuple[str, int] | None:
        with self._lock:
            self._number += 1
            size = f"#{self.options.size}" if self.options.size else ""
            message_id = f"{self.options.session}.{sender}.{self._number}{size}"
        say("send", topic.name, message_id)
        try:
            return message_id, topic.append(payload_of(message_id))
        except ister.IsterError as error:
            say("error", topic.name, message_id, public_name(error))
            self._after(topic, error)
        return None

    def wait(self, topic: ister.Topic, sent: Sent, level: str) -> None:
        """Waits for the last one, which says the same of those before it."""
        if not sent:
            return
        try:
            topic.wait(sent[-1][1], level)
        except ister.IsterError as error:
            for message_id, _ in sent:
                say("unknown", topic.name, message_id, public_name(error))
            self._after(topic, error)
        else:
            moment = time.monotonic()
            for message_id, offset in sent:
                say("ack", topic.name, message_id, offset, level, moment)

    def _after(self, topic: ister.Topic, error: ister.IsterError) -> None:
        name = topic.name
        if self.options.mode == "write":
            say("state", name, topic.state.value)
            if not isinstance(error, ister.CapacityError):
                try:
                    reopened = self.log.topic(name)
                except ister.IsterError as again:
                    say("state", name, public_name(again))
                else:
                    if reopened is not self.topics[name]:
                        say("reopened", name)
                    self.topics[name] = reopened
        time.sleep(_PAUSE_AFTER_ERROR_SECONDS)

    def burst(self, topic: ister.Topic, sender: str, count: int, level: str) -> None:
        sent = [one for _ in range(count) if (one := self.append(topic, sender)) is not None]
        self.wait(topic, sent, level)

    def attempt(self, what: str, call: Callable[[], object]) -> None:
        try:
            result = call()
        except ister.IsterError as error:
            say("failed", what, public_name(error))
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
        else:
            say("did", what)
            if what == "trim" and result:
                say("did", "removal")

    def level(self, chance: random.Random) -> str:
        if chance.random() < self.options.tiered_share:
            return "tiered"
        level = self.options.level
        return chance.choice(["written", "synced"]) if level == "mixed" else level

    def _trim(self, name: str) -> None:
        keep = self.options.trim_keep
        topic = self.topics[name]
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

    # -- modes --------------------------------------------------------------------------------

    def produce(self, thread: int) -> None:
        """Appends in bursts, one topic after the other by chance."""
        options = self.options
        chance = self.chance(thread)
        names = sorted(self.topics)
        sent = 0
        while not options.messages or sent < options.messages:
            name = chance.choice(names)
            count = chance.randint(1, options.burst)
            # Another thread may open the topic anew; offsets belong to the one they came from.
            self.burst(self.topics[name], str(thread), count, self.level(chance))
            sent += count
            self._trim(name)
            if options.pause_ms:
                time.sleep(options.pause_ms / 1000)

    def tend(self, calls: dict[str, Callable[[ister.Topic], object]], words: str) -> None:
        """Does what it is told by chance, for one topic or the other."""
        chance = self.chance("tend")
        while True:
            topic = self.topics[chance.choice(sorted(self.topics))]
            what = chance.choice(words.split())
            if what == "read":
                self.attempt(what, lambda topic=topic: check_read(topic, chance))
            else:
                self.attempt(what, lambda what=what, topic=topic: calls[what](topic))
            time.sleep(chance.uniform(0.0, 0.01))

    def load(self) -> None:
        calls = {
            "upload": lambda topic: topic.upload(),
            "trim": break_trim if self.options.broken else trim,
            "collect": lambda topic: topic.bucket.retention.collect_orphans(),
        }
        self._run(lambda: self.tend(calls, "upload upload trim trim read collect"))

    take_over = load

    def share(self) -> None:
        background = self.log._background
        calls = {
            "resort": lambda topic: topic.bucket.uploads.resort(),
            "collect": lambda topic: background._express.collect(),
            "trim": trim,
        }
        self._run(lambda: self.tend(calls, "resort resort collect trim read"))

    def write(self) -> None:
        self._run()

    def _run(self, *more: Callable[[], None]) -> None:
        works = [
            lambda number=number: self.produce(number) for number in range(self.options.threads)
        ]
        threads = [threading.Thread(target=work, daemon=True) for work in [*works, *more]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def single(self) -> None:
        (name, topic), *_ = self.topics.items()
        chance = self.chance()
        while True:
            self.burst(topic, "0", 1, self.level(chance))
            say("state", name, topic.state.value)
            time.sleep(max(self.options.pause_ms / 1000, 0.001))

    def seal(self) -> None:
        name = "/fault/t0"
        topic = self.topics[name]
        while True:
            self.burst(topic, "0", 5, "synced")
            self.attempt("seal", lambda: self.log.seal(name))
            topic = self.log.topic(name)
            self.burst(topic, "0", 2, "synced")

    def expire(self) -> None:
        topic = self.topics["/fault/t0"]
        bucket = topic.bucket
        while True:
            self.burst(topic, "0", 6, "synced")
            self.attempt("upload", topic.upload)
            if bucket.owned.last is not None:
                # The newest object stays, so this is the most that may go.
                say("trim", topic.name, bucket.owned.last.start)
            self.attempt("expire", bucket.retention.expire)
            self.attempt("trim", bucket.retention.trim)

    def delete(self) -> None:
        number = 0
        while True:
            self.burst(self.topics["/fault/t0"], "0", 3, "synced")
            name = f"/gone/{self.options.session}-{number}"
            number += 1
            topic = self.log.topic(name, create=True)
            for count in range(3):
                topic.wait(topic.append(b"%d" % count))
                topic.upload()
            say("begin", "delete", name)
            self.log.delete(name)
            say("did", "delete")

    def repair(self) -> None:
        topic = self.topics["/fault/t0"]
        root = Path(self.log.config.storage.cloud.root or "", "storage/topics/fault/t0/objects")
        while True:
            self.burst(topic, "0", 5, "synced")
            self.attempt("upload", topic.upload)
            last = topic.bucket.owned.last
            if last.start >= topic.wal.trimmed:
                path = root / last.object_id
                path.write_bytes(path.read_bytes()[:-1] + b"!")
                say("did", "damage")
                self.attempt("repair", lambda: self.log.repair(topic.name))


def trim(topic: ister.Topic) -> int:
    return topic.bucket.retention.trim()


def break_trim(topic: ister.Topic) -> int:
    """What no product may do: removes whatever is synced."""
    return topic.wal.trim(topic.watermarks.synced)


def check_read(topic: ister.Topic, chance: random.Random) -> None:
    """Reads on from some offset: each one once, none left out."""
    end = topic.watermarks.synced if topic.ack != "tiered" else topic.watermarks.tiered
    start = chance.randint(topic.earliest, end)
    expected = start
    for message in topic.read(start, end=end):
        if message.offset != expected:
            say("wrong", f"offset-{message.offset}-instead-of-{expected}")
        expected += 1
    if expected != end:
        say("wrong", f"read-from-{start}-ends-at-{expected}-instead-of-{end}")


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
    with ister.open(json.loads(options.settings)) as log:
        worker = Worker(log, options)
        worker.open_topics()
        say("ready")
        lower_limits(options)
        getattr(worker, options.mode)()
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
