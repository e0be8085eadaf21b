"""Certificates of the broker: files that do not fit, and where it may listen."""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from datetime import timedelta

import grpc
import pytest

from ister.broker.security.tls import ServerTls, check_exposure, is_loopback
from ister.config import AuthConfig, AuthMode, BrokerConfig, ClientAuth, TlsConfig
from ister.errors import ConfigError
from tests.support.cases import each
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.clock import ManualClock

AUTHORITY = Authority("servers")


class _WallClock(ManualClock):
    """Moves by hand from the time of the certificates on."""

    def __init__(self):
        super().__init__(now_ms=int(time.time() * 1000))


@pytest.fixture
def clock():
    return _WallClock()


def settings(directory, issued=None, **more):
    issued = issued or AUTHORITY.issue("broker", names=LOCAL_NAMES)
    cert_file, key_file = issued.write(directory, "broker")
    return TlsConfig(cert_file=cert_file, key_file=key_file, **more)


def test_no_files_no_tls(clock):
    assert ServerTls.open(TlsConfig(), clock=clock) is None


def test_files_that_fit(tmp_path, clock):
    tls = ServerTls.open(settings(tmp_path), clock=clock)
    material = tls.material()
    assert material.serial == 1
    assert b"CERTIFICATE" in material.value.certificates
    assert b"PRIVATE" not in repr(material).encode()
    assert not tls.requires_certificate


@each(
    ("more", "reason"),
    [
        ({"key_file": None}, "both cert_file and key_file"),
        ({"cert_file": None}, "both cert_file and key_file"),
        ({"client_auth": ClientAuth.REQUIRED}, "ca_file is not set"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, clock, more, reason):
    known = settings(tmp_path)
    config = TlsConfig(**{"cert_file": known.cert_file, "key_file": known.key_file, **more})
    with pytest.raises(ConfigError, match=reason):
        ServerTls.open(config, clock=clock)


def test_authority_alone_is_an_error(tmp_path, clock):
    with pytest.raises(ConfigError, match="both"):
        ServerTls.open(TlsConfig(ca_file=AUTHORITY.write(tmp_path)), clock=clock)


@each("name", ["broker.crt", "broker.key", "ca.crt"])
@each("content", [None, b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAA\n"])
def test_file_that_is_none(tmp_path, clock, name, content):
    config = settings(tmp_path, ca_file=AUTHORITY.write(tmp_path), client_auth=ClientAuth.REQUIRED)
    path = tmp_path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broker\.tls") as caught:
        ServerTls(config, clock=clock)
    assert caught.value.path == str(path)


def test_key_of_another_certificate(tmp_path, clock):
    config = settings(tmp_path)
    (tmp_path / "broker.key").write_bytes(AUTHORITY.issue("other").key)
    with pytest.raises(ConfigError, match="does not match"):
        ServerTls(config, clock=clock)


@each(("start", "end", "reason"), [(-2, -1, "expired at"), (1, 2, "is not valid before")])
def test_certificate_of_another_time(tmp_path, clock, start, end, reason):
    issued = AUTHORITY.issue("broker", start=timedelta(days=start), end=timedelta(days=end))
    with pytest.raises(ConfigError, match=reason):
        ServerTls(settings(tmp_path, issued), clock=clock)


def test_new_files_are_taken(tmp_path, clock):
    tls = ServerTls(settings(tmp_path), clock=clock)
    new = AUTHORITY.issue("broker", names=LOCAL_NAMES)
    new.write(tmp_path, "broker")
    assert tls.material().serial == 1, "not looked at with every handshake"
    clock.advance(1)
    material = tls.material()
    assert (material.serial, material.value.certificates) == (2, new.certificate)
    clock.advance(1)
    assert tls.material() is material


def test_new_files_that_do_not_fit_are_not_taken(tmp_path, clock, caplog):
    """Between the first and the second file of two, and with an expired one."""
    config = settings(tmp_path)
    tls = ServerTls(config, clock=clock)
    before = tls.material()
    new = AUTHORITY.issue("broker", names=LOCAL_NAMES)
    (tmp_path / "broker.crt").write_bytes(new.certificate)
    for _ in range(3):
        clock.advance(1)
        assert tls.material() is before
    assert len([r for r in caplog.records if "previous ones stay" in r.getMessage()]) == 1
    (tmp_path / "broker.key").write_bytes(new.key)
    clock.advance(1)
    assert tls.material().value.certificates == new.certificate
    os.unlink(config.key_file)
    clock.advance(1)
    assert tls.material().value.certificates == new.certificate
    assert new.key.decode() not in caplog.text


# -- HTTP -----------------------------------------------------------------------------------


async def _handshake(port, authority, client=None):
    """The server's certificate as a client sees it."""
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    if client is not None:
        context.load_cert_chain(*client)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost"
    )
    try:
        # With TLS 1.3 the server's refusal shows with the first read.
        assert await reader.readexactly(2) == b"ok"
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _serve(context):
    async def answer(_reader, writer):
        writer.write(b"ok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    return server, server.sockets[0].getsockname()[1]


async def test_http_takes_new_certificates_and_new_authorities(tmp_path, clock):
    """A client of the old authority is let in before, and one of the new authority after."""
    old, new = Authority("old clients"), Authority("new clients")
    clients = {
        name: authority.issue("client").write(tmp_path, name)
        for name, authority in (("old", old), ("new", new))
    }
    config = settings(tmp_path, ca_file=old.write(tmp_path), client_auth=ClientAuth.REQUIRED)
    tls = ServerTls(config, clock=clock)

    server, port = await _serve(tls.http_context())
    async with server:
        first = await _handshake(port, AUTHORITY, clients["old"])
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await _handshake(port, AUTHORITY, clients["new"])
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await _handshake(port, AUTHORITY)
        AUTHORITY.issue("broker", names=LOCAL_NAMES).write(tmp_path, "broker")
        new.write(tmp_path)
        clock.advance(1)
        second = await _handshake(port, AUTHORITY, clients["new"])
        assert second != first
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await _handshake(port, AUTHORITY, clients["old"])


# -- gRPC -----------------------------------------------------------------------------------


def _open(port, context, session=None):
    """Opens a connection as HTTP/2 does; returns the session, and whether it was resumed."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        assert connection.recv(9), "the server's settings, behind its tickets"
        return connection.session, connection.session_reused


@each("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_grpc_resumes_no_session_older_than_a_minute(tmp_path, clock, version):
    """Goal: nobody verifies the certificate of a resumed session, which may have expired."""
    ca_file = AUTHORITY.write(tmp_path)
    tls = ServerTls(
        settings(tmp_path, ca_file=ca_file, client_auth=ClientAuth.REQUIRED), clock=clock
    )
    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(*AUTHORITY.issue("client").write(tmp_path, "client"))

    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", tls.grpc_credentials())
    await server.start()
    try:
        session, _ = await asyncio.to_thread(_open, port, context)
        session, is_resumed = await asyncio.to_thread(_open, port, context, session)
        assert is_resumed
        clock.advance(60)
        _, is_resumed = await asyncio.to_thread(_open, port, context, session)
        assert not is_resumed
    finally:
        await server.stop(None)


# -- where it may listen --------------------------------------------------------------------


@each(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.example", False),
        ("broker", False),
    ],
)
def test_loopback(host, is_local):
    assert is_loopback(host) == is_local


_TOKEN = AuthConfig(mode=AuthMode.TOKEN)
_TLS = TlsConfig(cert_file="c", key_file="k")
_MUTUAL = TlsConfig(cert_file="c", key_file="k", ca_file="a", client_auth=ClientAuth.REQUIRED)


@each(
    ("more", "reason"),
    [
        ({}, None),
        ({"host": "::1"}, None),
        ({"host": "0.0.0.0"}, "has all rights"),
        ({"host": "0.0.0.0", "tls": _TLS}, "has all rights"),
        ({"host": "0.0.0.0", "allow_insecure": True}, None),
        ({"host": "0.0.0.0", "auth": _TOKEN}, "plain text"),
        ({"host": "0.0.0.0", "auth": _TOKEN, "allow_insecure": True}, None),
        ({"host": "0.0.0.0", "auth": _TOKEN, "tls": _TLS}, None),
        ({"host": "0.0.0.0", "tls": _MUTUAL}, None),
    ],
)
def test_exposure(more, reason):
    config = BrokerConfig(**more)
    if reason is None:
        check_exposure(config)
    else:
        with pytest.raises(ConfigError, match=reason):
            check_exposure(config)
