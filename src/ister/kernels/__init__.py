"""Loads the JIT-compiled loops over frames; compiles them in a separate process.

No request waits for the compiler: `ister.format` runs its loops in Python, with the same results,
until `current` returns the compiled ones. numba compiles for many seconds and holds the interpreter
lock meanwhile, so it runs in another process, at low priority, once per version and machine. That
process continues if this one ends before it, so that the next program finds the loops. This process
only loads a few files, once there is enough work. A server has the loops compiled when it starts,
so that its first large call finds them in the cache.

    prepare ─► thread: in the cache? ──no──► python -m ister.kernels (under a file lock)
    request ─► thread: the same, then checksums, load, prove ─► current()

The cache is `$ISTER_CACHE_DIR`, else `$XDG_CACHE_HOME/ister`, else `~/.cache/ister`, with a
directory for each combination of sources, numba, Python and processor. numba's files are pickles,
so a directory that another user owns or can write to is not used. The compiling process writes a
list of checksums as its last step: without it, or if a file differs, the loops are compiled again.

Owns: the cache, compiling and loading; calls of the loops over frames (`scan`, `publish_times`,
`fill`), several times as fast as their twins in Python and without the interpreter lock. Does not
own: the loops, what their results mean, and calls of those over columns (`ister.format`). Needs the
extra `ister[fast]`; without it, everything runs in Python.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

from ister.base import forks, threads
from ister.base.limits import COMPILE_AFTER_BYTES, FRAME_BODY_BYTES_MAX
from ister.errors import DirectoryLockedError, IsterError
from ister.fs.local import LocalFileSystem

if TYPE_CHECKING:
    from ister.format.arrow.loops import IntArray
    from ister.format.crc import Buffer

__all__ = [
    "CACHE_VARIABLE",
    "Kernels",
    "compile_into",
    "count_work",
    "current",
    "fill",
    "load",
    "main",
    "prepare",
    "publish_times",
    "request",
    "scan",
]

_log = logging.getLogger("ister.kernels")

CACHE_VARIABLE: Final = "ISTER_CACHE_DIR"
_MODULES: Final = ("ister.format.scan_kernel", "ister.format.arrow.kernel")
_COMPILED_INTO: Final = ("ister.format.arrow.kernel_parts", "ister.format.arrow.loops")
"""Other modules whose functions and constants the loops contain."""
_LIBRARIES: Final = ("numba", "llvmlite", "numpy", "isal")
_SOURCES: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIST_NAME: Final = "compiled.json"
_LOCK_NAME: Final = ".lock"
_MODE: Final = 0o700
_NICENESS: Final = 10
_LOCK_LOOK_SECONDS: Final = 0.2
_FRAME_BYTES_MIN: Final = 17


@dataclass(frozen=True, slots=True)
class Kernels:
    """The modules whose loops are compiled."""

    scan: ModuleType
    arrow: ModuleType
    numpy: ModuleType


_lock = threading.Lock()
_compiling = threading.Lock()
"""Held while this process waits for a compiler: there is one at a time."""
_loading: threading.Thread | None = None
_current: Kernels | None = None
_worked_bytes = 0
_is_settled = threading.Event()  # loaded, or not before long


@forks.call_in_child
def _after_fork() -> None:
    global _loading, _is_settled  # noqa: PLW0603 - there is one set of loops in a process
    forks.reset_locks(_lock, _compiling)
    _loading = None if _current is None else _loading
    _is_settled = threading.Event()
    if _current is not None:
        _is_settled.set()


def current() -> Kernels | None:
    """The compiled loops; None until they are loaded."""
    return _current


def count_work(size_bytes: int) -> None:
    """Counts bytes processed by Python loops; requests compiled ones after `COMPILE_AFTER_BYTES`.

    A program that reads a few messages does not need them.
    """
    global _worked_bytes  # noqa: PLW0603
    _worked_bytes += size_bytes
    if _loading is None and _worked_bytes >= COMPILE_AFTER_BYTES:
        request()


def prepare() -> None:
    """Starts a process that compiles the loops missing from the cache. Does not load or block.

    For a server when it starts: a call with many rows does not wait for the compiler.
    """
    threads.start("ister-kernels-prepare", _prepare)


def request() -> None:
    """Starts loading the compiled loops, and compiling them if needed. Does not block."""
    global _loading  # noqa: PLW0603
    with _lock:
        if _loading is None:
            _loading = threads.start("ister-kernels", _load_or_compile)


def load(timeout: float | None = None) -> bool:
    """Waits until the compiled loops are loaded or have failed; returns whether they are loaded.

    For benchmarks and long tasks. A server must not wait: it calls `request`.
    """
    request()
    loading = _loading
    if loading is not None and loading is not threading.current_thread():
        loading.join(timeout)
    return _current is not None


def load_cached(timeout: float) -> bool:
    """Waits until the compiled loops are loaded, if they are in the cache: a second or two.

    Does not wait for the compiler. For calls of a server that process many rows in a thread.
    """
    request()
    _is_settled.wait(timeout)
    return _current is not None


# -- the loops over frames; each call needs `current()` -------------------------------------


def scan(
    buffer: Buffer, position: int, expected_offset: int, end_offset: int
) -> tuple[list[int], int]:
    """The positions of the whole frames from `position` on, and where they end."""
    loaded = _loaded()
    data = _as_bytes(loaded, buffer)
    # Pages of this array that no frame needs are never touched.
    starts = loaded.numpy.empty(data.shape[0] // _FRAME_BYTES_MIN + 1, dtype=loaded.numpy.int64)
    count, end = loaded.scan.scan(
        data, position, expected_offset, end_offset, FRAME_BODY_BYTES_MAX, starts
    )
    return starts[:count].tolist(), int(end)


def publish_times(
    buffer: Buffer, starts: list[int], end: int, *, is_varint: bool
) -> list[int] | None:
    """The publish time of each frame's message; None if one of them cannot be read."""
    loaded = _loaded()
    places = loaded.numpy.array(starts, dtype=loaded.numpy.int64)
    times = loaded.numpy.empty(len(starts), dtype=loaded.numpy.int64)
    count = loaded.scan.publish_times(_as_bytes(loaded, buffer), places, end, is_varint, times)
    found: list[int] = times.tolist()
    return found if count == len(starts) else None


def fill(
    data: bytearray, first_offset: int, count: int, prefix_size: int, *, is_varint: bool
) -> int:
    """Writes offsets and crcs into blank frames; returns where they end."""
    loaded = _loaded()
    frames = loaded.numpy.frombuffer(data, dtype=loaded.numpy.uint8)
    return int(loaded.scan.fill(frames, first_offset, count, prefix_size, is_varint))


def _loaded() -> Kernels:
    if _current is None:
        raise RuntimeError("the compiled loops are not loaded")
    return _current


def _as_bytes(loaded: Kernels, buffer: Buffer) -> IntArray:
    data = loaded.numpy.frombuffer(buffer, dtype=loaded.numpy.uint8)
    # The loops are compiled for read-only arrays.
    data.flags.writeable = False
    return cast("IntArray", data)


# -- in the thread --------------------------------------------------------------------------


def _load_or_compile() -> None:
    try:
        _load()
    finally:
        _is_settled.set()


def _prepare() -> None:
    directory = _find_cache()
    if directory is not None:
        _compile_missing(directory)


def _load() -> None:
    global _current  # noqa: PLW0603
    directory = _find_cache()
    if directory is None:
        return
    for attempt in range(2):
        if not _is_complete(directory):
            _is_settled.set()
            if not _compile_missing(directory):
                return
        try:
            _current = _build(directory, is_compiling=False)
        except Exception as error:  # noqa: BLE001 - damaged files raise anything
            # Without its list the cache is compiled again, now or by the next process.
            _log.warning(
                "cannot load compiled loops", extra={"error": repr(error), "attempt": attempt}
            )
            with suppress(OSError):
                os.unlink(f"{directory}/{_LIST_NAME}")
        else:
            return


def _find_cache() -> str | None:
    """The cache directory; None if compiled loops cannot be used here."""
    if any(importlib.util.find_spec(name) is None for name in _LIBRARIES):
        return None
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in {"", "0"}:
        return None  # numba is disabled
    try:
        return _open_cache()
    except OSError as error:
        _log.warning(
            "compiled loops are not used: the cache directory is not usable",
            extra={
                "error": str(error),
                "hint": f"set {CACHE_VARIABLE} to a directory that only this user can write to",
            },
        )
        return None


def _compile_missing(directory: str) -> bool:
    """Compiles what is not in the cache; returns whether it is complete."""
    with _compiling:
        return _is_complete(directory) or _compile_elsewhere(directory)


def _compile_elsewhere(directory: str) -> bool:
    """Compiles in a separate process; returns whether that succeeded."""
    _log.info("compiling loops", extra={"directory": directory})
    # With this process's paths, so that it compiles the same files. Its own process group keeps
    # Ctrl-C away from it.
    command = [sys.executable, "-m", "ister.kernels", directory]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ended = subprocess.run(  # noqa: S603 - our own interpreter and module
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
            check=False,
        )
    except OSError as error:
        _log.warning("cannot compile loops", extra={"error": str(error)})
        return False
    if ended.returncode != 0:
        text = ended.stderr.decode(errors="replace").strip()
        _log.warning("cannot compile loops", extra={"error": text[-500:]})
    return ended.returncode == 0


# -- the cache ------------------------------------------------------------------------------


def _open_cache() -> str:
    """The cache directory for this version and machine, created if missing.

    Raises:
        OSError: It cannot be created, or another user owns it or can write to it.
    """
    home = os.path.expanduser("~")
    root = os.environ.get(CACHE_VARIABLE) or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "ister"
    )
    directory = os.path.join(os.path.abspath(root), f"kernels-{_fingerprint()}")
    os.makedirs(os.path.dirname(root) or ".", exist_ok=True)
    for path in (os.path.abspath(root), directory):
        with suppress(FileExistsError):
            os.mkdir(path, _MODE)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{path} is not a directory")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} is owned or writable by another user")
    if not os.access(directory, os.W_OK | os.X_OK) and not _is_complete(directory):
        raise PermissionError(f"{directory} is not writable")
    return directory


def _fingerprint() -> str:
    """A hash of everything that the compiled code depends on."""
    found: list[object] = [sys.version, sys.executable, platform.machine(), _processor()]
    found += [(name, importlib.metadata.version(name)) for name in _LIBRARIES]
    for module in (*_MODULES, *_COMPILED_INTO):
        path = os.path.join(_SOURCES, *module.split(".")[1:]) + ".py"
        with open(path, "rb") as file:
            # numba's index includes the modification time.
            found += [path, os.stat(path).st_mtime_ns, hashlib.sha256(file.read()).hexdigest()]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor and its instruction sets, from /proc/cpuinfo if available."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first = file.read().partition("\n\n")[0]
        kept = ("vendor_id", "model name", "flags", "Features", "CPU part")
        return "\n".join(line for line in first.splitlines() if line.startswith(kept))
    return platform.processor()


def _files(directory: str) -> dict[str, str]:
    """The checksum of every file that numba has written, by relative path."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            if name.endswith((".nbi", ".nbc")):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    checksum = hashlib.sha256(file.read()).hexdigest()
                found[os.path.relpath(path, directory)] = checksum
    return found


def _is_complete(directory: str) -> bool:
    """Whether the cache is complete and matches its checksums."""
    try:
        with open(f"{directory}/{_LIST_NAME}", "rb") as file:
            return bool(json.loads(file.read()) == _files(directory))
    except (OSError, ValueError):
        return False


# -- numba ----------------------------------------------------------------------------------


class _NotCachedError(Exception):
    """A loop is not in the cache and would have to be compiled in this process."""


def _build(directory: str, *, is_compiling: bool) -> Kernels:
    """Creates the callable loops, from the cache only unless `is_compiling`.

    Raises:
        Exception: A loop is not in the cache, or numba fails.
    """
    numba = importlib.import_module("numba")
    modules = [importlib.import_module(name) for name in _MODULES]
    with _numba_cache(numba, directory):
        for module in modules:
            for name, (function, signature) in module.LOOPS.items():
                loop = numba.njit(cache=True, nogil=True)(function)
                if not is_compiling:
                    loop._compiler.compile = _refuse_to_compile  # noqa: SLF001 - numba has no other way
                loop.compile(signature)
                loop.disable_compile()
                setattr(module, name, loop)
    for module in modules:
        module.prove()
    scan, arrow = modules
    return Kernels(scan, arrow, importlib.import_module("numpy"))


def _refuse_to_compile(*_: object) -> None:
    raise _NotCachedError("a compiled loop is not in the cache")


@contextmanager
def _numba_cache(numba: ModuleType, directory: str) -> Iterator[None]:
    """Points numba's cache to our directory meanwhile; the program's own functions keep theirs."""
    kept, numba.config.CACHE_DIR = numba.config.CACHE_DIR, directory
    try:
        yield
    finally:
        numba.config.CACHE_DIR = kept


def compile_into(directory: str) -> None:
    """Compiles the loops into a cache directory; waits if another process is compiling them.

    Raises:
        IsterError: The directory cannot be locked.
        Exception: numba fails.
    """
    fs, pause = LocalFileSystem(), threading.Event()
    while True:
        try:
            lock = fs.lock(f"{directory}/{_LOCK_NAME}")
            break
        except DirectoryLockedError:
            pause.wait(_LOCK_LOOK_SECONDS)
    try:
        if _is_complete(directory):
            return
        # Remove the files of a killed process: numba would use them.
        for name in _files(directory):
            os.unlink(os.path.join(directory, name))
        _build(directory, is_compiling=True)
        temporary = f"{directory}/{_LIST_NAME}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(_files(directory), file)
        fs.rename(temporary, f"{directory}/{_LIST_NAME}")
    finally:
        lock.release()


def main() -> None:
    """`python -m ister.kernels`: compiles the loops and prints the cache directory."""
    parser = argparse.ArgumentParser(
        prog="python -m ister.kernels", description="Compile the loops over frames into the cache."
    )
    parser.add_argument("directory", nargs="?", help="cache directory")
    given = parser.parse_args()
    os.umask(0o077)
    with suppress(OSError):
        os.nice(_NICENESS)
    try:
        directory = given.directory or _open_cache()
        compile_into(directory)
    except (OSError, IsterError, ImportError) as error:
        sys.exit(f"cannot compile loops: {error}")
    sys.stdout.write(f"compiled loops are in {directory}\n")
