"""From errors to statuses, on a real server with made-up methods behind Danube's own names."""

import asyncio
import logging
import re
import weakref
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest

from ister import errors, wire
from ister.broker.dispatch.write_queue import STALLED
from ister.broker.rpc.grpcio_engine import add_methods
from ister.broker.rpc.handlers import CallGate, Refused
from ister.broker.rpc.methods import methods_of
from ister.wire import danube
from tests.support.broker import eventually
from tests.support.cases import each

_STATUSES = {
    "AlreadyExistsError": "ALREADY_EXISTS",
    "CapacityError": "RESOURCE_EXHAUSTED",
    "ClosedError": "UNAVAILABLE",
    "CommitUnknownError": "UNAVAILABLE",
    "ConfigError": "INVALID_ARGUMENT",
    "ConflictError": "ABORTED",
    "WaitsForDiskError": "ABORTED",
    "CorruptDataError": "DATA_LOSS",
    "DataGapError": "DATA_LOSS",
    "DirectoryLockedError": "ABORTED",
    "DiskError": "UNAVAILABLE",
    "FencedError": "UNAVAILABLE",
    "InvalidRequestError": "INVALID_ARGUMENT",
    "InvariantError": "INTERNAL",
    "IsterError": "UNKNOWN",
    "MessageTooLargeError": "INVALID_ARGUMENT",
    "NoAnswerError": "UNAVAILABLE",
    "NotFoundError": "NOT_FOUND",
    "OffsetOutOfRangeError": "OUT_OF_RANGE",
    "PermissionDeniedError": "PERMISSION_DENIED",
    "StoresDifferError": "ABORTED",
    "TopicNameError": "INVALID_ARGUMENT",
    "UnauthenticatedError": "UNAUTHENTICATED",
    "UnavailableError": "UNAVAILABLE",
    "UnsupportedOperationError": "UNIMPLEMENTED",
    "UnsupportedVersionError": "UNIMPLEMENTED",
    "WaitTimeoutError": "UNAVAILABLE",
}


def make(name, message="what it was"):
    """One of the errors, with whatever it needs."""
    more = {
        "OffsetOutOfRangeError": {"earliest": 1, "next": 2, "topic": None, "offset": 0},
        "DataGapError": {"start": 1, "end": 2, "topic": None},
        "WaitsForDiskError": {"node": "other"},
        "DiskError": {"errno": 5},
    }
    return getattr(errors, name)(message, **more.get(name, {}))


def discovery(lookup):
    """A service whose first method does what a test wants."""

    async def call(request, context):
        return await lookup(request)

    return SimpleNamespace(TopicLookup=call, TopicPartitions=call)


def streams(receive):
    """A consumer service whose stream does what a test wants."""

    async def call(request, context):
        raise errors.UnsupportedOperationError("not here")

    return SimpleNamespace(
        ReceiveMessages=lambda request, context: receive(request),
        **dict.fromkeys(("Subscribe", "Ack", "Nack"), call),
    )


@asynccontextmanager
async def served(name, service, gate=None, **options):
    """A channel to a server with one service; `options` are the channel's."""
    server = grpc.aio.server()
    add_methods(server, methods_of(name, service, gate))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    named = [(f"grpc.{key}", value) for key, value in options.items()]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=named)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(0)


async def outcome(call):
    """Status and text of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


# -- statuses ---------------------------------------------------------------------------------


async def test_every_error_gets_to_the_client_with_its_text():
    assert set(_STATUSES) == set(errors.__all__) - {"check"}
    said = []

    async def fail(request):
        raise said[0]

    async with served("danube.Discovery", discovery(fail)) as channel:
        stub = wire.stub(channel, "danube.Discovery")

        async def told(error):
            said[:] = [error]
            return await outcome(stub.TopicLookup(danube.TopicLookupRequest()))

        for name in sorted(set(_STATUSES) - {"InvariantError"}):
            status, text = await told(make(name, "line one\nline two"))
            assert status == _STATUSES[name], name
            assert text.startswith("line one line two"), name
        refusal = Refused(grpc.StatusCode.FAILED_PRECONDITION, "not so", hint="do it so")
        assert await told(refusal) == ("FAILED_PRECONDITION", "not so; do it so")
        status, text = await told(errors.NotFoundError("x" * 100_000))
        assert status == "NOT_FOUND"
        assert 100 < len(text) <= 2000


@each("is_stream", [False, True])
@each("error", [KeyError("canary"), errors.InvariantError("canary"), OSError(5, "canary")])
async def test_our_own_faults_are_a_number_and_nothing_else(error, is_stream, caplog):
    async def fail(request):
        raise error

    async def fail_later(request):
        yield b""
        raise error

    name = "danube.ConsumerService" if is_stream else "danube.Discovery"
    service = streams(fail_later) if is_stream else discovery(fail)
    with caplog.at_level(logging.ERROR, logger="ister.broker.rpc.handlers"):
        async with served(name, service) as channel:
            stub = wire.stub(channel, name)
            if is_stream:
                call = stub.ReceiveMessages(danube.ReceiveRequest())
                await call.read()
                status, text = await outcome(call.read())
            else:
                status, text = await outcome(stub.TopicLookup(danube.TopicLookupRequest()))
    assert status == "INTERNAL"
    number = re.fullmatch(r"the broker failed \[([0-9a-f]{8})\]", text)
    assert number, text
    [record] = [r for r in caplog.records if r.name == "ister.broker.rpc.handlers"]
    assert record.number == number[1]
    assert record.exc_info[1] is error
    assert record.call.startswith("danube.")


# -- requests ---------------------------------------------------------------------------------


@each("data", [b"\xff", b"\x12\x05abc", b"\x12\x02\xff\xfe"])
async def test_bytes_that_are_no_message_are_the_callers_fault(data):
    """The last one is a string that is not UTF-8."""

    async def echo(request):
        return danube.TopicLookupResponse(request_id=request.request_id)

    async def stream(request):
        yield b""

    async with served("danube.Discovery", discovery(echo)) as channel:
        call = channel.unary_unary("/danube.Discovery/TopicLookup")
        assert (await outcome(call(data)))[0] == "INVALID_ARGUMENT"
        # Others are served on.
        answer = await call(danube.TopicLookupRequest(request_id=4).SerializeToString())
        assert danube.TopicLookupResponse.FromString(answer).request_id == 4
    async with served("danube.ConsumerService", streams(stream)) as channel:
        call = channel.unary_stream("/danube.ConsumerService/ReceiveMessages")
        assert (await outcome(call(b"\xff").read()))[0] == "INVALID_ARGUMENT"


async def test_bytes_that_are_no_message_in_a_stream_of_requests_are_the_callers_fault():
    async def consume(requests, context):
        async for _ in requests:
            yield b""

    async with served("ister.Delivery", SimpleNamespace(Consume=consume)) as channel:
        call = channel.stream_stream("/ister.Delivery/Consume")()
        await call.write(b"")
        assert await call.read() == b""
        await call.write(b"\xff")
        assert (await outcome(call.read()))[0] == "INVALID_ARGUMENT"


# -- the gate ---------------------------------------------------------------------------------


async def test_a_gate_does_not_wait_for_ever():
    gate = CallGate()
    gate.enter()
    await asyncio.wait_for(gate.close(0.05), 60)
    assert gate.is_closed


async def test_calls_that_fail_or_are_cancelled_have_left_the_gate():
    gate, inside = CallGate(), asyncio.Event()

    async def act(request):
        if request.request_id == 1:
            raise errors.NotFoundError("no")
        inside.set()
        await asyncio.sleep(600)

    async with served("danube.Discovery", discovery(act), gate) as channel:
        stub = wire.stub(channel, "danube.Discovery")
        await outcome(stub.TopicLookup(danube.TopicLookupRequest(request_id=1)))
        hanging = stub.TopicLookup(danube.TopicLookupRequest(request_id=2))
        sent = asyncio.ensure_future(hanging.code())
        await inside.wait()
        hanging.cancel()
        await sent
        await asyncio.wait_for(gate.close(600.0), 60)


# -- streams ----------------------------------------------------------------------------------


async def test_a_generator_is_closed_when_its_client_does_not_read_and_goes():
    """It is inside of a write then, not of the generator: the write waits for flow control."""

    closed = asyncio.Event()

    async def receive(request):
        try:
            while True:
                yield danube.StreamMessage(payload=b"x" * 100_000)
        finally:
            closed.set()

    async with served("danube.ConsumerService", streams(receive)) as channel:
        stub = wire.stub(channel, "danube.ConsumerService")
        call = stub.ReceiveMessages(danube.ReceiveRequest())
        await call.read()
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait_for(closed.wait(), 60)


async def test_a_stream_that_fails_has_been_closed_and_says_why():
    closed = []

    async def receive(request):
        try:
            yield b""
            raise errors.UnavailableError("moved")
        finally:
            closed.append(True)

    async with served("danube.ConsumerService", streams(receive)) as channel:
        stub = wire.stub(channel, "danube.ConsumerService")
        call = stub.ReceiveMessages(danube.ReceiveRequest())
        await call.read()
        assert await outcome(call.read()) == ("UNAVAILABLE", "moved")
        assert closed == [True]


async def test_a_stream_that_nobody_reads_can_be_ended():
    """Its client does not get the message that was being written; it is told that the call is over.

    grpcio keeps its first call, and the newest until the next one comes, so there are others.
    """

    tasks = []

    async def receive(request):
        tasks.append(asyncio.current_task())
        yield bytes(9 << 20)

    async with served(
        "danube.ConsumerService", streams(receive), max_receive_message_length=-1
    ) as channel:
        stub = wire.stub(channel, "danube.ConsumerService")
        await outcome(stub.Ack(danube.AckRequest()))
        stalled = stub.ReceiveMessages(danube.ReceiveRequest())
        await eventually(lambda: tasks)
        is_gone = weakref.ref(tasks[0])
        tasks.pop().cancel(STALLED)
        await eventually(lambda: is_gone() is None)
        await outcome(stub.Ack(danube.AckRequest()))
        assert (await outcome(stalled.read()))[0] == "CANCELLED"
