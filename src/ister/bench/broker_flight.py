"""Bulk publishing by Arrow Flight: 1 KiB rows, each batch answered when it is synced.

    publish, synced    against the same client on a Flight server that only reads and answers

Owns: the measurement, and that server, a process of its own: `python -m ister.bench.broker_flight`,
which prints its port as one line and ends with its standard input. Does not own: the path that it
measures. `measure` is a part of `ister bench broker`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from ister.bench.measurement import (
    MESSAGE_BYTES,
    Run,
    median,
    payloads,
    quantile,
    stopwatch,
    warm_page_cache,
)
from ister.client.contract import PutAck, PutBatch
from ister.client.flight import FlightClient
from ister.errors import UnavailableError
from ister.model import AckLevel

__all__ = ["main", "measure"]

_TOPIC: Final = "/default/bench-flight"
_ROUNDS: Final = 5
_ROWS: Final = 1_000
"""Per batch."""
_MESSAGES_PER_ROUND: Final = 400_000
"""A second or so, and six times what may be on its way."""
_LONE_BATCHES: Final = 500
_RATE_TARGET: Final = 200_000.0


def measure(run: Run, address: str) -> None:
    """Adds the figures to `run`.

    Args:
        run: Of `ister bench broker`.
        address: The Flight port of the broker that is measured.
    """
    batches = run.scaled(_MESSAGES_PER_ROUND, at_least=5 * _ROWS) // _ROWS
    run.say("warming the page cache")
    warm_page_cache(run, (_ROUNDS + 2) * batches * _ROWS * MESSAGE_BYTES * 11 // 10)
    batch = pa.record_batch({"payload": pa.array(payloads(_ROWS), pa.binary())})
    with (
        _serving_bare() as bare_address,
        FlightClient(bare_address) as bare,
        FlightClient(address) as client,
    ):
        rates: list[float] = []
        bare_rates: list[float] = []
        _publish(client, batch, max(5, batches // 10), epoch=0)
        for number in range(_ROUNDS):
            bare_rates.append(_publish(bare, batch, batches, epoch=number + 1))
            rates.append(_publish(client, batch, batches, epoch=number + 1))
        run.add(
            "Flight bulk publish 1 KiB, synced, one stream",
            median(rates),
            "msg/s",
            limit=median(bare_rates),
            limit_name="the same client, a Flight server that only reads and answers",
            at_least=_RATE_TARGET,
            note=f"batches of {_ROWS:,} rows, median of {_ROUNDS} rounds, "
            f"{min(rates):,.0f} to {max(rates):,.0f}",
        )
        lone = run.scaled(_LONE_BATCHES, at_least=20)
        times = _publish_one_by_one(client, batch.slice(0, 1), lone)
        bare_times = _publish_one_by_one(bare, batch.slice(0, 1), lone)
        for label, q in (("p50", 0.5), ("p99", 0.99)):
            run.add(
                f"Flight publish of one row to its answer {label}, synced",
                quantile(times, q) * 1e6,
                "us",
                limit=quantile(bare_times, q) * 1e6,
                limit_name=f"the same, a Flight server that only answers, {label}",
            )


def _publish(client: FlightClient, batch: pa.RecordBatch, count: int, *, epoch: int) -> float:
    """Messages a second, from the first batch to the last answer."""
    publisher = client.publish(
        _TOPIC, batch.schema, producer="bench", epoch=epoch, create=True, ack=AckLevel.SYNCED
    )
    with publisher:
        elapsed = stopwatch()
        for _ in range(count):
            publisher.write(batch)
        publisher.flush()
        return float(count * batch.num_rows / elapsed())


def _publish_one_by_one(client: FlightClient, batch: pa.RecordBatch, count: int) -> list[float]:
    times: list[float] = []
    with client.publish(_TOPIC, batch.schema, producer="lone", create=True) as publisher:
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
        [sys.executable, "-m", "ister.bench.broker_flight"],
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


class _Bare(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Reads batches and answers them, and does nothing else."""

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ANN401
        start = 0
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            rows = chunk.data.num_rows
            sequence = PutBatch.from_json(chunk.app_metadata.to_pybytes()).sequence
            answer = PutAck(sequence=sequence, start=start, end=start + rows, known=0)
            writer.write(answer.to_json())
            start += rows


def main() -> None:
    """Serves until standard input ends."""
    with _Bare("grpc://127.0.0.1:0") as server:
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
