"""The guard: who calls, whether they may, for how long, and what is noted of it."""

import asyncio
import tracemalloc

import pytest

from ister.broker.security import guard as guard_module
from ister.broker.security.guard import Guard, current_caller, current_principal, entered
from ister.broker.security.principal import ANONYMOUS
from ister.broker.security.rights import Permission
from ister.config import load_config
from ister.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata
from tests.support.security import GuardRig

ORDERS = "/default/orders"


def test_caller_is_the_current_one_inside_of_its_call(rig):
    assert current_caller() is None
    assert current_principal() is ANONYMOUS
    caller = rig.guard.enter(rig.bearer("alice"))
    with entered(caller):
        assert current_principal().name == "alice"
    assert current_principal() is ANONYMOUS


def test_visible_topics_are_those_with_a_right(rig):
    rig.allow("alice", "producer", topic=ORDERS)
    rig.allow("alice", "consumer", namespace="logs")
    alice = rig.guard.principal_of(rig.bearer("alice"))
    names = [ORDERS, "/default/orders2", "/logs/a", "/logs/b", "/secret/plans"]
    assert rig.guard.visible(alice, names) == [ORDERS, "/logs/a", "/logs/b"]


# -- remembering ----------------------------------------------------------------------------


def test_good_credentials_are_remembered_for_seconds(rig, monkeypatch):
    calls = []
    authenticate = rig.guard._authenticator.authenticate
    monkeypatch.setattr(
        rig.guard._authenticator,
        "authenticate",
        lambda *args, **more: calls.append(1) or authenticate(*args, **more),
    )
    headers = rig.bearer("alice")
    for _ in range(10):
        rig.guard.principal_of(headers)
    assert len(calls) == 1
    rig.clock.advance(5)
    rig.guard.principal_of(headers)
    assert len(calls) == 2
    for _ in range(3):
        with pytest.raises(UnauthenticatedError):
            rig.guard.principal_of({"authorization": "Bearer wrong"})
    assert len(calls) == 5, "bad ones are not"


def test_remembered_credentials_still_end(rig):
    headers, key = rig.bearer("alice", lifetime_seconds=2), {"x-api-key": rig.api_key("loader")}
    rig.guard.principal_of(headers)
    assert rig.guard.principal_of(key).name == "loader"
    rig.clock.advance(2)
    with pytest.raises(UnauthenticatedError, match="expired"):
        rig.guard.principal_of(headers)
    rig.withdraw_keys()
    with pytest.raises(UnauthenticatedError):
        rig.guard.principal_of(key)


def test_what_is_remembered_is_bounded_and_no_token(rig, monkeypatch):
    """What is remembered are digests."""
    monkeypatch.setattr(guard_module, "_REMEMBERED_MAX", 10)
    for n in range(50):
        headers = rig.bearer(f"user-{n}")
        rig.guard.principal_of(headers)
    assert len(rig.guard._remembered) == 10
    assert headers["authorization"][7:] not in repr(vars(rig.guard))


# -- calls that go on -----------------------------------------------------------------------


def test_stream_ends_with_the_right_it_uses(rig):
    """Another right that goes does not matter; the one that was asked for does."""
    consuming = rig.allow("alice", "consumer", topic=ORDERS)
    producing = rig.allow("alice", "producer", topic=ORDERS)
    caller = rig.guard.enter(rig.bearer("alice"), is_stream=True)
    with entered(caller):
        rig.guard.check(caller.principal, Permission.CONSUME, topic=ORDERS)
    rig.revoke(producing)
    rig.clock.advance(1)
    caller.verify()
    rig.revoke(consuming)
    caller.verify()  # once a second is often enough
    rig.clock.advance(1)
    with pytest.raises(PermissionDeniedError):
        caller.verify()
    assert rig.audited()[-1]["outcome"] == "ended"


def test_short_call_remembers_nothing(rig):
    rig.allow("alice", "consumer", topic=ORDERS)
    caller = rig.guard.enter(rig.bearer("alice"))
    with entered(caller):
        rig.guard.check(caller.principal, Permission.CONSUME, topic=ORDERS)
    assert not caller._checked


async def test_refused_stream_takes_its_time(rig, monkeypatch):
    """Danube's client opens a refused stream again without a pause."""
    monkeypatch.setattr(guard_module, "REFUSAL_SECONDS", 0.2)
    monkeypatch.setattr(guard_module, "_REFUSALS_WAITING_MAX", 3)
    alice = rig.guard.principal_of(rig.bearer("alice"))
    now = asyncio.get_running_loop().time

    async def refused():
        started = now()
        with pytest.raises(PermissionDeniedError):
            await rig.guard.check_stream(alice, Permission.CONSUME, topic=ORDERS)
        return now() - started

    assert await refused() >= 0.19
    taken = await asyncio.gather(*(refused() for _ in range(6)))
    assert sum(seconds >= 0.19 for seconds in taken) == 3, "the others do not pile up"


# -- noting ---------------------------------------------------------------------------------


def test_refusals_and_changes_are_noted(rig):
    rig.allow("alice", "producer", topic=ORDERS)
    headers = rig.bearer("alice")
    with entered(rig.guard.enter(headers, peer="ipv4:1.2.3.4:5", action="Send")) as caller:
        rig.guard.check(caller.principal, Permission.PRODUCE, topic=ORDERS)
        with pytest.raises(PermissionDeniedError):
            rig.guard.check(caller.principal, Permission.MANAGE_TOPIC, topic=ORDERS)
    with entered(rig.guard.enter(rig.bearer("root"), action="DeleteTopic")) as caller:
        rig.guard.check(caller.principal, Permission.MANAGE_TOPIC, topic=ORDERS, detail="all")
    with pytest.raises(UnauthenticatedError):
        rig.guard.enter({}, peer="ipv4:1.2.3.4:6", action="Send")
    assert rig.guard.refused_logins == 1
    names = ("action", "outcome", "principal", "via", "resource", "peer", "reason", "detail")
    lines = [tuple(line.get(name) for name in names) for line in rig.audited()]
    peer, no_right = "ipv4:1.2.3.4:5", "no right to manage_topic"
    nobody = ("ipv4:1.2.3.4:6", "the call has no credentials", None)
    assert lines == [
        ("Send", "denied", "user:alice", "jwt", ORDERS, peer, no_right, None),
        ("DeleteTopic", "allowed", "user:root", "jwt", ORDERS, None, None, "all"),
        ("Send", "unauthenticated", None, None, None, *nobody),
    ]


def test_auth_off_lets_everybody_do_everything():
    store = MemoryMetadata()
    config = load_config(None, environment={})
    guard = Guard.open(config, store, clock=ManualClock())
    guard.start()
    caller = guard.enter({"authorization": "Bearer whatever"})
    with entered(caller):
        for permission in Permission:
            guard.check(caller.principal, permission, topic=ORDERS)
            guard.check_anywhere(caller.principal, permission)
        assert guard.visible(caller.principal, [ORDERS]) == [ORDERS]
        caller.verify(at_once=True)
    guard.close()
    guard.close()
    store.close()


def test_auth_off_with_an_audit_file_notes_changes(tmp_path):
    with GuardRig(tmp_path, mode="none") as rig:
        caller = rig.guard.enter({}, action="DeleteTopic")
        with entered(caller):
            rig.guard.check(caller.principal, Permission.PRODUCE, topic=ORDERS)
            rig.guard.check(caller.principal, Permission.MANAGE_TOPIC, topic=ORDERS)
        assert [line["action"] for line in rig.audited()] == ["DeleteTopic"]


def test_names_of_certificates_need_certificates():
    auth = {"mode": "token", "mtls_principal": True}

    def open_with(**tls):
        tree = {"storage": {"mode": "memory"}, "broker": {"auth": auth, "tls": tls}}
        Guard.open(load_config(tree, environment={}), MemoryMetadata(), clock=ManualClock())

    open_with(client_auth="required")
    with pytest.raises(ConfigError, match="mtls_principal"):
        open_with()


def test_megabytes_for_a_name_are_not_kept(rig):
    """A caller without rights sends names of a megabyte, each another one."""
    alice = rig.guard.principal_of(rig.bearer("alice"))
    tracemalloc.start()
    try:
        for n in range(100):
            with pytest.raises(PermissionDeniedError) as caught:
                rig.guard.check(alice, Permission.PRODUCE, topic=f"/default/{n}-{'x' * 1_000_000}")
            assert len(str(caught.value)) < 1000
            del caught
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 5_000_000
