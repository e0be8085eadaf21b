"""Calls about roles and bindings.

Owns: calls of danube_admin.SecurityAdmin. Does not own: what a role permits, which the broker
decides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ister import wire
from ister.base.model import TopicName
from ister.client.core.network import Network
from ister.errors import InvalidRequestError, NotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDescription:
    """A named set of permissions."""

    name: str
    permissions: tuple[str, ...]
    """Such as `produce`, `manage_topic`."""
    is_system: bool
    """Whether it always exists and cannot be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingDescription:
    """Roles of a principal: in the cluster, in a namespace, or on a topic."""

    id: str
    principal: str
    """`user:NAME` or `service:NAME`."""
    roles: tuple[str, ...]
    scope: str
    """`cluster`, `namespace` or `topic`."""
    resource: str
    """The namespace or topic; "" for the cluster."""


class RightsCalls:
    """Lists, grants and revokes roles. Belongs to the network's loop."""

    _network: Network

    async def roles(self) -> list[RoleDescription]:
        """All roles, by name, with their permissions.

        Raises:
            PermissionDeniedError: The caller may not manage the cluster.
            IsterError: No broker has answered in time.
        """
        found = await self._network.call(
            wire.services.SecurityAdmin.ListRoles, wire.danube_admin.Empty()
        )
        return sorted(
            (
                RoleDescription(
                    name=one.name,
                    permissions=tuple(map(_permission, one.permissions)),
                    is_system=one.system,
                )
                for one in found.roles
            ),
            key=lambda role: role.name,
        )

    async def bindings(self) -> list[BindingDescription]:
        """All bindings, by principal. Admins that the broker's settings name have none.

        Raises:
            PermissionDeniedError: The caller may not manage the cluster.
            IsterError: No broker has answered in time.
        """
        found = await self._network.call(
            wire.services.SecurityAdmin.ListAllBindings, wire.danube_admin.Empty()
        )
        return sorted(
            (
                BindingDescription(
                    id=one.id,
                    principal=f"{_kind(one.principal_type)}:{one.principal_name}",
                    roles=tuple(one.role_names),
                    scope=one.scope,
                    resource=one.resource_name,
                )
                for one in found.bindings
            ),
            key=lambda binding: (binding.principal, binding.scope, binding.resource, binding.id),
        )

    async def grant_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """Grants a role to a principal: on a topic, in a namespace, or for the cluster.

        Args:
            principal: A user's name, or `service:NAME` for an API key or a program.
            role: `admin`, `producer`, `consumer`, or a custom role.
            topic: On this topic alone.
            namespace: In this namespace alone.

        Raises:
            NotFoundError: There is no such role.
            IsterError: It is refused, or no broker has answered in time.
        """
        kind, name = _principal(principal)
        scope, resource = _scope(topic, namespace)
        request = wire.danube_admin.CreateBindingRequest(
            binding=wire.danube_admin.BindingDefinition(
                id=_binding_id(kind, name, role),
                principal_type=kind,
                principal_name=name,
                role_names=[role],
                scope=scope,
                resource_name=resource,
            )
        )
        await self._network.call(wire.services.SecurityAdmin.CreateBinding, request)

    async def revoke_role(
        self, principal: str, role: str, *, topic: str | None = None, namespace: str | None = None
    ) -> None:
        """Revokes a role that `grant_role` gave with the same arguments.

        Raises:
            NotFoundError: The role was not granted.
            IsterError: It is refused, or no broker has answered in time.
        """
        kind, name = _principal(principal)
        scope, resource = _scope(topic, namespace)
        request = wire.danube_admin.DeleteBindingRequest(
            scope=scope, resource_name=resource, binding_id=_binding_id(kind, name, role)
        )
        await self._network.call(
            wire.services.SecurityAdmin.DeleteBinding, request, done_before=NotFoundError
        )


def _permission(text: str) -> str:
    """A permission in our words: Danube spells `ManageTopic`."""
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in text).lstrip("_")


def _kind(text: str) -> str:
    return text.lower().removesuffix("_account")


def _principal(text: str) -> tuple[str, str]:
    kind, separator, name = text.partition(":")
    return (kind, name) if separator else ("user", text)


def _scope(topic: str | None, namespace: str | None) -> tuple[str, str]:
    if topic is not None and namespace is not None:
        raise InvalidRequestError("pass topic or namespace, not both")
    if topic is not None:
        return "topic", str(TopicName.parse(topic))
    return ("cluster", "") if namespace is None else ("namespace", namespace)


def _binding_id(kind: str, name: str, role: str) -> str:
    """Returns the binding's id, derived from its arguments, so that it can be revoked."""
    return hashlib.sha256(f"{kind}\n{name}\n{role}".encode()).hexdigest()[:16]
