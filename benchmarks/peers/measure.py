"""Measures one contender, in a process of its own; prints the result as one JSON line.

    python -m benchmarks.peers.measure NAME DURABILITY --directory D [--cache C] [--scale S]

Stops its servers however it ends, SIGTERM included. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import uvloop

from benchmarks.peers.cases import measure
from benchmarks.peers.contender import Contender, MissingError

CONTENDERS = {
    "ister-flight": "benchmarks.peers.ister_flight:IsterFlight",
    "ister-danube": "benchmarks.peers.ister_danube:IsterDanube",
    "ister-danube-native": "benchmarks.peers.ister_danube:IsterDanubeNative",
    "ister-open": "benchmarks.peers.ister_open:IsterOpen",
    "nats": "benchmarks.peers.nats_jetstream:NatsJetStream",
    "redis": "benchmarks.peers.redis_streams:RedisStreams",
    "rabbitmq": "benchmarks.peers.rabbitmq_streams:RabbitMqStreams",
    "kafka": "benchmarks.peers.kafka:Kafka",
}
"""The class of each contender by its name, in the page's order."""


async def _measure(options: argparse.Namespace, contender: Contender) -> dict[str, object]:
    def say(text: str) -> None:
        print(f"  {options.name} {options.durability}: {text}", file=sys.stderr, flush=True)

    try:
        await contender.start()
        figures = await measure(contender, options.scale, say, with_restart=options.restart)
        facts = contender.facts()
    except MissingError as error:
        return {"missing": str(error)}
    finally:
        await contender.stop()
    return {"facts": asdict(facts), "figures": figures}


def main() -> None:
    """Measures, and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("durability", choices=("synced", "unsynced"))
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--restart", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    module, _, name = CONTENDERS[options.name].partition(":")
    kind = getattr(importlib.import_module(module), name)
    contender = kind(options.directory, options.cache, options.durability)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_measure(options, contender))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
