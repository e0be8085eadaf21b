"""From what a call brings along to the principal that makes it.

    authorization: Bearer <JWT>       signed with the one algorithm and key of the settings
    authorization: Bearer ist_…       an API key; also as x-api-key: ist_…
    authorization: Broker …           the secret of the cluster: another broker, without rights
    a client certificate              where broker.auth.mtls_principal is on and TLS checked it;
                                      its name is the one that `read_certificate` gives

Credentials that are shown and wrong are an error, even if others would do: nothing is tried in
turn. No other header means anything, `x-danube-internal-broker` among them.

A JWT needs exp, iss, aud and sub, and all of them are checked; its header chooses nothing. Danube's
tools issue tokens without aud: without `broker.auth.jwt.audience`, a token must have none. Time is
the clock's that was passed in. Errors name what is wrong and never quote what was shown.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias, TypeGuard

import jwt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from cryptography.x509.oid import NameOID

from ister.base.clock import Clock
from ister.base.model import JsonObject
from ister.broker.security.api_keys import API_KEY_PREFIX, ApiKeyFile
from ister.broker.security.principal import (
    ANONYMOUS,
    Principal,
    PrincipalKind,
    check_principal_name,
    parse_principal_kind,
)
from ister.config import AuthConfig, AuthMode, JwtConfig
from ister.errors import ConfigError, InvalidRequestError, UnauthenticatedError

_PublicKey: TypeAlias = (
    rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
)

_log = logging.getLogger("ister.broker.security.authentication")

CREDENTIAL_HEADERS: Final = ("authorization", "x-api-key")

# HTTP servers take headers of about 8 KiB; on all ports the answer should be the same.
_TOKEN_CHARACTERS_MAX: Final = 7168
_CLAIMS: Final = ("exp", "iss", "sub")

# The kinds of alternative names that identify a client.
_NAMES: Final = (x509.UniformResourceIdentifier, x509.DNSName, x509.RFC822Name)

# The least length of a key is that of the digest.
_SECRET_BYTES_MIN: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
_RSA_BITS_MIN: Final = 2048
_CURVES: Final = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}

JWT_ALGORITHMS: Final = (
    *_SECRET_BYTES_MIN,
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    *_CURVES,
    "EdDSA",
)
"""What `broker.auth.jwt.algorithm` may be."""


def collect_headers(pairs: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """The headers of a call that carry credentials, by their names in lower case.

    Raises:
        UnauthenticatedError: One of them is repeated, which would be ambiguous, or is not text.
    """
    found: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        if lower not in CREDENTIAL_HEADERS:
            continue
        if lower in found:
            raise UnauthenticatedError(f"the header {lower} is repeated")
        try:
            found[lower] = value.decode("ascii") if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise UnauthenticatedError(f"the header {lower} is not text") from error
    return found


class Authenticator:
    """Checks credentials. Thread-safe.

    `config` is `broker.auth`; tokens expire by `clock`.
    """

    def __init__(self, config: AuthConfig, *, clock: Clock) -> None:
        self._clock = clock
        self._is_on = config.mode is not AuthMode.NONE
        self._takes_certificates = config.mtls_principal
        self._tokens: _Tokens | None = None
        self._keys: ApiKeyFile | None = None
        self.cluster_secret: str | None = None
        """The secret that other brokers send; None if there are none."""
        if not self._is_on:
            _check_unused(config)
            return
        if config.jwt.algorithm is not None:
            self._tokens = _Tokens(config.jwt, clock)
        elif config.jwt.secret is not None or config.jwt.public_key_file is not None:
            raise ConfigError(
                "broker.auth.jwt has a key but no algorithm", hint="set broker.auth.jwt.algorithm"
            )
        if config.api_keys_file is not None:
            self._keys = ApiKeyFile(config.api_keys_file, clock=clock)
        if self._tokens is None and self._keys is None and not self._takes_certificates:
            raise ConfigError(
                "broker.auth.mode is 'token', but no way to authenticate is set",
                hint="set broker.auth.jwt, broker.auth.api_keys_file or broker.auth.mtls_principal",
            )

    @property
    def takes_certificates(self) -> bool:
        """Whether client certificates are used."""
        return self._is_on and self._takes_certificates

    def authenticate(
        self, headers: Mapping[str, str], *, certificate: bytes | None = None
    ) -> Principal:
        """Returns the principal that calls.

        `headers` are by names in lower case, see `collect_headers`; `certificate` is the client's,
        PEM or DER, which TLS has checked.
        """
        if not self._is_on:
            return ANONYMOUS
        authorization, api_key = (headers.get(name) for name in CREDENTIAL_HEADERS)
        if authorization is not None and api_key is not None:
            raise UnauthenticatedError(
                "the call has two credentials", hint="send authorization or x-api-key, not both"
            )
        if api_key is not None:
            return self._from_key(api_key.strip())
        if authorization is not None:
            scheme, _, credential = authorization.strip().partition(" ")
            credential = credential.strip()
            if scheme.lower() == "broker":
                return self._from_secret(credential)
            if scheme.lower() != "bearer" or not credential:
                raise UnauthenticatedError(
                    "the authorization header is not of the form 'Bearer <token>'"
                )
            if credential.startswith(API_KEY_PREFIX):
                return self._from_key(credential)
            return self._from_token(credential)
        if certificate is not None and self._takes_certificates:
            return self._from_certificate(certificate)
        raise UnauthenticatedError(
            "the call has no credentials", hint="send the header 'authorization: Bearer <token>'"
        )

    def is_current(self, principal: Principal) -> bool:
        """Whether a principal's credentials are still good: not expired, its key not withdrawn."""
        if principal.expires_at is not None and self._now() >= principal.expires_at:
            return False
        return principal.via != "api-key" or (
            self._keys is not None and self._keys.is_current(principal)
        )

    def _from_secret(self, secret: str) -> Principal:
        known = self.cluster_secret
        if known is None or not hmac.compare_digest(known.encode(), secret.encode()):
            raise UnauthenticatedError("wrong cluster secret")
        return Principal(name="broker", kind=PrincipalKind.BROKER, via="cluster-secret")

    def _from_key(self, key: str) -> Principal:
        principal = self._keys.find(key) if self._keys is not None else None
        if principal is None:
            raise UnauthenticatedError("unknown API key")
        if principal.expires_at is not None and self._now() >= principal.expires_at:
            raise UnauthenticatedError("the API key has expired")
        return principal

    def _from_token(self, token: str) -> Principal:
        if self._tokens is None:
            raise UnauthenticatedError("this broker does not accept tokens", hint="use an API key")
        return self._tokens.check(token)

    def _from_certificate(self, certificate: bytes) -> Principal:
        name, expires_at = read_certificate(certificate)
        try:
            check_principal_name(name)
        except InvalidRequestError as error:
            raise UnauthenticatedError(
                "the client certificate has no name that can be used"
            ) from error
        # TLS has compared the time when the connection was opened, and not since.
        if self._now() >= expires_at:
            raise UnauthenticatedError("the client certificate has expired")
        return Principal(name=name, kind=PrincipalKind.SERVICE, expires_at=expires_at, via="mtls")

    def _now(self) -> float:
        return self._clock.now_ns() / 1e9


def _check_unused(config: AuthConfig) -> None:
    """Refuses settings of authentication while it is off."""
    jwt_config = config.jwt
    named = {
        "jwt": jwt_config.algorithm or jwt_config.secret or jwt_config.public_key_file,
        "api_keys_file": config.api_keys_file,
        "mtls_principal": config.mtls_principal,
        "super_admins": config.super_admins,
    }
    for name, value in named.items():
        if value:
            raise ConfigError(
                f"broker.auth.{name} is set, but broker.auth.mode is 'none'",
                hint="set broker.auth.mode to 'token', or remove the setting",
            )


def read_certificate(certificate: bytes) -> tuple[str, float]:
    """The name of the client that a certificate identifies, and the Unix second when it expires.

    The name is the same on every port: the first alternative name that is a URI, a DNS name or an
    email address. The common name is used only if there are no alternative names at all: an
    authority that issues other kinds of names may not have verified the common name.

    `certificate` is PEM or DER, and TLS has verified it.
    """
    try:
        load = (
            x509.load_pem_x509_certificate
            if certificate.startswith(b"-----BEGIN")
            else x509.load_der_x509_certificate
        )
        parsed = load(certificate)
        try:
            extension = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            common = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            names = [str(item.value) for item in common] if len(common) == 1 else []
        else:
            names = [str(item.value) for item in extension.value if isinstance(item, _NAMES)]
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise UnauthenticatedError("the client certificate cannot be read") from error
    if not names:
        raise UnauthenticatedError(
            "the client certificate names no principal",
            hint="it needs a URI, a DNS name or an email address as its alternative name, "
            "or one common name and no alternative names",
        )
    return names[0], parsed.not_valid_after_utc.timestamp()


class _Tokens:
    """JWTs of one issuer, for one audience or none, with one algorithm and one key."""

    def __init__(self, config: JwtConfig, clock: Clock) -> None:
        self._clock = clock
        self._algorithm = str(config.algorithm)
        self._leeway_seconds = config.leeway_seconds
        if self._algorithm not in JWT_ALGORITHMS:
            raise ConfigError(
                f"unknown broker.auth.jwt.algorithm {config.algorithm!r}",
                hint=f"use one of: {', '.join(JWT_ALGORITHMS)}",
            )
        if config.issuer is None:
            raise ConfigError("broker.auth.jwt needs an issuer", hint="set broker.auth.jwt.issuer")
        self._issuer, self._audience = config.issuer, config.audience
        self._key = _load_key(config, self._algorithm)
        if self._audience is None:
            _log.warning(
                "broker.auth.jwt.audience is not set: all tokens of the issuer without an audience "
                "are accepted, also those for other services",
                extra={"issuer": self._issuer},
            )

    def check(self, token: str) -> Principal:
        """Returns the principal of a token."""
        if len(token) > _TOKEN_CHARACTERS_MAX:
            raise UnauthenticatedError("the token is too long")
        claims = self._verified(token)
        now, leeway = self._clock.now_ns() / 1e9, self._leeway_seconds
        # The bounds stay good for as long as the clocks may be apart, streams included.
        expires_at = _time(claims, "exp") + leeway
        if now >= expires_at:
            raise UnauthenticatedError("the token has expired")
        for name in ("nbf", "iat"):
            if name in claims and _time(claims, name) > now + leeway:
                raise UnauthenticatedError(f"the token is not valid yet ({name})")
        if claims.get("principal_name", claims["sub"]) != claims["sub"]:
            # Danube's broker takes the first, others the second.
            raise UnauthenticatedError("the token's claims principal_name and sub differ")
        try:
            return Principal(
                name=check_principal_name(claims["sub"]),
                kind=parse_principal_kind(claims.get("principal_type", "user")),
                expires_at=expires_at,
                via="jwt",
            )
        except InvalidRequestError as error:
            raise UnauthenticatedError(
                f"the token names no valid principal: {error.message}"
            ) from error

    def _verified(self, token: str) -> JsonObject:
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") != self._algorithm:
                raise UnauthenticatedError("the token uses another algorithm")
            if "crit" in header:
                raise UnauthenticatedError("the token requires an unknown extension")
            claims: JsonObject = jwt.decode(
                token,
                self._key,
                algorithms=[self._algorithm],
                issuer=self._issuer,
                audience=self._audience,
                options={
                    "require": [*_CLAIMS, *(("aud",) if self._audience is not None else ())],
                    "verify_signature": True,
                    "verify_iss": True,
                    "verify_aud": True,
                    # Times are judged by our own clock.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.MissingRequiredClaimError as error:
            raise UnauthenticatedError(f"the token has no claim {error.claim!r}") from error
        except jwt.InvalidIssuerError as error:
            raise UnauthenticatedError("the token is from another issuer") from error
        except jwt.InvalidAudienceError as error:
            raise UnauthenticatedError("the token is for another audience") from error
        except jwt.InvalidSignatureError as error:
            raise UnauthenticatedError("the token's signature is wrong") from error
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            # The library's own texts may quote what it was given.
            _log.debug("a token cannot be read", extra={"reason": type(error).__name__})
            raise UnauthenticatedError("the token cannot be read") from None
        return claims


def _time(claims: JsonObject, name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnauthenticatedError(f"the token's claim {name!r} is not a number of seconds")
    # A whole number may have more digits than a float can hold.
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise UnauthenticatedError(f"the token's claim {name!r} is not a number of seconds")
    return seconds


def _load_key(config: JwtConfig, algorithm: str) -> bytes | _PublicKey:
    if algorithm in _SECRET_BYTES_MIN:
        if config.public_key_file is not None:
            raise ConfigError(
                f"broker.auth.jwt.public_key_file is set, but {algorithm} uses a secret",
                hint="set broker.auth.jwt.secret alone: a public key must never be one",
            )
        secret = (config.secret or "").encode()
        if len(secret) < _SECRET_BYTES_MIN[algorithm]:
            raise ConfigError(
                f"broker.auth.jwt.secret has {len(secret)} bytes",
                hint=f"{algorithm} needs at least {_SECRET_BYTES_MIN[algorithm]} random ones",
            )
        if b"-----BEGIN" in secret:
            raise ConfigError(
                "broker.auth.jwt.secret is a PEM text, which others may know",
                hint="take random bytes, or an algorithm with a public key",
            )
        return secret
    if config.secret is not None:
        raise ConfigError(
            f"broker.auth.jwt.secret is set, but {algorithm} uses a public key",
            hint="set broker.auth.jwt.public_key_file alone",
        )
    path = config.public_key_file
    if path is None:
        raise ConfigError(f"{algorithm} requires broker.auth.jwt.public_key_file")
    try:
        with open(path, "rb") as file:
            key = load_pem_public_key(file.read())
    except OSError as error:
        raise ConfigError(
            f"broker.auth.jwt.public_key_file cannot be read: {error.strerror}", path=path
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            "broker.auth.jwt.public_key_file is not a public key in PEM", path=path
        ) from error
    if not _fits(key, algorithm):
        raise ConfigError(
            f"broker.auth.jwt.public_key_file holds a key that is not one for {algorithm}",
            path=path,
        )
    return key


def _fits(key: object, algorithm: str) -> TypeGuard[_PublicKey]:
    if algorithm in _CURVES:
        return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(
            key.curve, _CURVES[algorithm]
        )
    if algorithm == "EdDSA":
        return isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey)
    return isinstance(key, rsa.RSAPublicKey) and key.key_size >= _RSA_BITS_MIN
