"""Filter pushdown: a batch read narrowed by the filters of its query.

Owns: which filters narrow the range of a read. Does not own: the read itself (`batch`). Imported
only if the option `pushdown` is set: Spark 4.0 has no filter pushdown, and later versions give the
filters of one scan of a DataFrame to its other scans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from ister.base.positions import EPOCH
from ister.spark.batch import BatchReader
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.options import ReadOptions
from ister.spark.planner import TopicRange


class PushdownReader(BatchReader):
    """A batch reader whose range is narrowed by the filters that Spark pushes down.

    For a DataFrame that is scanned once: with `spark.sql.python.filterPushdown.enabled` Spark gives
    the filters of one scan to the other scans of the same DataFrame.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._offsets_from = 0
        self._offsets_before: int | None = None
        self._topics: set[str] | None = None
        self._time_from_ms: int | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Takes what narrows the range. Spark applies every filter again, so none is dropped."""
        for item in filters:
            name = ".".join(getattr(item, "attribute", ()))
            value: object = getattr(item, "value", None)
            if name == "topic" and isinstance(item, EqualTo | In):
                wanted = set(item.value) if isinstance(item, In) else {item.value}
                self._topics = wanted if self._topics is None else self._topics & wanted
            elif name == "offset" and isinstance(value, int):
                self._push_offset(item, value)
            elif (
                name == "publish_time"
                and isinstance(item, GreaterThan | GreaterThanOrEqual)
                and isinstance(value, datetime)
                and value.tzinfo is not None
            ):
                time_ms = (value - EPOCH) // timedelta(milliseconds=1)
                self._time_from_ms = max(time_ms, self._time_from_ms or 0)
        return filters

    def _push_offset(self, item: Filter, value: int) -> None:
        before = self._offsets_before
        if isinstance(item, GreaterThan | GreaterThanOrEqual | EqualTo):
            start = value + 1 if isinstance(item, GreaterThan) else value
            self._offsets_from = max(self._offsets_from, start)
        if isinstance(item, LessThan | LessThanOrEqual | EqualTo):
            end = value if isinstance(item, LessThan) else value + 1
            self._offsets_before = end if before is None else min(before, end)

    def _range(self, resolver: OffsetResolver, head: Head) -> TopicRange:
        whole = super()._range(resolver, head)
        if self._topics is not None and head.topic not in self._topics:
            return replace(whole, end=whole.start, tiered=whole.start, descriptors=())
        start = max(whole.start, self._offsets_from)
        if self._time_from_ms is not None:
            # All messages before the first match are older; Spark drops older ones after it.
            found = resolver.find_time(head, self._time_from_ms)
            start = max(start, whole.end if found is None else found)
        end = whole.end
        if self._offsets_before is not None:
            end = min(end, self._offsets_before)
        start = min(start, whole.end)
        return resolver.range_of(head, start, max(start, end))
