"""Kafka's clients with SASL and TLS: who they are, and what they may do.

On the loop of the test, with authentication in every form that the port knows.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import pytest

from ister.broker.security.minting import make_api_key
from tests.support.broker import a_broker
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.kafka import raw
from tests.support.security import allow, auth_settings, sign
from tests.support.waiting import PATIENCE_SECONDS

SERVERS, CLIENTS = Authority("servers"), Authority("clients")
DENIED = confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED


@asynccontextmanager
async def a_secure_broker(directory: Path, *, is_mutual=False, has_tls=True):
    """A broker where `loader` may produce to and `reader` consume `orders`; with an API key."""
    key, line = make_api_key("loader")
    auth = auth_settings(directory, mtls_principal=is_mutual)
    Path(auth["api_keys_file"]).write_text(line + "\n")
    settings = {"auth": auth}
    if has_tls:
        issued = SERVERS.issue("broker", names=LOCAL_NAMES)
        cert_file, key_file = issued.write(directory, "server")
        settings["tls"] = {"cert_file": cert_file, "key_file": key_file}
        if is_mutual:
            ca_file = CLIENTS.write(directory, "clients")
            settings["tls"] |= {"ca_file": ca_file, "client_auth": "required"}
    async with a_broker(directory, {"broker": settings}) as (broker, _, listening):
        access = broker.guard.access
        name = "/default/orders"
        for who, role, kind in (
            ("loader", "producer", "service"),
            ("reader", "consumer", "user"),
        ):
            for topic in (name, f"{name}-part-0"):
                await asyncio.to_thread(allow, access, who, role, topic=topic, kind=kind)
        yield broker, listening, key


def settings_of(directory: Path, listening, *, has_tls=True, **more):
    """The settings of a client."""
    found = {"bootstrap.servers": f"127.0.0.1:{listening.kafka}", "socket.timeout.ms": 20_000}
    if has_tls:
        ca_file = SERVERS.write(directory, "servers")
        found |= {"security.protocol": "SSL", "ssl.ca.location": ca_file}
    if "sasl.mechanism" in more:
        found["security.protocol"] = "SASL_SSL" if has_tls else "SASL_PLAINTEXT"
    return {**found, **more}


def plain(user, password):
    return {"sasl.mechanism": "PLAIN", "sasl.username": user, "sasl.password": password}


def bearer(token):
    def give(_):
        return token, 2e9

    return {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": give}


def send(settings, topic="orders"):
    """The code that a message is answered with; None for success."""
    told = []
    producer = confluent_kafka.Producer({**settings, "message.timeout.ms": 15_000})
    producer.produce(topic, b"x", on_delivery=lambda error, _: told.append(error))
    producer.flush(PATIENCE_SECONDS)
    [error] = told
    return None if error is None else error.code()


def receive(settings, topic="orders"):
    """The payload of the first message, or the code of an error."""
    consumer = confluent_kafka.Consumer({**settings, "group.id": "g"})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    message = consumer.poll(PATIENCE_SECONDS)
    consumer.close()
    return message.error().code() if message.error() else message.value()


def topics_seen(settings):
    admin = confluent_kafka.admin.AdminClient(settings)
    return set(admin.list_topics(timeout=20).topics)


@pytest.mark.parametrize("has_tls", [True, False])
async def test_each_may_do_what_its_rights_say(tmp_path, has_tls):
    async with a_secure_broker(tmp_path, has_tls=has_tls) as (broker, listening, key):

        def of(more):
            return settings_of(tmp_path, listening, has_tls=has_tls, **more)

        loader, reader = of(plain("loader", key)), of(plain("token", sign("reader")))
        root, by_token = of(plain("token", sign("root"))), of(bearer(sign("root")))
        stranger = of(plain("token", sign("stranger")))

        def use():
            assert send(loader) is None
            assert send(loader, "others") == DENIED
            assert send(reader) == DENIED
            assert receive(reader) == b"x"
            assert receive(loader) == DENIED
            assert send(root, "others") is None
            assert topics_seen(root) == topics_seen(by_token) == {"orders", "others"}
            assert topics_seen(reader) == {"orders"}
            assert topics_seen(stranger) == set()

        await asyncio.to_thread(use)
        audited = (tmp_path / "audit.jsonl").read_text().splitlines()
        refused = {
            (one["principal"], one["action"])
            for one in map(json.loads, audited)
            if one["outcome"] == "denied"
        }
        assert ("service:loader", "FETCH") in refused
        assert ("user:reader", "PRODUCE") in refused
        assert broker._kafka.port.malformed == 0


async def test_wrong_credentials_are_refused(tmp_path):
    async with a_secure_broker(tmp_path, has_tls=False) as (broker, listening, key):
        for credentials in (
            plain("loader", f"{key}x"),
            plain("someone", key),
            plain("token", "no token"),
            bearer(f"{sign('root')}x"),
        ):
            told = []
            settings = settings_of(tmp_path, listening, has_tls=False, **credentials)

            def ask(settings=settings, told=told):
                admin = confluent_kafka.admin.AdminClient({**settings, "error_cb": told.append})
                with pytest.raises(confluent_kafka.KafkaException):
                    admin.list_topics(timeout=4)
                admin.poll(0)

            await asyncio.to_thread(ask)
            assert confluent_kafka.KafkaError._AUTHENTICATION in {one.code() for one in told}
        assert broker.guard.refused_logins >= 4
        assert key not in (tmp_path / "audit.jsonl").read_text()


async def test_a_certificate_is_who_shows_it(tmp_path):
    async with a_secure_broker(tmp_path, is_mutual=True) as (_, listening, _):

        def of(name, authority=CLIENTS):
            cert_file, key_file = authority.issue(name).write(tmp_path, name)
            return settings_of(
                tmp_path,
                listening,
                **{"ssl.certificate.location": cert_file, "ssl.key.location": key_file},
            )

        def use():
            assert send(of("loader")) is None
            assert send(of("stranger")) == DENIED
            admin = confluent_kafka.admin.AdminClient(of("loader", SERVERS))
            with pytest.raises(confluent_kafka.KafkaException):
                admin.list_topics(timeout=3)

        await asyncio.to_thread(use)


async def test_plain_text_gets_no_answer_where_tls_is_on(tmp_path):
    async with a_secure_broker(tmp_path) as (_, listening, _), raw(listening) as client:
        client.writer.write(b"\0\0\0\x0a\0\x12\0\0\0\0\0\1\xff\xff")
        answer = await client.receive()
        assert answer is None
