"""What Delta and Iceberg tables share: another library keeps them, and Ister only adds files.

Owns: retries of a commit, the mapping of the library's errors, and the removal of files that were
never committed. Does not own: the commit itself.

Files that no commit names are left to the table's own upkeep, so a run needs no mark.
"""

from __future__ import annotations

import logging
import random
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ister.base.retry import backoff_seconds
from ister.errors import CommitUnknownError, IsterError, UnavailableError
from ister.spark.tables.base import DataFile
from ister.spark.tables.targets import FileTarget

_log = logging.getLogger("ister.spark.tables")

_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 3.2
SHOWN_CHARACTERS: Final = 300
"""How much of a library's error text is shown."""


class LibraryTable:
    """A table that another library keeps. Used by one thread at a time, on the driver."""

    location: str

    def __init__(self, rng: random.Random | None) -> None:
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - pauses

    @abstractmethod
    def _mapped(self, what: str, error: Exception) -> IsterError:
        """Returns an error of the library as one of Ister's."""

    def renew(self, run: str) -> None:
        """Does nothing: uncommitted files are not removed."""

    def end(self, run: str) -> None:
        """Does nothing."""

    def tidy(self, grace_seconds: float, *, check: Callable[[], None] | None = None) -> int:
        """Does nothing: the table's own upkeep removes files that no commit names."""
        return 0

    def discard(self, target: FileTarget, files: Sequence[DataFile]) -> None:
        """Removes files that were never committed."""
        for file in files:
            try:
                target.delete(file.path)
            except IsterError as error:
                _log.info("file not removed", extra={"path": file.path, "error": str(error)})

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

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Maps errors of the library, which are of many kinds."""
        try:
            yield
        except IsterError:
            raise
        except Exception as error:
            raise self._mapped(what, error) from error

    def _unknown(self) -> CommitUnknownError:
        return CommitUnknownError(
            "the commit may be in the table",
            path=self.location,
            hint="run it again: it finds out",
        )
