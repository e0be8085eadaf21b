"""Certificate files that are reloaded when they change.

Files that cannot be read or do not fit together are an error at the start. Later, the error is
logged and the previous certificates stay in use: while an operator replaces two files, they do not
match for a moment.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from ister.base.clock import Clock
from ister.errors import ConfigError

_RELOAD_SECONDS: Final = 1.0
_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_READS_MAX: Final = 3

_Value = TypeVar("_Value")
_Version: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Loaded(Generic[_Value]):
    """What the files had when they were last read."""

    serial: int
    """Incremented whenever the files have changed."""
    value: _Value


class CertificateFiles(Generic[_Value]):
    """Reads certificate files, and reads them again when they change. Thread-safe.

    Args:
        section: The settings that name the files, for errors: `broker.tls`.
        files: The path of each setting.
        parse: Makes the value from the content of the files, or raises ConfigError.
        clock: Measures when to check the files again.
        log: Where changes are logged.

    Raises:
        ConfigError: A file cannot be read, or `parse` refuses the content.
    """

    def __init__(
        self,
        section: str,
        files: Mapping[str, str | None],
        parse: Callable[[Mapping[str, bytes]], _Value],
        *,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self._section = section
        self._files = {name: path for name, path in files.items() if path is not None}
        self._parse = parse
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._version, value = self._read()
        self._loaded = Loaded(1, value)
        self._checked_at = clock.monotonic()
        self._logged_error = ""

    def current(self) -> Loaded[_Value]:
        """The certificates in use; checks the files at most once a second."""
        now = self._clock.monotonic()
        if now - self._checked_at >= _RELOAD_SECONDS:
            with self._lock:
                if now - self._checked_at >= _RELOAD_SECONDS:
                    self._checked_at = now
                    self._reload()
        return self._loaded

    def _reload(self) -> None:
        try:
            if self._stat() == self._version:
                return
            self._version, value = self._read()
        except ConfigError as error:
            # Log each error once, not every second.
            if self._logged_error != str(error):
                self._log.error(
                    "cannot load new certificates; the previous ones stay in use",
                    extra={"error": str(error)},
                )
            self._logged_error = str(error)
            return
        self._loaded = Loaded(self._loaded.serial + 1, value)
        self._logged_error = ""
        self._log.info("new certificates loaded", extra={"serial": self._loaded.serial})

    def _read(self) -> tuple[_Version, _Value]:
        # `ssl` loads a key only from a file, so the content read here is the content that `parse`
        # checked only if the files did not change meanwhile.
        for _ in range(_READS_MAX):
            version = self._stat()
            content = {name: self._read_file(name, path) for name, path in self._files.items()}
            value = self._parse(content)
            if self._stat() == version:
                return version, value
        raise ConfigError(f"the files of {self._section} changed while they were read")

    def _stat(self) -> _Version:
        found = []
        for name, path in self._files.items():
            try:
                status = os.stat(path)
            except OSError as error:
                raise self._unreadable(name, path, error) from error
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _read_file(self, name: str, path: str) -> bytes:
        try:
            with open(path, "rb") as file:
                return file.read(_FILE_BYTES_MAX)
        except OSError as error:
            raise self._unreadable(name, path, error) from error

    def _unreadable(self, name: str, path: str, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot read {self._section}.{name}: {error.strerror or error}", path=path
        )
