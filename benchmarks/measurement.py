"""What all benchmarks share: results, quantiles, scratch space, warm and cold page cache, children.

Owns: the record of a result and how a target is judged; temporary directories and their removal.
Does not own: what is measured.

Every figure stands beside a limit: the same work without Ister, measured in the same run, because
absolute figures move by a factor of two from run to run. Rounds of both are interleaved and medians
are compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, Literal, TypeVar

from ister.base.limits import KIB, MIB
from ister.config import load_config
from ister.errors import CapacityError, UnavailableError
from ister.fs.base import FileSystem
from ister.topic.log import Log

__all__ = [
    "COPY_BYTES",
    "GIB",
    "MESSAGE_BYTES",
    "TOPIC",
    "PeakMemory",
    "Result",
    "Run",
    "drop_from_page_cache",
    "file_paths",
    "filling_child",
    "median",
    "open_log",
    "open_tiered_log",
    "payloads",
    "quantile",
    "spread",
    "status_kib",
    "stopwatch",
    "take_turns",
    "warm_page_cache",
]

T = TypeVar("T")

GIB: Final = 1024 * MIB
MESSAGE_BYTES: Final = KIB
"""The size that all targets are stated for."""
TOPIC: Final = "/bench/one"
COPY_BYTES: Final = 4 * MIB
"""What plain reads and writes move at a time: Ister's own chunk, and fast on every disk."""
_PAYLOADS: Final = 64
"""Different payloads in turn: no run is flattered by one object that stays in the first cache."""
_QUICK_FACTOR: Final = 20
"""`--quick` is for tests: everything that scales is this much smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure. `target` is for the value or for its ratio to the limit, as `target_on` says."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """The same without Ister, in the same unit."""
    limit_name: str | None = None
    ratio: float | None = None
    target: float | None = None
    target_on: Literal["value", "ratio"] | None = None
    sense: Literal["at least", "at most"] | None = None
    met: bool | None = None
    note: str | None = None


class Run:
    """One benchmark under way: its directory, its size, its results."""

    def __init__(self, name: str, directory: str, *, is_quick: bool, progress: bool) -> None:
        self.name = name
        self.directory = directory
        self.is_quick = is_quick
        self.results: list[Result] = []
        self.skipped: list[tuple[str, str]] = []
        """What was not measured, and why."""
        self._progress = progress

    @classmethod
    @contextmanager
    def begin(cls, name: str, parent: str | None, *, is_quick: bool) -> Iterator[Run]:
        """A run in a new directory below `parent`, which is removed at the end.

        Raises:
            UnavailableError: The directory cannot be made.
        """
        try:
            directory = tempfile.mkdtemp(prefix=f"ister-bench-{name}-", dir=parent)
        except OSError as error:
            raise UnavailableError(
                f"no directory for data: {error.strerror}",
                path=parent,
                hint="--dir names one that exists and can be written to",
            ) from error
        try:
            yield cls(name, directory, is_quick=is_quick, progress=sys.stderr.isatty())
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def scaled(self, amount: int, *, at_least: int = 1) -> int:
        """An amount of work, smaller in a quick run."""
        return max(at_least, amount // _QUICK_FACTOR) if self.is_quick else amount

    def path(self, name: str) -> str:
        """A path in the run's directory."""
        return os.path.join(self.directory, name)

    def say(self, text: str) -> None:
        """Progress, for a person who waits at a terminal."""
        if self._progress:
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def need_disk(self, size_bytes: int) -> None:
        """Makes sure that so much fits.

        Raises:
            CapacityError: It does not.
        """
        free = shutil.disk_usage(self.directory).free
        if free < size_bytes:
            raise CapacityError(
                f"the benchmark needs {size_bytes / GIB:.1f} GiB, {free / GIB:.1f} GiB are free",
                path=self.directory,
                hint="--dir names a directory on a larger disk, --quick needs a twentieth",
            )

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        limit: float | None = None,
        limit_name: str | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        on: Literal["value", "ratio"] = "value",
        ratio: float | None = None,
        note: str | None = None,
    ) -> None:
        """Records a figure; `at_least` or `at_most` is its target.

        `ratio` is value / limit by default; where rounds are paired, pass their `median_ratio`.
        """
        if ratio is None and limit:
            ratio = value / limit
        target = at_least if at_least is not None else at_most
        judged = value if on == "value" else ratio
        met: bool | None = None
        if target is not None and judged is not None:
            met = judged >= target if at_least is not None else judged <= target
        has_target = target is not None
        self.results.append(
            Result(
                name=name,
                value=_rounded(value),
                unit=unit,
                limit=None if limit is None else _rounded(limit),
                limit_name=limit_name,
                ratio=None if ratio is None else _rounded(ratio),
                target=None if target is None else _rounded(target),
                target_on=on if has_target else None,
                sense=("at least" if at_least is not None else "at most") if has_target else None,
                met=met,
                note=note,
            )
        )
        self.say(f"{name}: {value:.4g} {unit}")

    def skip(self, name: str, why: str) -> None:
        """Records that something was not measured."""
        self.skipped.append((name, why))
        self.say(f"{name}: skipped: {why}")

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "bench": self.name,
            "quick": self.is_quick,
            "results": [asdict(result) for result in self.results],
            "skipped": [{"name": name, "why": why} for name, why in self.skipped],
        }


def _rounded(value: float) -> float:
    """Four digits: more than any of this is worth."""
    return float(f"{value:.4g}")


def quantile(values: Sequence[float], q: float) -> float:
    """The value that a share of `q` does not exceed, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def stopwatch() -> Callable[[], float]:
    """A stop watch: seconds since it was made."""
    started = time.perf_counter()
    return lambda: time.perf_counter() - started


def take_turns(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each side returns in every round; the first one is the last in every other round."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(list(sides)))
        for side in order:
            found[side].append(sides[side]())
    return found


def median_ratio(values: Sequence[float], limits: Sequence[float]) -> float:
    """The median of the rounds' ratios, value / limit.

    The two sides of a round run right after each other, so a machine that is busy for a while slows
    both.
    """
    return median([value / limit for value, limit in zip(values, limits, strict=True)])


def spread(values: Sequence[float]) -> str:
    """The least and the most, for a note."""
    return f"{min(values):.4g} to {max(values):.4g}"


def payloads(count: int, size_bytes: int = MESSAGE_BYTES) -> list[bytes]:
    """So many payloads, of which a few are different objects."""
    distinct = [os.urandom(size_bytes) for _ in range(_PAYLOADS)]
    return (distinct * (count // _PAYLOADS + 1))[:count]


def open_log(directory: str, *, fs: FileSystem | None = None, ack: str = "memory") -> Log:
    """A log with the default settings in `directory`; topics get `ack` unless they name one."""
    config = load_config(
        {
            "storage": {
                "mode": "local_only",
                "ack": ack,
                "wal": {"dir": os.path.join(directory, "wal")},
            }
        }
    )
    return Log(config, fs=fs)


def open_tiered_log(directory: str, storage: Mapping[str, Any]) -> Log:
    """A log over the files that `open_log` uses for `directory`, with a bucket.

    Args:
        directory: Where the files are, or will be.
        storage: Sections of settings; what they leave out has its default.
    """
    wal = {**storage.get("wal", {}), "dir": os.path.join(directory, "wal")}
    return Log(load_config({"storage": {**storage, "wal": wal}}))


# -- memory ---------------------------------------------------------------------------------


class PeakMemory:
    """How far the resident memory of this process has grown since this was made, at its peak.

    The page cache is not part of it. Where the kernel does not let go of an earlier peak, that one
    counts: the figure is then too high, never too low.
    """

    def __init__(self) -> None:
        # Since Linux 4.0, "5" sets the peak back to what is resident now.
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
            peak.write("5")
        self._before = status_kib("VmRSS")

    @property
    def growth_mib(self) -> float:
        """The growth so far."""
        # Memory that was given back meanwhile is no growth.
        return max(0.0, (status_kib("VmHWM") - self._before) / KIB)


def status_kib(field: str, pid: int | str = "self") -> int:
    """A field of a process's memory, such as `VmRSS`, in KiB."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    raise UnavailableError(f"the kernel does not report {field}", path=status.name)


# -- page cache -----------------------------------------------------------------------------


def warm_page_cache(run: Run, size_bytes: int) -> None:
    """Has the kernel touch as much memory as a measurement is about to fill.

    On a fresh virtual machine the first touch of a page is a fault to the host, and a write to the
    page cache runs ten times slower than ever after: what would be measured is the host.
    """
    path = run.path("warm")
    block = bytes(COPY_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(0, size_bytes, COPY_BYTES):
            os.write(fd, block)
    finally:
        os.close(fd)
        os.unlink(path)


def file_paths(directory: str, suffix: str = ".log") -> list[str]:
    """The files below `directory` whose names end so, in the order in which they were written."""
    found = [
        os.path.join(root, name)
        for root, _, names in os.walk(directory)
        for name in names
        if name.endswith(suffix)
    ]
    return sorted(found, key=lambda path: (len(path), path))


def drop_from_page_cache(paths: Sequence[str]) -> None:
    """Has the next reads of these files come from the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# -- children -------------------------------------------------------------------------------


@contextmanager
def filling_child(directory: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that fills a log; see `benchmarks.filling`. Ready when this yields.

    Of its own because a process that has written gigabytes has a heap and threads that would show
    in what is measured afterwards, and because it can be killed.

    Raises:
        UnavailableError: It could not do it; its standard error says why.
    """
    child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", "benchmarks.filling", directory, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if child.stdout is None or child.stdout.readline().strip() != "ready":
            raise UnavailableError("the writing process failed", path=directory)
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
