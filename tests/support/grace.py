"""Staged and replaced files that are old at once, for tests that wait for no hour."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ister.bucket import orphans


@contextmanager
def without_least_grace() -> Iterator[None]:
    """A grace period of none means none, for whatever this process keeps and collects."""
    with patch.object(orphans, "GRACE_SECONDS_MIN", 0):
        yield
