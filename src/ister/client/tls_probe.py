"""Finds out whether a port uses TLS, after a connection to it has failed.

If only one of client and port uses TLS, gRPC reports a closed connection. Retrying does not help,
so the port is probed: a TLS handshake without checking
certificates, or the first bytes of HTTP/2 in clear text. Nothing else is sent, no credentials.

Owns: the probe and the error. Does not own: when to probe (`core.network`, `flight`).
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from ister.errors import ConfigError

TLS_HINT: Final = "pass tls=True, or TlsOptions(ca=...) if a private CA has signed its certificate"
PLAIN_HINT: Final = "connect without tls"

_PROBE_SECONDS: Final = 3.0
_SETTINGS: Final = 4
# The preface of HTTP/2 and an empty SETTINGS frame, which a server answers with its own.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_FRAME_HEAD_BYTES: Final = 9


def find_tls_mismatch(address: str, *, is_encrypted: bool) -> ConfigError | None:
    """Returns the error of a client that uses TLS at a port without it, or the other way round.

    None if both agree, the port cannot be reached, or it speaks another protocol. Blocks for some
    seconds at most.
    """
    host, _, port = address.rpartition(":")
    place = host.strip("[]"), int(port)
    if is_encrypted:
        if not _answers_in_clear_text(place):
            return None
        return ConfigError(f"{address} does not use TLS, and this client does", hint=PLAIN_HINT)
    if not _answers_tls(place):
        return None
    return ConfigError(f"{address} uses TLS, and this client does not", hint=TLS_HINT)


def _answers_tls(place: tuple[str, int]) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(place, timeout=_PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=place[0]),
        ):
            return True
    except ssl.SSLError as error:
        # A server that refuses the handshake answers with a TLS alert.
        return "ALERT" in (error.reason or "")
    except (OSError, ValueError):
        return False


def _answers_in_clear_text(place: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(place, timeout=_PROBE_SECONDS) as plain:
            plain.sendall(_PREFACE)
            head = plain.recv(_FRAME_HEAD_BYTES)
    except OSError:
        return False
    return len(head) == _FRAME_HEAD_BYTES and head[3] == _SETTINGS
