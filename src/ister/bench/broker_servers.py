"""The two servers of `ister bench broker`, each a process of its own.

The broker is `ister serve` itself. The other one, `python -m ister.bench.broker_servers COUNT`,
speaks the same protocol and keeps nothing: a send is answered, a stream has COUNT prepared messages
in it and then those that are sent since it was subscribed to, whatever the topic, and an
acknowledgement is answered. It prints its port as one JSON line and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from ister.bench.measurement import payloads
from ister.broker.consumers import Consumer
from ister.broker.services.consumer import encode
from ister.broker.wire import add_service, danube
from ister.errors import UnavailableError
from ister.model import MessageId, StreamMessage

__all__ = ["bare_server", "broker", "main"]

_TOPIC_PREPARED = "/default/bench"


@contextmanager
def broker(directory: str, **settings: str) -> Iterator[dict[str, Any]]:
    """A broker on a directory: its addresses and its process id."""
    command = ["-m", "ister.cli.main", "serve", "--data-dir", directory, "--json"]
    ports = ["--port", "0", "--flight-port", "0", "--http-port", "0", "--log-level", "ERROR"]
    with _serving([*command, *ports], settings) as ready:
        yield ready


@contextmanager
def bare_server(count: int) -> Iterator[dict[str, Any]]:
    """A server that keeps nothing: its address."""
    with _serving(["-m", "ister.bench.broker_servers", str(count)], {}) as ready:
        yield ready


@contextmanager
def _serving(command: list[str], settings: dict[str, str]) -> Iterator[dict[str, Any]]:
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - for mypy
    try:
        line = process.stdout.readline()
        if not line:
            raise UnavailableError("a server of the benchmark did not start")
        yield json.loads(line)
    finally:
        process.stdin.close()
        process.terminate()
        process.wait()
        process.stdout.close()


class _Bare:
    """Everything that Danube's client calls, without a log behind it."""

    def __init__(self, count: int) -> None:
        self._prepared = [
            encode(
                StreamMessage(
                    request_id=offset,
                    msg_id=MessageId(topic_name=_TOPIC_PREPARED, topic_offset=offset),
                    payload=payload,
                    producer_name="bench",
                ),
                offset,
                1,
                Consumer(1, _TOPIC_PREPARED, "bench", "bench"),
                None,
            )
            for offset, payload in enumerate(payloads(count))
        ]

        # For the newest subscription, while there is one.
        self._sent: asyncio.Queue[bytes] | None = None

    async def CreateProducer(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        return danube.ProducerResponse(request_id=request.request_id, producer_id=1)

    async def SendMessage(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        if self._sent is not None:
            self._sent.put_nowait(request.SerializeToString())
        return danube.MessageResponse(request_id=request.request_id)

    async def Subscribe(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        self._sent = asyncio.Queue()
        return danube.ConsumerResponse(request_id=request.request_id, consumer_id=1)

    async def ReceiveMessages(self, request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802, ANN401
        for data in self._prepared:
            yield data
        sent = self._sent
        try:
            while sent is not None:
                yield await sent.get()
        finally:
            if self._sent is sent:
                self._sent = None

    async def Ack(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        return danube.AckResponse(request_id=request.request_id)

    async def Nack(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        return danube.NackResponse(request_id=request.request_id)

    async def TopicLookup(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")

    async def TopicPartitions(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        return danube.TopicPartitionsResponse(
            request_id=request.request_id, partitions=[request.topic]
        )

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802, ANN401
        return danube.HealthCheckResponse()


async def _serve(count: int) -> None:
    server = grpc.aio.server()
    service = _Bare(count)
    for name in ("ProducerService", "ConsumerService", "Discovery", "HealthCheck"):
        add_service(server, f"danube.{name}", service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def main() -> None:
    """Serves until standard input ends."""
    asyncio.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
