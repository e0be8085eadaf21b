"""A broker with TLS and auth, as programs meet it: Danube's own client, Flight and HTTP.

Danube's scenarios of security, its holes (DANUBE's auth faults), and the matrices of certificates,
tokens and permissions on all three ports of a real process. What a client can do about floods and
malformed requests is here too, since those who send them have no rights either.
"""

import asyncio
import contextlib
import json
import ssl
import time
from datetime import timedelta
from functools import partial
from itertools import count

import pytest

pytest.importorskip("danube")

import aiohttp
import grpc
from danube import DanubeClientBuilder, DispatchStrategy, SubType
from pyarrow import flight

from ister import wire
from ister.broker.security.minting import make_api_key
from ister.errors import UnauthenticatedError
from ister.wire import danube, danube_admin
from ister.wire.contract import (
    Action,
    WatermarksRequest,
)
from ister.wire.errors import carries_error, decode_error
from tests.servers.broker import BrokerProcess
from tests.support.certificates import IDENTITIES, LOCAL_NAMES, Authority
from tests.support.clock import ManualClock
from tests.support.danube import run
from tests.support.security import auth_settings, sign

Code = grpc.StatusCode
SERVERS, CLIENTS = Authority("servers"), Authority("clients")
_numbers = count()


class SecureBroker:
    """A broker process with certificates, tokens and API keys."""

    def __init__(self, directory, *, is_mutual=False, **auth):
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.issued = SERVERS.issue("broker", names=LOCAL_NAMES)
        cert_file, key_file = self.issued.write(directory, "broker")
        self.ca_file = SERVERS.write(directory, "servers")
        tls = {"cert_file": cert_file, "key_file": key_file}
        if is_mutual:
            tls |= {"ca_file": CLIENTS.write(directory, "clients"), "client_auth": "required"}
        self.api_key, line = make_api_key("loader")
        settings = auth_settings(directory, **auth)
        (directory / "api-keys").write_text(f"{line}\n")
        self.process = BrokerProcess(
            directory / "broker", settings={"broker": {"tls": tls, "auth": settings}}
        )

    def __enter__(self):
        self.process.start()
        return self

    def __exit__(self, *_):
        self.process.kill()

    @property
    def address(self):
        return self.process.address

    def audited(self):
        path = self.directory / "audit.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    # -- gRPC -------------------------------------------------------------------------------

    def channel(self, client=None):
        credentials = grpc.ssl_channel_credentials(
            root_certificates=SERVERS.certificate,
            private_key=client and client.key,
            certificate_chain=client and client.certificate,
        )
        # Each has a connection of its own, and a handshake.
        return grpc.aio.secure_channel(
            self.address, credentials, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    async def admin(self, method, request, *, service="danube_admin.SecurityAdmin", client=None):
        """A call as root."""
        async with self.channel(client) as channel:
            call = getattr(wire.stub(channel, service), method)
            return await call(request, metadata=bearer(sign("root")), timeout=30)

    async def allow(self, name, *roles, kind="user", scope="topic", resource=""):
        """Binds roles to somebody; gives what takes them back."""
        place = {"scope": scope, "resource_name": resource}
        key = f"binding-{next(_numbers)}"
        binding = danube_admin.BindingDefinition(
            id=key, principal_type=kind, principal_name=name, role_names=roles, **place
        )
        await self.admin("CreateBinding", danube_admin.CreateBindingRequest(binding=binding))
        asked = danube_admin.DeleteBindingRequest(binding_id=key, **place)
        return partial(self.admin, "DeleteBinding", asked)

    async def create_topic(self, topic):
        await self.admin(
            "CreateTopic",
            danube_admin.NewTopicRequest(name=topic, dispatch_strategy=1),
            service="danube_admin.TopicAdmin",
        )

    # -- Danube's client --------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def danube(self, token=None, *, supplier=None, client=None, internal=""):
        """The real client, with everything ended behind the block."""
        builder = DanubeClientBuilder().service_url(f"https://{self.address}")
        if client is None:
            builder.with_tls(self.ca_file)
        else:
            name = f"client-{next(_numbers)}"
            builder.with_mtls(self.ca_file, *client.write(self.directory, name))
        if token is not None:
            builder.with_token(token)
        if supplier is not None:
            builder.with_token_supplier(supplier)
        builder._options.internal_broker = internal
        session = _Session(await builder.build())
        try:
            yield session
        finally:
            await session.close()

    # -- Flight and HTTP --------------------------------------------------------------------

    def flight(self, client=None):
        shown = {}
        if client is not None:
            shown = {"cert_chain": client.certificate, "private_key": client.key}
        return flight.connect(
            f"grpc+tls://{self.process.flight}", tls_root_certs=SERVERS.certificate, **shown
        )

    @contextlib.asynccontextmanager
    async def http(self, client=None):
        context = ssl.create_default_context(cadata=SERVERS.certificate.decode())
        if client is not None:
            name = f"client-{next(_numbers)}"
            context.load_cert_chain(*client.write(self.directory, name))
        async with aiohttp.ClientSession(
            f"https://{self.process.http}", connector=aiohttp.TCPConnector(ssl=context)
        ) as session:
            yield session


class _Session:
    """Danube's client with what was made by it."""

    def __init__(self, client):
        self.client = client
        self._made = []

    async def producer(self, topic, name="producer", partitions=0):
        builder = self.client.new_producer().with_topic(topic).with_name(name)
        builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)
        if partitions:
            builder.with_partitions(partitions)
        producer = builder.build()
        self._made.append(producer)
        await producer.create()
        return producer

    async def consumer(self, topic, name="consumer", subscription="sub"):
        builder = self.client.new_consumer().with_topic(topic).with_consumer_name(name)
        builder.with_subscription(subscription).with_subscription_type(SubType.EXCLUSIVE)
        consumer = builder.build()
        self._made.append(consumer)
        await consumer.subscribe()
        return consumer

    async def close(self):
        for made in self._made:
            await made.close()
        connections = self.client.connection_manager._connections
        await asyncio.gather(*(held.channel.close() for held in connections.values()))
        connections.clear()


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


async def code_of(awaitable):
    """The status that a call ends with."""
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        assert error.details(), "a refusal without a word why"
        return error.code()
    return Code.OK


def flight_options(headers):
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    return flight.FlightCallOptions(headers=pairs, timeout=30)


def flight_outcome(call):
    """The error that a Flight call ends with, or None."""
    try:
        call()
    except flight.FlightError as error:
        text = str(error)
        return decode_error(text) if carries_error(text) else error
    return None


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with SecureBroker(tmp_path_factory.mktemp("secure") / "b") as broker:
        yield broker


@pytest.fixture(scope="module")
def mutual(tmp_path_factory):
    """A broker that wants certificates, and takes them for names."""
    directory = tmp_path_factory.mktemp("mutual") / "b"
    with SecureBroker(directory, is_mutual=True, mtls_principal=True) as broker:
        yield broker


@pytest.fixture
def topic():
    return f"/default/security-{next(_numbers)}"


# -- Danube's scenarios ---------------------------------------------------------------------


async def test_authorized_produce(broker, topic):
    await broker.allow("alice", "producer", resource=topic)
    async with broker.danube(sign("alice")) as session:
        producer = await session.producer(topic)
        assert await producer.send(b"hello") is not None


async def test_authorized_consume(broker, topic):
    """In Danube such a consumer may subscribe, and needs a right in the cluster to receive."""

    await broker.create_topic(topic)
    await broker.allow("alice", "producer", "consumer", resource=topic)
    async with broker.danube(sign("alice")) as session:
        consumer = await session.consumer(topic)
        queue = await consumer.receive()
        producer = await session.producer(topic)
        await producer.send(b"hello")
        message = await asyncio.wait_for(queue.get(), 60)
        assert message.payload == b"hello"
        await consumer.ack(message)
        await consumer.nack(message)


async def test_denied_produce(broker, topic):
    async with broker.danube(sign("nobody")) as session:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.producer(topic)
        assert caught.value.code() is Code.PERMISSION_DENIED


async def test_api_key_is_a_token_for_danubes_client(broker, topic):
    await broker.allow("loader", "producer", kind="service_account", resource=topic)
    async with broker.danube(broker.api_key) as session:
        producer = await session.producer(topic)
        await producer.send(b"hello")


# -- tokens ---------------------------------------------------------------------------------


async def test_matrix_of_tokens_on_all_ports(broker):
    """One of each kind: which tokens are bad is shown in `tests/unit/broker/security`."""
    tokens = {
        "nothing": None,
        "nonsense": "nonsense",
        "expired": sign("root", clock=ManualClock()),
        "wrong key": f"{broker.api_key}x",
        "good": sign("root"),
        "key": broker.api_key,
    }
    async with broker.channel() as channel, broker.http() as http:
        lookup = wire.stub(channel, "danube.Discovery").TopicLookup
        with broker.flight() as connection:
            for name, token in tokens.items():
                is_good = name in ("good", "key")
                headers = () if token is None else bearer(token)
                asked = danube.TopicLookupRequest(topic="/default/none")
                code = await code_of(lookup(asked, metadata=headers, timeout=30))
                assert (code is not Code.UNAUTHENTICATED) == is_good, name
                error = await asyncio.to_thread(
                    flight_outcome,
                    lambda headers=headers: list(
                        connection.do_action(
                            flight.Action(Action.TOPICS, b""), flight_options(headers)
                        )
                    ),
                )
                assert isinstance(error, UnauthenticatedError) == (not is_good), name
                async with http.get("/metrics", headers=dict(headers)) as response:
                    assert (response.status == 401) == (not is_good), name
        for path in ("/live", "/ready", "/health"):
            async with http.get(path) as response:
                assert response.status == 200


@pytest.mark.nightly
def test_expired_token_that_is_renewed_heals_by_itself(broker, topic):
    """The token ends in the middle of the stream; the client's supplier has a new one.

    Every message arrives, acknowledged ones once.
    """
    lifetime = 3

    async def scenario():
        await broker.create_topic(topic)
        await broker.allow("alice", "consumer", resource=topic)
        await broker.allow("bob", "producer", resource=topic)

        def supplier():
            return sign("alice", lifetime_seconds=lifetime)

        async with (
            broker.danube(supplier=supplier) as session,
            broker.danube(sign("bob")) as other,
        ):
            consumer = await session.consumer(topic)
            queue = await consumer.receive()
            producer = await other.producer(topic)
            started, seen = time.monotonic(), []
            number = 0
            while time.monotonic() - started < lifetime * 2.5:
                await producer.send(b"%d" % number)
                number += 1
                await asyncio.sleep(0.1)
                while not queue.empty():
                    message = queue.get_nowait()
                    await consumer.ack(message)
                    seen.append(int(message.payload))
            while len(set(seen)) < number:
                message = await asyncio.wait_for(queue.get(), 60)
                await consumer.ack(message)
                seen.append(int(message.payload))
            assert sorted(set(seen)) == list(range(number))
            assert len(seen) - number <= 10, "only what was on its way comes twice"
        ended = [line for line in broker.audited() if line["outcome"] == "ended"]
        assert any(line["principal"] == "user:alice" for line in ended)

    run(scenario())


# -- permissions ----------------------------------------------------------------------------


async def test_dead_letters_go_only_where_their_sender_may(broker, topic):
    """Whoever manages one topic must not write into another by way of its dead letters."""

    await broker.create_topic(topic)
    await broker.allow("owner", "admin", resource=topic)
    headers = bearer(sign("owner"))
    async with broker.channel() as channel:
        subscribe = wire.stub(channel, "danube.ConsumerService").Subscribe
        consumer = danube.ConsumerRequest(topic_name=topic, consumer_name="c", subscription="s")
        await subscribe(consumer, metadata=headers)
        set_policy = wire.stub(channel, "danube_admin.TopicAdmin").SetSubscriptionFailurePolicy

        def to(dead_letters):
            policy = danube_admin.SubscriptionFailurePolicy(
                max_redelivery_count=1,
                ack_timeout_ms=1000,
                base_redelivery_delay_ms=10,
                max_redelivery_delay_ms=10,
                dead_letter_topic=dead_letters,
                poison_policy=0,
            )
            request = danube_admin.SetSubscriptionFailurePolicyRequest(
                topic=topic, subscription="s", failure_policy=policy
            )
            return code_of(set_policy(request, metadata=headers))

        assert await to("/secret/plans") is Code.PERMISSION_DENIED
        await broker.allow("owner", "producer", resource=f"{topic}-dead")
        assert await to(f"{topic}-dead") is Code.OK


# -- certificates ---------------------------------------------------------------------------


def test_matrix_of_certificates_on_all_ports(mutual, topic):
    day = timedelta(days=1)
    clients = {
        "good": CLIENTS.issue("loader"),
        "none": None,
        "of another authority": Authority("clients").issue("loader"),
        "of the servers' authority": SERVERS.issue("loader"),
        "expired": CLIENTS.issue("loader", start=-2 * day, end=-day),
        "not yet": CLIENTS.issue("loader", start=day, end=2 * day),
    }

    async def scenario():
        asked = danube.TopicLookupRequest(topic=topic)
        for name, client in clients.items():
            is_good = name == "good"
            async with mutual.channel(client) as channel:
                lookup = wire.stub(channel, "danube.Discovery").TopicLookup
                code = await code_of(lookup(asked, metadata=bearer(sign("root")), timeout=60))
                assert (code is Code.UNAVAILABLE) == (not is_good), name

            def ask_flight(client=client):
                with mutual.flight(client) as connection:
                    action = flight.Action(Action.TOPICS, b"")
                    options = flight_options(bearer(sign("root")))
                    return list(connection.do_action(action, options))

            error = await asyncio.to_thread(flight_outcome, ask_flight)
            assert isinstance(error, flight.FlightUnavailableError) == (not is_good), name
            async with mutual.http(client) as http:
                try:
                    async with http.get("/live") as response:
                        assert response.status == 200
                        assert is_good, name
                except (aiohttp.ClientError, OSError):
                    assert not is_good, name
        async with grpc.aio.insecure_channel(mutual.address) as channel:
            lookup = wire.stub(channel, "danube.Discovery").TopicLookup
            code = await code_of(lookup(asked, metadata=bearer(sign("root")), timeout=60))
            assert code is Code.UNAVAILABLE, "plain text on a TLS port"

    run(scenario())


@pytest.mark.parametrize("case", IDENTITIES)
async def test_certificate_stands_for_the_same_name_on_every_port(mutual, case):
    """Goal: no port takes a common name, or a kind of name, that another one does not take.

    The audit log and the refusals name whom a port has taken the client for.
    """
    names, wanted = IDENTITIES[case]
    client = CLIENTS.issue("admin", names=names)

    async def ask_grpc():
        async with mutual.channel(client) as channel:
            listed = wire.stub(channel, "danube_admin.BrokerAdmin").ListBrokers
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await listed(danube_admin.Empty(), timeout=60)
            return caught.value.details()

    def ask_flight():
        asked = WatermarksRequest(topics=("/default/nobodys",))
        action = flight.Action(Action.WATERMARKS, asked.to_json())
        with mutual.flight(client) as connection, pytest.raises(flight.FlightError) as caught:
            list(connection.do_action(action, flight_options(())))
        return decode_error(str(caught.value)).message

    async def ask_http():
        async with mutual.http(client) as http, http.get("/metrics") as response:
            assert response.status in (401, 403)
            return (await response.json())["error"]

    answers = [await ask_grpc(), await asyncio.to_thread(ask_flight), await ask_http()]
    for answer in answers:
        if wanted is None:
            assert "names no principal" in answer
        else:
            assert answer.startswith(f"service:{wanted} has no permission"), answer


# -- what else may come ---------------------------------------------------------------------
