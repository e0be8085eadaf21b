"""The audit log: refused calls and changes, one JSON object a line.

    {"time": "2026-11-15T09:30:00.123Z", "action": "danube_admin.TopicAdmin/DeleteTopic",
     "outcome": "allowed", "principal": "user:alice", "via": "jwt", "resource": "/default/orders",
     "peer": "ipv4:10.0.0.7:50122"}

Lines go to a file of its own, rotated by size, or else to the log `ister.audit`. They are written
before the call is answered. Whatever callers say is escaped and cut, so a line is always one event.

A refusal that repeats itself is written once and then counted: `"repeated": 41` in a second line,
ten seconds later or when the log is closed. Refusals in all are limited to a rate, those of unknown
callers to a lower one, and what is beyond it is counted in `"suppressed"`. So no caller can fill a
disk, or push older lines out, by being refused.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Final

from ister.base.clock import Clock
from ister.base.positions import format_time
from ister.broker.security.principal import Principal
from ister.errors import ConfigError

_log = logging.getLogger("ister.audit")

_FIELD_CHARACTERS_MAX: Final = 512
_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
_FILES_KEPT: Final = 5
_REPEAT_SECONDS: Final = 10.0
_REPEATS_MAX: Final = 1024
_PER_SECOND: Final = {True: 100.0, False: 20.0}
_BURST: Final = {True: 2000.0, False: 200.0}


class Outcome(StrEnum):
    """Outcome of an audited call."""

    ALLOWED = "allowed"
    DENIED = "denied"
    """The caller is known and has no right to it."""
    UNAUTHENTICATED = "unauthenticated"
    """The caller is not known."""
    ENDED = "ended"
    """A stream was cut off: its credentials or its right are gone."""


class AuditLog:
    """Writes what happened. Thread-safe.

    Without a path, lines go to the log `ister.audit`. A file of `file_bytes_max` is set aside as
    `<path>.1`.
    """

    def __init__(
        self, path: str | None, *, clock: Clock, file_bytes_max: int = _FILE_BYTES_MAX
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._repeats: OrderedDict[tuple[str, ...], _Repeat] = OrderedDict()
        # Lines that may be written about callers that are known, and about others.
        self._room = dict(_BURST)
        self._room_at = clock.monotonic()
        self._suppressed = 0
        self._file: _AuditFile | None = None
        if path is not None:
            try:
                self._file = _AuditFile(path, file_bytes_max)
            except OSError as error:
                raise ConfigError(
                    f"broker.auth.audit_file cannot be written to: {error.strerror}", path=path
                ) from error

    def record(
        self,
        outcome: Outcome,
        *,
        action: str,
        principal: Principal | None = None,
        resource: str = "",
        peer: str = "",
        reason: str = "",
        detail: str = "",
    ) -> None:
        """Notes an event. Never raises: what cannot be noted is an error in the log."""
        event = {
            "action": action,
            "outcome": outcome.value,
            "principal": "" if principal is None else str(principal),
            "via": "" if principal is None else principal.via,
            "credential": "" if principal is None else principal.credential[:12],
            "resource": resource,
            "peer": peer,
            "reason": reason,
            "detail": detail,
        }
        # Before anything is kept: a caller may send megabytes for a name.
        event = {name: value[:_FIELD_CHARACTERS_MAX] for name, value in event.items()}
        with self._lock:
            now = self._clock.monotonic()
            self._write_ended(now)
            if outcome is not Outcome.ALLOWED:
                # A peer's port is another one with each connection.
                who = event["principal"] or event["peer"].rpartition(":")[0]
                key = (outcome.value, event["action"], who, event["resource"], event["reason"])
                known = self._repeats.get(key)
                if known is not None:
                    known.count += 1
                    return
                if len(self._repeats) >= _REPEATS_MAX:
                    self._write_repeat(*self._repeats.popitem(last=False))
                if not self._has_room(now, is_known=principal is not None):
                    self._suppressed += 1
                    return
                self._repeats[key] = _Repeat(now, event)
            self._write(event)

    def close(self) -> None:
        """Writes what was only counted, and closes the file. May be called twice."""
        with self._lock:
            while self._repeats:
                self._write_repeat(*self._repeats.popitem(last=False))
            if self._suppressed:
                self._write({"action": "log in", "outcome": Outcome.UNAUTHENTICATED.value})
            file, self._file = self._file, None
            if file is not None:
                # What could not be written was said, and cannot be written now either.
                with suppress(OSError):
                    file.close()

    def _has_room(self, now: float, *, is_known: bool) -> bool:
        for kind, room in self._room.items():
            refilled = room + (now - self._room_at) * _PER_SECOND[kind]
            self._room[kind] = min(_BURST[kind], refilled)
        self._room_at = now
        if self._room[is_known] < 1:
            return False
        self._room[is_known] -= 1
        return True

    def _write_ended(self, now: float) -> None:
        while self._repeats:
            key, repeat = next(iter(self._repeats.items()))
            if now - repeat.since < _REPEAT_SECONDS:
                return
            del self._repeats[key]
            self._write_repeat(key, repeat)

    def _write_repeat(self, _key: tuple[str, ...], repeat: _Repeat) -> None:
        if repeat.count:
            self._write({**repeat.event, "repeated": repeat.count})

    def _write(self, event: Mapping[str, str | int]) -> None:
        content: dict[str, str | int] = {"time": format_time(self._clock.now_ns() // 1_000_000)}
        content |= {name: value for name, value in event.items() if value != ""}
        if self._suppressed:
            content["suppressed"] = self._suppressed
            self._suppressed = 0
        line = json.dumps(content)
        if self._file is not None:
            self._file.write(line)
        else:
            _log.info("%s", line)


class _Repeat:
    """A refusal that was written, and how often it came again since."""

    __slots__ = ("count", "event", "since")

    def __init__(self, since: float, event: dict[str, str]) -> None:
        self.since = since
        self.event: dict[str, str | int] = dict(event)
        self.count = 0


class _AuditFile(RotatingFileHandler):
    """A file of lines, readable by its owner and group; the standard library rotates it."""

    def __init__(self, path: str, size_bytes_max: int) -> None:
        self._has_failed = False
        self._is_failing = False
        super().__init__(path, maxBytes=size_bytes_max, backupCount=_FILES_KEPT, encoding="utf-8")

    def write(self, line: str) -> None:
        self._is_failing = False
        self.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))
        if self._is_failing and not self._has_failed:
            _log.error("the audit file cannot be written to", extra={"path": self.baseFilename})
        self._has_failed = self._is_failing

    def _open(self) -> TextIOWrapper:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)

        # Opened as the handler of the standard library does, but for the mode.
        return open(self.baseFilename, "a", encoding="utf-8", opener=opener)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """A full disk must not stop the broker, and must not go unseen."""
        self._is_failing = True
