"""`ister auth`: API keys, tokens and roles.

    ister auth key NAME                       a new API key, and its line for the broker
    ister auth token NAME --key-file FILE …   a JWT that a broker with the matching key takes
    ister auth grant NAME ROLE …              gives a role, on a running broker
    ister auth revoke NAME ROLE …             takes it back
    ister auth list                           roles, and who has them
    ister auth show NAME                      what a principal may do, and why

What keys and tokens are is `ister.broker.security`'s.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Final

from ister.base.extras import missing_extra
from ister.base.model import JsonObject, TopicName
from ister.base.partitions import base_of_partition
from ister.cli.command import Arg, Facts, Group, Shown, Table, command
from ister.cli.connection import Broker
from ister.cli.location import topic_name
from ister.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from ister.client.descriptions import BindingDescription

_SEEING: Final = frozenset({"produce", "consume", "manage_topic"})
"""Permissions that include `lookup`."""

AUTH = Group(
    "auth",
    "create API keys and tokens; list, grant and revoke roles",
    description="Authentication and authorization. Keys and tokens are created locally; roles are "
    "listed, granted and revoked on a running broker.",
    examples=(
        "ister auth key shop --file keys.txt",
        "ister auth grant service:shop producer --topic /default/orders",
        "ister auth show service:shop",
    ),
)
register = AUTH.register


class RoleBroker(Broker):
    """The broker whose roles are changed."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options, with a name that one had once."""
        super().add_arguments(parser)
        parser.add_argument("--tls-ca", dest="ca_file", metavar="FILE", help=argparse.SUPPRESS)


Principal = Annotated[str, Arg("user name, or service:NAME for an API key or a program", "NAME")]
Role = Annotated[str, Arg("admin, producer, consumer or a role of your own", "ROLE")]
OnTopic = Annotated[str | None, Arg("only on this topic", "TOPIC", topic_name, one_of="where")]
InNamespace = Annotated[str | None, Arg("only in this namespace", "NAME", one_of="where")]


def _principal(text: str) -> str:
    return text if ":" in text else f"user:{text}"


# -- keys and tokens ------------------------------------------------------------------------


@command(AUTH, "key")
def make_key(
    name: Annotated[str, Arg("principal name", "NAME")],
    *,
    file: Annotated[
        str | None, Arg("append the key's line to this file (broker.auth.api_keys_file)", "FILE")
    ] = None,
) -> Shown:
    """Create an API key.

    Creates an API key. The key is shown only once; the broker's file stores its SHA-256.

    Examples:
        ister auth key shop --file keys.txt
        ister auth key shop --json
    """
    key, line = _minting().make_api_key(name)
    if file:
        try:
            with open(file, "a", encoding="utf-8", opener=_open_private) as keys:
                keys.write(f"{line}\n")
        except OSError as error:
            raise ConfigError(f"cannot write the file: {error.strerror}", path=file) from error
    text = "The key is shown only once; add the line to the broker's key file."
    return Shown(
        {"name": name, "key": key, "line": line}, [Facts({"key": key, "line": line}), text]
    )


def _open_private(path: str, flags: int) -> int:
    """Opens a file that nobody else may read if it is new, whatever the umask is."""
    return os.open(path, flags, 0o600)


@command(AUTH, "token")
def make_token(
    name: Annotated[str, Arg("principal name: the claim `sub`", "NAME")],
    *,
    key_file: Annotated[str, Arg("secret or private key (PEM)", "FILE")],
    algorithm: Annotated[
        str, Arg("must equal broker.auth.jwt.algorithm (default: %(default)s)", "NAME")
    ] = "HS256",
    issuer: Annotated[str, Arg("must equal broker.auth.jwt.issuer", "NAME")],
    audience: Annotated[
        str | None, Arg("must equal broker.auth.jwt.audience (default: none)", "NAME")
    ] = None,
    seconds: Annotated[int, Arg("lifetime of the token (default: %(default)s)", "N")] = 3600,
) -> Shown:
    r"""Create a signed token (JWT).

    Creates and signs a token with the secret or private key whose counterpart the broker has. For
    tests, and where no identity provider issues tokens.

    Examples:
        ister auth token alice --key-file secret.txt --issuer shop --audience ister
        ister auth token alice --key-file key.pem --algorithm RS256 --issuer shop \
        --audience ister --seconds 600 --json
    """
    try:
        with open(key_file, encoding="utf-8") as file:
            key = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot read the key file", path=key_file) from error
    token = _minting().make_token(
        name,
        algorithm=algorithm,
        # A secret may end with the newline that its editor put there.
        key=key.strip() if algorithm.startswith("HS") else key,
        issuer=issuer,
        audience=audience,
        lifetime_seconds=seconds,
    )
    return Shown({"name": name, "token": token}, token)


# -- roles and principals -------------------------------------------------------------------


@command(AUTH, "grant", failed={"ok": False}, echo=["name"])
def grant(
    broker: RoleBroker,
    name: Principal,
    role: Role,
    *,
    topic: OnTopic = None,
    namespace: InNamespace = None,
) -> Shown:
    """Grant a role to a principal.

    Grants a role to a principal, on a running broker: for the whole cluster, a namespace or a
    topic.

    Examples:
        ister auth grant alice consumer --topic /default/orders
        ister auth grant service:shop producer --namespace default
    """
    with broker.connect() as client:
        client.admin.grant_role(name, role, topic=topic, namespace=namespace)
    return _changed(broker, "granted", name, role, topic=topic, namespace=namespace)


@command(AUTH, "revoke", failed={"ok": False}, echo=["name"])
def revoke(
    broker: RoleBroker,
    name: Principal,
    role: Role,
    *,
    topic: OnTopic = None,
    namespace: InNamespace = None,
) -> Shown:
    """Revoke a role of a principal.

    Revokes a role of a principal, on a running broker: for the whole cluster, a namespace or a
    topic.

    Examples:
        ister auth revoke alice consumer --topic /default/orders
        ister auth revoke service:shop producer --namespace default
    """
    with broker.connect() as client:
        client.admin.revoke_role(name, role, topic=topic, namespace=namespace)
    return _changed(broker, "revoked", name, role, topic=topic, namespace=namespace)


def _changed(
    broker: Broker, done: str, name: str, role: str, *, topic: str | None, namespace: str | None
) -> Shown:
    scope = "topic" if topic else "namespace" if namespace is not None else "cluster"
    resource = topic or namespace or ""
    text = f"{done}: {role} in {f'{scope} {resource}'.strip()}, {name}"
    return broker.changed(text, done=done, name=name, role=role, scope=scope, resource=resource)


@command(AUTH, "list", "ls", failed={"bindings": [], "roles": []})
def list_roles(broker: Broker) -> Shown:
    """List principals with their roles, and all roles.

    Lists the principals that have roles, and where; and all roles with their permissions.
    Principals of broker.auth.super_admins have all permissions and are not listed. Needs the
    permission manage_cluster.

    Examples:
        ister auth list
        ister auth list --json
    """
    with broker.connect() as client:
        roles, bindings = client.admin.roles(), client.admin.bindings()
    rows = [
        (one.principal, ", ".join(one.roles), one.scope, one.resource or None) for one in bindings
    ]
    empty = "no principal has a role; grant one with `ister auth grant`"
    permissions = [(one.name, ", ".join(one.permissions)) for one in roles]
    return Shown(
        {"bindings": [asdict(one) for one in bindings], "roles": [asdict(one) for one in roles]},
        [
            Table(("principal", "roles", "scope", "resource"), rows, empty=empty),
            "",
            Table(("role", "permissions"), permissions),
        ],
    )


@command(AUTH, "show", failed={"ok": False}, echo={"principal": "name"})
def show_principal(
    broker: Broker,
    name: Annotated[str, Arg("user name, or service:NAME", "NAME", _principal)],
    *,
    topic: Annotated[str | None, Arg("permissions on this topic", "TOPIC", topic_name)] = None,
) -> Shown:
    """Show the roles and permissions of a principal.

    Shows the roles of a principal and the permissions that they give: in the cluster, in each
    namespace, on each topic; with --topic, all that apply to one topic. Needs the permission
    manage_cluster.

    Examples:
        ister auth show alice
        ister auth show service:shop --topic /default/orders
    """
    with broker.connect() as client:
        roles = {role.name: role.permissions for role in client.admin.roles()}
        bindings = client.admin.bindings()
    mine = [one for one in bindings if one.principal == name]
    if not mine:
        known = sorted({one.principal for one in bindings})
        near = difflib.get_close_matches(name, known) or known[:10]
        raise NotFoundError(
            f"{name} has no roles",
            hint=f"principals with roles: {', '.join(near)}" if near else None,
        )
    if topic is not None:
        mine = [one for one in mine if _applies(one, topic)]
    rights = _permissions(mine, roles)
    json: JsonObject = {"principal": name, "bindings": [asdict(one) for one in mine]}
    if topic is not None:
        everywhere = sorted({one for held in rights.values() for one in held})
        facts = Facts({"permissions": ", ".join(everywhere) or "none"}, f"{name} on {topic}")
        return Shown({**json, "topic": topic, "permissions": everywhere}, facts)
    json["permissions"] = [
        {"scope": scope, "resource": resource, "permissions": held}
        for (scope, resource), held in rights.items()
    ]
    granted: dict[tuple[str, str], list[str]] = {}
    for one in mine:
        granted.setdefault((one.scope, one.resource), []).extend(one.roles)
    rows = [
        (scope, resource or None, ", ".join(granted[scope, resource]), ", ".join(held))
        for (scope, resource), held in rights.items()
    ]
    return Shown(json, Table(("scope", "resource", "roles", "permissions"), rows, name))


def _applies(binding: BindingDescription, topic: str) -> bool:
    """Whether a binding is about a topic: its own, its namespace's, or the cluster's."""
    if binding.scope == "cluster":
        return True
    if binding.scope == "namespace":
        return binding.resource == TopicName.parse(topic).namespace
    # A binding of a partitioned topic applies to its partitions.
    return binding.resource in (topic, base_of_partition(topic))


def _permissions(
    bindings: Sequence[BindingDescription], roles: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], list[str]]:
    """The permissions in each scope. Whoever may use or manage something may look it up."""
    found: dict[tuple[str, str], set[str]] = {}
    for binding in bindings:
        held = found.setdefault((binding.scope, binding.resource), set())
        for role in binding.roles:
            held.update(roles.get(role, ()))
    return {
        where: sorted({*held, "lookup"} if held & _SEEING else held)
        for where, held in found.items()
    }


def _minting() -> ModuleType:
    try:
        from ister.broker.security import minting  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing_extra("ister auth", "broker", error) from error
    return minting
