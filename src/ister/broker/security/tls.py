"""Certificates of the broker's ports, and where it may listen without any.

Owns: reading and checking the files of `broker.tls`, and reading them again when they change. Every
port takes what is new with the next handshake, connections that stand go on.

Files that do not fit together, or have expired, are an error at the start. Later they are an error
in the log, and the ones before stay in use: replacing two files takes a moment in which they do not
fit.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from ister.clock import Clock
from ister.config import AuthMode, BrokerConfig, ClientAuth, TlsConfig
from ister.errors import ConfigError

__all__ = ["Material", "ServerTls", "check_exposure", "is_loopback"]

_log = logging.getLogger("ister.broker.security.tls")

_LOOK_AGAIN_SECONDS: Final = 1.0
_FILE_BYTES_MAX: Final = 4 * 1024 * 1024


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_exposure(config: BrokerConfig) -> None:
    """Refuses to listen beyond this machine without protection, unless told to.

    Protection is that callers have to show credentials, which are sent under TLS; or that only
    holders of a client certificate can connect.

    Raises:
        ConfigError: It would, and `broker.allow_insecure` is not set.
    """
    if is_loopback(config.host) or config.allow_insecure:
        return
    has_tls = config.tls.cert_file is not None
    if has_tls and config.tls.client_auth is ClientAuth.REQUIRED:
        return
    if config.auth.mode is AuthMode.NONE:
        raise ConfigError(
            f"broker.host is {config.host!r}, and whoever can reach it could do everything",
            hint="set broker.auth, listen on 127.0.0.1, or set broker.allow_insecure: true",
        )
    if not has_tls:
        raise ConfigError(
            f"broker.host is {config.host!r}, and credentials would be sent as plain text",
            hint="set broker.tls, listen on 127.0.0.1, or, behind a proxy that does TLS, "
            "set broker.allow_insecure: true",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What the files held."""

    serial: int
    """Another one whenever something changed."""
    certificates: bytes
    key: bytes = field(repr=False)
    authorities: bytes | None
    """Who signs the certificates of clients; None if clients show none."""
    expires_at: float
    """The Unix second at which the broker's certificate ends."""


class ServerTls:
    """The certificates in use. Thread-safe.

    Args:
        config: `broker.tls`.
        clock: What certificates expire by.

    Raises:
        ConfigError: A file is missing, or they do not fit together.
    """

    def __init__(self, config: TlsConfig, *, clock: Clock) -> None:
        _check_settings(config)
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._version = self._stat()
        self._material = self._read(serial=1)
        self._looked_at = clock.monotonic()
        self._said = ""
        self._http: tuple[int, ssl.SSLContext] | None = None

    @classmethod
    def open(cls, config: TlsConfig, *, clock: Clock) -> ServerTls | None:
        """The certificates that the settings name; None if they name none.

        Raises:
            ConfigError: A file is missing, or they do not fit together.
        """
        named = (config.cert_file, config.key_file, config.ca_file)
        if all(path is None for path in named) and config.client_auth is ClientAuth.NONE:
            return None
        return cls(config, clock=clock)

    @property
    def requires_certificate(self) -> bool:
        """Whether clients have to show a certificate."""
        return self._config.client_auth is ClientAuth.REQUIRED

    def material(self) -> Material:
        """What is in use; looks at the files at most once a second."""
        now = self._clock.monotonic()
        if now - self._looked_at >= _LOOK_AGAIN_SECONDS:
            with self._lock:
                if now - self._looked_at >= _LOOK_AGAIN_SECONDS:
                    self._look_again()
                    self._looked_at = now
        return self._material

    # -- for the transports -----------------------------------------------------------------

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For `grpc.aio.Server.add_secure_port`; asks for new files with every handshake."""
        started = self.material()
        taken = started.serial

        def fetch() -> Any:  # noqa: ANN401 - gRPC's own kind, or None for no change
            nonlocal taken
            material = self.material()
            if material.serial == taken:
                return None
            taken = material.serial
            return _grpc_configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(started),
            fetch,
            require_client_authentication=self.requires_certificate,
        )

    def http_context(self) -> ssl.SSLContext:
        """For a server of `ssl` or asyncio; takes new files with every handshake."""

        def choose(socket: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            current = self._http_current()
            if current is not None:
                socket.context = current

        context = self._make_http_context()
        self._http = (self._material.serial, context)
        # Called with every handshake, whether the client names a host or not.
        context.sni_callback = choose
        return context

    def _http_current(self) -> ssl.SSLContext | None:
        serial = self.material().serial
        with self._lock:
            if self._http is None or self._http[0] != serial:
                try:
                    self._http = (serial, self._make_http_context())
                except OSError as error:  # the files have changed again
                    _log.warning("certificates cannot be read", extra={"error": str(error)})
            return None if self._http is None else self._http[1]

    def _make_http_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # There is no reading of keys from memory; the files were checked a moment ago.
        context.load_cert_chain(str(self._config.cert_file), str(self._config.key_file))
        if self.requires_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=(self._material.authorities or b"").decode())
        return context

    # -- the files --------------------------------------------------------------------------

    def _look_again(self) -> None:
        try:
            version = self._stat()
            if version == self._version:
                return
            self._material = self._read(serial=self._material.serial + 1)
        except ConfigError as error:
            # Not said again before the files change again.
            if self._said != str(error):
                _log.error("new certificates are not used", extra={"error": str(error)})
            self._said = str(error)
            return
        self._version = version
        self._said = ""
        _log.info("new certificates are in use", extra={"serial": self._material.serial})

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(
            (found.st_mtime_ns, found.st_size, found.st_ino)
            for found in (_stat(path) for _, path in self._files())
        )

    def _files(self) -> Sequence[tuple[str, str]]:
        config = self._config
        named = (
            ("cert_file", config.cert_file),
            ("key_file", config.key_file),
            ("ca_file", config.ca_file if self.requires_certificate else None),
        )
        return [(name, path) for name, path in named if path is not None]

    def _read(self, *, serial: int) -> Material:
        files = {name: (path, _read(name, path)) for name, path in self._files()}
        cert_path, certificates = files["cert_file"]
        key_path, key = files["key_file"]
        chain = _load_certificates(certificates, "cert_file", cert_path)
        leaf = chain[0]
        try:
            private = load_pem_private_key(key, password=None)
        except TypeError as error:
            raise ConfigError(
                "broker.tls.key_file is encrypted", path=key_path, hint="it has to be plain"
            ) from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                "broker.tls.key_file is not a private key in PEM", path=key_path
            ) from error
        if _public(private.public_key()) != _public(leaf.public_key()):
            raise ConfigError(
                "broker.tls.key_file is not the key of broker.tls.cert_file", path=key_path
            )
        self._check_time(leaf, cert_path)
        authorities = None
        if "ca_file" in files:
            ca_path, authorities = files["ca_file"]
            _load_certificates(authorities, "ca_file", ca_path)
        return Material(
            serial=serial,
            certificates=certificates,
            key=key,
            authorities=authorities,
            expires_at=leaf.not_valid_after_utc.timestamp(),
        )

    def _check_time(self, leaf: x509.Certificate, path: str) -> None:
        now = self._clock.now_ns() / 1e9
        if now >= leaf.not_valid_after_utc.timestamp():
            raise ConfigError(
                f"broker.tls.cert_file has expired at {leaf.not_valid_after_utc.isoformat()}",
                path=path,
            )
        if now < leaf.not_valid_before_utc.timestamp():
            raise ConfigError(
                f"broker.tls.cert_file is not valid before {leaf.not_valid_before_utc.isoformat()}",
                path=path,
                hint="the clock of this machine may be wrong",
            )


def _check_settings(config: TlsConfig) -> None:
    if config.cert_file is None or config.key_file is None:
        raise ConfigError(
            "broker.tls needs both cert_file and key_file", hint="set both of them, or none"
        )
    if config.client_auth is ClientAuth.REQUIRED and config.ca_file is None:
        raise ConfigError(
            "broker.tls.client_auth is 'required' and broker.tls.ca_file is not set",
            hint="it says who signs the certificates of clients",
        )


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise ConfigError(
            f"a file of broker.tls cannot be read: {error.strerror}", path=path
        ) from error


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"broker.tls.{name} cannot be read: {error.strerror}", path=path
        ) from error


def _load_certificates(content: bytes, name: str, path: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"broker.tls.{name} holds no certificate in PEM", path=path) from error


def _public(key: Any) -> bytes:  # noqa: ANN401 - of any algorithm
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def _grpc_configuration(material: Material) -> Any:  # noqa: ANN401 - gRPC's own kind
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificates)], root_certificates=material.authorities
    )
