"""Settings of the C library's allocator: freed buffers are kept for the next ones.

By default, glibc returns a buffer of some hundred kilobytes to the kernel when it is freed, and the
kernel clears every page of the next one, which is as much work as filling it. A process that uses
one buffer after the other does better to keep a few.

Owns: these settings. They apply to the whole process, so only programs of Ister call this, never
the library inside of another program.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

from ister.base.limits import MIB

# Numbers of glibc's <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_freed_buffers(
    *, buffer_bytes_max: int = 4 * MIB, kept_bytes_max: int = 32 * MIB, is_one_arena: bool = False
) -> bool:
    """Makes this process keep freed memory; does nothing if the C library is not glibc.

    The defaults are for a server, whose batches and chunks have about a megabyte.

    Args:
        buffer_bytes_max: Larger buffers are returned as soon as they are freed; 32 MiB at most.
        kept_bytes_max: About how much memory is kept, for each of the allocator's arenas.
        is_one_arena: Whether new threads share one arena; for a process with few threads. With an
            arena for each thread, memory is returned in pieces of up to 64 MiB, whatever
            `kept_bytes_max` is.

    Returns:
        Whether freed memory is kept.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, buffer_bytes_max)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes_max)
        if is_one_arena:
            mallopt(_M_ARENA_MAX, 1)
        return True
    return False
