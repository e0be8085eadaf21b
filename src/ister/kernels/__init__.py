"""The compiled loops over frames: compiled in a process of their own, loaded when they are there.

Nothing that serves anybody waits for a compiler: `ister.format` runs its loops in Python, with the
same results, until `current` has the compiled ones. numba compiles for many seconds and keeps the
interpreter lock meanwhile, so it does that in another process, at low priority, once for a version
and a machine; what is left to do here is to load a few files.

    request ─► thread: cache there? ──no──► python -m ister.kernels (under a file lock)
                            │ yes                          │
                            └──► checksums, load, prove ◄──┘ ─► current()

The cache is `$ISTER_CACHE_DIR`, else `$XDG_CACHE_HOME/ister`, else `~/.cache/ister`, with a
directory for each combination of sources, numba, Python and processor. numba's files are pickles: a
directory that belongs to, or can be written by, anybody else is not used, and what is in it is
compared with the checksums that the compiling process wrote last. A process that is killed leaves
no such list.

Owns: where the cache is, who compiles, what is loaded. Does not own: the loops (`ister.format`).
Needs the extra `ister[fast]`; without it, everything runs in Python.
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
from typing import Any, Final

from ister import forks, threads
from ister.errors import DirectoryLockedError, IsterError
from ister.fs.local import LocalFileSystem
from ister.limits import COMPILE_AFTER_BYTES

__all__ = [
    "CACHE_VARIABLE",
    "Kernels",
    "compile_into",
    "current",
    "load",
    "main",
    "note_work",
    "request",
]

_log = logging.getLogger("ister.kernels")

CACHE_VARIABLE: Final = "ISTER_CACHE_DIR"
_MODULES: Final = ("ister.format.scan_kernel", "ister.format.columnar_kernel")
_LIBRARIES: Final = ("numba", "llvmlite", "numpy", "isal")
_SOURCES: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIST_NAME: Final = "compiled.json"
_LOCK_NAME: Final = ".lock"
_MODE: Final = 0o700
_NICENESS: Final = 10
_LOCK_LOOK_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Kernels:
    """The modules whose loops are compiled."""

    scan: Any
    columnar: Any
    numpy: Any


_lock = threading.Lock()
_loading: threading.Thread | None = None
_current: Kernels | None = None
_worked_bytes = 0


@forks.in_child
def _after_fork() -> None:
    global _loading  # noqa: PLW0603 - there is one set of loops in a process
    forks.renew(_lock)
    _loading = None if _current is None else _loading


def current() -> Kernels | None:
    """The compiled loops, once they are there."""
    return _current


def note_work(size_bytes: int) -> None:
    """Counts bytes that went through loops in Python, and asks for compiled ones if they are many.

    A program that reads a few messages has no use for them.
    """
    global _worked_bytes  # noqa: PLW0603
    _worked_bytes += size_bytes
    if _loading is None and _worked_bytes >= COMPILE_AFTER_BYTES:
        request()


def request() -> None:
    """Has the compiled loops loaded, and compiled before if need be. Returns at once."""
    global _loading  # noqa: PLW0603
    with _lock:
        if _loading is None:
            _loading = threads.start("ister-kernels", _bring)


def load(timeout: float | None = None) -> bool:
    """Waits until the compiled loops are there, or cannot be; returns whether they are.

    For whoever measures, and for tasks that are worth the wait. Not for anything that serves.
    """
    request()
    loading = _loading
    if loading is not None and loading is not threading.current_thread():
        loading.join(timeout)
    return _current is not None


# -- in the thread --------------------------------------------------------------------------


def _bring() -> None:
    global _current  # noqa: PLW0603
    if any(importlib.util.find_spec(name) is None for name in _LIBRARIES):
        return
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in {"", "0"}:
        return  # the cache is others'
    try:
        directory = _open_cache()
    except OSError as error:
        _log.warning(
            "compiled loops are not used: no directory to keep them in",
            extra={"error": str(error), "hint": f"set {CACHE_VARIABLE} to a directory of your own"},
        )
        return
    for attempt in range(2):
        if not _is_whole(directory) and not _compile_elsewhere(directory):
            return
        try:
            _current = _build(directory, is_compiling=False)
        except Exception as error:  # noqa: BLE001 - a damaged file, or another library than it says
            # Without the list it is compiled again, now or by the next process.
            _log.warning(
                "compiled loops cannot be loaded", extra={"error": repr(error), "attempt": attempt}
            )
            with suppress(OSError):
                os.unlink(f"{directory}/{_LIST_NAME}")
        else:
            return


def _compile_elsewhere(directory: str) -> bool:
    """Compiles in a process of its own; whether that worked."""
    _log.info("loops are being compiled", extra={"directory": directory})
    # With its parent's paths, so that it compiles the same files; nobody's Ctrl-C ends it.
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
        _log.warning("loops were not compiled", extra={"error": str(error)})
        return False
    if ended.returncode != 0:
        text = ended.stderr.decode(errors="replace").strip()
        _log.warning("loops were not compiled", extra={"error": text[-500:]})
    return ended.returncode == 0


# -- the cache ------------------------------------------------------------------------------


def _open_cache() -> str:
    """The directory for this version and machine, made where missing.

    Raises:
        OSError: It cannot be made, or is not this user's alone.
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
            raise NotADirectoryError(f"{path} is no directory")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to, or can be written by, another user")
    if not os.access(directory, os.W_OK | os.X_OK) and not _is_whole(directory):
        raise PermissionError(f"{directory} cannot be written")
    return directory


def _fingerprint() -> str:
    """What the compiled code depends on."""
    found: list[object] = [sys.version, sys.executable, platform.machine(), _processor()]
    found += [(name, importlib.metadata.version(name)) for name in _LIBRARIES]
    for module in _MODULES:
        path = os.path.join(_SOURCES, *module.split(".")[1:]) + ".py"
        with open(path, "rb") as file:
            # numba goes by the time of the file.
            found += [path, os.stat(path).st_mtime_ns, hashlib.sha256(file.read()).hexdigest()]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor and its instructions, as far as the kernel tells."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first = file.read().partition("\n\n")[0]
        kept = ("vendor_id", "model name", "flags", "Features", "CPU part")
        return "\n".join(line for line in first.splitlines() if line.startswith(kept))
    return platform.processor()


def _files(directory: str) -> dict[str, str]:
    """The checksum of every file that numba has written."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            if name.endswith((".nbi", ".nbc")):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    checksum = hashlib.sha256(file.read()).hexdigest()
                found[os.path.relpath(path, directory)] = checksum
    return found


def _is_whole(directory: str) -> bool:
    """Whether everything is compiled, and as it was when it was."""
    try:
        with open(f"{directory}/{_LIST_NAME}", "rb") as file:
            return bool(json.loads(file.read()) == _files(directory))
    except (OSError, ValueError):
        return False


# -- numba ----------------------------------------------------------------------------------


class _NotCachedError(Exception):
    """A loop would have to be compiled here."""


def _build(directory: str, *, is_compiling: bool) -> Kernels:
    """Makes the loops callable, from the cache alone unless `is_compiling`.

    Raises:
        Exception: A loop is not in the cache, or a library does not do what it should.
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
    scan, columnar = modules
    return Kernels(scan, columnar, importlib.import_module("numpy"))


def _refuse_to_compile(*_: object) -> None:
    raise _NotCachedError("a compiled loop is not in the cache")


@contextmanager
def _numba_cache(numba: Any, directory: str) -> Iterator[None]:  # noqa: ANN401 - no types
    """Has numba look into our directory; a program's own functions keep theirs."""
    kept, numba.config.CACHE_DIR = numba.config.CACHE_DIR, directory
    try:
        yield
    finally:
        numba.config.CACHE_DIR = kept


def compile_into(directory: str) -> None:
    """Compiles the loops, unless another process is at it or has done it; waits for that one.

    Raises:
        IsterError: The directory cannot be locked.
        Exception: numba does not work here.
    """
    fs, pause = LocalFileSystem(), threading.Event()
    while True:
        try:
            lock = fs.lock(f"{directory}/{_LOCK_NAME}")
            break
        except DirectoryLockedError:
            pause.wait(_LOCK_LOOK_SECONDS)
    try:
        if _is_whole(directory):
            return
        # What a killed process has left is overwritten: numba would believe it.
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
    """`python -m ister.kernels`: compiles the loops, and says where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m ister.kernels", description="Compile the loops over frames, for later."
    )
    parser.add_argument("directory", nargs="?", help="where to keep them (default: the cache)")
    given = parser.parse_args()
    os.umask(0o077)
    with suppress(OSError):
        os.nice(_NICENESS)
    try:
        directory = given.directory or _open_cache()
        compile_into(directory)
    except (OSError, IsterError, ImportError) as error:
        sys.exit(f"loops are not compiled: {error}")
    sys.stdout.write(f"compiled loops are in {directory}\n")
