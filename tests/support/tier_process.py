"""A process that owns topics with a bucket, and works until somebody kills or stops it.

    python -m tests.support.tier_process SETTINGS.json --mode load --session s1

It speaks as `writer_process.py` does, one line per write(2), and besides:

    ack TOPIC ID OFFSET LEVEL WHEN   also at `tiered`; when the wait ended, on the machine's clock
    did WHAT                         an upload, a trim, a read… has ended well
    failed WHAT ERROR                it raised
    begin WHAT TOPIC                 it is about to begin
    wrong TEXT                       something that must never be

Modes:

    load    producers, and beside them uploads, trims, reads and collections, until the end
    seal    appends, hands the topic over, opens it again, and so on
    expire  appends large messages and removes old objects, and so on
    delete  makes a topic of its own, uploads, deletes it, and so on
    repair  damages an object of its own that local files still have, repairs, and so on
    share   producers of topics that share express objects, and beside them re-sorting, collections
            of express objects, trims and reads, until the end
    single  one producer that waits for each message, and says of every error what it was

`--break trim` removes local files that the bucket does not have: the tests have to catch that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from functools import partial
from pathlib import Path

import ister
from ister import errors
from tests.support.oracle import payload_of

_PAUSE_AFTER_ERROR_SECONDS = 0.02


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings")
    parser.add_argument("--mode", default="load")
    parser.add_argument("--topics", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--session", default="s0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--burst", type=int, default=8)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between two bursts")
    parser.add_argument("--break", dest="broken", choices=["trim"], help="a broken product")
    parser.add_argument("--tiered-share", type=float, default=0.3, help="waits up to `tiered`")
    return parser.parse_args()


def say(*words: object) -> None:
    """One line, one write."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def public_name(error: ister.IsterError) -> str:
    """The class as users know it."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)


class Worker:
    """What the modes are made of."""

    def __init__(self, log: ister.Log, options: argparse.Namespace) -> None:
        self.log = log
        self.options = options
        self.topics: dict[str, ister.Topic] = {}
        self._number = 0
        self._lock = threading.Lock()

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

    def next_id(self, sender: str) -> str:
        with self._lock:
            self._number += 1
            size = f"#{self.options.size}" if self.options.size else ""
            return f"{self.options.session}.{sender}.{self._number}{size}"

    def append(self, topic: ister.Topic, sender: str) -> tuple[str, int] | None:
        message_id = self.next_id(sender)
        say("send", topic.name, message_id)
        try:
            return message_id, topic.append(payload_of(message_id))
        except ister.IsterError as error:
            say("error", topic.name, message_id, public_name(error))
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
        return None

    def wait(self, topic: ister.Topic, sent: list[tuple[str, int]], level: str) -> None:
        if not sent:
            return
        try:
            topic.wait(sent[-1][1], level)
        except ister.IsterError as error:
            for message_id, _ in sent:
                say("unknown", topic.name, message_id, public_name(error))
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
        else:
            moment = time.monotonic()
            for message_id, offset in sent:
                say("ack", topic.name, message_id, offset, level, moment)

    def burst(self, topic: ister.Topic, sender: str, count: int, level: str) -> None:
        sent = [one for _ in range(count) if (one := self.append(topic, sender)) is not None]
        self.wait(topic, sent, level)

    def attempt(self, what: str, call) -> None:
        try:
            result = call()
        except ister.IsterError as error:
            say("failed", what, public_name(error))
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
        else:
            say("did", what)
            if what == "trim" and result:
                say("did", "removal")

    # -- modes --------------------------------------------------------------------------------

    def produce(self, thread: int) -> None:
        options = self.options
        chance = random.Random(f"{options.seed}/{options.session}/{thread}")
        names = sorted(self.topics)
        while True:
            topic = self.topics[chance.choice(names)]
            level = "tiered" if chance.random() < options.tiered_share else "synced"
            self.burst(topic, str(thread), chance.randint(1, options.burst), level)
            if options.pause_ms:
                time.sleep(options.pause_ms / 1000)

    def tend(self) -> None:
        """Uploads, trims, reads and collects by chance."""
        chance = random.Random(f"{self.options.seed}/{self.options.session}/tend")
        while True:
            topic = self.topics[chance.choice(sorted(self.topics))]
            bucket = topic.bucket
            assert bucket is not None
            what = chance.choice(["upload", "upload", "trim", "trim", "read", "collect"])
            call = {
                "upload": topic.upload,
                "trim": bucket.retention.trim
                if not self.options.broken
                else partial(break_trim, topic),
                "read": lambda topic=topic: check_read(topic, chance),
                "collect": bucket.retention.collect_orphans,
            }[what]
            self.attempt(what, call)
            time.sleep(chance.uniform(0.0, 0.01))

    def tend_shared(self) -> None:
        """Re-sorts, collects, trims and reads by chance."""
        chance = random.Random(f"{self.options.seed}/{self.options.session}/tend")
        background = self.log._background
        assert background is not None
        while True:
            topic = self.topics[chance.choice(sorted(self.topics))]
            bucket = topic.bucket
            assert bucket is not None
            what = chance.choice(["resort", "resort", "collect", "trim", "read"])
            call = {
                "resort": bucket.uploads.resort,
                "collect": background._express.collect,
                "trim": bucket.retention.trim,
                "read": lambda topic=topic: check_read(topic, chance),
            }[what]
            self.attempt(what, call)
            time.sleep(chance.uniform(0.0, 0.01))

    def load(self) -> None:
        self._run(self.tend)

    take_over = load

    def share(self) -> None:
        self._run(self.tend_shared)

    def _run(self, tend) -> None:
        threads = [
            threading.Thread(target=self.produce, args=(number,), daemon=True)
            for number in range(self.options.threads)
        ]
        threads.append(threading.Thread(target=tend, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def single(self) -> None:
        (name, topic), *_ = self.topics.items()
        chance = random.Random(f"{self.options.seed}/{self.options.session}")
        while True:
            level = "tiered" if chance.random() < self.options.tiered_share else "synced"
            self.burst(topic, "0", 1, level)
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
        assert bucket is not None
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
        bucket = topic.bucket
        assert bucket is not None
        root = Path(self.log.config.storage.cloud.root or "", "storage/topics/fault/t0/objects")
        while True:
            self.burst(topic, "0", 5, "synced")
            self.attempt("upload", topic.upload)
            last = bucket.owned.last
            assert last is not None
            if last.start >= topic.wal.trimmed:
                path = root / last.object_id
                path.write_bytes(path.read_bytes()[:-1] + b"!")
                say("did", "damage")
                self.attempt("repair", lambda: self.log.repair(topic.name))


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


def main() -> int:
    options = parse_arguments()
    sys.setswitchinterval(0.001)
    with ister.open(json.loads(Path(options.settings).read_text())) as log:
        worker = Worker(log, options)
        worker.open_topics()
        say("ready")
        getattr(worker, options.mode)()
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
