"""Express objects: one object for many topics, committed for up to 40 of them at a time.

    runs of frames ─► one put ─► transactions, each with the descriptors of some topics

Owns: making and committing an express object, and reading footers. Does not own: which topics
and ranges (`ister.topic.express`), its bytes (`ister.format.express`), its removal
(`express_collection`), reading its runs (a run is read like any object of frames).

A transaction requires of each topic what a commit of one topic requires: its record and its
pointer. If one of them has changed, the topics of that transaction are committed one by one, so a
topic that another owner has taken fails alone. Each transaction also requires the lease that this
process had when it began to write the object. So objects of a process whose lease has ended can be
removed: none of them can become part of a topic any more. If the lease has ended, all topics fail.

What a crash leaves: an express object of which no run, or some runs, are part of their topics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, NamedTuple

from ister.base import failpoints
from ister.base.model import TopicName
from ister.bucket.footers import read_end
from ister.bucket.names import EXPRESS_PREFIX, express_key
from ister.bucket.object_maker import ObjectSummary
from ister.bucket.ownership import OwnedTopic
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    FencedError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedVersionError,
    check,
)
from ister.format.crc import Buffer
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor, RunId
from ister.format.express import FOOTER, ExpressRun, decode_footer, decode_topics, encode_footer
from ister.format.frame import FrameBatch
from ister.metadata.base import Compare, MetadataStore, Operation
from ister.metadata.checks import holds
from ister.objectstore.base import ObjectInfo, ObjectStore

_log = logging.getLogger("ister.bucket.express")

TOPICS_PER_TRANSACTION: Final = 40
"""Three compares for each topic and one for the process; etcd accepts 128 per transaction."""


class Run(NamedTuple):
    """A topic's frames in an express object that is being made."""

    owned: OwnedTopic
    descriptor: ObjectDescriptor
    is_first: bool
    """Whether it may be the topic's first object; else it has to continue another one."""


class ExpressObject:
    """An express object that is being made, in memory. Used by one thread at a time."""

    def __init__(self, name: str, *, index_every_messages: int, created_at: int) -> None:
        """An empty object.

        `name`: as `ister.bucket.names.express_name` gives it; new for every object.
        """
        self.key = express_key(name)
        self.runs: list[Run] = []
        self.size_bytes = 0
        """Total size of the runs."""
        self._name = name
        self._every = index_every_messages
        self._created_at = created_at
        self._parts: list[Buffer] = []

    def add(
        self,
        owned: OwnedTopic,
        start: int,
        frames: Iterable[FrameBatch],
        *,
        arrived_ms: int | None,
        is_first: bool = False,
    ) -> ObjectDescriptor:
        """Adds the frames of a topic that has none in this object yet; returns their descriptor.

        `start`: the end of its newest object, or of its newest run that is not committed yet.
        `frames`: from `start` on, at least one.
        `arrived_ms`: the latest possible arrival time of the last of them; None if unknown.
        `is_first`: whether the topic has no objects, and begins at `start`.

        Raises:
            What `frames` raises: nothing was added.
        """
        summary = ObjectSummary(start, index_every_messages=self._every)
        parts = [summary.add(batch) for batch in frames]
        check(summary.end > start, "a run has frames")
        described = summary.describe(
            str(RunId(self._name, self.size_bytes, summary.size_bytes)),
            epoch=owned.epoch,
            incarnation=owned.record.incarnation,
            created_at=self._created_at,
            etag=None,
        )
        described = replace(described, format=FORMAT_EXPRESS, arrival_time_max=arrived_ms)
        self._parts += parts
        self.size_bytes += summary.size_bytes
        self.runs.append(Run(owned, described, is_first))
        return described

    def put(self, store: ObjectStore) -> int:
        """Writes the object; returns its size.

        Raises:
            UnavailableError: The store does not answer; the object may exist.
        """
        runs = [ExpressRun(run.owned.catalog.keys.topic, run.descriptor) for run in self.runs]
        data = b"".join([*self._parts, encode_footer(self._name, runs, self.size_bytes)])
        self._parts = []
        failpoints.reach("express.before_put")
        store.put(self.key, data)
        failpoints.reach("express.after_put")
        return len(data)


def commit_runs(
    store: MetadataStore, runs: Sequence[Run], presence: Compare
) -> Iterator[tuple[Run, IsterError | None]]:
    """Publishes the runs of an object that was written; yields each with its error, or None.

    `runs`: of one object, of different topics.
    `presence`: `Membership.presence`, from before the object was written.
    """
    ordered = sorted(runs, key=lambda run: run.owned.topic)
    for at in range(0, len(ordered), TOPICS_PER_TRANSACTION):
        failpoints.reach("express.before_commit")
        yield from _commit(store, ordered[at : at + TOPICS_PER_TRANSACTION], presence)
        failpoints.reach("express.after_commit")


def _commit(
    store: MetadataStore, runs: Sequence[Run], presence: Compare
) -> list[tuple[Run, IsterError | None]]:
    with ExitStack() as held:
        # In the order of names. No other code holds more than one of these locks.
        for run in runs:
            held.enter_context(run.owned.lock)
        compares: list[Compare] = [presence]
        operations: list[Operation] = []
        joint: list[Run] = []
        for run in runs:
            try:
                required, wanted = run.owned.prepare_commit(run.descriptor, is_first=run.is_first)
            except (ConflictError, FencedError):
                continue
            compares += required
            operations += wanted
            joint.append(run)
        revision = None
        try:
            if joint:
                with suppress(CommitUnknownError):  # the next attempt, topic by topic, finds out
                    revision = store.transact(compares, operations)
            if revision is None and not holds(presence, store.get(presence.key)):
                raise UnavailableError("the lease ended while an express object was written")
        except IsterError as error:
            return [(run, error.again()) for run in runs]
        if revision is not None:
            for run in joint:
                run.owned.take_commit(run.descriptor, revision)
    done = set() if revision is None else {run.owned.topic for run in joint}
    return [
        (run, None if run.owned.topic in done else _commit_alone(run, presence)) for run in runs
    ]


def _commit_alone(run: Run, presence: Compare) -> IsterError | None:
    owned, descriptor = run.owned, run.descriptor
    try:
        with owned.lock:
            owned.prepare_commit(descriptor, is_first=run.is_first)
            owned.commit(descriptor, also=[presence])
    except IsterError as error:
        return error
    return None


def read_footer(store: ObjectStore, info: ObjectInfo) -> list[ExpressRun]:
    """The runs of an express object.

    Raises:
        CorruptDataError: It is not an express object, or it is damaged.
    """
    return decode_footer(*read_end(store, info, FOOTER), path=info.key)[1]


@dataclass(slots=True)
class ExpressRuns:
    """The runs in express objects, and the objects that this release cannot read."""

    by_topic: dict[TopicName, list[ObjectDescriptor]] = field(default_factory=dict)
    _unread: list[tuple[str, Collection[TopicName] | None]] = field(default_factory=list)
    """Keys of objects of a newer Ister with the topics in them; None if these are unknown."""

    def runs_of(self, topic: TopicName) -> Sequence[ObjectDescriptor]:
        """The runs of one topic.

        Raises:
            UnsupportedVersionError: A newer Ister wrote an object that may have more of them.
        """
        for key, topics in self._unread:
            if topics is None or topic in topics:
                raise UnsupportedVersionError(
                    "an express object of a newer Ister may hold messages of this topic",
                    topic=str(topic),
                    path=key,
                    hint="open the topic with the newer Ister that wrote it",
                )
        return self.by_topic.get(topic, ())

    def read(
        self, store: ObjectStore, info: ObjectInfo, on_damage: Callable[[CorruptDataError], None]
    ) -> list[ExpressRun]:
        """Adds the runs of one object, and returns them."""
        runs: list[ExpressRun] = []
        with suppress(NotFoundError):  # collected meanwhile
            try:
                runs = read_footer(store, info)
            except CorruptDataError as error:
                on_damage(error)
            except UnsupportedVersionError as error:
                self._unread.append((info.key, decode_topics(read_end(store, info, FOOTER)[0])))
                _log.warning(
                    "express object skipped", extra={"path": info.key, "error": error.message}
                )
        for topic, described in runs:
            self.by_topic.setdefault(topic, []).append(described)
        return runs


def find_runs(store: ObjectStore, *, on_damage: Callable[[CorruptDataError], None]) -> ExpressRuns:
    """The runs of all express objects.

    `on_damage`: called with the error of an object whose footer is damaged.
    """
    found = ExpressRuns()
    for info in store.list(EXPRESS_PREFIX):
        found.read(store, info, on_damage)
    return found


def find_runs_from(
    store: ObjectStore, topic: TopicName, start: int, incarnation: str
) -> list[ObjectDescriptor]:
    """The runs of one topic from `start` on, where its catalog ends.

    A process commits the runs of a topic in the order of its objects' sequence numbers. So its
    objects are read from the newest one back to the first that has an earlier run of the topic.

    Raises:
        UnsupportedVersionError: A newer Ister wrote an object that may have some of them.
    """
    found = ExpressRuns()
    listed = list(store.list(EXPRESS_PREFIX))
    listed.sort(key=lambda info: info.key, reverse=True)
    for _, objects in groupby(listed, key=lambda info: info.key.rpartition("/")[0]):
        for info in objects:
            runs = found.read(store, info, lambda error: _log.error("%s", error))
            mine = [run for name, run in runs if (name, run.incarnation) == (topic, incarnation)]
            if any(run.start < start for run in mine):
                break
    known = found.runs_of(topic)
    return [run for run in known if run.incarnation == incarnation and run.start >= start]
