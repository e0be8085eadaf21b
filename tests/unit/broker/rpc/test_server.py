"""A broker behind each engine: sends that arrive together, refusals among them, the end."""

import asyncio
import os
import socket
from importlib import metadata

import grpc
import pytest

from benchmarks.broker_servers import broker as serve
from ister.base import threads
from ister.broker.dispatch.encoder import encode_answer
from ister.broker.publish.producers import producer_id
from ister.broker.rpc.native_engine import NativeEngine
from ister.broker.rpc.server import choose_engine
from ister.config import GrpcEngine, load_config
from ister.errors import ConfigError, UnavailableError
from ister.wal.writer import SyncFailedError
from ister.wire import danube, ister_api
from ister.wire.errors import ANSWERED
from tests.support.broker import a_broker, eventually, settings_of
from tests.support.broker_calls import Client, Code, status
from tests.support.cases import each

ENGINES = ("grpcio", "native")
both_engines = each("engine", ENGINES)
NAME = "/default/t"


def settings(engine, **broker):
    return {"broker": {"grpc": {"engine": engine}, **broker}}


def a_send(number, *, topic=NAME, producer="p", payload=None, **fields):
    return danube.StreamMessage(
        request_id=number,
        msg_id=danube.MsgID(producer_id=producer_id(topic, producer), topic_name=topic),
        payload=b"%d" % number if payload is None else payload,
        publish_time=1_760_745_600_000 + number,
        producer_name=producer,
        **fields,
    )


async def create(services, topic=NAME):
    await Client(services, topic).producer()


async def outcome(call):
    """The answer's id, or the status, its text and whether the broker itself said so."""
    try:
        return (await call).request_id
    except grpc.aio.AioRpcError as error:
        trailers = tuple(tuple(one) for one in error.trailing_metadata() or ())
        return error.code().name, error.details(), ANSWERED[0] in trailers


def payloads_in(broker, topic=NAME):
    core = broker.topics.find_open(topic).topic
    return [message.payload for message in core.read()]


@both_engines
async def test_each_of_many_sends_gets_its_own_answer_and_is_stored_once(tmp_path, engine):
    async with a_broker(tmp_path, settings(engine)) as (broker, services, _):
        names = [f"/default/t{number}" for number in range(3)]
        for name in names:
            await create(services, name)
        sends = [(names[number % 3], number) for number in range(1, 301)]
        answers = await asyncio.gather(
            *(services.producers.SendMessage(a_send(number, topic=name)) for name, number in sends)
        )
        assert [answer.request_id for answer in answers] == [number for _, number in sends]
        for name in names:
            expected = sorted(b"%d" % number for on, number in sends if on == name)
            found = await asyncio.to_thread(payloads_in, broker, name)
            assert sorted(found) == expected
            topic = broker.topics.find_open(name)
            assert topic.topic.watermarks.synced == len(expected)
            assert (topic.counters.messages_in, topic.counters.sends) == (100, 100)
        calls = broker._calls.of("danube.ProducerService", "SendMessage")
        await eventually(lambda: calls.answered == 300)
        assert calls.latency.count == 300


@both_engines
async def test_a_send_is_stored_with_every_field(tmp_path, engine):
    async with a_broker(tmp_path, settings(engine)) as (broker, services, _):
        await create(services)
        sent = a_send(
            300,
            attributes={"a": "1", "b": "2"},
            subscription_name="s",
            schema_id=7,
            schema_version=8,
            routing_key="k",
        )
        sent.msg_id.broker_addr = "http://b:1"
        await services.producers.SendMessage(sent)
        await services.producers.SendMessage(a_send(0, payload=b""))
        core = broker.topics.find_open(NAME).topic
        first, second = await asyncio.to_thread(lambda: list(core.read()))
        record = first.record
        assert (record.request_id, record.payload) == (300, b"300")
        assert record.msg_id.producer_id == producer_id(NAME, "p")
        assert (record.msg_id.topic_name, record.msg_id.broker_addr) == (NAME, "http://b:1")
        assert record.msg_id.topic_offset == 0
        assert record.publish_time == sent.publish_time
        assert (record.producer_name, record.subscription_name) == ("p", "s")
        assert record.attributes == {"a": "1", "b": "2"}
        assert (record.schema_id, record.schema_version, record.routing_key) == (7, 8, "k")
        assert (second.record.request_id, second.payload) == (0, b"")
        assert second.record.schema_id is second.record.routing_key is None


@both_engines
async def test_a_refusal_among_many_sends_is_of_its_own_call(tmp_path, engine):
    limits = {"limits": {"max_grpc_message_bytes": 64 * 1024}}
    async with a_broker(tmp_path, settings(engine, **limits)) as (broker, services, _):
        await create(services)
        raw = services.channel.unary_unary(
            "/danube.ProducerService/SendMessage",
            response_deserializer=danube.MessageResponse.FromString,
        )
        stranger = a_send(4)
        stranger.msg_id.producer_id += 1
        elsewhere = a_send(5, topic="/default/none")
        found = await asyncio.gather(
            outcome(services.producers.SendMessage(a_send(1))),
            outcome(raw(b"\xff\xff\xff")),
            outcome(services.producers.SendMessage(a_send(3, payload=bytes(70_000)))),
            outcome(services.producers.SendMessage(stranger)),
            outcome(services.producers.SendMessage(elsewhere)),
            outcome(services.producers.SendMessage(danube.StreamMessage(request_id=6))),
            outcome(services.producers.SendMessage(a_send(7))),
        )
        assert (found[0], found[6]) == (1, 7)
        refused = "INVALID_ARGUMENT"
        codes = [refused, refused, "UNAVAILABLE", "NOT_FOUND", refused]
        assert [(code, is_said) for code, _, is_said in found[1:6]] == [(c, True) for c in codes]
        assert sorted(await asyncio.to_thread(payloads_in, broker)) == [b"1", b"7"]


@both_engines
async def test_sends_that_have_to_wait_are_answered_too(tmp_path, engine):
    """A rate, a new producer, numbered messages: none of them is handled in the batch."""

    async with a_broker(tmp_path, settings(engine)) as (broker, services, _):
        await create(services)
        numbered = [
            a_send(number, producer="q", attributes={"ister-sequence": str(number)})
            for number in range(3)
        ]
        for send in (*numbered, numbered[2]):
            await services.producers.SendMessage(send)
        topic = broker.topics.find_open(NAME)
        topic.publish_rate.per_second = 50
        await asyncio.gather(
            *(services.producers.SendMessage(a_send(number)) for number in range(10, 30))
        )
        found = await asyncio.to_thread(payloads_in, broker)
        assert found[:3] == [b"0", b"1", b"2"]
        assert sorted(found[3:]) == [b"%d" % number for number in range(10, 30)]


@both_engines
async def test_sends_to_a_disk_that_fails_are_refused(tmp_path, engine, monkeypatch):
    async with a_broker(tmp_path, settings(engine)) as (broker, services, _):
        await create(services)
        await services.producers.SendMessage(a_send(1))
        topic = broker.topics.find_open(NAME)

        def fail(position):
            raise SyncFailedError("the disk is gone", errno=5)

        monkeypatch.setattr(topic.topic.wal.writer, "sync", fail)
        code, _, is_said = await outcome(services.producers.SendMessage(a_send(2)))
        assert (code, is_said) == ("UNAVAILABLE", True)
        assert topic.counters.refused["UNAVAILABLE"] == 1
        # The topic is opened again for the next one, and has all that was acknowledged.
        assert await outcome(services.producers.SendMessage(a_send(3))) == 3
        found = await asyncio.to_thread(payloads_in, broker)
        assert (found[0], found[-1]) == (b"1", b"3")


@both_engines
async def test_a_consumer_that_leaves_is_let_go_of(tmp_path, engine):
    async with a_broker(tmp_path, settings(engine)) as (broker, services, _):
        client = Client(services)
        send = await client.producer()
        stream = client.receive(await client.subscribe())
        await send(b"1")
        assert (await stream.read()).payload == b"1"
        found = broker.topics.find_open(NAME).subscription("s")
        assert found.attached
        stream.cancel()
        await eventually(lambda: not found.attached)


@both_engines
async def test_a_broker_that_ends_tells_those_who_come(tmp_path, engine):
    async with a_broker(tmp_path, settings(engine)) as (broker, services, _):
        await create(services)
        broker._gate.is_closed = True
        for call in (
            services.producers.SendMessage(a_send(1)),
            services.admin.Info(ister_api.InfoRequest()),
        ):
            assert await status(call) is Code.UNAVAILABLE


async def test_more_calls_than_there_may_be_are_refused_by_the_native_engine(tmp_path):
    limits = {"limits": {"max_requests_in_flight": 1, "max_connections": 1}}
    async with a_broker(tmp_path, settings("native", **limits)) as (broker, services, _):
        await create(services)
        broker._gate.enter(2)
        assert await status(services.producers.SendMessage(a_send(1))) is Code.RESOURCE_EXHAUSTED
        broker._gate.leave(2)
        assert await outcome(services.producers.SendMessage(a_send(2))) == 2


async def test_calls_that_arrive_together_are_refused_beyond_the_limit(tmp_path, monkeypatch):
    engines, start = [], NativeEngine.start

    def note_start(engine, fallback):
        engines.append(engine)
        start(engine, fallback)

    monkeypatch.setattr(NativeEngine, "start", note_start)

    limits = {"limits": {"max_requests_in_flight": 2, "max_connections": 1}}
    async with a_broker(tmp_path, settings("native", **limits)) as (_, services, _listening):
        [engine] = engines
        [number] = [
            number
            for number, one in enumerate(engine._by_number)
            if one is not None and one.method.name == "SendMessage"
        ]
        # No client has made them: nobody hears the answers.
        engine._dispatch([(0, 10**9 + call, number, b"", "") for call in range(10)])
        counters = engine._by_number[number].method.counters
        assert counters.refused["RESOURCE_EXHAUSTED"] == 7
        await eventually(lambda: sum(counters.refused.values()) == 10)
        await create(services)


async def test_streams_in_both_directions_reach_the_native_port(tmp_path):
    async with a_broker(tmp_path, settings("native")) as (_, services, _listening):
        await create(services)
        call = services.channel.stream_stream("/arrow.flight.protocol.FlightService/DoPut")
        assert await status(call(iter([b""])).read()) is not Code.UNIMPLEMENTED


def config(**broker):
    return load_config({"broker": broker, "storage": {"mode": "memory"}}, {}).broker


def test_the_engine_is_chosen_by_the_settings(monkeypatch):
    auto, native = {"grpc": {"engine": "auto"}}, {"grpc": {"engine": "native"}}
    tls = {"tls": {"cert_file": "/c.pem", "key_file": "/k.pem"}}
    for broker, engine in (
        ({}, GrpcEngine.GRPCIO),
        (native, GrpcEngine.NATIVE),
        (auto, GrpcEngine.NATIVE),
        ({**auto, "host": "0.0.0.0", "allow_insecure": True}, GrpcEngine.GRPCIO),
        ({**auto, **tls}, GrpcEngine.GRPCIO),
    ):
        assert choose_engine(config(**broker)) is engine, broker
    with pytest.raises(ConfigError, match="TLS"):
        choose_engine(config(**native, **tls))
    monkeypatch.setattr("ister.broker.rpc.server.native_refusal", lambda: "it is not installed")
    assert choose_engine(config(**auto)) is GrpcEngine.GRPCIO


async def test_an_engine_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr("ister.broker.rpc.native_support.metadata.version", not_installed)

    with pytest.raises(ConfigError) as refused:
        async with a_broker(tmp_path, settings("native")):
            pass
    assert "ister[native]" in str(refused.value)
    assert settings_of(tmp_path, settings("native")).broker.grpc.engine is GrpcEngine.NATIVE


@both_engines
async def test_a_fault_of_ours_after_the_append_is_told_to_every_client(
    tmp_path, engine, monkeypatch
):
    async with a_broker(tmp_path, settings(engine)) as (broker, services, _):
        await create(services)
        topic = broker.topics.find_open(NAME)

        def fail(count, seconds):
            raise RuntimeError("a bug")

        monkeypatch.setattr(type(topic.counters), "count_sends", fail)
        found = await asyncio.gather(
            *(outcome(services.producers.SendMessage(a_send(number))) for number in range(5))
        )
        assert {code for code, _, _ in found} == {"INTERNAL"}
        await eventually(lambda: broker._gate.count == 0)
    assert any(found.thread == "ister-sends" for found in threads.failures())
    threads.forget()


@both_engines
def test_process_that_ends_leaves_no_temporary_files(tmp_path, engine):
    data, temporary = tmp_path / "data", tmp_path / "temporary"
    temporary.mkdir()
    setting = {"ISTER_BROKER__GRPC__ENGINE": engine, "TMPDIR": str(temporary)}
    with serve(str(data), **setting):
        assert len(list(data.rglob(".grpc.sock"))) == (engine == "native")
    assert os.listdir(temporary) == []
    assert not list(data.rglob(".grpc.sock"))


def test_answers_are_the_bytes_that_protobuf_makes():
    for number in (0, 1, 127, 128, 16_383, 16_384, 2**32, 2**63, 2**64 - 1):
        expected = danube.MessageResponse(request_id=number).SerializeToString()
        assert encode_answer(number) == expected
        assert danube.AckResponse(request_id=number).SerializeToString() == expected


async def test_a_port_that_is_taken_is_an_error_and_no_line_of_the_engines_own(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"grpc": taken.getsockname()[1]}
        with pytest.raises(UnavailableError, match="cannot listen"):
            async with a_broker(tmp_path, settings("native", ports=ports)):
                pass
    assert [one for one in caplog.records if one.name.startswith("pygrpc_native")] == []


@both_engines
async def test_a_message_that_cannot_be_stored_is_refused_and_counted(tmp_path, engine):
    limits = {**settings(engine), "storage": {"max_message_size": 1000}}
    async with a_broker(tmp_path, limits) as (broker, services, _):
        await create(services)
        code, text, is_said = await outcome(
            services.producers.SendMessage(a_send(1, payload=bytes(1001)))
        )
        assert (code, is_said) == ("INVALID_ARGUMENT", True)
        assert "1001 bytes" in text
        counters = broker.topics.find_open(NAME).counters
        assert counters.refused["INVALID_ARGUMENT"] == 1
        assert counters.messages_in == 0
