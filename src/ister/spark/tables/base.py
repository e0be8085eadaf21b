"""What an export asks of a table, whichever format it has.

Owns: the words, and what is the same in every format: retries of a commit, the proof that its
files exist, the removal of files that were never committed. Does not own: formats.

    open ─► coverage ─► (tasks write files at `target`) ─► commit: files and ranges at once

A commit has the files and ranges of any number of topics. What a table has of each topic is read
from its newest state, however many commits there were before.

Invariants of every table: `commit` is one step that either has happened or has not, an answer that
got lost is found out by reading back, a file counts from its commit on, and a commit whose offsets
the table has already is refused, by the table and not by whoever asks. Before each attempt, every
file is proved to be there. Once an attempt was made, only a `ConflictError` says that the commit
will never be: after any other error its files stay, and the next export finds out. An error that is
about one of the commit's topics names it: the others may be committed without it.

A task may have written a file elsewhere, such as into a directory of its own machine, or the file
may have been deleted since. Ranges committed with missing files would never be exported again.

What a crash leaves: files that no commit names.
"""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from ister.base.retry import backoff_seconds
from ister.errors import (
    CommitUnknownError,
    CorruptDataError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.objectstore.base import ObjectStore
from ister.spark.tables.ranges import Coverage, Ranges
from ister.spark.tables.targets import FileTarget

PUBLISH_DATE: Final = "publish_date"
SHOWN_CHARACTERS: Final = 300
"""How much of a library's error text is shown."""

_log = logging.getLogger("ister.spark.tables")

_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 3.2
_THREADS: Final = 8
_FEW: Final = 4
_ON_A_DISK: Final = (
    "if tasks ran on other machines, each has a directory of this name of its own: export to a "
    "bucket, or to a directory that all machines share"
)
_IN_A_BUCKET: Final = (
    "something else removes files of the table; run the export again, it rewrites them"
)


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


class Table(ABC):
    """A table. Used by one thread at a time, on the driver."""

    location: str
    """The table's unique location, without credentials."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - pauses

    @abstractmethod
    def open(self, wanted: pa.Schema) -> Layout:
        """Creates the table if it does not exist, else adds missing columns.

        Raises:
            ConflictError: It cannot take our columns, or is partitioned in another way.
            UnavailableError: Its store or catalog does not answer.
        """

    @abstractmethod
    def coverage(self) -> Coverage:
        """Returns the exported ranges, read again; empty if there is no table.

        They are those of the table's current state: if it was rolled back, those that it had then.
        Rows that were deleted from it count as exported.

        Raises:
            ConflictError: The table has lost this information.
            CorruptDataError: It is invalid.
            UnavailableError: Its store or catalog does not answer.
        """

    @abstractmethod
    def has_exclusive_commits(self) -> bool:
        """Whether of several writers only one can commit next, by the table's own means."""

    @abstractmethod
    def target(self, run: str) -> FileTarget:
        """Where tasks write its files; `run` is unlike that of any other export.

        The run is under way from now on: what it writes is left alone by others' `tidy`, as long
        as `renew` is called now and then, and until `end`.
        """

    def renew(self, run: str) -> None:  # noqa: B027 - as `end`
        """Says that a run is still under way. From any thread."""

    def end(self, run: str) -> None:  # noqa: B027 - files that no commit names may stay
        """Says that a run writes and commits no more. Raises nothing."""

    @abstractmethod
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

    def discard(self, target: FileTarget, files: Sequence[DataFile]) -> None:
        """Removes files that no commit will ever name. Raises nothing."""
        for file in files:
            try:
                target.delete(file.path)
            except IsterError as error:
                _log.info("file not removed", extra={"path": file.path, "error": str(error)})

    def tidy(self, grace_seconds: float, *, check: Callable[[], None] | None = None) -> int:
        """Removes what killed exports have left, where only Ister can; how many files.

        Args:
            grace_seconds: What is younger stays.
            check: As for `commit`.

        Raises:
            IsterError: It could not be done, or not all of it.
        """
        return 0

    def close(self) -> None:  # noqa: B027 - stores are shared
        """Lets go of connections. May be called twice."""

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Maps errors of the library that keeps the table, which are of many kinds."""
        try:
            yield
        except IsterError:
            raise
        except Exception as error:
            raise self._mapped(what, error) from error

    def _mapped(self, what: str, error: Exception) -> IsterError:
        """Returns an error of that library as one of Ister's."""
        return UnavailableError(f"{what}: {error}", path=self.location)

    def _unknown(self) -> CommitUnknownError:
        return CommitUnknownError(
            "the commit may be in the table",
            path=self.location,
            hint="run it again: it finds out",
        )

    def _retry_commit(self, attempt_commit: Callable[[], bool]) -> None:
        """Calls `attempt_commit` until it returns True; it returns False if it lost a race."""
        pause = threading.Event()
        for attempt in range(1, _ATTEMPTS + 1):
            if attempt_commit():
                return
            pause.wait(
                backoff_seconds(
                    attempt, first=_PAUSE_SECONDS, most=_PAUSE_SECONDS_MAX, rng=self._rng
                )
            )
        raise UnavailableError(
            f"the table kept changing during {_ATTEMPTS} attempts",
            path=self.location,
            hint="run it again",
        )


def size_in(store: ObjectStore, path: str) -> int | None:
    """Returns the size of a file; None if there is none."""
    try:
        return store.stat(path).size
    except NotFoundError:
        return None


def prove_files(
    addition: Addition, size_of: Callable[[str], int | None], *, location: str, is_local: bool
) -> None:
    """Checks that all files of a commit exist, with the sizes that tasks wrote.

    Args:
        addition: The commit.
        size_of: Returns the size of a file in bytes, or None; called from several threads.
        location: The table, for people.
        is_local: Whether it is in a directory.

    Raises:
        NotFoundError: A file is not there.
        CorruptDataError: A file has another size.
        UnavailableError: The store does not answer.
    """
    files = [(item.topic, file) for item in addition.topics for file in item.files]
    sizes = _sizes([file for _, file in files], size_of)
    missing = [one for one, size in zip(files, sizes, strict=True) if size is None]
    if missing:
        topic, first = missing[0]
        raise NotFoundError(
            f"{len(missing)} of {len(files)} files that tasks have written are not in the table's "
            f"place, among them one with the offsets {_shown(first)}; nothing was committed",
            topic=topic,
            offset=first.first_offset,
            path=f"{location}/{first.path}",
            hint=_ON_A_DISK if is_local else _IN_A_BUCKET,
        )
    for (topic, file), size in zip(files, sizes, strict=True):
        if size != file.bytes:
            raise CorruptDataError(
                f"a file with the offsets {_shown(file)} has {size} bytes, and {file.bytes} were "
                "written; nothing was committed",
                topic=topic,
                offset=file.first_offset,
                path=f"{location}/{file.path}",
                hint="run the export again: it rewrites the file",
            )


def _sizes(files: Sequence[DataFile], size_of: Callable[[str], int | None]) -> list[int | None]:
    if len(files) <= _FEW:
        return [size_of(file.path) for file in files]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ister-export-proof") as pool:
        return list(pool.map(size_of, [file.path for file in files]))


def _shown(file: DataFile) -> str:
    return f"{file.first_offset} up to {file.last_offset + 1}"
