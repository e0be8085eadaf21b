"""The topics that `benchmarks jobs` works on, and places to work on them again and again.

    fill_local, fill_bucket ─► a place ── link_place ──► the same once more, changed by one job

Owns: the messages, which are like JSON and so compress like it. Does not own: what jobs do with
them.

A place is a data directory: `wal`, `objects` and `metadata.db`, as a path as the only setting means
it. A job changes it for good, so each gets one of its own, whose large files are links: they are
written once and never changed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from benchmarks.measurement import COPY_BYTES, file_paths, open_tiered_log
from benchmarks.spark_sources import make_rows
from ister.topic.log import Log

_ENVELOPE_BYTES: Final = 80
"""What a frame has besides its payload, about."""
_LINKED: Final = (".log", ".dnb1")
_SEED: Final = 20
_STATES: Final = ("created", "paid", "packed", "shipped", "delivered", "returned")
_REGIONS: Final = ("eu-west-1", "eu-north-1", "us-east-1", "ap-south-1")
_NOTE: Final = (
    "please leave it with the neighbour if nobody is at home before noon because the door bell "
    "does not work and the gift has to be wrapped in green paper without any price on it"
)


@lru_cache(maxsize=4)
def make_json_rows(count: int, message_bytes: int, *, topic: str) -> pa.RecordBatch:
    """Rows as `make_rows` has them, with orders in JSON as payloads, all of them different.

    Args:
        count: How many.
        message_bytes: The size of a payload.
        topic: The topic's name.
    """
    rows = make_rows(count, message_bytes, topic=topic)
    source = random.Random(_SEED)
    payloads = [_order(source, number, message_bytes) for number in range(count)]
    index = rows.schema.get_field_index("payload")
    return rows.set_column(index, rows.schema.field(index), pa.array(payloads, pa.binary()))


def _order(source: random.Random, number: int, size_bytes: int) -> bytes:
    """One order: items until it is nearly full, and a note of the length that is missing."""
    text = (
        f'{{"order":{10_000_000 + number},"state":"{source.choice(_STATES)}",'
        f'"amount":{source.randrange(100, 99_999) / 100:.2f}'
    )
    if size_bytes > 200:
        text += f',"region":"{source.choice(_REGIONS)}","items":['
        while len(text) < size_bytes * 3 // 4:
            text += (
                f'{{"article":"A-{source.randrange(100_000):05d}",'
                f'"count":{source.randrange(1, 9)},"price":{source.randrange(100, 9_999)}}},'
            )
        text = text.rstrip(",") + "]"
    text += ',"note":"'
    words = _NOTE.split()
    while len(text) < size_bytes - 2:
        text += source.choice(words) + " "
    return (text[: size_bytes - 2] + '"}').encode()


def _batches(size_bytes: int, message_bytes: int, topic: str) -> Iterator[pa.RecordBatch]:
    """About so many bytes of frames."""
    rows_max = COPY_BYTES // (message_bytes + _ENVELOPE_BYTES)
    left = max(1, size_bytes // (message_bytes + _ENVELOPE_BYTES))
    rows = make_json_rows(rows_max, message_bytes, topic=topic)
    while left > 0:
        yield rows.slice(0, left)
        left -= min(left, rows_max)


def _open(directory: str, **uploader: int) -> Log:
    settings: dict[str, Any] = {
        "ack": "memory",
        "uploader": {"engine": "none", **uploader},
        "cloud": {"root": os.path.join(directory, "objects")},
        "metadata": {"path": os.path.join(directory, "metadata.db")},
    }
    return open_tiered_log(directory, settings)


def fill_local(directory: str, topics: Sequence[str], size_bytes: int, message_bytes: int) -> None:
    """Makes topics of so many bytes each, of which nothing is in the bucket."""
    with _open(directory) as log:
        for name in topics:
            topic = log.topic(name, create=True)
            for batch in _batches(size_bytes, message_bytes, name):
                topic.append_arrow(batch)


def fill_bucket(
    directory: str,
    topics: Sequence[str],
    size_bytes: int,
    message_bytes: int,
    *,
    object_bytes: int | None = None,
) -> None:
    """Makes topics of so many bytes each that are in the bucket alone.

    Args:
        directory: The place.
        topics: Their names.
        size_bytes: Of each topic.
        message_bytes: Of each payload.
        object_bytes: Of an object at most; Ister's default if None.
    """
    uploader = {} if object_bytes is None else {"max_object_bytes": object_bytes}
    with _open(directory, **uploader) as log:
        for name in topics:
            opened = log.topic(name, create=True)
            for batch in _batches(size_bytes, message_bytes, name):
                opened.append_arrow(batch)
            log.seal(name)


def link_place(source: str, target: str) -> str:
    """A place with the topics of another one that nobody has open; returns its path."""
    os.mkdir(target)
    for folder in ("wal", "objects"):
        path = os.path.join(source, folder)
        if os.path.isdir(path):
            shutil.copytree(path, os.path.join(target, folder), copy_function=_link)
    for name in os.listdir(source):
        if name.startswith("metadata.db"):
            shutil.copy2(os.path.join(source, name), target)
    return target


def _link(source: str, target: str) -> str:
    if source.endswith(_LINKED):
        os.link(source, target)
    else:
        shutil.copy2(source, target)
    return target


def object_paths(place: str, topic: str = "", suffix: str = ".dnb1") -> list[str]:
    """The objects of a topic, or of all topics, in a place."""
    return file_paths(os.path.join(place, "objects", "storage", "topics") + topic, suffix)
