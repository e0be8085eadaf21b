"""Whether the native engine can be used on this machine.

Owns: the version of pygrpc-native that Ister is tested with, and what it needs of the machine. Does
not own: the choice of the engine (`server`).

The package reserves as much address space as a message announces, up to 4 GiB, before any of it
arrives. Where the kernel does not grant that, the process aborts. So this is tried beforehand.
"""

from __future__ import annotations

import mmap
from importlib import metadata
from pathlib import Path
from typing import Final

NATIVE_VERSION: Final = "0.5.0"

_PACKAGE: Final = "pygrpc-native"
# The longest message that gRPC can announce, and its prefix.
_MESSAGE_BYTES_MAX: Final = 2**32 + 5
_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_NEVER_OVERCOMMIT: Final = "2"


def native_refusal() -> str | None:
    """Returns why the native engine cannot be used here; None if it can."""
    try:
        version = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{_PACKAGE} is not installed; install ister[native]"
    if version != NATIVE_VERSION:
        return f"{_PACKAGE} must be {NATIVE_VERSION}, not {version}; install ister[native]"
    try:
        if _OVERCOMMIT.read_text().strip() == _NEVER_OVERCOMMIT:
            return "a message may reserve 4 GiB of address space, and vm.overcommit_memory is 2"
        mmap.mmap(-1, _MESSAGE_BYTES_MAX, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        return f"4 GiB of address space cannot be reserved: {error.strerror}"
    return None
