"""Fills a log for another process: `python -m benchmarks.filling DIR --bytes N --message-bytes M`.

Appends until the topic holds about `--bytes`, closes the log, prints `ready` and ends. With
`--forever` it does not close but goes on appending small messages until it is killed, which is how
a crash is measured. `--small-tail-bytes` of what it writes are 1 KiB messages at the end: what a
recovery scans is then as slow to scan as the messages that targets are stated for.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from benchmarks.measurement import MESSAGE_BYTES, TOPIC, open_log, payloads
from ister.base.limits import MIB
from ister.topic.topic import Topic

_BATCH_BYTES: Final = MIB
"""Per call of `append_many`: large enough that the call itself costs nothing."""


def fill(topic: Topic, size_bytes: int, *, message_bytes: int) -> None:
    """Appends about `size_bytes` in messages of `message_bytes`."""
    batch = payloads(max(1, _BATCH_BYTES // message_bytes), message_bytes)
    for _ in range(-(-size_bytes // (message_bytes * len(batch)))):
        topic.append_many(batch)


def main() -> int:
    """Does what the module header says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--message-bytes", type=int, default=MESSAGE_BYTES)
    parser.add_argument("--small-tail-bytes", type=int, default=0)
    parser.add_argument("--forever", action="store_true")
    options = parser.parse_args()
    with open_log(options.directory) as log:
        topic = log.topic(TOPIC, create=True)
        large_bytes = max(0, options.bytes - options.small_tail_bytes)
        fill(topic, large_bytes, message_bytes=options.message_bytes)
        fill(topic, options.small_tail_bytes, message_bytes=MESSAGE_BYTES)
        topic.flush()
        if not options.forever:
            log.close()
        print("ready", flush=True)
        while options.forever:
            fill(topic, _BATCH_BYTES, message_bytes=MESSAGE_BYTES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
