"""The nouns: topic names, ack levels, watermarks, start positions, and Danube's message record.

Values only; nothing here does I/O or knows an encoding.

    trimmed ≤ tiered ≤ synced ≤ written ≤ next

An `offset` numbers a message in its topic, a `position` is a byte in a file, and every range is
half open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, StrEnum
from typing import Final, Literal, Self, TypeAlias

from ister.base.limits import NAME_PART_CHARACTERS_MAX
from ister.errors import TopicNameError, check

_NAME_PART = re.compile(r"[A-Za-z0-9_-]+")
# `cur` is the name of the pointer key that stands beside the descriptors of a topic.
_RESERVED_PARTS = frozenset({"cur"})

JsonObject: TypeAlias = dict[str, object]
"""A JSON object whose fields the code that holds it does not read, or checks as it does."""

Start: TypeAlias = int | datetime | Literal["earliest", "latest"]
"""Where a reader begins: an offset, a point in time, or one of the two ends."""


COLUMNS: Final = (
    "topic",
    "offset",
    "publish_time",
    "producer_name",
    "payload",
    "attributes",
    "routing_key",
    "schema_id",
    "schema_version",
)
"""The columns of a table of messages, in this order."""


class AckLevel(StrEnum):
    """What an acknowledged message survives. Each level includes the ones before it."""

    MEMORY = "memory"
    """Offset assigned, in cache, queued. Survives nothing, but order is kept."""
    WRITTEN = "written"
    """write(2) returned. Survives kill -9 of the process."""
    SYNCED = "synced"
    """fdatasync returned. Survives power loss."""
    TIERED = "tiered"
    """The descriptor is committed. Survives loss of the disk."""


class Codec(StrEnum):
    """How message bodies are encoded; see `ister.format.message`."""

    BINCODE1 = "bincode1"
    """As Danube 0.5.0 wrote them: without schema ids and routing keys."""
    BINCODE2 = "bincode2"
    """As Danube writes them since 0.12."""


class Layout(StrEnum):
    """Where new objects of frames are in the bucket; see `ister.bucket.names`."""

    OBJECTS = "objects"
    """`objects/`, as Danube had it up to 0.8."""
    SEGMENTS = "segments"
    """`segments/`, where Danube 0.9 and later looks for them."""


class TopicState(Enum):
    """Whether a topic takes appends, and why not."""

    OPEN = "open"
    STALLED = "stalled"
    """The disk is full (or out of handles); appends are refused until a retry succeeds."""
    QUARANTINED = "quarantined"
    """Damage below the durable watermark; readable where it is whole, never written to."""
    FAILED = "failed"
    """A write or sync failed; reopen the topic to go through recovery."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class TopicName:
    """A topic's name in its two parts; `str()` gives the form `/namespace/topic`."""

    namespace: str
    topic: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Takes a name apart.

        Letters, digits, `_` and `-` in ASCII only: no dot, so a part never means a directory,
        and no second spelling of the same letters.

        Raises:
            TopicNameError: The text is not of the form `/namespace/topic`.
        """
        if not isinstance(text, str):
            raise TopicNameError(f"a topic name is a string, not {type(text).__name__}")
        parts = text.split("/")
        if len(parts) != 3 or parts[0] != "":
            raise TopicNameError(
                f"topic name {text!r} does not have the form '/namespace/topic'",
                hint="for example '/default/orders'",
            )
        for part in parts[1:]:
            if not _NAME_PART.fullmatch(part):
                raise TopicNameError(
                    f"topic name {text!r} has the part {part!r}",
                    hint="a part is one or more ASCII letters, digits, '_' and '-'",
                )
            if len(part) > NAME_PART_CHARACTERS_MAX:
                raise TopicNameError(
                    f"topic name of {len(text)} characters",
                    hint=f"a part has at most {NAME_PART_CHARACTERS_MAX}",
                )
            if part in _RESERVED_PARTS:
                raise TopicNameError(f"topic name {text!r} uses the reserved word {part!r}")
        return cls(namespace=parts[1], topic=parts[2])

    def __str__(self) -> str:
        return f"/{self.namespace}/{self.topic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """The watermarks of a topic: exclusive offsets. See the module header."""

    trimmed: int
    """The first offset still in local files."""
    tiered: int
    """Covered by committed descriptors without a hole."""
    synced: int
    """fdatasync returned."""
    written: int
    """write(2) returned."""
    next: int
    """The offset that the next append gets."""

    def __post_init__(self) -> None:
        check(
            self.trimmed <= self.tiered <= self.synced <= self.written <= self.next,
            f"watermarks out of order: {self}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageId:
    """Danube's message id, in the order of its fields on disk."""

    producer_id: int = 0
    topic_name: str = ""
    broker_addr: str = ""
    topic_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMessage:
    """Danube's message record, in the order of its fields on disk.

    The last three fields exist from Danube 0.12 on; `bincode1` cannot carry them.
    """

    request_id: int = 0
    msg_id: MessageId = field(default_factory=MessageId)
    payload: bytes = b""
    publish_time: int = 0
    """Milliseconds since the Unix epoch, as the producer saw them."""
    producer_name: str = ""
    subscription_name: str | None = ""
    """Danube stores the empty string, never None, for what arrives by gRPC."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    schema_id: int | None = None
    schema_version: int | None = None
    routing_key: str | None = None
