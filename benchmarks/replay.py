"""`benchmarks replay`: reading a cold log from its first message to its last.

The limit is plain reading of the same files in chunks, with a crc32 over every byte and nothing
else. Both sides take turns. Before each turn the files are dropped from the page cache, and as much
memory is touched as the turn is about to fill: on a virtual machine whose free memory goes back to
its host, whoever comes first would pay for that otherwise. Messages are not decoded unless a field
is looked at, so a second figure, without a target, looks at every payload.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.measurement import (
    COPY_BYTES,
    GIB,
    TOPIC,
    Run,
    drop_from_page_cache,
    file_paths,
    filling_child,
    median,
    open_log,
    stopwatch,
    warm_page_cache,
)
from benchmarks.reading import count_messages, read_everything, touch_payloads
from ister import kernels
from ister.format.crc import crc32

_LOG_BYTES: Final = GIB
_ROUNDS: Final = 5
"""Medians: one cold read that met the host's own cache, or another guest, does not count."""
_RATIO_TARGET: Final = 0.5


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    size_bytes = run.scaled(_LOG_BYTES)
    run.need_disk(5 * size_bytes // 2)
    run.say("writing")
    with filling_child(run.directory, "--bytes", str(size_bytes)) as child:
        child.wait()
    paths = file_paths(run.directory)
    # A process that replays for long has it after 64 MiB; a server from the beginning.
    is_compiled = kernels.load()
    total = sum(os.path.getsize(path) for path in paths)
    with open_log(run.directory) as log:
        topic = log.topic(TOPIC)
        sides: dict[str, Callable[[], None]] = {
            "bare": lambda: read_bare(paths),
            "messages": lambda: read_everything(topic, count_messages),
            "payloads": lambda: read_everything(topic, touch_payloads),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(_ROUNDS):
            for side, read in sides.items():
                drop_from_page_cache(paths)
                warm_page_cache(run, total)
                elapsed = stopwatch()
                read()
                rates[side].append(total / 1e6 / elapsed())
    limit = median(rates["bare"])
    limit_name = f"reading the same files in chunks of {COPY_BYTES} bytes, with crc32, equally cold"
    run.add(
        "replay of a cold log, 1 KiB messages",
        median(rates["messages"]),
        "MB/s",
        limit=limit,
        limit_name=limit_name,
        at_least=_RATIO_TARGET,
        on="ratio",
        note=f"{total / 1e6:.0f} MB in {len(paths)} files, median of {_ROUNDS} rounds, "
        f"{min(rates['messages']):.0f} to {max(rates['messages']):.0f} "
        f"(limit {min(rates['bare']):.0f} to {max(rates['bare']):.0f}); every message made, its "
        f"offset checked; scan {'compiled' if is_compiled else 'in Python'}",
    )
    run.add(
        "replay of a cold log, 1 KiB messages, payload touched",
        median(rates["payloads"]),
        "MB/s",
        limit=limit,
        limit_name=limit_name,
    )


def read_bare(paths: Sequence[str]) -> None:
    """Reads files with their crc32, as a limit of any replay."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while chunk := os.read(fd, COPY_BYTES):
                crc32(chunk)
        finally:
            os.close(fd)
