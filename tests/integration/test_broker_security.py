"""A broker with TLS and auth, as programs meet it: Danube's own client, Flight and HTTP.

Danube's scenarios of security, its holes (DANUBE's auth faults), and the matrices of certificates,
tokens and permissions on all three ports of a real process. What a client can do about floods and
malformed requests is here too, since those who send them have no rights either.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import count

import pytest

pytest.importorskip("danube")

import aiohttp
import grpc
import jwt
import pyarrow as pa
from danube import DanubeClientBuilder, DispatchStrategy, SubType
from pyarrow import flight

from ister import wire
from ister.broker.publish.producers import producer_id
from ister.broker.security.minting import make_api_key
from ister.errors import PermissionDeniedError, UnauthenticatedError
from ister.wire import danube, danube_admin, ister_api
from ister.wire.contract import (
    Action,
    PutBatch,
    PutOpen,
    TopicNames,
    WatermarksRequest,
)
from ister.wire.errors import carries_error, decode_error
from tests.servers.broker import BrokerProcess
from tests.support.certificates import IDENTITIES, LOCAL_NAMES, Authority
from tests.support.danube import eventually, run
from tests.support.security import AUDIENCE, ISSUER, SECRET, auth_settings, sign

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


def test_nobody_publishes_or_ends_a_producer_under_anothers_name(broker, topic):
    """Goal: one message with a high epoch must not retire a producer; an operator frees names."""
    numbered = {"ister-sequence": "2", "ister-producer-epoch": "4294967295"}

    def send(token, attributes, number=2):
        request = danube.StreamMessage(
            request_id=number,
            msg_id=danube.MsgID(
                producer_id=producer_id(topic, "shop"), topic_name=topic, broker_addr="b"
            ),
            payload=b"forged",
            producer_name="shop",
            attributes=attributes,
        )
        return code_of(
            wire.stub(channel, "danube.ProducerService").SendMessage(
                request, metadata=bearer(token), timeout=30
            )
        )

    async def put(token):
        rows = pa.record_batch({"payload": pa.array([b"forged"], pa.binary())})
        opened = PutOpen(topic=topic, producer="shop", epoch=1)

        def call():
            client = broker.flight()
            descriptor = flight.FlightDescriptor.for_command(opened.to_json())
            writer, answers = client.do_put(
                descriptor, rows.schema, options=flight_options(bearer(token))
            )
            with writer:
                writer.write_with_metadata(rows, PutBatch(sequence=1).to_json())
                writer.done_writing()
                while answers.read() is not None:
                    pass

        found = await asyncio.to_thread(flight_outcome, call)
        assert isinstance(found, PermissionDeniedError), found

    async def scenario():
        nonlocal channel
        await broker.create_topic(topic)
        for name in ("alice", "mallory"):
            await broker.allow(name, "producer", resource=topic)
        async with broker.danube(sign("alice")) as session, broker.channel() as channel:
            producer = await session.producer(topic, name="shop")
            await producer.send(b"1", {"ister-sequence": "1"})
            async with broker.danube(sign("mallory")) as other:
                assert await code_of(other.producer(topic, name="shop")) is Code.PERMISSION_DENIED
            for attributes in ({}, numbered, {**numbered, "ister-producer-epoch": "1"}):
                assert await send(sign("mallory"), attributes) is Code.PERMISSION_DENIED
            await put(sign("mallory"))
            assert await send(sign("alice"), numbered) is Code.INVALID_ARGUMENT, "epoch too high"
            await producer.send(b"2", {"ister-sequence": "2"})
            released = await broker.admin(
                "ReleaseProducer",
                ister_api.ProducerName(topic=topic, producer="shop"),
                service="ister.Admin",
            )
            assert released.principal == "user:alice"
            assert await send(sign("mallory"), {}) is Code.OK
            assert await send(sign("alice"), {}) is Code.PERMISSION_DENIED

    channel = None
    run(scenario())


async def test_api_key_is_a_token_for_danubes_client(broker, topic):
    await broker.allow("loader", "producer", kind="service_account", resource=topic)
    async with broker.danube(broker.api_key) as session:
        producer = await session.producer(topic)
        await producer.send(b"hello")


def danube_token(name, kind="user"):
    """A token with the claims that Danube's admin tool gives it: there is no audience."""
    claims = {
        "iss": "danube-auth",
        "exp": int(time.time()) + 600,
        "sub": name,
        "principal_type": kind,
        "principal_name": name,
    }
    return jwt.encode(claims, SECRET, algorithm="HS256")


async def test_tokens_of_danubes_admin_tool(tmp_path, topic):
    """Goal: they are taken by settings without an audience, and by no others."""
    settings = {"algorithm": "HS256", "secret": SECRET, "issuer": "danube-auth"}
    binding = danube_admin.BindingDefinition(
        id="b1",
        principal_type="service_account",
        principal_name="shop",
        role_names=["producer", "consumer"],
        scope="topic",
        resource_name=topic,
    )
    for audience in (None, "ister"):
        directory = tmp_path / f"audience-{audience}"
        with SecureBroker(directory, jwt={**settings, "audience": audience}) as broker:
            async with broker.channel() as channel:
                call = wire.stub(channel, "danube_admin.SecurityAdmin").CreateBinding(
                    danube_admin.CreateBindingRequest(binding=binding),
                    metadata=bearer(danube_token("root")),
                    timeout=30,
                )
                expected = Code.OK if audience is None else Code.UNAUTHENTICATED
                assert await code_of(call) is expected
            warnings = broker.process.log.count("broker.auth.jwt.audience is not set")
            assert warnings == (audience is None)
            if audience is not None:
                continue
            async with broker.danube(danube_token("shop", "service_account")) as session:
                producer = await session.producer(topic)
                queue = await (await session.consumer(topic)).receive()
                await producer.send(b"hello")
                assert (await asyncio.wait_for(queue.get(), 60)).payload == b"hello"
            # A user of that name is someone else, and a broker nobody can be.
            for kind, code in (
                ("user", Code.PERMISSION_DENIED),
                ("broker_internal", Code.UNAUTHENTICATED),
            ):
                async with broker.danube(danube_token("shop", kind)) as session:
                    assert await code_of(session.producer(topic)) is code


async def test_partitions_of_a_topic_have_its_rights(broker, topic):
    """The client makes the names of partitions itself; a binding names the topic."""

    await broker.allow("alice", "producer", "consumer", resource=topic)
    async with broker.danube(sign("alice")) as session:
        producer = await session.producer(topic, partitions=3)
        consumer = await session.consumer(topic)
        queue = await consumer.receive()
        for n in range(6):
            await producer.send(b"%d" % n)
        seen = set()
        for _ in range(6):
            message = await asyncio.wait_for(queue.get(), 60)
            seen.add(message.msg_id.topic_name)
            await consumer.ack(message)
        assert seen == {f"{topic}-part-{n}" for n in range(3)}


async def test_internal_broker_header_grants_nothing(broker, topic):
    """In Danube this header alone makes any client a super-admin."""

    for token, wanted in ((None, Code.UNAUTHENTICATED), (sign("x"), Code.PERMISSION_DENIED)):
        async with broker.danube(token, internal="broker-1") as session:
            assert await code_of(session.producer(topic)) is wanted
    async with broker.channel() as channel:
        calls = wire.stub(channel, "danube_admin.SecurityAdmin")
        header = ("x-danube-internal-broker", "broker-1")
        code = await code_of(calls.ListRoles(danube_admin.Empty(), metadata=(header,)))
        assert code is Code.UNAUTHENTICATED


# -- tokens ---------------------------------------------------------------------------------


def _forged(algorithm, key=None, **claims):
    key = key or SECRET.encode()
    now = int(time.time())
    known = {"sub": "root", "iss": ISSUER, "aud": AUDIENCE, "exp": now + 600, **claims}
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
        for part in (
            {"alg": algorithm, "typ": "JWT"},
            {name: value for name, value in known.items() if value is not None},
        )
    ]
    content = b".".join(parts)
    signature = base64.urlsafe_b64encode(hmac.digest(key, content, hashlib.sha256)).rstrip(b"=")
    return (content + b"." + (b"" if algorithm == "none" else signature)).decode()


def _bad_tokens(broker):
    now = int(time.time())
    return {
        "nothing": None,
        "empty": "",
        "nonsense": "nonsense",
        "too long": "x" * 7500,
        "unsigned": _forged("none"),
        "another algorithm": _forged("HS512"),
        "another key": _forged("HS256", key=b"k" * 32),
        "the certificate as a key": _forged("HS256", key=SERVERS.certificate),
        "expired": _forged("HS256", exp=now - 1),
        "no exp": _forged("HS256", exp=None),
        "no sub": _forged("HS256", sub=None),
        "no iss": _forged("HS256", iss=None),
        "no aud": _forged("HS256", aud=None),
        "another iss": _forged("HS256", iss="https://other.example"),
        "another aud": _forged("HS256", aud="kafka"),
        "not yet": _forged("HS256", nbf=now + 600),
        "a broker": _forged("HS256", principal_type="broker_internal"),
        "wrong key": f"{broker.api_key}x",
    }


async def test_matrix_of_tokens_on_all_ports(broker):
    """Every bad token is refused on gRPC, Flight and HTTP; the forger's good one is taken."""

    tokens = {**_bad_tokens(broker), "good": _forged("HS256"), "key": broker.api_key}
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


@pytest.mark.nightly
async def test_expired_token_that_is_not_renewed_ends_the_stream(broker, topic):
    """And the client, which opens the stream again without end, is kept from spinning."""

    await broker.create_topic(topic)
    await broker.allow("alice", "consumer", resource=topic)
    async with broker.danube(sign("alice", lifetime_seconds=3)) as session:
        consumer = await session.consumer(topic)
        (part,) = consumer._consumers.values()
        opened = []
        receive = part.receive

        async def counted():
            opened.append(time.monotonic())
            return await receive()

        part.receive = counted
        await consumer.receive()
        await eventually(lambda: len(opened) > 1)
        before = len(opened)
        await asyncio.sleep(3)
        assert len(opened) - before <= 8, "a refused stream is refused slowly"
    async with broker.channel() as channel:
        stub = wire.stub(channel, "danube.ConsumerService")
        stream = stub.ReceiveMessages(
            danube.ReceiveRequest(consumer_id=part.consumer_id),
            metadata=bearer(_forged("HS256", sub="alice", exp=int(time.time()) + 2)),
        )
        started = time.monotonic()
        assert await code_of(stream.read()) is Code.UNAUTHENTICATED
        assert 1 < time.monotonic() - started < 10


async def test_withdrawn_key_ends_within_seconds(broker, topic, tmp_path):
    key, line = make_api_key("temporary")
    path = broker.directory / "api-keys"
    before = path.read_text()
    path.write_text(f"{before}{line}\n")
    await broker.create_topic(topic)
    await broker.allow("temporary", "consumer", kind="service", resource=topic)
    async with broker.channel() as channel:
        consumers = wire.stub(channel, "danube.ConsumerService")

        async def subscribed():
            asked = danube.ConsumerRequest(topic_name=topic, consumer_name="c", subscription="s")
            try:
                return await consumers.Subscribe(asked, metadata=bearer(key))
            except grpc.aio.AioRpcError as error:
                assert error.code() is Code.UNAUTHENTICATED
                return None

        found = await eventually(subscribed)
        stream = consumers.ReceiveMessages(
            danube.ReceiveRequest(consumer_id=found.consumer_id), metadata=bearer(key)
        )
        reading = asyncio.ensure_future(code_of(stream.read()))
        await asyncio.sleep(1.5)
        assert not reading.done()
        path.write_text(before)
        assert await asyncio.wait_for(reading, 60) is Code.UNAUTHENTICATED


# -- permissions ----------------------------------------------------------------------------

_DOCUMENT = b'{"type": "object"}'


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


async def test_revoked_right_ends_what_uses_it(broker, topic):
    """A consumer's stream, a Flight read to come, and a producer's next message: within seconds."""

    await broker.create_topic(topic)
    consuming = await broker.allow("alice", "consumer", resource=topic)
    producing = await broker.allow("alice", "producer", resource=topic)
    headers = bearer(sign("alice"))
    async with broker.channel() as channel, broker.danube(sign("alice")) as session:
        producer = await session.producer(topic)
        consumers = wire.stub(channel, "danube.ConsumerService")
        found = await consumers.Subscribe(
            danube.ConsumerRequest(topic_name=topic, consumer_name="c", subscription="s"),
            metadata=headers,
        )
        stream = consumers.ReceiveMessages(
            danube.ReceiveRequest(consumer_id=found.consumer_id), metadata=headers
        )
        await producer.send(b"before")
        message = await asyncio.wait_for(stream.read(), 60)
        assert message.payload == b"before"
        await consuming()
        assert await asyncio.wait_for(code_of(stream.read()), 60) is Code.PERMISSION_DENIED
        await producer.send(b"the other right is still there")
        await producing()
        assert await code_of(producer.send(b"after")) is Code.PERMISSION_DENIED
        asked = danube.AckRequest(msg_id=message.msg_id, subscription_name="s")
        assert await code_of(consumers.Ack(asked, metadata=headers)) is Code.PERMISSION_DENIED


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


def test_certificate_says_who_it_is_to_danubes_client(mutual, topic):
    """With mTLS alone the certificate is the caller; a token goes before it."""
    loader = CLIENTS.issue("ignored", names=("spiffe://example/loader",))
    other = CLIENTS.issue("spiffe://example/loader-2")

    async def scenario():
        request = danube_admin.CreateBindingRequest(
            binding=danube_admin.BindingDefinition(
                id=f"mtls-{next(_numbers)}",
                principal_type="service_account",
                principal_name="spiffe://example/loader",
                role_names=["producer"],
                scope="topic",
                resource_name=topic,
            )
        )
        await mutual.admin("CreateBinding", request, client=loader)
        async with mutual.danube(client=loader) as session:
            producer = await session.producer(topic)
            await producer.send(b"hello")
        async with mutual.danube(client=other) as session:
            assert await code_of(session.producer(topic)) is Code.PERMISSION_DENIED
        async with mutual.danube(sign("nobody"), client=loader) as session:
            assert await code_of(session.producer(topic)) is Code.PERMISSION_DENIED
        async with mutual.danube("nonsense", client=loader) as session:
            assert await code_of(session.producer(topic)) is Code.UNAUTHENTICATED

        def ask_flight():
            with mutual.flight(loader) as connection:
                action = flight.Action(Action.TOPICS, b"")
                (answer,) = connection.do_action(action, flight_options(()))
                return TopicNames.from_json(answer.body.to_pybytes()).topics

        assert await asyncio.to_thread(ask_flight) == (topic,)
        async with mutual.http(loader) as http, http.get("/metrics") as response:
            assert response.status == 403

    run(scenario())


@pytest.mark.nightly
async def test_certificate_that_expires_is_refused_on_open_connections(mutual, topic):
    """Goal: TLS looks at the time once; calls, streams and resumed sessions come later."""
    name = f"brief-{next(_numbers)}"
    ends_at = time.time() + 15
    brief = CLIENTS.issue(name, end=timedelta(seconds=15))

    def by_flight(connection):
        return list(connection.do_action(flight.Action(Action.TOPICS, b""), flight_options(())))

    async def status(http):
        async with http.get("/metrics") as response:
            return response.status

    binding = danube_admin.BindingDefinition(
        id=name,
        principal_type="service_account",
        principal_name=name,
        role_names=["admin"],
        scope="cluster",
    )
    request = danube_admin.CreateBindingRequest(binding=binding)
    await mutual.admin("CreateBinding", request, client=brief)
    with mutual.flight(brief) as connection:
        async with mutual.channel(brief) as channel, mutual.http(brief) as http:
            listed = wire.stub(channel, "danube_admin.BrokerAdmin").ListBrokers
            await wire.stub(channel, "danube_admin.TopicAdmin").CreateTopic(
                danube_admin.NewTopicRequest(name=topic, dispatch_strategy=1)
            )
            consumers = wire.stub(channel, "danube.ConsumerService")
            found = await consumers.Subscribe(
                danube.ConsumerRequest(topic_name=topic, consumer_name="c", subscription="s")
            )
            stream = consumers.ReceiveMessages(danube.ReceiveRequest(consumer_id=found.consumer_id))
            assert await code_of(listed(danube_admin.Empty(), timeout=30)) is Code.OK
            await asyncio.to_thread(by_flight, connection)
            assert await status(http) == 200
            assert time.time() < ends_at, "the machine is too slow for this test"
            # An idle connection would be closed before.
            while (answer := await status(http)) == 200:
                await asyncio.sleep(0.5)
            assert answer == 401
            # Ends by itself, within about a second of the certificate.
            code = await asyncio.wait_for(code_of(stream.read()), 60)
            assert code is Code.UNAUTHENTICATED
            assert time.time() > ends_at - 1
            code = await code_of(listed(danube_admin.Empty(), timeout=30))
            assert code is Code.UNAUTHENTICATED
            error = await asyncio.to_thread(flight_outcome, lambda: by_flight(connection))
            assert isinstance(error, UnauthenticatedError)


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


@pytest.mark.nightly
@pytest.mark.parametrize("ports", [("grpc", "http"), ("flight",)], ids="-".join)
def test_certificates_are_replaced_while_it_runs(tmp_path, topic, ports):
    """New connections see the new certificate without a restart, and standing ones go on.

    Flight has to start its server anew for it, so its port may be closed for a moment.
    """
    new_authority = Authority("new servers")

    async def seen(address):
        """The certificate that a port shows, in PEM; None while it is closed."""
        host, _, port = address.rpartition(":")
        try:
            return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
        except OSError:
            return None

    async def scenario(broker):
        process = broker.process
        known = {"grpc": process.address, "flight": process.flight, "http": process.http}
        addresses = [known[name] for name in ports]
        before = [await seen(address) for address in addresses]
        assert len(set(before)) == 1
        async with broker.danube(sign("root")) as session:
            producer = await session.producer(topic)
            new = new_authority.issue("broker", names=LOCAL_NAMES)
            new.write(broker.directory, "broker")

            async def is_new():
                await producer.send(b"the connection that stands goes on")
                now = [await seen(address) for address in addresses]
                return all(shown == new.certificate.decode() for shown in now)

            await eventually(is_new, within=60, every=0.5)

    with SecureBroker(tmp_path / "b") as broker:
        run(scenario(broker))


# -- what else may come ---------------------------------------------------------------------


def test_listening_beyond_this_machine_needs_protection(tmp_path):
    """`ister serve --host 0.0.0.0` ends with a word why; the flag is explicit."""
    command = [sys.executable, "-m", "ister.cli.main", "serve", "--data-dir", str(tmp_path / "d")]
    ports = ["--port=0", "--flight-port=0", "--http-port=0"]
    ended = subprocess.run(
        [*command, *ports, "--host=0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert "allow_insecure" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "d").exists(), "nothing was opened or made before"


async def test_refusals_and_changes_are_in_the_audit_log(broker, topic):
    await broker.create_topic(topic)
    async with broker.danube(sign("mallory")) as session:
        assert await code_of(session.producer(topic)) is Code.PERMISSION_DENIED
    async with broker.danube("nonsense") as session:
        assert await code_of(session.producer(topic)) is Code.UNAUTHENTICATED
    lines = [line for line in broker.audited() if line.get("resource") == topic]
    made = [line for line in lines if line["outcome"] == "allowed"]
    assert made[0]["action"] == "danube_admin.TopicAdmin/CreateTopic"
    assert made[0]["principal"] == "user:root"
    denied = [line for line in lines if line.get("principal") == "user:mallory"]
    assert {line["outcome"] for line in denied} == {"denied"}
    assert all(line["peer"].startswith(("ipv4:", "ipv6:")) for line in denied)
    assert any(line["outcome"] == "unauthenticated" for line in broker.audited())


def test_nothing_secret_is_in_what_the_broker_says(broker, mutual):
    """The last test of this file: a grep over logs, audit lines and metrics after all of them."""

    async def scenario():
        async with broker.http() as http:
            said = []
            for path in ("/metrics", "/health"):
                async with http.get(path, headers=dict(bearer(sign("root")))) as response:
                    said.append(await response.text())
            return said

    texts = run(scenario())
    for one in (broker, mutual):
        texts.append(one.process.log)
        texts.append((one.directory / "audit.jsonl").read_text())
    whole = "\n".join(texts)
    assert len(whole) > 1000
    for secret in (SECRET, broker.api_key, mutual.api_key, broker.issued.key.decode()[40:90]):
        assert secret not in whole
    assert "Bearer ey" not in whole
    assert "eyJhbGciOi" not in whole, "the beginning of every token"
