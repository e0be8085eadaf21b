"""The other values in the metadata store: both directions, Danube's form, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.base.model import AckLevel, Codec
from ister.errors import CorruptDataError
from ister.format.manifest import StagedFile
from ister.format.records import (
    BatchRun,
    Lineage,
    OwnerRecord,
    Progress,
    SealedState,
    TopicRecord,
    UploadSession,
    WriterRecord,
    decode_current,
    decode_owner,
    decode_pointer,
    decode_progress,
    decode_sealed,
    decode_session,
    decode_topic,
    decode_writer,
    encode_current,
    encode_owner,
    encode_progress,
    encode_sealed,
    encode_session,
    encode_topic,
    encode_writer,
)
from tests.support.cases import each

_GOLDEN = Path(__file__).resolve().parents[2] / "golden"
_KEY = "/danube/somewhere"

TOPIC = TopicRecord(
    epoch=3,
    incarnation="0123456789abcdef",
    ack=AckLevel.SYNCED,
    codec=Codec.BINCODE2,
    created_at=1_703_001_234,
    expired_before=100,
    claim="fedcba9876543210",
    lineage=(Lineage(epoch=1, start=0, node="node-a"), Lineage(epoch=3, start=5001, node="node-b")),
    acked_end=5100,
    acked_epoch=3,
)
OWNER = OwnerRecord(node="node-b", epoch=3)
SESSION = UploadSession(
    object_id="data-5001-6000-3.dnb1", start=5001, end=6001, epoch=3, started_at=1_703_001_300
)
SEALED = SealedState(next_offset=5001, node="node-a", epoch=1, sealed_at=1_703_001_290)
WRITER = WriterRecord(
    batch=12,
    is_done=True,
    start=5001,
    end=6001,
    rows=980,
    manifest="staging/default/orders/query-1/12/manifest-0123456789abcdef.json",
    epoch=3,
    incarnation="0123456789abcdef",
    updated_at=1_703_001_400,
)
PROGRESS = Progress(offset=4000, timestamp=1_703_001_280_000, incarnation="0123456789abcdef")

_KINDS = {
    "topic": (encode_topic, decode_topic, TOPIC),
    "owner": (encode_owner, decode_owner, OWNER),
    "current": (encode_current, decode_current, 5001),
    "session": (encode_session, decode_session, SESSION),
    "sealed": (encode_sealed, decode_sealed, SEALED),
    "progress": (encode_progress, decode_progress, PROGRESS),
    "writer": (encode_writer, decode_writer, WRITER),
}


@each("kind", _KINDS)
def test_record_comes_back_as_it_was(kind):
    encode, decode, record = _KINDS[kind]
    assert decode(encode(record), key=_KEY) == record


@each(
    ("name", "kind"),
    [("topic_record", "topic"), ("sealed_state", "sealed"), ("writer_record", "writer")],
)
def test_golden_bytes_are_these(name, kind):
    encode, decode, record = _KINDS[kind]
    golden = (_GOLDEN / f"{name}.json").read_bytes().rstrip(b"\n")
    assert encode(record) == golden
    assert decode(golden, key=_KEY) == record


@given(st.integers(0, 2**63), st.integers(1, 2**62))
def test_pointer_tells_where_the_newest_object_ends_if_it_was_told(start, length):
    whole = decode_pointer(encode_current(start, start + length), key=_KEY)
    assert whole.names(start, start + length)
    assert not whole.names(start, start + length + 1)
    # Danube, and an older Ister, write the start alone.
    assert decode_pointer(b'{"start":"%020d"}' % start, key=_KEY).end is None


# -- topics -------------------------------------------------------------------------------------


@each(("state", "is_open"), [("open", True), ("deleting", False), ("deleted", False)])
def test_topic_is_open_in_one_state_alone(state, is_open):
    fields = {**json.loads(encode_topic(TOPIC)), "state": state}
    assert decode_topic(json.dumps(fields).encode(), key=_KEY).is_open is is_open


def test_topic_record_keeps_what_others_put_into_it():
    fields = {**json.loads(encode_topic(TOPIC)), "partitions": 4, "owner": {"team": "blue"}}
    found = decode_topic(json.dumps(fields).encode(), key=_KEY)
    assert found.more == {"partitions": 4, "owner": {"team": "blue"}}
    assert json.loads(encode_topic(found)) == fields


def test_topic_record_without_acked_end_proves_nothing():
    golden = (_GOLDEN / "topic_record_1.json").read_bytes()
    found = decode_topic(golden, key=_KEY)
    assert found == replace(TOPIC, acked_end=None, acked_epoch=0)
    fields = json.loads(golden)
    del fields["lineage"], fields["state"]
    older = decode_topic(json.dumps(fields).encode(), key=_KEY)
    assert (older.lineage, older.is_open) == ((), True)
    assert not found.is_whole(10**9)


@each(
    ("fields", "tiered", "is_whole"),
    [
        ({}, 5099, False),
        ({}, 5100, True),
        ({}, 5101, True),
        ({"acked_end": 0}, 0, True),
        ({"acked_end": None}, 5100, False),
        ({"acked_epoch": 2}, 5100, False),
        ({"acked_end": None, "ack": AckLevel.TIERED}, 0, True),
        ({"acked_end": None, "ack": AckLevel.MEMORY}, 5100, False),
    ],
)
def test_bucket_is_whole_by_level_or_by_the_mark_of_this_epoch(fields, tiered, is_whole):
    assert replace(TOPIC, **fields).is_whole(tiered) is is_whole


def test_what_others_put_into_a_record_never_hides_its_own_fields():
    found = TopicRecord(
        epoch=3,
        incarnation="x",
        ack=AckLevel.WRITTEN,
        codec=Codec.BINCODE1,
        created_at=1,
        more={"epoch": 99, "state": "deleted"},
    )
    again = decode_topic(encode_topic(found), key=_KEY)
    assert (again.epoch, again.is_open) == (3, True)


# -- seals --------------------------------------------------------------------------------------


@each(
    ("next_offset", "last"), [(0, 0), (1, 0), (2, 1), (5001, 5000)], ids=["empty", "one", "2", "n"]
)
def test_seal_is_inclusive_for_danube_and_tells_empty_from_one_message(next_offset, last):
    state = SealedState(next_offset=next_offset, node="n", epoch=1, sealed_at=5)
    fields = json.loads(encode_sealed(state))
    assert (fields["sealed"], fields["last_committed_offset"]) == (True, last)
    assert decode_sealed(encode_sealed(state), key=_KEY).next_offset == next_offset


def test_seal_of_danube_is_read_by_its_own_fields():
    fields = {"sealed": True, "last_committed_offset": 41, "broker_id": 7, "timestamp": 5}
    found = decode_sealed(json.dumps(fields).encode(), key=_KEY)
    assert found == SealedState(next_offset=42, node="7", epoch=0, sealed_at=5)


def test_seal_that_was_taken_back_is_none():
    fields = {"sealed": False, "last_committed_offset": 0, "broker_id": 7, "timestamp": 5}
    assert decode_sealed(json.dumps(fields).encode(), key=_KEY) is None


# -- sessions and cursors -----------------------------------------------------------------------


def test_cursor_keeps_what_others_put_into_it():
    fields = {"offset": 7, "timestamp": 9, "incarnation": "x", "pending": [1, 2]}
    found = decode_progress(json.dumps(fields).encode(), key=_KEY)
    assert found.more == {"pending": [1, 2]}
    assert json.loads(encode_progress(found)) == fields


# -- writers of batches -------------------------------------------------------------------------


@each("name", sorted(json.loads(encode_writer(WRITER))))
def test_writers_record_needs_all_of_its_fields(name):
    fields = json.loads(encode_writer(WRITER))
    del fields[name]
    with pytest.raises(CorruptDataError):
        decode_writer(json.dumps(fields).encode(), key=_KEY)


def test_runs_and_digest_of_a_writers_record_come_back_and_may_be_missing():
    record = replace(WRITER, runs=(BatchRun(0, 10, 5), BatchRun(5, 20, 2)), digest=0)
    stored = json.loads(encode_writer(record))
    assert (stored["runs"], stored["digest"]) == ([[0, 10, 5], [5, 20, 2]], 0)
    assert decode_writer(encode_writer(record), key=_KEY) == record
    assert {"runs", "digest"}.isdisjoint(json.loads(encode_writer(WRITER)))


def test_files_are_where_an_earlier_ister_expects_the_manifests_key():
    """It refuses such a record, instead of taking the batch for one that needs no files."""
    file = StagedFile(key="a", rows=1, size_bytes=2, position=0)
    stored = json.loads(encode_writer(replace(WRITER, files=(file,))))
    assert stored["manifest"] == {
        "key": WRITER.manifest,
        "version": 2,
        "files": [{"key": "a", "position": 0, "rows": 1, "size": 2}],
    }
    assert set(stored) == set(json.loads(encode_writer(WRITER)))
    for files in ((), (file, StagedFile(key="b", rows=3, size_bytes=4, position=None))):
        record = replace(WRITER, files=files)
        assert decode_writer(encode_writer(record), key=_KEY) == record


@each("manifest", [{}, {"key": 1}, {"key": "k", "version": 2}, {"version": 2, "files": []}])
def test_manifest_in_a_record_is_whole_or_the_record_is_damaged(manifest):
    fields = {**json.loads(encode_writer(WRITER)), "manifest": manifest}
    with pytest.raises(CorruptDataError):
        decode_writer(json.dumps(fields).encode(), key=_KEY)


# -- what is refused ----------------------------------------------------------------------------

_WRONG = {
    "empty": b"",
    "cut": b'{"epoch": 1',
    "not UTF-8": b"\xff\xfe",
    "a list": b"[1]",
    "a text": b'"open"',
    "null": b"null",
    "nothing in it": b"{}",
    "nested without an end": b"[" * 60_000,
}


@each("kind", _KINDS)
@each("data", _WRONG.values(), ids=_WRONG)
def test_bytes_that_are_no_record_are_refused_with_their_key(kind, data):
    _, decode, _ = _KINDS[kind]
    with pytest.raises(CorruptDataError) as refused:
        decode(data, key=_KEY)
    assert refused.value.path == _KEY


_NUMBERS = {
    "topic": "epoch",
    "owner": "epoch",
    "current": "start",
    "session": "end_offset",
    "sealed": "timestamp",
    "progress": "offset",
    "writer": "next_offset",
}


@each("kind", _KINDS)
@each("text", ["null", '"x"', "[]", "{}", "NaN", "Infinity"])
def test_number_of_another_kind_is_refused_with_its_key(kind, text):
    encode, decode, record = _KINDS[kind]
    fields = json.loads(encode(record))
    fields[_NUMBERS[kind]] = "@"
    data = json.dumps(fields).replace('"@"', text).encode()
    with pytest.raises(CorruptDataError) as refused:
        decode(data, key=_KEY)
    assert refused.value.path == _KEY


@each(
    ("name", "value"),
    [
        ("ack", "sometimes"),
        ("codec", "bincode9"),
        ("lineage", None),
        ("lineage", [5]),
        ("lineage", [{"epoch": 1}]),
    ],
)
def test_topic_record_with_a_field_of_another_kind_is_refused(name, value):
    fields = {**json.loads(encode_topic(TOPIC)), name: value}
    with pytest.raises(CorruptDataError):
        decode_topic(json.dumps(fields).encode(), key=_KEY)
