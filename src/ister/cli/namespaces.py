"""`ister namespaces`: the first part of topics' names."""

from __future__ import annotations

from typing import Annotated

from ister.cli.command import Arg, Group, Shown, Table, command
from ister.cli.connection import Broker, parse_name

NAMESPACES = Group(
    "namespaces",
    "list, create and delete namespaces",
    description="The topic /shop/orders is in the namespace shop. The namespace default "
    "always exists; create others before creating topics in them.",
    examples=("ister namespaces list", "ister namespaces create shop"),
)
register = NAMESPACES.register

Namespace = Annotated[str, Arg("namespace, such as shop", "NAME", parse_name)]


@command(NAMESPACES, "list", "ls", failed={"namespaces": []})
def list_namespaces(broker: Broker) -> Shown:
    """List the names of all namespaces.

    Examples:
        ister namespaces list
        ister namespaces list --json
    """
    with broker.connect() as client:
        names = client.admin.namespaces()
    return Shown({"namespaces": names}, Table(("namespace",), [(name,) for name in names]))


@command(NAMESPACES, "create", failed={"ok": False}, echo={"namespace": "name"})
def create_namespace(broker: Broker, name: Namespace) -> Shown:
    """Create a namespace.

    Examples:
        ister namespaces create shop
    """
    with broker.connect() as client:
        client.admin.create_namespace(name)
    return broker.changed(f"created {name}", namespace=name)


@command(NAMESPACES, "delete", "rm", failed={"ok": False}, echo={"namespace": "name"})
def delete_namespace(broker: Broker, name: Namespace) -> Shown:
    """Delete a namespace without topics.

    Examples:
        ister namespaces delete shop
    """
    with broker.connect() as client:
        client.admin.delete_namespace(name)
    return broker.changed(f"deleted {name}", namespace=name)
