"""etcd's own: answers lost on the way, endpoints that are gone, quotas, elections, settings."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ister.base.clock import SystemClock
from ister.errors import (
    CapacityError,
    CommitUnknownError,
    ConfigError,
    InvariantError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from ister.metadata import etcd, etcd_endpoint, etcd_usage
from ister.metadata.base import Put
from ister.metadata.etcd import EtcdMetadata
from tests.servers.etcd import EtcdServer, etcd_binary
from tests.servers.ports import free_port
from tests.support.clock import ManualClock
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def server():
    with EtcdServer() as server:
        yield server


@pytest.fixture
def open_store(server):
    opened = []

    def open_it(*endpoints, **options):
        options = {"clock": SystemClock(), "call_timeout_seconds": 1.0, **options}
        opened.append(EtcdMetadata(endpoints or [server.endpoint], **options))
        return opened[-1]

    yield open_it
    server.cable.heal()
    for store in opened:
        store.close()


def _direct(server):
    return server.direct_endpoints[0]


# -- unknown outcomes ---------------------------------------------------------------------------

_CHANGES = {
    "put": lambda store, key: store.put(key, b"new"),
    "transact": lambda store, key: store.transact([], [Put(key, b"new")]),
    "delete": lambda store, key: store.delete(f"{key}/old"),
    "delete_prefix": lambda store, key: store.delete_prefix(f"{key}/old"),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_lost_reply_to_a_change_is_an_unknown_outcome(open_store, server, change):
    """The request passes and its reply does not: the change is there, and there once."""
    store, witness = open_store(), open_store(_direct(server))
    key = f"/lost/{change}"
    store.put(f"{key}/old", b"old")
    before = witness.put("/mark", b"")
    server.cable.drop_next_reply()
    with pytest.raises(CommitUnknownError):
        _CHANGES[change](store, key)
    assert server.cable.reply_dropped.wait(5)
    if change.startswith("delete"):
        assert witness.get(f"{key}/old") is None
    else:
        assert witness.get(key).revision == before + 1
    assert witness.put("/mark", b"") == before + 2


def test_silence_after_a_change_is_an_unknown_outcome(open_store, server):
    store = open_store(call_timeout_seconds=0.3)
    store.put("/silence", b"1")
    server.cable.swallow()
    with pytest.raises(CommitUnknownError):
        store.put("/silence", b"2")
    server.cable.heal()
    assert store.get("/silence").value == b"1"


def test_lost_reply_to_a_read_is_asked_for_again(open_store, server):
    store = open_store()
    store.put("/read", b"1")
    server.cable.drop_next_reply()
    assert store.get("/read").value == b"1"
    assert server.cable.reply_dropped.is_set()


# -- endpoints ----------------------------------------------------------------------------------


def test_refused_connection_moves_to_the_next_endpoint(open_store, server):
    store = open_store(f"127.0.0.1:{free_port()}", f"http://{server.endpoint}/")
    assert store.put("/moved", b"1")
    assert store.get("/moved").value == b"1"


def test_endpoint_that_accepts_and_says_nothing_is_left_by_changes_too(open_store, server):
    """Without HTTP/2's first frames there is no connection, so nothing can have been sent."""
    store = open_store(server.endpoint, _direct(server), call_timeout_seconds=0.4)
    server.cable.swallow()
    assert store.put("/past", b"1")
    assert store.get("/past").value == b"1"


def test_no_endpoint_at_all_is_unavailable_and_not_unknown(open_store):
    store = open_store(f"127.0.0.1:{free_port()}", call_timeout_seconds=0.1)
    for use in (lambda: store.get("/a"), lambda: store.put("/a", b"")):
        with pytest.raises(UnavailableError) as unavailable:
            use()
        assert not isinstance(unavailable.value, CommitUnknownError)
    with pytest.raises(UnavailableError):
        store.grant_lease(1)


def test_connection_comes_back_by_itself(open_store, server):
    store = open_store(call_timeout_seconds=2)
    store.put("/back", b"1")
    server.cable.cut()
    threading.Timer(0.5, server.cable.heal).start()
    assert store.get("/back").value == b"1"


@pytest.mark.parametrize(
    "endpoints",
    [
        [],
        ["host"],
        ["host:port"],
        ["user:secret@host:1"],
        ["ftp://host:1"],
        ["https://secret@host:1"],
    ],
    ids=repr,
)
def test_endpoint_that_is_none_is_refused(endpoints):
    with pytest.raises(ConfigError) as refused:
        EtcdMetadata(endpoints, clock=SystemClock())
    assert "secret" not in str(refused.value)


def test_user_without_password_is_refused():
    with pytest.raises(ConfigError):
        EtcdMetadata(["host:1"], clock=SystemClock(), username="someone")


def test_missing_client_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "aetcd.rpc", None)
    with pytest.raises(ConfigError) as missing:
        EtcdMetadata(["host:1"], clock=SystemClock())
    assert missing.value.hint == "pip install 'ister[etcd]'"


# -- refusals -----------------------------------------------------------------------------------


def test_request_too_large_is_capacity(open_store, monkeypatch):
    """What our own check would refuse is sent, and refused by etcd."""
    monkeypatch.setattr(etcd, "check_put", lambda key, value: key.encode())
    store = open_store()
    for size in (1_600_000, 3_000_000):
        with pytest.raises(CapacityError):
            store.put("/large", b"x" * size)
    assert store.get("/large") is None


def _fill(store):
    for number in range(100):
        store.put(f"/fill/{number}", b"x" * 200_000)


def test_full_quota_is_capacity_and_reads_still_work():
    with EtcdServer(quota_bytes=4 * 1024 * 1024) as server:
        store = EtcdMetadata([server.endpoint], clock=SystemClock())
        try:
            store.put("/small", b"1")
            usage = store.usage("/small")
            assert 0 < usage.used_bytes <= usage.size_bytes < usage.quota_bytes
            assert usage.quota_bytes in (4 * 1024 * 1024, 2 * 1024**3), "told since etcd 3.6"
            assert (usage.alarms, usage.advice, usage.is_compacted) == ((), None, True)
            with pytest.raises(CapacityError) as full:
                _fill(store)
            assert "quota" in full.value.hint
            assert store.get("/small").value == b"1"
            with pytest.raises(CapacityError):
                store.transact([], [Put("/more", b"")])
            usage = store.usage("/small")
            assert "NOSPACE" in " ".join(usage.alarms)
            assert "--auto-compaction" in usage.advice
        finally:
            store.close()


def test_etcd_that_keeps_all_versions_is_told(open_store, monkeypatch):
    """Goal: an etcd without compaction is found long before it is full."""
    store = open_store()
    monkeypatch.setattr(etcd_usage, "_CHANGES_KEPT_MAX", 20)
    for _ in range(30):
        last = store.put("/versions", b"")
    usage = store.usage("/versions")
    assert not usage.is_compacted
    assert "--auto-compaction" in usage.advice
    request = store._rpc.CompactionRequest(revision=last, physical=True)
    store._read("compact", lambda endpoint: endpoint.kv.Compact, request)
    usage = store.usage("/versions")
    assert (usage.is_compacted, usage.advice) == (True, None)


def test_answer_over_our_limit_is_asked_for_in_smaller_pages(open_store, monkeypatch):
    options = dict(etcd_endpoint._CHANNEL_OPTIONS)
    options["grpc.max_receive_message_length"] = 300_000
    monkeypatch.setattr(etcd_endpoint, "_CHANNEL_OPTIONS", tuple(options.items()))
    store = open_store()
    for number in range(20):
        store.put(f"/pages/{number:02d}", b"x" * 100_000)
    assert [pair.key for pair in store.range("/pages/")] == [f"/pages/{n:02d}" for n in range(20)]
    assert len(store.range("/pages/", limit=7)) == 7


def test_credentials_are_used_renewed_and_refused(open_store):
    with EtcdServer() as server:
        _run_etcdctl(server, "user", "add", "root:secret")
        _run_etcdctl(server, "user", "grant-role", "root", "root")
        early = open_store(server.endpoint, username="root", password="secret")
        assert early.put("/a", b"0")  # with authentication still off
        _run_etcdctl(server, "auth", "enable")
        store = open_store(server.endpoint, username="root", password="secret")
        assert store.put("/a", b"1")
        lease = store.grant_lease(5)
        lease.renew()
        store._endpoints[0]._token = "one that is not known any more"
        assert store.put("/a", b"2")
        assert store.get("/a").value == b"2"
        for options in ({}, {"username": "root", "password": "wrong"}):
            stranger = open_store(server.endpoint, **options)
            for use in (lambda s=stranger: s.get("/a"), lambda s=stranger: s.put("/a", b"3")):
                with pytest.raises(PermissionDeniedError) as denied:
                    use()
                assert "wrong" not in str(denied.value)


def _run_etcdctl(server, *arguments):
    subprocess.run(
        [Path(etcd_binary()).with_name("etcdctl"), "--endpoints", _direct(server), *arguments],
        check=True,
        capture_output=True,
        env={"ETCDCTL_API": "3", "PATH": os.environ["PATH"]},
    )


# -- leases -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ttl", "margin"), [(2, 1), (5, 1), (60, 6)])
def test_lease_ends_here_before_it_ends_there(open_store, ttl, margin):
    clock = ManualClock()
    lease = open_store(clock=clock).grant_lease(ttl)
    assert lease.ttl_seconds == ttl
    assert lease.valid_until == ttl - margin
    clock.suspend(3)
    lease.renew()
    assert lease.valid_until == 3 + ttl - margin
    lease.revoke()
    assert lease.valid_until <= 3 + ttl - margin
    with pytest.raises(NotFoundError):
        lease.renew()


def test_renewal_without_an_answer_leaves_the_time_as_it_was(open_store, server):
    store = open_store(call_timeout_seconds=0.2)
    lease = store.grant_lease(5)
    until = lease.valid_until
    server.cable.swallow()
    with pytest.raises(UnavailableError):
        lease.renew()
    assert lease.valid_until == until
    server.cable.heal()
    lease.renew()
    assert lease.valid_until > until


# -- watches ------------------------------------------------------------------------------------


def test_watch_goes_on_after_its_connection_broke(open_store, server):
    """What changed while it was down is told too."""
    store, other = open_store(), open_store(_direct(server))
    heard = []
    watch = store.watch("/w/", heard.append)
    other.put("/w/1", b"")
    eventually(lambda: "/w/1" in heard)
    server.cable.cut()
    other.put("/w/2", b"")
    server.cable.heal()
    other.put("/w/3", b"")
    eventually(lambda: {"/w/2", "/w/3"} <= set(heard))
    watch.close()


def test_callback_that_uses_the_store_is_told_so(open_store):
    store = open_store()
    errors = []

    def misuse(key):
        try:
            store.get(key)
        except InvariantError as error:
            errors.append(error)

    store.watch("/misuse", misuse)
    store.put("/misuse", b"")
    eventually(lambda: errors)


# -- threads ------------------------------------------------------------------------------------


def test_nothing_connects_before_the_first_call(monkeypatch):
    store = EtcdMetadata([f"127.0.0.1:{free_port()}"], clock=SystemClock())
    store.close()
    assert not any(t.name == "ister-metadata-etcd" for t in threading.enumerate())
