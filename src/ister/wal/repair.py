"""Puts a damaged log into order again whose older part another tier holds.

What no other tier has yet, the frames from `start` on, is copied out of the damaged files, checked
frame by frame, into one new file. The old files are set aside beside it, under names that no log
file has; nothing removes those but a person.

    write wal.<n>.log ─► set the old files aside ─► checkpoint

Each step is durable before the next one, and the new file is the first of them: a crash in between
leaves a log that is still damaged, whose newest file has all that is needed, and the next repair
begins there.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from ister.clock import Clock
from ister.errors import IsterError
from ister.format.checkpoint import WalCheckpoint, WalState
from ister.metrics import Metrics
from ister.wal.directory import WalDirectory, format_log_name
from ister.wal.log import Wal
from ister.wal.reader import WalReader

_log = logging.getLogger("ister.wal.repair")


def rewrite_log(wal: Wal, start: int, *, chunk_bytes: int, clock: Clock, metrics: Metrics) -> int:
    """Replaces the files of a quarantined log by one with the frames from `start` on.

    Nothing is appended to the log meanwhile, and it is closed afterwards. Everything before `start`
    is in the other tier; `chunk_bytes` are copied at once.

    Returns:
        How many frames were copied.

    Raises:
        CorruptDataError: A frame at or after `start` is damaged too; nothing was changed.
        OffsetOutOfRangeError: It is missing; nothing was changed.
        DiskError: The new file could not be written.
    """
    directory = wal.directory
    if directory is None:
        return 0
    old = directory.log_seqs()
    seq = old[-1] + 1 if old else 0
    size = _copy_frames(wal, directory, seq, start, chunk_bytes, clock, metrics)
    fs = directory.fs
    # From the newest on, one after the other: whatever is left of them begins before the new file
    # does, so that what lies behind its first offset is always read from there.
    for number in reversed(old):
        for path in (directory.log_path(number), directory.index_path(number)):
            if fs.exists(path):
                fs.rename(path, f"{path}.aside")
        directory.sync_names()
    end = wal.next
    directory.save_state(
        WalState(
            synced=end,
            synced_position=size,
            codec=wal.settings.codec,
            ack=wal.settings.ack,
            checkpoint=WalCheckpoint(
                start_offset=start,
                last_offset=max(end - 1, 0),
                file_seq=seq,
                file_path=format_log_name(seq),
                active_file_name=format_log_name(seq),
                active_file_first_offset=start if end > start else None,
            ),
        )
    )
    _log.warning(
        "log rewritten; the damaged files are set aside",
        extra={"path": directory.path, "offset": start, "frames": end - start},
    )
    return end - start


def _copy_frames(  # noqa: PLR0917
    wal: Wal,
    directory: WalDirectory,
    seq: int,
    start: int,
    chunk_bytes: int,
    clock: Clock,
    metrics: Metrics,
) -> int:
    """Writes the new file under a temporary name, and gives it its own when it is durable."""
    fs = directory.fs
    path = directory.log_path(seq)
    source = WalReader(wal, chunk_bytes=chunk_bytes, metrics=metrics, clock=clock)
    file = fs.create(f"{path}.tmp")
    position = 0
    try:
        at = start
        while at < wal.next:
            batch = source.fetch(at, wal.next, bytes_max=chunk_bytes)
            data = memoryview(batch.chunk)[batch.starts[0] : batch.end]
            file.write_at(position, [data])
            position += len(data)
            at = batch.next_offset
        file.sync()
    except IsterError:
        with suppress(IsterError):
            fs.remove(f"{path}.tmp")
        raise
    finally:
        file.close()
        source.close()
    fs.rename(f"{path}.tmp", path)
    directory.sync_names()
    return position
