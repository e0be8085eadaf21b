"""`benchmarks readers`: the memory of a hundred readers that lag behind.

Readers start evenly spread over the log, so that each is in a place of its own and nothing is in
the cache, and pull batches in turn. What counts is how far the resident memory of the process
grows, from before the first reader is made to its peak. Each figure comes from a fresh process
(`python -m benchmarks.readers DIR COUNT FIGURE`): memory that was used before and is free again
would hide growth.

The limit is what the readers are for: as many chunks as there are readers, read and held.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from benchmarks.measurement import (
    COPY_BYTES,
    GIB,
    TOPIC,
    Run,
    file_paths,
    filling_child,
    open_log,
    status_kib,
)
from ister import kernels
from ister.base.limits import KIB, MIB
from ister.errors import UnavailableError, check

_LOG_BYTES: Final = 2 * GIB
_READERS: Final = 100
_BATCHES: Final = {
    "batches of a chunk": (4096, 4),
    # Far fewer messages than a chunk has: between two turns a reader holds on to its chunk. After
    # so many turns it is in its third one.
    "small batches, chunks held": (500, 20),
}
"""Messages per batch, and how many batches each reader pulls."""
_LIMIT: Final = "chunks"
_TARGET_MIB: Final = 500.0


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    size_bytes = run.scaled(_LOG_BYTES)
    run.need_disk(size_bytes * 5 // 4)
    run.say("writing")
    with filling_child(run.directory, "--bytes", str(size_bytes)) as child:
        child.wait()
    readers = run.scaled(_READERS)
    limit = _figure_of_child(run.directory, readers, _LIMIT)
    lag = f"{readers} readers over {size_bytes / MIB:.0f} MiB of lag"
    for what in _BATCHES:
        run.add(
            f"growth of resident memory, {lag}, {what}",
            _figure_of_child(run.directory, readers, what),
            "MiB",
            limit=limit,
            limit_name=f"reading and holding {readers} chunks of {COPY_BYTES // MIB} MiB",
            at_most=_TARGET_MIB,
        )


def _figure_of_child(directory: str, readers: int, figure: str) -> float:
    child = subprocess.run(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", "benchmarks.readers", directory, str(readers), figure],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        raise UnavailableError("the reading process failed", path=directory)
    return float(child.stdout)


class _Growth:
    """How far resident memory has grown since this was made."""

    def __init__(self) -> None:
        self._before = status_kib("VmRSS")
        self._peak = self._before

    def sample(self) -> None:
        self._peak = max(self._peak, status_kib("VmRSS"))

    @property
    def mib(self) -> float:
        return (self._peak - self._before) / KIB


def _pull_batches(directory: str, count: int, *, max_messages: int, rounds: int) -> float:
    with open_log(directory) as log:
        topic = log.topic(TOPIC)
        end = topic.watermarks.next
        # Loaded before, because it is the process's, not the readers': some 120 MiB of compiler.
        kernels.load()
        growth = _Growth()
        readers = [topic.reader(end * number // count, end=end) for number in range(count)]
        for _ in range(rounds):
            for reader in readers:
                batch = reader.next_batch(max_messages)
                check(bool(batch) or reader.is_at_end, "a reader behind the tail is given messages")
                growth.sample()
                del batch
        for reader in readers:
            reader.close()
        return growth.mib


def _hold_chunks(directory: str, count: int) -> float:
    paths = file_paths(directory)
    growth = _Growth()
    held: list[bytes] = []
    for number in range(count):
        path = paths[number % len(paths)]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            position = max(0, size - COPY_BYTES) * number // count
            held.append(os.pread(fd, COPY_BYTES, position))
        finally:
            os.close(fd)
        growth.sample()
    return growth.mib


def main() -> int:
    """Prints one figure in MiB; see the module header."""
    directory, readers, figure = sys.argv[1:]
    if figure == _LIMIT:
        print(_hold_chunks(directory, int(readers)))
    else:
        max_messages, rounds = _BATCHES[figure]
        print(_pull_batches(directory, int(readers), max_messages=max_messages, rounds=rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
