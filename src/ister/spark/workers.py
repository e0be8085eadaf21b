"""What Python workers of Spark do once, whatever task comes first.

Loops over frames are compiled in the background where a process has read much; a worker's work is
known beforehand, so it does that before it begins.

PySpark has the garbage collector go through everything behind each task of a worker that is used
again, and our libraries are a few hundred thousand objects: a tenth of a second for nothing.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

from pyspark import TaskContext

from ister.format import compiled
from ister.limits import MIB

__all__ = ["compile_for", "spare_collector"]

_MODULES_MIN: Final = 50
_COMPILED_BYTES_MIN: Final = 4 * MIB

_modules_seen = 0


def spare_collector() -> None:
    """Has the collector pass over what is loaded by now; at the end of a task.

    Done again only when many modules have come since: how often is bounded by how many there are,
    so nothing piles up over days.
    """
    global _modules_seen  # noqa: PLW0603 - of this process
    if TaskContext.get() is None or len(sys.modules) < _modules_seen + _MODULES_MIN:
        return  # in a program of the user's, or done already
    # First, so that no garbage is kept for good.
    gc.collect()
    gc.freeze()
    _modules_seen = len(sys.modules)


def compile_for(size_bytes: int) -> None:
    """Has loops over frames run as machine code, if a task has enough of them to be worth it."""
    if size_bytes >= _COMPILED_BYTES_MIN:
        compiled.load()
