"""New API keys and tokens, for the command line and for tests.

A key is shown once, to its creator; what goes into the broker's file is the line with
its digest. Tokens are signed with a key that the caller has: the broker itself needs only what
verifies them.
"""

from __future__ import annotations

import secrets
from typing import Final

import jwt
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from ister.base.clock import Clock, SystemClock
from ister.broker.security.api_keys import API_KEY_PREFIX, ApiKey, digest_of_key, format_line
from ister.broker.security.authentication import JWT_ALGORITHMS
from ister.broker.security.principal import PrincipalKind, check_principal_name
from ister.errors import InvalidRequestError

_KEY_BYTES: Final = 32
_LIFETIME_SECONDS_MAX: Final = 366 * 24 * 3600


def make_api_key(
    name: str,
    *,
    kind: PrincipalKind = PrincipalKind.SERVICE,
    expires_at: float | None = None,
) -> tuple[str, str]:
    """A new API key, and its line for `broker.auth.api_keys_file`.

    `name` is one word; `expires_at` is the Unix second at which the key ends, None if it stays
    good.
    """
    check_principal_name(name)
    if "#" in name or len(name.split()) != 1:
        raise InvalidRequestError("the name of an API key must be one word without '#'")
    key = API_KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    line = format_line(
        ApiKey(name=name, digest=digest_of_key(key), kind=kind, expires_at=expires_at)
    )
    return key, line


def make_token(
    subject: str,
    *,
    algorithm: str,
    key: str | bytes | PrivateKeyTypes,
    issuer: str,
    audience: str | None,
    lifetime_seconds: float,
    kind: PrincipalKind = PrincipalKind.USER,
    clock: Clock | None = None,
) -> str:
    """Creates a token for a principal.

    Args:
        subject: The name of the principal.
        algorithm: As `broker.auth.jwt.algorithm`.
        key: The secret, or the private key in PEM.
        issuer: As `broker.auth.jwt.issuer`.
        audience: As `broker.auth.jwt.audience`; None for a token without.
        lifetime_seconds: How long it is good for: a year at most.
        kind: What stands behind the name.
        clock: Where the time comes from.
    """
    check_principal_name(subject)
    if algorithm not in JWT_ALGORITHMS:
        raise InvalidRequestError(
            f"unknown algorithm {algorithm!r}", hint=f"one of: {', '.join(JWT_ALGORITHMS)}"
        )
    if not 0 < lifetime_seconds <= _LIFETIME_SECONDS_MAX:
        raise InvalidRequestError(
            f"invalid lifetime: {lifetime_seconds} seconds", hint="the maximum is one year"
        )
    now = (clock if clock is not None else SystemClock()).now_ns() / 1e9
    claims = {
        "sub": subject,
        "iss": issuer,
        **({"aud": audience} if audience is not None else {}),
        "iat": int(now),
        "exp": int(now + lifetime_seconds),
        "principal_type": kind.value,
    }
    try:
        return jwt.encode(claims, key, algorithm=algorithm)  # type: ignore[arg-type]
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"the key is not one for {algorithm}") from error
