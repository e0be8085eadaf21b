"""Roles and bindings over the wire, as Danube's own tools speak."""

from contextlib import asynccontextmanager

import grpc

from ister.broker.rpc.grpcio_engine import add_methods
from ister.broker.rpc.methods import methods_of
from ister.broker.security.grpc_guard import GrpcGuard
from ister.broker.services.security_admin import SecurityAdmin
from ister.wire import danube_admin, stub
from tests.support.broker_calls import Code, status

SERVICE = "danube_admin.SecurityAdmin"
PLACE = {"scope": "topic", "resource_name": "/default/orders"}


@asynccontextmanager
async def served(rig):
    """What calls a method of a real server: `call(name, request, who)`."""
    server = grpc.aio.server(interceptors=[GrpcGuard(rig.guard)])
    add_methods(server, methods_of(SERVICE, SecurityAdmin(rig.guard)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = stub(channel, SERVICE)

            def call(name, request, who="root"):
                metadata = tuple(rig.bearer(who).items())
                return getattr(calls, name)(request, metadata=metadata, timeout=30)

            yield call
    finally:
        await server.stop(0.1)


def role(name="ops", permissions=("Lookup", "ManageTopic")):
    return danube_admin.CreateRoleRequest(
        role=danube_admin.RoleDefinition(name=name, permissions=permissions, system=True)
    )


def binding(**more):
    fields = {
        "id": "b1",
        "principal_type": "service_account",
        "principal_name": "loader",
        "role_names": ["producer"],
        **PLACE,
    }
    return danube_admin.CreateBindingRequest(
        binding=danube_admin.BindingDefinition(**{**fields, **more})
    )


async def test_roles(rig):
    async with served(rig) as call:
        assert (await call("CreateRole", role())).success
        found = (await call("GetRole", danube_admin.GetRoleRequest(name="ops"))).role
        assert (found.name, list(found.permissions)) == ("ops", ["Lookup", "ManageTopic"])
        assert not found.system, "that is not for a caller to say"
        listed = (await call("ListRoles", danube_admin.Empty())).roles
        assert [(item.name, item.system) for item in listed] == [
            ("admin", True),
            ("consumer", True),
            ("ops", False),
            ("producer", True),
        ]
        name = danube_admin.DeleteRoleRequest(name="ops")
        await call("CreateBinding", binding(role_names=["ops"]))
        for method, request, code in (
            ("CreateRole", role(), Code.OK),
            ("CreateRole", role(permissions=["Consume"]), Code.ALREADY_EXISTS),
            ("CreateRole", role(permissions=["Replicate"]), Code.INVALID_ARGUMENT),
            ("CreateRole", danube_admin.CreateRoleRequest(), Code.INVALID_ARGUMENT),
            ("DeleteRole", name, Code.ABORTED),  # it is in use
            ("DeleteBinding", danube_admin.DeleteBindingRequest(binding_id="b1", **PLACE), Code.OK),
            ("DeleteRole", name, Code.OK),
            ("DeleteRole", name, Code.NOT_FOUND),
            ("GetRole", danube_admin.GetRoleRequest(name="ops"), Code.NOT_FOUND),
            ("DeleteRole", danube_admin.DeleteRoleRequest(name="admin"), Code.INVALID_ARGUMENT),
        ):
            assert await status(call(method, request)) is code, request


async def test_bindings(rig):
    async with served(rig) as call:
        assert (await call("CreateBinding", binding())).success
        asked = danube_admin.GetBindingRequest(binding_id="b1", **PLACE)
        found = (await call("GetBinding", asked)).binding
        assert found == binding().binding
        listed = await call("ListBindings", danube_admin.ListBindingsRequest(**PLACE))
        assert list(listed.bindings) == [found]
        everything = await call("ListAllBindings", danube_admin.Empty())
        assert list(everything.bindings) == [found]
        for bad, code in (
            (binding(role_names=["consumer"]), Code.ALREADY_EXISTS),
            (binding(id="b2", role_names=["none"]), Code.NOT_FOUND),
            (binding(id="b2", principal_type="broker_internal"), Code.INVALID_ARGUMENT),
            (binding(id="b2", scope="planet"), Code.INVALID_ARGUMENT),
            (binding(id="b2", resource_name="orders"), Code.INVALID_ARGUMENT),
            (binding(id=""), Code.INVALID_ARGUMENT),
            (danube_admin.CreateBindingRequest(), Code.INVALID_ARGUMENT),
        ):
            assert await status(call("CreateBinding", bad)) is code
        gone = danube_admin.DeleteBindingRequest(binding_id="b1", **PLACE)
        assert (await call("DeleteBinding", gone)).success
        assert await status(call("DeleteBinding", gone)) is Code.NOT_FOUND
        assert await status(call("GetBinding", asked)) is Code.NOT_FOUND


async def test_a_binding_is_in_the_audit_log_with_what_it_gives(rig):
    rig.allow("chief", "admin")

    async with served(rig) as call:
        await call("CreateBinding", binding(), "chief")
    (made,) = rig.audited()
    assert (made["principal"], made["outcome"]) == ("user:chief", "allowed")
    assert "service_account loader gets producer in topic /default/orders" in made["detail"]
