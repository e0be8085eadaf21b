"""Read-only topics: they wait for another node's disk; their history is read, and cursors move.

    bucket ─► ReadOnlyLog ─► readers, subscriptions      appends are refused, and say why
    reader key (leased) ─► OwnedTopic.transact          cursors, in the name of the last owner

Owns: a read-only topic and its reader key. Does not own: whether a topic waits for a
disk (`ister.bucket.claim`), when it is checked (the caller does that), the bucket.

Everything below `tiered` is served. The key `<root>/cluster/readers/<ns>/<topic>` has one process
at a time, under the lease of its membership, and every write of a cursor requires it and the
unchanged record. So two processes never move the same cursor, and none does once the node with the
disk, or one that takes the topic over, has claimed it: that changes the record. `check` notices
both and stops the topic: waiting readers get FencedError.

What a crash leaves: a key that expires with its lease.
"""

from __future__ import annotations

from collections.abc import Callable

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.bucket.fence import MemberFence
from ister.errors import FencedError, UnavailableError, WaitsForDiskError
from ister.topic.bucket_link import TopicBucket
from ister.topic.cache import Cache
from ister.topic.topic import Topic
from ister.topic.uploads import UploadResult
from ister.wal.commit import Committer
from ister.wal.log import ReadOnlyLog


class ReadOnlyTopics:
    """The read-only topics of one log; the caller opens and closes one of a name at a time."""

    def __init__(
        self, open_topic: Callable[[TopicName], ReadOnlyTopic], forget: Callable[[Committer], None]
    ) -> None:
        """Opens topics by `open_topic`; `forget` is called with the log of each closed one."""
        self._open = open_topic
        self._forget = forget
        self._topics: dict[str, ReadOnlyTopic] = {}

    def get(self, name: TopicName) -> ReadOnlyTopic:
        """Returns the topic; opens it if necessary."""
        topic = self._topics.get(str(name))
        if topic is None or topic.has_stopped:
            self.close(str(name))
            topic = self._topics[str(name)] = self._open(name)
        return topic

    def close(self, name: str) -> None:
        """Closes a topic, if it is open."""
        topic = self._topics.pop(name, None)
        if topic is not None:
            topic.close_quietly()
            self._forget(topic.wal.committer)

    def close_all(self) -> None:
        """Closes all of them."""
        for name in list(self._topics):
            self.close(name)


class ReadOnlyTopic(Topic):
    """The history of a topic that waits for another node's disk. Made by `Log.read_only_topic`."""

    def __init__(
        self,
        *,
        wal: ReadOnlyLog,
        cache: Cache,
        bucket: TopicBucket,
        waits: WaitsForDiskError,
        fence: MemberFence,
        max_message_size: int,
        stream_chunk_size: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        super().__init__(
            wal=wal,
            cache=cache,
            max_message_size=max_message_size,
            stream_chunk_size=stream_chunk_size,
            clock=clock,
            metrics=metrics,
            bucket=bucket,
        )
        self.waits_for = waits.node
        """The node whose disk may have the topic's newest messages."""
        self._history_log = wal
        self._owned = bucket.owned
        self._fence = fence
        fence.on_gone = bucket.owned.give_up
        wal.gate.hold("read-only", self.refused_error, waits=False)

    def refused_error(self) -> UnavailableError:
        """The error of appends: why the topic takes none."""
        return UnavailableError(
            f"the topic waits for the disk of node {self.waits_for}: messages from offset "
            f"{self.tiered} on may be only there",
            topic=self.name,
            offset=self.tiered,
            hint="start that node; if its disk is lost, take the topic over, which gives those "
            "messages up",
        )

    def check(self) -> None:
        """Checks that the topic still waits for that disk; makes new objects of it readable.

        A few reads of the metadata store. To be called now and then, and before trusting that
        nobody else has the topic.

        Raises:
            FencedError: Another process has the topic, or serves its history: this one has stopped.
        """
        owned = self._owned
        try:
            owned.check()
            owned.refresh()
            owned.first = owned.catalog.first()
        except FencedError as error:
            owned.give_up(error)
            raise
        self._history_log.advance(owned.tiered)

    def upload(self) -> UploadResult:
        """Raises UnavailableError: another node has what is not in the bucket."""
        raise UnavailableError(
            "the topic is read-only: what is not in the bucket is on another node's disk",
            topic=self.name,
        )

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            self._fence.release()
