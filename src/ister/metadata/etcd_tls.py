"""TLS to etcd: the certificates of `storage.metadata.tls`, and reasons for failed handshakes.

Does not own: reading the files again when they change (`ister.base.certificates`).

gRPC says little about a failed handshake, so it is repeated with `ssl`, which gives the reason.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

from ister.base.certificates import CertificateFiles, Loaded
from ister.base.clock import Clock
from ister.config import EtcdTlsConfig
from ister.errors import ConfigError

_log = logging.getLogger("ister.metadata.etcd_tls")

_EXPLAIN_SECONDS: Final = 2.0

_NOT_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING", "HTTP_REQUEST"}
)
"""OpenSSL's reasons for a peer that does not use TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdTlsFiles:
    """Certificates and key, as read from the files."""

    authorities: bytes | None
    """CA certificates for etcd's members; None for those that come with gRPC."""
    certificates: bytes | None
    key: bytes | None = field(repr=False)
    context: ssl.SSLContext = field(repr=False)
    """The same certificates for `ssl`."""


class ClientTls:
    """The client's certificates, reloaded when the files change.

    `config` is `storage.metadata.tls`; `clock` measures when to check the files again.

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
        files = {name: getattr(config, name) for name in ("ca_file", "cert_file", "key_file")}
        self._files = CertificateFiles(
            "storage.metadata.tls", files, self._parse, clock=clock, log=_log
        )

    def material(self) -> Loaded[EtcdTlsFiles]:
        """The certificates in use; checks the files at most once a second."""
        return self._files.current()

    def _parse(self, content: Mapping[str, bytes]) -> EtcdTlsFiles:
        return EtcdTlsFiles(
            authorities=content.get("ca_file"),
            certificates=content.get("cert_file"),
            key=content.get("key_file"),
            context=self._make_context(),
        )

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
                    "storage.metadata.tls.key_file does not match cert_file", path=config.key_file
                ) from error
            raise ConfigError(
                "storage.metadata.tls.cert_file and key_file are not a PEM certificate and its key",
                path=config.cert_file,
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot read storage.metadata.tls.cert_file: {error.strerror or error}",
                path=config.cert_file,
            ) from error
        return context


async def explain_refusal(target: str, tls: ClientTls | None) -> str | None:
    """The TLS reason why an endpoint refuses connections; None if TLS is not the reason.

    `target` is host:port; `tls` has the certificates that were used, None without TLS.
    """
    if tls is not None:
        context = tls.material().value.context
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
        if tls.material().value.certificates is None:
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
