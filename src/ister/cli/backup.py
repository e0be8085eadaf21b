"""`ister backup DIR`: copies a data directory that may be in use (`ister.topic.backup`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from ister.base.clock import SystemClock
from ister.cli.command import Arg, Shown, command, register_command
from ister.cli.location import Place
from ister.cli.output import format_bytes
from ister.topic.backup import back_up


@command(None, "backup", failed={"ok": False, "job": "backup"})
def backup(place: Place, directory: Annotated[str, Arg("directory to create", "DIR")]) -> Shown:
    """Copy a data directory while a broker uses it.

    Copies the local files, the metadata and, if it is a directory, the bucket of a log to a new
    directory, which can be opened as a data directory. A broker may have the log open: everything
    that was acknowledged before the copy began is in it. Object stores such as S3, and etcd, are
    not copied.

    Examples:
        ister backup /backups/monday --data ./ister-data
        ister backup /backups/monday --config ister.yml --json
    """
    report = back_up(place.load(), directory, clock=SystemClock())
    bucket = "not copied, because it is not a directory"
    if report.objects is not None:
        bucket = f"objects: {report.objects}, {format_bytes(report.object_bytes)}"
    text = [
        f"copied to {report.path}",
        f"local files: topics: {report.topics}, {format_bytes(report.file_bytes)}",
        f"bucket: {bucket}",
        f"metadata: {'copied' if report.has_metadata else 'not copied: there is no SQLite file'}",
    ]
    return Shown({"ok": True, "job": "backup", **asdict(report), "errors": []}, text)


register = register_command(backup)
