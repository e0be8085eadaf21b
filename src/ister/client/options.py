"""How a client reaches brokers: addresses, encryption, credentials.

Values only, checked when they are made. A token is never part of a text that is made here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from ister.errors import ConfigError, InvalidRequestError

Token = str | Callable[[], str]
"""A bearer token or an API key; or what gives a fresh one whenever something is opened."""

_PORT_MAX: Final = 65535
_ADDRESS_HINT: Final = "use HOST:PORT, with http:// or https:// before it if needed"
_HOST: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_SCHEMES: Final = {"http": False, "https": True, "grpc": False, "grpc+tls": True}
# Where a broker listens that was not told by which name it is reached.
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,8192}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """How connections are encrypted. All of it in PEM, as the text itself or as the path of a file.

    Raises:
        ConfigError: There is a certificate without its key, or the other way round.
    """

    ca: bytes | str | None = None
    """CA of the broker's certificate; gRPC's default CAs if None."""
    cert: bytes | str | None = None
    """The client's own certificate, for brokers that ask for one."""
    key: bytes | str | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name in the broker's certificate, if it is not the one in the address."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("cert and key must be set together")

    def texts(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Returns the CA, the certificate and the key, read from files where needed.

        Raises:
            ConfigError: A file cannot be read.
        """
        return _read(self.ca), _read(self.cert), _read(self.key)


def _read(source: bytes | str | None) -> bytes | None:
    if source is None or isinstance(source, bytes):
        return source
    try:
        with open(source, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error


def parse_addresses(
    addresses: str | Sequence[str], tls: TlsOptions | bool | None
) -> tuple[list[str], TlsOptions | None]:
    """Brokers to ask first, as `host:port`, and how to talk to them.

    Args:
        addresses: One or more, each `host:port` or with `http://` or `https://` before it; commas
            may stand between them.
        tls: As given; None leaves it to the addresses.

    Raises:
        InvalidRequestError: One is not an address, or they contradict each other or `tls`.
    """
    if tls is not None and not isinstance(tls, TlsOptions | bool):
        raise InvalidRequestError(f"tls must be TlsOptions or a bool, not {type(tls).__name__}")
    texts = addresses.split(",") if isinstance(addresses, str) else addresses
    if not isinstance(texts, Sequence):
        raise InvalidRequestError(
            f"invalid broker address {shown_address(addresses)}", hint=_ADDRESS_HINT
        )
    parsed = [parse_url(text.strip() if isinstance(text, str) else text) for text in texts]
    if not parsed:
        raise InvalidRequestError("no address", hint="host:port of a broker")
    said = {is_encrypted for _, is_encrypted in parsed if is_encrypted is not None}
    if tls is not None:
        said.add(tls is not False)
    if len(said) > 1:
        raise InvalidRequestError(
            "addresses and tls contradict each other", hint="http:// means without TLS"
        )
    options = tls if isinstance(tls, TlsOptions) else None
    if True in said and options is None:
        options = TlsOptions()
    return [address for address, _ in parsed], options


def parse_url(text: str) -> tuple[str, bool | None]:
    """An address as `host:port`, and whether it is said to be encrypted.

    Raises:
        InvalidRequestError: Not an address.
    """
    try:
        has_scheme = "://" in text
        parts = urlsplit(text if has_scheme else f"//{text}")
        port = parts.port
        host = parts.netloc.rpartition(":")[0]
    except (ValueError, AttributeError, TypeError):
        port, host, parts, has_scheme = None, "", urlsplit(""), False
    is_known = not has_scheme or parts.scheme in _SCHEMES
    if not (is_known and port and _HOST.fullmatch(host) and parts.path in ("", "/")):
        raise InvalidRequestError(
            f"invalid broker address {shown_address(text)}", hint=_ADDRESS_HINT
        )
    return f"{host}:{port}", _SCHEMES[parts.scheme] if has_scheme else None


def shown_address(text: object) -> str:
    """What is not an address, for an error: without what may be a password or a token."""
    shown = re.sub(r"(?s)^.*@", "***@", str(text))
    shown = re.sub(r"(?s)[?#].*", "?***", shown)
    # What should be the port may be the password of a user whose host is missing.
    shown = re.sub(r"(?s)(?<=:)(?!//|[0-9]*(?:/|$)).*", "***", shown.replace("://", "\0"))
    return f"{shown.replace(chr(0), '://')!r:.80}"


def reachable(url: str, through: str) -> str:
    """The address of another port of a broker that is reached by `through`.

    A broker without an advertised name reports itself as on this machine.
    """
    address, _ = parse_url(url)
    host, _, port = address.rpartition(":")
    if host in _LOOPBACK:
        return f"{through.rpartition(':')[0]}:{port}"
    return address


def parse_token(token: str) -> str:
    """Refuses what cannot be sent as a token, without repeating it.

    Raises:
        ConfigError: It cannot.
    """
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ConfigError("invalid token: use printable ASCII without spaces")
    return token
