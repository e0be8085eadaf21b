"""`benchmarks recover`: how long opening a topic takes, after a clean end and after a crash.

The log is filled by a process of its own, which then goes on appending at full speed until it is
killed with SIGKILL in the middle of a file: its checkpoint is up to a second old, everything behind
it has to be looked at, and the tail may be torn. That state is opened once as it is and then again
with the checkpoint and the indexes put back as the crash left them. Then the same log is opened
after a clean close. Files are cold each time, except for the very first opening, which finds them
as the killed process left them.

The limit is opening an empty topic. The target is on the difference: it must not grow with history.
"""

from __future__ import annotations

import os
import shutil
import time
from statistics import median
from typing import Final

from benchmarks.measurement import (
    GIB,
    TOPIC,
    Run,
    drop_from_page_cache,
    file_paths,
    filling_child,
    open_log,
    stopwatch,
)
from ister.base.limits import KIB, MIB
from ister.errors import check
from ister.fs.local import LocalFileSystem
from ister.wal.directory import WalDirectory

_LOG_BYTES: Final = 4 * GIB
_LARGE_MESSAGE_BYTES: Final = 64 * KIB
"""Most of the log: quick to write, and opening reads none of it."""
_SMALL_TAIL_BYTES: Final = 256 * MIB
"""The end of the log, which opening does read, is in 1 KiB messages."""
_DISK_FACTOR: Final = 1.5
"""What the process appends until it is killed comes on top."""
_KILL_AFTER_SECONDS: Final = 1.5
"""Longer than the time between two checkpoints."""
_KILL_AT_BYTES: Final = 320 * MIB
"""The active file is so large when the process is killed: rotation makes a checkpoint, so early in
a file there would be nothing to look at."""
_KILL_OVERDUE_SECONDS: Final = 4.0
"""Several files are filled in this time; on a disk too slow for that, any moment has to do."""
_ROUNDS: Final = 3
_TARGET_SECONDS: Final = 0.5


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    size_bytes = run.scaled(_LOG_BYTES)
    run.need_disk(int(size_bytes * _DISK_FACTOR))
    empty = run.path("empty")
    os.mkdir(empty)
    with open_log(empty) as log:
        log.topic(TOPIC, create=True)
    large = run.path("large")
    os.mkdir(large)
    run.say(f"writing {size_bytes / GIB:.1f} GiB")
    with filling_child(
        large,
        "--bytes",
        str(size_bytes),
        "--message-bytes",
        str(_LARGE_MESSAGE_BYTES),
        "--small-tail-bytes",
        str(run.scaled(_SMALL_TAIL_BYTES)),
        "--forever",
    ) as child:
        _wait_for_moment(large, run)
        check(child.poll() is None, "the process is alive when it is killed")
        child.kill()
        child.wait()
    total = sum(os.path.getsize(path) for path in file_paths(large))
    behind = _bytes_behind_checkpoint(large)

    saved = {path: f"{path}.saved" for path in _hints(large)}
    for path, copy in saved.items():
        shutil.copyfile(path, copy)
    scanned = [_open_seconds(large)]
    for _ in range(_ROUNDS):
        for path in _hints(large):
            os.unlink(path)
        for path, copy in saved.items():
            shutil.copyfile(copy, path)
        _drop(large)
        scanned.append(_open_seconds(large))

    clean: list[float] = []
    nothing: list[float] = []
    for _ in range(_ROUNDS):
        _drop(large)
        clean.append(_open_seconds(large))
        _drop(empty)
        nothing.append(_open_seconds(empty))
    limit = median(nothing)
    crash = (
        f"{behind / MIB:.0f} MiB behind the checkpoint, the slowest of {len(scanned)}, "
        f"the first, with warm files, took {scanned[0]:.3f} s"
    )
    for name, value, note in (
        ("after a clean close", median(clean), f"median of {_ROUNDS}"),
        ("after kill -9", max(scanned), crash),
    ):
        run.add(
            f"opening a log of {total / GIB:.1f} GiB {name}",
            value,
            "s",
            limit=limit,
            limit_name="opening an empty log",
            at_most=limit + _TARGET_SECONDS,
            note=f"{note}; the target is {_TARGET_SECONDS} s more than the limit",
        )


def _wait_for_moment(directory: str, run: Run) -> None:
    """Returns when the process that writes there is to be killed."""
    if run.is_quick:
        time.sleep(_KILL_AFTER_SECONDS / 5)
        return
    time.sleep(_KILL_AFTER_SECONDS)
    elapsed = stopwatch()
    while elapsed() < _KILL_OVERDUE_SECONDS:
        size = os.path.getsize(file_paths(directory)[-1])
        if _KILL_AT_BYTES <= size < _KILL_AT_BYTES * 5 // 4:
            return
        time.sleep(0.005)


def _bytes_behind_checkpoint(directory: str) -> int:
    """How much of the active file the checkpoint does not vouch for."""
    active = file_paths(directory)[-1]
    topic, name = os.path.split(active)
    state = WalDirectory(LocalFileSystem(), topic).load_state()
    is_known = state is not None and state.checkpoint.active_file_name == name
    known = state.synced_position if state is not None and is_known else 0
    return os.path.getsize(active) - known


def _hints(directory: str) -> list[str]:
    """What opening replaces: the checkpoint and the indexes."""
    return [*file_paths(directory, ".ckpt"), *file_paths(directory, ".idx")]


def _drop(directory: str) -> None:
    drop_from_page_cache(file_paths(directory, ""))


def _open_seconds(directory: str) -> float:
    """Seconds to open the log and its topic; the log is closed again."""
    elapsed = stopwatch()
    log = open_log(directory)
    try:
        log.topic(TOPIC)
        return elapsed()
    finally:
        log.close()
