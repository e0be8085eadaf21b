"""What Python workers of Spark do once, whatever task comes first.

Loops over frames are compiled in the background where a process has read much; a worker's work is
known beforehand, so it does that before it begins.

PySpark has the garbage collector go through everything behind each task of a worker that is used
again, and our libraries are a few hundred thousand objects: a tenth of a second for nothing.

The C library gives each buffer of some megabytes back to the system and asks for the next one, and
the system clears every page of it: as much work as reading the file. A worker that goes from chunk
to chunk keeps a few.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from typing import Final

from pyspark import TaskContext

from ister import kernels
from ister.limits import MIB

__all__ = ["compile_for", "keep_buffers", "spare_collector"]

_MODULES_MIN: Final = 50
_COMPILED_BYTES_MIN: Final = 4 * MIB

# Numbers of glibc's <malloc.h>, and the most that it takes for the second one.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_BUFFER_BYTES_MAX: Final = 32 * MIB
_KEPT_BYTES_MAX: Final = 128 * MIB

_modules_seen = 0
_keeps_buffers = False


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


def keep_buffers() -> None:
    """Has this process keep freed buffers for the next ones, about 128 MiB; before a task.

    Elsewhere than in a worker, and where the C library cannot be asked for that, nothing changes.
    """
    global _keeps_buffers  # noqa: PLW0603 - of this process
    if _keeps_buffers or TaskContext.get() is None:
        return
    _keeps_buffers = True
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _BUFFER_BYTES_MAX)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES_MAX)


def compile_for(size_bytes: int) -> None:
    """Has loops over frames run as machine code, if a task has enough of them to be worth it."""
    if size_bytes >= _COMPILED_BYTES_MIN:
        kernels.load()
