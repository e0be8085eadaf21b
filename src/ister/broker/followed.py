"""A part of the metadata store that is read again when it changes, and regularly.

Owns: the watch, the thread, and what it logs while the store does not answer. Does not own: what is
read, and how old it may become (whoever follows).

A watch is only a hint: it may report nothing for a while, so there is a regular read as well. What
was read last stays in use while the store does not answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ister.base import threads
from ister.errors import IsterError
from ister.metadata.base import MetadataStore

_PAUSE_SECONDS: Final = 0.05
"""The least time between two reads, however much changes in the store."""


class Followed:
    """Calls `read` in a thread of its own until `close`."""

    def __init__(
        self,
        metadata: MetadataStore,
        prefix: str,
        read: Callable[[bool], None],
        *,
        thread: str,
        seconds: float,
        log: logging.Logger,
        warning: str,
    ) -> None:
        """Reads whenever a key under `prefix` changes, and every so many `seconds`.

        `read` is told whether a change was reported. `warning` is logged once when it fails.
        """
        self._read = read
        self._name, self._seconds = thread, seconds
        self._log, self._warning = log, warning
        self._wake = threading.Event()
        self._is_closed = False
        self._watch = metadata.watch(prefix, lambda _: self._wake.set())
        self._thread = threads.start(thread, self._run)

    def wake(self) -> None:
        """Reads soon."""
        self._wake.set()

    def close(self) -> None:
        """Ends following. May be called twice."""
        self._is_closed = True
        self._wake.set()
        self._watch.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        has_failed, pause = False, threading.Event()
        while True:
            is_hint = self._wake.wait(self._seconds)
            if self._is_closed:
                return
            self._wake.clear()
            try:
                self._read(is_hint)
                has_failed = False
            except IsterError as error:
                if not has_failed and not self._is_closed:
                    self._log.warning(self._warning, extra={"error": str(error)})
                has_failed = True
            except Exception as error:  # noqa: BLE001 - what was read last stays in use
                threads.record(self._name, error)
            pause.wait(_PAUSE_SECONDS)
