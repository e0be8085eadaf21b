"""Bugs in noticing an older store, each of which the worlds of restores have to catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ister.bucket import claim, express_collection, terms
from ister.bucket.terms import ForgottenRuns, Term
from ister.bucket.trust import Trust
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import TopicRecord
from ister.metadata.base import Put
from ister.topic import heads, metadata_trust, reconcile
from ister.topic.metadata_trust import MetadataTrust
from ister.topic.stores import Stores
from tests.sim.known_seeds import Plant, catch, plants_of
from tests.sim.test_restores import run

SEEDS_MAX = 2000


def an_older_record_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Neither epochs nor claims are compared."""
    for module in (claim, terms):
        patch.setattr(module, "refuse_older", lambda *_, **__: None)


def the_bucket_is_not_asked_for_terms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ister.topic.stores.newest_terms", lambda store, topic: [])
    patch.setattr(terms, "newest_terms", lambda store, topic: [])


def nothing_is_adopted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stores, "find_forgotten", lambda self, *_, **__: [])


def claims_of_one_epoch_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """An epoch is used again."""
    patch.setattr(
        Term, "is_after", lambda self, record: record is None or self.epoch > record.epoch
    )


def a_term_is_never_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ister.topic.stores.save_term", lambda store, topic, record: None)


def what_the_node_knows_of_its_files_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heads.Heads, "get", lambda self, topic: None)
    patch.setattr(claim, "_find_lost", lambda *_: None)


def local_files_are_joined_to_any_catalog(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile, "_refuse_divergence", lambda *_: None)
    patch.setattr(claim, "refuse_older", lambda *_, **__: None)


def accepting_keeps_an_older_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MetadataTrust, "accept", MetadataTrust.check)


def accepting_goes_on_below_the_highest_epoch(patch: pytest.MonkeyPatch) -> None:
    real = MetadataTrust._newest
    patch.setattr(
        MetadataTrust,
        "_newest",
        lambda self, found: replace(real(self, found), epoch=found.row.epoch),
    )


def accepting_keeps_a_seal(patch: pytest.MonkeyPatch) -> None:
    """The next owner continues where an earlier term ended."""
    patch.setattr(metadata_trust, "Delete", lambda key: Put("/danube/nothing", b""))


def runs_are_not_adopted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ForgottenRuns, "runs_of", lambda self, *_: [])
    patch.setattr("ister.topic.stores.find_runs_from", lambda *_: [])


def express_objects_of_forgotten_owners_are_collected(patch: pytest.MonkeyPatch) -> None:
    """The metadata store is believed, although it may be older than the objects."""
    real = express_collection.is_needed

    def is_needed(run: ObjectDescriptor, record: TopicRecord | None, **others: Any) -> bool:
        is_its = record is not None and run.incarnation == record.incarnation
        return is_its and run.epoch <= record.epoch and real(run, record, **others)

    patch.setattr(express_collection, "is_needed", is_needed)
    patch.setattr(Trust, "is_distrusted", property(lambda self: False))


def accepting_ignores_the_names_of_objects(patch: pytest.MonkeyPatch) -> None:
    """A pipeline has uploaded under a term that its owner has not recorded."""
    real = MetadataTrust._compare_objects

    def compare(self: MetadataTrust, found: Any, *arguments: Any) -> None:
        real(self, found, *arguments)
        found.terms = [term for term in found.terms if term.claim]

    patch.setattr(MetadataTrust, "_compare_objects", compare)


PLANTS = plants_of(__name__)


@pytest.mark.sim
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_worlds_of_restores_catch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    world = "cluster" if plant is nothing_is_adopted else "tier"
    catch("restore", plant, monkeypatch, lambda seed: run(world, seed), SEEDS_MAX)
