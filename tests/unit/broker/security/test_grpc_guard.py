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


def call(channel, method, kind="unary_unary"):
    return getattr(channel, kind)(f"/test.Service/{method}")


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

    async with (
        serving(rig.guard) as (service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        good = metadata(rig.bearer("root"))
        for headers, wanted in (((), Code.UNAUTHENTICATED), (good, Code.OK)):
            assert await code_of(call(channel, "Who")(b"", metadata=headers)) is wanted
            stream = call(channel, "Receive", "unary_stream")(b"/a/b", metadata=headers)
            assert await code_of(stream.read()) is wanted
            stream.cancel()
            echo = call(channel, "Echo", "stream_stream")(iter([b"hello"]), metadata=headers)
            assert await code_of(echo.read()) is wanted
            echo.cancel()
            collected = call(channel, "Collect", "stream_unary")(
                iter([b"a", b"b"]), metadata=headers
            )
            assert await code_of(collected) is wanted
        assert service.streams == 1
        assert await code_of(call(channel, "None")(b"", metadata=good)) is Code.UNIMPLEMENTED


async def test_handler_sees_its_caller(rig):
    async with serving(rig.guard) as (_, address), grpc.aio.insecure_channel(address) as channel:
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


async def _ended(stream):
    """How a stream ends that had its first message."""
    assert await stream.read() == b"first"
    return stream.read()


@pytest.mark.parametrize("how", ["token", "key", "right", "role"])
async def test_stream_ends_when_its_caller_is_no_longer_welcome(rig, how):
    """By the end of the token, of the key, of the binding; and the handler lets go."""
    binding = rig.allow("alice", "consumer", topic=ORDERS)
    headers = rig.bearer("alice", lifetime_seconds=100)
    if how == "key":
        key_binding = rig.allow("loader", "consumer", topic=ORDERS, kind="service")
        headers = {"x-api-key": rig.api_key("loader")}
        assert key_binding

    async with (
        serving(rig.guard) as (service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        rests = [
            await _ended(
                call(channel, method, "unary_stream")(ORDERS.encode(), metadata=metadata(headers))
            )
            for method in ("Receive", "Generate")
        ]
        root = call(channel, "Receive", "unary_stream")(
            ORDERS.encode(), metadata=metadata(rig.bearer("root"))
        )
        assert await root.read() == b"first"
        if how == "token":
            rig.clock.advance(100)
        elif how == "key":
            rig.withdraw_keys()
        elif how == "right":
            rig.revoke(binding)
        else:
            await asyncio.to_thread(rig.store.delete_prefix, "/danube/auth/bindings/")
        wanted = Code.UNAUTHENTICATED if how in ("token", "key") else Code.PERMISSION_DENIED
        for rest in rests:
            assert await code_of(rest) is wanted
        assert service.ended == 2, "what the handlers hold is let go of"
        assert not root.done(), "nobody else's stream ends"
        root.cancel()


async def test_stream_of_a_client_that_does_not_read_ends_too(rig, monkeypatch, caplog):
    """The handler lets go at once; the client finds the status behind what it had not read."""
    monkeypatch.setattr(grpc_guard, "_ABORT_SECONDS", 0.3)

    async with (
        serving(rig.guard) as (service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = call(channel, "Pour", "unary_stream")(
            b"", metadata=metadata(rig.bearer("root", lifetime_seconds=50))
        )
        await stream.read()
        await asyncio.sleep(0.2)
        assert service.ended == 0
        rig.clock.advance(50)
        async with asyncio.timeout(60):
            while not service.ended:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert await call(channel, "Who")(b"", metadata=metadata(rig.bearer("root")))
        code = Code.OK
        while code is Code.OK:
            code = await code_of(stream.read())
        assert code is Code.UNAUTHENTICATED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_cancelled_stream_ends_as_ever(rig):
    async with (
        serving(rig.guard) as (service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = call(channel, "Receive", "unary_stream")(
            ORDERS.encode(), metadata=metadata(rig.bearer("root"))
        )
        assert await stream.read() == b"first"
        stream.cancel()
        async with asyncio.timeout(60):
            while not service.ended:
                await asyncio.sleep(0.01)


async def test_streams_of_one_principal_are_limited(rig):
    """A flood of streams by one; another one gets in, and a stream that ends makes room."""
    rig.allow("alice", "consumer", topic=ORDERS)
    rig.allow("bob", "consumer", topic=ORDERS)

    async with (
        serving(rig.guard, streams=PrincipalLimit("streams", 3, Metrics(), setting="limit")) as (
            _,
            address,
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        receive = call(channel, "Receive", "unary_stream")

        def opened(name):
            return receive(ORDERS.encode(), metadata=metadata(rig.bearer(name)))

        kept = [opened("alice") for _ in range(3)]
        for stream in kept:
            assert await stream.read() == b"first"
        assert await code_of(opened("alice").read()) is Code.RESOURCE_EXHAUSTED
        bobs = opened("bob")
        assert await bobs.read() == b"first"
        kept[0].cancel()
        async with asyncio.timeout(60):
            while await code_of(opened("alice").read()) is not Code.OK:
                await asyncio.sleep(0.01)
        for stream in (*kept, bobs):
            stream.cancel()


async def test_calls_whose_request_does_not_arrive_are_limited(rig):
    """They could stay for ever, until gRPC takes nobody's calls any more."""

    arriving = PrincipalLimit("calls", 3, Metrics(), setting="limit")
    async with (
        serving(rig.guard, arriving=arriving) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):

        def who(name):
            return call(channel, "Who")(b"", metadata=metadata(rig.bearer(name)))

        alice = metadata(rig.bearer("alice"))
        kept = [call(channel, "Who", "stream_unary")(metadata=alice) for _ in range(4)]
        while not any(one.done() for one in kept):
            await asyncio.sleep(0.01)
        (refused,) = [one for one in kept if one.done()]
        assert await code_of(refused) is Code.RESOURCE_EXHAUSTED
        waiting = [one for one in kept if one is not refused]
        assert await code_of(who("alice")) is Code.RESOURCE_EXHAUSTED
        assert await code_of(who("bob")) is Code.OK
        waiting.pop().cancel()
        async with asyncio.timeout(60):
            while await code_of(who("alice")) is not Code.OK:
                await asyncio.sleep(0.01)
        for one in waiting:
            one.cancel()


async def test_refused_streams_cannot_spin(rig, monkeypatch):
    """The client of Danube opens a refused stream again at once: so the refusal takes a while."""
    monkeypatch.setattr(guard_module, "REFUSAL_SECONDS", 0.25)

    async with serving(rig.guard) as (_, address), grpc.aio.insecure_channel(address) as channel:
        for headers, wanted in (
            ((), Code.UNAUTHENTICATED),
            (metadata(rig.bearer("nobody")), Code.PERMISSION_DENIED),
        ):
            started = time.monotonic()
            for _ in range(3):
                stream = call(channel, "Receive", "unary_stream")(b"/a/b", metadata=headers)
                assert await code_of(stream.read()) is wanted
            assert time.monotonic() - started > 0.7


async def test_flood_of_bad_tokens_harms_nobody(rig):
    """2,000 bad tokens from 50 tasks: others are served, and what is kept stays small."""

    async with serving(rig.guard) as (_, address), grpc.aio.insecure_channel(address) as channel:
        who = call(channel, "Who")

        async def flood(n):
            for m in range(40):
                bad = (("authorization", f"Bearer {n}.{m}.{'x' * 2000}"),)
                assert await code_of(who(b"", metadata=bad)) is Code.UNAUTHENTICATED

        floods = asyncio.gather(*(flood(n) for n in range(50)))
        served = 0
        while not floods.done():
            answer = await who(b"", metadata=metadata(rig.bearer("root")))
            served += answer == b"user:root"
        await floods
        assert served
        assert rig.guard.refused_logins == 2000
        assert len(rig.guard._remembered) <= 2
    assert len(rig.audited()) < 20


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
            stream = call(standing, "Receive", "unary_stream")(b"/a/b", metadata=headers)
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
