"""A client without TLS at a TLS port, and the other way round, is told so: by both transports."""

import asyncio
import socket

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

from ister.client import AsyncClient, TlsOptions
from ister.client.flight import FlightClient
from ister.client.tls_probe import PLAIN_HINT, TLS_HINT, find_tls_mismatch
from ister.errors import ConfigError, UnavailableError
from tests.support.broker import a_broker
from tests.support.certificates import LOCAL_NAMES, Authority


async def test_a_client_without_tls_is_told_that_the_port_uses_tls(tmp_path):
    authority = Authority("servers")
    cert_file, key_file = authority.issue("broker", names=LOCAL_NAMES).write(tmp_path, "broker")
    tls = {
        "cert_file": cert_file,
        "key_file": key_file,
        "ca_file": authority.write(tmp_path),
        "client_auth": "required",
    }
    async with a_broker(tmp_path, {"broker": {"tls": tls}}, mode="memory") as (_, _, listening):
        address = f"127.0.0.1:{listening.grpc}"
        # It does not wait for the timeout: there is none.
        async with AsyncClient(address) as client:
            with pytest.raises(ConfigError) as told:
                await client.admin.namespaces()
            assert told.value.hint == TLS_HINT
            with pytest.raises(ConfigError):
                await client.producer("/default/t", create=True)
        with (
            FlightClient(f"127.0.0.1:{listening.flight}") as flight,
            pytest.raises(ConfigError),
        ):
            await asyncio.to_thread(flight.topics)


async def test_a_client_with_tls_is_told_that_the_port_does_not_use_it(tmp_path):
    ca = Authority().certificate
    async with a_broker(tmp_path, mode="memory") as (_, _, listening):
        address = f"127.0.0.1:{listening.grpc}"
        async with AsyncClient(address, tls=TlsOptions(ca=ca)) as client:
            with pytest.raises(ConfigError) as told:
                await client.admin.namespaces()
            assert told.value.hint == PLAIN_HINT
        location = f"grpc+tls://127.0.0.1:{listening.flight}"
        with (
            FlightClient(location, tls_ca=ca) as flight,
            pytest.raises(ConfigError),
        ):
            await asyncio.to_thread(flight.topics)
        # Another port is another mistake.
        http = f"127.0.0.1:{listening.http}"
        for is_encrypted in (False, True):
            found = await asyncio.to_thread(find_tls_mismatch, http, is_encrypted=is_encrypted)
            assert found is None


async def test_what_does_not_answer_at_all_is_no_mismatch(monkeypatch):
    monkeypatch.setattr("ister.client.tls_probe._PROBE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for is_encrypted in (False, True):
            assert find_tls_mismatch(address, is_encrypted=is_encrypted) is None
    for is_encrypted in (False, True):
        assert find_tls_mismatch(address, is_encrypted=is_encrypted) is None

    async with AsyncClient(address, timeout=0.1) as client:
        with pytest.raises(UnavailableError):
            await client.admin.namespaces()
