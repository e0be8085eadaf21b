"""`ister brokers list`: the brokers that share a metadata store.

Owns: arguments, output. Does not own: the list, which a broker returns (`ister.client`).
"""

from __future__ import annotations

import argparse

from ister.cli.connection import add_broker_arguments, connected
from ister.cli.errors_out import answer, print_json
from ister.cli.output import Subparsers, add_command, print_table


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "brokers",
        help="list the brokers of a cluster",
        examples=("ister brokers list", "ister brokers list --broker 10.0.0.7:6650 --json"),
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    listed = add_command(
        kinds,
        "list",
        help="list running brokers with their addresses and topics",
        examples=("ister brokers list",),
    )
    listed.add_argument("--json", action="store_true", help="print one JSON object")
    add_broker_arguments(listed)
    listed.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return answer(options, lambda: _list(options), {"brokers": []})


def _list(options: argparse.Namespace) -> int:
    with connected(options) as client:
        brokers = client.brokers()
    if options.json:
        print_json({"brokers": brokers})
        return 0
    rows = [
        (
            one["node"],
            one["broker_url"],
            one["connect_url"],
            one["flight_url"],
            one["topics"],
            one["is_this"],
        )
        for one in brokers
    ]
    print_table(("node", "broker", "connect", "flight", "topics", "this broker"), rows)
    return 0
