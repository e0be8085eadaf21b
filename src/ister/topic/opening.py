"""Opening a topic that has a bucket: who owns it, what is here, what is there, and do they agree.

    claim ─► recover the local files ─► reconcile with the catalog

The catalog is the truth about the bucket, the local files are the truth about what is not in it
yet. After the claim nobody else commits, so the two stand still while they are compared:

- the local files are not this topic's newest (another node wrote it since): they are set aside,
  and the log begins where that node's messages end;
- the local log ends below what the bucket holds, or is damaged only there: the same; nothing is
  lost with it, and offsets go on behind the bucket's;
- the bucket ends before the local files begin: the catalog may have been restored from an older
  copy, so objects that continue it are looked for and adopted; what is still missing then is in
  neither tier, and the topic opens read-only, saying so.

Setting aside is a rename to a name that no topic can have. Nothing removes such a directory but a
person.

What a crash leaves: a claim, which the next opening repeats, or a directory that was set aside.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ister.fs.base import FileSystem
from ister.model import TopicName
from ister.tier.ownership import OwnedTopic
from ister.tier.rebuild import find_continuation
from ister.topic.tiers import Tiers
from ister.wal.directory import WalDirectory
from ister.wal.recovery import Damage, Recovered, recover

__all__ = ["measure_backlog", "recover_tiered", "remove_directory", "set_aside"]

_log = logging.getLogger("ister.topic.opening")


def recover_tiered(
    directory: WalDirectory,
    owned: OwnedTopic,
    tiers: Tiers,
    *,
    untrusted_from: int | None,
) -> Recovered:
    """Opens the local files of a topic that was claimed; see the module header.

    Raises:
        As `ister.wal.recovery.recover`, and what the stores raise.
    """
    if directory.fs.exists(directory.path) and not owned.is_local_current:
        set_aside(directory, owned.epoch, "another node has written the topic since")
    recovered = recover(directory, untrusted_from=untrusted_from, floor=owned.start)
    if _first_offset(recovered) > owned.tiered:
        _adopt(owned, tiers)
    is_behind = recovered.next_offset < owned.start or (
        bool(recovered.damage) and recovered.next_offset <= owned.tiered
    )
    if is_behind:
        set_aside(directory, owned.epoch, "everything in it that was durable is in the bucket")
        recovered = recover(directory, floor=max(owned.start, recovered.next_offset))
    missing = range(owned.tiered, _first_offset(recovered))
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


def _adopt(owned: OwnedTopic, tiers: Tiers) -> None:
    """Takes objects into the catalog that continue it and that it does not know."""
    name: TopicName = owned.catalog.keys.topic
    found = find_continuation(
        tiers.objects, name, owned.tiered, incarnation=owned.record.incarnation
    )
    if found:
        owned.adopt(found)
        _log.warning(
            "the catalog had forgotten objects, which were adopted",
            extra={"topic": owned.topic, "objects": [d.object_id for d in found]},
        )


def set_aside(directory: WalDirectory, epoch: int, reason: str) -> str:
    """Takes a topic's directory out of the way without removing anything; returns where to."""
    fs, path = directory.fs, directory.path
    number = 0
    while fs.exists(aside := f"{path}.aside-{epoch}" + (f"-{number}" if number else "")):
        number += 1
    fs.rename(path, aside)
    fs.sync_directory(path.rpartition("/")[0])
    _log.error("local files set aside", extra={"path": aside, "reason": reason})
    return aside


def remove_directory(fs: FileSystem, path: str) -> None:
    """Removes a topic's directory and what is in it; one that does not exist is fine.

    A crash in the middle leaves some of the files: the caller has recorded before that they are
    not needed, and does this again.
    """
    if not fs.exists(path):
        return
    for name in fs.list_directory(path):
        fs.remove(f"{path}/{name}")
    fs.remove_directory(path)
    fs.sync_directory(path.rpartition("/")[0])


def measure_backlog(directory: WalDirectory, recovered: Recovered, tiered: int) -> int:
    """About how many bytes of the local files are not tiered: whole files, to be quick."""
    total = 0
    for at, file in enumerate(recovered.files):
        is_last = at + 1 == len(recovered.files)
        end = recovered.next_offset if is_last else recovered.files[at + 1].first_offset
        if end > tiered:
            handle = directory.fs.open_read(directory.log_path(file.seq))
            try:
                total += handle.size()
            finally:
                handle.close()
    return total
