"""What the Flight service is given: topics, callers and their rights, bounds.

Owns: these seams, and their simplest fillings: a log of this process, everybody may do everything.
Does not own: what a broker makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ister.broker.security.rights import Permission
from ister.broker.time_searches import TimeSearches
from ister.config import Config
from ister.errors import InvalidRequestError, NotFoundError
from ister.limits import MIB
from ister.model import AckLevel, Codec
from ister.topic.log import Log
from ister.topic.sequences import SequencedTopic, SequencedTopics

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.topic.batches import AppendedBatch, StagedBatch

__all__ = [
    "Access",
    "Caller",
    "FlightLimits",
    "LogSource",
    "OpenAccess",
    "TopicSource",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightLimits:
    """What one service takes on."""

    streams_max: int = 256
    """Reads and publishes under way; each may use a thread."""
    streams_per_caller_max: int = 64
    """Reads and publishes of one authenticated caller."""
    batch_rows_max: int = 65_536
    batch_bytes_max: int = 32 * MIB
    """Of one batch, or as much as one message may have."""
    unacked_bytes_max: int = 64 * MIB
    """Of one stream: what is appended and not yet answered. More is not read from the network."""
    topics_max: int = 10_000
    """Topics in one question."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}", hint="at least 1")


class TopicSource(Protocol):
    """Topics, as far as this process has them. Thread-safe."""

    @property
    def config(self) -> Config:
        """The settings of which clients are told a part."""
        ...

    @property
    def searches(self) -> TimeSearches:
        """Where searches for a time run."""
        ...

    def open(
        self,
        name: str,
        *,
        create: bool = False,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
    ) -> SequencedTopic:
        """A topic; made first, with these settings, if it does not exist and `create` says so.

        Raises:
            NotFoundError: It does not exist, and is not to be made.
            IsterError: It cannot be opened here.
        """
        ...

    def names(self) -> list[str]:
        """The names of all topics."""
        ...

    def append_staged(
        self, name: str, staged: StagedBatch, principal: str, is_gone: Callable[[], bool]
    ) -> AppendedBatch:
        """As `Log.append_staged`, for a caller; it may wait and refuse as `admit`."""
        ...

    def admit(
        self,
        topic: SequencedTopic,
        batch: pa.RecordBatch,
        *,
        producer: str | None,
        principal: str,
        is_gone: Callable[[], bool],
    ) -> None:
        """Called before the rows of a client are appended; they are valid Arrow.

        It may wait, where a topic has a rate, and may refuse them, where it has schemas.

        Args:
            topic: Where to.
            batch: The rows.
            producer: The producer's name; None if it does not number its rows.
            principal: The caller's name; "" for anybody.
            is_gone: Whether the caller has left: then nothing waits any more.

        Raises:
            IsterError: They are refused.
        """
        ...

    def admits_at_once(
        self, topic: SequencedTopic, *, producer: str | None, principal: str
    ) -> bool:
        """Whether `admit` takes no time worth a thread, so that the loop may call it."""
        ...

    def note(self, topic: SequencedTopic, batch: pa.RecordBatch) -> None:
        """Called when rows were appended that had not been before."""
        ...

    def publishing(self, topic: SequencedTopic) -> AbstractContextManager[None]:
        """Entered while a client publishes to a topic."""
        ...


class LogSource:
    """The topics of a log in this process."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sequenced = SequencedTopics()
        self._searches = TimeSearches(log.metrics)

    @property
    def config(self) -> Config:
        return self._log.config

    @property
    def searches(self) -> TimeSearches:
        return self._searches

    def open(
        self,
        name: str,
        *,
        create: bool = False,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
    ) -> SequencedTopic:
        try:
            topic = self._log.topic(name)
        except NotFoundError:
            if not create:
                raise
            topic = self._log.topic(name, create=True, ack=ack, codec=codec)
        return self._sequenced.of(topic)

    def names(self) -> list[str]:
        return self._log.topics()

    def append_staged(
        self, name: str, staged: StagedBatch, principal: str, is_gone: Callable[[], bool]
    ) -> AppendedBatch:
        return self._log.append_staged(name, staged)

    def admit(
        self,
        topic: SequencedTopic,
        batch: pa.RecordBatch,
        *,
        producer: str | None,
        principal: str,
        is_gone: Callable[[], bool],
    ) -> None:
        """Everything is let in."""

    def admits_at_once(
        self, topic: SequencedTopic, *, producer: str | None, principal: str
    ) -> bool:
        return True

    def note(self, topic: SequencedTopic, batch: pa.RecordBatch) -> None:
        """Nobody counts them."""

    def publishing(self, topic: SequencedTopic) -> AbstractContextManager[None]:
        """Nor those who publish."""
        return nullcontext()


class Caller(Protocol):
    """Who makes a call."""

    @property
    def name(self) -> str:
        """Whom to count it for; "" for anybody."""
        ...

    def check(self, permission: Permission, *, topic: str | None = None) -> None:
        """Lets it go on. Called again with every batch of a stream.

        Raises:
            PermissionDeniedError: The caller may not do that, or not any more.
            UnauthenticatedError: Its credentials have expired.
        """
        ...

    def allows(self, permission: Permission, *, topic: str) -> bool:
        """The same as an answer."""
        ...


class Access(Protocol):
    """Finds out who calls."""

    def caller(self) -> Caller:
        """The one who makes the call that the current task serves.

        Raises:
            UnauthenticatedError: Nobody knows.
        """
        ...


class OpenAccess:
    """Everybody may do everything."""

    def caller(self) -> Caller:
        return _Anybody()


class _Anybody:
    name = ""

    def check(self, permission: Permission, *, topic: str | None = None) -> None:
        pass

    def allows(self, permission: Permission, *, topic: str) -> bool:
        return True
