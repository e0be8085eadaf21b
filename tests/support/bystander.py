"""A client that only wants to be served, in a process of its own, while others misbehave.

    python -m tests.support.bystander <gRPC address> <HTTP address>

Round after round, with the real `danube-client`: a message is sent, comes back and is acknowledged,
the subscription is described, and `/ready` is asked for. Each round is a line of JSON on standard
output: when it began (the machine's monotonic clock, so others can compare), how long it took, and
what went wrong. It ends when its standard input does.

`Bystander` runs it from a test, and judges what it saw.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

TOPIC = "/default/bystander"
SUBSCRIPTION = "bystander"
ROUND_SECONDS = 120.0
PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Round:
    """One round: when it began, how long it took, what went wrong."""

    began: float
    took: float
    error: str | None = None

    @property
    def ended(self) -> float:
        return self.began + self.took


class Bystander:
    """The process, and what it has seen so far."""

    def __init__(self, broker: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, broker.address, broker.http],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._rounds: list[Round] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="bystander-reader")
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            with self._changed:
                self._rounds.append(Round(**json.loads(line)))
                self._changed.notify_all()

    def wait(self, began: float, count: int = 1, within: float = 240.0) -> None:
        """Until so many rounds that began after a moment are over."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(1 for one in self._rounds if one.began >= began) >= count, within
            ), f"the bystander made no {count} rounds in {within} s"

    def rounds(self, start: float, end: float) -> list[Round]:
        """Those that were under way between two moments."""
        with self._changed:
            return [one for one in self._rounds if one.ended > start and one.began < end]

    @property
    def sent(self) -> int:
        """Messages that were acknowledged to it."""
        with self._changed:
            return sum(1 for one in self._rounds if one.error is None)

    def close(self) -> None:
        """Ends it; its last round is waited for."""
        self._process.stdin.close()
        try:
            self._process.wait(ROUND_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


async def main(address: str, http: str) -> None:
    """Round after round, until standard input ends."""
    from ister.wire import ister_api  # noqa: PLC0415
    from tests.support.danube import connect  # noqa: PLC0415 - the path is set above

    class Broker:
        pass

    broker: Any = Broker()
    broker.address = address
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), is_over.set)

    async with connect(broker) as danube:
        producer = await danube.producer(TOPIC)
        inbox = await danube.consumer(TOPIC, subscription=SUBSCRIPTION)
        number = 0

        async def one() -> None:
            payload = f"round {number}".encode()
            await producer.send(payload)
            message = await inbox.one(ack=True)
            assert message.payload == payload, (
                f"{message.payload!r} instead of {payload!r}, at {message.msg_id.topic_offset}"
            )
            found = await danube.admin.DescribeSubscription(
                ister_api.SubscriptionName(topic=TOPIC, subscription=SUBSCRIPTION)
            )
            assert list(found.consumers) == ["consumer"], found
            host, _, port = http.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer[:100]

        while not is_over.is_set():
            began, error = time.monotonic(), None
            try:
                await asyncio.wait_for(one(), ROUND_SECONDS)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            number += 1
            line = {"began": began, "took": time.monotonic() - began, "error": error}
            print(json.dumps(line), flush=True)
            await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
