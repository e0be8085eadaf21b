"""Roles and bindings over the wire: `danube_admin.SecurityAdmin`.

Every call needs the permission `manage_cluster`, also to read. Changes are written to the audit log
before they are made. Names are spelled as Danube spells them.
"""

from __future__ import annotations

import asyncio

from ister.broker.security.guard import Guard, current_principal
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
        self._guard = guard
        self._access = guard.access

    # -- roles ------------------------------------------------------------------------------

    async def CreateRole(
        self, request: danube_admin.CreateRoleRequest, context: object
    ) -> danube_admin.CreateRoleResponse:
        """Makes a role. `system` is not a caller's to set."""
        asked = request.role
        self._check(f"role {asked.name}: {', '.join(asked.permissions)}")
        if not request.HasField("role"):
            raise InvalidRequestError("the request has no role")
        role = Role(
            name=asked.name, permissions=frozenset(map(parse_permission, asked.permissions))
        )
        await asyncio.to_thread(self._access.create_role, role)
        return danube_admin.CreateRoleResponse(success=True)

    async def GetRole(
        self, request: danube_admin.GetRoleRequest, context: object
    ) -> danube_admin.GetRoleResponse:
        """A role."""
        self._check()
        role = await asyncio.to_thread(self._access.role, request.name)
        return danube_admin.GetRoleResponse(role=_role(role))

    async def ListRoles(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.ListRolesResponse:
        """All roles, those of the system among them."""
        self._check()
        roles = await asyncio.to_thread(self._access.roles)
        return danube_admin.ListRolesResponse(roles=map(_role, roles))

    async def DeleteRole(
        self, request: danube_admin.DeleteRoleRequest, context: object
    ) -> danube_admin.DeleteRoleResponse:
        """Removes a role that no binding gives."""
        self._check(f"role {request.name}")
        await asyncio.to_thread(self._access.delete_role, request.name)
        return danube_admin.DeleteRoleResponse(success=True)

    # -- bindings ---------------------------------------------------------------------------

    async def CreateBinding(
        self, request: danube_admin.CreateBindingRequest, context: object
    ) -> danube_admin.CreateBindingResponse:
        """Gives roles to a principal."""
        asked = request.binding
        self._check(
            f"binding {asked.id}: {asked.principal_type} {asked.principal_name} gets "
            f"{', '.join(asked.role_names)} in {asked.scope} {asked.resource_name}"
        )
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

    async def GetBinding(
        self, request: danube_admin.GetBindingRequest, context: object
    ) -> danube_admin.GetBindingResponse:
        """A binding of a scope and resource."""
        self._check()
        scope = parse_scope(request.scope)
        binding = await asyncio.to_thread(
            self._access.binding, scope, request.resource_name, request.binding_id
        )
        return danube_admin.GetBindingResponse(binding=_binding(binding))

    async def ListBindings(
        self, request: danube_admin.ListBindingsRequest, context: object
    ) -> danube_admin.ListBindingsResponse:
        """The bindings of a scope and resource."""
        self._check()
        scope = parse_scope(request.scope)
        return await self._bindings(scope, request.resource_name)

    async def ListAllBindings(
        self, request: danube_admin.Empty, context: object
    ) -> danube_admin.ListBindingsResponse:
        """All bindings."""
        self._check()
        return await self._bindings(None, "")

    async def DeleteBinding(
        self, request: danube_admin.DeleteBindingRequest, context: object
    ) -> danube_admin.DeleteBindingResponse:
        """Takes back what a binding gave."""
        self._check(f"binding {request.binding_id} in {request.scope} {request.resource_name}")
        scope = parse_scope(request.scope)
        await asyncio.to_thread(
            self._access.delete_binding, scope, request.resource_name, request.binding_id
        )
        return danube_admin.DeleteBindingResponse(success=True)

    def _check(self, detail: str = "") -> None:
        self._guard.check(current_principal(), Permission.MANAGE_CLUSTER, detail=detail)

    async def _bindings(
        self, scope: Scope | None, resource: str
    ) -> danube_admin.ListBindingsResponse:
        found = await asyncio.to_thread(self._access.bindings, scope, resource)
        return danube_admin.ListBindingsResponse(bindings=map(_binding, found))


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
