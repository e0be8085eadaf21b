"""Compares the local files of a claimed topic with the bucket's catalog, and resolves differences.

    claim ─► recover the local files ─► reconcile with the catalog

The catalog is the truth about the bucket, the local files are the truth about what is not in it
yet. After the claim no other process commits, so neither changes while they are compared:

- local files that are not the topic's newest (another node wrote it since) have been set aside
  before the claim, and the log begins where that node's messages end;
- the local log ends below what the bucket holds, or is damaged only there: it is set aside; nothing
  is lost with it, and offsets continue after the bucket's;
- the bucket may have objects that continue the catalog and are not in it, if the last owner's
  process did not close the topic, or if the metadata store was rolled back to an older state: they
  are adopted first (`Stores.find_forgotten`);
- the bucket still ends before the local files begin: what is missing is in neither tier, and the
  topic opens read-only, with the damage reported.

Setting aside is a rename to a name that no topic can have. Ister never removes such a
directory.

What a crash leaves: a claim, which the next opening repeats, or a directory that was set aside.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ister.base import failpoints
from ister.bucket.claim import ClaimCheck
from ister.bucket.ownership import OwnedTopic
from ister.errors import CorruptDataError, NotFoundError, StoresDifferError
from ister.format.checkpoint import WalCheckpoint, WalState
from ister.format.descriptor import ObjectDescriptor
from ister.format.frame import NothingLeftError, Scan
from ister.format.frame_walk import scan_file
from ister.format.records import TopicRecord
from ister.rescue.rebuild import secure_objects
from ister.topic.directories import remove_directory
from ister.topic.stores import Stores
from ister.wal.directory import WalDirectory
from ister.wal.index import SparseIndex
from ister.wal.recovery import Damage, Recovered, recover

_log = logging.getLogger("ister.topic.reconcile")

# A directory that is about to take the place of one that is set aside.
_FRESH_SUFFIX: Final = ".fresh"


def recover_tiered(
    directory: WalDirectory,
    owned: OwnedTopic,
    stores: Stores,
    *,
    before: ClaimCheck,
    untrusted_from: int | None,
) -> Recovered:
    """Opens the local files of a claimed topic and reconciles them with the catalog.

    `before`: what was known before the claim.
    """
    if before.terms is None:
        owned.unread = before
    has_adopted = _adopt(owned, stores, before.found)
    recovered = recover(
        directory, untrusted_from=untrusted_from, floor=owned.start, durable=owned.tiered
    )
    if _first_offset(recovered) > owned.tiered:
        found = stores.find_forgotten(owned.catalog, before, has_gap=True)
        has_adopted |= _adopt(owned, stores, found)
    is_behind = recovered.next_offset < owned.start or (
        # Unreadable bytes may have been acknowledged messages: such a topic stays as it is,
        # read-only.
        bool(recovered.damage)
        and recovered.next_offset <= owned.tiered
        and not recovered.has_unread_bytes
    )
    if is_behind or has_adopted or owned.is_rebuilt:
        _refuse_divergence(directory, recovered, owned, stores)
    if is_behind:
        end = max(owned.start, recovered.next_offset)
        set_aside(directory, "everything in it that was durable is in the bucket", owned, end)
        recovered = recover(directory, floor=end)
    missing = range(owned.tiered, _first_offset(recovered))
    # Given up without a bucket: the bucket has to know, too.
    missing = missing or next((range(*gap) for gap in recovered.gaps), missing)
    if missing and not recovered.damage:
        damage = Damage(
            path=directory.path,
            position=0,
            offset=missing.start,
            reason=f"the offsets {missing.start} up to, not including, {missing.stop} are in "
            "neither tier",
        )
        recovered = replace(recovered, damage=(damage,))
    return recovered


def _first_offset(recovered: Recovered) -> int:
    return recovered.files[0].first_offset if recovered.files else recovered.next_offset


def _refuse_divergence(
    directory: WalDirectory, recovered: Recovered, owned: OwnedTopic, stores: Stores
) -> None:
    """Refuses files that hold other messages than the bucket under the same offsets.

    It takes a catalog that was rebuilt while files or objects of a fenced owner lay around. The
    newest frame that both tiers have tells: up to it they hold the same, or they do not.
    """
    offset = min(_local_end(directory, recovered), owned.tiered) - 1
    frame = _read_frame(directory, recovered, offset)
    if frame is None:
        return
    history = stores.reader(owned.catalog)
    try:
        batch = history.fetch(offset, offset + 1, bytes_max=len(frame))
    except (CorruptDataError, NotFoundError, NothingLeftError):
        return  # what the bucket has there is no witness
    finally:
        history.close()
    if batch.chunk[batch.starts[0] : batch.end] != frame:
        raise divergence(owned.topic, offset, directory.path)


def divergence(topic: str, offset: int, path: str) -> StoresDifferError:
    """The error for tiers that hold different messages under one offset."""
    return StoresDifferError(
        "the local files and the bucket hold different messages under the same offsets",
        topic=topic,
        offset=offset,
        path=path,
        hint="one of them belongs to an owner that was replaced; compare them with "
        "`ister inspect`, and move the wrong one away",
    )


def _local_end(directory: WalDirectory, recovered: Recovered) -> int:
    """The offset after the last whole frame of the local files, up to damage; 0 without files."""
    if not recovered.files:
        return 0
    file = recovered.files[-1]
    entry = recovered.index.entries[-1] if recovered.index.entries else None
    with directory.open_log(file.seq) as handle:
        scan = scan_file(
            handle,
            position=entry.position if entry is not None else 0,
            expected_offset=entry.offset if entry is not None else file.first_offset,
        )
    return scan.next_offset if scan.next_offset is not None else file.first_offset


def _read_frame(directory: WalDirectory, recovered: Recovered, offset: int) -> bytes | None:
    """A whole local frame by its offset; None if it is missing or damaged."""
    at = bisect_right(recovered.files, offset, key=lambda file: file.first_offset)
    if at == 0:
        return None
    file = recovered.files[at - 1]
    is_last = at == len(recovered.files)
    index = recovered.index if is_last else SparseIndex(directory.load_index(file.seq))
    entry = index.find_offset(offset)
    found: list[bytes] = []

    def visit(chunk: bytes, position: int, scan: Scan) -> None:
        number = offset - ((scan.next_offset or 0) - len(scan.starts))
        if 0 <= number < len(scan.starts):
            ends = [*scan.starts[1:], scan.end]
            found.append(chunk[scan.starts[number] : ends[number]])

    with directory.open_log(file.seq) as handle:
        scan_file(
            handle,
            position=entry.position if entry is not None else 0,
            expected_offset=entry.offset if entry is not None else file.first_offset,
            visit=visit,
        )
    return found[0] if found else None


def _adopt(owned: OwnedTopic, stores: Stores, found: Sequence[ObjectDescriptor]) -> bool:
    """Adds objects that continue the catalog and are not in it; returns whether there are any."""
    # Some may have been committed meanwhile: by a pipeline, or by an opening that was interrupted.
    wanted = [described for described in found if described.start >= owned.tiered]
    if not wanted:
        return False
    # Copies, because their writer may still delete what it could not commit.
    found = secure_objects(stores.objects, owned.catalog.keys.topic, wanted, owned.epoch)
    if len(found) < len(wanted):
        owned.begin_at(found[-1].end if found else owned.tiered)
    if found:
        owned.adopt(found)
        _log.warning(
            "objects that were missing in the catalog were added",
            extra={
                "topic": owned.topic,
                "start": found[0].start,
                "end": found[-1].end,
                "objects": [described.object_id for described in found],
            },
        )
    return bool(found)


def aside_path(path: str, number: int) -> str:
    """Where a topic's directory is after it was set aside; numbers begin at 1, without a gap."""
    return f"{path}.aside-{number}"


def set_aside(
    directory: WalDirectory, reason: str, owned: OwnedTopic | None = None, end: int = 0
) -> str:
    """Renames a topic's directory, without removing anything; returns the new path.

    `owned`: the topic, if it is this node's: the new directory gets a checkpoint, so that it is not
    taken for one whose files were lost.
    `end`: where the topic continues then.
    """
    fs, path = directory.fs, directory.path
    number = 1
    while fs.exists(aside := aside_path(path, number)):
        number += 1
    # The new directory is made first: a crash between the two names must not look like a loss.
    parent = path.rpartition("/")[0]
    directory.begin_rename()
    fresh = WalDirectory(fs, f"{path}{_FRESH_SUFFIX}")
    fresh.mark()
    if owned is not None:
        fresh.save_state(_state_of(owned.record, end))
    fs.rename(path, aside)
    fs.sync_directory(parent)
    failpoints.reach("tier.after_set_aside")
    fs.rename(f"{path}{_FRESH_SUFFIX}", path)
    fs.sync_directory(parent)
    _log.error("local files set aside", extra={"path": aside, "reason": reason})
    return aside


def _state_of(record: TopicRecord, end: int) -> WalState:
    """The checkpoint of a log without messages that continues at `end`."""
    return WalState(
        synced=end,
        synced_position=0,
        codec=record.codec,
        ack=record.ack,
        incarnation=record.incarnation,
        epoch=record.epoch,
        claim=record.claim,
        checkpoint=WalCheckpoint(start_offset=end, last_offset=max(end - 1, 0)),
    )


def finish_set_aside(directory: WalDirectory) -> None:
    """Finishes a `set_aside` that a crash has interrupted."""
    fs, path = directory.fs, directory.path
    fresh = f"{path}{_FRESH_SUFFIX}"
    if not fs.exists(fresh):
        return
    if fs.exists(path):
        remove_directory(fs, fresh)
    else:
        directory.begin_rename()
        WalDirectory(fs, fresh).mark()
        fs.rename(fresh, path)
        fs.sync_directory(path.rpartition("/")[0])


def measure_backlog(directory: WalDirectory, recovered: Recovered, tiered: int) -> int:
    """About how many bytes of the local files are not tiered: whole files, to be quick."""
    total = 0
    for at, file in enumerate(recovered.files):
        is_last = at + 1 == len(recovered.files)
        end = recovered.next_offset if is_last else recovered.files[at + 1].first_offset
        if end > tiered:
            total += directory.log_size(file.seq)
    return total
