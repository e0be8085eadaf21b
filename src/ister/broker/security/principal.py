"""Who calls: a name, a kind, and how long it is good for.

Values only. A principal is made by `ister.broker.security.authentication` alone, from credentials
that were checked; never from the request's own claims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ister.errors import InvalidRequestError

PRINCIPAL_NAME_CHARACTERS_MAX: Final = 256
"""It becomes part of keys, audit lines and error texts."""


class PrincipalKind(StrEnum):
    """What stands behind a name. Rights are given to a kind and a name together."""

    USER = "user"
    SERVICE = "service"
    ANONYMOUS = "anonymous"
    """An unauthenticated caller; has no rights once auth is on."""
    BROKER = "broker"
    """Another broker of the cluster; has no rights, and none can be given to it."""


_KINDS: Final = {
    "user": PrincipalKind.USER,
    "service": PrincipalKind.SERVICE,
    # Danube's word for it.
    "service_account": PrincipalKind.SERVICE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller whose credentials were checked."""

    name: str
    kind: PrincipalKind
    expires_at: float | None = None
    """The Unix second from which on the credentials are no longer good; None if they stay."""
    via: str = "none"
    """How it is known: jwt, api-key, mtls, cluster-secret, or none."""
    credential: str = field(default="", repr=False)
    """The digest of the API key that was shown; "" otherwise."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


ANONYMOUS: Final = Principal(name="anonymous", kind=PrincipalKind.ANONYMOUS)


def counted_as(principal: Principal) -> str:
    """The principal that streams and consumers are counted for; "" for anonymous callers."""
    return "" if principal.kind is PrincipalKind.ANONYMOUS else str(principal)


def spell_principal(text: str) -> str:
    """A principal as `str` of one gives it, from `ada`, `user:ada` or `service_account:shop`."""
    kind, colon, name = text.partition(":")
    if not colon:
        kind, name = PrincipalKind.USER.value, text
    return f"{parse_principal_kind(kind)}:{check_principal_name(name)}"


def check_principal_name(name: object) -> str:
    """A name that can be shown in one line."""
    if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
        raise InvalidRequestError(
            "the name of a principal is one line of printable characters without spaces around it"
        )
    if len(name) > PRINCIPAL_NAME_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"the name of a principal has {len(name)} characters",
            hint=f"at most {PRINCIPAL_NAME_CHARACTERS_MAX}",
        )
    return name


def parse_principal_kind(text: object) -> PrincipalKind:
    """The kind of a principal by its name, as Ister or as Danube spells it."""
    kind = _KINDS.get(text) if isinstance(text, str) else None
    if kind is None:
        raise InvalidRequestError(
            f"there is no kind of principal {str(text)[:64]!r}", hint=f"one of: {', '.join(_KINDS)}"
        )
    return kind
