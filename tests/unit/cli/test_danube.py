"""`ister danube import` and `export`: cursors from Danube, and what Danube needs of topics."""

import base64
import json

import pytest

from tests.support.cases import each
from tests.support.commands import DataDirectory
from tests.support.danube_files import TOPIC, DanubeBucket

POLICY = {
    "max_redelivery_count": 3,
    "ack_timeout_ms": 10_000,
    "base_redelivery_delay_ms": 500,
    "max_redelivery_delay_ms": 5_000,
    "backoff_strategy": "Fixed",
    "dead_letter_topic": "/default/dead",
    "poison_policy": "DeadLetter",
}
PREFIX = "/topics/default/orders/subscriptions/"
METADATA = {
    "/topics/default/orders/delivery": "Reliable",
    f"{PREFIX}billing": {
        "subscription_name": "billing",
        "subscription_type": 1,
        "consumer_id": 77,
        "consumer_name": "c",
    },
    f"{PREFIX}billing/cursor": 11,
    f"{PREFIX}billing/failure_policy": POLICY,
    f"{PREFIX}billing/dispatch_config": {"max_unacked_messages": 25},
    f"{PREFIX}keys": {"subscription_name": "keys", "subscription_type": 3, "consumer_name": "k"},
    f"{PREFIX}keys/cursor": 0,
}


class Place(DataDirectory):
    def load(self, capsys, metadata, *arguments):
        file = self.path / "metadata.json"
        file.write_text(metadata if isinstance(metadata, str) else json.dumps(metadata))
        return self.run(capsys, "danube", "import", file, *arguments)


@pytest.fixture
def place(tmp_path, capsys):
    place = Place(tmp_path)
    DanubeBucket(tmp_path / "objects").put("0.9", 0, 20)
    assert place.run(capsys, "recover")[0] == 0
    return place


def etcd(metadata):
    """The same as etcdctl prints it."""

    def encoded(text):
        return base64.b64encode(text.encode()).decode()

    return json.dumps(
        {
            "header": {"revision": 5},
            "kvs": [
                {"key": encoded(key), "value": encoded(json.dumps(value))}
                for key, value in metadata.items()
            ],
        }
    )


@pytest.mark.parametrize("form", [json.dumps, etcd])
def test_subscriptions_begin_behind_what_danube_had_acknowledged(place, capsys, form):
    code, printed = place.load(capsys, form(METADATA))
    assert (code, printed["errors"]) == (0, [])
    assert printed["subscriptions"] == [
        {"topic": TOPIC, "subscription": "billing", "type": "shared", "cursor": 12},
        {"topic": TOPIC, "subscription": "keys", "type": "key_shared", "cursor": 1},
    ]
    _, topic = place.run(capsys, "topics", "describe", TOPIC)
    found = {one["name"]: one for one in topic["subscriptions"]}
    assert (found["billing"]["cursor"], found["keys"]["cursor"]) == (12, 1)


def test_dry_run_creates_nothing_and_a_second_import_changes_nothing(place, capsys):
    code, printed = place.load(capsys, METADATA, "--dry-run")
    assert (code, printed["subscriptions"][0]["cursor"]) == (0, 12)
    _, topic = place.run(capsys, "topics", "describe", TOPIC)
    assert topic["subscriptions"] == []
    place.load(capsys, METADATA)
    code, printed = place.load(capsys, METADATA | {f"{PREFIX}billing/cursor": 3})
    assert (code, printed["subscriptions"][0]["cursor"]) == (0, 12)


@pytest.mark.parametrize(("where", "cursor"), [("earliest", 0), ("latest", 20)])
def test_subscription_that_acknowledged_nothing_begins_where_it_is_told(
    place, capsys, where, cursor
):
    metadata = {f"{PREFIX}new": {"subscription_name": "new", "subscription_type": 0}}
    code, printed = place.load(capsys, metadata)
    assert code == 1
    assert "has no cursor" in printed["errors"][0]["message"]
    code, printed = place.load(capsys, metadata, "--without-cursor", where)
    assert (code, printed["subscriptions"][0]["cursor"]) == (0, cursor)


def test_topic_that_was_not_recovered_is_an_error(place, capsys):
    metadata = {key.replace("orders", "other"): value for key, value in METADATA.items()}
    code, printed = place.load(capsys, metadata)
    assert code == 1
    assert {error["code"] for error in printed["errors"]} == {"NOT_FOUND"}


@each(
    "metadata",
    [
        "[]",
        "not json",
        '{"kvs": [{"key": "?"}]}',
        {f"{PREFIX}billing": 7},
        {f"{PREFIX}billing": {"subscription_type": 9}},
        {f"{PREFIX}billing/cursor": "11"},
        {f"{PREFIX}billing/failure_policy": {"poison_policy": "Explode"}},
    ],
)
def test_file_that_is_not_danubes_metadata_is_refused(place, capsys, metadata):
    code, printed = place.load(capsys, metadata)
    assert code == 1
    assert printed["errors"][0]["code"] == "INVALID_ARGUMENT"


def test_what_was_imported_is_exported_again(place, capsys):
    place.load(capsys, METADATA)
    code, keys = place.run(capsys, "danube", "export")
    assert code == 0
    segment = next((place.path / "objects").rglob("segments/*"))
    root = "/danube/storage/topics/default/orders/"
    described = keys.pop(f"{root}segments/{0:020d}")
    described.pop("etag")
    assert described == {
        "segment_id": segment.name,
        "start_offset": 0,
        "end_offset": 19,
        "size": segment.stat().st_size,
        "created_at": int(segment.name.split("-")[2].removesuffix(".dnb1")),
        "completed": True,
        "offset_index": [[0, 0]],
    }
    assert keys.pop(f"{root}segments/cur") == {"start": f"{0:020d}"}
    state = keys.pop(f"{root}state")
    assert (state["sealed"], state["last_committed_offset"]) == (True, 19)
    assert keys.pop("/namespaces/default/topics/default/orders") is None
    for name in ("billing", "keys"):
        options = keys[f"{PREFIX}{name}"]
        assert options["subscription_type"] == METADATA[f"{PREFIX}{name}"]["subscription_type"]
    same = [
        "/topics/default/orders/delivery",
        f"{PREFIX}billing/cursor",
        f"{PREFIX}billing/failure_policy",
        f"{PREFIX}billing/dispatch_config",
        f"{PREFIX}keys/cursor",
    ]
    assert {key: keys[key] for key in same} == {key: METADATA[key] for key in same}


def test_export_refuses_what_danube_would_not_find(place, capsys):
    """Goal: neither messages in local files alone nor objects elsewhere are passed over."""
    with place.open() as log:
        topic = log.topic(TOPIC)
        topic.append(b"new")
        topic.flush()
    code, printed = place.run(capsys, "danube", "export", TOPIC)
    assert (code, printed["errors"][0]["message"]) == (1, "1 messages are not in the bucket")
    with place.open() as log:
        log.topic(TOPIC).upload()
    code, printed = place.run(capsys, "danube", "export", TOPIC)
    assert code == 1
    assert "is not in the layout segments" in printed["errors"][0]["message"]


def test_topic_with_the_layout_segments_goes_back_whole(place, capsys):
    place.write(cloud={"layout": "segments"})
    with place.open() as log:
        topic = log.topic(TOPIC)
        topic.append_many([b"new"] * 5)
        topic.flush()
        topic.upload()
    code, keys = place.run(capsys, "danube", "export", TOPIC)
    assert code == 0
    segments = [value for key, value in keys.items() if "/segments/0" in key]
    assert [(one["start_offset"], one["end_offset"]) for one in segments] == [(0, 19), (20, 24)]
    folder = place.path / "objects/storage/topics/default/orders/segments"
    assert all((folder / one["segment_id"]).stat().st_size == one["size"] for one in segments)
