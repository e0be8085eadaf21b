"""`ister brokers`: lists brokers, drains and activates them, and balances the load.

Does not own: what is done, which brokers do (`ister.client`).
"""

from __future__ import annotations

import sys
from typing import Annotated

from ister.cli.command import Arg, DryRun, Group, Shown, Table, command
from ister.cli.connection import Broker, parse_seconds

BROKERS = Group(
    "brokers",
    "list, drain and balance the brokers of a cluster",
    examples=(
        "ister brokers list",
        "ister brokers drain 1f0c2a9d4b7e6358",
        "ister brokers rebalance --dry-run",
    ),
)
register = BROKERS.register

Node = Annotated[str, Arg("node of the broker; see `ister brokers list`", "NODE")]


@command(BROKERS, "list", "ls", failed={"brokers": []})
def list_brokers(broker: Broker) -> Shown:
    """List running brokers with their state, load and topics.

    Examples:
        ister brokers list
        ister brokers list --broker 10.0.0.7:6650 --json
    """
    with broker.connect() as client:
        brokers = client.admin.brokers()
    rows = [
        (
            one["node"],
            one["broker_url"],
            one["connect_url"],
            one["flight_url"],
            one["topics"],
            one.get("state"),
            one.get("is_leader"),
            one.get("zone") or None,
            one.get("version"),
            one["is_this"],
        )
        for one in brokers
    ]
    titles = ("node", "broker", "connect", "flight", "topics", "state", "leader", "zone", "version")
    return Shown({"brokers": brokers}, Table((*titles, "this broker"), rows))


@command(BROKERS, "drain", failed={"ok": False}, echo=["node"])
def drain_broker(
    broker: Broker,
    node: Node,
    *,
    timeout: Annotated[
        float | None,
        Arg("start to hand over no further topics after this time", "SECONDS", parse_seconds),
    ] = None,
) -> Shown:
    """Hand over all topics of a broker.

    Makes a broker hand its topics over to the other brokers and take no new ones. Producers and
    consumers follow. The broker keeps running: stop it, or activate it.

    Examples:
        ister brokers drain 1f0c2a9d4b7e6358
    """
    print(f"ister: draining {node}; this may take a while", file=sys.stderr)
    with broker.connect() as client:
        drained = client.admin.drain_broker(node, timeout=timeout)
    text = f"{drained['node']} is draining: {drained['moved']} of {drained['total']} topics"
    for topic in drained["failed"]:
        print(f"ister: {topic} was not handed over; see the broker's log", file=sys.stderr)
    is_done = drained["total"] == drained["moved"]
    return broker.changed(f"{text} were handed over", ok=is_done, **drained)


@command(BROKERS, "activate", failed={"ok": False}, echo=["node"])
def activate_broker(broker: Broker, node: Node) -> Shown:
    """Let a drained broker take topics again.

    Ends the draining of a broker: it takes topics again. Topics that it handed over stay where they
    are.

    Examples:
        ister brokers activate 1f0c2a9d4b7e6358
    """
    with broker.connect() as client:
        client.admin.activate_broker(node)
    return broker.changed(f"{node} takes topics", node=node, state="active")


@command(BROKERS, "balance", failed={"brokers": []})
def show_balance(broker: Broker) -> Shown:
    """Show how evenly the load is spread.

    Shows the load of each broker that takes topics, and the coefficient of variation: 0 if all have
    the same load.

    Examples:
        ister brokers balance
    """
    with broker.connect() as client:
        found = client.admin.balance()
    rows = [(one["node"], one["topics"], one["load"]) for one in found["brokers"]]
    text = (
        f"coefficient of variation {found['variation']:.2f}; a rebalance moves topics above "
        f"{found['threshold']:.2f} (strategy {found['strategy']})"
    )
    return Shown(found, [Table(("node", "topics", "load"), rows), text])


@command(BROKERS, "rebalance", failed={"ok": False, "moves": []})
def rebalance(broker: Broker, *, dry_run: DryRun = False) -> Shown:
    """Move topics to even out the load.

    Asks the leader to move a few topics from brokers with much load to those with little
    (broker.cluster.rebalance.max_moves). Nothing moves if the load is even.

    Examples:
        ister brokers rebalance --dry-run
        ister brokers rebalance
    """
    with broker.connect() as client:
        found = client.admin.rebalance(dry_run=dry_run)
    rows = [(one["topic"], one["from"], one["to"]) for one in found["moves"]]
    empty = "nothing to move: the load is even, or topics have just moved"
    table = Table(("topic", "from", "to"), rows, empty=empty)
    text = f"{len(rows)} topics are moving; `ister brokers balance` shows the result"
    return Shown({"ok": True, **found}, [table, text] if rows and not dry_run else table)
