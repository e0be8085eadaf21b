"""Roles and bindings over the wire, as Danube's own tools speak."""

import asyncio
import contextlib

import grpc
import pytest

from ister.broker.rpc.grpcio_engine import add_methods
from ister.broker.rpc.methods import methods_of
from ister.broker.security.grpc_guard import GrpcGuard
from ister.broker.services.security_admin import SecurityAdmin
from ister.wire import danube_admin, stub

Code = grpc.StatusCode
SERVICE = "danube_admin.SecurityAdmin"


def run(rig, scenario):
    """Runs `scenario(call)` against a real server; `call(name, who, **fields)` answers."""

    async def served():
        server = grpc.aio.server(interceptors=[GrpcGuard(rig.guard)])
        add_methods(server, methods_of(SERVICE, SecurityAdmin(rig.guard)))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                calls = stub(channel, SERVICE)

                def call(name, request, who="root"):
                    return getattr(calls, name)(
                        request, metadata=tuple(rig.bearer(who).items()), timeout=30
                    )

                await scenario(call)
        finally:
            await server.stop(0.1)

    asyncio.run(asyncio.wait_for(served(), 60))


@contextlib.contextmanager
def refused(code):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value.details()


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
        "scope": "topic",
        "resource_name": "/default/orders",
    }
    return danube_admin.CreateBindingRequest(
        binding=danube_admin.BindingDefinition(**{**fields, **more})
    )


def test_roles(rig):
    async def scenario(call):
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
        assert (await call("CreateRole", role())).success
        with refused(Code.ALREADY_EXISTS):
            await call("CreateRole", role(permissions=["Consume"]))
        for bad in (
            role(permissions=["Replicate"]),
            role(name="a/b"),
            danube_admin.CreateRoleRequest(),
        ):
            with refused(Code.INVALID_ARGUMENT):
                await call("CreateRole", bad)
        assert (await call("DeleteRole", danube_admin.DeleteRoleRequest(name="ops"))).success
        with refused(Code.NOT_FOUND):
            await call("DeleteRole", danube_admin.DeleteRoleRequest(name="ops"))
        with refused(Code.NOT_FOUND):
            await call("GetRole", danube_admin.GetRoleRequest(name="ops"))
        with refused(Code.INVALID_ARGUMENT):
            await call("DeleteRole", danube_admin.DeleteRoleRequest(name="admin"))

    run(rig, scenario)


def test_bindings(rig):
    place = {"scope": "topic", "resource_name": "/default/orders"}

    async def scenario(call):
        assert (await call("CreateBinding", binding())).success
        asked = danube_admin.GetBindingRequest(binding_id="b1", **place)
        found = (await call("GetBinding", asked)).binding
        assert found == binding().binding
        listed = await call("ListBindings", danube_admin.ListBindingsRequest(**place))
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
            with refused(code):
                await call("CreateBinding", bad)
        gone = danube_admin.DeleteBindingRequest(binding_id="b1", **place)
        assert (await call("DeleteBinding", gone)).success
        with refused(Code.NOT_FOUND):
            await call("DeleteBinding", gone)
        with refused(Code.NOT_FOUND):
            await call("GetBinding", asked)

    run(rig, scenario)


def test_role_in_use_stays(rig):
    async def scenario(call):
        await call("CreateRole", role())
        await call("CreateBinding", binding(role_names=["ops"]))
        with refused(Code.ABORTED):
            await call("DeleteRole", danube_admin.DeleteRoleRequest(name="ops"))

    run(rig, scenario)


def test_a_binding_is_in_the_audit_log_with_what_it_gives(rig):
    rig.allow("chief", "admin")

    async def scenario(call):
        await call("CreateBinding", binding(), "chief")

    run(rig, scenario)
    (made,) = rig.audited()
    assert (made["principal"], made["outcome"]) == ("user:chief", "allowed")
    assert "service_account loader gets producer in topic /default/orders" in made["detail"]
