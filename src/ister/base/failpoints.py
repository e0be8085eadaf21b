"""Named points at which a test may stop a process or raise an error; free unless armed.

`reach("wal.after_write")` costs one look at an empty dict. A point is armed in-process with `arm`,
or for a whole process by `ISTER_FAILPOINTS="wal.after_write=kill@3,wal.before_sync=pause@5"`: the
action happens at the given visit. `kill` ends the process as SIGKILL does, `pause` stops it as
SIGSTOP does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Final

from ister.errors import InvalidRequestError

FAILPOINTS: Final[frozenset[str]] = frozenset(
    {
        "wal.before_write",  # frames are in memory only
        "wal.after_write",  # frames are in the page cache
        "wal.before_sync",
        "wal.after_sync",  # frames are durable, nobody has been told
        "wal.after_create_file",  # the new file exists, its directory is not synced
        "wal.after_sync_directory",
        "wal.before_checkpoint_rename",
        "wal.after_checkpoint",
        "wal.after_rotate",
        "wal.after_remove_file",  # trim: the directory is not synced
        "wal.recovery_before_cut",
        "wal.recovery_after_cut",  # the torn tail is gone, the cut is not synced
        "wal.recovery_before_checkpoint",
        "tier.after_set_aside",  # the old directory has another name, the new one not yet its own
        "tier.after_claim",  # the epoch has risen, nothing local knows yet
        "tier.before_session",
        "tier.after_session",  # the store knows what is coming
        "tier.after_part",  # a part of an object has been handed over
        "tier.before_complete",
        "tier.after_complete",  # the object exists, nobody refers to it
        "tier.after_copy",  # finalize: copy; both names exist
        "tier.after_delete_pending",
        "tier.before_commit",
        "tier.after_commit",  # the object is part of the topic, nothing local knows
        "tier.before_checkpoint_rename",
        "tier.after_checkpoint",
        "tier.after_expire",  # descriptors are gone, their objects are not
        "tier.after_mark_deleting",
        "tier.after_delete_object",
        "tier.after_seal",  # sealed, the local files are still there
        "tier.after_remove_local",
        "tier.before_swap",  # a merged object exists, nobody refers to it
        "tier.after_swap",  # it is part of the topic; those that it replaces are still there
        "tier.after_replace",  # repair: a descriptor names its new object
        "delete.after_rename",  # a topic's directory has a name that no topic has
        "delete.after_remove_file",  # a file of such a directory is gone
        "repair.before_gaps",  # offsets are about to be given up, nothing has changed
        "repair.after_gaps",  # the record is replaced, nothing else has changed
        "repair.after_object",  # a replacement object is written, no descriptor names it
        "repair.after_commit",  # it is part of the topic, the local files are as they were
        "express.before_put",  # runs of many topics are in memory
        "express.after_put",  # an express object exists, nobody refers to it
        "express.before_commit",  # before the transaction of some of its topics
        "express.after_commit",  # these are part of their topics, nothing local knows
        "express.before_resort",  # runs are about to be written to an object of their topic
        "express.after_resort",  # that object exists and was read back, nobody refers to it
        "express.after_collect",  # an express object that nobody refers to was removed
        "compact.after_part",  # a part of a merged object has been handed over
        "compact.after_object",  # a merged object exists, nobody refers to it
        "pipeline.after_lease",  # a job has its lease, and has looked at nothing yet
        "pipeline.after_plan",  # it knows what to do, and has done nothing
        "pipeline.before_task",  # in a task
        "pipeline.after_task",  # in a task: its output exists, the driver has not been told
        "pipeline.before_commit",  # the driver knows of all output, none of it counts
        "pipeline.after_commit",  # it counts, nobody has been told
        "pipeline.before_report",
        "export.after_dead_letters",  # bad rows are in their table, good ones not yet
        "export.before_table_commit",  # files exist, the table does not know them
        "export.after_table_commit",
        "export.after_publish",  # a directory: a file of a commit has its final name
        "scrub.before_repair",
        "scrub.after_repair",
        "batch.after_manifest",  # the bucket says what a batch consists of, the topic knows nothing
        "batch.after_begin",  # the topic knows the batch, no row of it is appended
        "batch.after_rows",  # some of its rows are appended
        "batch.before_done",  # all of them are synced
        "batch.after_done",  # the batch counts, its staged files are still there
        "broker.after_append",  # a message has its offset, nothing of it is durable
        "broker.before_answer",  # it has reached its level, the producer has not been told
        "broker.after_subscribe",  # the consumer's id is written down and not given out
        "broker.before_cursor",
        "broker.after_cursor",  # the cursor is written, the broker does not know
        "broker.after_dead_letter",  # the letter is published, the message still counts as failed
        "broker.after_requeue",  # dead letters are published, not recorded as resolved
        "broker.before_ready",  # everything is recovered, nobody can connect
    }
)

_armed: dict[str, Callable[[], None]] = {}


def reach(name: str) -> None:
    """Runs the action armed at this point, if there is one."""
    if _armed and (action := _armed.get(name)) is not None:
        action()


def arm(name: str, action: Callable[[], None]) -> None:
    """Has `action` run at every visit of the point `name`.

    Raises:
        InvalidRequestError: There is no such point.
    """
    if name not in FAILPOINTS:
        raise InvalidRequestError(
            f"there is no failpoint {name!r}", hint=f"known: {', '.join(sorted(FAILPOINTS))}"
        )
    _armed[name] = action


def disarm() -> None:
    """Disarms every point."""
    _armed.clear()


def arm_from_environment(specification: str) -> None:
    """Arms the points of `ISTER_FAILPOINTS`; see the module header for the form.

    Raises:
        InvalidRequestError: The specification does not have that form.
    """
    for item in filter(None, specification.split(",")):
        name, _, rest = item.partition("=")
        action, _, visit = rest.partition("@")
        signals = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP}
        if action not in signals or not visit.isdigit():
            raise InvalidRequestError(
                f"failpoint {item!r}", hint="write name=kill@N or name=pause@N"
            )
        arm(name, _signal_at_visit(signals[action], int(visit)))


def _signal_at_visit(number: signal.Signals, visit: int) -> Callable[[], None]:
    visits = 0

    def act() -> None:
        nonlocal visits
        visits += 1
        if visits == visit:
            # To this thread: it stops here, and the process with it, not some instructions later.
            signal.pthread_kill(threading.get_ident(), number)

    return act
