"""Messages between a client and the owner of a topic over Arrow Flight.

    do_get     RangeTicket                  record batches with exactly the requested offsets
               FramesTicket                 the same messages as stored frames, a chunk per row
    do_put     PutOpen, then batches        a PutAck per batch, in order, once the rows have
               with a PutBatch each         reached the topic's level; or an error at the end
    do_action  watermarks WatermarksRequest a TopicStatus per topic, in the requested order
               topics                       TopicNames
               find_time FindTime           FoundTime
               append_staged AppendStaged   the result of the batch
               plan_upload PlanUpload       UploadPlanned
               storage                      the storage settings, without secrets
    an error   FlightError                  its text is an error of `ister.errors` in JSON

Owns: the messages and their JSON. Does not own: errors (`ister.wire.errors`), the settings that a
client may see (`ister.wire.settings`), the transport (`ister.client.flight`).

Every message is a JSON object with `"version": 1`. Optional fields may be added to a version; a
field that changes what is done needs a new version. Messages come from outside: any bytes give a
value or an error of `ister.errors`. pyarrow is only needed to decode a staged batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self, TypeVar

import msgspec

from ister.base.limits import KIB, MIB
from ister.base.model import AckLevel, Codec, TopicName
from ister.base.structs import known
from ister.bucket.names import shared_staging_prefix, staging_prefix
from ister.errors import InvalidRequestError, IsterError, UnsupportedVersionError
from ister.format.manifest import StagedFile

if TYPE_CHECKING:
    from ister.topic.batches import AppendedBatch, StagedBatch

HOLES: Final = b"ister.holes"
"""Schema metadata key of a response that leaves out messages of the range on purpose."""
FRAMES_COLUMN: Final = "frames"
"""The only column of a response to a `FramesTicket`; binary, each row has whole frames."""

_VERSION: Final = 1
_NUMBER_MAX: Final = (1 << 63) - 1
# Parsing JSON holds the interpreter lock, and any client can send a message. So most messages are
# short, and those with lists of files or topics are parsed within some tenths of a second. Lists
# and objects cost the most.
_SHORT_BYTES_MAX: Final = 256 * KIB
_LONG_BYTES_MAX: Final = 8 * MIB
_RESPONSE_BYTES_MAX: Final = 64 * MIB
_OBJECTS_MAX: Final = 200_000
# The client requests the rest of a longer plan with another request.
_PLANNED_MAX: Final = 10_000

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_Number = Annotated[int, msgspec.Meta(ge=0, le=_NUMBER_MAX)]
_Signed = Annotated[int, msgspec.Meta(ge=-_NUMBER_MAX, le=_NUMBER_MAX)]
_Value = TypeVar("_Value")


class Action(StrEnum):
    """Flight action types."""

    WATERMARKS = "watermarks"
    TOPICS = "topics"
    FIND_TIME = "find_time"
    APPEND_STAGED = "append_staged"
    PLAN_UPLOAD = "plan_upload"
    STORAGE = "storage"


# -- JSON -----------------------------------------------------------------------------------


def dump(message: dict[str, object]) -> bytes:
    """Encodes a message as JSON with its version."""
    return _encode({"version": _VERSION, **message}).encode()


def parse(data: bytes, what: str, *, bytes_max: int = _SHORT_BYTES_MAX) -> dict[str, object]:
    """Decodes a message of this version; its fields are not checked.

    Raises:
        InvalidRequestError: The bytes are not a JSON object, or too many.
        UnsupportedVersionError: A newer Ister sent the message.
    """
    if len(data) > bytes_max:
        raise InvalidRequestError(
            f"{what} too large: {len(data)} bytes", hint=f"at most {bytes_max} bytes"
        )
    if data.count(b"[") + data.count(b"{") > _OBJECTS_MAX:
        raise InvalidRequestError(f"{what} has more than {_OBJECTS_MAX} lists and objects")
    try:
        content = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"invalid {what}: not JSON") from error
    if not isinstance(content, dict):
        raise InvalidRequestError(f"invalid {what}: not a JSON object")
    version = _convert(content.pop("version", None), int, what)
    if version != _VERSION:
        raise UnsupportedVersionError(
            f"{what} of version {version}", hint=f"this Ister supports version {_VERSION}"
        )
    return content


def _convert(content: object, kind: type[_Value], what: str) -> _Value:
    try:
        return msgspec.convert(content, known(kind))
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, IsterError):  # of a check in __post_init__
            raise error.__cause__ from None
        raise InvalidRequestError(f"invalid {what}: {error}") from error


class _Message:
    """A message whose JSON has the names and the order of its fields."""

    __slots__ = ()
    _what: ClassVar[str] = "request"
    _bytes_max: ClassVar[int] = _SHORT_BYTES_MAX

    def to_json(self) -> bytes:
        """Encodes the message."""
        return dump(msgspec.to_builtins(self))

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Decodes the message.

        Raises:
            InvalidRequestError: The bytes are not such a message.
            UnsupportedVersionError: A newer Ister sent the message.
        """
        return cls._of(parse(data, cls._what, bytes_max=cls._bytes_max))

    @classmethod
    def _of(cls, content: dict[str, object]) -> Self:
        # Defaults are for programs; on the wire every field is there that has always existed.
        for item in fields(cls):  # type: ignore[arg-type]  # each subclass is a dataclass
            if item.name not in content and item.default is not msgspec.UNSET:
                raise InvalidRequestError(f"invalid {cls._what}: no {item.name!r}")
        return _convert(content, cls, cls._what)


def _check_range(topic: str, start: int, end: int) -> None:
    TopicName.parse(topic)
    if not 0 <= start <= end <= _NUMBER_MAX:
        raise InvalidRequestError(f"invalid range: {start} to {end}", topic=topic)


# -- reading --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTicket(_Message):
    """Requests the messages of a range.

    All of them must be visible and synced, so that no crash takes back what was sent. The response
    has exactly these offsets, in order; it ends early only with an error.
    """

    _what: ClassVar[str] = "ticket"

    topic: str
    start: _Number
    end: _Number
    incarnation: str
    """Identifies the topic among those of the same name; "" in a log without a bucket."""
    columns: tuple[str, ...] | None = None
    """As for `ister.format.arrow.schema.arrow_schema`."""

    def __post_init__(self) -> None:
        _check_range(self.topic, self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesTicket(_Message):
    """Requests the messages of a range as they are stored, to make an object of them.

    All of them must be in the owner's local files and synced. The schema metadata of the response
    has the `codec` of the bodies.
    """

    _what: ClassVar[str] = "ticket"

    kind: Literal["frames"] = "frames"
    topic: str
    start: _Number
    end: _Number
    incarnation: str
    """Identifies the topic among those of the same name."""
    epoch: _Number
    """Only the owner of this epoch responds."""

    def __post_init__(self) -> None:
        _check_range(self.topic, self.start, self.end)


def parse_ticket(data: bytes) -> RangeTicket | FramesTicket:
    """Decodes a ticket of either kind; raises as `RangeTicket.from_json`."""
    content = parse(data, "ticket")
    return (FramesTicket if "kind" in content else RangeTicket)._of(content)  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarksRequest(_Message):
    """Requests the watermarks of topics."""

    _bytes_max: ClassVar[int] = _LONG_BYTES_MAX

    topics: tuple[str, ...]

    def __post_init__(self) -> None:
        for topic in self.topics:
            TopicName.parse(topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus(_Message):
    """The watermarks of a topic, as in `ister.Watermarks`, and its settings."""

    _what: ClassVar[str] = "status"

    topic: str
    incarnation: str
    """Changes when the topic is deleted and created again; "" in a log without a bucket."""
    earliest: _Number
    """The first offset that can be read, from either tier."""
    trimmed: _Number
    tiered: _Number
    synced: _Number
    written: _Number
    next: _Number
    codec: Codec
    ack: AckLevel

    def __post_init__(self) -> None:
        TopicName.parse(self.topic)

    @property
    def readable(self) -> int:
        """The end of what may be read: no crash takes back what is before it."""
        return self.tiered if self.ack is AckLevel.TIERED else self.synced


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicNames(_Message):
    """The names of all topics."""

    _what: ClassVar[str] = "list of topics"
    _bytes_max: ClassVar[int] = _RESPONSE_BYTES_MAX

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindTime(_Message):
    """Requests the first offset of a range whose message was published at or after a time."""

    topic: str
    publish_time_ms: _Signed
    start: _Number
    end: _Number

    def __post_init__(self) -> None:
        _check_range(self.topic, self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTime(_Message):
    """The offset that `FindTime` requests; None if there is no such message."""

    _what: ClassVar[str] = "response"

    offset: _Number | None


# -- uploads --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUpload(_Message):
    """Requests the objects that an upload of a topic would make now."""

    topic: str
    incarnation: str
    """Identifies the topic among those of the same name."""
    epoch: _Number
    """Only the owner of this epoch responds."""
    start: _Number | None
    """The end of the newest object; None if there is none."""
    bytes_max: _Number
    """The size limit of an object."""
    span_ms_max: _Number
    """The limit of the time between an object's first and last message."""
    objects_max: _Number
    """The limit of the number of objects in the response."""

    def __post_init__(self) -> None:
        TopicName.parse(self.topic)
        if not 0 < self.objects_max <= _PLANNED_MAX or self.bytes_max < 1:
            raise InvalidRequestError(
                f"invalid plan: {self.objects_max} objects of {self.bytes_max} bytes",
                topic=self.topic,
                hint=f"1 to {_PLANNED_MAX} objects",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObjectEnd:
    end: _Number
    size: _Number


@dataclass(frozen=True, slots=True, kw_only=True)
class _UploadPlanned(_Message):
    """The JSON of `UploadPlanned`."""

    _what: ClassVar[str] = "plan"
    _bytes_max: ClassVar[int] = _RESPONSE_BYTES_MAX

    start: _Number
    synced: _Number
    codec: Codec
    objects: tuple[_ObjectEnd, ...]
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlanned:
    """The objects that an upload would make, one after the other from `start` on."""

    start: int
    synced: int
    """Nothing at or after this offset is uploaded."""
    codec: Codec
    objects: tuple[tuple[int, int], ...]
    """The offset after the last one of each, and about how many bytes it has."""
    error: str | None = None
    """Damage right behind the last object, as `ister.wire.errors.encode_error` writes it."""

    def to_json(self) -> bytes:
        """Encodes the message."""
        ends = tuple(_ObjectEnd(end=end, size=size) for end, size in self.objects)
        return _UploadPlanned(
            start=self.start, synced=self.synced, codec=self.codec, objects=ends, error=self.error
        ).to_json()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Decodes the message; raises as `RangeTicket.from_json`."""
        found = _UploadPlanned.from_json(data)
        return cls(
            start=found.start,
            synced=found.synced,
            codec=found.codec,
            objects=tuple((item.end, item.size) for item in found.objects),
            error=found.error,
        )


# -- publishing -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOpen(_Message):
    """Opens a stream of rows for a topic: the command of its descriptor.

    Each batch has the columns of `ister.Topic.append_arrow`, the same ones in all batches, and one
    message per row. With a producer, rows that are sent again with their sequences are answered
    with their first offsets, and are stored once. `create` and `ack` apply to a topic that does
    not exist yet.
    """

    topic: str
    producer: str | None
    """Producer name; None for rows without sequences, which a retry may store twice."""
    epoch: _Number = 0
    """The producer epoch; a higher one fences lower ones."""
    create: bool = False
    ack: AckLevel | None = None

    def __post_init__(self) -> None:
        TopicName.parse(self.topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBatch(_Message):
    """The application metadata of a batch of rows."""

    _what: ClassVar[str] = "batch"

    sequence: _Number
    """The sequence of the first row; each row after it has the next one. Rows without a producer
    have sequences too, which the answer repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAck(_Message):
    """Acknowledges a batch: its rows are in the topic and have reached its level."""

    _what: ClassVar[str] = "response"

    sequence: _Number
    """The sequence of the batch."""
    start: _Number
    """The offset of the first row."""
    end: _Number
    """The offset after the last row. If `known` is not 0, messages of other producers may lie
    between the rows of the batch."""
    known: _Number
    """How many rows, from the first on, were in the topic already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedFile:
    key: str
    rows: _Number
    size: _Number
    position: _Number | msgspec.UnsetType = msgspec.UNSET
    """Older clients stage a file for each topic, and send none."""
    digest: _Number | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class _AppendStaged(_Message):
    """The JSON of `AppendStaged`."""

    _bytes_max: ClassVar[int] = _LONG_BYTES_MAX

    topic: str
    writer: str
    batch: _Number
    repeatable: bool
    files: tuple[_StagedFile, ...]
    create: bool
    ack: AckLevel | None
    codec: Codec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendStaged:
    """Requests to append a staged batch to a topic, once however often it is requested.

    `create`, `ack` and `codec` apply to a topic that does not exist yet.
    """

    topic: str
    staged: StagedBatch
    create: bool = False
    ack: AckLevel | None = None
    codec: Codec | None = None

    def __post_init__(self) -> None:
        own = staging_prefix(TopicName.parse(self.topic))
        shared = shared_staging_prefix(self.staged.writer)
        for file in self.staged.files:
            prefix = own if file.position is None else shared
            parts = file.key.removeprefix(prefix).split("/")
            # Staged files are removed in the end: a request must not name any other object.
            if not file.key.startswith(prefix) or {"", ".", ".."} & set(parts):
                raise InvalidRequestError(
                    "staged file outside of the staging directory",
                    topic=self.topic,
                    path=file.key,
                    hint=f"its key must start with {prefix}",
                )

    def to_json(self) -> bytes:
        """Encodes the message."""
        staged = self.staged
        return _AppendStaged(
            topic=self.topic,
            writer=staged.writer,
            batch=staged.batch,
            repeatable=staged.is_repeatable,
            files=tuple(
                _StagedFile(
                    key=file.key,
                    rows=file.rows,
                    size=file.size_bytes,
                    position=msgspec.UNSET if file.position is None else file.position,
                    digest=msgspec.UNSET if file.digest is None else file.digest,
                )
                for file in staged.files
            ),
            create=self.create,
            ack=self.ack,
            codec=self.codec,
        ).to_json()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Decodes the message; raises as `RangeTicket.from_json`."""
        from ister.topic.batches import StagedBatch  # noqa: PLC0415 - needs pyarrow, an extra

        found = _AppendStaged.from_json(data)
        files = (
            StagedFile(
                key=file.key,
                rows=file.rows,
                size_bytes=file.size,
                position=None if isinstance(file.position, msgspec.UnsetType) else file.position,
                digest=None if isinstance(file.digest, msgspec.UnsetType) else file.digest,
            )
            for file in found.files
        )
        return cls(
            topic=found.topic,
            staged=StagedBatch(
                writer=found.writer,
                batch=found.batch,
                is_repeatable=found.repeatable,
                files=tuple(files),
            ),
            create=found.create,
            ack=found.ack,
            codec=found.codec,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Appended(_Message):
    """The JSON of the response to `AppendStaged`."""

    _what: ClassVar[str] = "response"

    start: _Number
    end: _Number
    rows: _Number
    known: bool
    other: bool | msgspec.UnsetType = msgspec.UNSET
    """Older brokers send none."""


def encode_appended(appended: AppendedBatch) -> bytes:
    """Encodes the response to `AppendStaged`."""
    return _Appended(
        start=appended.start,
        end=appended.end,
        rows=appended.rows,
        known=appended.is_known,
        other=appended.is_other or msgspec.UNSET,
    ).to_json()


def decode_appended(data: bytes) -> AppendedBatch:
    """Decodes the response to `AppendStaged`; raises as `RangeTicket.from_json`."""
    from ister.topic.batches import AppendedBatch  # noqa: PLC0415 - needs pyarrow, an extra

    found = _Appended.from_json(data)
    return AppendedBatch(
        start=found.start,
        end=found.end,
        rows=found.rows,
        is_known=found.known,
        is_other=found.other is True,
    )
