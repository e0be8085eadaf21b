"""`ister auth`: API keys, tokens and roles.

    ister auth key NAME                       a new API key, and its line for the broker
    ister auth token NAME --key-file FILE …   a JWT that a broker with the matching key takes
    ister auth grant NAME ROLE …              gives a role, on a running broker
    ister auth revoke NAME ROLE …             takes it back
    ister auth list                           roles, and who has them
    ister auth show NAME                      what a principal may do, and why

Owns: arguments and output. What keys and tokens are is `ister.broker.security`'s; which broker is
changed is `ister.cli.connection`'s, as for every other command.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Final

from ister.base.extras import missing_extra
from ister.base.model import JsonObject, TopicName
from ister.base.partitions import base_of_partition
from ister.cli.connection import add_broker_arguments, connected, print_change
from ister.cli.errors_out import answer, print_json
from ister.cli.location import parse_topic
from ister.cli.output import Subparsers, add_command, print_facts, print_table
from ister.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from ister.client.rights import BindingDescription

_SEEING: Final = frozenset({"produce", "consume", "manage_topic"})
"""Permissions that include `lookup`."""


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "auth",
        help="create API keys and tokens; list, grant and revoke roles",
        description="Authentication and authorization. Keys and tokens are created locally; "
        "roles are listed, granted and revoked on a running broker.",
        examples=(
            "ister auth key shop --file keys.txt",
            "ister auth grant service:shop producer --topic /default/orders",
            "ister auth show service:shop",
        ),
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    key = add_command(
        actions,
        "key",
        help="create an API key",
        description="Creates an API key. The key is shown only once; the broker's file "
        "stores its SHA-256.",
        examples=("ister auth key shop --file keys.txt", "ister auth key shop --json"),
    )
    key.add_argument("name", metavar="NAME", help="principal name")
    key.add_argument(
        "--file",
        metavar="FILE",
        help="append the key's line to this file (broker.auth.api_keys_file)",
    )
    key.add_argument("--json", action="store_true", help="print one JSON object")
    key.set_defaults(run=_make_key)

    token = add_command(
        actions,
        "token",
        help="create a signed token (JWT)",
        description="Creates and signs a token with the secret or private key whose "
        "counterpart the broker has. For tests, and where no identity provider issues tokens.",
        examples=(
            "ister auth token alice --key-file secret.txt --issuer shop --audience ister",
            (
                "ister auth token alice --key-file key.pem --algorithm RS256 --issuer shop \\\n"
                "--audience ister --seconds 600 --json"
            ),
        ),
    )
    token.add_argument("name", metavar="NAME", help="principal name: the claim `sub`")
    token.add_argument(
        "--key-file", metavar="FILE", required=True, help="secret or private key (PEM)"
    )
    token.add_argument(
        "--algorithm",
        metavar="NAME",
        default="HS256",
        help="must equal broker.auth.jwt.algorithm (default: %(default)s)",
    )
    token.add_argument(
        "--issuer", metavar="NAME", required=True, help="must equal broker.auth.jwt.issuer"
    )
    token.add_argument(
        "--audience", metavar="NAME", help="must equal broker.auth.jwt.audience (default: none)"
    )
    token.add_argument(
        "--seconds",
        metavar="N",
        type=int,
        default=3600,
        help="lifetime of the token (default: %(default)s)",
    )
    token.add_argument("--json", action="store_true", help="print one JSON object")
    token.set_defaults(run=_make_token)

    _register_changes(actions)
    _register_views(actions)


def _register_changes(actions: Subparsers) -> None:
    for name, run, what in (
        ("grant", _grant, "grant a role to a principal"),
        ("revoke", _revoke, "revoke a role of a principal"),
    ):
        action = add_command(
            actions,
            name,
            help=what,
            description=f"{what[:1].upper()}{what[1:]}, on a running broker: for the whole "
            "cluster, a namespace or a topic.",
            examples=(
                f"ister auth {name} alice consumer --topic /default/orders",
                f"ister auth {name} service:shop producer --namespace default",
            ),
        )
        action.add_argument(
            "name", metavar="NAME", help="user name, or service:NAME for an API key or a program"
        )
        action.add_argument(
            "role", metavar="ROLE", help="admin, producer, consumer or a role of your own"
        )
        where = action.add_mutually_exclusive_group()
        where.add_argument("--topic", metavar="TOPIC", type=parse_topic, help="only on this topic")
        where.add_argument("--namespace", metavar="NAME", help="only in this namespace")
        action.add_argument("--json", action="store_true", help="print one JSON object")
        add_broker_arguments(action)
        action.add_argument("--tls-ca", dest="ca_file", metavar="FILE", help=argparse.SUPPRESS)
        action.set_defaults(run=run)


def _register_views(actions: Subparsers) -> None:
    listed = add_command(
        actions,
        "list",
        help="list principals with their roles, and all roles",
        description="Lists the principals that have roles, and where; and all roles with their "
        "permissions. Principals of broker.auth.super_admins have all permissions and are not "
        "listed. Needs the permission manage_cluster.",
        examples=("ister auth list", "ister auth list --json"),
    )
    listed.set_defaults(run=_run_list)

    shown = add_command(
        actions,
        "show",
        help="show the roles and permissions of a principal",
        description="Shows the roles of a principal and the permissions that they give: in the "
        "cluster, in each namespace, on each topic; with --topic, all that apply to one topic. "
        "Needs the permission manage_cluster.",
        examples=("ister auth show alice", "ister auth show service:shop --topic /default/orders"),
    )
    shown.add_argument("name", metavar="NAME", help="user name, or service:NAME")
    shown.add_argument(
        "--topic", metavar="TOPIC", type=parse_topic, help="permissions on this topic"
    )
    shown.set_defaults(run=_run_show)
    for action in (listed, shown):
        action.add_argument("--json", action="store_true", help="print one JSON object")
        add_broker_arguments(action)


def _open_private(path: str, flags: int) -> int:
    """Opens a file that nobody else may read if it is new, whatever the umask is."""
    return os.open(path, flags, 0o600)


def _make_key(options: argparse.Namespace) -> int:
    minting = _minting()
    key, line = minting.make_api_key(options.name)
    if options.file:
        try:
            with open(options.file, "a", encoding="utf-8", opener=_open_private) as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write the file: {error.strerror}", path=options.file
            ) from error
    if options.json:
        print(json.dumps({"name": options.name, "key": key, "line": line}))
    else:
        print_facts({"key": key, "line": line})
        print("The key is shown only once; add the line to the broker's key file.")
    return 0


def _make_token(options: argparse.Namespace) -> int:
    minting = _minting()
    try:
        with open(options.key_file, encoding="utf-8") as file:
            key = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot read the key file", path=options.key_file) from error
    token = minting.make_token(
        options.name,
        algorithm=options.algorithm,
        # A secret may end with the newline that its editor put there.
        key=key.strip() if options.algorithm.startswith("HS") else key,
        issuer=options.issuer,
        audience=options.audience,
        lifetime_seconds=options.seconds,
    )
    print(json.dumps({"name": options.name, "token": token}) if options.json else token)
    return 0


def _grant(options: argparse.Namespace) -> int:
    return _change(options, "granted")


def _revoke(options: argparse.Namespace) -> int:
    return _change(options, "revoked")


def _change(options: argparse.Namespace, done: str) -> int:
    topic = None if options.topic is None else str(options.topic)
    scope = "topic" if topic else "namespace" if options.namespace is not None else "cluster"
    resource = topic or options.namespace or ""

    def change() -> int:
        with connected(options) as client:
            call = client.grant_role if done == "granted" else client.revoke_role
            call(options.name, options.role, topic=topic, namespace=options.namespace)
        facts = {"done": done, "name": options.name, "role": options.role}
        where = f"{scope} {resource}".strip()
        print_change(
            options,
            f"{done}: {options.role} in {where}, {options.name}",
            {**facts, "scope": scope, "resource": resource},
        )
        return 0

    return answer(options, change, {"ok": False, "name": options.name})


# -- roles and principals -------------------------------------------------------------------


def _run_list(options: argparse.Namespace) -> int:
    def show() -> int:
        with connected(options) as client:
            roles, bindings = client.roles(), client.bindings()
        if options.json:
            print_json(
                {
                    "bindings": [asdict(one) for one in bindings],
                    "roles": [asdict(one) for one in roles],
                }
            )
            return 0
        if bindings:
            rows = [
                (one.principal, ", ".join(one.roles), one.scope, one.resource or None)
                for one in bindings
            ]
            print_table(("principal", "roles", "scope", "resource"), rows)
        else:
            print("no principal has a role; grant one with `ister auth grant`")
        print()
        print_table(
            ("role", "permissions"), [(one.name, ", ".join(one.permissions)) for one in roles]
        )
        return 0

    return answer(options, show, {"bindings": [], "roles": []})


def _run_show(options: argparse.Namespace) -> int:
    name = options.name if ":" in options.name else f"user:{options.name}"
    topic = None if options.topic is None else str(options.topic)

    def show() -> int:
        with connected(options) as client:
            roles = {role.name: role.permissions for role in client.roles()}
            bindings = client.bindings()
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
        everywhere = sorted({one for held in rights.values() for one in held})
        if options.json:
            facts: JsonObject = {"principal": name, "bindings": [asdict(one) for one in mine]}
            if topic is None:
                facts["permissions"] = [
                    {"scope": scope, "resource": resource, "permissions": held}
                    for (scope, resource), held in rights.items()
                ]
            else:
                facts |= {"topic": topic, "permissions": everywhere}
            print_json(facts)
        elif topic is not None:
            print_facts(
                {"permissions": ", ".join(everywhere) or "none"}, title=f"{name} on {topic}"
            )
        else:
            granted: dict[tuple[str, str], list[str]] = {}
            for one in mine:
                granted.setdefault((one.scope, one.resource), []).extend(one.roles)
            rows = [
                (scope, resource or None, ", ".join(granted[scope, resource]), ", ".join(held))
                for (scope, resource), held in rights.items()
            ]
            print_table(("scope", "resource", "roles", "permissions"), rows, title=name)
        return 0

    return answer(options, show, {"ok": False, "principal": name})


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
