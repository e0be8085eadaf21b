"""Measures rates, latency and CPU time per message of a broker, for each engine of its gRPC port.

    64 at once      64 producers with one send in progress each, synced
    one at a time   one producer, at each ack level
    consume         a backlog, an acknowledgement for each message, 16 of them in progress
    a steady flow   one producer, one consumer: sent, delivered and acknowledged one at a time

Owns: the figures and their targets; a part of `benchmarks broker`. Each figure is beside that of
an empty handler on the same engine and loop (`broker_bare`), in alternating rounds. The clients are
those of `http2_client`: with Danube's own, the client would be the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from benchmarks import http2_client
from benchmarks.broker_bare import PREPARED
from benchmarks.broker_servers import ENGINES, bare_server, broker, engine_settings, why_not
from benchmarks.http2 import Loop, Method
from benchmarks.http2_client import ACKS_AT_ONCE, Outcome
from benchmarks.measurement import Run, median, quantile, spread, take_turns
from ister.wire import ister_api

_ROUNDS: Final = 3
_PRODUCERS: Final = 64
_SEND_SECONDS: Final = 2.0
# At `tiered` a send waits for an upload.
_ALONE_SECONDS: Final = {"synced": 1.0, "memory": 1.0, "written": 1.0, "tiered": 10.0}
_FLOW_SECONDS: Final = 3.0
_QUICK_SECONDS: Final = 0.2
_CONSUMED: Final = 6000
_RATE: Final = 1000
_RATE_HELD: Final = 5000
_HELD: Final = 0.99
"""The share of a rate that counts as holding it: the last message takes its time."""
_CREATE_TOPIC: Final = Method("/ister.Admin/CreateTopic")
_EMPTY: Final = "an empty handler on the same engine and loop"


class _Targets(NamedTuple):
    """The targets of an engine; None for a figure without a target."""

    send_us: float
    sends_share: float
    sends_a_second: float | None
    alone_ms: float | None
    alone_us: float | None
    acked_us: float | None
    flow_us: float
    is_held: bool


_TARGETS: Final = {
    "grpcio": _Targets(300, 0.75, None, None, None, None, 800, is_held=False),
    "native": _Targets(90, 0.6, 12_000, 0.45, 250, 120, 350, is_held=True),
}
_ALONE_AT_MEMORY_MAX: Final = 1.4
_FLOW_P50_MS, _FLOW_P99_MS = 1.5, 6.0


def measure(run: Run) -> None:
    """Adds the figures of every engine that can be used here to `run`."""
    for engine in ENGINES:
        reason = why_not(engine)
        if reason is not None:
            run.skip(f"{engine}: all figures", reason)
            continue
        consumed = run.scaled(_CONSUMED, at_least=200)
        with (
            broker(run.path(f"engine-{engine}"), **engine_settings(engine)) as served,
            bare_server(consumed, engine) as bare,
        ):
            one = _Engine(run, engine, {"broker": served, "bare": bare})
            one.measure_sends()
            one.measure_one_at_a_time()
            one.measure_consuming(consumed)
            one.measure_flow()


class _Engine:
    """The figures of one engine."""

    def __init__(self, run: Run, engine: str, servers: Mapping[str, dict[str, Any]]) -> None:
        self._run = run
        self._engine = engine
        self._servers = servers
        self._targets = _TARGETS[engine]
        self._rounds = 1 if run.is_quick else _ROUNDS

    def _take_turns(
        self, work: Callable[[str, dict[str, Any]], Outcome]
    ) -> tuple[list[Outcome], list[Outcome]]:
        """Returns the outcomes of `work` on the broker and on the empty handler."""
        sides = {
            side: lambda side=side, server=server: work(side, server)
            for side, server in self._servers.items()
        }
        found = take_turns(self._rounds, sides)
        return found["broker"], found["bare"]

    def _seconds(self, seconds: float) -> float:
        return _QUICK_SECONDS if self._run.is_quick else seconds

    def _add(
        self,
        name: str,
        unit: str,
        figure: Callable[[Outcome], float],
        sides: tuple[list[Outcome], list[Outcome]],
        **target: Any,  # noqa: ANN401 - of `Run.add`
    ) -> None:
        values, limits = ([figure(one) for one in side] for side in sides)
        self._run.add(
            f"{self._engine}: {name}",
            median(values),
            unit,
            limit=median(limits),
            limit_name=_EMPTY,
            note=f"rounds: {spread(values)}; limit: {spread(limits)}",
            **target,
        )

    def _send(
        self, producers: int, seconds: float, topic: str, _: str, server: dict[str, Any]
    ) -> Outcome:
        return http2_client.send(
            server["grpc"],
            producers=producers,
            seconds=self._seconds(seconds),
            pid=server["pid"],
            topic=topic,
        )

    def measure_sends(self) -> None:
        """Measures many producers at once."""
        send = partial(self._send, _PRODUCERS, _SEND_SECONDS, "/default/sends")
        sides = self._take_turns(send)
        name = f"{_PRODUCERS} sends at once, synced"
        share = self._targets.sends_share
        self._add(name, "msg/s", _rate, sides, at_least=share, on="ratio")
        if self._targets.sends_a_second is not None:
            least = self._targets.sends_a_second
            self._add(f"{name}, in all", "msg/s", _rate, sides, at_least=least)
        at_most = self._targets.send_us
        self._add(f"{name}: broker CPU a send", "us", _cpu_us, sides, at_most=at_most)
        if self._engine == "native":
            # The rate of the engine alone, for a server without an event loop.
            with bare_server(0, "native-batches") as bare:
                rates = [_rate(send("", bare)) for _ in range(self._rounds)]
            self._run.add(
                f"{self._engine}: {name}, beside batches",
                median([_rate(one) for one in sides[0]]),
                "msg/s",
                limit=median(rates),
                limit_name="the engine's batches, answered by one thread at once",
            )

    def measure_one_at_a_time(self) -> None:
        """Measures one producer alone."""
        for level, seconds in _ALONE_SECONDS.items():
            topic = f"/default/alone-{level}"
            _create(self._servers["broker"]["grpc"], topic, level)
            sides = self._take_turns(partial(self._send, 1, seconds, topic))
            name = f"one send at a time, {level}"
            if level == "memory":
                most = _ALONE_AT_MEMORY_MAX
                self._add(f"{name}: p50", "ms", _p50, sides, at_most=most, on="ratio")
            else:
                alone_ms = self._targets.alone_ms if level == "synced" else None
                self._add(f"{name}: p50", "ms", _p50, sides, at_most=alone_ms)
            self._add(f"{name}: p99", "ms", _p99, sides)
            most_us = self._targets.alone_us if level == "synced" else None
            self._add(f"{name}: broker CPU a send", "us", _cpu_us, sides, at_most=most_us)

    def measure_consuming(self, count: int) -> None:
        """Measures consuming a backlog; the empty handler has its messages ready."""
        topics = (f"/default/backlog-{number}" for number in range(self._rounds))

        def consume(side: str, server: dict[str, Any]) -> Outcome:
            is_broker = side == "broker"
            return http2_client.consume(
                server["grpc"],
                count=count,
                pid=server["pid"],
                topic=next(topics) if is_broker else PREPARED,
                fill=is_broker,
            )

        sides = self._take_turns(consume)
        name = f"consume, an ack for each, {ACKS_AT_ONCE} under way"
        self._add(name, "msg/s", _rate, sides)
        at_most = self._targets.acked_us
        self._add(f"{name}: broker CPU a message", "us", _cpu_us, sides, at_most=at_most)

    def measure_flow(self) -> None:
        """Measures a steady rate from one producer to one consumer."""

        def flow(rate: int) -> tuple[list[Outcome], list[Outcome]]:
            return self._take_turns(
                lambda _, server: http2_client.flow(
                    server["grpc"],
                    rate=rate,
                    seconds=self._seconds(_FLOW_SECONDS),
                    pid=server["pid"],
                    topic=f"/default/flow-{rate}",
                )
            )

        sides = flow(_RATE)
        name = f"send, deliver and ack at {_RATE} msg/s, synced"
        self._add(f"{name}: p50", "ms", _p50, sides, at_most=_FLOW_P50_MS)
        self._add(f"{name}: p99", "ms", _p99, sides, at_most=_FLOW_P99_MS)
        at_most = self._targets.flow_us
        self._add(f"{name}: broker CPU a message", "us", _cpu_us, sides, at_most=at_most)
        if self._targets.is_held:
            sides = flow(_RATE_HELD)
            name = f"send, deliver and ack at {_RATE_HELD} msg/s, synced"
            self._add(f"{name}: held", "msg/s", _rate, sides, at_least=_HELD * _RATE_HELD)


def _create(address: str, topic: str, level: str) -> None:
    request = ister_api.CreateTopicRequest(topic=topic, ack=level)
    with Loop() as loop:
        loop.ask(loop.connect(address), _CREATE_TOPIC, request.SerializeToString())


def _rate(outcome: Outcome) -> float:
    return outcome.rate


def _cpu_us(outcome: Outcome) -> float:
    return outcome.cpu_us or 0.0


def _p50(outcome: Outcome) -> float:
    return quantile(outcome.times_ms, 0.5)


def _p99(outcome: Outcome) -> float:
    return quantile(outcome.times_ms, 0.99)
