"""The output of `ister consume`: formats messages as lines, and writes them.

Owns: the forms of a message, and knowing when a line has arrived. Does not own: where messages come
from, acknowledging them.

A line that was written to a pipe was not necessarily read: a pipe holds 64 KiB, and
what is in it when `head` ends is lost. So where it matters, a pipe is made as small as it gets and
lines go into it one at a time: it has room again only when the reader has taken all of it. Nothing
but Linux has this; elsewhere, and for sockets, what is written counts as read.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import stat
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from ister.base.model import JsonObject
from ister.base.positions import format_time
from ister.cli.interrupts import Interrupts
from ister.errors import DiskError

FORMATS: Final = ("payload", "full", "hex")

_PIPE_BYTES: Final = 4096
_SET_PIPE_SIZE: Final = getattr(fcntl, "F_SETPIPE_SZ", None)
# What would move the cursor of a terminal, or worse; and what reverses the text that follows.
_UNPRINTABLE: Final = {
    number: f"\\x{number:02x}" for number in (*range(32), *range(0x7F, 0xA0)) if number != 9
} | {number: f"\\u{number:04x}" for number in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


class Received(NamedTuple):
    """A message, by whichever way it came."""

    topic: str
    offset: int
    publish_time_ms: int
    producer_name: str
    payload: bytes
    attributes: Mapping[str, str]
    routing_key: str | None
    schema_id: int | None = None
    schema_version: int | None = None
    more: Mapping[str, object] = MappingProxyType({})
    """What only some commands know of a message, by the names of template fields."""


def as_fields(message: Received) -> JsonObject:
    """The message for `--json`; `payload` is None if it is no text."""
    try:
        text: str | None = message.payload.decode()
    except UnicodeDecodeError:
        text = None
    fields: JsonObject = {
        "topic": message.topic,
        "offset": message.offset,
        "publish_time": message.publish_time_ms,
        "producer_name": message.producer_name,
        "payload": text,
        "payload_base64": base64.b64encode(message.payload).decode("ascii"),
        "attributes": dict(message.attributes),
        "routing_key": message.routing_key,
    }
    if message.schema_id is not None:
        fields |= {"schema_id": message.schema_id, "schema_version": message.schema_version}
    return fields


def formatter(
    form: str, *, is_json: bool, delimiter: bytes, is_terminal: bool
) -> Callable[[Received], bytes]:
    """What makes a message into a line, its end included.

    Args:
        form: One of `FORMATS`.
        is_json: JSON instead.
        delimiter: The end of a line; of JSON it is always a newline.
        is_terminal: The output is a terminal: control characters are shown as numbers.
    """
    if is_json:
        return lambda message: json.dumps(as_fields(message)).encode() + b"\n"
    if form == "hex":
        return lambda message: message.payload.hex().encode() + delimiter
    shown = printable if is_terminal else bytes
    if form == "full":
        return lambda message: shown(_full(message)) + delimiter
    return lambda message: shown(message.payload) + delimiter


def _full(message: Received) -> bytes:
    about = [
        message.topic,
        str(message.offset),
        format_time(message.publish_time_ms),
        message.producer_name or "-",
        message.routing_key if message.routing_key is not None else "-",
        format_attributes(message.attributes) or "-",
    ]
    return "\t".join(about).encode(errors="replace") + b"\t" + message.payload


def format_attributes(attributes: Mapping[str, str]) -> str:
    """Attributes as one text, in the order of their names."""
    return ",".join(f"{name}={value}" for name, value in sorted(attributes.items()))


def printable(data: bytes) -> bytes:
    """Text for a terminal: control characters and bytes that are not UTF-8 become numbers."""
    return data.decode(errors="backslashreplace").translate(_UNPRINTABLE).encode(errors="replace")


class StoppedError(Exception):
    """The command was stopped while it waited for the reader of its output."""


class LineOutput:
    """Where lines go. Waits for room, and for readers, in a way that a signal ends."""

    def __init__(self, fd: int, interrupts: Interrupts, *, is_careful: bool) -> None:
        """Examines the file.

        `interrupts` end waiting; with `is_careful` it matters whether a line was read.
        """
        self._fd = fd
        self._interrupts = interrupts
        self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        self.is_stepwise = is_careful and self._is_pipe and self._shrink()
        """Whether lines are written one at a time, and `taken` waits until one was read."""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._poll.register(interrupts.fd, select.POLLIN)

    def _shrink(self) -> bool:
        if _SET_PIPE_SIZE is None:
            return False
        try:
            return fcntl.fcntl(self._fd, _SET_PIPE_SIZE, _PIPE_BYTES) == _PIPE_BYTES
        except OSError:
            return False

    def write(self, data: bytes) -> None:
        """Writes all of it.

        Raises:
            BrokenPipeError: The reader is gone.
            DiskError: It cannot be written.
            StoppedError: A signal came first; some of it may be written.
        """
        view = memoryview(data)
        try:
            while view:
                if not self._is_pipe:
                    view = view[os.write(self._fd, view) :]
                    continue
                # Not more than there is room for, as a write that waits cannot be ended.
                self._wait_for_room()
                view = view[os.write(self._fd, view[:_PIPE_BYTES]) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            text = f"cannot write the output: {error.strerror}"
            raise DiskError(text, errno=error.errno) from error

    def taken(self) -> None:
        """Returns when all that was written has been read, if that can be known.

        Raises:
            BrokenPipeError: The reader is gone.
            StoppedError: A signal came first.
        """
        if self.is_stepwise:
            self._wait_for_room()

    def check_reader(self) -> None:
        """Checks that there is still a reader, without writing.

        Raises:
            BrokenPipeError: The reader is gone.
        """
        poll = select.poll()
        poll.register(self._fd, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise BrokenPipeError

    def _wait_for_room(self) -> None:
        while True:
            for fd, event in self._poll.poll():
                if fd == self._fd:
                    # Also when the reader has gone: then it has read all of it before.
                    if event & select.POLLOUT:
                        return
                    raise BrokenPipeError
            if self._interrupts.is_set:
                raise StoppedError
