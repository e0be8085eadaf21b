"""What an export asks of a table, whichever format it has.

Owns: the words. Does not own: formats.

    open ─► coverage ─► (tasks write files at `target`) ─► commit: files and ranges at once

A commit has the files and ranges of any number of topics. What a table has of each topic is read
from its newest state, however many commits there were before.

Invariants of every table: `commit` is one step that either has happened or has not, an answer that
got lost is found out by reading back, a file counts from its commit on, and a commit whose offsets
the table has already is refused, by the table and not by whoever asks. Before each attempt, every
file is proved to be there. Once an attempt was made, only a `ConflictError` says that the commit
will never be: after any other error its files stay, and the next export finds out. An error that is
about one of the commit's topics names it: the others may be committed without it.

What a crash leaves: files that no commit names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import pyarrow as pa

from ister.spark.tables.ranges import Coverage, Ranges
from ister.spark.tables.targets import FileTarget

PUBLISH_DATE: Final = "publish_date"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A Parquet file that a task has written."""

    path: str
    """Relative to the target's root."""
    date: str | None
    """The UTC date of all its rows, `YYYY-MM-DD`; None where files are not divided by it."""
    rows: int
    bytes: int
    first_offset: int
    last_offset: int
    first_time_us: int
    last_time_us: int
    """Microseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicAddition:
    """What one commit adds of a topic."""

    topic: str
    incarnation: str
    epoch: int
    ranges: Ranges
    """Counted as there, whether or not each offset has a row."""
    files: Sequence[DataFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """What one commit adds."""

    id: str
    """Unique for each commit."""
    topics: Sequence[TopicAddition]
    """Each topic once."""

    @property
    def files(self) -> list[DataFile]:
        """The files of all topics."""
        return [file for item in self.topics for file in item.files]

    def added_to(self, coverage: Coverage) -> Coverage:
        """Returns what a table has after this commit.

        Raises:
            ConflictError: It has some of the offsets already; names the topic.
        """
        after = coverage.add_all(
            (item.topic, item.incarnation, item.epoch, item.ranges) for item in self.topics
        )
        rows = [(item.topic, file.first_offset) for item in self.topics for file in item.files]
        return replace(after, row=rows[0]) if rows else after


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a table's files."""

    schema: pa.Schema
    """The columns of a file, with the table's own types."""
    by_date: bool
    """Whether a file has rows of one UTC date only."""


class Table(Protocol):
    """A table. Used by one thread at a time, on the driver."""

    location: str
    """The table's unique location, without credentials."""

    def open(self, wanted: pa.Schema) -> Layout:
        """Creates the table if it does not exist, else adds missing columns.

        Args:
            wanted: Our columns, `publish_date` not among them.

        Raises:
            ConflictError: It cannot take our columns, or is partitioned in another way.
            UnavailableError: Its store or catalog does not answer.
        """
        ...

    def coverage(self) -> Coverage:
        """Returns the exported ranges, read again; empty if there is no table.

        They are those of the table's current state: if it was rolled back, those that it had then.
        Rows that were deleted from it count as exported.

        Raises:
            ConflictError: The table has lost this information.
            CorruptDataError: It is invalid.
            UnavailableError: Its store or catalog does not answer.
        """
        ...

    def has_exclusive_commits(self) -> bool:
        """Whether of several writers only one can commit next, by the table's own means.

        Raises:
            UnavailableError: Its store or catalog does not answer.
        """
        ...

    def target(self, run: str) -> FileTarget:
        """Where tasks write its files; `run` is unlike that of any other export.

        The run is under way from now on: what it writes is left alone by others' `tidy`, as long
        as `renew` is called now and then, and until `end`.

        Raises:
            UnavailableError: Its store or catalog does not answer.
        """
        ...

    def renew(self, run: str) -> None:
        """Says that a run is still under way. From any thread.

        Raises:
            UnavailableError: Its store does not answer.
        """
        ...

    def end(self, run: str) -> None:
        """Says that a run writes and commits no more. Raises nothing."""
        ...

    def commit(self, addition: Addition, *, check: Callable[[], None]) -> None:
        """Adds files and ranges in one step.

        Args:
            addition: What to add.
            check: Called right before each attempt; raises if the export must stop. As long as
                it was not asked, nothing has happened.

        Raises:
            ConflictError: The table has some of the offsets already, or `check` said no: it has not
                happened, and never will.
            NotFoundError: A file is not where tasks should have written it; names its topic.
            CommitUnknownError: Whether it has happened could not be found out; or it has, and not
                all of it is to be seen yet. The next `open` sees to that.
            IsterError: Anything else. If `check` was asked before, it may have happened.
        """
        ...

    def discard(self, target: FileTarget, files: Sequence[DataFile]) -> None:
        """Removes files that no commit will ever name. Raises nothing."""
        ...

    def tidy(self, grace_seconds: float, *, check: Callable[[], None] | None = None) -> int:
        """Removes what killed exports have left, where only Ister can; how many files.

        Args:
            grace_seconds: What is younger stays.
            check: As for `commit`.

        Raises:
            IsterError: It could not be done, or not all of it.
        """
        ...

    def close(self) -> None:
        """Lets go of connections. May be called twice."""
        ...
