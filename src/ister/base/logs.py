"""Structured logs: every record is an event with fields, one JSON object a line.

Modules log through `logging.getLogger("ister.…")` with fields in `extra`, so a program that uses
Ister sees ordinary log records and decides itself. One that has decided nothing gets warnings and
errors on standard error, with their fields (`LastResort`). `configure` sets up JSON, or plain
lines. Both have the time, in UTC.

Levels: DEBUG for what is only of interest while a fault is looked for; INFO for what happens in
normal work (rotated); WARNING for what was put right or is tried again (a torn tail was cut, a
checkpoint was not saved); ERROR for what needs an operator (a writer stopped, damage).
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Final, TextIO

from ister.base.positions import format_time

PIPELINE_STARTED: Final = "pipeline started"
PIPELINE_STANDBY: Final = "standing by"
"""Events of the pipeline's log that `ister up` shows as its state."""

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record. Newlines in values are escaped, so a line is a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        event: dict[str, object] = {
            "time": format_time(record.created * 1000),
            "level": record.levelname,
            "target": record.name,
            "event": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and value is not None:
                event[name] = value if isinstance(value, int | float | bool | str) else str(value)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


class TextFormatter(logging.Formatter):
    """For people: the time, the event, and its fields behind it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields = ", ".join(
            f"{name}={value}"
            for name, value in vars(record).items()
            if name not in _STANDARD and value is not None
        )
        when = format_time(record.created * 1000)
        text = f"{when} ister: {record.levelname.lower()}: {record.getMessage()}"
        line = f"{text} ({fields})" if fields else text
        line = line.replace("\n", "\\n")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class LastResort(logging.Handler):
    """Shows warnings and errors where the program has set up no logging of its own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(TextFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, unless another handler does."""
        if not logging.getLogger().handlers:
            sys.stderr.write(f"{self.format(record)}\n")


def configure(
    *, level: str = "WARNING", stream: TextIO | None = None, as_text: bool = False
) -> logging.Handler:
    """Sends the logs of `ister` to a stream, standard error by default, as JSON or for people."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    logger = logging.getLogger("ister")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
    return handler
