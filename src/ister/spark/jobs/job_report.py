"""What a job did, in one shape for every job.

    {ok, job, started_at, seconds, dry_run, topics: [{topic, …}], errors: [{code, message, …}]}

Owns: the shape, and what receives a job's progress. Does not own: what each job says about a topic
(numbers, texts, lists of them).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from ister.base.model import JsonObject
from ister.errors import InvariantError, IsterError

ErrorFields: TypeAlias = dict[str, str | int | None]
"""An error as a report has it: code, message, topic, offset, path, hint."""

# Spark puts whole Java stack traces into its errors.
_TEXT_MAX: Final = 2000


def error_as_fields(error: IsterError) -> ErrorFields:
    """Returns an error as job reports have it."""
    return error.to_dict("topic", "offset", "path")


def unexpected_as_fields(error: BaseException) -> ErrorFields:
    """Returns an error that is not an `IsterError` as JSON fields."""
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
    topics: dict[str, dict[str, object]] = field(default_factory=dict)
    errors: list[ErrorFields] = field(default_factory=list)
    more: dict[str, object] = field(default_factory=dict)
    """Fields about the job as a whole."""
    parts: list[JobReport] = field(default_factory=list)
    """The reports of the jobs that `run_once` ran; in JSON, `jobs`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.errors

    def of(self, topic: str) -> dict[str, object]:
        """Returns the fields of a topic, to be extended."""
        with self._lock:
            return self.topics.setdefault(topic, {"topic": topic})

    def add(self, topic: str, **numbers: int) -> None:
        """Adds to numbers of a topic, each of which starts at 0."""
        with self._lock:
            fields = self.topics.setdefault(topic, {"topic": topic})
            for name, number in numbers.items():
                fields[name] = _as_int(fields.get(name)) + number

    def count(self, **numbers: int) -> None:
        """Adds to numbers of the job as a whole, each of which starts at 0."""
        with self._lock:
            for name, number in numbers.items():
                self.more[name] = _as_int(self.more.get(name)) + number

    def fail(
        self, error: IsterError | Mapping[str, str | int | None], topic: str | None = None
    ) -> None:
        """Records a failure; the job continues with other topics."""
        fields = dict(error_as_fields(error) if isinstance(error, IsterError) else error)
        if topic is not None and not fields.get("topic"):
            fields["topic"] = topic
        with self._lock:
            self.errors.append(fields)

    def total(self, name: str) -> int:
        """Returns the sum of a number over all topics."""
        return sum(_as_int(fields.get(name)) for fields in self.topics.values())

    def topics_as_json(self) -> list[JsonObject]:
        """Returns the fields of each topic, sorted by name."""
        with self._lock:
            return [dict(self.topics[name]) for name in sorted(self.topics)]

    def as_json(self) -> JsonObject:
        """Returns the report."""
        topics = self.topics_as_json()
        parts = {"jobs": {part.job: part.as_json() for part in self.parts}} if self.parts else {}
        with self._lock:
            return {
                "ok": self.ok,
                "job": self.job,
                "dry_run": self.dry_run,
                "started_at": self.started_at,
                "seconds": round(self.seconds, 3),
                **self.more,
                **parts,
                "topics": topics,
                "errors": list(self.errors),
            }


def _as_int(value: object) -> int:
    return value if isinstance(value, int) else 0


class JobProgress(Protocol):
    """Receives the progress of a job. Called on the job's own thread."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """Starts a phase; `unit` is `bytes`, `objects`, `messages` or the like."""
        ...

    def advance(self, amount: int, note: str = "") -> None:
        """Adds to what is done; `note` says what was done last."""
        ...

    def end(self) -> None:
        """Ends the phase, whether it succeeded or not."""
        ...


class NoProgress:
    """Shows no progress."""

    def begin(self, what: str, total: int, unit: str) -> None:
        """Does nothing."""

    def advance(self, amount: int, note: str = "") -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""
