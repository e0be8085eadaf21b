"""`ister brokers list`: the brokers that share a metadata store.

Owns: arguments, output. Does not own: who they are, which a broker tells (`ister.client`).
"""

from __future__ import annotations

import argparse
from typing import Any

from ister.cli.connection import add_broker_arguments, connected
from ister.cli.look import add_command, print_table
from ister.cli.report import answer, error_as_json, print_json
from ister.errors import IsterError

__all__ = ["register"]


def register(commands: Any) -> None:  # noqa: ANN401 - argparse's sub-parsers have no public type
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
        help="all brokers that are up, and what they have",
        examples=("ister brokers list",),
    )
    listed.add_argument("--json", action="store_true", help="one JSON object")
    add_broker_arguments(listed)
    listed.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    def failed(error: IsterError) -> dict[str, Any]:
        return {"brokers": [], "errors": [error_as_json(error)]}

    return answer(lambda: _list(options), as_json=options.json, on_error=failed)


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
            one["connect_url"] if one["connect_url"] != one["broker_url"] else "the same",
            one["flight_url"],
            one["topics"],
            one["is_this"],
        )
        for one in brokers
    ]
    print_table(("node", "broker", "reached by", "flight", "topics", "asked"), rows)
    return 0
