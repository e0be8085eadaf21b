"""`ister namespaces list|create|delete`: the first part of topics' names.

Owns: arguments, output. Does not own: namespaces, which a broker keeps (`ister.client`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ister.cli.connection import add_broker_arguments, connected, parse_name, print_change
from ister.cli.errors_out import answer, print_json
from ister.cli.output import Subparsers, add_command, print_table


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "namespaces",
        help="list, create and delete namespaces",
        description="The topic /shop/orders is in the namespace shop. The namespace default "
        "always exists; create others before creating topics in them.",
        examples=("ister namespaces list", "ister namespaces create shop"),
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    listed = add_command(
        actions,
        "list",
        help="list the names of all namespaces",
        examples=("ister namespaces list", "ister namespaces list --json"),
    )
    listed.set_defaults(run=_run_list)

    created = add_command(
        actions, "create", help="create a namespace", examples=("ister namespaces create shop",)
    )
    created.set_defaults(run=_run_create)

    deleted = add_command(
        actions,
        "delete",
        help="delete a namespace without topics",
        examples=("ister namespaces delete shop",),
    )
    deleted.set_defaults(run=_run_delete)

    for action in (created, deleted):
        action.add_argument("name", metavar="NAME", type=parse_name, help="namespace, such as shop")
    for action in (listed, created, deleted):
        action.add_argument("--json", action="store_true", help="print one JSON object")
        add_broker_arguments(action)


def _run_list(options: argparse.Namespace) -> int:
    def show() -> int:
        with connected(options) as client:
            names = client.namespaces()
        if options.json:
            print_json({"namespaces": names})
        else:
            print_table(("namespace",), [(name,) for name in names])
        return 0

    return answer(options, show, {"namespaces": []})


def _run_create(options: argparse.Namespace) -> int:
    def create() -> str:
        with connected(options) as client:
            client.create_namespace(options.name)
        return f"created {options.name}"

    return _changed(options, create)


def _run_delete(options: argparse.Namespace) -> int:
    def delete() -> str:
        with connected(options) as client:
            client.delete_namespace(options.name)
        return f"deleted {options.name}"

    return _changed(options, delete)


def _changed(options: argparse.Namespace, change: Callable[[], str]) -> int:
    def work() -> int:
        print_change(options, change(), {"namespace": options.name})
        return 0

    return answer(options, work, {"ok": False, "namespace": options.name})
