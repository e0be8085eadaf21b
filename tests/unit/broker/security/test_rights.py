"""Names and JSON of permissions, roles and bindings."""

import json

import pytest

from ister.broker.security.principal import PrincipalKind
from ister.broker.security.rights import (
    Binding,
    Permission,
    Role,
    Scope,
    parse_permission,
)
from ister.errors import CorruptDataError, InvalidRequestError
from tests.support.cases import each


def binding(**more):
    settings = {
        "id": "b1",
        "principal_kind": PrincipalKind.USER,
        "principal_name": "alice",
        "roles": ("producer",),
        "scope": Scope.TOPIC,
        "resource": "/default/orders",
    }
    return Binding(**{**settings, **more})


@each("permission", Permission)
def test_permission_is_known_by_both_spellings(permission):
    assert parse_permission(permission.value) is permission
    assert parse_permission(permission.danube_name) is permission
    assert parse_permission(permission.value.replace("_", "-").upper()) is permission


@each("text", ["Replicate", "", "*", "all", "Manage", "lookup ", None, 3])
def test_other_words_are_no_permission(text):
    with pytest.raises(InvalidRequestError):
        parse_permission(text)


def test_role_is_stored_as_danube_stores_it():
    role = Role(name="ops", permissions=frozenset({Permission.LOOKUP, Permission.MANAGE_TOPIC}))
    content = json.loads(role.to_json())
    assert content == {"name": "ops", "permissions": ["Lookup", "ManageTopic"], "system": False}
    assert Role.from_json(role.to_json()) == role
    sneaky = json.dumps({**content, "system": True}).encode()
    assert not Role.from_json(sneaky).is_system


@each(
    "more",
    [
        {},
        {"principal_kind": PrincipalKind.SERVICE},
        {"scope": Scope.CLUSTER, "resource": ""},
        {"scope": Scope.NAMESPACE, "resource": "default"},
    ],
)
def test_binding_survives_the_way_there_and_back(more):
    given = binding(**more)
    assert Binding.from_json(given.to_json()) == given


@each(
    "more",
    [
        {"id": ""},
        {"id": "a/b"},
        {"id": "x" * 121},
        {"id": "a\n"},
        {"principal_name": ""},
        {"principal_name": "a\nb"},
        {"principal_name": " a"},
        {"principal_kind": PrincipalKind.ANONYMOUS},
        {"roles": ()},
        {"roles": ("a/b",)},
        {"roles": tuple(f"r{n}" for n in range(65))},
        {"resource": "orders"},
        {"resource": "/default/../x"},
        {"resource": "/default/*"},
        {"scope": Scope.NAMESPACE, "resource": "/default"},
        {"scope": Scope.NAMESPACE, "resource": ""},
        {"scope": Scope.NAMESPACE, "resource": "a/b"},
        {"scope": Scope.CLUSTER, "resource": "default"},
    ],
)
def test_binding_that_makes_no_sense_is_refused(more):
    with pytest.raises(InvalidRequestError):
        binding(**more)


@each(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"name": 3, "permissions": []}',
        b'{"name": "a", "permissions": "Lookup"}',
        b'{"name": "a", "permissions": ["Replicate"]}',
        b"[" * 5000,
    ],
)
def test_damaged_record_is_corrupt(data):
    with pytest.raises(CorruptDataError):
        Role.from_json(data)
    with pytest.raises(CorruptDataError):
        Binding.from_json(data)


def test_fields_that_other_writers_leave_null_are_read():
    stored = b'{"name": "a", "permissions": ["Lookup"], "system": null}'
    assert Role.from_json(stored).name == "a"
    content = json.loads(binding(scope=Scope.CLUSTER, resource="").to_json())
    stored = json.dumps({**content, "resource_name": None}).encode()
    assert Binding.from_json(stored).resource == ""
