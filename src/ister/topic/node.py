"""The node that a data directory is, and the processes that had it.

    .node        the node's identity, made once
    .instances   the processes that had the directory, one random name each, the newest last

Owns: both files, which lie beside the topics' directories and are used under the same lock. Does
not own: what they are good for (`ister.tier.membership`).

What a crash leaves: a temporary file, which the next one overwrites, or an instance on record that
never joined.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Final

from ister.errors import NotFoundError
from ister.fs.base import FileSystem
from ister.limits import KIB

__all__ = ["INSTANCES_NAME", "NODE_NAME", "Node"]

_log = logging.getLogger("ister.topic.node")

NODE_NAME: Final = ".node"
INSTANCES_NAME: Final = ".instances"
_NAME_BYTES: Final = 8
_NAME: Final = re.compile(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}")
# Metadata that is restored from a backup names one of these, or the directory looks like a copy.
_INSTANCES_MAX: Final = 256


class Node:
    """The node of a directory whose lock is held; made where missing."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._root = root
        self.id = self._read_id()
        self.identity = fs.identity(f"{root}/{NODE_NAME}")
        """What tells the directory from its copies until the machine starts again."""
        self.holder = fs.holder()
        """This process, for people."""

    def instances(self) -> list[str]:
        """The processes that had the directory, the newest last."""
        try:
            content = self._read(INSTANCES_NAME)
        except NotFoundError:
            return []
        return [name for name in content.split() if _NAME.fullmatch(name)]

    def remember(self, instance: str) -> None:
        """Makes a process the newest one, durably.

        Raises:
            CapacityError: The disk is full.
            DiskError: The file cannot be written.
        """
        names = [*self.instances(), instance][-_INSTANCES_MAX:]
        self._write(INSTANCES_NAME, "".join(f"{name}\n" for name in names))

    def _read_id(self) -> str:
        try:
            node = self._read(NODE_NAME).strip()
        except NotFoundError:
            return self._make_id()
        if not _NAME.fullmatch(node):
            _log.error(
                "the node's identity is damaged; it gets a new one",
                extra={"path": f"{self._root}/{NODE_NAME}"},
            )
            return self._make_id()
        # Whoever made it may have been killed before its name was durable.
        self._fs.sync_directory(self._root)
        return node

    def _make_id(self) -> str:
        node = secrets.token_hex(_NAME_BYTES)
        self._write(NODE_NAME, f"{node}\n")
        return node

    def _read(self, name: str) -> str:
        file = self._fs.open_read(f"{self._root}/{name}")
        try:
            return file.read_at(0, 64 * KIB).decode("ascii", errors="replace")
        finally:
            file.close()

    def _write(self, name: str, content: str) -> None:
        path = f"{self._root}/{name}"
        temporary = f"{path}.tmp"
        file = self._fs.create(temporary)
        try:
            file.write_at(0, [content.encode()])
            file.sync()
        finally:
            file.close()
        self._fs.rename(temporary, path)
        self._fs.sync_directory(self._root)
