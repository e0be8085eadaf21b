"""A web service that publishes: FastAPI, and a producer that lives as long as the service.

Each request is answered when the broker has the order, durably. The producer is opened when the
service starts, shared by all requests, and flushed when the service ends.

    python examples/fastapi_publisher.py [DIRECTORY]

starts a broker and the service, orders something, and reads the topic. Beside a broker of yours:

    ISTER_BROKER=127.0.0.1:6650 uvicorn --app-dir examples fastapi_publisher:app

Needs `pip install 'ister[broker,client]' fastapi uvicorn`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from urllib.error import HTTPError
from urllib.request import Request as WebRequest
from urllib.request import urlopen

import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel, PositiveFloat

from ister.client import AsyncClient, AsyncProducer, Client
from ister.testing import run_broker

TOPIC = "/default/web-orders"


class Order(BaseModel):
    """What a request has to have; anything else is refused with 422."""

    shop: str
    amount: PositiveFloat


def make_app(address: str) -> FastAPI:
    """A service that publishes to the broker at an address."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            AsyncClient(address, timeout=30) as client,
            client.producer(TOPIC, create=True) as producer,
        ):
            app.state.producer = producer
            yield

    made = FastAPI(title="Orders", lifespan=lifespan)

    @made.post("/orders", status_code=201)
    async def publish(order: Order, request: Request) -> dict[str, int]:
        producer: AsyncProducer = request.app.state.producer
        sent = await producer.send_json(order, routing_key=order.shop)
        return {"offset": await sent}

    return made


app = make_app(os.environ.get("ISTER_BROKER", "127.0.0.1:6650"))


@contextmanager
def served(web: FastAPI) -> Iterator[str]:
    """The URL of the service, which runs in a thread as long as the block lasts."""
    server = uvicorn.Server(uvicorn.Config(web, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def order(url: str, body: dict[str, object]) -> int:
    """The status of a request to the service."""
    headers = {"Content-Type": "application/json"}
    request = WebRequest(f"{url}/orders", json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urlopen(request) as response:  # noqa: S310 - of this process
            return int(response.status)
    except HTTPError as error:
        return error.code


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="A FastAPI service that publishes orders.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    parser.add_argument("--broker", metavar="HOST:PORT", help="a broker that runs already")
    options = parser.parse_args(arguments)
    with (
        run_broker(directory=options.directory)
        if options.broker is None
        else nullcontext() as broker
    ):
        address = options.broker or broker.address
        with served(make_app(address)) as url:
            for shop, amount in (("Ulm", 12.5), ("Linz", 3), ("Ruse", -1)):
                status = order(url, {"shop": shop, "amount": amount})
                print(f"{shop} orders for {amount}: {status}")
        with Client(address, timeout=30) as client:
            for text in client.read_arrow(TOPIC, columns=["text"]).read_all()["text"].to_pylist():
                print(f"in the topic: {text}")


if __name__ == "__main__":
    main()
