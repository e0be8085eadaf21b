"""Tuning of Spark's Python workers: processes that run tasks, plan a read or commit a write.

Loops over frames are normally compiled in the background, once a process has read much; a worker
knows its work in advance, and compiles them first.

PySpark runs a full garbage collection after each task, plan and commit of a reused worker, over a
few hundred thousand objects of our libraries: a tenth of a second for nothing.

A worker processes one chunk after the other, and keeps memory for a few (`ister.base.allocator`).
Arrow's own allocator ignores that setting and returns freed buffers to the kernel, so in a worker
Arrow uses the C library's: an export takes a tenth less processor time, and less memory.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

import pyarrow as pa

from ister import kernels
from ister.base.allocator import keep_freed_buffers
from ister.base.limits import MIB

_MODULES_MIN: Final = 50
_COMPILED_BYTES_MIN: Final = 4 * MIB

_BUFFER_BYTES_MAX: Final = 32 * MIB
_KEPT_BYTES_MAX: Final = 128 * MIB

_modules_seen = 0
_keeps_buffers = False


def spare_collector() -> None:
    """Excludes loaded libraries from garbage collection; called after a task, plan or commit.

    Repeated only if many modules were loaded since, so that nothing accumulates over days.
    """
    global _modules_seen  # noqa: PLW0603 - of this process
    if not _is_worker() or len(sys.modules) < _modules_seen + _MODULES_MIN:
        return  # in a user's program, or done already
    # First, so that no garbage is kept.
    gc.collect()
    gc.freeze()
    _modules_seen = len(sys.modules)


def keep_buffers() -> None:
    """Makes a worker reuse freed buffers, Arrow's too, about 128 MiB.

    Called before a task or commit. Does nothing outside of a worker, or if the C library does not
    support it.
    """
    global _keeps_buffers  # noqa: PLW0603 - of this process
    if _keeps_buffers or not _is_worker():
        return
    _keeps_buffers = True
    if keep_freed_buffers(
        buffer_bytes_max=_BUFFER_BYTES_MAX, kept_bytes_max=_KEPT_BYTES_MAX, is_one_arena=True
    ):
        pa.set_memory_pool(pa.system_memory_pool())


def compile_for(size_bytes: int, *, timeout: float | None = None) -> None:
    """Loads the JIT-compiled loops over frames, if a task reads enough.

    Args:
        size_bytes: How much the task reads.
        timeout: How long to wait, in seconds. Loading takes one or two; the first process on a
            machine compiles the loops, which takes much longer.
    """
    if size_bytes >= _COMPILED_BYTES_MIN:
        kernels.load(timeout)


def _is_worker() -> bool:
    """Returns whether Spark has started this process; then PySpark is loaded."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.startswith("pyspark."):
        return True
    # Another program than PySpark may have started the worker; a task has a context.
    spark = sys.modules.get("pyspark")
    return spark is not None and spark.TaskContext.get() is not None
