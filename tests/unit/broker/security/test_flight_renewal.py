"""A Flight server and its new certificates."""

import logging
import ssl
import time

import pytest
from pyarrow import flight

from certificates import LOCAL_NAMES, Authority
from ister.broker.security.flight_renewal import RenewedFlight
from ister.broker.security.tls import ServerTls
from ister.clock import ManualClock
from ister.config import TlsConfig
from ister.errors import ClosedError

AUTHORITY = Authority()


class Files:
    """Certificates that can be replaced."""

    def __init__(self, directory):
        self.directory = directory
        self.clock = ManualClock(now_ms=int(time.time() * 1000))
        self.issued = None
        config = TlsConfig(**dict(zip(("cert_file", "key_file"), self.replace(), strict=True)))
        self.tls = ServerTls(config, clock=self.clock)

    def replace(self):
        self.issued = AUTHORITY.issue("broker", names=LOCAL_NAMES)
        self.clock.advance(1)
        return self.issued.write(self.directory, "broker")


class Server(flight.FlightServerBase):
    def __init__(self, port, tls):
        super().__init__(f"grpc+tls://127.0.0.1:{port}", **tls.flight_options())

    def do_action(self, context, action):
        return [b"hello"]

    def close(self):
        self.shutdown()
        self.wait()


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_new_certificates_are_shown_at_the_same_port(files):
    """A client that was there before comes again by itself."""
    renewed = RenewedFlight(lambda port: Server(port, files.tls), port=0, tls=files.tls)
    port = renewed.start().port

    def shown():
        return ssl.get_server_certificate(("127.0.0.1", port)).encode()

    location = f"grpc+tls://localhost:{port}"
    with flight.connect(location, tls_root_certs=AUTHORITY.certificate) as client:
        try:
            assert shown() == files.issued.certificate
            before = files.issued
            assert list(client.do_action("x"))
            renewed.renew()
            assert shown() == before.certificate
            files.replace()
            assert shown() == before.certificate
            renewed.renew()
            assert shown() == files.issued.certificate != before.certificate
            deadline = time.monotonic() + 30
            while True:
                try:
                    assert list(client.do_action("x"))
                    break
                except flight.FlightUnavailableError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        finally:
            renewed.close()
    renewed.close()
    renewed.renew()
    with pytest.raises(OSError, match="refused"):
        shown()


class Fake:
    """A server that notes its life."""

    def __init__(self, life, port):
        self.life = life
        self.port = port or 7777
        life.append(f"start {self.port}")

    def close(self):
        self.life.append("close")


def test_server_that_does_not_start_is_tried_again(files, caplog):
    life, failures = [], []

    def start(port):
        if failures:
            raise failures.pop()
        return Fake(life, port)

    renewed = RenewedFlight(start, port=0, tls=files.tls)
    renewed.start()
    files.replace()
    failures.append(RuntimeError("the port is taken"))
    with caplog.at_level(logging.ERROR):
        renewed.renew()
    assert [record.error for record in caplog.records] == ["the port is taken"]
    assert life == ["start 7777", "close"]
    renewed.renew()
    renewed.renew()
    assert life == ["start 7777", "close", "start 7777"]
    renewed.close()
    renewed.close()
    assert life[-2:] == ["start 7777", "close"]
    with pytest.raises(ClosedError):
        renewed.start()


def test_without_certificates_nothing_is_renewed():
    life = []
    renewed = RenewedFlight(lambda port: Fake(life, port), port=0, tls=None)
    renewed.start()
    renewed.renew()
    renewed.close()
    assert life == ["start 7777", "close"]


def test_first_start_that_fails_says_so(files):
    def start(_port):
        raise RuntimeError("the port is taken")

    with pytest.raises(RuntimeError):
        RenewedFlight(start, port=0, tls=files.tls).start()
