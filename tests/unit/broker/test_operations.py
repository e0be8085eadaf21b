"""Every operation by every door: whoever has the permission may, and nobody else does or learns."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import grpc
import pyarrow as pa
import pytest
from pyarrow import flight

from ister import wire
from ister.broker.http.api import ROUTES
from ister.broker.security.rights import Permission, Role
from ister.client.flight import FlightClient
from ister.errors import IsterError, PermissionDeniedError
from ister.wire import danube, danube_schema, ister_api
from ister.wire.contract import PutOpen, RangeTicket
from ister.wire.errors import decode_error
from tests.support.broker import a_broker
from tests.support.security import allow, auth_settings, headers_of, sign
from tools.broker_operations import SERVICES, operations

THERE, MISSING, OWN = "/shop/orders", "/nowhere/nothing", "/own/nothing"
NEEDS = {route.handler: route.needs for route in ROUTES}
BODIES = {
    "create": {"topic": "{topic}"},
    "delete": {"confirm": "{topic}"},
    "unsubscribe": {"confirm": "s"},
    "publish": {"payload": "x"},
    "set_policies": {"max_publish_rate": 1},
    "seek": {"to": "earliest"},
    "move": {"to": "none"},
    "request_job": {"job": "compact"},
}
BY_THEMSELVES = {  # operations that ask the guard by themselves, with requests for a topic
    "danube.ProducerService/CreateProducer": (
        "produce",
        lambda name: danube.ProducerRequest(topic_name=name, producer_name="p"),
    ),
    "danube.ProducerService/SendMessage": (
        "produce",
        lambda name: danube.StreamMessage(
            msg_id=danube.MsgID(topic_name=name, producer_id=1), producer_name="p"
        ),
    ),
    "danube.ConsumerService/Subscribe": (
        "consume",
        lambda name: danube.ConsumerRequest(
            topic_name=name, consumer_name="c", subscription="other"
        ),
    ),
    "danube.ConsumerService/Ack": (
        "consume",
        lambda name: danube.AckRequest(msg_id=danube.MsgID(topic_name=name), subscription_name="s"),
    ),
    "danube.ConsumerService/Nack": (
        "consume",
        lambda name: danube.NackRequest(
            msg_id=danube.MsgID(topic_name=name), subscription_name="s"
        ),
    ),
    "danube_schema.SchemaRegistry/RegisterSchema": (
        "manage_schema",
        lambda name: danube_schema.RegisterSchemaRequest(
            subject=name, schema_type="json_schema", schema_definition=b"no schema"
        ),
    ),
    "ister.Admin/RestrictSubscription": (
        "manage_namespace",
        lambda name: ister_api.RestrictSubscriptionRequest(topic=name, subscription="s"),
    ),
}
OF_HANDLERS = {  # of paths that lead to no operation of gRPC
    "topic": "lookup",
    "messages": "consume",
    "download": "consume",
    "publish": "produce",
    "brokers": "lookup",
    "cluster": "lookup",
    "pipeline": "lookup",
    "request_job": "manage_broker",
    "confirm_clock": "manage_broker",
}


@asynccontextmanager
async def a_guarded_broker(tmp_path):
    """With `only-<permission>` and `without-<permission>`, on the whole cluster.

    And with `of-topic` and `of-namespace`, who may do everything with `OWN` and in its namespace.
    """
    async with a_broker(tmp_path, {"broker": {"auth": auth_settings(tmp_path)}}) as found:
        access = found[0].guard.access

        def bind(name, permissions, **place):
            access.create_role(Role(name=name, permissions=frozenset(permissions)))
            allow(access, name, name, **place)

        await asyncio.to_thread(bind, "of-topic", Permission, topic=OWN)
        await asyncio.to_thread(bind, "of-namespace", Permission, namespace="own")
        for one in Permission:
            await asyncio.to_thread(bind, f"only-{one}", [one])
            if one is not Permission.LOOKUP:  # who may do anything else may look up, too
                await asyncio.to_thread(bind, f"without-{one}", set(Permission) - {one})
        await found[0].topics.names.create_namespace("shop")
        topic = await found[0].topics.get_or_create(THERE, is_reliable=True)
        assert topic.is_reliable
        yield found


async def ask_rpc(services, path, need, who, name):
    service, _, method = path.partition("/")
    described = next(one for one in wire.describe_service(service).methods if one.name == method)
    request = wire.message_class(described.input_type)()
    if need.field:
        value = name if need.on == "topic" else name.split("/")[1]
        setattr(request, need.field, value)
    return await send(services, path, request, who, name)


async def send(services, path, request, who, name):
    rpc = wire.Rpc(*path.split("/"))
    try:
        answer = await rpc.on(services.channel)(request, metadata=headers_of(who), timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details().replace(name, "NAME")
    return "OK", str(answer).replace(name, "NAME")


async def ask_http(session, route, who, name, *, action="yes"):
    _, namespace, topic = name.split("/")
    path = route.path.format(namespace=namespace, topic=topic, subscription="s", node="none")
    body = {
        key: value.format(topic=name) if isinstance(value, str) else value
        for key, value in BODIES.get(route.handler, {}).items()
    }
    headers = {"Authorization": f"Bearer {sign(who)}"} if who else {}
    headers["X-Ister-Action"] = action
    more = {"json": body} if route.method == "POST" else {}
    async with session.request(route.method, path, headers=headers, **more) as answer:
        text = (await answer.text()).replace(name, "NAME")
        return answer.status, text.replace(f"namespace {namespace}", "NAMESPACE")


def without(permission):
    return "nobody" if permission == "lookup" else f"without-{permission}"


def test_every_operation_says_what_it_needs():
    found = dict(operations())
    assert set(SERVICES) == {path.partition("/")[0] for path in found}
    assert [path for path, need in found.items() if not need.words] == []
    for route in ROUTES:
        assert isinstance(route.needs, str) or route.needs.path[1:] in found


async def test_grpc_asks_for_the_permission_of_each_operation(tmp_path):
    async with a_guarded_broker(tmp_path) as (_, services, _listening):
        for path, need in operations():
            if need.permission is None:
                continue
            refused = [
                await ask_rpc(services, path, need, without(need.permission), name)
                for name in (THERE, MISSING)
            ]
            assert refused[0][0] == "PERMISSION_DENIED", (path, refused)
            if need.on == "topic":  # which of them exists is not told
                assert refused[0] == refused[1], path
            status, text = await ask_rpc(services, path, need, f"only-{need.permission}", MISSING)
            assert status != "PERMISSION_DENIED", (path, text)
            assert status != "INTERNAL", (path, text)


async def test_grpc_asks_for_permissions_where_they_are_given(tmp_path):
    """On a topic, in a namespace, or on the cluster."""
    async with a_guarded_broker(tmp_path) as (_, services, _listening):
        for path, need in operations():
            if need.permission is None:
                continue
            for who, reach in (("of-topic", ["topic"]), ("of-namespace", ["topic", "namespace"])):
                found = (await ask_rpc(services, path, need, who, OWN))[0]
                assert (found != "PERMISSION_DENIED") == (need.on in reach), (path, who)
                assert (await ask_rpc(services, path, need, who, THERE))[0] == "PERMISSION_DENIED"


async def test_operations_that_ask_by_themselves(tmp_path):
    async with a_guarded_broker(tmp_path) as (_, services, _listening):
        for path, (permission, make) in BY_THEMSELVES.items():

            async def ask(who, name, path=path, make=make):
                return await send(services, path, make(name), who, name)

            refused = [await ask(without(permission), name) for name in (THERE, MISSING)]
            assert refused[0][0] == "PERMISSION_DENIED", (path, refused)
            words = [refused[0][1].replace("shop", ""), refused[1][1].replace("nowhere", "")]
            assert words[0] == words[1]
            assert (await ask("of-topic", THERE))[0] == "PERMISSION_DENIED", path
            for who in (f"only-{permission}", "of-namespace"):
                assert (await ask(who, OWN))[0] != "PERMISSION_DENIED", (path, who)
            in_topic = permission != "manage_namespace"
            assert ((await ask("of-topic", OWN))[0] != "PERMISSION_DENIED") == in_topic


async def test_http_asks_for_the_permission_of_each_path(tmp_path):
    needs = {path: need.permission for path, need in operations()}
    async with a_guarded_broker(tmp_path) as (_, _services, listening):
        base = f"http://127.0.0.1:{listening.http}"
        async with aiohttp.ClientSession(base) as session:
            for route in ROUTES:
                if isinstance(route.needs, str):
                    permission = OF_HANDLERS.get(route.handler)
                    assert permission is None or f"`{permission}`" in route.needs
                else:
                    permission = needs[route.needs.path[1:]]
                if permission is None:
                    continue
                refused = [
                    await ask_http(session, route, without(permission), name)
                    for name in (THERE, MISSING)
                ]
                assert refused[0][0] == 403, (route, refused)
                assert refused[0] == refused[1], route
                assert (await ask_http(session, route, None, THERE))[0] == 401
                if route.method == "POST":  # as a page of another origin could send it
                    status, text = await ask_http(session, route, "root", THERE, action="")
                    assert (status, "X-Ister-Action" in text) == (403, True)
                status, text = await ask_http(session, route, f"only-{permission}", MISSING)
                assert status not in {403, 500}, (route, text)


async def test_metrics_are_for_those_who_may_look_up_everything(tmp_path):
    async with (
        a_guarded_broker(tmp_path) as (_, _services, listening),
        aiohttp.ClientSession(f"http://127.0.0.1:{listening.http}") as session,
    ):
        for who, status in (("nobody", 403), ("of-topic", 403), ("only-lookup", 200)):
            headers = {"Authorization": f"Bearer {sign(who)}"}
            async with session.get("/metrics", headers=headers) as answer:
                assert answer.status == status, who


async def test_lists_have_what_the_caller_may_see(tmp_path):
    async with a_guarded_broker(tmp_path) as (_, services, listening):
        base = f"http://127.0.0.1:{listening.http}"
        found = dict(operations())
        async with aiohttp.ClientSession(base) as session:
            for who, sees in (("nobody", False), ("only-lookup", True)):
                path = "ister.Admin/ListTopics"
                status, text = await ask_rpc(services, path, found[path], who, THERE)
                assert (status, "NAME" in text) == ("OK", sees)
                topics = next(route for route in ROUTES if route.handler == "topics")
                status, text = await ask_http(session, topics, who, THERE)
                assert (status, "NAME" in text) == (200, sees)
                overview = next(route for route in ROUTES if route.handler == "overview")
                assert (await ask_http(session, overview, who, THERE))[0] == (200 if sees else 403)


def publish(client, name):
    rows = pa.record_batch({"payload": pa.array([b"x"], pa.binary())})
    opened = flight.FlightDescriptor.for_command(PutOpen(topic=name, producer=None).to_json())
    try:
        writer, answers = client._client.do_put(opened, rows.schema, client._options())
        with writer:
            writer.done_writing()
            while answers.read() is not None:
                pass
    except flight.FlightError as error:
        raise decode_error(str(error)) from error


async def test_flight_asks_for_the_permission_of_each_call(tmp_path):
    calls = {
        "lookup": lambda client, name: client.watermarks([name]),
        "consume": lambda client, name: list(
            client.read(RangeTicket(topic=name, start=0, end=1, incarnation=""))
        ),
        "produce": publish,
    }
    async with a_guarded_broker(tmp_path) as (_, _services, listening):

        def asked(call, who, name):
            with FlightClient(f"grpc://127.0.0.1:{listening.flight}", token=sign(who)) as client:
                with pytest.raises(IsterError) as raised:
                    call(client, name)
                return raised.value

        for permission, call in calls.items():
            refused = [
                await asyncio.to_thread(asked, call, without(permission), name)
                for name in (THERE, MISSING)
            ]
            assert [type(one) for one in refused] == [PermissionDeniedError] * 2
            texts = [
                str(one).replace(n, "") for one, n in zip(refused, (THERE, MISSING), strict=True)
            ]
            assert texts[0] == texts[1]
            for who, name in ((f"only-{permission}", MISSING), ("of-topic", OWN)):
                found = await asyncio.to_thread(asked, call, who, name)
                assert not isinstance(found, PermissionDeniedError)
        for who, sees in (("nobody", []), ("of-topic", []), ("only-consume", [THERE])):
            with FlightClient(f"grpc://127.0.0.1:{listening.flight}", token=sign(who)) as client:
                assert await asyncio.to_thread(client.topics) == sees
