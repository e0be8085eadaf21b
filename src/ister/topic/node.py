"""The identity of a data directory, and its record of the processes that opened it.

    .node        the node's identity, created once
    .instances   the processes that opened the directory, one random name each, the newest last

Owns: both files, which are beside the topics' directories and used under the same lock. Does not
own: their use (`ister.bucket.membership`).

What a crash leaves: a temporary file, which the next write replaces, or a recorded instance that
never joined.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Final

from ister.base.limits import KIB
from ister.errors import NotFoundError
from ister.fs.base import FileSystem
from ister.fs.whole_files import read_file, replace_file

_log = logging.getLogger("ister.topic.node")

NODE_NAME: Final = ".node"
INSTANCES_NAME: Final = ".instances"
_NAME_BYTES: Final = 8
_NAME: Final = re.compile(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}")
# Metadata restored from a backup names an earlier instance. If that is not among these, the
# directory is taken for a copy.
_INSTANCES_MAX: Final = 256


class Node:
    """The node of a directory whose lock is held; its identity is created if missing."""

    def __init__(self, fs: FileSystem, root: str, *, is_lasting: bool = True) -> None:
        """Reads the identity.

        `is_lasting`: whether the directory outlives the process; one in memory does not.
        """
        self._fs = fs
        self._root = root
        self.is_lasting = is_lasting
        """Whether another process may have the node later."""
        self.id = self._read_id()
        self.identity = fs.identity(f"{root}/{NODE_NAME}")
        """Identifies the directory among copies of it, until the machine reboots."""
        self.holder = fs.holder()
        """This process in readable form."""

    def instances(self) -> list[str]:
        """The processes that opened the directory, the newest last."""
        try:
            content = self._read(INSTANCES_NAME)
        except NotFoundError:
            return []
        return [name for name in content.split() if _NAME.fullmatch(name)]

    def remember(self, instance: str) -> None:
        """Records a process as the newest one, durably."""
        names = [*self.instances(), instance][-_INSTANCES_MAX:]
        self._write(INSTANCES_NAME, "".join(f"{name}\n" for name in names))

    def _read_id(self) -> str:
        try:
            node = self._read(NODE_NAME).strip()
        except NotFoundError:
            return self._make_id()
        if not _NAME.fullmatch(node):
            _log.error(
                "the node's identity is damaged; creating a new one",
                extra={"path": f"{self._root}/{NODE_NAME}"},
            )
            return self._make_id()
        # The process that created the file may have been killed before syncing the directory.
        self._fs.sync_directory(self._root)
        return node

    def _make_id(self) -> str:
        node = secrets.token_hex(_NAME_BYTES)
        self._write(NODE_NAME, f"{node}\n")
        return node

    def _read(self, name: str) -> str:
        data = read_file(self._fs, f"{self._root}/{name}", 64 * KIB)
        return data.decode("ascii", errors="replace")

    def _write(self, name: str, content: str) -> None:
        replace_file(self._fs, f"{self._root}/{name}", content.encode())


def read_node_id(fs: FileSystem, root: str) -> str | None:
    """The identity of the node that the files below `root` belong to; None without one."""
    try:
        data = read_file(fs, f"{root}/{NODE_NAME}", KIB)
    except NotFoundError:
        return None
    return data.decode("ascii", errors="replace").strip()
