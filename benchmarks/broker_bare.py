"""A server of Danube's protocol that stores nothing, on each engine: the upper limit of a broker.

    python -m benchmarks.broker_bare ENGINE COUNT

    grpcio          handlers of grpc.aio
    native          the same handlers on pygrpc-native's asyncio server
    native-batches  pygrpc-native's batches, answered by one thread; no streams

Sends and acknowledgements are answered, and a stream gets everything that is sent after its
subscription, whatever the topic; a stream of the topic `PREPARED` gets COUNT messages first. The
server prints its port and its process id as one JSON line, and ends when its standard input does.

Owns: the empty handlers. They parse requests and serialize answers, as every handler has to.
Nothing of Ister's own server is used. Event loops are uvloop's where it is installed, and the
native engine has as many threads, as in a broker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from benchmarks.measurement import payloads
from ister.broker.rpc.native_engine import IO_THREADS
from ister.wire import danube

PREPARED: Final = "/default/bench"
_RECEIVE: Final = "/danube.ConsumerService/ReceiveMessages"
_LOOKUP: Final = "/danube.Discovery/TopicLookup"
_PREPARED_ID, _OTHER_ID = 1, 2
_BATCH: Final = 256


class _Bare:
    """Everything that Danube's clients call, without a log behind it."""

    def __init__(self, count: int) -> None:
        self.prepared: list[bytes] = [
            danube.StreamMessage(
                request_id=offset,
                msg_id=danube.MsgID(producer_id=1, topic_name=PREPARED, topic_offset=offset),
                payload=payload,
                producer_name="bench",
                subscription_name="bench",
            ).SerializeToString()
            for offset, payload in enumerate(payloads(count))
        ]
        self.pass_on: Callable[[bytes], object] | None = None
        """Called with what is sent, for the newest subscription; None without one."""
        self.early: list[bytes] = []
        """What was sent after the subscription and before its stream began."""
        self._sent = 0
        self.methods: Final[dict[str, Callable[[bytes], Message]]] = {
            "/danube.ProducerService/CreateProducer": self._create_producer,
            "/danube.ProducerService/SendMessage": self._send,
            "/danube.ConsumerService/Subscribe": self._subscribe,
            "/danube.ConsumerService/Ack": _ack,
            "/danube.ConsumerService/Nack": _nack,
            "/danube.Discovery/TopicPartitions": _partitions,
            "/danube.HealthCheck/HealthCheck": _health,
        }

    def prepared_for(self, data: bytes) -> list[bytes]:
        """Returns the messages that a new stream begins with."""
        asked = danube.ReceiveRequest.FromString(data).consumer_id
        return self.prepared if asked == _PREPARED_ID else []

    def _create_producer(self, data: bytes) -> danube.ProducerResponse:
        request = danube.ProducerRequest.FromString(data)
        return danube.ProducerResponse(request_id=request.request_id, producer_id=1)

    def _send(self, data: bytes) -> danube.MessageResponse:
        request = danube.StreamMessage.FromString(data)
        if self.pass_on is not None:
            request.msg_id.topic_offset = self._sent
            self._sent += 1
            self.pass_on(request.SerializeToString())
        return danube.MessageResponse(request_id=request.request_id)

    def _subscribe(self, data: bytes) -> danube.ConsumerResponse:
        request = danube.ConsumerRequest.FromString(data)
        self.early = []
        self.pass_on = self.early.append
        is_prepared = request.topic_name == PREPARED
        return danube.ConsumerResponse(
            request_id=request.request_id, consumer_id=_PREPARED_ID if is_prepared else _OTHER_ID
        )


def _ack(data: bytes) -> danube.AckResponse:
    return danube.AckResponse(request_id=danube.AckRequest.FromString(data).request_id)


def _nack(data: bytes) -> danube.NackResponse:
    return danube.NackResponse(request_id=danube.NackRequest.FromString(data).request_id)


def _partitions(data: bytes) -> danube.TopicPartitionsResponse:
    request = danube.TopicLookupRequest.FromString(data)
    return danube.TopicPartitionsResponse(request_id=request.request_id, partitions=[request.topic])


def _health(_: bytes) -> danube.HealthCheckResponse:
    return danube.HealthCheckResponse()


def _ready(port: int) -> None:
    print(json.dumps({"grpc": f"127.0.0.1:{port}", "pid": os.getpid()}), flush=True)


# -- handlers on a loop ---------------------------------------------------------------------


def _handlers(bare: _Bare) -> dict[str, grpc.RpcMethodHandler]:
    def unary(answer: Callable[[bytes], Message]) -> grpc.RpcMethodHandler:
        async def handle(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            found: bytes = answer(data).SerializeToString()
            return found

        return grpc.unary_unary_rpc_method_handler(handle)

    async def look_up(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        raise AssertionError("abort raises")

    async def receive(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        sent: asyncio.Queue[bytes] = asyncio.Queue()
        early, bare.pass_on = bare.early, sent.put_nowait
        pass_on = bare.pass_on
        try:
            for message in (*bare.prepared_for(data), *early):
                yield message
            while True:
                yield await sent.get()
        finally:
            if bare.pass_on is pass_on:
                bare.pass_on = None

    return {
        **{path: unary(answer) for path, answer in bare.methods.items()},
        _LOOKUP: grpc.unary_unary_rpc_method_handler(look_up),
        _RECEIVE: grpc.unary_stream_rpc_method_handler(receive),
    }


async def _serve(server: Any, bare: _Bare) -> None:  # noqa: ANN401 - of either package
    for path, handler in _handlers(bare).items():
        _, service, method = path.split("/")
        server.add_registered_method_handlers(service, {method: handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _ready(port)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


async def _serve_grpcio(bare: _Bare) -> None:
    await _serve(grpc.aio.server(), bare)


async def _serve_native(bare: _Bare) -> None:
    import pygrpc_native.aio  # noqa: PLC0415 - an extra

    await _serve(pygrpc_native.aio.Server(io_threads=IO_THREADS), bare)


def _run(work: Coroutine[None, None, None]) -> None:
    try:
        import uvloop  # noqa: PLC0415 - not everywhere
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


# -- batches in a thread --------------------------------------------------------------------


def _run_batches(bare: _Bare) -> None:
    from pygrpc_native import EVENT_CALL, NativeGrpcFront  # noqa: PLC0415 - an extra

    methods = [(path, False) for path in bare.methods]
    front = NativeGrpcFront("127.0.0.1:0", methods, io_threads=IO_THREADS)
    answers = list(bare.methods.values())
    front.start()

    def serve() -> None:
        while (events := front.recv_batch(_BATCH)) is not None:
            for kind, call, method, data, _ in events:
                if kind == EVENT_CALL and data is not None:
                    front.respond(call, answers[method](data).SerializeToString())

    serving = threading.Thread(target=serve)
    serving.start()
    _ready(front.bound_port)
    sys.stdin.read()
    front.close()
    serving.join()


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broker_bare")
    parser.add_argument("engine", choices=("grpcio", "native", "native-batches"))
    parser.add_argument("count", type=int, help="messages for streams of the prepared topic")
    options = parser.parse_args()
    bare = _Bare(options.count)
    if options.engine == "native-batches":
        _run_batches(bare)
    else:
        _run(_serve_native(bare) if options.engine == "native" else _serve_grpcio(bare))


if __name__ == "__main__":
    main()
