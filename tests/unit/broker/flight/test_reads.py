"""What a broker answers to those who upload in an owner's name, when it is not that owner."""

import pytest

pytest.importorskip("pyarrow")

from ister.base.model import AckLevel
from ister.broker.flight import reads
from ister.broker.flight.reads import plan_upload, read_frames
from ister.bucket.terms import newest_terms
from ister.errors import ConflictError, FencedError, UnavailableError
from ister.wire.contract import FramesTicket, PlanUpload
from tests.support.stores import NAME, Pipeline, Site

TEXT = str(NAME)
LEASE_SECONDS = 60


@pytest.fixture
def site():
    with Site() as site:
        yield site


def append(topic, start, end, name):
    for number in range(start, end):
        topic.append(b"%s-%d" % (name, number))
    topic.wait(end - 1, AckLevel.SYNCED)


def owned_by_a(site):
    """A topic with ten messages in the bucket, and ten in the files of node a."""
    topic = site.open("a").topic(TEXT, create=True)
    append(topic, 0, 10, b"old")
    topic.bucket.uploads.upload()
    append(topic, 10, 20, b"a")
    return topic


def a_question(record):
    return PlanUpload(
        topic=TEXT,
        incarnation=record.incarnation,
        epoch=record.epoch,
        start=10,
        bytes_max=1 << 30,
        span_ms_max=1 << 40,
        objects_max=5,
    )


def a_ticket(record):
    return FramesTicket(
        topic=TEXT, start=10, end=20, incarnation=record.incarnation, epoch=record.epoch
    )


def frames_from(topic, record):
    return list(read_frames(topic, a_ticket(record), lambda: None))


def test_broker_that_was_replaced_gives_nothing(site):
    """Goal: its messages are never committed in its successor's name.

    It does not know yet that it was replaced, and its successor has given out the same offsets.
    """
    topic = owned_by_a(site)
    before = topic.bucket.owned.record
    site.clock.advance(LEASE_SECONDS)
    successor = site.open("b").topic(TEXT, take_over=True)
    append(successor, 10, 20, b"b")
    record = Pipeline(site).acting().record
    assert not topic.bucket.owned.is_fenced
    assert record.incarnation == before.incarnation
    with pytest.raises(ConflictError, match="epoch"):
        plan_upload(topic, a_question(record))
    with pytest.raises(ConflictError, match="epoch"):
        frames_from(topic, record)
    # Nor in its own: it may not be the owner any more, and then it knows.
    for expected in (UnavailableError, FencedError):
        with pytest.raises(expected):
            plan_upload(topic, a_question(before))
        with pytest.raises(expected):
            frames_from(topic, before)
        with pytest.raises(FencedError):
            topic.bucket.owned.check()
    assert not successor.bucket.uploads.has_begun
    assert [end for end, _ in plan_upload(successor, a_question(record)).objects] == [20]
    # Before anything is uploaded in its name.
    assert newest_terms(site.objects, NAME) == [(record.epoch, record.claim)]
    assert frames_from(successor, record)


def test_frames_end_when_it_is_not_sure_who_the_owner_is(site, monkeypatch):
    monkeypatch.setattr(reads, "_FRAMES_BYTES", 1)
    topic = owned_by_a(site)
    stream = read_frames(topic, a_ticket(topic.bucket.owned.record), lambda: None)
    next(stream)
    next(stream)
    site.clock.advance(LEASE_SECONDS)
    with pytest.raises(UnavailableError):
        next(stream)
