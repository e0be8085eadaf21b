"""Memory use of this process, its JVM and its Python workers.

Reads `/proc`; without one, values are None.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def sample_memory(root: str = "/proc") -> dict[str, int | None]:
    """Returns resident bytes, and the number of workers.

    Workers are Python processes below the JVM, on a cluster only those of this machine.
    """
    own = os.getpid()
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    with suppress(OSError):
        for entry in os.listdir(root):
            if entry.isdigit() and (found := _read_stat(root, int(entry))) is not None:
                names[int(entry)], parent = found
                children.setdefault(parent, []).append(int(entry))
    jvm = next((pid for pid in children.get(own, []) if names[pid] == "java"), None)
    workers = _below(jvm, children) if jvm is not None else []
    sizes = [size for pid in workers if (size := _resident(root, pid)) is not None]
    return {
        "driver_rss_bytes": _resident(root, own),
        "jvm_rss_bytes": _resident(root, jvm) if jvm is not None else None,
        "workers_rss_bytes": sum(sizes) if jvm is not None else None,
        "workers": len(sizes) if jvm is not None else None,
    }


def _below(pid: int, children: dict[int, list[int]]) -> list[int]:
    found: list[int] = []
    waiting = list(children.get(pid, []))
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting += children.get(child, [])
    return found


def _read_stat(root: str, pid: int) -> tuple[str, int] | None:
    """Returns a process's name and parent; None if it has ended."""
    try:
        with open(f"{root}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
        # A name may have spaces and brackets in it.
        name, _, rest = text.partition("(")[2].rpartition(")")
        return name, int(rest.split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _resident(root: str, pid: int) -> int | None:
    try:
        with open(f"{root}/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
