"""`ister topics move` and `take-over`: give topics to another broker.

Owns: arguments, output, exit codes. Does not own: what is done, which brokers do (`ister.client`).
"""

from __future__ import annotations

import argparse
import sys

from ister.base.model import JsonObject
from ister.cli.connection import add_broker_arguments, broker_address, connected, print_change
from ister.cli.errors_out import answer, print_json
from ister.cli.location import add_topic_argument
from ister.cli.output import Subparsers, add_command, confirm


def register_moves(kinds: Subparsers) -> None:
    """Adds the two commands to the parser of `ister topics`."""
    move = add_command(
        kinds,
        "move",
        help="move a topic to another broker",
        description="Moves a topic to a broker: its current broker uploads the rest of its "
        "messages and hands it over. Producers and consumers follow; nothing is lost.",
        examples=("ister topics move /default/orders --to 1f0c2a9d4b7e6358",),
    )
    add_topic_argument(move)
    move.add_argument(
        "--to",
        metavar="NODE",
        required=True,
        help="node of the broker; see `ister brokers list`",
    )
    take_over = add_command(
        kinds,
        "take-over",
        help="continue a topic whose disk is lost, without its newest messages",
        description="Continues a topic that waits for the disk of a broker that is down. Messages "
        "that only that disk has are given up for good, acknowledged ones among them: use this if "
        "the disk is lost. If the broker can be started again, start it instead.",
        examples=(
            "ister topics take-over /default/orders",
            "ister topics take-over /default/orders --yes",
        ),
    )
    add_topic_argument(take_over)
    take_over.add_argument("--yes", action="store_true", help="skip the confirmation")
    for parser, run in ((move, _run_move), (take_over, _run_take_over)):
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        add_broker_arguments(parser)
        parser.set_defaults(run=run)


def _run_move(options: argparse.Namespace) -> int:
    def move() -> int:
        topic = str(options.topic)
        print(f"ister: moving {topic} to {options.to}", file=sys.stderr)
        with connected(options) as client:
            client.move_topic(topic, options.to)
        print_change(options, f"moved {topic} to {options.to}", {"topic": topic, "to": options.to})
        return 0

    return answer(options, move, _failed(options))


def _run_take_over(options: argparse.Namespace) -> int:
    def take_over() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            lost = client.take_over(topic)
            what = (
                f"messages at offset {lost['offset']} and later that only the disk of node "
                f"{lost['node']} has"
            )
            question = (
                f"Take {topic} over at broker {broker_address(options)}? This gives up "
                f"{what}. This cannot be undone."
            )
            if not options.yes:
                print(f"ister: a take-over of {topic} gives up {what}", file=sys.stderr)
            if not confirm(question, is_confirmed=options.yes):
                if options.json:
                    print_json({"ok": False, **lost})
                return 1
            taken = client.take_over(topic, confirm=True)
        print_change(options, f"took {topic} over; given up: {what}", {**taken})
        return 0

    return answer(options, take_over, _failed(options))


def _failed(options: argparse.Namespace) -> JsonObject:
    return {"ok": False, "topic": str(options.topic)}
