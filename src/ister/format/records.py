"""The other values in the metadata store: topics, owners, uploads under way, seals, cursors.

    /topics/<ns>/<topic>                      TopicRecord
    /cluster/owners/<ns>/<topic>              OwnerRecord, with the owner's lease
    /cluster/nodes/<node>/process             NodeProcess, with the same lease
    /cluster/nodes/<node>/latest              the instance that had the node last
    /storage/topics/<ns>/<topic>/objects/cur  {"start": "<20 digits>"}
    /storage/topics/<ns>/<topic>/upload/session   UploadSession
    /storage/topics/<ns>/<topic>/state        SealedState
    /storage/topics/<ns>/<topic>/retired/<object>  RetiredObjects
    /subscriptions/<ns>/<topic>/<sub>/progress    Progress

All are JSON. Fields that this code does not know are kept when a topic's record is written again,
so that an older Ister beside a newer one loses nothing.

`SealedState.last_committed_offset` is inclusive, as Danube's is, and cannot tell an empty topic
from one with a single message; `next_offset` beside it can, and is what counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ister.errors import CorruptDataError
from ister.model import AckLevel, Codec

__all__ = [
    "Lineage",
    "NodeProcess",
    "OwnerRecord",
    "Progress",
    "RetiredObjects",
    "SealedState",
    "TopicRecord",
    "UploadSession",
    "WriterRecord",
    "decode_current",
    "decode_latest",
    "decode_node_process",
    "decode_owner",
    "decode_progress",
    "decode_retired",
    "decode_sealed",
    "decode_session",
    "decode_topic",
    "decode_writer",
    "encode_current",
    "encode_latest",
    "encode_node_process",
    "encode_owner",
    "encode_progress",
    "encode_retired",
    "encode_sealed",
    "encode_session",
    "encode_topic",
    "encode_writer",
]

_OPEN: Final = "open"
# What a field of another kind, or a missing one, raises. OverflowError: JSON knows infinity.
_MISFITS: Final = (ValueError, TypeError, KeyError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """From `epoch` on, `node` has written the topic, beginning with the offset `start`."""

    epoch: int
    start: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRecord:
    """A topic as all of its owners know it."""

    epoch: int
    """Rises with every opening for writing; a commit under a lower one is refused."""
    incarnation: str
    """Another one when a topic is deleted and made again."""
    ack: AckLevel
    codec: Codec
    created_at: int
    """Seconds since the Unix epoch."""
    expired_before: int = 0
    """Messages below this offset that no object holds were taken out of the bucket by retention:
    nobody owes them. Objects below it are there only while an expiry is under way, or after one
    that was interrupted, and are part of the topic until their descriptors are gone."""
    claim: str = ""
    """Another one for every claim: tells two owners apart whose epochs are the same, as they may be
    after an older copy of the metadata was restored."""
    state: str = _OPEN
    """`open`, `deleting`, or `deleted`: the name is free, and its epoch goes on from here."""
    lineage: tuple[Lineage, ...] = ()
    """Who wrote from where on; the last one is the owner, or was the last."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What others keep in the same record."""

    @property
    def node(self) -> str:
        """Who wrote the topic last; empty if nobody did."""
        return self.lineage[-1].node if self.lineage else ""

    @property
    def is_open(self) -> bool:
        """Whether the topic exists."""
        return self.state == _OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRecord:
    """Who has a topic open for writing now."""

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
class UploadSession:
    """The object under way: what a crash may leave in the bucket."""

    object_id: str
    start: int
    end: int
    epoch: int
    started_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedState:
    """A topic that was handed over: everything is in the bucket, and nobody writes."""

    next_offset: int
    node: str
    epoch: int
    sealed_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredObjects:
    """Objects that another one has taken the place of; readers may still be at them."""

    objects: tuple[str, ...]
    until: int
    """Seconds since the Unix epoch: from then on nobody needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A subscription's cursor: the first offset that it has not acknowledged."""

    offset: int
    timestamp: int
    """Milliseconds since the Unix epoch, when it last moved or was seen alive."""
    incarnation: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRecord:
    """The newest batch of a writer whose batches count once, such as a streaming query."""

    batch: int
    """Its number; the writer's numbers only rise."""
    is_done: bool
    """Whether all of its rows are in the topic; else some may be."""
    start: int
    """No row of it has a lower offset."""
    end: int
    """No row of it has this offset or a higher one; `start` while it is not done."""
    rows: int
    manifest: str
    """The object that lists the staged files it is made of."""
    epoch: int
    """Of the owner that wrote this."""
    incarnation: str
    updated_at: int
    """Seconds since the Unix epoch."""


def encode_topic(record: TopicRecord) -> bytes:
    """The record's JSON."""
    return _dump(
        {
            **record.more,
            "epoch": record.epoch,
            "incarnation": record.incarnation,
            "ack": record.ack,
            "codec": record.codec,
            "created_at": record.created_at,
            "expired_before": record.expired_before,
            "claim": record.claim,
            "state": record.state,
            "lineage": [
                {"epoch": item.epoch, "start": item.start, "node": item.node}
                for item in record.lineage
            ],
        }
    )


def decode_topic(data: bytes, *, key: str) -> TopicRecord:
    """Reads a topic's record.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        record = TopicRecord(
            epoch=int(fields.pop("epoch")),
            incarnation=str(fields.pop("incarnation")),
            ack=AckLevel(fields.pop("ack")),
            codec=Codec(fields.pop("codec")),
            created_at=int(fields.pop("created_at")),
            expired_before=int(fields.pop("expired_before", 0)),
            claim=str(fields.pop("claim", "")),
            state=str(fields.pop("state", _OPEN)),
            lineage=tuple(
                Lineage(epoch=int(i["epoch"]), start=int(i["start"]), node=str(i["node"]))
                for i in fields.pop("lineage", ())
            ),
        )
    except _MISFITS as error:
        raise _corrupt("topic record", error, key) from error
    return replace(record, more=fields)


def encode_owner(record: OwnerRecord) -> bytes:
    """The record's JSON."""
    return _dump({"node": record.node, "epoch": record.epoch})


def decode_owner(data: bytes, *, key: str) -> OwnerRecord:
    """Reads an owner's record.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        return OwnerRecord(node=str(fields["node"]), epoch=int(fields["epoch"]))
    except _MISFITS as error:
        raise _corrupt("owner record", error, key) from error


def encode_node_process(process: NodeProcess) -> bytes:
    """The record's JSON."""
    return _dump(asdict(process))


def decode_node_process(data: bytes, *, key: str) -> NodeProcess:
    """Decodes a `NodeProcess`.

    Raises:
        CorruptDataError: The record is invalid; names the key.
    """
    fields = _load(data, key)
    try:
        return NodeProcess(
            instance=str(fields["instance"]),
            directory=str(fields["directory"]),
            holder=str(fields["holder"]),
            since=int(fields["since"]),
            ttl_seconds=float(fields["ttl_seconds"]),
        )
    except _MISFITS as error:
        raise _corrupt("node record", error, key) from error


def encode_latest(instance: str) -> bytes:
    """Encodes the instance that had a node last."""
    return _dump({"instance": instance})


def decode_latest(data: bytes, *, key: str) -> str:
    """Decodes the instance that had a node last.

    Raises:
        CorruptDataError: The record is invalid; names the key.
    """
    fields = _load(data, key)
    try:
        return str(fields["instance"])
    except _MISFITS as error:
        raise _corrupt("node record", error, key) from error


def encode_current(start: int) -> bytes:
    """The pointer to the newest descriptor, by its start."""
    return _dump({"start": f"{start:020d}"})


def decode_current(data: bytes, *, key: str) -> int:
    """The start of the newest descriptor.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        return int(fields["start"])
    except _MISFITS as error:
        raise _corrupt("pointer", error, key) from error


def encode_session(session: UploadSession) -> bytes:
    """The session's JSON."""
    return _dump(
        {
            "object_id": session.object_id,
            "start_offset": session.start,
            "end_offset": session.end - 1,
            "epoch": session.epoch,
            "started_at": session.started_at,
        }
    )


def decode_session(data: bytes, *, key: str) -> UploadSession:
    """Reads an upload session.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        return UploadSession(
            object_id=str(fields["object_id"]),
            start=int(fields["start_offset"]),
            end=int(fields["end_offset"]) + 1,
            epoch=int(fields["epoch"]),
            started_at=int(fields["started_at"]),
        )
    except _MISFITS as error:
        raise _corrupt("upload session", error, key) from error


def encode_sealed(state: SealedState) -> bytes:
    """The sealed state's JSON: Danube's fields, and ours."""
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
    """Reads a sealed state; None if the record says that the topic is not sealed.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        if not fields["sealed"]:
            return None
        return SealedState(
            next_offset=int(fields.get("next_offset", int(fields["last_committed_offset"]) + 1)),
            node=str(fields["broker_id"]),
            epoch=int(fields.get("epoch", 0)),
            sealed_at=int(fields["timestamp"]),
        )
    except _MISFITS as error:
        raise _corrupt("sealed state", error, key) from error


def encode_retired(retired: RetiredObjects) -> bytes:
    """The record's JSON."""
    return _dump({"objects": retired.objects, "until": retired.until})


def decode_retired(data: bytes, *, key: str) -> RetiredObjects:
    """Reads which objects were retired.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        return RetiredObjects(
            objects=tuple(str(item) for item in fields["objects"]), until=int(fields["until"])
        )
    except _MISFITS as error:
        raise _corrupt("record of retired objects", error, key) from error


def encode_progress(progress: Progress) -> bytes:
    """The cursor's JSON."""
    return _dump(
        {
            **progress.more,
            "offset": progress.offset,
            "timestamp": progress.timestamp,
            "incarnation": progress.incarnation,
        }
    )


def decode_progress(data: bytes, *, key: str) -> Progress:
    """Reads a cursor.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        return Progress(
            offset=int(fields.pop("offset")),
            timestamp=int(fields.pop("timestamp")),
            incarnation=str(fields.pop("incarnation", "")),
            more=fields,
        )
    except _MISFITS as error:
        raise _corrupt("cursor", error, key) from error


def encode_writer(record: WriterRecord) -> bytes:
    """The record's JSON."""
    return _dump(
        {
            "batch": record.batch,
            "done": record.is_done,
            "start_offset": record.start,
            "next_offset": record.end,
            "rows": record.rows,
            "manifest": record.manifest,
            "epoch": record.epoch,
            "incarnation": record.incarnation,
            "updated_at": record.updated_at,
        }
    )


def decode_writer(data: bytes, *, key: str) -> WriterRecord:
    """Reads a writer's record.

    Raises:
        CorruptDataError: It is something else; names the key.
    """
    fields = _load(data, key)
    try:
        return WriterRecord(
            batch=int(fields["batch"]),
            is_done=bool(fields["done"]),
            start=int(fields["start_offset"]),
            end=int(fields["next_offset"]),
            rows=int(fields["rows"]),
            manifest=str(fields["manifest"]),
            epoch=int(fields["epoch"]),
            incarnation=str(fields["incarnation"]),
            updated_at=int(fields["updated_at"]),
        )
    except _MISFITS as error:
        raise _corrupt("writer's record", error, key) from error


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _load(data: bytes, key: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError("not JSON", path=key) from error
    if not isinstance(fields, dict):
        raise CorruptDataError("not a JSON object", path=key)
    return fields


def _corrupt(what: str, error: Exception, key: str) -> CorruptDataError:
    return CorruptDataError(f"not a {what}: {error!r}", path=key)
