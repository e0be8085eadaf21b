"""Shows a stream's position as cursors of a subscription, which also hold retention.

Owns: the writing of these cursors from outside of the topics' owner. Does not own: the stream's
position itself, which is in Spark's checkpoint: a cursor is a copy of it, one batch behind.

A cursor only moves forward. It is written only if neither it nor the topic's record has changed
since they were read, so that a deleted topic gets none.
"""

from __future__ import annotations

from ister.bucket.catalog import Catalog
from ister.errors import ConflictError, NotFoundError
from ister.format.records import Progress, decode_progress, encode_progress
from ister.metadata.base import MetadataStore, Put, RevisionIs
from ister.metadata.transact import transact, unchanged
from ister.spark.location import LogLocation
from ister.spark.offsets import StreamOffset
from ister.topic.history import BucketTopic
from ister.topic.stores import open_metadata


def hold_cursors(place: LogLocation, subscription: str, progress: StreamOffset) -> None:
    """Moves the subscription's cursor in each topic to the stream's position.

    Raises:
        ConflictError: Other processes keep changing it, or it belongs to consumers.
        UnavailableError: The metadata store does not respond.
    """
    history = place.history()
    store = open_metadata(history.config.storage.metadata, history.clock)
    try:
        for name, reached in progress.topics.items():
            try:
                topic = history.topic(name)
            except NotFoundError:
                continue  # deleted: needs no cursor
            _hold(store, topic, subscription, reached.offset, reached.incarnation)
    finally:
        store.close()


def _hold(
    store: MetadataStore, topic: BucketTopic, subscription: str, offset: int, incarnation: str
) -> None:
    catalog: Catalog = topic.catalog
    key = catalog.keys.progress(subscription)

    def attempt() -> bool | None:
        record = catalog.record()
        if record is None or record[0].incarnation != incarnation or not record[0].is_open:
            return True
        if store.get(f"{catalog.keys.subscriptions}{subscription}/options") is not None:
            raise ConflictError(
                f"{subscription!r} is a subscription of a broker's consumers",
                topic=str(catalog.keys.topic),
                hint="choose another name: a stream would skip their messages",
            )
        found = store.get(key)
        known = decode_progress(found.value, key=key) if found is not None else None
        reached = offset
        if known is not None and known.incarnation == incarnation:
            reached = max(offset, known.offset)
        more = known.more if known is not None else {}
        now_ms = topic.clock.now_ns() // 1_000_000
        wanted = Progress(offset=reached, timestamp=now_ms, incarnation=incarnation, more=more)
        same_topic = RevisionIs(catalog.keys.record, record[1])
        compares = [unchanged(key, found), same_topic]
        revision = store.transact(compares, [Put(key, encode_progress(wanted))])
        return None if revision is None else True

    transact(attempt, ConflictError("the cursor keeps changing", path=key))
