"""Compares a topic's catalog with what the bucket holds, for `scrub`.

    metadata: record, cur, descriptors, retired ─┐
    bucket: listing ─────────────────────────────┴─► Survey: entries, findings, other objects

Owns: faults that show without reading an object: gaps and overlaps between descriptors, unreadable
descriptors, a wrong pointer, objects without a descriptor. Does not own: what objects hold
(`object_check`), repairs (`mend`). Read-only. Runs on the driver.

Descriptors change while they are read: by uploads, merges and retention. So they are read again
until two readings find the same faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, TypedDict

from ister.base.clock import Clock
from ister.bucket.catalog import Catalog
from ister.bucket.listing import list_objects
from ister.bucket.names import (
    ObjectName,
    format_pending_id,
    object_id_of,
    parse_object_id,
    parse_pending_epoch,
)
from ister.bucket.orphans import find_stale_staging
from ister.errors import CorruptDataError, NotFoundError, UnsupportedVersionError
from ister.format.descriptor import ObjectDescriptor, decode_descriptor
from ister.format.records import (
    SealedState,
    TopicRecord,
    decode_pointer,
    decode_retired,
    decode_session,
)
from ister.metadata.base import KeyValue
from ister.objectstore.base import ObjectInfo, ObjectStore

_PAGE: Final = 256
_ROUNDS: Final = 4

NOTES: Final = frozenset({"orphan", "staged"})
"""Kinds of findings that are not faults of the topic."""


class FindingJson(TypedDict):
    """A finding as a report has it."""

    kind: str
    topic: str
    object: str | None
    start_offset: int | None
    next_offset: int | None
    position: int | None
    offset: int | None
    reason: str
    repairable: bool
    repaired: bool
    lost: list[list[int]]


@dataclass(slots=True, kw_only=True)
class ScrubFinding:
    """Something wrong with the offsets `start` (included) to `end` (excluded)."""

    kind: str
    topic: str
    object: str | None
    start: int | None
    end: int | None
    """None if it is unknown."""
    reason: str
    position: int | None = None
    """The byte in the object."""
    offset: int | None = None
    repairable: bool = False
    repaired: bool = False
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Offsets that no source has, as far as is known."""
    hint: str | None = None
    """What to do about it, if that is specific to this finding."""

    @property
    def is_fault(self) -> bool:
        """Whether it is a fault of the topic."""
        return self.kind not in NOTES

    def as_json(self) -> FindingJson:
        """Returns the finding as a report has it."""
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
class DescriptorEntry:
    """A descriptor as it was read, without its indexes, because a topic may have very many."""

    key: str
    revision: int
    described: ObjectDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """An object that no descriptor names."""

    object_id: str
    size_bytes: int
    name: ObjectName | None
    """None for a foreign or a pending object."""
    state: str
    """`retired`, `young`, `under way`, `later`, or an orphan: `pending`, `foreign`, `left over`."""


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was found about one topic."""

    topic: str
    record: TopicRecord
    entries: list[DescriptorEntry] = field(default_factory=list)
    """Readable descriptors under their own keys, in the order of offsets."""
    unreadable: list[tuple[str, int, int]] = field(default_factory=list)
    """(key, revision, the key's offset)."""
    misplaced: list[DescriptorEntry] = field(default_factory=list)
    superfluous: set[int] = field(default_factory=set)
    """Start offsets of entries whose offsets other entries have."""
    current: int | None = None
    current_end: int | None = None
    """Where the pointer says that the newest object ends; None if it does not say."""
    others: list[Other] = field(default_factory=list)
    findings: list[ScrubFinding] = field(default_factory=list)

    @property
    def has_faults(self) -> bool:
        """Whether any finding is a fault."""
        return any(finding.is_fault for finding in self.findings)

    def find(
        self,
        kind: str,
        reason: str,
        *,
        object: str | None = None,
        start: int | None = None,
        end: int | None = None,
        offset: int | None = None,
        repairable: bool = False,
    ) -> None:
        """Adds a finding."""
        self.findings.append(
            ScrubFinding(
                kind=kind,
                topic=self.topic,
                object=object,
                start=start,
                end=end,
                offset=offset,
                reason=reason,
                repairable=repairable,
            )
        )


def survey_topic(
    catalog: Catalog, store: ObjectStore, *, grace_seconds: float, clock: Clock
) -> Survey:
    """Reads a topic's metadata and lists its objects.

    Objects younger than `grace_seconds` may be waiting for their commit.

    Raises:
        NotFoundError: The topic does not exist.
        CorruptDataError: The topic's record cannot be read.
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
        raise NotFoundError(f"topic {topic} does not exist", topic=topic)
    survey = Survey(topic=topic, record=found[0])
    sealed = catalog.sealed()
    pointer = catalog.store.get(catalog.keys.current)
    for item in read_pages(catalog):
        _take(survey, catalog, item)
    again = catalog.store.get(catalog.keys.current)
    # While uploads move the pointer, the topic's end cannot be judged.
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
        pointer = decode_pointer(found.value, key=found.key)
    except CorruptDataError as error:
        survey.find(
            "pointer",
            f"the pointer to the newest object cannot be read: {error.message}",
            repairable=True,
        )
        return None
    survey.current_end = pointer.end
    return pointer.start


def read_pages(catalog: Catalog) -> Iterable[KeyValue]:
    """Yields every descriptor's key, without decoding the value."""
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
        survey.find(
            "unreadable_descriptor", f"{item.key}: {error.message}", start=start, offset=start
        )
        if start is not None and not is_newer:
            survey.unreadable.append((item.key, item.revision, start))
        return
    entry = DescriptorEntry(
        key=item.key,
        revision=item.revision,
        described=replace(described, offset_index=(), publish_time_index=()),
    )
    if start == described.start:
        survey.entries.append(entry)
        return
    survey.misplaced.append(entry)
    survey.find(
        "misplaced_descriptor",
        f"a descriptor that starts at {described.start} is stored under {item.key}",
        object=described.object_id,
        start=described.start,
        end=described.end,
        offset=start,
    )


def find_superfluous(ranges: Sequence[tuple[int, int]]) -> set[int]:
    """Finds ranges that are not needed to cover all offsets once.

    `ranges`: (start, end), ascending; no two start at the same offset.
    Returns the starts of superfluous ranges. Among ranges that overlap each other, those that form
    a chain from the first offset to the last are needed; without such a chain all of them are.
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
    before: DescriptorEntry | None = None
    for entry in survey.entries:
        described = entry.described
        if described.start in survey.superfluous:
            survey.find(
                "overlap",
                "other descriptors have all of its offsets",
                object=described.object_id,
                start=described.start,
                end=described.end,
                repairable=True,
            )
            continue
        if before is not None and described.start < before.described.end:
            survey.find(
                "overlap",
                f"{before.described.object_id} has these offsets, too, and both are needed",
                object=described.object_id,
                start=described.start,
                end=min(described.end, before.described.end),
            )
        if before is None or described.end > before.described.end:
            before = entry


def _find_gaps(survey: Survey) -> int:
    """Finds offsets that no descriptor has; returns where the last descriptor ends."""
    record, entries = survey.record, survey.entries
    at = max(record.expired_before, record.lineage[0].start if record.lineage else 0)
    if entries and (not record.lineage or entries[0].described.start < at):
        at = entries[0].described.start
    for entry in entries:
        # Expired offsets may be missing: retention removes them one object at a time.
        begin = max(at, record.expired_before)
        if entry.described.start > begin:
            _find_gap(survey, begin, entry.described.start)
        at = max(at, entry.described.end)
    return at


def _check_end(survey: Survey, at: int, sealed: SealedState | None) -> None:
    """Checks that the newest descriptor exists, and that the pointer names it."""
    entries = survey.entries
    if not entries and survey.current is None and sealed is None:
        return  # nothing was ever uploaded
    last = max((entry.described.start for entry in entries), default=-1)
    needed = {entry.described.start for entry in entries} - survey.superfluous
    newest = {last, max(needed, default=-1)}
    if sealed is not None and sealed.next_offset > at:
        _find_gap(survey, at, sealed.next_offset)
    elif survey.current is not None and survey.current >= at:
        # The newest descriptor, which the pointer names, is missing; its end is unknown.
        _find_gap(survey, at, None)
    elif survey.current not in newest and not any(f.kind == "pointer" for f in survey.findings):
        said = "missing" if survey.current is None else f"at {survey.current}"
        survey.find(
            "pointer",
            f"the newest object starts at {last}, and the pointer to it is {said}",
            offset=last,
            repairable=True,
        )
    elif survey.current_end not in (
        None,
        *(one.described.end for one in entries if one.described.start == survey.current),
    ):
        survey.find(
            "pointer",
            f"the pointer to the newest object has the wrong end {survey.current_end}",
            offset=last,
            repairable=True,
        )


def _find_gap(survey: Survey, start: int, end: int | None) -> None:
    for finding in survey.findings:
        if finding.kind == "unreadable_descriptor" and finding.start == start:
            finding.end = end  # the gap is this descriptor's range
            return
    survey.find(
        "gap",
        "no descriptor has these offsets"
        if end is not None
        else "the descriptor of the newest object is missing",
        start=start,
        end=end,
        offset=start,
    )


# -- the bucket -----------------------------------------------------------------------------


def _list_objects(
    survey: Survey, catalog: Catalog, store: ObjectStore, grace_seconds: float, clock: Clock
) -> None:
    keys = catalog.keys
    listing = list(list_objects(store, keys.topic))
    now = clock.now_ns() / 1e9
    # After the listing: objects that were committed meanwhile are not orphans.
    entries = [*survey.entries, *survey.misplaced]
    known = {(entry.key, entry.revision): entry.described.object_id for entry in entries}
    named = {
        known.get((item.key, item.revision)) or _decode_name(item) for item in read_pages(catalog)
    }
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
        object_id = object_id_of(keys.topic, info.key)
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
    _find_orphans(survey)
    _find_staged(survey, catalog, store, now, grace_seconds)


def _decode_name(item: KeyValue) -> str | None:
    try:
        return decode_descriptor(item.value, key=item.key).object_id
    except (CorruptDataError, UnsupportedVersionError):
        return None


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
    "pending": "an upload left it before it got its final name; it is collected later",
    "foreign": "its name is not that of an object; Ister did not create it",
}


def _find_orphans(survey: Survey) -> None:
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
        survey.find(
            "orphan",
            reason,
            object=other.object_id,
            start=name.start if name is not None else None,
            end=name.end if name is not None else None,
        )


def _find_staged(
    survey: Survey, catalog: Catalog, store: ObjectStore, now: float, grace_seconds: float
) -> None:
    """Finds staged files that no batch needs; all of them are one finding."""
    try:
        left = find_stale_staging(catalog, store, now=now, grace_seconds=grace_seconds)
    except CorruptDataError:
        return  # unknown which files are needed
    if left:
        survey.find(
            "staged",
            f"{len(left)} staged files that no batch needs, with "
            f"{sum(info.size for info in left)} bytes; they are collected later",
            object=left[0].key,
        )
