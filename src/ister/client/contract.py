"""What a client and the owner of a topic say to each other by Arrow Flight, as values and as bytes.

    do_get     RangeTicket                  record batches, exactly the offsets asked for, in order
               FramesTicket                 the same messages as frames, whole ones, a chunk a row
    do_put     PutOpen, then batches        a PutAck per batch, in order: it is as safe as the
               with a PutBatch each         topic's level says; or, at the end, an error
    do_action  watermarks WatermarksRequest a TopicStatus per topic, in the order asked for
               topics                       TopicNames
               find_time FindTime           FoundTime
               append_staged AppendStaged   what has become of the batch
               plan_upload PlanUpload       UploadPlanned
               storage                      the settings of the stores, without secrets
    an error   FlightError                  its text is an error of `ister.errors` in JSON

Owns: the messages, their JSON, and what of a log's settings a client is told. Does not own: the
transport (`ister.client.flight`), and what a server does about a message.

Every message is a JSON object with `"version": 1`. A field that is new and may be passed over is
added to it; one that changes what is done makes a new version. Messages come from outside: whatever
the bytes are, the answer is a value or an error of `ister.errors`. Nothing here needs pyarrow until
a staged batch is decoded.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from ister import errors
from ister.config import CloudBackend, Config
from ister.errors import (
    DataGapError,
    DiskError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    OffsetOutOfRangeError,
    UnavailableError,
    UnsupportedVersionError,
)
from ister.format.manifest import StagedFile
from ister.limits import KIB, MIB
from ister.model import AckLevel, Codec, TopicName
from ister.tier.names import staging_prefix

if TYPE_CHECKING:
    from ister.topic.batches import AppendedBatch, StagedBatch

__all__ = [
    "FRAMES_COLUMN",
    "HOLES",
    "Action",
    "AppendStaged",
    "FindTime",
    "FoundTime",
    "FramesTicket",
    "PlanUpload",
    "PutAck",
    "PutBatch",
    "PutOpen",
    "RangeTicket",
    "TopicNames",
    "TopicStatus",
    "UploadPlanned",
    "WatermarksRequest",
    "carries_error",
    "decode_appended",
    "decode_error",
    "decode_settings",
    "encode_appended",
    "encode_error",
    "encode_settings",
    "parse_ticket",
]

HOLES: Final = b"ister.holes"
"""In the metadata of an answer's schema, where messages of the range were left out on purpose."""
FRAMES_COLUMN: Final = "frames"
"""The only column of an answer to a `FramesTicket`; binary, each row some whole frames."""

_VERSION: Final = 1
_NUMBER_MAX: Final = (1 << 63) - 1
# Reading JSON holds the interpreter lock, and messages come from anybody: so most are short, and
# those with lists of files or topics have a bound that takes some tenths of a second. Lists and
# objects cost the most.
_SHORT_BYTES_MAX: Final = 256 * KIB
_LONG_BYTES_MAX: Final = 8 * MIB
_ANSWER_BYTES_MAX: Final = 64 * MIB
_OBJECTS_MAX: Final = 200_000
# gRPC carries the text of an error in headers, more than once, and a peer may refuse headers of
# more than 8 KiB in all.
_ERROR_BYTES_MAX: Final = 2000
_MARK: Final = '{"code":'
_FRAMES: Final = "frames"
# A plan is asked for again from where it ends.
_PLANNED_MAX: Final = 10_000
_CUT: Final = "..."

_Choice = TypeVar("_Choice", bound=StrEnum)


class Action(StrEnum):
    """The calls that are not reads, as Flight action types."""

    WATERMARKS = "watermarks"
    TOPICS = "topics"
    FIND_TIME = "find_time"
    APPEND_STAGED = "append_staged"
    PLAN_UPLOAD = "plan_upload"
    STORAGE = "storage"


# -- messages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTicket:
    """Asks for the messages of a range.

    All of them have to be visible and synced, so that no crash takes back what was answered. The
    answer has exactly these offsets, in order; it ends early only by an error.
    """

    topic: str
    start: int
    end: int
    incarnation: str
    """Which topic of that name is meant; "" in a log that does not tell them apart."""
    columns: tuple[str, ...] | None = None
    """As for `ister.format.columnar.arrow_schema`."""

    def __post_init__(self) -> None:
        _check_range(self.topic, self.start, self.end)

    def to_json(self) -> bytes:
        """The message."""
        return _dump(
            topic=self.topic,
            start=self.start,
            end=self.end,
            incarnation=self.incarnation,
            columns=None if self.columns is None else list(self.columns),
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message.

        Raises:
            InvalidRequestError: It is something else.
            UnsupportedVersionError: A newer Ister sent it.
        """
        message = _Message.parse(data, "ticket")
        return cls(
            topic=message.text("topic"),
            start=message.number("start"),
            end=message.number("end"),
            incarnation=message.text("incarnation"),
            columns=None if message.is_null("columns") else message.texts("columns"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarksRequest:
    """Asks how far topics have come."""

    topics: tuple[str, ...]

    def __post_init__(self) -> None:
        for topic in self.topics:
            TopicName.parse(topic)

    def to_json(self) -> bytes:
        """The message."""
        return _dump(topics=list(self.topics))

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "request", bytes_max=_LONG_BYTES_MAX)
        return cls(topics=message.texts("topics"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """How far a topic has come, as its owner sees it, and what it is.

    The watermarks are those of `ister.Watermarks`.
    """

    topic: str
    incarnation: str
    """Another one when the topic was deleted and made again; "" in a log without a bucket."""
    earliest: int
    """The first offset that can be read, in whichever tier."""
    trimmed: int
    tiered: int
    synced: int
    written: int
    next: int
    codec: Codec
    ack: AckLevel

    def __post_init__(self) -> None:
        TopicName.parse(self.topic)

    def to_json(self) -> bytes:
        """The message."""
        return _dump(**{item.name: getattr(self, item.name) for item in fields(self)})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "status")
        return cls(
            topic=message.text("topic"),
            incarnation=message.text("incarnation"),
            earliest=message.number("earliest"),
            trimmed=message.number("trimmed"),
            tiered=message.number("tiered"),
            synced=message.number("synced"),
            written=message.number("written"),
            next=message.number("next"),
            codec=message.choice("codec", Codec),
            ack=message.choice("ack", AckLevel),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicNames:
    """The names of all topics."""

    topics: tuple[str, ...]

    def to_json(self) -> bytes:
        """The message."""
        return _dump(topics=list(self.topics))

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "list of topics", bytes_max=_ANSWER_BYTES_MAX)
        return cls(topics=message.texts("topics"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FindTime:
    """Asks for the first offset of a range whose message was published at or after a time."""

    topic: str
    publish_time_ms: int
    start: int
    end: int

    def __post_init__(self) -> None:
        _check_range(self.topic, self.start, self.end)

    def to_json(self) -> bytes:
        """The message."""
        return _dump(
            topic=self.topic,
            publish_time_ms=self.publish_time_ms,
            start=self.start,
            end=self.end,
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "request")
        return cls(
            topic=message.text("topic"),
            publish_time_ms=message.number("publish_time_ms", low=-_NUMBER_MAX),
            start=message.number("start"),
            end=message.number("end"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTime:
    """Where such a message is; None if there is none."""

    offset: int | None

    def to_json(self) -> bytes:
        """The message."""
        return _dump(offset=self.offset)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "answer")
        return cls(offset=None if message.is_null("offset") else message.number("offset"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendStaged:
    """Asks to append a staged batch to a topic, once however often it is asked for.

    `create`, `ack` and `codec` are for a topic that does not exist yet: one that does is taken as
    it is.
    """

    topic: str
    staged: StagedBatch
    create: bool = False
    ack: AckLevel | None = None
    codec: Codec | None = None

    def __post_init__(self) -> None:
        prefix = staging_prefix(TopicName.parse(self.topic))
        for file in self.staged.files:
            parts = file.key.removeprefix(prefix).split("/")
            # Staged files are removed in the end: nobody may have any other object removed.
            if not file.key.startswith(prefix) or {"", ".", ".."} & set(parts):
                raise InvalidRequestError(
                    "a staged file is not where rows for this topic are staged",
                    topic=self.topic,
                    path=file.key,
                    hint=f"its key has to begin with {prefix}",
                )

    def to_json(self) -> bytes:
        """The message."""
        staged = self.staged
        return _dump(
            topic=self.topic,
            writer=staged.writer,
            batch=staged.batch,
            repeatable=staged.is_repeatable,
            files=[
                {"key": file.key, "rows": file.rows, "size": file.size_bytes}
                for file in staged.files
            ],
            create=self.create,
            ack=self.ack,
            codec=self.codec,
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        from ister.topic.batches import StagedBatch  # noqa: PLC0415 - needs pyarrow, an extra

        message = _Message.parse(data, "request", bytes_max=_LONG_BYTES_MAX)
        return cls(
            topic=message.text("topic"),
            staged=StagedBatch(
                writer=message.text("writer"),
                batch=message.number("batch"),
                is_repeatable=message.flag("repeatable"),
                files=tuple(
                    StagedFile(
                        key=file.text("key"),
                        rows=file.number("rows"),
                        size_bytes=file.number("size"),
                    )
                    for file in message.messages("files")
                ),
            ),
            create=message.flag("create"),
            ack=None if message.is_null("ack") else message.choice("ack", AckLevel),
            codec=None if message.is_null("codec") else message.choice("codec", Codec),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesTicket:
    """Asks for the messages of a range as they are stored, for an object to be made of them.

    All of them have to be in the owner's local files and synced. The schema of the answer says, as
    metadata, which `codec` the bodies have.
    """

    topic: str
    start: int
    end: int
    incarnation: str
    """Which topic of that name is meant."""
    epoch: int
    """Whose frames are meant: only the owner of that epoch answers."""

    def __post_init__(self) -> None:
        _check_range(self.topic, self.start, self.end)

    def to_json(self) -> bytes:
        """The message."""
        return _dump(
            kind=_FRAMES,
            topic=self.topic,
            start=self.start,
            end=self.end,
            incarnation=self.incarnation,
            epoch=self.epoch,
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "ticket")
        if message.text("kind") != _FRAMES:
            raise InvalidRequestError("not a ticket for frames")
        return cls(
            topic=message.text("topic"),
            start=message.number("start"),
            end=message.number("end"),
            incarnation=message.text("incarnation"),
            epoch=message.number("epoch"),
        )


def parse_ticket(data: bytes) -> RangeTicket | FramesTicket:
    """Reads a ticket of either kind; raises as `RangeTicket.from_json`."""
    if _Message.parse(data, "ticket").has("kind"):
        return FramesTicket.from_json(data)
    return RangeTicket.from_json(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUpload:
    """Asks which objects an upload of a topic would make now."""

    topic: str
    incarnation: str
    """Which topic of that name is meant."""
    epoch: int
    """Whose files are meant: only the owner of that epoch answers."""
    start: int | None
    """Where the newest object ends; None if there is none."""
    bytes_max: int
    """The size of an object."""
    span_ms_max: int
    """The time between its first message and its last one."""
    objects_max: int
    """How many are wanted at most."""

    def __post_init__(self) -> None:
        TopicName.parse(self.topic)
        if not 0 < self.objects_max <= _PLANNED_MAX or self.bytes_max < 1:
            raise InvalidRequestError(
                f"a plan for {self.objects_max} objects of {self.bytes_max} bytes",
                topic=self.topic,
                hint=f"1 to {_PLANNED_MAX} objects",
            )

    def to_json(self) -> bytes:
        """The message."""
        return _dump(**{item.name: getattr(self, item.name) for item in fields(self)})

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "request")
        return cls(
            topic=message.text("topic"),
            incarnation=message.text("incarnation"),
            epoch=message.number("epoch"),
            start=None if message.is_null("start") else message.number("start"),
            bytes_max=message.number("bytes_max"),
            span_ms_max=message.number("span_ms_max"),
            objects_max=message.number("objects_max"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlanned:
    """The objects that an upload would make, one after the other from `start` on."""

    start: int
    synced: int
    """Nothing at or after this offset is uploaded."""
    codec: Codec
    objects: tuple[tuple[int, int], ...]
    """Of each: the offset after its last one, and about how many bytes it has."""
    error: str | None = None
    """Damage right behind the last of them, as `encode_error` has it."""

    def to_json(self) -> bytes:
        """The message."""
        return _dump(
            start=self.start,
            synced=self.synced,
            codec=self.codec,
            objects=[{"end": end, "size": size} for end, size in self.objects],
            error=self.error,
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "plan", bytes_max=_ANSWER_BYTES_MAX)
        return cls(
            start=message.number("start"),
            synced=message.number("synced"),
            codec=message.choice("codec", Codec),
            objects=tuple(
                (item.number("end"), item.number("size")) for item in message.messages("objects")
            ),
            error=None if message.is_null("error") else message.text("error"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOpen:
    """Opens a stream of rows for a topic: the command of its descriptor.

    Each batch has the columns of `ister.Topic.append_arrow`, the same ones in all batches, and one
    message per row. With a producer, rows that come again under their sequences are answered with
    their first offsets, and are in the topic once. `create` and `ack` are for a topic that does
    not exist yet: one that does is taken as it is.
    """

    topic: str
    producer: str | None
    """Its name; None for rows that are not numbered, and may come twice when they are retried."""
    epoch: int = 0
    """Which producer of that name: a higher one replaces it."""
    create: bool = False
    ack: AckLevel | None = None

    def __post_init__(self) -> None:
        TopicName.parse(self.topic)

    def to_json(self) -> bytes:
        """The message."""
        return _dump(
            topic=self.topic,
            producer=self.producer,
            epoch=self.epoch,
            create=self.create,
            ack=self.ack,
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "request")
        return cls(
            topic=message.text("topic"),
            producer=None if message.is_null("producer") else message.text("producer"),
            epoch=message.number("epoch"),
            create=message.flag("create"),
            ack=None if message.is_null("ack") else message.choice("ack", AckLevel),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBatch:
    """Goes with a batch of rows, as its application metadata."""

    sequence: int
    """The first row's; one more for each row after it. Rows without a producer are numbered all
    the same, for the answer to name them."""

    def to_json(self) -> bytes:
        """The message."""
        return _dump(sequence=self.sequence)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        return cls(sequence=_Message.parse(data, "batch").number("sequence"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAck:
    """The rows of a batch are in the topic, and have reached its level."""

    sequence: int
    """As it came with the batch."""
    start: int
    """The first row's offset."""
    end: int
    """The offset after the last row's. Messages of others may lie between the rows of a batch of
    which `known` ones had come before."""
    known: int
    """How many of the rows, the first ones, were in the topic already."""

    def to_json(self) -> bytes:
        """The message."""
        return _dump(sequence=self.sequence, start=self.start, end=self.end, known=self.known)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the message; raises as `RangeTicket.from_json`."""
        message = _Message.parse(data, "answer")
        return cls(
            sequence=message.number("sequence"),
            start=message.number("start"),
            end=message.number("end"),
            known=message.number("known"),
        )


def encode_appended(appended: AppendedBatch) -> bytes:
    """The answer to `AppendStaged`."""
    return _dump(
        start=appended.start, end=appended.end, rows=appended.rows, known=appended.is_known
    )


def decode_appended(data: bytes) -> AppendedBatch:
    """Reads the answer; raises as `RangeTicket.from_json`."""
    from ister.topic.batches import AppendedBatch  # noqa: PLC0415 - needs pyarrow, an extra

    message = _Message.parse(data, "answer")
    return AppendedBatch(
        start=message.number("start"),
        end=message.number("end"),
        rows=message.number("rows"),
        is_known=message.flag("known"),
    )


def _check_range(topic: str, start: int, end: int) -> None:
    TopicName.parse(topic)
    if not 0 <= start <= end <= _NUMBER_MAX:
        raise InvalidRequestError(f"no range: {start} up to {end}", topic=topic)


def _dump(**message: Any) -> bytes:  # noqa: ANN401 - whatever JSON has
    return json.dumps({"version": _VERSION, **message}, separators=(",", ":")).encode()


class _Message:
    """A JSON object from outside; its fields are checked when they are taken."""

    def __init__(self, what: str, content: Mapping[str, object]) -> None:
        self._what = what
        self._content = content

    @classmethod
    def parse(cls, data: bytes, what: str, *, bytes_max: int = _SHORT_BYTES_MAX) -> _Message:
        if len(data) > bytes_max:
            raise InvalidRequestError(
                f"a {what} of {len(data)} bytes", hint=f"at most {bytes_max} bytes"
            )
        if data.count(b"[") + data.count(b"{") > _OBJECTS_MAX:
            raise InvalidRequestError(f"a {what} of more than {_OBJECTS_MAX} lists and objects")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"not a {what}: no JSON") from error
        if not isinstance(content, dict):
            raise InvalidRequestError(f"not a {what}: no JSON object")
        message = cls(what, content)
        version = message.number("version")
        if version != _VERSION:
            raise UnsupportedVersionError(
                f"a {what} of version {version}", hint=f"this Ister speaks version {_VERSION}"
            )
        return message

    def has(self, name: str) -> bool:
        return name in self._content

    def is_null(self, name: str) -> bool:
        if name not in self._content:
            raise self._refuse(name, "there")
        return self._content[name] is None

    def text(self, name: str) -> str:
        return self._as_text(name, self._content.get(name))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._as_text(name, item) for item in self._items(name))

    def messages(self, name: str) -> list[_Message]:
        found: list[_Message] = []
        for item in self._items(name):
            if not isinstance(item, dict):
                raise self._refuse(name, "a list of objects")
            found.append(_Message(self._what, item))
        return found

    def tree(self, name: str) -> dict[str, Any]:
        value = self._content.get(name)
        if not isinstance(value, dict):
            raise self._refuse(name, "an object")
        return value

    def number(self, name: str, *, low: int = 0) -> int:
        value = self._content.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refuse(name, "a whole number")
        if not low <= value <= _NUMBER_MAX:
            raise self._refuse(name, f"between {low} and {_NUMBER_MAX}")
        return value

    def flag(self, name: str) -> bool:
        value = self._content.get(name)
        if not isinstance(value, bool):
            raise self._refuse(name, "true or false")
        return value

    def choice(self, name: str, kind: type[_Choice]) -> _Choice:
        try:
            return kind(self.text(name))
        except ValueError as error:
            raise self._refuse(name, f"one of {', '.join(kind)}") from error

    def _items(self, name: str) -> Sequence[object]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise self._refuse(name, "a list")
        return value

    def _as_text(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._refuse(name, "a text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            # Half a character: JSON can say it, and nothing could be done with it.
            raise self._refuse(name, "a text in Unicode") from error
        return value

    def _refuse(self, name: str, wanted: str) -> InvalidRequestError:
        return InvalidRequestError(f"not a {self._what}: {name!r} has to be {wanted}")


# -- errors ---------------------------------------------------------------------------------

_KINDS: Final[dict[str, type[IsterError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, IsterError)
}
_FIELDS: Final = {"topic": str, "offset": int, "path": str, "position": int, "hint": str}
_MORE_FIELDS: Final[dict[type[IsterError], tuple[str, ...]]] = {
    OffsetOutOfRangeError: ("earliest", "next"),
    DataGapError: ("start", "end"),
    DiskError: ("errno",),
}


def encode_error(error: BaseException) -> str:
    """An error as the text of a Flight error.

    What is no error of `ister.errors` is a mistake in the server, and becomes an InvariantError.
    Long texts are cut: gRPC takes short ones only.
    """
    if not isinstance(error, IsterError):
        error = InvariantError(f"the server failed: {type(error).__name__}: {error}")
    kind = _kind_of(error)
    content: dict[str, object] = {"code": kind.__name__, "message": error.message}
    for name in (*_FIELDS, *_MORE_FIELDS.get(kind, ())):
        value = getattr(error, name)
        if value is not None:
            content[name] = value
    for name in ("message", "hint", "path", "topic"):
        excess = len(_dump_error(content)) - _ERROR_BYTES_MAX
        if excess > 0 and name in content:
            content[name] = _shortened(str(content[name]), excess)
    return _dump_error(content)


def _shortened(text: str, excess: int) -> str:
    """The beginning of a text that takes so many characters less in JSON, or as many as it has."""
    wanted = len(_dump_error(text)) - excess - len(_CUT)
    # A character takes one to twelve of them.
    lengths = range(min(len(text), _ERROR_BYTES_MAX) + 1)
    fitting = bisect_right(lengths, wanted, key=lambda length: len(_dump_error(text[:length])))
    return text[: max(0, fitting - 1)] + _CUT


def _dump_error(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def carries_error(text: str) -> bool:
    """Whether the text of a Flight error has an error of ours in it."""
    return _MARK in text


def decode_error(text: str) -> IsterError:
    """The error that a Flight error's text carries.

    Whatever the text is, an error comes back: an UnavailableError with the text, if it carries none
    or one that this Ister does not know.
    """
    try:
        content, _ = json.JSONDecoder().raw_decode(text, text.index(_MARK))
    except (ValueError, RecursionError):
        return UnavailableError(f"the server failed: {text.partition(chr(10))[0]}")
    message, code = content.get("message"), content.get("code")
    if not isinstance(message, str):
        message = "the server failed"
    known = {
        name: content[name] for name, kind in _FIELDS.items() if type(content.get(name)) is kind
    }
    found = _KINDS.get(code) if isinstance(code, str) else None
    more = {name: content.get(name) for name in _MORE_FIELDS.get(found, ())} if found else {}
    is_whole = found is DiskError or all(type(value) is int for value in more.values())
    if found is None or not is_whole:
        return UnavailableError(f"{message} [{code}]", **known)
    # Some of them compose their hint themselves; what arrives is what was said.
    error = found.__new__(found)
    IsterError.__init__(error, message, **known)
    for name, value in more.items():
        setattr(error, name, value if type(value) is int else None)
    return error


def _kind_of(error: IsterError) -> type[IsterError]:
    """The class that the other side knows: that of the error, or the nearest one above it."""
    return next(kind for kind in type(error).__mro__ if kind in _KINDS.values())


# -- settings -------------------------------------------------------------------------------

_SETTINGS_DEPTH_MAX: Final = 8
# Options that say where and what the bucket is. How the server comes by its rights is its own
# business: credentials, roles, profiles and files with them stay there, and so does whatever a
# later version of a backend may invent.
_SHARED_OPTIONS: Final = frozenset(
    {
        "account_name",
        "allow_anonymous",
        "batch_max_operations",
        "checksum_algorithm",
        "default_acl",
        "default_storage_class",
        "delete_max_size",
        "disable_list_objects_v2",
        "disable_stat_with_override",
        "disable_write_with_if_match",
        "enable_request_payer",
        "enable_versioning",
        "enable_virtual_host_style",
        "endpoint",
        "predefined_acl",
        "region",
        "server_side_encryption",
        "skip_signature",
        "virtual_host_style",
    }
)


def encode_settings(config: Config) -> bytes:
    """The settings of a log that its clients may know: no credentials, paths made absolute.

    They are about its stores; what else the server does, and for whom, is its own business.
    Settings that have their default are left out, so that older clients understand the rest.
    """
    storage = _changed(config.storage)
    for section, name in (("wal", "dir"), ("metadata", "path")):
        if name in storage.get(section, {}):
            storage[section][name] = os.path.abspath(storage[section][name])
    cloud = storage.get("cloud", {})
    if "root" in cloud and config.storage.cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL):
        cloud["root"] = os.path.abspath(cloud["root"])
    if "options" in cloud:
        cloud["options"] = {
            name: value
            for name, value in cloud["options"].items()
            if name in _SHARED_OPTIONS and _is_plain_address(value)
        }
    metadata = storage.get("metadata", {})
    if "endpoints" in metadata:
        # Certificate paths are local to the broker, so clients are not sent them.
        scheme = "https://" if metadata.pop("tls", None) else ""
        metadata["endpoints"] = [
            item if "://" in item else f"{scheme}{item}"
            for item in metadata["endpoints"]
            if _is_plain_address(item)
        ]
    return _dump(settings={"storage": storage})


def decode_settings(data: bytes) -> dict[str, Any]:
    """The settings as a tree for `ister.load_config`; raises as `RangeTicket.from_json`.

    What is missing, credentials above all, comes from the client's own environment. A value that
    would have the client's environment filled in is refused: it would be sent to whatever address
    the server has named.
    """
    message = _Message.parse(data, "tree of settings")
    tree = message.tree("settings")
    _refuse_references(tree)
    return tree


def _changed(settings: Any) -> dict[str, Any]:  # noqa: ANN401 - one of the dataclasses of config
    """What differs from the defaults, without what is marked as secret.

    Options are left as they are: some of them are secret, and the caller knows which are not.
    """
    default = type(settings)()
    tree: dict[str, Any] = {}
    for item in fields(settings):
        value = getattr(settings, item.name)
        is_hidden = item.metadata.get("is_secret") and not isinstance(value, Mapping)
        if is_hidden or value == getattr(default, item.name):
            continue
        if is_dataclass(value):
            value = _changed(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        tree[item.name] = value
    return tree


def _is_plain_address(value: str) -> bool:
    """Whether there is no room for credentials in it: nobody can tell which part they are."""
    return not {"@", "?", "#"} & set(value)


def _refuse_references(value: object, depth: int = 0) -> None:
    if depth > _SETTINGS_DEPTH_MAX:
        raise InvalidRequestError("not a tree of settings: it is too deep")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_references(name, depth + 1)
            _refuse_references(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _refuse_references(item, depth + 1)
    elif isinstance(value, str) and "${" in value:
        raise InvalidRequestError("not a tree of settings: it refers to the client's environment")
