"""What a trigger of a stream costs that is far behind; part of `benchmarks spark`, without Spark.

    latestOffset ─► partitions ─► latestOffset ─► …      for 400 and for 4,000 pending objects

Owns: topics whose objects are described and not stored: a trigger reads metadata alone. Does not
own: reading them. Both sides plan micro-batches of the same size, so that all that differs is what
is pending behind them.
"""

from __future__ import annotations

import os
import time
from typing import Final

from benchmarks.measurement import Run, median, spread, take_turns
from ister.api import open_bucket
from ister.base.clock import SystemClock
from ister.base.limits import MIB
from ister.base.model import Codec, TopicName
from ister.bucket.names import TopicKeys, format_object_id
from ister.config import load_config
from ister.errors import check
from ister.format.descriptor import ObjectDescriptor, encode_descriptor
from ister.format.records import encode_current
from ister.metadata.base import Put
from ister.metadata.sqlite import SqliteMetadata
from ister.spark.options import ReadOptions
from ister.spark.rows import row_schema
from ister.spark.stream import StreamReader

OBJECTS: Final = (400, 4000)
_OBJECTS_PER_TRIGGER: Final = 10
_MESSAGES: Final = 1000
_ENTRIES: Final = 16
_TRIGGERS: Final = 20
_ROUNDS: Final = 5
_TARGET: Final = 1.5
_PUTS: Final = 100


def describe_objects(directory: str, topic: str, count: int) -> None:
    """Stores descriptors of `count` objects of 1 MiB each for an existing, empty topic."""
    with open_bucket(directory) as history:
        incarnation = history.topic(topic).record().incarnation
    name = TopicName.parse(topic)
    prefix = load_config(directory).storage.metadata.root_prefix
    keys = TopicKeys(prefix, name)
    store = SqliteMetadata(os.path.join(directory, "metadata.db"), clock=SystemClock())
    try:
        puts = []
        for start in range(0, count * _MESSAGES, _MESSAGES):
            end = start + _MESSAGES
            described = ObjectDescriptor(
                object_id=format_object_id(start, end, 1),
                start=start,
                end=end,
                size_bytes=MIB,
                created_at=1,
                offset_index=tuple(
                    (start + _MESSAGES * at // _ENTRIES, MIB * at // _ENTRIES)
                    for at in range(_ENTRIES)
                ),
                codec=Codec.BINCODE2,
                epoch=1,
                incarnation=incarnation,
                messages=_MESSAGES,
            )
            puts.append(Put(keys.descriptor(start), encode_descriptor(described)))
        puts.append(Put(keys.current, encode_current(end - _MESSAGES, end)))
        for at in range(0, len(puts), _PUTS):
            store.transact([], puts[at : at + _PUTS])
    finally:
        store.close()


def run_triggers(directory: str, topic: str, *, triggers: int = _TRIGGERS) -> float:
    """Returns the processor time of triggers at the beginning of a topic, in seconds."""
    options = ReadOptions.parse(
        {
            "config": directory,
            "topic": topic,
            "startingOffsets": "earliest",
            "includeTail": "false",
            "maxBytesPerTrigger": str(_OBJECTS_PER_TRIGGER * MIB),
        },
        is_streaming=True,
    )
    reader = StreamReader(options, row_schema(options.columns))
    limit = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    began = time.process_time()
    for _ in range(triggers):
        end = reader.latestOffset(start, limit)
        check(len(reader.partitions(start, end)) > 0, "a trigger has something to read")
        start = end
    return time.process_time() - began


def measure_triggers(run: Run, directory: str, topics: dict[int, str]) -> None:
    """Compares triggers with few and with many pending objects, by topic."""
    few, many = OBJECTS
    sides = {
        str(count): lambda count=count: run_triggers(directory, topics[count]) for count in OBJECTS
    }
    take_turns(1, sides)
    seconds = take_turns(_ROUNDS, sides)
    costs = {side: [1000 * one / _TRIGGERS for one in found] for side, found in seconds.items()}
    run.add(
        f"trigger of a stream with {many} pending objects",
        median(costs[str(many)]),
        "ms",
        limit=median(costs[str(few)]),
        limit_name=f"the same with {few} pending objects",
        at_most=_TARGET,
        on="ratio",
        note=f"processor time of latestOffset and partitions, maxBytesPerTrigger of "
        f"{_OBJECTS_PER_TRIGGER} objects; median of {_ROUNDS} rounds of {_TRIGGERS} triggers, "
        f"{spread(costs[str(many)])} (limit {spread(costs[str(few)])})",
    )
