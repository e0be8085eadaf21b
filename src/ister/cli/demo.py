"""`ister demo`: a small shop on a real broker, from the first order to a table, with proofs.

Owns: the arguments. The demo itself is the checkout's package `demo`, which is not in the wheel.
"""

from __future__ import annotations

import argparse
from typing import Final

from ister.cli.checkout import use_checkout
from ister.cli.output import Subparsers, add_command

_REPORT: Final = "ister-demo.html"
_MESSAGES: Final = 120_000
_SEED: Final = 7


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "demo",
        help="run the demo, in under three minutes (needs a checkout)",
        description="Starts a broker in a temporary directory and simulates a day of a small shop "
        "on it: publishes orders, payments and clicks, consumes them by every type of "
        "subscription, kills the broker with SIGKILL in the middle, moves everything to the bucket "
        "with Spark, compacts it, moves to an empty disk, reads all of it back, runs a SQL query "
        "and a streaming query, exports an Iceberg table, and proves that nothing was lost. "
        "Leaves a report, and nothing else. Without Java, the steps that need Spark are skipped. "
        "With --cluster, the shop is on three brokers: one is killed and the others take its "
        "topics, then each is restarted in turn.",
        examples=(
            "ister demo",
            "ister demo --keep",
            "ister demo --messages 20000 --seed 42 --report shop.html",
            "ister demo --no-spark --json",
            "ister demo --cluster",
        ),
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="run three brokers, kill one and restart all, without Spark",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the broker and its dashboard running until Ctrl-C, and keep the data",
    )
    parser.add_argument(
        "--messages",
        metavar="N",
        type=int,
        default=_MESSAGES,
        help=f"number of messages (default: {_MESSAGES})",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=_SEED, help="seed of the generated messages"
    )
    parser.add_argument(
        "--report", metavar="FILE", default=_REPORT, help=f"report file (default: ./{_REPORT})"
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="empty directory for the data, which is kept (default: a temporary one)",
    )
    parser.add_argument("--no-spark", action="store_true", help="skip the steps that need Spark")
    parser.add_argument(
        "--json", action="store_true", help="print all figures as one JSON object at the end"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    use_checkout("ister demo", "demo")
    from demo.command import run  # noqa: PLC0415 - importable from here on

    return run(options)
