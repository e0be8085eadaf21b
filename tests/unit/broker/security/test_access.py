"""Rights: the matrix of roles, scopes and topics; changes, races, lost answers, staleness."""

import itertools
import json
import random
import threading
import time

import pytest

from ister.base.clock import SystemClock
from ister.broker.security.access import STALE_SECONDS_MAX, AccessControl
from ister.broker.security.principal import ANONYMOUS, Principal, PrincipalKind
from ister.broker.security.rights import SYSTEM_ROLES, Binding, Permission, Role, Scope
from ister.config import AuthConfig
from ister.errors import (
    AlreadyExistsError,
    CommitUnknownError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata
from tests.support.waiting import eventually

USER, SERVICE = PrincipalKind.USER, PrincipalKind.SERVICE


def who(name="alice", kind=USER):
    return Principal(name=name, kind=kind)


def bind(id="b1", role="producer", scope=Scope.TOPIC, resource="/default/orders", **more):
    settings = {"principal_kind": USER, "principal_name": "alice", "roles": (role,)}
    return Binding(id=id, scope=scope, resource=resource, **{**settings, **more})


def open_access(store, *, clock=None, admins=()):
    return AccessControl(
        store,
        root_prefix="/danube",
        config=AuthConfig(super_admins=tuple(admins)),
        clock=clock or SystemClock(),
    )


@pytest.fixture
def store():
    store = MemoryMetadata()
    yield store
    store.close()


@pytest.fixture
def access(store):
    access = open_access(store)
    access.start()
    yield access
    access.close()


# -- judging --------------------------------------------------------------------------------

_PLACES = {
    "cluster": {},
    "default": {"namespace": "default"},
    "other": {"namespace": "other"},
    "/default/orders": {"topic": "/default/orders"},
    "/default/orders-part-3": {"topic": "/default/orders-part-3"},
    "/default/orders2": {"topic": "/default/orders2"},
    "/other/orders": {"topic": "/other/orders"},
    "not a name": {"topic": "default/orders"},
    "/default/none": {"topic": "/default/none"},
}
_REACH = {
    (Scope.CLUSTER, ""): set(_PLACES),
    (Scope.NAMESPACE, "default"): {
        "default",
        "/default/orders",
        "/default/orders-part-3",
        "/default/orders2",
        "/default/none",
    },
    (Scope.TOPIC, "/default/orders"): {"/default/orders", "/default/orders-part-3"},
}


@each(("scope", "resource"), _REACH)
@each("role", [*SYSTEM_ROLES, *Permission])
def test_matrix_of_roles_scopes_and_places(role, scope, resource):
    """Every role, in every scope, against every permission on every place: all or nothing.

    The oracle is the table above; the only right that follows from others is to look a topic up.
    """
    access = open_access(MemoryMetadata())
    if role in SYSTEM_ROLES:
        held = SYSTEM_ROLES[role].permissions
    else:
        held = frozenset({Permission(role)})
        access.create_role(Role(name=role, permissions=held))
    access.create_binding(bind(role=role, scope=scope, resource=resource))
    using = {Permission.PRODUCE, Permission.CONSUME, Permission.MANAGE_TOPIC}
    for (name, place), permission in itertools.product(_PLACES.items(), Permission):
        is_held = permission in held or (permission is Permission.LOOKUP and held & using)
        wanted = bool(is_held) and name in _REACH[scope, resource]
        assert access.allows(who(), permission, **place) == wanted, (name, permission)
        for stranger in (who("bob"), who("alice", SERVICE), who("ALICE"), ANONYMOUS):
            assert not access.allows(stranger, permission, **place)


def test_admins_of_the_settings(store):
    access = open_access(store, admins=["root", "service:robot", "https://issuer|x"])
    names = [("root", USER), ("root", SERVICE), ("robot", SERVICE), ("https://issuer|x", USER)]
    for name, kind in names:
        assert access.allows(who(name, kind), Permission.MANAGE_CLUSTER)
        assert access.allows(who(name, kind), Permission.CONSUME, topic="/any/thing")
    for name, kind in [("robot", USER), ("service:robot", USER), ("alice", USER)]:
        assert not access.is_admin(who(name, kind))
    nobody = Principal(name="root", kind=PrincipalKind.ANONYMOUS)
    assert not access.is_admin(nobody)


def test_right_on_anything_at_all(access):
    access.create_binding(bind())
    assert access.allows_anywhere(who(), Permission.PRODUCE)
    assert access.allows_anywhere(who(), Permission.LOOKUP)
    assert not access.allows_anywhere(who(), Permission.CONSUME)
    assert not access.allows_anywhere(who("bob"), Permission.LOOKUP)


def test_rights_add_up(access):
    access.create_binding(bind("b1", "producer"))
    access.create_binding(bind("b2", "consumer"))
    for permission in (Permission.PRODUCE, Permission.CONSUME):
        assert access.allows(who(), permission, topic="/default/orders")
    access.delete_binding(Scope.TOPIC, "/default/orders", "b1")
    assert not access.allows(who(), Permission.PRODUCE, topic="/default/orders")
    assert access.allows(who(), Permission.CONSUME, topic="/default/orders")


# -- roles and bindings ---------------------------------------------------------------------


def test_role_is_made_once_and_removed(access):
    role = Role(name="ops", permissions=frozenset({Permission.MANAGE_TOPIC}))
    assert access.create_role(role)
    assert not access.create_role(role), "the same again is fine"
    other = Role(name="ops", permissions=frozenset(Permission))
    with pytest.raises(AlreadyExistsError):
        access.create_role(other)
    assert access.role("ops") == role
    assert [item.name for item in access.roles()] == ["admin", "consumer", "ops", "producer"]
    access.delete_role("ops")
    for call in (access.role, access.delete_role):
        with pytest.raises(NotFoundError):
            call("ops")


def test_role_of_the_system_stays(access, store):
    with pytest.raises(AlreadyExistsError):
        access.create_role(Role(name="producer", permissions=frozenset(Permission)))
    with pytest.raises(InvalidRequestError):
        access.delete_role("producer")
    sneaky = {"name": "producer", "permissions": ["ManageCluster"], "system": True}
    store.put("/danube/auth/roles/producer", json.dumps(sneaky).encode())
    assert access.role("producer") == SYSTEM_ROLES["producer"]


def test_role_in_use_stays(access):
    access.create_role(Role(name="ops", permissions=frozenset({Permission.MANAGE_TOPIC})))
    access.create_binding(bind(role="ops"))
    with pytest.raises(ConflictError, match="b1"):
        access.delete_role("ops")
    access.delete_binding(Scope.TOPIC, "/default/orders", "b1")
    access.delete_role("ops")


def test_binding_needs_its_roles(access):
    with pytest.raises(NotFoundError, match="ops"):
        access.create_binding(bind(role="ops"))


def test_bindings_are_told_apart_by_scope_and_resource(access):
    places = [
        (Scope.CLUSTER, ""),
        (Scope.NAMESPACE, "default"),
        (Scope.TOPIC, "/default/orders"),
        (Scope.TOPIC, "/default/orders2"),
    ]
    for scope, resource in places:
        assert access.create_binding(bind("same", scope=scope, resource=resource))
    assert not access.create_binding(bind("same"))
    with pytest.raises(AlreadyExistsError):
        access.create_binding(bind("same", role="consumer"))
    for scope, resource in places:
        (found,) = access.bindings(scope, resource)
        assert (found.scope, found.resource) == (scope, resource)
        assert access.binding(scope, resource, "same") == found
    assert len(access.bindings()) == len(places)
    access.delete_binding(Scope.CLUSTER, "", "same")
    with pytest.raises(NotFoundError):
        access.delete_binding(Scope.CLUSTER, "", "same")
    for name in ("orders/same", "../cluster/same", "none"):
        with pytest.raises(NotFoundError):
            access.binding(Scope.TOPIC, "/default/orders", name)
    assert len(access.bindings()) == len(places) - 1


def test_record_whose_key_says_something_else_gives_nothing(access, store, caplog):
    """Whoever may write one key of the store by hand must not thereby rule another one."""
    value = bind(scope=Scope.CLUSTER, resource="").to_json()
    store.put("/danube/auth/bindings/topic/default/orders/b1", value)
    store.put("/danube/auth/bindings/cluster/b2", b"nonsense")
    assert access.bindings() == []
    assert not access.allows(who(), Permission.PRODUCE, topic="/default/orders")
    assert any("unreadable" in record.getMessage() for record in caplog.records)


# -- several brokers ------------------------------------------------------------------------


def test_change_elsewhere_is_seen(store, access):
    other = open_access(store)
    other.create_binding(bind())
    eventually(lambda: access.allows(who(), Permission.PRODUCE, topic="/default/orders"))
    other.delete_binding(Scope.TOPIC, "/default/orders", "b1")
    eventually(lambda: not access.allows(who(), Permission.PRODUCE, topic="/default/orders"))


def test_many_change_at_once(store):
    """Eight threads with objects of their own: every change lands, none undoes another."""
    errors = []

    def work(number):
        access = open_access(store)
        rng = random.Random(number)
        for n in range(6):
            while True:
                try:
                    access.create_binding(bind(f"b{number}-{n}", principal_name=f"p{number}"))
                    break
                except ConflictError:
                    time.sleep(rng.random() / 100)
                except Exception as error:
                    errors.append(error)
                    return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    access = open_access(store)
    assert len(access.bindings()) == 48


def test_role_is_not_removed_under_a_binding_being_made(store):
    """Between the look and the change somebody else uses the role: the change is judged anew."""
    access, other = open_access(store), open_access(store)
    access.create_role(Role(name="ops", permissions=frozenset({Permission.MANAGE_TOPIC})))
    calls = []

    def before(kind, key):
        if kind == "transact" and not calls:
            calls.append(key)
            other.create_binding(bind(role="ops"))

    store.before = before
    with pytest.raises(ConflictError, match="given by"):
        access.delete_role("ops")
    assert access.role("ops")


@pytest.mark.parametrize("has_landed", [True, False])
def test_lost_answer(store, has_landed):
    access = open_access(store)
    role = Role(name="ops", permissions=frozenset({Permission.MANAGE_TOPIC}))

    def lose_next(is_after):
        def fail(kind, _key):
            if kind == "transact":
                store.before = store.after = lambda *_: None
                raise CommitUnknownError("the answer was lost")

        setattr(store, "after" if is_after else "before", fail)

    lose_next(has_landed)
    assert access.create_role(role)
    lose_next(has_landed)
    access.create_binding(bind(role="ops"))
    lose_next(has_landed)
    access.delete_binding(Scope.TOPIC, "/default/orders", "b1")
    lose_next(has_landed)
    access.delete_role("ops")
    assert access.bindings() == []
    assert len(access.roles()) == 3


def test_broker_that_cannot_read_rights_grants_nothing(store, caplog):
    """First it goes by what it knows, then it is too old; it heals when the store is back."""
    clock = ManualClock()
    access = open_access(store, clock=clock, admins=["root"])
    with pytest.raises(UnavailableError):
        access.allows(who(), Permission.PRODUCE, topic="/default/orders")
    access.create_binding(bind())
    clock.advance(STALE_SECONDS_MAX)
    assert access.allows(who(), Permission.PRODUCE, topic="/default/orders")
    clock.advance(0.1)
    with pytest.raises(UnavailableError):
        access.allows(who(), Permission.PRODUCE, topic="/default/orders")
    with pytest.raises(UnavailableError):
        access.allows_anywhere(who(), Permission.PRODUCE)
    assert access.allows(who("root"), Permission.PRODUCE, topic="/default/orders")
    access.roles()
    assert access.allows(who(), Permission.PRODUCE, topic="/default/orders")
