"""TLS to etcd: the files of `storage.metadata.tls`, and why a connection was refused.

Owns: reading the certificates, and reading them again when the files change. Files that do not fit
together are an error at the start. Later they are an error in the log, and the ones before stay in
use: replacing two files takes a moment in which they do not fit.

gRPC says little about a handshake that failed, so it is done once more by `ssl`, which does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

from ister.clock import Clock
from ister.config import EtcdTlsConfig
from ister.errors import ConfigError

__all__ = ["ClientTls", "Material", "explain_refusal"]

_log = logging.getLogger("ister.metadata.etcd_tls")

_LOOK_AGAIN_SECONDS: Final = 1.0
_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_READS_MAX: Final = 3
_EXPLAIN_SECONDS: Final = 2.0

_NOT_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING", "HTTP_REQUEST"}
)
"""What OpenSSL calls an answer that is not one of TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What the files held."""

    serial: int
    """Another one whenever something changed."""
    authorities: bytes | None
    """Who signs the certificates of etcd's members; None for those that gRPC trusts."""
    certificates: bytes | None
    key: bytes | None = field(repr=False)
    context: ssl.SSLContext = field(repr=False)
    """The same for `ssl`."""


class ClientTls:
    """The certificates in use. Used by one thread at a time.

    Args:
        config: `storage.metadata.tls`.
        clock: Says when to look at the files again.

    Raises:
        ConfigError: A file is missing, or they do not fit together.
    """

    def __init__(self, config: EtcdTlsConfig, *, clock: Clock) -> None:
        if (config.cert_file is None) != (config.key_file is None):
            raise ConfigError(
                "storage.metadata.tls needs both cert_file and key_file, or none of them",
                hint="set both where etcd asks for a client certificate",
            )
        self._config = config
        self._clock = clock
        self._version, self._material = self._read(serial=1)
        self._looked_at = clock.monotonic()
        self._said = ""

    def material(self) -> Material:
        """What is in use; looks at the files at most once a second."""
        now = self._clock.monotonic()
        if now - self._looked_at >= _LOOK_AGAIN_SECONDS:
            self._looked_at = now
            self._look_again()
        return self._material

    def _look_again(self) -> None:
        try:
            if self._stat() == self._version:
                return
            self._version, self._material = self._read(serial=self._material.serial + 1)
        except ConfigError as error:
            # Not said again before it is something else.
            if self._said != str(error):
                _log.error("new certificates are not used", extra={"error": str(error)})
            self._said = str(error)
            return
        self._said = ""
        _log.info("new certificates are in use", extra={"serial": self._material.serial})

    def _files(self) -> Sequence[tuple[str, str]]:
        named = (
            ("ca_file", self._config.ca_file),
            ("cert_file", self._config.cert_file),
            ("key_file", self._config.key_file),
        )
        return [(name, path) for name, path in named if path is not None]

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for name, path in self._files():
            try:
                status = os.stat(path)
            except OSError as error:
                raise _unreadable(name, path, error) from error
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _read(self, *, serial: int) -> tuple[tuple[tuple[int, int, int], ...], Material]:
        # `ssl` takes a key from a file alone, so what it checked is what is used only if the files
        # are the same before and after.
        for _ in range(_READS_MAX):
            version = self._stat()
            content = {name: _read_file(name, path) for name, path in self._files()}
            context = self._make_context()
            if self._stat() == version:
                return version, Material(
                    serial=serial,
                    authorities=content.get("ca_file"),
                    certificates=content.get("cert_file"),
                    key=content.get("key_file"),
                    context=context,
                )
        raise ConfigError("the files of storage.metadata.tls keep changing")

    def _make_context(self) -> ssl.SSLContext:
        config = self._config
        try:
            context = ssl.create_default_context(cafile=config.ca_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "storage.metadata.tls.ca_file holds no certificate in PEM", path=config.ca_file
            ) from error
        context.set_alpn_protocols(["h2"])
        if config.cert_file is None:
            return context

        def refuse() -> NoReturn:
            raise ConfigError(
                "storage.metadata.tls.key_file is encrypted",
                path=config.key_file,
                hint="it has to be plain",
            )

        try:
            context.load_cert_chain(config.cert_file, config.key_file, password=refuse)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    "storage.metadata.tls.key_file is not the key of cert_file",
                    path=config.key_file,
                ) from error
            raise ConfigError(
                "storage.metadata.tls.cert_file and key_file are not a certificate and its key, "
                "in PEM",
                path=config.cert_file,
            ) from error
        except OSError as error:
            raise _unreadable("cert_file", config.cert_file, error) from error
        return context


async def explain_refusal(target: str, tls: ClientTls | None) -> str | None:
    """Why an endpoint takes no connection, as far as TLS is the reason; None if it is not.

    Args:
        target: host:port.
        tls: What it was tried with; None without TLS.
    """
    if tls is not None:
        context = tls.material().context
    else:
        # Only to see whether the other side speaks TLS. Nothing is sent.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(_EXPLAIN_SECONDS):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=context, server_hostname=host
            )
            try:
                if tls is None:
                    return "it speaks TLS; write https:// and set storage.metadata.tls"
                # A server that does not like our certificate says so after the handshake.
                await reader.read(1)
                return None
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is not accepted: {error.verify_message}; "
            "storage.metadata.tls.ca_file says who signs it"
        )
    except ssl.SSLError as error:
        reason = error.reason or ""
        if tls is None:
            # It may have asked for a certificate, which it does in TLS alone.
            return None if reason in _NOT_TLS else "it speaks TLS; write https://"
        if reason in _NOT_TLS:
            return "it does not speak TLS; write http:// and take storage.metadata.tls out"
        if tls.material().certificates is None:
            return (
                f"it refuses a client without a certificate ({reason}); "
                "set storage.metadata.tls.cert_file and key_file"
            )
        return (
            f"it refuses the certificate of this client ({reason}); look at "
            "storage.metadata.tls.cert_file: who has signed it, and until when it is valid"
        )
    except (ConnectionResetError, ConnectionAbortedError):
        if tls is None:
            return None
        return "it breaks off the TLS handshake; it may not speak TLS: then write http://"
    except (OSError, TimeoutError):
        return None


def _unreadable(name: str, path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"storage.metadata.tls.{name} cannot be read: {error.strerror or error}", path=path
    )


def _read_file(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise _unreadable(name, path, error) from error
