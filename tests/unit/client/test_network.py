"""Calls of a client that no broker answers: how long they take, and what their error says."""

import asyncio
import socket

import pytest

from ister import wire
from ister.client.core.network import Network, Route
from ister.errors import NoAnswerError
from tests.servers.ports import free_port

LOOK_UP = wire.services.Discovery.TopicLookup
TOPIC = "/default/t"
LATER = 8.0
"""More than a time-out of a second, on a busy machine, and less than an attempt may take."""


async def failure_of(network, *, topic=None):
    request = wire.danube.TopicLookupRequest(topic=TOPIC)
    try:
        async with asyncio.timeout(LATER):
            with pytest.raises(NoAnswerError) as caught:
                await network.call(LOOK_UP, request, topic=topic)
    finally:
        await network.close()
    return caught.value


async def test_a_broker_that_says_nothing_is_left_when_the_time_is_over():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for topic in (None, TOPIC):
            error = await failure_of(Network(address, timeout=0.5), topic=topic)
            assert error.address == address


async def test_the_brokers_that_did_not_answer_are_named(monkeypatch):
    """Not the one that has answered the look-up."""
    dead = f"127.0.0.1:{free_port()}"

    async def locate(network, topic, **options):
        return Route(dead)

    monkeypatch.setattr(Network, "locate", locate)
    error = await failure_of(Network("127.0.0.1:1", timeout=0.3), topic=TOPIC)
    assert error.address == dead
    assert str(error).startswith(f"{dead} does not answer within 0.3 s")


async def test_several_brokers_that_did_not_answer_are_all_named():
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    error = await failure_of(Network(",".join(addresses), timeout=0.5))
    assert sorted(error.address.split(",")) == sorted(addresses)
    assert " do not answer within 0.5 s" in str(error)
