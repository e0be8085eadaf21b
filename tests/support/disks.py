"""Real file systems for tests to break: ext4 in a file, small tmpfs. All of it needs root.

Every mount is under a temporary directory and is taken away again, whatever happens.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

# EXT4_IOC_SHUTDOWN, and "do not flush the journal": what is not on the device by now is lost.
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = struct.pack("I", 2)
_COMMAND_SECONDS_MAX = 60


def command(*words: str) -> str:
    """Runs a command.

    Raises:
        OSError: It failed; carries what it said.
    """
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS_MAX
    )
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def unmount(where: Path) -> None:
    """Unmounts, in the end also what is still in use."""
    if not os.path.ismount(where):
        return
    try:
        command("umount", str(where))
    except OSError:
        command("umount", "-l", str(where))


class Disk:
    """An ext4 in a file, mounted through a loop device at `where`."""

    def __init__(self, home: Path, *, size_mib: int, options: tuple[str, ...] = ()) -> None:
        self.image = home / "disk.img"
        self.where = home / "disk"
        self.where.mkdir()
        command("truncate", "-s", f"{size_mib}M", str(self.image))
        # Without the lazy work that the kernel would do in the background afterwards.
        background = "lazy_itable_init=0,lazy_journal_init=0"
        command("mkfs.ext4", "-qF", "-E", background, *options, str(self.image))

    def mount(self) -> None:
        """Mounts it."""
        command("mount", "-o", "loop", str(self.image), str(self.where))

    def cut_power(self) -> None:
        """Stops the file system at once: nothing more reaches the device, not even the journal."""
        fd = os.open(self.where, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Unmounts it."""
        unmount(self.where)


@contextmanager
def mounted_disk(
    *, size_mib: int = 64, options: tuple[str, ...] = (), home: Path | None = None
) -> Iterator[Disk]:
    """A fresh ext4, mounted; gone afterwards.

    Args:
        size_mib: Of the image, which is sparse.
        options: For mkfs.ext4.
        home: The directory that the image lies in.
    """
    with TemporaryDirectory(prefix="ister-disk-", dir=home) as directory:
        disk = Disk(Path(directory), size_mib=size_mib, options=options)
        try:
            disk.mount()
            yield disk
        finally:
            disk.unmount()


@contextmanager
def mounted_tmpfs(*, size_kib: int) -> Iterator[Path]:
    """A tmpfs of that size, mounted; gone afterwards."""
    with TemporaryDirectory(prefix="ister-tmpfs-") as directory:
        where = Path(directory) / "tmpfs"
        where.mkdir()
        command("mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "ister-test", str(where))
        try:
            yield where
        finally:
            unmount(where)


@cache
def why_no_disks() -> str | None:
    """Why `mounted_disk` cannot be used here; None where it can."""
    if os.geteuid() != 0:
        return "needs root, to mount"
    if shutil.which("mkfs.ext4") is None:
        return "needs mkfs.ext4"
    try:
        with mounted_disk(size_mib=8) as disk:
            disk.cut_power()
    except OSError as error:
        return f"needs loop devices and an ext4 that can be shut down: {error}"
    return None


@cache
def why_no_tmpfs() -> str | None:
    """Why `mounted_tmpfs` cannot be used here; None where it can."""
    if os.geteuid() != 0:
        return "needs root, to mount"
    try:
        with mounted_tmpfs(size_kib=64):
            return None
    except OSError as error:
        return f"needs tmpfs: {error}"


@cache
def why_no_strace() -> str | None:
    """Why system calls cannot be made to fail here; None where they can."""
    if shutil.which("strace") is None:
        return "needs strace"
    try:
        command("strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "true")
    except OSError as error:
        return f"needs ptrace: {error}"
    return None


def fill(path: Path, *, leave: int = 0) -> None:
    """Writes a file until its file system is full, and gives `leave` bytes of it back."""
    size = 0
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while written := file.write(bytes(65536)):
            size += written
            if written < 65536:
                break
    # The last page may still have room for single bytes; nothing more is promised.
    if leave:
        os.truncate(path, max(0, path.stat().st_size - leave))


def skip_if(reason: str | None) -> None:
    """Skips the test that calls, with the reason, if there is one."""
    if reason is not None:
        pytest.skip(reason)
