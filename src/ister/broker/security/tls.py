"""Certificates of the broker's ports, and which addresses need them.

Owns: checking the files of `broker.tls`. Does not own: reading the files again when they change
(`ister.base.certificates`).

New files are used from the next handshake on; open connections stay. A resumed session is not
verified again, so sessions are resumed only for a short time and with the same files: for a second
on the HTTP port, and for a minute on the other ports if clients need a certificate.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from ister.base.certificates import CertificateFiles, Loaded
from ister.base.clock import Clock
from ister.base.positions import format_time
from ister.config import AuthMode, BrokerConfig, ClientAuth, TlsConfig
from ister.errors import ConfigError

_log = logging.getLogger("ister.broker.security.tls")

# gRPC has no option for session tickets; they end with the credentials that it was given. It is not
# given others at every handshake: it replaces them while other threads may be about to use them.
_TICKET_SECONDS: Final = 60.0
# On the HTTP port, which has no tickets. As often as the files are looked at, and not at every
# handshake, since a context takes OpenSSL some time.
_SESSION_SECONDS: Final = 1.0


def is_loopback(host: str) -> bool:
    """Whether a listen address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_exposure(config: BrokerConfig) -> None:
    """Refuses settings that would expose the broker to the network without protection.

    Protected means that callers must authenticate, with credentials sent over TLS, or that only
    clients with a certificate can connect.
    """
    if is_loopback(config.host) or config.allow_insecure:
        return
    has_tls = config.tls.cert_file is not None
    if has_tls and config.tls.client_auth is ClientAuth.REQUIRED:
        return
    if config.auth.mode is AuthMode.NONE:
        raise ConfigError(
            f"broker.host is {config.host!r}, so every client that reaches it has all rights",
            hint="set broker.auth, listen on 127.0.0.1, or set broker.allow_insecure: true",
        )
    if not has_tls:
        raise ConfigError(
            f"broker.host is {config.host!r}, and credentials would be sent in plain text",
            hint="set broker.tls, listen on 127.0.0.1, or, behind a TLS proxy, "
            "set broker.allow_insecure: true",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The broker's certificates and key."""

    certificates: bytes
    key: bytes = field(repr=False)
    authorities: bytes | None
    """CA certificates for clients; None if clients show no certificate."""
    context: ssl.SSLContext = field(repr=False)
    """All of them, for `ssl`."""
    expires_at: float
    """When the broker's certificate expires, in Unix seconds."""


class ServerTls:
    """The certificates in use, reloaded when the files change. Thread-safe.

    `config` is `broker.tls`; `clock` decides whether a certificate has expired.
    """

    def __init__(self, config: TlsConfig, *, clock: Clock) -> None:
        _check_settings(config)
        self._config = config
        self._clock = clock
        self._http: tuple[int, float, ssl.SSLContext] | None = None
        files = {
            "cert_file": config.cert_file,
            "key_file": config.key_file,
            "ca_file": config.ca_file if self.requires_certificate else None,
        }
        self._files = CertificateFiles("broker.tls", files, self._parse, clock=clock, log=_log)

    @classmethod
    def open(cls, config: TlsConfig, *, clock: Clock) -> ServerTls | None:
        """The certificates that the settings name; None if they name none."""
        named = (config.cert_file, config.key_file, config.ca_file)
        if all(path is None for path in named) and config.client_auth is ClientAuth.NONE:
            return None
        return cls(config, clock=clock)

    @property
    def requires_certificate(self) -> bool:
        """Whether clients must show a certificate."""
        return self._config.client_auth is ClientAuth.REQUIRED

    def material(self) -> Loaded[TlsFiles]:
        """The certificates in use; checks the files at most once a second."""
        return self._files.current()

    def client_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for calls to other brokers, with this broker's certificate.

        Other brokers are verified against `ca_file`, or else the system CA store.
        """
        material = self.material().value
        roots = None
        if self._config.ca_file is not None:
            with open(self._config.ca_file, "rb") as file:
                roots = file.read()
        return grpc.ssl_channel_credentials(roots, material.key, material.certificates)

    # -- for the transports -----------------------------------------------------------------

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for `grpc.aio.Server.add_secure_port`, up to date at every handshake."""
        started = self.material()
        taken, taken_at = started.serial, self._clock.monotonic()

        def fetch() -> grpc.ServerCertificateConfiguration | None:  # None for no change
            nonlocal taken, taken_at
            material, now = self.material(), self._clock.monotonic()
            is_old = self.requires_certificate and now - taken_at >= _TICKET_SECONDS
            if material.serial == taken and not is_old:
                return None
            taken, taken_at = material.serial, now
            return _grpc_configuration(material.value)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(started.value),
            fetch,
            require_client_authentication=self.requires_certificate,
        )

    def http_context(self) -> ssl.SSLContext:
        """A context for one connection of an asyncio server, up to date at its handshake.

        OpenSSL resumes sessions of the context that a connection begins with, and `ssl` cannot
        disable its session cache. So connections begin with an empty context that is soon replaced,
        and take the one with the certificates when the client has said hello.
        """
        serial, now = self.material().serial, self._clock.monotonic()
        known = self._http
        if known is not None and known[0] == serial and now - known[1] < _SESSION_SECONDS:
            return known[2]

        def choose(socket: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            socket.context = self.material().value.context

        context = self._make_context()
        # Called at every handshake, whether the client names a host or not.
        context.sni_callback = choose
        self._http = (serial, now, context)
        return context

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET  # TLS 1.2
        context.num_tickets = 0  # TLS 1.3
        if self.requires_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    # -- the files --------------------------------------------------------------------------

    def _parse(self, content: Mapping[str, bytes]) -> TlsFiles:
        config = self._config
        [leaf, *_] = _load_certificates(content["cert_file"], "cert_file", config.cert_file)
        try:
            private = load_pem_private_key(content["key_file"], password=None)
        except TypeError as error:
            raise ConfigError(
                "broker.tls.key_file is encrypted",
                path=config.key_file,
                hint="use a key without a passphrase",
            ) from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                "broker.tls.key_file is not a PEM private key", path=config.key_file
            ) from error
        if _public(private.public_key()) != _public(leaf.public_key()):
            raise ConfigError("broker.tls.key_file does not match cert_file", path=config.key_file)
        self._check_time(leaf)
        authorities = content.get("ca_file")
        if authorities is not None:
            _load_certificates(authorities, "ca_file", config.ca_file)
        context = self._make_context()
        try:
            # `ssl` loads keys only from files.
            context.load_cert_chain(str(config.cert_file), str(config.key_file))
            if authorities is not None:
                context.load_verify_locations(cadata=authorities.decode())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use the certificates of broker.tls: {error}") from error
        return TlsFiles(
            certificates=content["cert_file"],
            key=content["key_file"],
            authorities=authorities,
            context=context,
            expires_at=leaf.not_valid_after_utc.timestamp(),
        )

    def _check_time(self, leaf: x509.Certificate) -> None:
        path = self._config.cert_file
        now = self._clock.now_ns() / 1e9
        if now >= leaf.not_valid_after_utc.timestamp():
            raise ConfigError(
                f"broker.tls.cert_file expired at {format_time(leaf.not_valid_after_utc)}",
                path=path,
            )
        if now < leaf.not_valid_before_utc.timestamp():
            begins = format_time(leaf.not_valid_before_utc)
            raise ConfigError(
                f"broker.tls.cert_file is not valid before {begins}",
                path=path,
                hint="check the clock of this machine",
            )


def _check_settings(config: TlsConfig) -> None:
    if config.cert_file is None or config.key_file is None:
        raise ConfigError(
            "broker.tls needs both cert_file and key_file", hint="set both, or neither"
        )
    if config.client_auth is ClientAuth.REQUIRED and config.ca_file is None:
        raise ConfigError(
            "broker.tls.client_auth is 'required' and broker.tls.ca_file is not set",
            hint="set ca_file to the CA that signs the certificates of clients",
        )


def _load_certificates(content: bytes, name: str, path: str | None) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"broker.tls.{name} has no PEM certificate", path=path) from error


def _public(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _grpc_configuration(material: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificates)], root_certificates=material.authorities
    )
