"""Every error that Ister raises, chosen by what the caller has to do about it.

    IsterError
    ├ InvalidRequestError        fix the call                  INVALID_ARGUMENT
    │ ├ ConfigError              fix the setting
    │ ├ TopicNameError           fix the name
    │ └ MessageTooLargeError     send less
    ├ NotFoundError              create it first               NOT_FOUND
    ├ OffsetOutOfRangeError      seek into earliest..next      OUT_OF_RANGE
    ├ PermissionDeniedError      get the right to do it        PERMISSION_DENIED
    ├ UnauthenticatedError       show valid credentials        UNAUTHENTICATED
    ├ ConflictError              re-read, then decide          ABORTED
    │ ├ AlreadyExistsError       take the existing one
    │ ├ DirectoryLockedError     stop the other process
    │ ├ StoresDifferError        decide which store is right
    │ └ WaitsForDiskError        start the node that has the disk
    ├ FencedError                a newer owner exists: stop    ABORTED
    ├ UnavailableError           retry later                   UNAVAILABLE          retriable
    │ ├ NoAnswerError            check address and broker
    │ ├ CommitUnknownError       read back what happened
    │ ├ DiskError                look at the disk, then reopen
    │ └ WaitTimeoutError         wait longer
    ├ CapacityError              slow down, or make room       RESOURCE_EXHAUSTED   retriable
    ├ CorruptDataError           stop, repair or restore       DATA_LOSS
    │ └ DataGapError             offsets that no tier holds
    ├ UnsupportedOperationError  use another backend           UNIMPLEMENTED
    ├ UnsupportedVersionError    upgrade                       UNIMPLEMENTED
    ├ ClosedError                reopen                        UNAVAILABLE
    └ InvariantError             our bug                       INTERNAL

A torn tail is a result of decoding, never an exception. Errors of the operating system, of
object stores and of metadata stores are turned into this tree once, in `ister.fs`,
`ister.objectstore` and `ister.metadata`, with the original as `__cause__`.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self, TypeVar

__all__ = [
    "AlreadyExistsError",
    "CapacityError",
    "ClosedError",
    "CommitUnknownError",
    "ConfigError",
    "ConflictError",
    "CorruptDataError",
    "DataGapError",
    "DirectoryLockedError",
    "DiskError",
    "FencedError",
    "InvalidRequestError",
    "InvariantError",
    "IsterError",
    "MessageTooLargeError",
    "NoAnswerError",
    "NotFoundError",
    "OffsetOutOfRangeError",
    "PermissionDeniedError",
    "StoresDifferError",
    "TopicNameError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedOperationError",
    "UnsupportedVersionError",
    "WaitTimeoutError",
    "WaitsForDiskError",
    "check",
]


class IsterError(Exception):
    """The base of all errors raised by Ister.

    Attributes:
        code: A machine-readable status, named as gRPC names its own.
        retriable: Whether the same call may succeed later without a change by the caller.
        topic: The topic concerned, where there is one.
        offset: The message offset concerned, where there is one.
        path: The file or directory concerned, where there is one.
        position: The byte in `path`, where there is one.
        hint: What to do next, in one sentence.
    """

    code: ClassVar[str] = "UNKNOWN"
    retriable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        topic: str | None = None,
        offset: int | None = None,
        path: str | None = None,
        position: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.topic = topic
        self.offset = offset
        self.path = path
        self.position = position
        self.hint = hint

    def to_dict(self, *names: str) -> dict[str, str | int | None]:
        """Returns the error for JSON: `code`, `message`, the attributes named, `hint`."""
        more = {name: getattr(self, name) for name in names}
        return {"code": self.code, "message": self.message, **more, "hint": self.hint}

    def again(self) -> Self:
        """The same error as a new object, to be raised in another place or thread.

        One object raised in many threads would collect the tracebacks of all of them.
        """
        twin = _rebuild(type(self), self.args, self.__dict__)
        twin.__cause__ = self.__cause__
        return twin

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle: errors travel between processes with all they carry."""
        return _rebuild, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        context = [
            f"{name}={value}"
            for name in ("topic", "offset", "path", "position")
            # A sentence about a topic names it.
            if (value := getattr(self, name)) is not None
            and not (name == "topic" and _names(self.message, value))
        ]
        text = self.message
        if context:
            text += f" ({', '.join(context)})"
        if self.hint:
            text += f"; {self.hint}"
        return text


def _names(sentence: str, topic: str) -> bool:
    """Whether a sentence has a topic's name, and not only that of a longer one."""
    return re.search(rf"(?<![\w/-]){re.escape(topic)}(?![\w/-])", sentence) is not None


_Error = TypeVar("_Error", bound=IsterError)


def _rebuild(kind: type[_Error], args: tuple[object, ...], fields: dict[str, object]) -> _Error:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class InvalidRequestError(IsterError, ValueError):
    """The call itself is wrong; nothing was changed."""

    code = "INVALID_ARGUMENT"


class ConfigError(InvalidRequestError):
    """A setting is unknown, of the wrong kind, or contradicts another one."""


class TopicNameError(InvalidRequestError):
    """A topic name that is not of the form `/namespace/topic`."""


class MessageTooLargeError(InvalidRequestError):
    """A message over `max_message_size`, or with too many bytes of attributes and names."""


class NotFoundError(IsterError, LookupError):
    """The topic, file or directory does not exist."""

    code = "NOT_FOUND"


def topic_not_found(topic: object) -> NotFoundError:
    """The error about a topic that does not exist."""
    return NotFoundError(f"topic {topic} does not exist", topic=str(topic))


class OffsetOutOfRangeError(IsterError, LookupError):
    """An offset outside of what the topic holds.

    Attributes:
        earliest: The first offset that can be read.
        next: The offset that the next append gets.
    """

    code = "OUT_OF_RANGE"

    def __init__(
        self, message: str, *, earliest: int, next: int, topic: str | None, offset: int
    ) -> None:
        super().__init__(
            message,
            topic=topic,
            offset=offset,
            hint=f"readable offsets: {earliest} up to, not including, {next}",
        )
        self.earliest = earliest
        self.next = next


class PermissionDeniedError(IsterError):
    """A store refused the credentials, or they may not do this."""

    code = "PERMISSION_DENIED"


class UnauthenticatedError(IsterError):
    """The caller is not authenticated: credentials are missing, wrong or expired."""

    code = "UNAUTHENTICATED"


class ConflictError(IsterError):
    """The state is not the one that the call assumed."""

    code = "ABORTED"


class AlreadyExistsError(ConflictError):
    """An object of that name exists, and the call was to make a new one."""

    code = "ALREADY_EXISTS"


class DirectoryLockedError(ConflictError):
    """Another process (or another handle in this one) owns the WAL directory."""


class StoresDifferError(ConflictError):
    """The metadata store, the bucket and the local files contradict each other.

    One of them was rolled back to an older state, or files were moved. Trying again does not help:
    the hint says what an operator can do.
    """


class WaitsForDiskError(ConflictError):
    """The topic's newest messages may be only on the disk of a node that does not have it open.

    Attributes:
        node: That node: the last one that wrote the topic.
        offset: The end of what the bucket has. Messages from here on may be on that disk.
        known_end: Some of them were below this offset; 0 if nothing is known of them.
    """

    node: str = ""
    known_end: int = 0

    def __init__(
        self,
        message: str,
        *,
        node: str,
        topic: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
        known_end: int = 0,
    ) -> None:
        super().__init__(message, topic=topic, offset=offset, hint=hint)
        self.node = node
        self.known_end = known_end


class FencedError(IsterError):
    """A newer owner has the topic: this one cannot publish any more.

    Not a `ConflictError`: reading again and retrying cannot help.
    """

    code = "ABORTED"


class UnavailableError(IsterError):
    """Something outside of Ister does not answer at the moment."""

    code = "UNAVAILABLE"
    retriable = True


class NoAnswerError(UnavailableError):
    """A broker does not answer, or none of several does.

    Attributes:
        address: Its address; several are separated by commas.
        reason: The cause that gRPC or Flight reports; may be empty.
    """

    def __init__(
        self,
        address: str,
        reason: str = "",
        *,
        topic: str | None = None,
        within: float | None = None,
        hint: str | None = None,
    ) -> None:
        """Composes the message; `within` is the time that was waited, in seconds."""
        message = f"{address} {'do' if ',' in address else 'does'} not answer"
        if within is not None:
            message += f" within {within:g} s"
        super().__init__(f"{message}: {reason}" if reason else message, topic=topic, hint=hint)
        self.address = address
        self.reason = reason


class CommitUnknownError(UnavailableError):
    """The answer to a transaction was lost: it may have happened, happen later, or never."""


class DiskError(UnavailableError):
    """The operating system refused or failed a file operation.

    Attributes:
        errno: The operating system's number for it.
    """

    retriable = False

    def __init__(self, message: str, *, errno: int | None, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.errno = errno


class WaitTimeoutError(UnavailableError, TimeoutError):
    """The awaited level was not reached in the time given; the message stays accepted."""


class CapacityError(IsterError):
    """A buffer or the disk is full. Nothing acknowledged is lost; writing resumes with room."""

    code = "RESOURCE_EXHAUSTED"
    retriable = True


class CorruptDataError(IsterError):
    """Stored bytes are not what was written, below the point where a crash could explain it."""

    code = "DATA_LOSS"


class DataGapError(CorruptDataError):
    """Offsets that should exist and that neither the local files nor the bucket hold.

    Attributes:
        start: The first of them.
        end: The first offset after them.
    """

    def __init__(self, message: str, *, start: int, end: int, topic: str | None) -> None:
        super().__init__(
            message,
            topic=topic,
            offset=start,
            hint=f"offsets {start} up to, not including, {end} are in no tier; "
            "`ister repair` restores them where another copy exists, and with --give-up it gives "
            "them up",
        )
        self.start = start
        self.end = end


class UnsupportedOperationError(IsterError):
    """The backend cannot do this at all."""

    code = "UNIMPLEMENTED"


class UnsupportedVersionError(IsterError):
    """The bytes are intact and were written by a newer Ister."""

    code = "UNIMPLEMENTED"


class ClosedError(IsterError):
    """The topic, reader or log was closed, or its writer stopped after an error."""

    code = "UNAVAILABLE"


class InvariantError(IsterError):
    """Ister broke a promise that it makes to itself. The topic's writer stops."""

    code = "INTERNAL"


def check(condition: bool, message: str) -> None:
    """Raises InvariantError unless `condition` holds; unlike `assert`, also under `python -O`."""
    if not condition:
        raise InvariantError(message)
