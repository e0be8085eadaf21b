"""Makes the next item of a generator while its consumer is busy with the last one."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

_Item = TypeVar("_Item")


def one_ahead(items: Generator[_Item], executor: Executor) -> Generator[_Item]:
    """Yields the items of a generator, one of which is made on the executor meanwhile.

    No item may be None. Closes the generator at the end, or when it is closed itself.
    """
    coming: Future[_Item | None] = executor.submit(next, items, None)
    try:
        while (item := coming.result()) is not None:
            coming = executor.submit(next, items, None)
            yield item
    finally:
        if not coming.cancel():
            wait([coming])  # a generator cannot be closed while it runs
        items.close()
