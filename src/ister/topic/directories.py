"""The directories of a log's topics: where they are, and which names are taken.

Owns: the paths below a log's root, and what this process has seen of the names there. The root is
locked, so nobody else makes directories in it: a name is listed once, and after that remembered.
"""

from __future__ import annotations

import threading

from ister.errors import NotFoundError, TopicNameError
from ister.fs.base import FileSystem
from ister.model import TopicName
from ister.wal.directory import WalDirectory

__all__ = ["TopicDirectories"]


class TopicDirectories:
    """See the module header. Thread-safe."""

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

    def note(self, name: TopicName) -> None:
        """Takes note of a topic's directory that is made here."""
        with self._lock:
            for parent, child in self._levels(name):
                self._find(parent, child)
                self._folded[parent][child.casefold()] = child

    def _levels(self, name: TopicName) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.root, name.namespace), (f"{self.root}/{name.namespace}", name.topic)

    def refuse_twin(self, name: TopicName) -> None:
        """Refuses a name that differs from an existing one in case alone.

        The two would be one on a file system that folds case, and a copy of the directory would
        mix them.

        Raises:
            TopicNameError: It does.
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
        """The name in `parent` that is `child` but for its case; `child` if there is none.

        It may be gone by now. `_lock` is held.
        """
        names = self._folded.get(parent)
        if names is None:
            try:
                listed = self._fs.list_directory(parent)
            except NotFoundError:
                listed = []
            names = self._folded[parent] = {one.casefold(): one for one in listed}
        return names.get(child.casefold(), child)
