"""Who calls: SASL/PLAIN, SASL/OAUTHBEARER, or a client certificate.

    PLAIN          the name of an API key and the key; or `token` and a JWT
    OAUTHBEARER    a JWT, or an API key

Owns: what credentials look like in Kafka's requests. Does not own: what they are worth; the guard
judges them, as on every port.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from kio.schema.errors import ErrorCode

from ister.base.clock import Clock
from ister.broker.kafka.protocol import ApiKey, Entity, Request
from ister.broker.security.guard import Caller, Guard
from ister.errors import UnauthenticatedError

MECHANISMS: Final = ("PLAIN", "OAUTHBEARER")
TOKEN_USER: Final = "token"  # noqa: S105 - the name that says that a token follows
_LIFETIME_MAX: Final = timedelta(days=24)


class Login:
    """The authentication of one connection."""

    def __init__(self, guard: Guard, *, peer: str, certificate: bytes | None, clock: Clock) -> None:
        self._guard = guard
        self._peer = peer
        self._clock = clock
        self._mechanism: str | None = None
        self.caller: Caller | None = None
        """Who calls; None until that is known."""
        if not guard.is_on or (certificate is not None and guard.takes_certificates):
            self.caller = guard.enter({}, certificate=certificate, peer=peer, action="connect")

    def handshake(self, request: Request) -> Entity:
        """Answers SaslHandshake: whether a mechanism can be used."""
        mechanisms = MECHANISMS if self._guard.is_on else ()
        self._mechanism = name = request.body.mechanism
        if name not in mechanisms:
            self._mechanism = None
        code = ErrorCode.none if self._mechanism else ErrorCode.unsupported_sasl_mechanism
        return request.make("SaslHandshakeResponse", error_code=code, mechanisms=mechanisms)

    async def authenticate(self, request: Request) -> Entity:
        """Answers SaslAuthenticate; a refusal takes some time."""
        code, message, lifetime = ErrorCode.none, None, timedelta(0)
        try:
            caller = self.caller = self._enter(request.body.auth_bytes)
        except UnauthenticatedError as error:
            self.caller = None
            await self._guard.pause_refusal()
            code, message = ErrorCode.sasl_authentication_failed, error.message
        else:
            if caller.principal.expires_at is not None:
                left = caller.principal.expires_at - self._clock.now_ns() / 1e9
                lifetime = min(_LIFETIME_MAX, timedelta(milliseconds=max(1, int(left * 1000))))
        return request.make(
            "SaslAuthenticateResponse",
            error_code=code,
            error_message=message,
            auth_bytes=b"",
            session_lifetime=lifetime,
        )

    def _enter(self, data: bytes) -> Caller:
        try:
            user, secret = self._parse(data)
        except UnauthenticatedError as error:
            self._record(error)
            raise
        caller = self._guard.enter(
            {"authorization": f"Bearer {secret}"},
            peer=self._peer,
            action=ApiKey.SASL_AUTHENTICATE.name,
        )
        refusal: UnauthenticatedError | None = None
        if user not in (None, TOKEN_USER, caller.principal.name):
            refusal = UnauthenticatedError("the credentials are not those of this user")
        elif self.caller is not None and str(self.caller.principal) != str(caller.principal):
            refusal = UnauthenticatedError("a connection belongs to one principal")
        if refusal is not None:
            self._record(refusal)
            raise refusal
        return caller

    def _parse(self, data: bytes) -> tuple[str | None, str]:
        if self._mechanism is None:
            raise UnauthenticatedError("SaslHandshake comes first")
        return _parse_plain(data) if self._mechanism == "PLAIN" else _parse_bearer(data)

    def _record(self, error: UnauthenticatedError) -> None:
        action = ApiKey.SASL_AUTHENTICATE.name
        self._guard.record_refused_login(error, peer=self._peer, action=action)


def _parse_plain(data: bytes) -> tuple[str | None, str]:
    """User and secret of `authorization id NUL user NUL secret`."""
    parts = data.split(b"\0")
    if len(parts) != 3 or not parts[1] or not parts[2]:
        raise UnauthenticatedError("the credentials are not of the form that PLAIN has")
    acts_as, user, secret = (_text(part) for part in parts)
    if acts_as not in ("", user):
        raise UnauthenticatedError("nobody acts for others")
    return user, secret


def _parse_bearer(data: bytes) -> tuple[str | None, str]:
    """The token of `n,a=…,^Aauth=Bearer …^A…^A^A`."""
    for part in data.split(b"\x01")[1:]:
        name, _, value = part.partition(b"=")
        if name == b"auth":
            scheme, _, token = _text(value).partition(" ")
            if scheme.lower() == "bearer" and token.strip():
                return None, token.strip()
    raise UnauthenticatedError("the credentials are not of the form that OAUTHBEARER has")


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UnauthenticatedError("the credentials are not text") from None
    if "\n" in text or "\r" in text:
        raise UnauthenticatedError("the credentials are not one line")
    return text
