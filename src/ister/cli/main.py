"""The `ister` command: arguments in, exit code out.

Owns: the parser of all sub-commands, how errors are shown, exit codes. Does not own: what a command
does; each module of `ister.cli` registers its own parser and sets `run`.

Exit codes: 0 done, 1 failed (or the command found damage), 2 wrong usage. Errors go to standard
error and say what to do; a traceback is shown for our own faults alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from ister import __version__, logs
from ister.cli import auth, bench, inspect, pipeline, recover, repair, serve
from ister.errors import InvariantError, IsterError

__all__ = ["main"]

EXIT_FAILED: Final = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    Args:
        arguments: Without the program's name; those of the process by default.

    Raises:
        SystemExit: With 2 after wrong usage, with 0 after `--help` and `--version`.
    """
    options = _parser().parse_args(arguments)
    # What commands find is in their output; beside it only what somebody has to see to.
    logs.configure(level="ERROR", as_text=True)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()
    except InvariantError:
        raise
    except IsterError as error:
        print(f"ister: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("ister: interrupted", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would try to flush once more at
        # exit and complain, so the rest goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ister",
        description="A durable topic log.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage.",
    )
    parser.add_argument("--version", action="version", version=f"ister {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve.register(commands)
    auth.register(commands)
    inspect.register(commands)
    recover.register(commands)
    repair.register(commands)
    pipeline.register(commands)
    bench.register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
