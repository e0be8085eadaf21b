"""Keys and records of the registry."""

import pytest

from ister.base.model import TopicName
from ister.errors import CorruptDataError, InvalidRequestError
from ister.topic.schema_kinds import CompatibilityMode, SchemaType, ValidationPolicy
from ister.topic.schema_records import (
    SchemaKeys,
    SubjectRecord,
    TopicConfig,
    VersionEntry,
    VersionRecord,
    check_subject,
)
from tests.support.cases import each

KEYS = SchemaKeys("/ister")
ENTRY = VersionEntry(version=3, schema_type=SchemaType.AVRO, fingerprint="sha256:x", token="t")
SUBJECT = SubjectRecord(
    schema_id=7,
    subject="orders",
    compatibility_mode=CompatibilityMode.FULL,
    versions=(ENTRY,),
    next_version=9,
)
VERSION = VersionRecord(
    version=3,
    schema_type=SchemaType.PROTOBUF,
    type_name="proto",
    definition=b"\x00\xff",
    fingerprint="sha256:x",
    description="é\n",
    created_at=1,
    created_by="me",
    tags=("a", "b"),
)
TOPIC = TopicConfig(subject="orders", policy=ValidationPolicy.ENFORCE, checks_payload=True)


@each("record", [SUBJECT, VERSION, TOPIC])
def test_records_come_back(record):
    assert type(record).from_json(record.to_json(), key="k") == record


@each("kind", [SubjectRecord, VersionRecord, TopicConfig])
@each("data", [b"", b"{}", b"[]", b"null", b"\xff", b'{"versions": 5}'])
def test_damage_is_told_with_its_key(kind, data):
    with pytest.raises(CorruptDataError, match="/a/key"):
        kind.from_json(data, key="/a/key")


def test_keys_are_danubes_for_plain_names():
    assert KEYS.subject("orders-value") == "/ister/schemas/orders-value/metadata"
    assert KEYS.version("orders-value", 2) == "/ister/schemas/orders-value/versions/2"
    assert KEYS.next_id == "/ister/schemas/_global/next_schema_id"
    assert KEYS.id(5) == "/ister/schemas/_index/by_id/5"


def test_no_subject_meets_anothers_keys():
    subjects = ["a", "a/versions", "a/versions/1", "_index", "_global", "_topics/x", "%61", "/n/t"]
    keys = [KEYS.subject(subject) for subject in subjects]
    keys += [KEYS.version(subject, 1) for subject in subjects]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert key.count("/") - KEYS.root.count("/") in (1, 2)
        assert not key.removeprefix(KEYS.root).startswith("_")


def test_topics_are_found_by_their_keys():
    key = KEYS.topic(TopicName.parse("/default/orders"))
    assert key == "/ister/schemas/_topics/default/orders"
    assert KEYS.topic_of(key) == "/default/orders"


@each("subject", ["", " a", "a\n", "a\x00b", "x" * 256, "\u200b"])
def test_subjects_that_cannot_be_seen_are_refused(subject):
    with pytest.raises(InvalidRequestError):
        check_subject(subject)


@each("subject", ["a", "/default/orders", "com.example.User", "ö" * 255, "a b"])
def test_other_subjects_are_taken(subject):
    check_subject(subject)
    assert len(KEYS.version(subject, 2**32).encode()) < 4096


def test_numbers_of_versions_are_given_once():
    left = SUBJECT.without_version(3)
    assert left.latest() is None
    added = left.with_version(VersionEntry(version=9, schema_type="avro", fingerprint="y"))
    assert (added.next_version, [entry.version for entry in added.versions]) == (10, [9])
