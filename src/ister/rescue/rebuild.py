"""A topic's metadata from its bucket alone: what `ister recover` does, and adoption.

Objects describe themselves: the name has the offsets and the owner's epoch, the frames have
everything else. Each object is read once, checked frame by frame, and gets the descriptor that its
uploader would have written. Which objects belong to the topic: those that overlap one of a later
epoch do not (their owner had been fenced); of the others, the ones that make up the longest history
without a gap. What fits nowhere is left out and reported.

A merged object may be there beside those that it was made of. It has the same messages, so that
either will do, unless some were left out of it: then it is taken only where the others are gone.
One that is damaged, or was never finished, is left out wherever others make up its range, whatever
their epochs: its name alone proves nothing. Runs of express objects are treated like merged
objects; their descriptors come from the footers. Runs of another incarnation are of a topic of the
same name that was deleted, and so are all runs of a topic that has neither a manifest nor objects
of its own.

Objects that Danube wrote are adopted where they are (`ister.rescue.danube`). They may
overlap, because Danube exports some files again: the longest history is taken, of equal objects the
newest, and offsets that only a left-out object has are copied from it. Each object of frames that
is not taken is an error with its name, unless Ister itself wrote it.

Commit point: the topic's record, written last and only if there is none. What a crash leaves
before it: descriptors without a record, which the next run writes again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.model import AckLevel, Codec, Layout, TopicName
from ister.bucket.check import ObjectFile, load_archives, verify_content, verify_size, walk_frames
from ister.bucket.listing import list_objects
from ister.bucket.names import (
    TOPICS_PREFIX,
    ObjectName,
    TopicKeys,
    format_object_id,
    manifest_key,
    object_id_of,
    object_key,
    objects_prefix,
    parse_object_id,
    parse_topic_of_key,
    segment_name,
    segments_prefix,
)
from ister.bucket.object_choice import choose_objects, overlap, ranges_of
from ister.bucket.object_maker import ObjectSummary
from ister.bucket.terms import is_of_lineage, newest_terms
from ister.bucket.topic_manifest import (
    Manifest,
    has_manifest,
    load_manifest,
    manifest_of,
    save_manifest,
)
from ister.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptDataError,
    IsterError,
    NotFoundError,
    StoresDifferError,
    UnsupportedOperationError,
)
from ister.format.crc import crc32
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    FORMAT_FRAMES,
    FORMAT_PARQUET,
    ObjectDescriptor,
    encode_descriptor,
)
from ister.format.offset_ranges import is_within, merge_ranges
from ister.format.records import TopicRecord, encode_current, encode_topic
from ister.metadata.base import Absent, MetadataStore, Put
from ister.objectstore.base import ObjectInfo, ObjectStore
from ister.objectstore.slices import with_slices
from ister.rescue.danube import Adoption
from ister.rescue.examine_object import walk_archive

if TYPE_CHECKING:
    from ister.format.archive import ArchiveReader, RowGroup

_log = logging.getLogger("ister.bucket.rebuild")

_CHUNK_BYTES = 4 * MIB
_INDEX_EVERY = 1000
_EPOCHS_SKIPPED = 1000


@dataclass(slots=True, kw_only=True)
class TopicReport:
    """What was found of one topic, and what was done; without an object, offsets are 0."""

    topic: str
    status: str = "failed"
    """`recovered`, `known` (the metadata store has some), `planned` or `failed`."""
    objects: list[ObjectDescriptor] = field(default_factory=list)
    """Those that make up the topic, in their order."""
    left_out: list[str] = field(default_factory=list)
    """Objects that belong to no gapless history, and foreign files."""
    copied: list[str] = field(default_factory=list)
    """Objects made of the parts of left-out ones that no other object has."""
    errors: list[IsterError] = field(default_factory=list)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The ranges that no object has."""
        return [(a.end, b.start) for a, b in pairwise(self.objects) if a.end < b.start]

    @property
    def bounds(self) -> tuple[int, int]:
        """The first offset, and the offset after the last one."""
        return (self.objects[0].start, self.objects[-1].end) if self.objects else (0, 0)


def find_topics(
    store: ObjectStore, *, on_stray: Callable[[str], None] = lambda key: None
) -> dict[TopicName, list[ObjectInfo]]:
    """Every topic that has something in the bucket, with its objects (not its manifest).

    Objects of frames count wherever they are below the topic's prefix.

    `on_stray`: called with the key of an object of frames that is below no topic's prefix.
    """
    found: dict[TopicName, list[ObjectInfo]] = {}
    for info in store.list(TOPICS_PREFIX):
        topic = parse_topic_of_key(info.key)
        is_frames = info.key.endswith(f".{FORMAT_FRAMES}")
        if topic is not None:
            objects = found.setdefault(topic, [])
            if is_frames or info.key.startswith((objects_prefix(topic), segments_prefix(topic))):
                objects.append(info)
        elif is_frames:
            on_stray(info.key)
    return found


def _name_runs(
    topic: TopicName, runs: Iterable[ObjectDescriptor]
) -> dict[ObjectName, tuple[ObjectInfo, ObjectDescriptor]]:
    """Runs by unique names, each with the `ObjectInfo` that a listing would return."""
    named: dict[ObjectName, tuple[ObjectInfo, ObjectDescriptor]] = {}
    for run in runs:
        name = ObjectName(
            start=run.start,
            end=run.end,
            epoch=run.epoch,
            format=FORMAT_EXPRESS,
            tag=f"{crc32(run.object_id.encode()):08x}",
        )
        info = ObjectInfo(
            key=object_key(topic, run.object_id),
            size=run.size_bytes,
            modified_at=float(run.created_at),
        )
        named[name] = (info, run)
    return named


def _find_partial(store: ObjectStore, named: Mapping[ObjectName, ObjectInfo]) -> set[ObjectName]:
    """The objects that messages were left out of, or that do not tell."""
    found: set[ObjectName] = set()
    for name, info in named.items():
        if name.format == FORMAT_PARQUET:
            try:
                if _open_archive(store, info.key, info.size).kept:
                    found.add(name)
            except CorruptDataError:
                found.add(name)
            except NotFoundError:
                continue
    return found


def _open_archive(store: ObjectStore, key: str, size_bytes: int) -> ArchiveReader:
    archive: ArchiveReader = load_archives().ArchiveReader(
        lambda position, size: store.read(key, position, size), size_bytes, path=key
    )
    return archive


class _Descriptions:
    """Descriptors made by reading objects; each object is read once."""

    def __init__(
        self,
        store: ObjectStore,
        topic: TopicName,
        named: Mapping[ObjectName, ObjectInfo],
        *,
        incarnation: str,
        runs: Mapping[ObjectName, ObjectDescriptor],
        known: Mapping[ObjectName, ObjectDescriptor] = MappingProxyType({}),
        on_object: Callable[[], None] = lambda: None,
    ) -> None:
        self._incarnation = incarnation
        self._runs = runs
        self._store = store
        self._topic = topic
        self._named = named
        self._on_object = on_object
        self._found: dict[ObjectName, ObjectDescriptor | CorruptDataError | NotFoundError] = {
            **known
        }

    def of(self, name: ObjectName) -> ObjectDescriptor:
        """An object's descriptor; raises as `describe_object`."""
        if name not in self._found:
            info = self._named[name]
            try:
                if (run := self._runs.get(name)) is not None:
                    verify_content(self._store, info.key, run, chunk_bytes=_CHUNK_BYTES)
                    self._found[name] = run
                else:
                    self._found[name] = describe_object(
                        self._store,
                        self._topic,
                        object_id_of(self._topic, info.key),
                        name,
                        incarnation=self._incarnation,
                        created_at=int(info.modified_at or 0),
                    )
            except (CorruptDataError, NotFoundError) as error:
                self._found[name] = error
            self._on_object()
        found = self._found[name]
        if isinstance(found, ObjectDescriptor):
            return found
        raise found

    def is_sound(self, name: ObjectName) -> bool:
        """Whether an object has the offsets of its name."""
        try:
            self.of(name)
        except (CorruptDataError, NotFoundError):
            return False
        return True


def _choose_sound(
    store: ObjectStore,
    named: Mapping[ObjectName, ObjectInfo],
    descriptions: _Descriptions,
    *,
    start: int | None = None,
) -> tuple[list[ObjectName], list[ObjectName], list[tuple[int, int]]]:
    """Like `choose_objects`, but merged objects that are not sound are replaced by others.

    Nothing says that a merged object was ever part of its topic: a merge that was killed may have
    left it half-written. So it replaces others only if it is sound, or if no other object
    has its offsets.
    """
    partial = _find_partial(store, named)
    names = set(named)
    needed: set[ObjectName] = set()
    while True:
        chosen, rest, gaps = choose_objects(names, start=start, partial=partial)
        for name in _suspects(names, chosen):
            if name in needed or descriptions.is_sound(name):
                continue
            others = ranges_of(choose_objects(names - {name}, start=start, partial=partial)[0])
            if all(is_within(others, *covered) for covered in ranges_of(chosen)):
                _log.warning(
                    "a merged object is not sound; using the original objects",
                    extra={"path": named[name].key},
                )
                names.discard(name)
                break
            needed.add(name)
        else:
            return chosen, [*rest, *(name for name in named if name not in names)], gaps


def _suspects(names: Collection[ObjectName], chosen: list[ObjectName]) -> list[ObjectName]:
    """Merged objects that a choice depends on: chosen ones, and those that exclude others."""
    suspects = [name for name in chosen if name.tag is not None]
    covered = ranges_of(chosen)
    earlier: list[tuple[int, int]] = []  # what earlier epochs cover
    for epoch in sorted({name.epoch for name in names}):
        group = [name for name in names if name.epoch == epoch]
        suspects += [
            name
            for name in sorted(group, key=lambda n: (n.start, n.end, n.tag or "", n.format))
            if name.tag is not None
            and not is_within(covered, name.start, name.end)
            and overlap(earlier, name)
        ]
        earlier = merge_ranges([*earlier, *((name.start, name.end) for name in group)])
    return suspects


def describe_object(
    store: ObjectStore,
    topic: TopicName,
    object_id: str,
    name: ObjectName,
    *,
    incarnation: str,
    created_at: int,
    index_every_messages: int = _INDEX_EVERY,
) -> ObjectDescriptor:
    """Reads an object whole and describes it.

    Raises:
        CorruptDataError: It does not hold exactly the frames that its name says.
    """
    key = object_key(topic, object_id)
    if name.format == FORMAT_PARQUET:
        try:
            return _describe_archive(
                store, topic, object_id, name, incarnation=incarnation, created_at=created_at
            )
        except CorruptDataError as error:
            error.topic = str(topic)
            raise
    summary = ObjectSummary(name.start, index_every_messages=index_every_messages)
    try:
        for batch in walk_frames(store, key, name.start, name.end, chunk_bytes=_CHUNK_BYTES):
            summary.add(batch)
    except CorruptDataError as error:
        error.topic = str(topic)
        raise
    return summary.describe(
        object_id,
        epoch=name.epoch,
        incarnation=incarnation,
        created_at=created_at,
        etag=store.stat(key).etag,
    )


def _describe_archive(
    store: ObjectStore,
    topic: TopicName,
    object_id: str,
    name: ObjectName,
    *,
    incarnation: str,
    created_at: int,
) -> ObjectDescriptor:
    """Describes an object in Parquet; reads all of it."""
    key = object_key(topic, object_id)
    info = store.stat(key)
    archive = _open_archive(store, key, info.size)
    says = (archive.topic, archive.start, archive.end)
    if says != (str(topic), name.start, name.end):
        raise CorruptDataError(
            f"the object says that it is {says[0]}, offsets {says[1]} up to {says[2]}",
            path=key,
            offset=name.start,
        )

    def refuse(group: RowGroup, error: CorruptDataError) -> None:
        raise error

    crc = walk_archive(archive, ObjectFile(store, key, info.size), refuse)
    return archive.describe(crc).describe(
        object_id, epoch=name.epoch, incarnation=incarnation, created_at=created_at, etag=info.etag
    )


def find_continuation(
    store: ObjectStore,
    topic: TopicName,
    start: int,
    *,
    record: TopicRecord,
    runs: Iterable[ObjectDescriptor],
) -> list[ObjectDescriptor]:
    """Whole objects in the bucket that continue a topic from `start` on, without a gap.

    For a catalog that has forgotten them: an older copy of it was restored, or their uploader was
    killed before the commit.

    `record`: the topic's record: objects of replaced owners do not count.

    Raises:
        StoresDifferError: An object has messages on both sides of where the others end: it was
            merged from objects that the catalog does not have.
    """
    store = with_slices(store)
    names, described = _find_own(topic, list_objects(store, topic), record, runs, start=start)
    across = [name for name in names if name.start < start and name.tag is not None]
    later = {name: info for name, info in names.items() if name.start >= start}
    descriptions = _Descriptions(
        store, topic, names, incarnation=record.incarnation, runs=described
    )
    found: list[ObjectDescriptor] = []
    for name in _choose_sound(store, later, descriptions, start=start)[0] if later else ():
        try:
            found.append(descriptions.of(name))
        except (CorruptDataError, NotFoundError):
            break
    end = found[-1].end if found else start
    merged = [name for name in across if name.end > end and descriptions.is_sound(name)]
    if merged:
        raise StoresDifferError(
            "the metadata store was rolled back to an older state: its catalog ends at offset "
            f"{end}, but the bucket has an object with the offsets {merged[0].start} up to, not "
            f"including, {merged[0].end}",
            topic=str(topic),
            offset=end,
            hint="`ister metadata accept` rebuilds the catalog from the bucket",
        )
    behind = [(name.start, name.end) for name in later if name.start > end]
    if behind:
        _log.error(
            "objects after a gap are not part of the topic",
            extra={"topic": str(topic), "end": end, "ranges": merge_ranges(behind)},
        )
    return found


def _find_own(
    topic: TopicName,
    objects: Iterable[ObjectInfo],
    record: TopicRecord,
    runs: Iterable[ObjectDescriptor],
    *,
    start: int = 0,
) -> tuple[dict[ObjectName, ObjectInfo], dict[ObjectName, ObjectDescriptor]]:
    """The objects and runs that a topic's owners wrote, and the descriptors of the runs.

    Objects that end at or before `start`, and runs that begin before it, do not count.
    """
    names: dict[ObjectName, ObjectInfo] = {}
    for info in objects:
        name = parse_object_id(object_id_of(topic, info.key))
        if name is not None and name.end > start and is_of_lineage(record, name.epoch, name.end):
            names[name] = info
    described: dict[ObjectName, ObjectDescriptor] = {}
    for name, (info, run) in _name_runs(topic, runs).items():
        is_own = run.incarnation == record.incarnation
        if is_own and run.start >= start and is_of_lineage(record, run.epoch, run.end):
            names[name], described[name] = info, run
    return names, described


def secure_objects(
    store: ObjectStore, topic: TopicName, found: Sequence[ObjectDescriptor], epoch: int
) -> list[ObjectDescriptor]:
    """Copies objects to names of another epoch; their writers may still delete them.

    Runs stay where they are: an express object is kept while one of its runs may be needed.

    Returns the descriptors of the copies, up to the first object that is gone.
    """
    secured: list[ObjectDescriptor] = []
    for described in found:
        name = parse_object_id(described.object_id)
        if name is None or name.epoch == epoch:
            secured.append(described)
            continue
        object_id = format_object_id(
            name.start,
            name.end,
            epoch,
            format=name.format,
            tag=name.tag,
            layout=Layout.OBJECTS if segment_name(described.object_id) is None else Layout.SEGMENTS,
        )
        key = object_key(topic, object_id)
        try:
            copy_bytes(store, object_key(topic, described.object_id), key)
            etag = verify_size(store, key, described.size_bytes)
        except (NotFoundError, CorruptDataError):
            break
        secured.append(replace(described, object_id=object_id, epoch=epoch, etag=etag))
    return secured


def copy_bytes(
    store: ObjectStore,
    source: str,
    target: str,
    *,
    limit: int | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
    concurrent_parts: int = 1,
) -> None:
    """Copies an object, or its first `limit` bytes; by hand where the store cannot."""
    if limit is None:
        with suppress(UnsupportedOperationError):
            store.copy(source, target)
            return
    writer = store.open_writer(target, chunk_bytes=chunk_bytes, concurrent_parts=concurrent_parts)
    try:
        position, left = 0, 1 << 63 if limit is None else limit
        # With its copy for the store, what is read takes up one part.
        while left and (chunk := store.read(source, position, min(chunk_bytes // 2, left))):
            writer.write(chunk)
            position += len(chunk)
            left -= len(chunk)
        writer.close()
    finally:
        writer.abort()


def rebuild_topic(
    store: ObjectStore,
    metadata: MetadataStore,
    keys: TopicKeys,
    objects: list[ObjectInfo],
    *,
    runs: Sequence[ObjectDescriptor] = (),
    clock: Clock,
    dry_run: bool,
    layout: Layout = Layout.OBJECTS,
    on_object: Callable[[], None] = lambda: None,
) -> TopicReport:
    """Writes the metadata of a topic from its objects, if there is none.

    `clock`: for the record of a topic without a manifest.
    `layout`: where objects go that are made of parts of others.
    Returns what was found. Damaged objects are in `errors`; a descriptor for the range that their
    names say is written all the same, so that what is whole in them can be read. Objects of Danube
    that were not taken are in `errors`, too.
    """
    store = with_slices(store)
    topic = keys.topic
    report = TopicReport(topic=str(topic))
    manifest, is_damaged = _find_manifest(store, topic, report)
    if manifest is not None:
        incarnation = manifest.incarnation
    elif runs and (is_damaged or any(parse_object_id(object_id_of(topic, o.key)) for o in objects)):
        incarnation = max(runs, key=lambda run: run.epoch).incarnation
    else:
        incarnation = secrets.token_hex(8)
    adoption = Adoption(
        store,
        topic,
        incarnation=incarnation,
        is_danubes=not (manifest is not None or is_damaged or runs),
    )
    named = adoption.sort(objects, on_object=on_object)
    report.left_out += adoption.foreign
    express: dict[ObjectName, ObjectDescriptor] = {}
    for name, (info, run) in _name_runs(topic, runs).items():
        if run.incarnation == incarnation:
            named[name], express[name] = info, run
        else:
            report.left_out.append(run.object_id)
    descriptions = _Descriptions(
        store,
        topic,
        named,
        incarnation=incarnation,
        runs=express,
        known=adoption.described,
        on_object=on_object,
    )
    chosen, rest, _ = _choose_sound(store, named, descriptions)
    for name in chosen:
        try:
            report.objects.append(descriptions.of(name))
        except CorruptDataError as error:
            report.errors.append(error)
            report.objects.append(
                replace(express[name], checksum=None)
                if name in express
                else _describe_unread(store, topic, name, named[name], incarnation)
            )
    left_out = {object_id_of(topic, named[name].key): name for name in rest}
    report.left_out += left_out
    report.copied = adoption.complete(
        report.objects,
        (
            (object_id, descriptions.of(name) if descriptions.is_sound(name) else None)
            for object_id, name in left_out.items()
        ),
        layout=layout,
        dry_run=dry_run,
    )
    report.errors += adoption.errors
    if metadata.get(keys.record) is not None:
        report.errors.append(
            AlreadyExistsError("the metadata store knows this topic", topic=str(topic))
        )
        return report
    if not dry_run:
        epochs = [name.epoch for name in named]
        epochs += [term.epoch for term in newest_terms(store, topic)]
        record = _make_record(
            manifest, epochs, report.objects, incarnation=incarnation, clock=clock
        )
        if manifest is None:
            # So that a second rebuilding gives the same topic.
            save_manifest(store, topic, manifest_of(record))
        _write(metadata, keys, record, report.objects)
    report.status = "planned" if dry_run else "recovered"
    return report


def rebuild_catalog(
    store: ObjectStore,
    metadata: MetadataStore,
    keys: TopicKeys,
    objects: Iterable[ObjectInfo],
    *,
    record: TopicRecord,
    runs: Iterable[ObjectDescriptor],
) -> list[ObjectDescriptor]:
    """Replaces the descriptors of a topic that no process has open by those of its objects.

    `record`: its record: objects of replaced owners do not count.
    Returns the descriptors. Ranges that no whole object has are left out.
    """
    store, topic = with_slices(store), keys.topic
    names, described = _find_own(topic, objects, record, runs)
    descriptions = _Descriptions(
        store, topic, names, incarnation=record.incarnation, runs=described
    )
    chosen = [
        descriptions.of(name)
        for name in _choose_sound(store, names, descriptions)[0]
        if descriptions.is_sound(name)
    ]
    metadata.delete_prefix(keys.objects)
    _write_descriptors(metadata, keys, chosen)
    return chosen


def extend_catalog(
    store: ObjectStore,
    metadata: MetadataStore,
    keys: TopicKeys,
    start: int,
    *,
    record: TopicRecord,
    runs: Iterable[ObjectDescriptor],
) -> None:
    """Adds the objects that continue the catalog of a topic that no process has open.

    `record`: its record; copies of objects get its epoch.
    """
    found = find_continuation(store, keys.topic, start, record=record, runs=runs)
    found = secure_objects(store, keys.topic, found, record.epoch)
    _write_descriptors(metadata, keys, found)


def _find_manifest(
    store: ObjectStore, topic: TopicName, report: TopicReport
) -> tuple[Manifest | None, bool]:
    """A topic's manifest, and whether there is one that is damaged, which is reported."""
    manifest = load_manifest(store, topic)
    is_damaged = manifest is None and has_manifest(store, topic)
    if is_damaged:
        report.errors.append(
            CorruptDataError("the topic's manifest is damaged", path=manifest_key(topic))
        )
    return manifest, is_damaged


def _make_record(
    manifest: Manifest | None,
    epochs: Iterable[int],
    objects: Sequence[ObjectDescriptor],
    *,
    incarnation: str,
    clock: Clock,
) -> TopicRecord:
    """The record of a topic, by its manifest or else by its objects."""
    codecs = [described.codec for described in objects if described.codec is not None]
    if manifest is None:
        manifest = Manifest(
            ack=AckLevel.SYNCED,
            codec=codecs[-1] if codecs else Codec.BINCODE2,
            incarnation=incarnation,
            created_at=clock.now_ns() // 1_000_000_000,
        )
    return TopicRecord(
        # Some owners may have made no object: their epochs must not be used again.
        epoch=max(epochs, default=0) + _EPOCHS_SKIPPED,
        incarnation=incarnation,
        ack=manifest.ack,
        codec=manifest.codec,
        created_at=manifest.created_at,
    )


def _describe_unread(
    store: ObjectStore, topic: TopicName, name: ObjectName, info: ObjectInfo, incarnation: str
) -> ObjectDescriptor:
    """A descriptor of a damaged object, by its name."""
    kept = ""
    if name.format == FORMAT_PARQUET:
        with suppress(CorruptDataError):
            kept = _open_archive(store, info.key, info.size).kept
    return ObjectDescriptor(
        object_id=object_id_of(topic, info.key),
        start=name.start,
        end=name.end,
        size_bytes=info.size,
        created_at=int(info.modified_at or 0),
        epoch=name.epoch,
        incarnation=incarnation,
        messages=name.end - name.start,
        format=name.format,
        kept=kept,
    )


def _write(
    metadata: MetadataStore, keys: TopicKeys, record: TopicRecord, objects: list[ObjectDescriptor]
) -> None:
    metadata.delete_prefix(keys.objects)
    _write_descriptors(metadata, keys, objects)
    written = metadata.transact([Absent(keys.record)], [Put(keys.record, encode_topic(record))])
    if written is None:
        raise ConflictError("the topic was created meanwhile", topic=str(keys.topic))


def _write_descriptors(
    metadata: MetadataStore, keys: TopicKeys, objects: Sequence[ObjectDescriptor]
) -> None:
    for described in objects:
        metadata.put(keys.descriptor(described.start), encode_descriptor(described))
    if objects:
        metadata.put(keys.current, encode_current(objects[-1].start, objects[-1].end))
