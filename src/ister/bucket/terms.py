"""Records a topic's owners in the bucket, to detect a metadata store that was rolled back.

    storage/topics/<ns>/<topic>/terms/<epoch, 20 digits>-<claim>     the topic's record at the claim

Each owner writes a term object after its claim and before its first object of messages, then
removes those of earlier epochs; so does a pipeline that uploads in its name from its files. The
local checkpoint also has the epoch and the claim. If the metadata store was rolled back to an older
state, its record is older than one of the two, or has another claim under the same epoch. Such a
record is refused (`refuse_older`) until `ister metadata accept` replaces it. If terms were deleted,
for example by a lifecycle rule, the epochs in the names of objects count.

A metadata store that was rolled back within the term of one owner has the right record and an older
catalog. So if the last owner's process did not close the topic, the next opening looks for objects
that continue the catalog (`ForgottenRuns`, `ister.rescue.rebuild.find_continuation`).

Owns: term objects, the comparison, and finding runs of a process in its express objects. Does not
own: the claim (`claim`), local files, when a term is written (`ister.topic.uploads`).

What a crash leaves: a term without messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.model import TopicName
from ister.bucket.express import ExpressRuns
from ister.bucket.names import (
    EXPRESS_PREFIX,
    TopicKeys,
    object_id_of,
    objects_prefix,
    parse_object_id,
    parse_term_key,
    term_key,
    terms_prefix,
)
from ister.errors import CorruptDataError, NotFoundError, StoresDifferError
from ister.format.descriptor import ObjectDescriptor
from ister.format.express import ExpressRun
from ister.format.records import TopicRecord, decode_pointer, decode_topic, encode_topic
from ister.metadata.base import MetadataStore
from ister.objectstore.base import ObjectStore

_log = logging.getLogger("ister.bucket.terms")

# A process commits its objects in order, at most two at once. So after this many objects whose
# runs are all in their catalogs, every earlier one is committed, too.
_KNOWN_IN_A_ROW: Final = 4
# The topics of a process that has ended are claimed together. One that was only cut off may run
# again, and write more, before it ends a second time.
_FOUND_SECONDS: Final = 30.0


class Term(NamedTuple):
    """The time during which one process owned a topic."""

    epoch: int
    claim: str
    """Empty if only the names of objects tell of it."""

    def is_after(self, record: TopicRecord | None) -> bool:
        """Whether a record is missing, older than this term, or another owner's of this epoch."""
        if record is None or self.epoch != record.epoch:
            return record is None or self.epoch > record.epoch
        return bool(record.claim and self.claim) and self.claim != record.claim


def newest_terms(store: ObjectStore, topic: TopicName) -> list[Term]:
    """The terms of the highest epoch in the bucket; more than one if their claims differ.

    Where they were deleted, the names of objects tell the epoch.
    """
    found = [
        Term(*parsed)
        for info in store.list(terms_prefix(topic))
        if (parsed := parse_term_key(topic, info.key)) is not None
    ]
    if not found:
        ids = (object_id_of(topic, info.key) for info in store.list(objects_prefix(topic)))
        found = list({Term(parsed.epoch, "") for parsed in map(parse_object_id, ids) if parsed})
    highest = max((term.epoch for term in found), default=0)
    return [term for term in found if term.epoch == highest]


def load_term(store: ObjectStore, topic: TopicName, term: Term) -> TopicRecord | None:
    """The topic's record that a term object holds; None if it is missing or damaged."""
    key = term_key(topic, term.epoch, term.claim)
    try:
        return decode_topic(store.read(key, 0, MIB), key=key)
    except NotFoundError:
        return None
    except CorruptDataError as error:
        _log.warning("unreadable term", extra={"topic": str(topic), "error": str(error)})
        return None


def save_term(store: ObjectStore, topic: TopicName, record: TopicRecord) -> None:
    """Writes the term of the owner that `record` names, and removes earlier ones.

    Raises:
        StoresDifferError: The bucket has a later term, or another one of the same epoch.
    """
    own = Term(record.epoch, record.claim)
    refuse_older(topic, record, newest_terms(store, topic), where="the bucket")
    store.put(term_key(topic, *own), encode_topic(record))
    for info in list(store.list(terms_prefix(topic))):
        parsed = parse_term_key(topic, info.key)
        if parsed is not None and parsed[0] < own.epoch:
            store.delete(info.key)


def remove_terms(store: ObjectStore, topic: TopicName, epoch_max: int) -> None:
    """Removes the terms up to an epoch, of a topic that is being deleted."""
    for info in list(store.list(terms_prefix(topic))):
        parsed = parse_term_key(topic, info.key)
        if parsed is not None and parsed[0] <= epoch_max:
            store.delete(info.key)


def refuse_older(
    topic: TopicName, record: TopicRecord | None, terms: Iterable[Term], *, where: str
) -> None:
    """Refuses a record that is older than a term.

    `record`: the metadata store's record; None if it does not have the topic.

    Raises:
        StoresDifferError: A term is later than the record.
    """
    later = [term for term in terms if term.is_after(record)]
    if not later:
        return
    newest = max(later)
    known = "does not have the topic" if record is None else f"has epoch {record.epoch}"
    if record is not None and record.epoch == newest.epoch:
        known += " with another owner"
    raise StoresDifferError(
        f"the metadata store was rolled back to an older state: it {known}, but {where} "
        f"has epoch {newest.epoch}",
        topic=str(topic),
        hint="`ister metadata check` shows what the other stores have; "
        "`ister metadata accept` continues from that",
    )


def is_of_lineage(record: TopicRecord, epoch: int, end: int) -> bool:
    """Whether an object that was written under `epoch` and ends at `end` can be part of a topic.

    Objects of an owner that was replaced are part of it up to where its successor began. Objects
    from before the recorded lineage, or from before this incarnation, are not.
    """
    lineage = record.lineage
    if not lineage:
        return True
    if not max(record.born, lineage[0].epoch) <= epoch <= record.epoch:
        return False
    return all(end <= entry.start for entry in lineage if entry.epoch > epoch)


class _Committed(NamedTuple):
    """A topic's record, and the end of its catalog."""

    record: TopicRecord
    end: int


class ForgottenRuns:
    """Finds runs in express objects that may be missing from their catalogs. Thread-safe.

    The objects of a process are read from the newest back, until several in a row have only runs
    that are in their catalogs: older ones were committed before. So the cost depends on how much
    is missing, not on how much there is. Topics that were claimed since do not count: their next
    owner has added the runs, and other topics in older objects may still lack theirs.
    """

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, root_prefix: str, clock: Clock
    ) -> None:
        self._objects = objects
        self._metadata = metadata
        self._root = root_prefix
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, tuple[float, ExpressRuns]] = {}

    def runs_of(
        self, topic: TopicName, processes: Iterable[tuple[str, str]]
    ) -> list[ObjectDescriptor]:
        """The runs of a topic in the newest express objects of some processes.

        `processes`: node and instance of each. The result for one that has ended is cached for a
        while.

        Raises:
            UnsupportedVersionError: A newer Ister wrote an object that may have some of them.
        """
        with self._lock:
            return [
                run
                for node, instance in processes
                for run in self._runs(f"{node}/{instance}/", node, instance).runs_of(topic)
            ]

    def _runs(self, folder: str, node: str, instance: str) -> ExpressRuns:
        now = self._clock.monotonic()
        if (known := self._found.get(folder)) is not None and now - known[0] < _FOUND_SECONDS:
            return known[1]
        # Checked before the listing: if the process has ended, the listing is complete.
        is_final = not self._is_running(node, instance)
        found = ExpressRuns()
        known_in_a_row = 0
        topics: dict[TopicName, _Committed | None] = {}
        for info in reversed(list(self._objects.list(EXPRESS_PREFIX + folder))):
            runs = found.read(self._objects, info, lambda error: _log.error("%s", error))
            states = self._compare(runs, topics)
            if False in states:
                known_in_a_row = 0
            elif True in states:
                known_in_a_row += 1
            if known_in_a_row == _KNOWN_IN_A_ROW:
                break
        if is_final:
            self._found[folder] = now, found
        return found

    def _is_running(self, node: str, instance: str) -> bool:
        found = self._metadata.get(f"{self._root}/cluster/nodes/{node}/process")
        return found is not None and instance.encode() in found.value

    def _compare(
        self, runs: Sequence[ExpressRun], topics: dict[TopicName, _Committed | None]
    ) -> set[bool | None]:
        """Whether the process has committed runs; None where that cannot be told any more."""
        keys = {topic: TopicKeys(self._root, topic) for topic, _ in runs if topic not in topics}
        wanted = [key for its in keys.values() for key in (its.record, its.current)]
        values = self._metadata.get_many(wanted) if wanted else {}
        for topic, its in keys.items():
            found, pointer = values.get(its.record), values.get(its.current)
            topics[topic] = (
                None
                if found is None
                else _Committed(
                    decode_topic(found.value, key=its.record),
                    0
                    if pointer is None
                    else decode_pointer(pointer.value, key=its.current).end or 0,
                )
            )
        return {_is_committed(run, topics[topic]) for topic, run in runs}


def _is_committed(run: ObjectDescriptor, known: _Committed | None) -> bool | None:
    if known is None or known.record.epoch < run.epoch:
        return False  # the metadata store does not know of this owner
    if known.record.epoch > run.epoch or not known.record.is_open:
        return None  # a later owner has added it, or will; or nobody needs it
    return run.end <= known.end


def process_of_claim(node: str, claim: str) -> tuple[str, str] | None:
    """The node and instance of the process that made a claim; None if the claim has neither."""
    instance, separator, _ = claim.partition("-")
    return (node, instance) if separator and node else None
