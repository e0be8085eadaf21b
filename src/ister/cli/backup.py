"""`ister backup DIR`: copies a data directory that may be in use.

Owns: arguments, output, exit code. Does not own: the work (`ister.topic.backup`).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ister.base.clock import SystemClock
from ister.cli.errors_out import answer, print_json
from ister.cli.location import add_place_arguments, load_place
from ister.cli.output import Subparsers, add_command, format_bytes
from ister.topic.backup import back_up


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "backup",
        help="copy a data directory while a broker uses it",
        description="Copies the local files, the metadata and, if it is a directory, the bucket of "
        "a log to a new directory, which can be opened as a data directory. A broker may have the "
        "log open: everything that was acknowledged before the copy began is in it. Object "
        "stores such as S3, and etcd, are not copied.",
        examples=(
            "ister backup /backups/monday --data ./ister-data",
            "ister backup /backups/monday --config ister.yml --json",
        ),
    )
    parser.add_argument("directory", metavar="DIR", help="directory to create")
    add_place_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return answer(options, lambda: _back_up(options), {"ok": False, "job": "backup"})


def _back_up(options: argparse.Namespace) -> int:
    report = back_up(load_place(options), options.directory, clock=SystemClock())
    if options.json:
        print_json({"ok": True, "job": "backup", **asdict(report), "errors": []})
        return 0
    print(f"copied to {report.path}")
    print(f"local files: topics: {report.topics}, {format_bytes(report.file_bytes)}")
    if report.objects is None:
        print("bucket: not copied, because it is not a directory")
    else:
        print(f"bucket: objects: {report.objects}, {format_bytes(report.object_bytes)}")
    print(f"metadata: {'copied' if report.has_metadata else 'not copied: there is no SQLite file'}")
    return 0
