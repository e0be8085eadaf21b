"""Publishing by Arrow Flight, 1 KiB rows, each batch answered when it is synced.

    one row     from the row to its answer, one at a time
    bulk        batches of rows, one stream

Both against the same client on a server that reads and answers and keeps nothing.

Owns: the measurements, and that server, a process of its own, `python -m
benchmarks.broker_flight`, which prints its port as one line and ends with its standard input. It
is a server of grpc.aio with handlers of bytes, on the loop and with the allocator that a broker
has. Does not own: the path that is measured. `measure` is a part of `benchmarks broker`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import grpc
import pyarrow as pa

from benchmarks.flight_publisher import publishing
from benchmarks.measurement import (
    MESSAGE_BYTES,
    Run,
    median,
    payloads,
    quantile,
    spread,
    stopwatch,
    take_turns,
    warm_page_cache,
)
from ister import kernels
from ister.base.allocator import keep_freed_buffers
from ister.base.limits import MIB
from ister.base.model import AckLevel
from ister.client.flight import FlightClient
from ister.errors import UnavailableError
from ister.wire.contract import PutAck, PutBatch
from ister.wire.flight_data import FlightData, encode_fields

_TOPIC: Final = "/default/bench-flight"
_ROUNDS: Final = 5
_ROWS: Final = 1_000
"""Per batch."""
_MESSAGES_PER_ROUND: Final = 400_000
"""A second or so, and six times what may be on its way."""
_LONE_PER_ROUND: Final = 200
_RATE_TARGET: Final = 0.6
_LONE_TARGETS: Final = (("p50", 0.5, 2.0), ("p99", 0.99, 5.0))


def measure(run: Run, address: str) -> None:
    """Adds the figures to `run`.

    Args:
        run: Of `benchmarks broker`.
        address: The Flight port of the broker that is measured.
    """
    batches = run.scaled(_MESSAGES_PER_ROUND, at_least=5 * _ROWS) // _ROWS
    if not run.is_quick:
        kernels.load()  # the broker finds the compiled loops, instead of having them made
    run.say("warming the page cache")
    warm_page_cache(run, (_ROUNDS + 2) * batches * _ROWS * MESSAGE_BYTES * 11 // 10)
    batch = pa.record_batch({"payload": pa.array(payloads(_ROWS), pa.binary())})
    with (
        _serving_bare() as bare_address,
        FlightClient(bare_address) as bare,
        FlightClient(address) as client,
    ):
        clients = {"bare": bare, "broker": client}
        epochs = iter(range(1, 1 << 20))
        # First: after the bulk, a broker still uploads it.
        lone = run.scaled(_LONE_PER_ROUND, at_least=20)
        times: dict[str, list[float]] = {side: [] for side in clients}
        for _ in range(_ROUNDS):
            for side, one in clients.items():
                times[side] += _publish_one_by_one(one, batch.slice(0, 1), lone, epoch=next(epochs))
        for label, q, at_most in _LONE_TARGETS:
            run.add(
                f"Flight publish of one row to its answer {label}, synced",
                quantile(times["broker"], q) * 1e6,
                "us",
                limit=quantile(times["bare"], q) * 1e6,
                limit_name=f"the same, a server of the same kind that only answers, {label}",
                at_most=at_most,
                on="ratio",
            )
        for one in clients.values():
            _publish(one, batch, max(5, batches // 4), epoch=next(epochs))

        def publish(one: FlightClient) -> float:
            return _publish(one, batch, batches, epoch=next(epochs))

        rates = take_turns(_ROUNDS, {side: partial(publish, one) for side, one in clients.items()})
        run.add(
            "Flight bulk publish 1 KiB, synced, one stream",
            median(rates["broker"]),
            "msg/s",
            limit=median(rates["bare"]),
            limit_name="the same client, a server of the same kind that only reads and answers",
            at_least=_RATE_TARGET,
            on="ratio",
            note=f"batches of {_ROWS:,} rows, median of {_ROUNDS} rounds, "
            f"{spread(rates['broker'])}; the other {spread(rates['bare'])}",
        )


def _publish(client: FlightClient, batch: pa.RecordBatch, count: int, *, epoch: int) -> float:
    """Messages a second, from the first batch to the last answer."""
    publisher = publishing(
        client,
        _TOPIC,
        batch.schema,
        producer="bench",
        epoch=epoch,
        create=True,
        ack=AckLevel.SYNCED,
    )
    with publisher:
        elapsed = stopwatch()
        for _ in range(count):
            publisher.write(batch)
        publisher.flush()
        return float(count * batch.num_rows / elapsed())


def _publish_one_by_one(
    client: FlightClient, batch: pa.RecordBatch, count: int, *, epoch: int
) -> list[float]:
    times: list[float] = []
    with publishing(
        client, _TOPIC, batch.schema, producer="lone", epoch=epoch, create=True, ack=AckLevel.SYNCED
    ) as publisher:
        for _ in range(count):
            elapsed = stopwatch()
            publisher.write(batch)
            publisher.flush()
            times.append(elapsed())
    return times


# -- the server that only answers -----------------------------------------------------------


@contextmanager
def _serving_bare() -> Iterator[str]:
    """A server in a process of its own; gives its address.

    Raises:
        UnavailableError: It did not start; its standard error says why.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.broker_flight"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = child.stdout.readline().strip() if child.stdout is not None else ""
        if not port:
            raise UnavailableError("the Flight server of the benchmark did not start")
        yield f"127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


async def _do_put(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    """Reads batches and answers them, and does nothing else."""
    await anext(aiter(requests))
    async for message in requests:
        sequence = PutBatch.from_json(bytes(FlightData(message).metadata)).sequence
        answer = PutAck(sequence=sequence, start=sequence, end=sequence + _ROWS, known=0)
        await context.write(encode_fields((1, answer.to_json())))


async def _serve() -> None:
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", 64 * MIB), ("grpc.so_reuseport", 0)]
    )
    handlers = {"DoPut": grpc.stream_stream_rpc_method_handler(_do_put)}
    service = "arrow.flight.protocol.FlightService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def main() -> None:
    """Serves until standard input ends."""
    keep_freed_buffers()
    try:
        import uvloop  # noqa: PLC0415 - not everywhere
    except ImportError:
        asyncio.run(_serve())
    else:
        uvloop.run(_serve())


if __name__ == "__main__":
    main()
