"""What benchmarks of reading have in common: read a topic whole, and look at what comes.

Each look returns a number above 0 for a batch that is right, and raises for one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measurement import MESSAGE_BYTES
from ister.errors import InvariantError, check
from ister.topic.message import Message
from ister.topic.topic import Topic


def read_everything(topic: Topic, look: Callable[[Sequence[Message]], int]) -> None:
    """Reads everything with `Reader.next_batch` and looks at each batch."""
    count = seen = 0
    with topic.reader("earliest", end=topic.watermarks.next) as reader:
        while batch := reader.next_batch():
            count += len(batch)
            seen += look(batch)
    check(count == topic.watermarks.next and seen > 0, "every message is read")


def count_messages(batch: Sequence[Message]) -> int:
    """Makes every message, and checks that their offsets follow each other."""
    expected = batch[0].offset
    for message in batch:
        if message.offset != expected:
            raise InvariantError("messages come in order")
        expected += 1
    return len(batch)


def touch_payloads(batch: Sequence[Message]) -> int:
    """Takes every payload."""
    size = sum(len(message.payload) for message in batch)
    check(size == len(batch) * MESSAGE_BYTES, "payloads come back as they were")
    return size
