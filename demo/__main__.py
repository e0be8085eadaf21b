"""`python -m demo`: a small shop on a real broker, from the first order to a table, with proofs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from demo.command import run
from ister.base import logs
from ister.cli.command import add_json_argument
from ister.cli.errors_out import print_errors
from ister.cli.output import print_error
from ister.cli.parser import Parser
from ister.errors import InvariantError, IsterError

_REPORT: Final = "ister-demo.html"
_MESSAGES: Final = 120_000
_SEED: Final = 7


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = Parser(
        prog="python -m demo",
        description="Starts a broker in a temporary directory and simulates a day of a small shop "
        "on it: publishes orders, payments and clicks, consumes them by every type of "
        "subscription, kills the broker with SIGKILL in the middle, moves everything to the bucket "
        "with Spark, compacts it, moves to an empty disk, reads all of it back, runs a SQL query "
        "and a streaming query, exports an Iceberg table, and proves that nothing was lost. "
        "Leaves a report, and nothing else. Without Java, the steps that need Spark are skipped. "
        "With --cluster, the shop is on three brokers: one is killed and the others take its "
        "topics, then each is restarted in turn.",
        epilog="examples:\n  python -m demo\n  python -m demo --keep\n"
        "  python -m demo --messages 20000 --seed 42 --report shop.html\n"
        "  python -m demo --no-spark --json\n  python -m demo --cluster",
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
    add_json_argument(parser, "print all figures as one JSON object at the end")
    options = parser.parse_args(arguments)
    # Child processes import this package, wherever they run.
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    logs.configure(level="ERROR", as_text=True)
    try:
        return run(options)
    except InvariantError:
        raise
    except IsterError as error:
        print_errors([error])
    except KeyboardInterrupt:
        print_error("interrupted")
    return 1


if __name__ == "__main__":
    sys.exit(main())
