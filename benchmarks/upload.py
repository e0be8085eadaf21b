"""`benchmarks upload`: a backlog goes to the bucket, here a directory.

The limit is a plain streamed copy: the same files read in chunks and written with opendal's writer,
with the chunk size, the number of parts in flight and the size of objects that Ister uses, each
object synced and then its directory. Ister besides checks every frame, gathers what descriptors
say, and commits.

Both sides take turns, each in a fresh process (`python -m benchmarks.upload SIDE FILES TARGET`):
memory that was used before and is free again would hide growth. Growth is counted from before the
upload, with libraries loaded, to the peak. The files are as they were just written: in the page
cache, so that no disk's reading hides what Ister costs.

A hundred topics are uploaded as they are after a restart: a log with the default settings is
opened, and its threads find the backlogs. Growth counts from before the log is opened.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks.copying import copy_files
from benchmarks.filling import fill
from benchmarks.measurement import (
    GIB,
    MESSAGE_BYTES,
    TOPIC,
    PeakMemory,
    Run,
    file_paths,
    filling_child,
    median,
    open_log,
    open_tiered_log,
    stopwatch,
    warm_page_cache,
)
from ister import kernels
from ister.base.limits import MIB
from ister.config import UploaderConfig
from ister.errors import UnavailableError, check
from ister.topic.log import Log

_BACKLOG_BYTES: Final = GIB
_TOPICS: Final = 100
_TOPIC_BYTES: Final = 16 * MIB
_ROUNDS: Final = 5
_RATIO_TARGET: Final = 0.7
_GROWTH_TARGET_MIB: Final = 96.0
_CROWD_GROWTH_TARGET_MIB: Final = 800.0
_OVERDUE_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What one process measured."""

    size_bytes: int
    seconds: float
    growth_mib: float

    @property
    def rate(self) -> float:
        return self.size_bytes / 1e6 / self.seconds


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    size_bytes = run.scaled(_BACKLOG_BYTES)
    topics, topic_bytes = run.scaled(_TOPICS), run.scaled(_TOPIC_BYTES, at_least=MIB)
    run.need_disk(max(size_bytes, topics * topic_bytes) * 9 // 4)
    _measure_backlog(run, size_bytes)
    _measure_crowd(run, topics, topic_bytes)


def _measure_backlog(run: Run, size_bytes: int) -> None:
    run.say("writing")
    files = run.path("one")
    with filling_child(files, "--bytes", str(size_bytes)) as child:
        child.wait()
    copies, uploads = _take_turns(run, files, "copy", "upload")
    shutil.rmtree(files)
    uploaded = max(figures.size_bytes for figures in uploads)
    check(uploaded == copies[0].size_bytes, "an upload moves every byte")
    rates, limits = [f.rate for f in uploads], [f.rate for f in copies]
    run.add(
        f"upload of {size_bytes / MIB:.0f} MiB to a directory, 1 KiB messages",
        median(rates),
        "MB/s",
        limit=median(limits),
        limit_name="opendal's streamed copy of the same files, as many objects, each synced",
        at_least=_RATIO_TARGET,
        on="ratio",
        note=f"median of {_ROUNDS} rounds, {min(rates):.0f} to {max(rates):.0f} "
        f"(limit {min(limits):.0f} to {max(limits):.0f})",
    )
    run.add(
        f"growth of resident memory, upload of {size_bytes / MIB:.0f} MiB",
        max(f.growth_mib for f in uploads),
        "MiB",
        limit=max(f.growth_mib for f in copies),
        limit_name="the same copy",
        at_most=_GROWTH_TARGET_MIB,
        note=f"the most of {_ROUNDS} rounds",
    )


def _measure_crowd(run: Run, topics: int, topic_bytes: int) -> None:
    run.say(f"writing {topics} topics")
    files = run.path("many")
    _start_child("fill-many", files, str(topics), str(topic_bytes))
    copies, uploads = _take_turns(run, files, "copy-many", "upload-many")
    shutil.rmtree(files)
    threads = UploaderConfig().threads
    what = f"{topics} topics of {topic_bytes / MIB:.0f} MiB at once"
    run.add(
        f"growth of resident memory, {what}",
        max(f.growth_mib for f in uploads),
        "MiB",
        limit=max(f.growth_mib for f in copies),
        limit_name=f"the same copy, {threads} files at a time",
        at_most=_CROWD_GROWTH_TARGET_MIB,
        note=f"the most of {_ROUNDS} rounds; default settings, {threads} upload threads",
    )
    rates, limits = [f.rate for f in uploads], [f.rate for f in copies]
    run.add(
        f"upload, {what}, from opening the log",
        median(rates),
        "MB/s",
        limit=median(limits),
        limit_name=f"the same copy, {threads} files at a time",
        note=f"median of {_ROUNDS} rounds, {min(rates):.0f} to {max(rates):.0f} "
        f"(limit {min(limits):.0f} to {max(limits):.0f})",
    )


# -- turns ----------------------------------------------------------------------------------


def _take_turns(run: Run, files: str, *sides: str) -> list[list[_Figures]]:
    """What each side measured in every round."""
    figures: list[list[_Figures]] = [[] for _ in sides]
    size_bytes = sum(os.path.getsize(path) for path in file_paths(files))
    for _ in range(_ROUNDS):
        for side, found in zip(sides, figures, strict=True):
            target = run.path("target")
            os.mkdir(target)
            warm_page_cache(run, size_bytes)
            found.append(_Figures(**json.loads(_start_child(side, files, target))))
            shutil.rmtree(target)
    return figures


def _start_child(*arguments: str) -> str:
    child = subprocess.run(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", "benchmarks.upload", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        raise UnavailableError(f"the process for {arguments[0]} failed", path=arguments[1])
    return child.stdout


# -- in a process of its own ----------------------------------------------------------------


def _open(files: str, target: str, *, engine: str) -> Log:
    return open_tiered_log(
        files,
        {
            "ack": "memory",
            "uploader": {"engine": engine},
            "cloud": {"root": f"{target}/objects"},
            "metadata": {"path": f"{target}/metadata.db"},
        },
    )


def _upload(files: str, target: str) -> _Figures:
    """One cycle of one topic."""
    kernels.load()
    with _open(files, target, engine="none") as log:
        topic = log.topic(TOPIC)
        memory, elapsed = PeakMemory(), stopwatch()
        tiered = topic.upload()
        seconds = elapsed()
        check(tiered.end == topic.watermarks.next, "an upload reaches the end")
        return _Figures(size_bytes=tiered.size_bytes, seconds=seconds, growth_mib=memory.growth_mib)


def _upload_many(files: str, target: str) -> _Figures:
    """Every topic, by the log's own threads."""
    kernels.load()
    import opendal  # noqa: F401, PLC0415 - an optional library; loaded before memory is counted

    size_bytes = sum(os.path.getsize(path) for path in file_paths(files))
    memory, elapsed = PeakMemory(), stopwatch()
    with _open(files, target, engine="auto") as log:
        topics = [log.topic(name) for name in log.topics()]
        while any(topic.watermarks.tiered < topic.watermarks.next for topic in topics):
            if elapsed() > _OVERDUE_SECONDS:
                raise UnavailableError("the uploads did not end in time", path=files)
            time.sleep(_LOOK_SECONDS)
        seconds = elapsed()
        errors = log.metrics.snapshot()["uploader.errors_total"]
        check(errors == 0, "no upload failed")
    return _Figures(size_bytes=size_bytes, seconds=seconds, growth_mib=memory.growth_mib)


def _fill_many(files: str, topics: str, topic_bytes: str) -> None:
    with open_log(files) as log:
        for number in range(int(topics)):
            topic = log.topic(f"/bench/topic-{number}", create=True)
            fill(topic, int(topic_bytes), message_bytes=MESSAGE_BYTES)


def _copy(files: str, target: str) -> _Figures:
    """All files, one after the other, in objects of the size of Ister's."""
    return _measure_copy(target, [file_paths(files)], threads=1)


def _copy_many(files: str, target: str) -> _Figures:
    """Each file for itself, as many at a time as Ister uploads topics."""
    return _measure_copy(
        target, [[path] for path in file_paths(files)], threads=UploaderConfig().threads
    )


def _measure_copy(target: str, groups: list[list[str]], *, threads: int) -> _Figures:
    import opendal  # noqa: PLC0415 - an optional library

    operator = opendal.Operator("fs", root=target)
    settings = UploaderConfig()
    memory, elapsed = PeakMemory(), stopwatch()
    with ThreadPoolExecutor(threads) as pool:
        copies = [
            pool.submit(copy_files, operator, target, f"copy-{number}", group, settings)
            for number, group in enumerate(groups)
        ]
        size_bytes = sum(copy.result() for copy in copies)
    return _Figures(size_bytes=size_bytes, seconds=elapsed(), growth_mib=memory.growth_mib)


_SIDES: Final[dict[str, Callable[..., _Figures | None]]] = {
    "upload": _upload,
    "upload-many": _upload_many,
    "fill-many": _fill_many,
    "copy": _copy,
    "copy-many": _copy_many,
}


def main() -> int:
    """Does what a side does, and prints its figures; see the module header."""
    figures = _SIDES[sys.argv[1]](*sys.argv[2:])
    if figures is not None:
        print(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
