"""What a job did, for programs and for people: the same words for every job.

    {ok, job, started_at, seconds, dry_run, topics: [{topic, …}], errors: [{code, message, …}]}

Owns: the shape. Does not own: what each job says about a topic (numbers, texts, lists of them).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ister.errors import InvariantError, IsterError

__all__ = ["JobReport", "error_as_fields", "unexpected_as_fields"]

# Spark puts whole stacks of Java into its errors.
_TEXT_MAX: Final = 2000


def error_as_fields(error: IsterError) -> dict[str, Any]:
    """An error as JSON has it."""
    return {
        "code": error.code,
        "message": error.message,
        "topic": error.topic,
        "offset": error.offset,
        "path": error.path,
        "hint": error.hint,
    }


def unexpected_as_fields(error: BaseException) -> dict[str, Any]:
    """An error that is none of Ister's, as JSON has it."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return error_as_fields(InvariantError(text[:_TEXT_MAX]))


@dataclass(slots=True)
class JobReport:
    """What a job did. Thread-safe."""

    job: str
    started_at: int = 0
    """Seconds since the Unix epoch."""
    seconds: float = 0.0
    dry_run: bool = False
    topics: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    """What a job says about itself as a whole."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.errors

    def of(self, topic: str) -> dict[str, Any]:
        """What is said about a topic, to be added to."""
        with self._lock:
            return self.topics.setdefault(topic, {"topic": topic})

    def add(self, topic: str, **numbers: int) -> None:
        """Adds to numbers of a topic, each of which begins with 0."""
        with self._lock:
            fields = self.topics.setdefault(topic, {"topic": topic})
            for name, number in numbers.items():
                fields[name] = fields.get(name, 0) + number

    def fail(self, error: IsterError | Mapping[str, Any], topic: str | None = None) -> None:
        """Takes note of a failure; the job goes on with other topics."""
        fields = dict(error_as_fields(error) if isinstance(error, IsterError) else error)
        if topic is not None and not fields.get("topic"):
            fields["topic"] = topic
        with self._lock:
            self.errors.append(fields)

    def total(self, name: str) -> int:
        """The sum of a number over all topics."""
        return sum(fields.get(name, 0) for fields in self.topics.values())

    def as_json(self) -> dict[str, Any]:
        """The report; topics by their names."""
        with self._lock:
            return {
                "ok": self.ok,
                "job": self.job,
                "dry_run": self.dry_run,
                "started_at": self.started_at,
                "seconds": round(self.seconds, 3),
                **self.more,
                "topics": [dict(self.topics[name]) for name in sorted(self.topics)],
                "errors": list(self.errors),
            }
