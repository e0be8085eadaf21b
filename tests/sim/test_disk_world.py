"""Simulated disks that fill up, with the metadata on them; and bugs that these worlds catch."""

from __future__ import annotations

import os

import pytest

from ister.topic.disk import DiskGuard
from ister.topic.retention import Retention
from ister.wal.log import Wal
from tests.sim.disk_world import DiskMetadata, run_seed
from tests.sim.known_seeds import catch, plants_of
from tests.support.scale import scaled

WORLDS = scaled(4, 200)
SEEDS_MAX = 40
_FIRST_SEED = int(os.environ.get("ISTER_SIM_SEED", "0"))


def test_full_disk_heals_and_nothing_acknowledged_is_lost():
    worlds = [run_seed(seed) for seed in range(_FIRST_SEED, _FIRST_SEED + WORLDS)]
    print(
        f"{len(worlds)} worlds: healed {sum(w.heals for w in worlds)} times, refused "
        f"{sum(w.refused for w in worlds)}, {sum(w.crashes for w in worlds)} crashes"
    )
    assert sum(w.refused for w in worlds) > 10 * WORLDS, "the disks were hardly ever full"


# -- planted bugs -----------------------------------------------------------------------------


def no_reserve(patch: pytest.MonkeyPatch) -> None:
    """Nothing is put aside for tidying up."""
    patch.setattr(DiskGuard, "_allocate_reserve", lambda self, own: None)
    patch.setattr(DiskGuard, "may_write", lambda self: True)


def metadata_cannot_have_the_reserve(patch: pytest.MonkeyPatch) -> None:
    def with_room(self: DiskMetadata) -> None:
        self._write()

    patch.setattr(DiskMetadata, "_with_room", with_room)


def appends_take_the_reserve(patch: pytest.MonkeyPatch) -> None:
    """What was given up to tidy up is written to by producers."""
    patch.setattr(DiskGuard, "may_write", lambda self: True)
    patch.setattr(DiskGuard, "_apply", lambda self, topic: None)


def hold_is_never_released(patch: pytest.MonkeyPatch) -> None:
    real = DiskGuard._apply

    def apply(self: DiskGuard, topic) -> None:
        if self._is_low:
            real(self, topic)

    patch.setattr(DiskGuard, "_apply", apply)


def watermark_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskGuard, "_apply", lambda self, topic: None)


def retention_keeps_what_the_bucket_has(patch: pytest.MonkeyPatch) -> None:
    """A disk that is low waits for the limits of retention."""
    patch.setattr(DiskGuard, "free_space", lambda self: 0)


def active_file_never_goes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wal, "_end_active_file", lambda self, writer, before: False)


def files_go_that_the_bucket_does_not_have(patch: pytest.MonkeyPatch) -> None:
    def release(self: Retention, *, past_subscriptions, is_enough) -> int:
        return self._wal.trim(self._wal.synced)

    patch.setattr(Retention, "release", release)


def open_topics_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A topic that is opened on a full disk takes appends."""
    patch.setattr(DiskGuard, "add", lambda self, topic: None)


PLANTED = plants_of(__name__)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(monkeypatch, plant):
    catch("disk", plant, monkeypatch, run_seed, SEEDS_MAX)
