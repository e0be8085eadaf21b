"""The guard in front of a real gRPC server: mTLS, tokens, streams that end, floods."""

import asyncio
import contextlib
import time

import grpc
import pytest

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.broker.rpc.handlers import status_of
from ister.broker.security import grpc_guard
from ister.broker.security import guard as guard_module
from ister.broker.security.grpc_guard import GrpcGuard
from ister.broker.security.guard import current_caller, current_principal
from ister.broker.security.principal_limits import PrincipalLimit
from ister.broker.security.rights import Permission
from ister.broker.security.tls import ServerTls
from ister.config import ClientAuth, TlsConfig
from ister.errors import IsterError
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.waiting import eventually_async as eventually

ORDERS = "/default/orders"
SERVERS, CLIENTS = Authority("servers"), Authority("clients")
Code = grpc.StatusCode


class Service:
    """Answers with the name of its caller, once or again and again."""

    def __init__(self, guard):
        self.guard = guard
        self.streams = 0
        self.ended = 0

    async def who(self, _request, _context):
        return str(current_principal()).encode()

    async def send(self, request, _context):
        self.guard.check(current_principal(), Permission.PRODUCE, topic=request.decode())
        return b"sent"

    async def receive(self, request, _context):
        await self.guard.check_stream(
            current_principal(), Permission.CONSUME, topic=request.decode()
        )
        self.streams += 1
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    async def pour(self, _request, _context):
        """More than a client that does not read takes in."""
        try:
            while True:
                yield b"x" * 100_000
        finally:
            self.ended += 1

    async def echo(self, requests, _context):
        async for request in requests:
            yield request + b" " + current_caller().action.encode()

    def handler(self):
        return grpc.method_handlers_generic_handler(
            "test.Service",
            {
                "Who": grpc.unary_unary_rpc_method_handler(self.who),
                "Send": grpc.unary_unary_rpc_method_handler(_unary(self.send)),
                "Receive": grpc.unary_stream_rpc_method_handler(_writing(self.receive)),
                "Pour": grpc.unary_stream_rpc_method_handler(_writing(self.pour)),
                # As a generator, which the broker's own services are not for gRPC.
                "Generate": grpc.unary_stream_rpc_method_handler(self.receive),
                "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
                "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            },
        )

    async def collect(self, requests, _context):
        return b" ".join([request async for request in requests])


def _unary(call):
    """Turns errors into statuses, as the broker does."""

    async def handle(request, context):
        try:
            return await call(request, context)
        except IsterError as error:
            await context.abort(status_of(error), str(error))

    return handle


def _writing(call):
    """Writes a stream itself, as the broker does."""

    async def handle(request, context):
        answers = call(request, context)
        try:
            async for answer in answers:
                await context.write(answer)
        except IsterError as error:
            await context.abort(status_of(error), str(error))
        finally:
            await answers.aclose()

    return handle


@contextlib.asynccontextmanager
async def serving(guard, *, tls=None, **more):
    """The service, and where it is."""
    service = Service(guard)
    server = grpc.aio.server(interceptors=[GrpcGuard(guard, **more)])
    server.add_generic_rpc_handlers((service.handler(),))
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", tls.grpc_credentials())
    await server.start()
    try:
        yield service, f"localhost:{port}"
    finally:
        await server.stop(0.1)


@contextlib.asynccontextmanager
async def connected(guard, **more):
    """The service, and a channel to it."""
    async with (
        serving(guard, **more) as (service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield service, channel


def call(channel, method, kind="unary_unary"):
    return getattr(channel, kind)(f"/test.Service/{method}")


def receive(channel, headers, method="Receive", topic=ORDERS):
    """A stream of answers."""
    of_stream = call(channel, method, "unary_stream")
    return of_stream(topic.encode(), metadata=metadata(headers))


async def code_of(awaitable):
    """The status that a call ends with."""
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


def metadata(headers):
    return tuple(headers.items())


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(grpc_guard, "VERIFY_SECONDS", 0.02)
    monkeypatch.setattr(guard_module, "REFUSAL_SECONDS", 0.05)


# -- tokens ---------------------------------------------------------------------------------


async def test_every_kind_of_call_needs_credentials(rig):
    """All four shapes of calls; the handler is never reached without."""
    async with connected(rig.guard) as (service, channel):
        good = rig.bearer("root")
        for headers, wanted in (({}, Code.UNAUTHENTICATED), (good, Code.OK)):
            with_headers = {"metadata": metadata(headers)}
            assert await code_of(call(channel, "Who")(b"", **with_headers)) is wanted
            stream = receive(channel, headers)
            assert await code_of(stream.read()) is wanted
            stream.cancel()
            echo = call(channel, "Echo", "stream_stream")(iter([b"hello"]), **with_headers)
            assert await code_of(echo.read()) is wanted
            echo.cancel()
            collect = call(channel, "Collect", "stream_unary")
            assert await code_of(collect(iter([b"a", b"b"]), **with_headers)) is wanted
        assert service.streams == 1
        unknown = call(channel, "None")(b"", metadata=metadata(good))
        assert await code_of(unknown) is Code.UNIMPLEMENTED


async def test_handler_sees_its_caller(rig):
    async with connected(rig.guard) as (_, channel):
        names = [f"user-{n}" for n in range(20)]
        answers = await asyncio.gather(
            *(call(channel, "Who")(b"", metadata=metadata(rig.bearer(n))) for n in names)
        )
        assert answers == [f"user:{name}".encode() for name in names]
        echo = call(channel, "Echo", "stream_stream")(
            iter([b"hello"]), metadata=metadata(rig.bearer("alice"))
        )
        assert await echo.read() == b"hello test.Service/Echo"


# -- streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["token", "key", "right", "role"])
async def test_stream_ends_when_its_caller_is_no_longer_welcome(rig, how):
    """By the end of the token, of the key, of the binding; and the handler lets go."""
    name, kind = ("loader", "service") if how == "key" else ("alice", "user")
    binding = rig.allow(name, "consumer", topic=ORDERS, kind=kind)
    headers = rig.bearer("alice", lifetime_seconds=100)
    if how == "key":
        headers = {"x-api-key": rig.api_key("loader")}
    async with connected(rig.guard) as (service, channel):
        streams = [receive(channel, headers, method) for method in ("Receive", "Generate")]
        root = receive(channel, rig.bearer("root"))
        for stream in (*streams, root):
            assert await stream.read() == b"first"
        if how == "token":
            rig.clock.advance(100)
        elif how == "key":
            rig.withdraw_keys()
        elif how == "right":
            rig.revoke(binding)
        else:
            await asyncio.to_thread(rig.store.delete_prefix, "/danube/auth/bindings/")
        wanted = Code.UNAUTHENTICATED if how in ("token", "key") else Code.PERMISSION_DENIED
        for stream in streams:
            assert await code_of(stream.read()) is wanted
        assert service.ended == 2, "what the handlers hold is let go of"
        assert not root.done(), "nobody else's stream ends"
        root.cancel()


async def test_stream_of_a_client_that_does_not_read_ends_too(rig, monkeypatch, caplog):
    """The handler lets go at once; the client finds the status behind what it had not read."""
    monkeypatch.setattr(grpc_guard, "_ABORT_SECONDS", 0.3)
    async with connected(rig.guard) as (service, channel):
        stream = receive(channel, rig.bearer("root", lifetime_seconds=50), "Pour")
        await stream.read()
        await asyncio.sleep(0.2)
        assert service.ended == 0
        rig.clock.advance(50)
        await eventually(lambda: service.ended)
        await asyncio.sleep(0.5)
        assert await call(channel, "Who")(b"", metadata=metadata(rig.bearer("root")))
        code = Code.OK
        while code is Code.OK:
            code = await code_of(stream.read())
        assert code is Code.UNAUTHENTICATED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_cancelled_stream_ends_as_ever(rig):
    async with connected(rig.guard) as (service, channel):
        stream = receive(channel, rig.bearer("root"))
        assert await stream.read() == b"first"
        stream.cancel()
        await eventually(lambda: service.ended)


async def test_streams_of_one_principal_are_limited(rig):
    """A flood of streams by one; another one gets in, and a stream that ends makes room."""
    rig.allow("alice", "consumer", topic=ORDERS)
    rig.allow("bob", "consumer", topic=ORDERS)
    limit = PrincipalLimit("streams", 3, Metrics(), setting="limit")
    async with connected(rig.guard, streams=limit) as (_, channel):
        kept = [receive(channel, rig.bearer("alice")) for _ in range(3)]
        for stream in kept:
            assert await stream.read() == b"first"

        async def once_more():
            return await code_of(receive(channel, rig.bearer("alice")).read())

        assert await once_more() is Code.RESOURCE_EXHAUSTED
        bobs = receive(channel, rig.bearer("bob"))
        assert await bobs.read() == b"first"
        kept[0].cancel()

        async def has_room():
            return await once_more() is Code.OK

        await eventually(has_room)
        for stream in (*kept, bobs):
            stream.cancel()


async def test_calls_whose_request_does_not_arrive_are_limited(rig):
    """They could stay for ever, until gRPC takes nobody's calls any more."""
    arriving = PrincipalLimit("calls", 3, Metrics(), setting="limit")
    async with connected(rig.guard, arriving=arriving) as (_, channel):

        async def who(name):
            return await code_of(call(channel, "Who")(b"", metadata=metadata(rig.bearer(name))))

        alice = metadata(rig.bearer("alice"))
        kept = [call(channel, "Who", "stream_unary")(metadata=alice) for _ in range(4)]
        await eventually(lambda: any(one.done() for one in kept))
        (refused,) = [one for one in kept if one.done()]
        assert await code_of(refused) is Code.RESOURCE_EXHAUSTED
        waiting = [one for one in kept if one is not refused]
        assert await who("alice") is Code.RESOURCE_EXHAUSTED
        assert await who("bob") is Code.OK
        waiting.pop().cancel()

        async def has_room():
            return await who("alice") is Code.OK

        await eventually(has_room)
        for one in waiting:
            one.cancel()


async def test_refused_streams_cannot_spin(rig, monkeypatch):
    """The client of Danube opens a refused stream again at once: so the refusal takes a while."""
    monkeypatch.setattr(guard_module, "REFUSAL_SECONDS", 0.25)
    async with connected(rig.guard) as (_, channel):
        for headers, wanted in (
            ({}, Code.UNAUTHENTICATED),
            (rig.bearer("nobody"), Code.PERMISSION_DENIED),
        ):
            started = time.monotonic()
            for _ in range(3):
                assert await code_of(receive(channel, headers).read()) is wanted
            assert time.monotonic() - started > 0.7


# -- TLS ------------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path):
    """A server that wants certificates of clients."""
    directory = tmp_path / "tls"
    directory.mkdir()
    cert_file, key_file = SERVERS.issue("broker", names=LOCAL_NAMES).write(directory, "broker")
    config = TlsConfig(
        cert_file=cert_file,
        key_file=key_file,
        ca_file=CLIENTS.write(directory),
        client_auth=ClientAuth.REQUIRED,
    )
    return ServerTls(config, clock=SystemClock())


def secure(address, *, authority=SERVERS, client=None):
    credentials = grpc.ssl_channel_credentials(
        root_certificates=authority.certificate,
        private_key=None if client is None else client.key,
        certificate_chain=None if client is None else client.certificate,
    )
    return grpc.aio.secure_channel(address, credentials)


async def test_new_certificates_are_taken_by_new_connections(rig, tls, tmp_path, monkeypatch):
    """The server's certificate and the clients' authority change; streams that stand go on."""
    monkeypatch.setattr("ister.base.certificates._RELOAD_SECONDS", 0.0)
    servers, clients = Authority("new servers"), Authority("new clients")
    async with serving(rig.guard, tls=tls) as (_, address):
        headers = metadata(rig.bearer("root"))
        old, new = CLIENTS.issue("old"), clients.issue("new")
        async with secure(address, client=old) as standing:
            stream = receive(standing, rig.bearer("root"))
            assert await stream.read() == b"first"
            servers.issue("broker", names=LOCAL_NAMES).write(tmp_path / "tls", "broker")
            clients.write(tmp_path / "tls")
            async with secure(address, client=new, authority=servers) as channel:
                assert await call(channel, "Who")(b"", metadata=headers) == b"user:root"
            async with secure(address, client=old, authority=servers) as channel:
                code = await code_of(call(channel, "Who")(b"", metadata=headers))
                assert code is Code.UNAVAILABLE
            assert await call(standing, "Who")(b"", metadata=headers) == b"user:root"
            assert not stream.done()
            stream.cancel()
