"""The records in the metadata store: topics, owners, running uploads, seals, cursors.

    /topics/<ns>/<topic>                      TopicRecord
    /cluster/owners/<ns>/<topic>              OwnerRecord, with the owner's lease
    /cluster/nodes/<node>/process             NodeProcess, with the same lease
    /cluster/nodes/<node>/latest              the instance that had the node last
    /storage/topics/<ns>/<topic>/objects/cur  CurrentPointer
    /storage/topics/<ns>/<topic>/upload/session   UploadSession
    /storage/topics/<ns>/<topic>/state        SealedState
    /storage/topics/<ns>/<topic>/retired/<object>  RetiredObjects
    /subscriptions/<ns>/<topic>/<sub>/progress    Progress

All are JSON. Decoding raises CorruptDataError, which names the key, for anything else. Unknown
fields of topics and cursors are kept when they are written again (`more`), so that an older Ister
beside a newer one loses nothing.

`SealedState.last_committed_offset` is inclusive, as Danube's is, and cannot tell an empty topic
from one with a single message; `next_offset` beside it can, and is what counts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from ister.base.model import AckLevel, Codec
from ister.base.structs import known
from ister.errors import CorruptDataError
from ister.format.manifest import StagedFile, decode_manifest, manifest_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OPEN: Final = "open"
_Record = TypeVar("_Record", bound="DataclassInstance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """From `epoch` on, `node` has written the topic, beginning with the offset `start`."""

    epoch: int
    start: int
    node: str
    is_proven: bool = False
    """Whether a seal or an idle mark said that the node before it had acknowledged no message at or
    above `start`. At level `tiered` the bucket says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRecord:
    """What all owners of a topic share."""

    epoch: int
    """Rises with every opening for writing; a commit under a lower one is refused."""
    incarnation: str
    """Changes when a topic is deleted and created again."""
    ack: AckLevel
    codec: Codec
    created_at: int
    """Seconds since the Unix epoch."""
    expired_before: int = 0
    """Retention removed the messages below this offset that no object holds. Objects below it exist
    only during an expiry, or after an interrupted one, and belong to the topic until their
    descriptors are gone."""
    claim: str = ""
    """Changes with every claim: distinguishes two owners with the same epoch, as there can be after
    an older copy of the metadata was restored."""
    state: str = _OPEN
    """`open`, `deleting`, or `deleted`: the name is free, and its next epoch is one higher."""
    lineage: tuple[Lineage, ...] = ()
    """The nodes that wrote the topic, by first offset; the last one is the latest owner."""
    acked_end: int | None = None
    """No message at or above this offset was acknowledged or delivered; None if that is unknown.
    The owner records it while the topic is idle, and removes it before it accepts a message. At
    level `tiered`, only `ister metadata accept` does: local files end there that are of a later
    term than the bucket."""
    acked_epoch: int = 0
    """The epoch that recorded `acked_end`. Under another epoch it counts for nothing: an older
    Ister keeps both fields when it claims the topic, and does not remove them when it writes."""
    born: int = 0
    """The first epoch of this incarnation; 0 if it is unknown."""
    more: Mapping[str, object] = field(default_factory=dict)
    """The fields of others in the same record."""

    @property
    def node(self) -> str:
        """The node that wrote the topic last; empty if there is none."""
        return self.lineage[-1].node if self.lineage else ""

    @property
    def is_open(self) -> bool:
        """Whether the topic exists."""
        return self.state == _OPEN

    def is_whole(self, tiered: int) -> bool:
        """Whether the bucket has everything that was acknowledged or delivered.

        Args:
            tiered: The end of the newest object; 0 without objects.
        """
        if not self.lineage:
            # The record was rebuilt from the bucket: no node has written since.
            return True
        if self.acked_end is None or self.acked_epoch != self.epoch:
            return self.ack is AckLevel.TIERED
        return self.acked_end <= tiered


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRecord:
    """The node that has a topic open for writing."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """The process that currently has a node's data directory open."""

    instance: str
    """A random id of this process."""
    directory: str
    """Identifies the directory among copies of it, until the machine reboots; empty if unknown."""
    holder: str
    """The process in readable form: its id and host."""
    since: int
    """When it joined, in seconds since the Unix epoch."""
    ttl_seconds: float
    """The duration of its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestInstance:
    """The last process of a node, or that it has ended."""

    instance: str
    """The random id of the process; a process that ends replaces it with another random id."""
    ended: str = ""
    """The id of the process that ended, if all of its topics were closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentPointer:
    """The newest descriptor of a topic."""

    start: int
    end: int | None = None
    """Where its object ends: the topic's `tiered`. None if Danube or an older Ister wrote it."""

    def names(self, start: int, end: int) -> bool:
        """Whether it points to the object with these offsets."""
        return self.start == start and self.end in (None, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSession:
    """A running upload: the object that a crash may leave in the bucket."""

    object_id: str
    start: int
    end: int
    epoch: int
    started_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedState:
    """A topic that was handed over: everything is in the bucket, and it has no writer."""

    next_offset: int
    node: str
    epoch: int
    sealed_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredObjects:
    """Objects that another one replaced; readers may still use them."""

    objects: tuple[str, ...]
    until: int
    """When they may be deleted, in seconds since the Unix epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A subscription's cursor: the first offset that it has not acknowledged."""

    offset: int
    timestamp: int
    """When it last moved or was active, in milliseconds since the Unix epoch."""
    incarnation: str = ""
    more: Mapping[str, object] = field(default_factory=dict)


class BatchRun(NamedTuple):
    """Rows of a batch whose numbers and offsets both increase by one."""

    first: int
    """The number of the first one in its batch."""
    offset: int
    """Its offset."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRecord:
    """The newest batch of a writer with exactly-once batches, such as a streaming query."""

    batch: int
    """Its number; a writer's numbers only rise."""
    is_done: bool
    """Whether all of its rows are in the topic; otherwise some may be."""
    start: int
    """The lowest possible offset of its rows."""
    end: int
    """If it is done, all of its rows are below this offset. If not, `runs` has those below it, and
    the log shows which others are in; no job may remove a message from here on."""
    rows: int
    manifest: str
    """The object that lists its staged files, or would, if `files` did not: no two batches share
    this name."""
    epoch: int
    """The epoch of the owner that wrote this record."""
    incarnation: str
    updated_at: int
    """Seconds since the Unix epoch."""
    files: tuple[StagedFile, ...] | None = None
    """Its staged files; None if the object `manifest` lists them, or if it is done."""
    runs: tuple[BatchRun, ...] = ()
    """Where its first rows are, in order. Without gaps from row 0 on, and not necessarily to the
    last row: there is a limit, and earlier versions wrote none."""
    digest: int | None = None
    """Of its rows, in any order; None if unknown."""


def encode_topic(record: TopicRecord) -> bytes:
    """Encodes a topic's record, with the fields of others before its own."""
    values = _values(record)
    if not record.born:
        del values["born"]
    return _dump(values)


def decode_topic(data: bytes, *, key: str) -> TopicRecord:
    """Decodes a topic's record."""
    return _decode(TopicRecord, "topic record", data, key)


def encode_owner(record: OwnerRecord) -> bytes:
    """Encodes an owner's record."""
    return _encode(record)


def decode_owner(data: bytes, *, key: str) -> OwnerRecord:
    """Decodes an owner's record."""
    return _decode(OwnerRecord, "owner record", data, key)


def encode_node_process(process: NodeProcess) -> bytes:
    """Encodes the process that has a node's data directory open."""
    return _encode(process)


def decode_node_process(data: bytes, *, key: str) -> NodeProcess:
    """Decodes the process that has a node's data directory open."""
    return _decode(NodeProcess, "node record", data, key)


def encode_latest(latest: LatestInstance) -> bytes:
    """Encodes the instance that had a node last."""
    return _encode(latest)


def decode_latest(data: bytes, *, key: str) -> LatestInstance:
    """Decodes the instance that had a node last."""
    return _decode(LatestInstance, "node record", data, key)


def encode_current(start: int, end: int | None = None) -> bytes:
    """Encodes the pointer to the newest descriptor, by its start; `end` is exclusive."""
    return _dump({"start": f"{start:020d}"} | ({} if end is None else {"next_offset": end}))


def decode_current(data: bytes, *, key: str) -> int:
    """Decodes the start of the newest descriptor."""
    return decode_pointer(data, key=key).start


def decode_pointer(data: bytes, *, key: str) -> CurrentPointer:
    """Decodes the pointer to the newest descriptor."""
    found = _decode(_Current, "pointer", data, key)
    try:
        return CurrentPointer(start=int(found.start), end=found.next_offset)
    except ValueError as error:
        raise CorruptDataError(f"not a pointer: {found.start!r}", path=key) from error


def encode_session(session: UploadSession) -> bytes:
    """Encodes an upload session; its end is inclusive in JSON."""
    return _encode(replace(session, end=session.end - 1))


def decode_session(data: bytes, *, key: str) -> UploadSession:
    """Decodes an upload session."""
    session = _decode(UploadSession, "upload session", data, key)
    return replace(session, end=session.end + 1)


def encode_sealed(state: SealedState) -> bytes:
    """Encodes a sealed state: Danube's fields, and ours."""
    return _dump(
        {
            "sealed": True,
            "last_committed_offset": max(state.next_offset - 1, 0),
            "broker_id": state.node,
            "timestamp": state.sealed_at,
            "next_offset": state.next_offset,
            "epoch": state.epoch,
        }
    )


def decode_sealed(data: bytes, *, key: str) -> SealedState | None:
    """Decodes a sealed state; None if the record says that the topic is not sealed."""
    if not _decode(_IsSealed, "sealed state", data, key).sealed:
        return None
    found = _decode(_Sealed, "sealed state", data, key)
    return SealedState(
        next_offset=found.last_committed_offset + 1
        if found.next_offset is None
        else found.next_offset,
        node=str(found.broker_id),
        epoch=found.epoch,
        sealed_at=found.timestamp,
    )


def encode_retired(retired: RetiredObjects) -> bytes:
    """Encodes the list of retired objects."""
    return _encode(retired)


def decode_retired(data: bytes, *, key: str) -> RetiredObjects:
    """Decodes the list of retired objects."""
    return _decode(RetiredObjects, "record of retired objects", data, key)


def encode_progress(progress: Progress) -> bytes:
    """Encodes a cursor, with the fields of others before its own."""
    return _encode(progress)


def decode_progress(data: bytes, *, key: str) -> Progress:
    """Decodes a cursor."""
    return _decode(Progress, "cursor", data, key)


def encode_writer(record: WriterRecord) -> bytes:
    """Encodes a writer's record; its files are a part of the field `manifest`."""
    values = _values(record)
    del values["files"]
    for name in ("runs", "digest"):
        if values[name] in ((), None):
            del values[name]
    if record.files is not None:
        # An object where earlier versions expect a key: they refuse the record, and so use or
        # remove nothing of a batch whose files they cannot find.
        values["manifest"] = {"key": record.manifest, **manifest_fields(record.files)}
    return _dump(values)


def decode_writer(data: bytes, *, key: str) -> WriterRecord:
    """Decodes a writer's record."""
    found = _load(data, key)
    files, manifest = None, found.get("manifest")
    if isinstance(manifest, dict):
        files = decode_manifest(_dump(manifest), key=key)
        found["manifest"] = manifest.get("key")
    return replace(_build(WriterRecord, "writer's record", found, key), files=files)


# -- JSON -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Current:
    start: int | str
    next_offset: int | None = None


@dataclass(frozen=True, slots=True)
class _IsSealed:
    sealed: bool


@dataclass(frozen=True, slots=True)
class _Sealed:
    last_committed_offset: int
    broker_id: int | str
    """Danube's are numbers."""
    timestamp: int
    next_offset: int | None = None
    epoch: int = 0


_NAMES: Final[dict[type, dict[str, str]]] = {
    UploadSession: {"start": "start_offset", "end": "end_offset"},
    WriterRecord: {"is_done": "done", "start": "start_offset", "end": "next_offset"},
}
"""The fields whose names differ in JSON."""


def _encode(record: DataclassInstance) -> bytes:
    return _dump(_values(record))


def _values(record: DataclassInstance) -> dict[str, object]:
    """The fields of a record by their names in JSON, with the fields of others before its own."""
    own, keeps_more = _fields(type(record))
    values: dict[str, object] = {}
    if keeps_more:
        values.update(record.more)  # type: ignore[attr-defined]
    for name, stored in own:
        values[stored] = getattr(record, name)
    return values


def _decode(kind: type[_Record], what: str, data: bytes, key: str) -> _Record:
    return _build(kind, what, _load(data, key), key)


def _load(data: bytes, key: str) -> dict[str, object]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError("not JSON", path=key) from error
    if not isinstance(found, dict):
        raise CorruptDataError("not a JSON object", path=key)
    return found


def _build(kind: type[_Record], what: str, found: dict[str, object], key: str) -> _Record:
    own, keeps_more = _fields(kind)
    values = {name: found.pop(stored) for name, stored in own if stored in found}
    if keeps_more:
        values["more"] = found
    try:
        return msgspec.convert(values, known(kind), strict=False)
    except (ValueError, OverflowError) as error:
        raise CorruptDataError(f"not a {what}: {error}", path=key) from error


@functools.cache
def _fields(kind: type[DataclassInstance]) -> tuple[tuple[tuple[str, str], ...], bool]:
    """The fields of a record with their names in JSON, and whether it keeps those of others."""
    names = _NAMES.get(kind, {})
    own = [field.name for field in fields(kind)]
    stored = tuple((name, names.get(name, name)) for name in own if name != "more")
    return stored, "more" in own


def _dump(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, separators=(",", ":"), default=asdict).encode()
