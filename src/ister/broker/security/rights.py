"""Permissions, roles and bindings, and their JSON.

    role      a name for a set of permissions
    binding   gives roles to a principal: in the whole cluster, in a namespace, or for one topic

The JSON and the names of permissions are Danube's. Does not own: where they are kept and how they
are judged (`ister.broker.security.access`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

import msgspec

from ister.base.model import TopicName
from ister.base.structs import known
from ister.broker.security.principal import (
    PrincipalKind,
    check_principal_name,
    parse_principal_kind,
)
from ister.errors import CorruptDataError, InvalidRequestError

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,120}")
_ROLES_PER_BINDING_MAX: Final = 64
# What the client appends to the name of a partitioned topic; one spelling per number.


class Permission(StrEnum):
    """A permission on a resource."""

    LOOKUP = "lookup"
    """See that a topic exists and where it is. Whoever may use or manage a topic may also see
    it."""
    PRODUCE = "produce"
    CONSUME = "consume"
    MANAGE_NAMESPACE = "manage_namespace"
    MANAGE_TOPIC = "manage_topic"
    MANAGE_SCHEMA = "manage_schema"
    MANAGE_BROKER = "manage_broker"
    MANAGE_CLUSTER = "manage_cluster"
    """Roles and bindings among it."""

    @property
    def danube_name(self) -> str:
        """As Danube spells it: `ManageTopic`."""
        return "".join(part.capitalize() for part in self.value.split("_"))


MANAGE_PERMISSIONS: Final = frozenset(
    permission for permission in Permission if permission.value.startswith("manage_")
)

_PERMISSIONS: Final = {permission.value.replace("_", ""): permission for permission in Permission}


def parse_permission(text: object) -> Permission:
    """A permission by its name: `manage_topic`, `ManageTopic`, `manage-topic`."""
    plain = re.sub(r"[_-]", "", text).lower() if isinstance(text, str) else ""
    permission = _PERMISSIONS.get(plain)
    if permission is None:
        raise InvalidRequestError(
            f"unknown permission {str(text)[:64]!r}", hint=f"use one of: {', '.join(Permission)}"
        )
    return permission


class Scope(StrEnum):
    """How far a binding reaches."""

    CLUSTER = "cluster"
    NAMESPACE = "namespace"
    TOPIC = "topic"


def parse_scope(text: object) -> Scope:
    """A scope by its name, in any case."""
    try:
        return Scope(str(text).lower())
    except ValueError as error:
        raise InvalidRequestError(
            f"unknown scope {str(text)[:64]!r}", hint=f"use one of: {', '.join(Scope)}"
        ) from error


class _StoredRole(msgspec.Struct, kw_only=True):
    name: str
    permissions: list[str]
    system: bool | int | None = False
    """For Danube's tools: it is not read."""


class _StoredBinding(msgspec.Struct, kw_only=True):
    id: str
    principal_type: str
    principal_name: str
    role_names: tuple[str, ...]
    scope: str
    resource_name: str | None = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A named set of permissions."""

    name: str
    permissions: frozenset[Permission]
    is_system: bool = False
    """Whether it is always there and cannot be changed."""

    def __post_init__(self) -> None:
        _check_name(self.name, "role")

    def to_json(self) -> bytes:
        """As it is stored."""
        return _encode(
            _StoredRole(
                name=self.name,
                permissions=[p.danube_name for p in Permission if p in self.permissions],
                system=self.is_system,
            )
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads what was stored."""
        try:
            stored = msgspec.json.decode(data, type=known(_StoredRole))
            return cls(
                name=stored.name, permissions=frozenset(map(parse_permission, stored.permissions))
            )
        except (ValueError, RecursionError) as error:
            raise CorruptDataError(f"a stored role is invalid: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Roles for a principal in one scope."""

    id: str
    principal_kind: PrincipalKind
    principal_name: str
    roles: tuple[str, ...]
    scope: Scope
    resource: str = ""
    """A namespace, a topic as `/namespace/topic`, or "" for the cluster."""

    def __post_init__(self) -> None:
        _check_name(self.id, "binding")
        check_principal_name(self.principal_name)
        if self.principal_kind is PrincipalKind.ANONYMOUS:
            raise InvalidRequestError("a binding cannot name the anonymous principal")
        if not 0 < len(self.roles) <= _ROLES_PER_BINDING_MAX:
            raise InvalidRequestError(
                f"a binding must have 1 to {_ROLES_PER_BINDING_MAX} roles, not {len(self.roles)}",
            )
        for role in self.roles:
            _check_name(role, "role")
        resource_path(self.scope, self.resource)

    def to_json(self) -> bytes:
        """As it is stored."""
        return _encode(
            _StoredBinding(
                id=self.id,
                principal_type=danube_kind(self.principal_kind),
                principal_name=self.principal_name,
                role_names=self.roles,
                scope=self.scope.value,
                resource_name=self.resource,
            )
        )

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads what was stored."""
        try:
            stored = msgspec.json.decode(data, type=known(_StoredBinding))
            return cls(
                id=stored.id,
                principal_kind=parse_principal_kind(stored.principal_type),
                principal_name=stored.principal_name,
                roles=stored.role_names,
                scope=parse_scope(stored.scope),
                resource=stored.resource_name or "",
            )
        except (ValueError, RecursionError) as error:
            raise CorruptDataError(f"a stored binding is invalid: {error}") from error


def danube_kind(kind: PrincipalKind) -> str:
    """The kind of a principal as Danube spells it."""
    return "service_account" if kind is PrincipalKind.SERVICE else kind.value


def resource_path(scope: Scope, resource: str) -> str:
    """A scope and its resource as a part of a key: `topic/default/orders`."""
    if scope is Scope.CLUSTER:
        if resource != "":
            raise InvalidRequestError(
                "a binding in the cluster names no resource", hint="leave it empty"
            )
        return "cluster"
    if scope is Scope.NAMESPACE:
        # A namespace is the first part of a topic's name, and has its rules.
        return f"namespace/{TopicName.parse(f'/{resource}/x').namespace}"
    name = TopicName.parse(resource)
    return f"topic/{name.namespace}/{name.topic}"


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"the {what} has the name {str(name)[:64]!r}",
            hint="1 to 120 ASCII letters, digits, '_', '.' and '-'",
        )


def _encode(stored: _StoredRole | _StoredBinding) -> bytes:
    return json.dumps(msgspec.to_builtins(stored)).encode()


SYSTEM_ROLES: Final[Mapping[str, Role]] = {
    role.name: role
    for role in (
        Role(name="admin", permissions=frozenset(Permission), is_system=True),
        Role(
            name="producer",
            permissions=frozenset({Permission.LOOKUP, Permission.PRODUCE}),
            is_system=True,
        ),
        Role(
            name="consumer",
            permissions=frozenset({Permission.LOOKUP, Permission.CONSUME}),
            is_system=True,
        ),
    )
}
