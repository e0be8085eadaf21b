"""`ister brokers`: lists brokers, drains and activates them, and balances the load.

Owns: arguments, output, exit codes. Does not own: what is done, which brokers do (`ister.client`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from ister.base.model import JsonObject
from ister.cli.connection import add_broker_arguments, connected, parse_seconds, print_change
from ister.cli.errors_out import answer, print_json
from ister.cli.output import Subparsers, add_command, print_table


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "brokers",
        help="list, drain and balance the brokers of a cluster",
        examples=(
            "ister brokers list",
            "ister brokers drain 1f0c2a9d4b7e6358",
            "ister brokers rebalance --dry-run",
        ),
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    _register(
        kinds,
        "list",
        _run_list,
        help="list running brokers with their state, load and topics",
        examples=("ister brokers list", "ister brokers list --broker 10.0.0.7:6650 --json"),
    )
    drain = _register(
        kinds,
        "drain",
        _run_drain,
        help="hand over all topics of a broker",
        description="Makes a broker hand its topics over to the other brokers and take no new "
        "ones. Producers and consumers follow. The broker keeps running: stop it, or activate it.",
        examples=("ister brokers drain 1f0c2a9d4b7e6358",),
    )
    _add_id(drain)
    drain.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parse_seconds,
        help="start to hand over no further topics after this time",
    )
    _add_id(
        _register(
            kinds,
            "activate",
            _run_activate,
            help="let a drained broker take topics again",
            description="Ends the draining of a broker: it takes topics again. Topics that it "
            "handed over stay where they are.",
            examples=("ister brokers activate 1f0c2a9d4b7e6358",),
        )
    )
    _register(
        kinds,
        "balance",
        _run_balance,
        help="show how evenly the load is spread",
        description="Shows the load of each broker that takes topics, and the coefficient of "
        "variation: 0 if all have the same load.",
        examples=("ister brokers balance",),
    )
    rebalance = _register(
        kinds,
        "rebalance",
        _run_rebalance,
        help="move topics to even out the load",
        description="Asks the leader to move a few topics from brokers with much load to those "
        "with little (broker.cluster.rebalance.max_moves). Nothing moves if the load is even.",
        examples=("ister brokers rebalance --dry-run", "ister brokers rebalance"),
    )
    rebalance.add_argument("--dry-run", action="store_true", help="show the moves; change nothing")


def _register(
    kinds: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    examples: tuple[str, ...],
    description: str | None = None,
) -> argparse.ArgumentParser:
    parser = add_command(kinds, name, help=help, description=description, examples=examples)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_broker_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="NODE", help="node of the broker; see `ister brokers list`")


def _run_list(options: argparse.Namespace) -> int:
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
            one.get("state"),
            one.get("is_leader"),
            one.get("zone") or None,
            one.get("version"),
            one["is_this"],
        )
        for one in brokers
    ]
    titles = ("node", "broker", "connect", "flight", "topics", "state", "leader", "zone", "version")
    print_table((*titles, "this broker"), rows)
    return 0


def _run_drain(options: argparse.Namespace) -> int:
    def drain() -> int:
        print(f"ister: draining {options.id}; this may take a while", file=sys.stderr)
        with connected(options) as client:
            drained = client.drain_broker(options.id, timeout=options.timeout)
        left = drained["total"] - drained["moved"]
        text = f"{drained['node']} is draining: {drained['moved']} of {drained['total']} topics"
        text += " were handed over"
        print_change(options, text, {**drained, "ok": not left})
        for topic in drained["failed"]:
            print(f"ister: {topic} was not handed over; see the broker's log", file=sys.stderr)
        return 1 if left else 0

    return answer(options, drain, _failed(options))


def _run_activate(options: argparse.Namespace) -> int:
    def activate() -> int:
        with connected(options) as client:
            client.activate_broker(options.id)
        print_change(options, f"{options.id} takes topics", {"node": options.id, "state": "active"})
        return 0

    return answer(options, activate, _failed(options))


def _run_balance(options: argparse.Namespace) -> int:
    def balance() -> int:
        with connected(options) as client:
            found = client.balance()
        if options.json:
            print_json(found)
            return 0
        rows = [(one["node"], one["topics"], one["load"]) for one in found["brokers"]]
        print_table(("node", "topics", "load"), rows)
        print(
            f"coefficient of variation {found['variation']:.2f}; a rebalance moves topics above "
            f"{found['threshold']:.2f} (strategy {found['strategy']})"
        )
        return 0

    return answer(options, balance, {"brokers": []})


def _run_rebalance(options: argparse.Namespace) -> int:
    def rebalance() -> int:
        with connected(options) as client:
            found = client.rebalance(dry_run=options.dry_run)
        if options.json:
            print_json({"ok": True, **found})
            return 0
        if not found["moves"]:
            print("nothing to move: the load is even, or topics have just moved")
            return 0
        rows = [(one["topic"], one["from"], one["to"]) for one in found["moves"]]
        print_table(("topic", "from", "to"), rows)
        if not options.dry_run:
            print(f"{len(rows)} topics are moving; `ister brokers balance` shows the result")
        return 0

    return answer(options, rebalance, {"ok": False, "moves": []})


def _failed(options: argparse.Namespace) -> JsonObject:
    return {"ok": False, "node": str(options.id)}
