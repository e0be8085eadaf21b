"""What the catalog says about a topic and what the bucket holds, side by side: for `scrub`.

    metadata: record, cur, descriptors, retired ─┐
    bucket: listing ─────────────────────────────┴─► Survey: entries, findings, other objects

Owns: faults that show without reading an object: gaps and overlaps between descriptors, ones that
cannot be read, a pointer that is wrong, objects that nobody names. Does not own: what objects hold
(`object_check`), repairs (`healing`). Changes nothing. Runs on the driver.

Descriptors change while they are read: uploads add some, merges replace some, retention takes some.
So they are read again until two readings agree, as far as faults are concerned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ister.clock import Clock
from ister.errors import CorruptDataError, NotFoundError, UnsupportedVersionError
from ister.format.descriptor import ObjectDescriptor, decode_descriptor
from ister.format.manifest import decode_manifest
from ister.format.records import (
    SealedState,
    TopicRecord,
    decode_current,
    decode_retired,
    decode_session,
    decode_writer,
)
from ister.limits import MANIFEST_BYTES_MAX
from ister.metadata.base import KeyValue
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.tier.catalog import Catalog
from ister.tier.names import (
    ObjectName,
    format_pending_id,
    objects_prefix,
    parse_object_id,
    parse_pending_epoch,
    staging_prefix,
)

__all__ = [
    "NOTES",
    "Entry",
    "Finding",
    "Other",
    "Survey",
    "find_superfluous",
    "read_pages",
    "survey_topic",
]

_PAGE: Final = 256
_ROUNDS: Final = 4

NOTES: Final = frozenset({"orphan", "staged"})
"""Kinds of findings that are no faults of the topic."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be; offsets are `start` up to, not including, `end`."""

    kind: str
    topic: str
    object: str | None
    start: int | None
    end: int | None
    """None where nobody knows."""
    reason: str
    position: int | None = None
    """The byte in the object."""
    offset: int | None = None
    repairable: bool = False
    repaired: bool = False
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Offsets that nobody has, as far as is known."""
    hint: str | None = None
    """What somebody can do about it, where that is something of its own."""

    @property
    def is_fault(self) -> bool:
        """Whether the topic is the worse for it."""
        return self.kind not in NOTES

    def as_json(self) -> dict[str, Any]:
        """As a report has it."""
        return {
            "kind": self.kind,
            "topic": self.topic,
            "object": self.object,
            "start_offset": self.start,
            "next_offset": self.end,
            "position": self.position,
            "offset": self.offset,
            "reason": self.reason,
            "repairable": self.repairable,
            "repaired": self.repaired,
            "lost": [list(item) for item in self.lost],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A descriptor as it was found, without its indexes: a topic may have very many."""

    key: str
    revision: int
    described: ObjectDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """An object that no descriptor names."""

    object_id: str
    size_bytes: int
    name: ObjectName | None
    """None of a foreign or a pending one."""
    state: str
    """`retired`, `young`, `under way`, `later`: all is well; `pending`, `foreign`, `left over`."""


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was found about a topic."""

    topic: str
    record: TopicRecord
    entries: list[Entry] = field(default_factory=list)
    """In the order of offsets; those that can be read and lie under their keys."""
    unreadable: list[tuple[str, int, int]] = field(default_factory=list)
    """(key, revision, the offset that the key says)."""
    misplaced: list[Entry] = field(default_factory=list)
    superfluous: set[int] = field(default_factory=set)
    """Where those entries begin whose offsets others have."""
    current: int | None = None
    others: list[Other] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def end(self) -> int:
        """After the last offset that a descriptor has."""
        return max((entry.described.end for entry in self.entries), default=0)


def survey_topic(
    catalog: Catalog, store: ObjectStore, *, grace_seconds: float, clock: Clock
) -> Survey:
    """Looks at a topic's metadata and lists its objects.

    Args:
        catalog: The topic's.
        store: The bucket.
        grace_seconds: Objects younger than this may be on their way to their commit.
        clock: By which they are.

    Raises:
        NotFoundError: There is no such topic.
        CorruptDataError: The topic's record cannot be read.
        UnavailableError: A store does not answer.
    """
    survey = _read(catalog)
    for _ in range(_ROUNDS):
        if not survey.findings:
            break
        again = _read(catalog)
        is_same = [f.as_json() for f in survey.findings] == [f.as_json() for f in again.findings]
        survey = again
        if is_same:
            break
    _list_objects(survey, catalog, store, grace_seconds, clock)
    return survey


# -- the catalog ----------------------------------------------------------------------------


def _read(catalog: Catalog) -> Survey:
    topic = str(catalog.keys.topic)
    found = catalog.record()
    if found is None or not found[0].is_open:
        raise NotFoundError(f"there is no topic {topic}", topic=topic)
    survey = Survey(topic=topic, record=found[0])
    sealed = catalog.sealed()
    pointer = catalog.store.get(catalog.keys.current)
    for item in read_pages(catalog):
        _take(survey, catalog, item)
    again = catalog.store.get(catalog.keys.current)
    # While uploads move it nothing can be said about where the topic ends.
    is_moving = (pointer and pointer.revision) != (again and again.revision)
    survey.current = _read_current(survey, pointer)
    survey.entries.sort(key=lambda entry: (entry.described.start, entry.described.end))
    survey.superfluous = find_superfluous(
        [(entry.described.start, entry.described.end) for entry in survey.entries]
    )
    _find_overlaps(survey)
    end = _find_gaps(survey)
    if not is_moving:
        _check_end(survey, end, sealed[0] if sealed is not None else None)
    return survey


def _read_current(survey: Survey, found: KeyValue | None) -> int | None:
    if found is None:
        return None
    try:
        return decode_current(found.value, key=found.key)
    except CorruptDataError as error:
        survey.findings.append(
            Finding(
                kind="pointer",
                topic=survey.topic,
                object=None,
                start=None,
                end=None,
                reason=f"the pointer to the newest object cannot be read: {error.message}",
                repairable=True,
            )
        )
        return None


def read_pages(catalog: Catalog) -> Iterable[KeyValue]:
    """Every descriptor's key, one after the other, whatever is stored there."""
    keys = catalog.keys
    start: str | None = None
    while True:
        page = catalog.store.range(keys.objects, start=start, end=keys.objects_end, limit=_PAGE)
        yield from page
        if len(page) < _PAGE:
            return
        start = f"{page[-1].key}\0"


def _take(survey: Survey, catalog: Catalog, item: KeyValue) -> None:
    digits = item.key.removeprefix(catalog.keys.objects)
    start = int(digits) if digits.isascii() and digits.isdigit() else None
    try:
        described = decode_descriptor(item.value, key=item.key)
    except (CorruptDataError, UnsupportedVersionError) as error:
        is_newer = isinstance(error, UnsupportedVersionError)
        survey.findings.append(
            Finding(
                kind="unreadable_descriptor",
                topic=survey.topic,
                object=None,
                start=start,
                end=None,
                offset=start,
                reason=f"{item.key}: {error.message}",
            )
        )
        if start is not None and not is_newer:
            survey.unreadable.append((item.key, item.revision, start))
        return
    entry = Entry(
        key=item.key,
        revision=item.revision,
        described=replace(described, offset_index=(), publish_time_index=()),
    )
    if start == described.start:
        survey.entries.append(entry)
        return
    survey.misplaced.append(entry)
    survey.findings.append(
        Finding(
            kind="misplaced_descriptor",
            topic=survey.topic,
            object=described.object_id,
            start=described.start,
            end=described.end,
            offset=start,
            reason=f"a descriptor that begins at {described.start} lies under {item.key}",
        )
    )


def find_superfluous(ranges: Sequence[tuple[int, int]]) -> set[int]:
    """Which of some ranges are not needed to have all offsets of all of them, each once.

    Args:
        ranges: (start, end), ascending; no two begin at the same offset.

    Returns:
        Where they begin. In a stretch of ranges that overlap each other those are needed that make
        up a chain from its first offset to its last; without such a chain all of them are.
    """
    superfluous: set[int] = set()
    stretch: dict[int, int] = {}
    reach = -1
    for start, end in ranges:
        if start >= reach:
            superfluous |= _outside_of_chain(stretch, reach)
            stretch = {}
        stretch[start] = end
        reach = max(reach, end)
    return superfluous | _outside_of_chain(stretch, reach)


def _outside_of_chain(stretch: dict[int, int], end: int) -> set[int]:
    at, chain = min(stretch, default=end), set()
    while at in stretch:
        chain.add(at)
        at = stretch[at]
    return stretch.keys() - chain if at == end else set()


def _find_overlaps(survey: Survey) -> None:
    before: Entry | None = None
    for entry in survey.entries:
        described = entry.described
        if described.start in survey.superfluous:
            survey.findings.append(
                Finding(
                    kind="overlap",
                    topic=survey.topic,
                    object=described.object_id,
                    start=described.start,
                    end=described.end,
                    reason="other descriptors have all of its offsets",
                    repairable=True,
                )
            )
            continue
        if before is not None and described.start < before.described.end:
            survey.findings.append(
                Finding(
                    kind="overlap",
                    topic=survey.topic,
                    object=described.object_id,
                    start=described.start,
                    end=min(described.end, before.described.end),
                    reason=f"{before.described.object_id} has these offsets, too, and neither of "
                    "the two can be left out",
                )
            )
        if before is None or described.end > before.described.end:
            before = entry


def _find_gaps(survey: Survey) -> int:
    """Looks for offsets between descriptors that none has; where the last one ends."""
    record, entries = survey.record, survey.entries
    at = max(record.expired_before, record.lineage[0].start if record.lineage else 0)
    if entries and (not record.lineage or entries[0].described.start < at):
        at = entries[0].described.start
    for entry in entries:
        # What has expired nobody owes, and it goes bit by bit.
        begin = max(at, record.expired_before)
        if entry.described.start > begin:
            _note_gap(survey, begin, entry.described.start)
        at = max(at, entry.described.end)
    return at


def _check_end(survey: Survey, at: int, sealed: SealedState | None) -> None:
    """Whether the newest descriptor is there, and the pointer says so."""
    entries = survey.entries
    if not entries and survey.current is None and sealed is None:
        return  # nothing was ever uploaded
    last = max((entry.described.start for entry in entries), default=-1)
    needed = {entry.described.start for entry in entries} - survey.superfluous
    newest = {last, max(needed, default=-1)}
    if sealed is not None and sealed.next_offset > at:
        _note_gap(survey, at, sealed.next_offset)
    elif survey.current is not None and survey.current >= at:
        # The newest one, which the pointer names, is not there; how far it went nobody knows.
        _note_gap(survey, at, None)
    elif survey.current not in newest and not any(f.kind == "pointer" for f in survey.findings):
        said = "missing" if survey.current is None else f"at {survey.current}"
        survey.findings.append(
            Finding(
                kind="pointer",
                topic=survey.topic,
                object=None,
                start=None,
                end=None,
                offset=last,
                reason=f"the newest object begins at {last}, and the pointer to it is {said}",
                repairable=True,
            )
        )


def _note_gap(survey: Survey, start: int, end: int | None) -> None:
    for finding in survey.findings:
        if finding.kind == "unreadable_descriptor" and finding.start == start:
            finding.end = end  # the gap is what it cannot say
            return
    survey.findings.append(
        Finding(
            kind="gap",
            topic=survey.topic,
            object=None,
            start=start,
            end=end,
            offset=start,
            reason="no descriptor has these offsets"
            if end is not None
            else "the descriptor of the newest object is missing",
        )
    )


# -- the bucket -----------------------------------------------------------------------------


def _list_objects(
    survey: Survey, catalog: Catalog, store: ObjectStore, grace_seconds: float, clock: Clock
) -> None:
    keys = catalog.keys
    prefix = objects_prefix(keys.topic)
    listing = list(store.list(prefix))
    now = clock.now_ns() / 1e9
    # After the listing: what was committed meanwhile is not taken for an orphan.
    named = {described.object_id for item in read_pages(catalog) for described in _decoded(item)}
    retired: set[str] = set()
    for found in catalog.store.range(keys.retired("")):
        with suppress(CorruptDataError):
            retired.update(decode_retired(found.value, key=found.key).objects)
    under_way: set[str] = set()
    session = catalog.store.get(keys.session)
    if session is not None:
        with suppress(CorruptDataError):
            said = decode_session(session.value, key=session.key)
            under_way = {said.object_id, format_pending_id(said.start, said.epoch)}
    for info in listing:
        object_id = info.key.removeprefix(prefix)
        if object_id in named:
            continue
        name = parse_object_id(object_id)
        if object_id in retired:
            state = "retired"
        elif object_id in under_way:
            state = "under way"
        else:
            state = _state_of(object_id, name, info, survey.record.epoch, now - grace_seconds)
        survey.others.append(
            Other(object_id=object_id, size_bytes=info.size, name=name, state=state)
        )
    _note_orphans(survey)
    _note_staged(survey, catalog, store, now - grace_seconds)


def _decoded(item: KeyValue) -> list[ObjectDescriptor]:
    try:
        return [decode_descriptor(item.value, key=item.key)]
    except (CorruptDataError, UnsupportedVersionError):
        return []


def _state_of(
    object_id: str, name: ObjectName | None, info: ObjectInfo, epoch: int, oldest: float
) -> str:
    if info.modified_at is None or info.modified_at >= oldest:
        return "young"
    pending = parse_pending_epoch(object_id)
    if pending is not None:
        return "pending"
    if name is None:
        return "foreign"
    return "later" if name.epoch > epoch else "left over"


_ORPHANS: Final = {
    "left over": "no descriptor names it: a crash or a repair left it, and it is collected later",
    "pending": "an upload left it that never got its final name; it is collected later",
    "foreign": "not the name of an object: nobody but its owner knows what it is",
}


def _note_orphans(survey: Survey) -> None:
    holes = [
        (finding.start or 0, finding.end)
        for finding in survey.findings
        if finding.kind in ("gap", "unreadable_descriptor")
    ]
    for other in survey.others:
        reason = _ORPHANS.get(other.state)
        name = other.name
        fills = name is not None and any(
            name.start >= start and (end is None or name.end <= end) for start, end in holes
        )
        if reason is None or fills:
            continue
        survey.findings.append(
            Finding(
                kind="orphan",
                topic=survey.topic,
                object=other.object_id,
                start=name.start if name is not None else None,
                end=name.end if name is not None else None,
                reason=reason,
            )
        )


def _note_staged(survey: Survey, catalog: Catalog, store: ObjectStore, oldest: float) -> None:
    """Staged rows that no batch needs; how many, in one finding."""
    needed: set[str] = set()
    for found in catalog.store.range(catalog.keys.writer("")):
        try:
            record = decode_writer(found.value, key=found.key)
            if not record.is_done:
                needed.add(record.manifest)
                data = store.read(record.manifest, 0, MANIFEST_BYTES_MAX)
                needed.update(file.key for file in decode_manifest(data, key=record.manifest))
        except NotFoundError:
            continue
        except CorruptDataError:
            return  # which ones are needed is not known
    left = [
        info
        for info in store.list(staging_prefix(catalog.keys.topic))
        if info.modified_at is not None and info.modified_at < oldest and info.key not in needed
    ]
    if left:
        survey.findings.append(
            Finding(
                kind="staged",
                topic=survey.topic,
                object=left[0].key,
                start=None,
                end=None,
                reason=f"{len(left)} staged files that no batch needs, with "
                f"{sum(info.size for info in left)} bytes; they are collected later",
            )
        )
