"""How far a streaming query is behind: from the progress that Spark reports.

Owns: how a progress report is read. Spark asks a Python data source for no metrics (4.0 to 4.3:
`metrics` in a progress is always empty), but reports the end of each micro-batch and, from 4.2 on,
the end of the topics beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ister.base.positions import lag_of
from ister.errors import InvalidRequestError
from ister.spark.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress


@dataclass(frozen=True, slots=True)
class OffsetsBehind:
    """How many messages a source of a query has not read, by topic or partition."""

    by_topic: Mapping[str, int]

    @property
    def total(self) -> int:
        """Unread messages of all topics."""
        return sum(self.by_topic.values())

    @property
    def max(self) -> int:
        """Unread messages of the topic with the most; Kafka's `maxOffsetsBehindLatest`."""
        return max(self.by_topic.values(), default=0)

    @property
    def min(self) -> int:
        """Unread messages of the topic with the fewest; Kafka's `minOffsetsBehindLatest`."""
        return min(self.by_topic.values(), default=0)

    @property
    def avg(self) -> float:
        """Average number of unread messages of a topic; Kafka's `avgOffsetsBehindLatest`."""
        return self.total / len(self.by_topic) if self.by_topic else 0.0


def offsets_behind(
    progress: StreamingQueryProgress | Mapping[str, object] | str | None,
) -> list[OffsetsBehind | None]:
    """Returns how many messages each source of `format("ister")` in a query has not read.

    Args:
        progress: `query.lastProgress`, `event.progress` of a listener, or its JSON; or None, as
            before the first micro-batch.

    Returns:
        An entry for each such source, in the order of the query's sources; none for None. An entry
        is None if the progress does not say where the topics end, as before Spark 4.2.
    """
    found: list[OffsetsBehind | None] = []
    for source in _sources(progress):
        end, latest = _offset(source.get("endOffset")), _offset(source.get("latestOffset"))
        if end is None:
            continue
        if latest is None:
            found.append(None)
            continue
        behind = {
            name: lag_of(
                end.topics[name].offset if name in end.topics else 0,
                earliest=0,  # the progress does not say where a topic begins
                end=place.offset,
            )
            for name, place in latest.topics.items()
        }
        found.append(OffsetsBehind(behind))
    return found


def _sources(
    progress: StreamingQueryProgress | Mapping[str, object] | str | None,
) -> list[Mapping[str, object]]:
    if progress is None:
        return []
    text = progress if isinstance(progress, str) else getattr(progress, "json", None)
    value = json.loads(text) if isinstance(text, str) else progress
    sources = value.get("sources") if isinstance(value, Mapping) else None
    if not isinstance(sources, list):
        return []
    return [source for source in sources if isinstance(source, Mapping)]


def _offset(value: object) -> StreamOffset | None:
    """Parses an offset of `format("ister")`; None if another source wrote it."""
    try:
        if isinstance(value, str):
            return StreamOffset.from_json_text(value)
        return StreamOffset.from_dict(value)
    except InvalidRequestError:
        return None
