"""A real etcd that takes nothing but TLS with a client certificate: files, reload, refusals."""

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest

from ister.base.clock import SystemClock
from ister.config import EtcdTlsConfig
from ister.errors import ConfigError, UnavailableError
from ister.metadata import etcd_endpoint
from ister.metadata.base import Put
from ister.metadata.etcd import EtcdMetadata
from ister.metadata.etcd_tls import ClientTls
from tests.servers.etcd import EtcdServer
from tests.support.cases import each
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.clock import ManualClock
from tests.support.waiting import eventually


class Files:
    """One authority, and etcd's and this client's certificates of it."""

    def __init__(self, directory):
        self.directory = directory
        self.authority = Authority("etcd")
        self.ca_file = self.authority.write(directory)
        issued = self.authority.issue("server", names=LOCAL_NAMES)
        self.server = (self.ca_file, *issued.write(directory, "server"))
        self.cert_file, self.key_file = self.authority.issue("ister").write(directory, "ister")

    def with_certificate_of(self, authority, directory, **validity):
        """The settings of a client with another certificate."""
        cert_file, key_file = authority.issue("ister", **validity).write(directory, "wrong")
        return EtcdTlsConfig(ca_file=self.ca_file, cert_file=cert_file, key_file=key_file)

    @property
    def config(self):
        return EtcdTlsConfig(ca_file=self.ca_file, cert_file=self.cert_file, key_file=self.key_file)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(files):
    with EtcdServer(tls=files.server) as server:
        yield server


@pytest.fixture
def open_store(server):
    opened = []

    def open_it(*endpoints, **options):
        options = {"clock": SystemClock(), "call_timeout_seconds": 1.0, **options}
        opened.append(EtcdMetadata(endpoints or [f"https://{server.endpoint}"], **options))
        return opened[-1]

    yield open_it
    server.cable.heal()
    for store in opened:
        store.close()


def refusal(store):
    """What the store says when it has given up."""
    with pytest.raises(UnavailableError) as refused:
        store.get("/a")
    return str(refused.value)


# -- what works ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["https://", ""])
def test_everything_works_with_a_client_certificate(server, files, open_store, prefix):
    store = open_store(f"{prefix}{server.endpoint}", tls=files.config)
    store.put("/a", b"1")
    assert store.transact([], [Put("/b", b"2")])
    assert [found.value for found in store.range("/")] == [b"1", b"2"]
    store.grant_lease(5).renew()
    changed = []
    watch = store.watch("/a", changed.append)
    store.put("/a", b"3")
    eventually(lambda: changed)
    watch.close()


def test_certificates_are_reloaded_without_a_restart(tmp_path, open_store):
    """Both sides move to another authority: only a client that reads its files again goes on."""
    first, second = Files(tmp_path), Authority("next")
    with EtcdServer(tls=first.server) as server:
        store = open_store(f"https://{server.endpoint}", tls=first.config)
        changed = []
        watch = store.watch("/", changed.append)
        store.put("/a", b"1")
        eventually(lambda: changed)

        # etcd reads its certificate with each handshake, its CA only at the start.
        replace(first.ca_file, second.certificate)
        issued = second.issue("server", names=LOCAL_NAMES)
        replace(first.server[1], issued.certificate)
        replace(first.server[2], issued.key)
        server.kill(0)
        mine = second.issue("ister")
        replace(first.cert_file, mine.certificate)
        replace(first.key_file, mine.key)
        server.reload_certificates()
        server.start(0)

        def answers():
            try:
                return store.get("/a").value == b"1"
            except UnavailableError:
                return False

        eventually(answers)
        store.put("/b", b"2")
        eventually(lambda: "/b" in changed)
        watch.close()


def test_calls_under_way_and_watches_outlive_new_certificates(
    tmp_path, server, files, open_store, monkeypatch
):
    """The old channel is let go; nothing is cancelled that somebody waits for."""
    monkeypatch.setattr(etcd_endpoint, "_RETIRE_SECONDS", 0.2)
    own = Files(tmp_path)
    issued = files.authority.issue("ister")
    replace(own.ca_file, files.authority.certificate)
    replace(own.cert_file, issued.certificate)
    replace(own.key_file, issued.key)
    clock = ManualClock()
    store = open_store(tls=own.config, clock=clock)
    changed = []
    watch = store.watch("/rotated/", changed.append)
    for number in range(3):
        issued = files.authority.issue("ister")
        replace(own.cert_file, issued.certificate)
        replace(own.key_file, issued.key)
        clock.advance(2)
        store.put(f"/rotated/{number}", b"")
        eventually(lambda: f"/rotated/{number}" in changed)  # noqa: B023
        (endpoint,) = store._endpoints
        assert endpoint._tls_serial == number + 2
        eventually(lambda: not endpoint._retiring)  # noqa: B023
    store.put("/rotated/last", b"")
    eventually(lambda: "/rotated/last" in changed)
    watch.close()


# -- what is refused, and how it is said --------------------------------------------------------


REFUSED = {
    "requires a client certificate": lambda files, place: EtcdTlsConfig(ca_file=files.ca_file),
    "rejects the client certificate": lambda files, place: files.with_certificate_of(
        Authority("other"), place
    ),
    "rejects the client": lambda files, place: files.with_certificate_of(
        files.authority, place, start=timedelta(days=-9), end=timedelta(days=-1)
    ),
    "its certificate is invalid": lambda files, place: EtcdTlsConfig(
        ca_file=Authority("other").write(place, "other"),
        cert_file=files.cert_file,
        key_file=files.key_file,
    ),
}


@pytest.mark.nightly
@each("says", REFUSED)
def test_error_says_what_is_wrong_with_certificates(tmp_path, files, open_store, says):
    assert says in refusal(open_store(tls=REFUSED[says](files, tmp_path)))


@pytest.mark.nightly
def test_error_says_that_only_one_side_uses_tls(server, files, open_store):
    assert "uses TLS; use https://" in refusal(open_store(server.endpoint))
    with EtcdServer() as plain:
        store = open_store(f"https://{plain.endpoint}", tls=files.config)
        assert re.search(r"(not use|has no) TLS[;,].* use http://", refusal(store))


# -- files --------------------------------------------------------------------------------------


def test_certificate_files_that_do_not_match_are_an_error_at_the_start(tmp_path, files):
    other_cert, other_key = files.authority.issue("other").write(tmp_path, "other")
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"nothing")
    wrong = {
        "does not match cert_file": EtcdTlsConfig(cert_file=files.cert_file, key_file=other_key),
        "both cert_file and key_file": EtcdTlsConfig(cert_file=other_cert),
        "cannot read storage.metadata.tls.ca_file": EtcdTlsConfig(
            ca_file=str(tmp_path / "none.pem")
        ),
        "ca_file has no PEM certificate": EtcdTlsConfig(ca_file=str(empty)),
        "not a PEM certificate and its key": EtcdTlsConfig(
            cert_file=str(empty), key_file=other_key
        ),
    }
    for text, config in wrong.items():
        with pytest.raises(ConfigError, match=text):
            EtcdMetadata(["host:1"], clock=SystemClock(), tls=config)


def test_plain_endpoints_and_certificates_contradict_each_other(files):
    with pytest.raises(ConfigError):
        EtcdMetadata(["http://host:1"], clock=SystemClock(), tls=files.config)
    with pytest.raises(ConfigError):
        EtcdMetadata(["http://a:1", "https://b:1"], clock=SystemClock())


def test_half_replaced_files_are_not_used(tmp_path, caplog):
    files = Files(tmp_path)
    clock = ManualClock()
    tls = ClientTls(files.config, clock=clock)
    before = tls.material()
    issued = files.authority.issue("ister")
    replace(files.cert_file, issued.certificate)
    clock.advance(2)
    assert tls.material() is before
    assert "cannot load new certificates" in caplog.text
    replace(files.key_file, issued.key)
    clock.advance(2)
    assert tls.material().value.key == issued.key
    assert tls.material().serial == before.serial + 1
    os.unlink(files.key_file)
    clock.advance(2)
    assert tls.material().value.key == issued.key


# -- inside -------------------------------------------------------------------------------------


def replace(path, content):
    """As tools that rotate certificates do it."""
    new = Path(f"{path}.new")
    new.write_bytes(content)
    new.replace(path)
