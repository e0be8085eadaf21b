"""TLS to etcd: the certificates of `storage.metadata.tls`, and reasons for failed handshakes.

Owns: reading the certificates, and reading them again when the files change. A key that does not
belong to its certificate is an error at the start. Later it is logged, and the previous files stay
in use: while an operator replaces two files, they do not match for a moment.

gRPC says little about a failed handshake, so it is repeated with `ssl`, which gives the reason.
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

_RELOAD_SECONDS: Final = 1.0
_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_READS_MAX: Final = 3
_EXPLAIN_SECONDS: Final = 2.0

_NOT_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING", "HTTP_REQUEST"}
)
"""OpenSSL's reasons for a peer that does not use TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Certificates and key, as read from the files."""

    serial: int
    """Incremented whenever a file has changed."""
    authorities: bytes | None
    """CA certificates for etcd's members; None for those that come with gRPC."""
    certificates: bytes | None
    key: bytes | None = field(repr=False)
    context: ssl.SSLContext = field(repr=False)
    """The same certificates for `ssl`."""


class ClientTls:
    """The client's certificates, reloaded when the files change. Not thread-safe.

    Args:
        config: `storage.metadata.tls`.
        clock: Measures when to check the files again.

    Raises:
        ConfigError: A file is missing or invalid, or the key does not match the certificate.
    """

    def __init__(self, config: EtcdTlsConfig, *, clock: Clock) -> None:
        if (config.cert_file is None) != (config.key_file is None):
            raise ConfigError(
                "storage.metadata.tls needs both cert_file and key_file, or neither",
                hint="set both if etcd asks for a client certificate",
            )
        self._config = config
        self._clock = clock
        self._version, self._material = self._read(serial=1)
        self._checked_at = clock.monotonic()
        self._logged_error = ""

    def material(self) -> Material:
        """The certificates in use; checks the files at most once a second."""
        now = self._clock.monotonic()
        if now - self._checked_at >= _RELOAD_SECONDS:
            self._checked_at = now
            self._reload()
        return self._material

    def _reload(self) -> None:
        try:
            if self._stat() == self._version:
                return
            self._version, self._material = self._read(serial=self._material.serial + 1)
        except ConfigError as error:
            # Log each error once, not every second.
            if self._logged_error != str(error):
                _log.error(
                    "cannot load new certificates; the previous ones stay in use",
                    extra={"error": str(error)},
                )
            self._logged_error = str(error)
            return
        self._logged_error = ""
        _log.info("new certificates loaded", extra={"serial": self._material.serial})

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
        # `ssl` loads a key only from a file, so the content read here is the content that `ssl`
        # checked only if the files did not change meanwhile.
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
        raise ConfigError("the files of storage.metadata.tls changed while they were read")

    def _make_context(self) -> ssl.SSLContext:
        config = self._config
        try:
            context = ssl.create_default_context(cafile=config.ca_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "storage.metadata.tls.ca_file has no PEM certificate", path=config.ca_file
            ) from error
        context.set_alpn_protocols(["h2"])
        if config.cert_file is None:
            return context

        def refuse() -> NoReturn:
            raise ConfigError(
                "storage.metadata.tls.key_file is encrypted",
                path=config.key_file,
                hint="use a key without a passphrase",
            )

        try:
            context.load_cert_chain(config.cert_file, config.key_file, password=refuse)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    "storage.metadata.tls.key_file does not match cert_file",
                    path=config.key_file,
                ) from error
            raise ConfigError(
                "storage.metadata.tls.cert_file and key_file are not a PEM certificate and its key",
                path=config.cert_file,
            ) from error
        except OSError as error:
            raise _unreadable("cert_file", config.cert_file, error) from error
        return context


async def explain_refusal(target: str, tls: ClientTls | None) -> str | None:
    """The TLS reason why an endpoint refuses connections; None if TLS is not the reason.

    Args:
        target: host:port.
        tls: The certificates that were used; None without TLS.
    """
    if tls is not None:
        context = tls.material().context
    else:
        # Only finds out whether the other side uses TLS; no data is sent.
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
                    return "it uses TLS; use https:// and set storage.metadata.tls"
                # In TLS 1.3 a server rejects a client certificate after the handshake.
                await reader.read(1)
                return None
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is invalid: {error.verify_message}; "
            "set storage.metadata.tls.ca_file to the CA that signed it"
        )
    except ssl.SSLError as error:
        reason = error.reason or ""
        if tls is None:
            # Other errors, such as a request for a certificate, prove that it uses TLS.
            return None if reason in _NOT_TLS else "it uses TLS; use https://"
        if reason in _NOT_TLS:
            return "it does not use TLS; use http:// and remove storage.metadata.tls"
        if tls.material().certificates is None:
            return (
                f"it requires a client certificate ({reason}); "
                "set storage.metadata.tls.cert_file and key_file"
            )
        return (
            f"it rejects the client certificate ({reason}); check who signed "
            "storage.metadata.tls.cert_file and when it expires"
        )
    except (ConnectionResetError, ConnectionAbortedError):
        if tls is None:
            return None
        return "it closed the connection during the TLS handshake; if it has no TLS, use http://"
    except (OSError, TimeoutError):
        return None


def _unreadable(name: str, path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot read storage.metadata.tls.{name}: {error.strerror or error}", path=path
    )


def _read_file(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise _unreadable(name, path, error) from error
