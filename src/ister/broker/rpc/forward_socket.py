"""The path of the Unix socket by which the native engine forwards calls to the server of grpcio.

The socket is in the data directory, whose lock this process holds; without a data directory it is
in a temporary one. With a umask of 022 or stricter, only the user of the process can connect.

Owns: the path, and removing the socket. Does not own: the listening socket (grpcio binds it).

The path goes through a descriptor of the directory (`/proc/self/fd/N/…`), because a Unix socket's
path has at most 107 bytes.

A crash leaves the socket in the data directory, where the next broker replaces it, or the temporary
directory.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Final

from ister.errors import ConfigError

_NAME: Final = ".grpc.sock"


class SocketFile:
    """The path of the socket, and its removal.

    Without a data directory it is in a temporary one.
    """

    def __init__(self, directory: str | None) -> None:
        self._temporary = _make_temporary() if directory is None else None
        place = directory or self._temporary or ""
        self._descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        self.path = f"/proc/self/fd/{self._descriptor}/{_NAME}"
        """The path; valid in this process only."""
        self._is_closed = False

    def close(self) -> None:
        """Removes the socket; later calls are not forwarded. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            os.unlink(_NAME, dir_fd=self._descriptor)
        os.close(self._descriptor)
        if self._temporary is not None:
            with suppress(OSError):
                os.rmdir(self._temporary)


def _make_temporary() -> str:
    try:
        return tempfile.mkdtemp(prefix="ister-grpc-")
    except OSError as error:
        raise ConfigError(
            "broker.grpc.engine 'native' needs a directory for a socket, and there is neither a "
            f"data directory nor a temporary one: {error.strerror}",
            hint="set TMPDIR to a writable directory, or broker.grpc.engine to 'grpcio'",
        ) from error
