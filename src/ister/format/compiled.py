"""The loops over frames as machine code, for those who move long histories.

Same results as the loops in `ister.format.frame` and `ister.format.message`, several times as
fast and without holding the interpreter lock. They need the extra `ister[fast]` (numba) and isal,
whose crc32 is called directly.

Loading takes about a second, more the very first time on a machine, and would be lost on a program
that reads a few messages. So it is loaded in the background once a process has scanned
`COMPILE_AFTER_BYTES`; a server calls `load` when it starts.

Owns: the compiled loops and when they are loaded. Does not own: what its results mean.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from ister import threads
from ister.format.crc import Buffer
from ister.limits import COMPILE_AFTER_BYTES, FRAME_BODY_BYTES_MAX

__all__ = ["is_loaded", "load", "note_scanned", "publish_times", "scan"]

_log = logging.getLogger("ister.format.compiled")

_FRAME_BYTES_MIN: Final = 17

_lock = threading.Lock()
_scan: Callable[..., tuple[int, int]] | None = None
_publish_times: Callable[..., int] | None = None
_numpy: Any = None
_scanned_bytes = 0
_is_tried = False


def is_loaded() -> bool:
    """Whether scans are compiled by now."""
    return _scan is not None


def note_scanned(size_bytes: int) -> None:
    """Counts bytes scanned in Python, and has the compiled scan loaded when it is worth it."""
    global _scanned_bytes, _is_tried  # noqa: PLW0603 - there is one scan in a process
    _scanned_bytes += size_bytes
    if _scanned_bytes >= COMPILE_AFTER_BYTES and not _is_tried:
        _is_tried = True
        threads.start("ister-kernels", load)


def load() -> bool:
    """Loads the scan, compiling it where no cache is; returns whether it is there."""
    global _scan, _publish_times, _numpy, _is_tried  # noqa: PLW0603
    with _lock:
        _is_tried = True
        if _scan is not None:
            return True
        try:
            _numpy = importlib.import_module("numpy")
            kernel = importlib.import_module("ister.format.scan_kernel")
            compiled: Callable[..., tuple[int, int]] = kernel.scan
            # Read-only arrays are a type of their own: compile for the one that is used.
            probe = _numpy.frombuffer(bytes(64), dtype=_numpy.uint8)
            numbers = _numpy.zeros(4, dtype=_numpy.int64)
            compiled(probe, 0, 0, 1, FRAME_BODY_BYTES_MAX, numbers)
            times: Callable[..., int] = kernel.publish_times
            times(probe, numbers, 64, True, _numpy.zeros(4, dtype=_numpy.int64))
        except ImportError:
            return False
        except Exception:  # noqa: BLE001
            # A platform on which numba or isal's symbol does not work: Python does the same.
            _log.warning("the compiled scan is not available", exc_info=True)
            return False
        _publish_times = times
        _scan = compiled
        return True


def scan(
    buffer: Buffer, position: int, expected_offset: int, end_offset: int
) -> tuple[list[int], int]:
    """The positions of the whole frames from `position` on, and where they end."""
    loaded, numpy = _scan, _numpy
    if loaded is None:
        raise RuntimeError("the compiled scan is not loaded")
    data = numpy.frombuffer(buffer, dtype=numpy.uint8)
    # Pages of this array that no frame needs are never touched.
    starts = numpy.empty(len(data) // _FRAME_BYTES_MIN + 1, dtype=numpy.int64)
    count, end = loaded(data, position, expected_offset, end_offset, FRAME_BODY_BYTES_MAX, starts)
    return starts[:count].tolist(), int(end)


def publish_times(
    buffer: Buffer, starts: list[int], end: int, *, is_varint: bool
) -> list[int] | None:
    """The publish time of each frame's message; None if one of them cannot be read."""
    loaded, numpy = _publish_times, _numpy
    if loaded is None:
        raise RuntimeError("the compiled loops are not loaded")
    times = numpy.empty(len(starts), dtype=numpy.int64)
    count = loaded(
        numpy.frombuffer(buffer, dtype=numpy.uint8),
        numpy.array(starts, dtype=numpy.int64),
        end,
        is_varint,
        times,
    )
    found: list[int] = times.tolist()
    return found if count == len(starts) else None
