"""Roles and bindings over the wire: `danube_admin.SecurityAdmin`.

Every call needs the permission `manage_cluster`, also to read. Changes are written to the audit log
before they are made. Names are spelled as Danube spells them.
"""

from __future__ import annotations

import asyncio

from ister.broker.operations import needs
from ister.broker.security.guard import Guard
from ister.broker.security.principal import parse_principal_kind
from ister.broker.security.rights import (
    Binding,
    Permission,
    Role,
    Scope,
    danube_kind,
    parse_permission,
    parse_scope,
)
from ister.errors import InvalidRequestError
from ister.wire import danube_admin


class SecurityAdmin:
    """The RPCs, by their names on the wire. Store calls run in worker threads."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._access = guard.access

    # -- roles ------------------------------------------------------------------------------

    @needs(Permission.MANAGE_CLUSTER, detail=lambda asked: _words_of_role(asked.role))
    async def CreateRole(
        self, request: danube_admin.CreateRoleRequest, context: object
    ) -> danube_admin.CreateRoleResponse:
        """Makes a role. `system` is not a caller's to set."""
        asked = request.role
        if not request.HasField("role"):
            raise InvalidRequestError("the request has no role")
        role = Role(
            name=asked.name, permissions=frozenset(map(parse_permission, asked.permissions))
        )
        await asyncio.to_thread(self._access.create_role, role)
        return danube_admin.CreateRoleResponse(success=True)

    @needs(Permission.MANAGE_CLUSTER)
    async def GetRole(
        self, request: danube_admin.GetRoleRequest, context: object
    ) -> danube_admin.GetRoleResponse:
        """A role."""
        role = await asyncio.to_thread(self._access.role, request.name)
        return danube_admin.GetRoleResponse(role=_role(role))

    @needs(Permission.MANAGE_CLUSTER)
    async def ListRoles(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.ListRolesResponse:
        """All roles, those of the system among them."""
        roles = await asyncio.to_thread(self._access.roles)
        return danube_admin.ListRolesResponse(roles=map(_role, roles))

    @needs(Permission.MANAGE_CLUSTER, detail=lambda asked: f"role {asked.name}")
    async def DeleteRole(
        self, request: danube_admin.DeleteRoleRequest, context: object
    ) -> danube_admin.DeleteRoleResponse:
        """Removes a role that no binding gives."""
        await asyncio.to_thread(self._access.delete_role, request.name)
        return danube_admin.DeleteRoleResponse(success=True)

    # -- bindings ---------------------------------------------------------------------------

    @needs(Permission.MANAGE_CLUSTER, detail=lambda asked: _words_of_binding(asked.binding))
    async def CreateBinding(
        self, request: danube_admin.CreateBindingRequest, context: object
    ) -> danube_admin.CreateBindingResponse:
        """Gives roles to a principal."""
        asked = request.binding
        if not request.HasField("binding"):
            raise InvalidRequestError("the request has no binding")
        binding = Binding(
            id=asked.id,
            principal_kind=parse_principal_kind(asked.principal_type),
            principal_name=asked.principal_name,
            roles=tuple(asked.role_names),
            scope=parse_scope(asked.scope),
            resource=asked.resource_name,
        )
        await asyncio.to_thread(self._access.create_binding, binding)
        return danube_admin.CreateBindingResponse(success=True)

    @needs(Permission.MANAGE_CLUSTER)
    async def GetBinding(
        self, request: danube_admin.GetBindingRequest, context: object
    ) -> danube_admin.GetBindingResponse:
        """A binding of a scope and resource."""
        scope = parse_scope(request.scope)
        binding = await asyncio.to_thread(
            self._access.binding, scope, request.resource_name, request.binding_id
        )
        return danube_admin.GetBindingResponse(binding=_binding(binding))

    @needs(Permission.MANAGE_CLUSTER)
    async def ListBindings(
        self, request: danube_admin.ListBindingsRequest, context: object
    ) -> danube_admin.ListBindingsResponse:
        """The bindings of a scope and resource."""
        scope = parse_scope(request.scope)
        return await self._bindings(scope, request.resource_name)

    @needs(Permission.MANAGE_CLUSTER)
    async def ListAllBindings(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.ListBindingsResponse:
        """All bindings."""
        return await self._bindings(None, "")

    @needs(
        Permission.MANAGE_CLUSTER,
        detail=lambda asked: f"binding {asked.binding_id} in {asked.scope} {asked.resource_name}",
    )
    async def DeleteBinding(
        self, request: danube_admin.DeleteBindingRequest, context: object
    ) -> danube_admin.DeleteBindingResponse:
        """Takes back what a binding gave."""
        scope = parse_scope(request.scope)
        await asyncio.to_thread(
            self._access.delete_binding, scope, request.resource_name, request.binding_id
        )
        return danube_admin.DeleteBindingResponse(success=True)

    async def _bindings(
        self, scope: Scope | None, resource: str
    ) -> danube_admin.ListBindingsResponse:
        found = await asyncio.to_thread(self._access.bindings, scope, resource)
        return danube_admin.ListBindingsResponse(bindings=map(_binding, found))


def _words_of_role(role: danube_admin.RoleDefinition) -> str:
    return f"role {role.name}: {', '.join(role.permissions)}"


def _words_of_binding(binding: danube_admin.BindingDefinition) -> str:
    return (
        f"binding {binding.id}: {binding.principal_type} {binding.principal_name} gets "
        f"{', '.join(binding.role_names)} in {binding.scope} {binding.resource_name}"
    )


def _role(role: Role) -> danube_admin.RoleDefinition:
    return danube_admin.RoleDefinition(
        name=role.name,
        permissions=[item.danube_name for item in Permission if item in role.permissions],
        system=role.is_system,
    )


def _binding(binding: Binding) -> danube_admin.BindingDefinition:
    return danube_admin.BindingDefinition(
        id=binding.id,
        principal_type=danube_kind(binding.principal_kind),
        principal_name=binding.principal_name,
        role_names=binding.roles,
        scope=binding.scope.value,
        resource_name=binding.resource,
    )
