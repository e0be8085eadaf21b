"""The directories of a log's topics: their paths and the names in use.

Owns: the paths below a log's root, and a cache of the names there. The root is locked, so no other
process creates directories in it: each directory is listed once.
"""

from __future__ import annotations

import threading

from ister.errors import NotFoundError, TopicNameError
from ister.fs.base import FileSystem
from ister.model import TopicName
from ister.wal.directory import WalDirectory


class TopicDirectories:
    """Paths of topics, and a cache of the names that exist. Thread-safe."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self.root = root
        self._fs = fs
        self._lock = threading.Lock()
        # By directory: each name in it by its casefolded form.
        self._folded: dict[str, dict[str, str]] = {}
        self._durable: set[str] = set()

    def of(self, name: TopicName) -> WalDirectory:
        """A topic's directory, which need not exist."""
        path = f"{self.root}/{name.namespace}/{name.topic}"
        return WalDirectory(self._fs, path, durable=self._durable)

    def add(self, name: TopicName) -> None:
        """Adds a topic's directory, which the caller creates, to the cache."""
        with self._lock:
            for parent, child in self._levels(name):
                self._find(parent, child)
                self._folded[parent][child.casefold()] = child

    def _levels(self, name: TopicName) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.root, name.namespace), (f"{self.root}/{name.namespace}", name.topic)

    def refuse_twin(self, name: TopicName) -> None:
        """Refuses a name that differs from an existing one only in case.

        On a case-insensitive file system the two would be one directory, so copying the log there
        would mix them.

        Raises:
            TopicNameError: The name differs only in case.
        """
        with self._lock:
            for parent, child in self._levels(name):
                existing = self._find(parent, child)
                if existing != child and self._fs.exists(f"{parent}/{existing}"):
                    shown = f"{parent}/{child}".removeprefix(self.root)
                    raise TopicNameError(
                        f"{shown!r} differs from an existing name in case alone",
                        hint=f"the existing one is {existing!r}",
                    )

    def _find(self, parent: str, child: str) -> str:
        """The name in `parent` that equals `child` except for case; `child` if there is none.

        The directory may have been removed since. `_lock` is held.
        """
        names = self._folded.get(parent)
        if names is None:
            try:
                listed = self._fs.list_directory(parent)
            except NotFoundError:
                listed = []
            names = self._folded[parent] = {one.casefold(): one for one in listed}
        return names.get(child.casefold(), child)
