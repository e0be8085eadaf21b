"""The messages between a client and a topic's owner: both directions, and whatever else arrives."""

import inspect
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from ister import errors
from ister.client.contract import (
    AppendStaged,
    FindTime,
    FoundTime,
    FramesTicket,
    PlanUpload,
    PutAck,
    PutBatch,
    PutOpen,
    RangeTicket,
    TopicNames,
    TopicStatus,
    UploadPlanned,
    WatermarksRequest,
    carries_error,
    decode_appended,
    decode_error,
    decode_settings,
    encode_appended,
    encode_error,
    encode_settings,
    parse_ticket,
)
from ister.config import load_config
from ister.errors import (
    CorruptDataError,
    DataGapError,
    DiskError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    OffsetOutOfRangeError,
    TopicNameError,
    UnavailableError,
    UnsupportedVersionError,
)
from ister.format.manifest import StagedFile
from ister.model import AckLevel, Codec
from ister.topic.batches import AppendedBatch, StagedBatch

TOPIC = "/default/orders"
EXAMPLES = settings(max_examples=150, deadline=None, print_blob=True)
NUMBERS = st.sampled_from((0, 1, 2**31, 2**63 - 1)) | st.integers(0, 2**63 - 1)
RANGES = st.tuples(NUMBERS, NUMBERS).map(sorted)
NAMES = st.from_regex(r"/[A-Za-z0-9_-]{1,9}/[A-Za-z0-9_-]{1,9}", fullmatch=True).filter(
    lambda name: "cur" not in name.split("/")
)
# Whatever a program may put into a text; JSON alone could also say half a character.
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
KEYS = st.from_regex(r"[a-z0-9]{1,5}(/[a-z0-9]{1,5}){0,2}", fullmatch=True)


# -- messages ---------------------------------------------------------------------------------


@EXAMPLES
@given(
    topic=NAMES, offsets=RANGES, incarnation=TEXTS, columns=st.none() | st.lists(TEXTS).map(tuple)
)
def test_ticket_arrives_as_it_was_sent(topic, offsets, incarnation, columns):
    start, end = offsets
    ticket = RangeTicket(
        topic=topic, start=start, end=end, incarnation=incarnation, columns=columns
    )
    assert RangeTicket.from_json(ticket.to_json()) == ticket


@EXAMPLES
@given(topics=st.lists(NAMES, max_size=5).map(tuple))
def test_lists_of_topics_arrive_as_they_were_sent(topics):
    request, names = WatermarksRequest(topics=topics), TopicNames(topics=topics)
    assert WatermarksRequest.from_json(request.to_json()) == request
    assert TopicNames.from_json(names.to_json()) == names


@EXAMPLES
@given(
    topic=NAMES,
    incarnation=TEXTS,
    numbers=st.tuples(*[NUMBERS] * 6),
    codec=st.sampled_from(Codec),
    ack=st.sampled_from(AckLevel),
)
def test_status_arrives_as_it_was_sent(topic, incarnation, numbers, codec, ack):
    earliest, trimmed, tiered, synced, written, next_offset = numbers
    status = TopicStatus(
        topic=topic,
        incarnation=incarnation,
        earliest=earliest,
        trimmed=trimmed,
        tiered=tiered,
        synced=synced,
        written=written,
        next=next_offset,
        codec=codec,
        ack=ack,
    )
    arrived = TopicStatus.from_json(status.to_json())
    assert arrived == status
    assert (type(arrived.codec), type(arrived.ack)) == (Codec, AckLevel)


@EXAMPLES
@given(topic=NAMES, offsets=RANGES, incarnation=TEXTS, epoch=NUMBERS)
def test_tickets_of_both_kinds_are_told_apart(topic, offsets, incarnation, epoch):
    start, end = offsets
    frames = FramesTicket(topic=topic, start=start, end=end, incarnation=incarnation, epoch=epoch)
    rows = RangeTicket(topic=topic, start=start, end=end, incarnation=incarnation)
    assert parse_ticket(frames.to_json()) == FramesTicket.from_json(frames.to_json()) == frames
    assert parse_ticket(rows.to_json()) == rows
    for decode, other in ((RangeTicket.from_json, frames), (FramesTicket.from_json, rows)):
        with pytest.raises(InvalidRequestError):
            decode(other.to_json())


@EXAMPLES
@given(
    topic=NAMES,
    incarnation=TEXTS,
    epoch=NUMBERS,
    start=st.none() | NUMBERS,
    size=NUMBERS.filter(bool),
    span=NUMBERS,
    objects=st.integers(1, 10_000),
)
def test_question_for_a_plan_arrives_as_it_was_sent(
    topic, incarnation, epoch, start, size, span, objects
):
    asked = PlanUpload(
        topic=topic,
        incarnation=incarnation,
        epoch=epoch,
        start=start,
        bytes_max=size,
        span_ms_max=span,
        objects_max=objects,
    )
    assert PlanUpload.from_json(asked.to_json()) == asked


@pytest.mark.parametrize(
    "wrong", [{"objects_max": 0}, {"objects_max": 10_001}, {"bytes_max": 0}, {"topic": "x"}]
)
def test_question_for_no_plan_is_refused(wrong):
    fields = {
        "topic": TOPIC,
        "incarnation": "a",
        "epoch": 1,
        "start": 1,
        "bytes_max": 2,
        "span_ms_max": 3,
        "objects_max": 4,
    }
    with pytest.raises((InvalidRequestError, TopicNameError)):
        PlanUpload(**{**fields, **wrong})


@EXAMPLES
@given(
    start=NUMBERS,
    synced=NUMBERS,
    codec=st.sampled_from(Codec),
    objects=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5).map(tuple),
    error=st.none() | TEXTS,
)
def test_plan_arrives_as_it_was_sent(start, synced, codec, objects, error):
    planned = UploadPlanned(start=start, synced=synced, codec=codec, objects=objects, error=error)
    assert UploadPlanned.from_json(planned.to_json()) == planned


@EXAMPLES
@given(
    topic=NAMES,
    time_ms=st.integers(-(2**62), 2**63 - 1),
    offsets=RANGES,
    found=st.none() | NUMBERS,
)
def test_search_by_time_arrives_as_it_was_sent(topic, time_ms, offsets, found):
    start, end = offsets
    asked = FindTime(topic=topic, publish_time_ms=time_ms, start=start, end=end)
    assert FindTime.from_json(asked.to_json()) == asked
    assert FoundTime.from_json(FoundTime(offset=found).to_json()) == FoundTime(offset=found)


@EXAMPLES
@given(
    topic=NAMES,
    writer=TEXTS,
    batch=NUMBERS,
    is_repeatable=st.booleans(),
    files=st.lists(st.tuples(KEYS, NUMBERS, NUMBERS), max_size=4),
    create=st.booleans(),
    ack=st.none() | st.sampled_from(AckLevel),
    codec=st.none() | st.sampled_from(Codec),
)
def test_batch_arrives_as_it_was_sent(
    topic, writer, batch, is_repeatable, files, create, ack, codec
):
    staged = StagedBatch(
        writer=writer,
        batch=batch,
        is_repeatable=is_repeatable,
        files=tuple(
            StagedFile(key=f"staging{topic}/{key}", rows=rows, size_bytes=size)
            for key, rows, size in files
        ),
    )
    asked = AppendStaged(topic=topic, staged=staged, create=create, ack=ack, codec=codec)
    assert AppendStaged.from_json(asked.to_json()) == asked


@EXAMPLES
@given(
    topic=NAMES,
    producer=st.none() | TEXTS,
    numbers=st.tuples(*[NUMBERS] * 5),
    create=st.booleans(),
    ack=st.none() | st.sampled_from(AckLevel),
)
def test_rows_and_their_answers_arrive_as_they_were_sent(topic, producer, numbers, create, ack):
    epoch, sequence, start, end, known = numbers
    opened = PutOpen(topic=topic, producer=producer, epoch=epoch, create=create, ack=ack)
    assert PutOpen.from_json(opened.to_json()) == opened
    batch = PutBatch(sequence=sequence)
    assert PutBatch.from_json(batch.to_json()) == batch
    answer = PutAck(sequence=sequence, start=start, end=end, known=known)
    assert PutAck.from_json(answer.to_json()) == answer


@pytest.mark.parametrize("is_known", [False, True])
def test_answer_to_a_batch_arrives_as_it_was_sent(is_known):
    appended = AppendedBatch(start=5, end=17, rows=10, is_known=is_known)
    assert decode_appended(encode_appended(appended)) == appended


def test_bytes_of_version_1_stay_what_they_are():
    """Goal: a client and a server of different releases understand each other."""
    ticket = RangeTicket(
        topic=TOPIC, start=3, end=9, incarnation="a1", columns=("offset", "payload")
    )
    assert ticket.to_json() == (
        b'{"version":1,"topic":"/default/orders","start":3,"end":9,"incarnation":"a1",'
        b'"columns":["offset","payload"]}'
    )
    assert a_batch().to_json() == (
        b'{"version":1,"topic":"/default/orders","writer":"query","batch":7,"repeatable":true,'
        b'"files":[{"key":"staging/default/orders/query/7/part-0","rows":2,"size":300}],'
        b'"create":true,"ack":"synced","codec":null}'
    )
    assert encode_appended(AppendedBatch(start=5, end=7, rows=2, is_known=True)) == (
        b'{"version":1,"start":5,"end":7,"rows":2,"known":true}'
    )
    assert PutOpen(topic=TOPIC, producer="p", epoch=3).to_json() == (
        b'{"version":1,"topic":"/default/orders","producer":"p","epoch":3,"create":false,'
        b'"ack":null}'
    )
    assert PutBatch(sequence=9).to_json() == b'{"version":1,"sequence":9}'
    assert PutAck(sequence=9, start=5, end=7, known=1).to_json() == (
        b'{"version":1,"sequence":9,"start":5,"end":7,"known":1}'
    )


def a_batch(key="staging/default/orders/query/7/part-0", **fields):
    staged = StagedBatch(
        writer="query", batch=7, files=(StagedFile(key=key, rows=2, size_bytes=300),)
    )
    return AppendStaged(
        **{
            "topic": TOPIC,
            "staged": staged,
            "create": True,
            "ack": AckLevel.SYNCED,
            "codec": None,
            **fields,
        }
    )


# -- what else may arrive ---------------------------------------------------------------------

A_TICKET = RangeTicket(topic=TOPIC, start=1, end=2, incarnation="a", columns=("offset",))
A_STATUS = TopicStatus(
    topic=TOPIC,
    incarnation="a",
    earliest=0,
    trimmed=1,
    tiered=2,
    synced=3,
    written=4,
    next=5,
    codec=Codec.BINCODE2,
    ack=AckLevel.SYNCED,
)
DECODERS = {
    "ticket": (RangeTicket.from_json, A_TICKET.to_json()),
    "watermarks": (WatermarksRequest.from_json, WatermarksRequest(topics=(TOPIC,)).to_json()),
    "status": (TopicStatus.from_json, A_STATUS.to_json()),
    "topics": (TopicNames.from_json, TopicNames(topics=(TOPIC,)).to_json()),
    "find_time": (
        FindTime.from_json,
        FindTime(topic=TOPIC, publish_time_ms=1, start=2, end=3).to_json(),
    ),
    "found_time": (FoundTime.from_json, FoundTime(offset=3).to_json()),
    "append_staged": (AppendStaged.from_json, a_batch().to_json()),
    "appended": (
        decode_appended,
        encode_appended(AppendedBatch(start=1, end=2, rows=1, is_known=False)),
    ),
    "put_open": (
        PutOpen.from_json,
        PutOpen(topic=TOPIC, producer="p", epoch=1, ack=AckLevel.SYNCED).to_json(),
    ),
    "put_batch": (PutBatch.from_json, PutBatch(sequence=1).to_json()),
    "put_ack": (PutAck.from_json, PutAck(sequence=1, start=2, end=3, known=1).to_json()),
    "frames": (
        FramesTicket.from_json,
        FramesTicket(topic=TOPIC, start=1, end=2, incarnation="a", epoch=3).to_json(),
    ),
    "any_ticket": (parse_ticket, A_TICKET.to_json()),
    "any_ticket_for_frames": (
        parse_ticket,
        FramesTicket(topic=TOPIC, start=1, end=2, incarnation="a", epoch=3).to_json(),
    ),
    "plan_upload": (
        PlanUpload.from_json,
        PlanUpload(
            topic=TOPIC,
            incarnation="a",
            epoch=5,
            start=1,
            bytes_max=2,
            span_ms_max=3,
            objects_max=4,
        ).to_json(),
    ),
    "upload_planned": (
        UploadPlanned.from_json,
        UploadPlanned(start=1, synced=9, codec=Codec.BINCODE2, objects=((5, 100),)).to_json(),
    ),
    "storage": (decode_settings, encode_settings(load_config("/data", {}))),
}
STRANGE = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"17",
    b'"version"',
    b"{}",
    b'{"version":1}',
    b'{"version":"1"}',
    b'{"version":true}',
    b'{"version":null}',
    b'{"version":1.0}',
    b'{"version":' + b"1" * 5000 + b"}",
    b"[" * 100_000,
    b'{"version":1,"topic":',
]


@pytest.mark.parametrize("data", STRANGE, ids=range(len(STRANGE)))
@pytest.mark.parametrize("name", DECODERS)
def test_something_else_is_an_invalid_request(name, data):
    decode, _ = DECODERS[name]
    with pytest.raises(InvalidRequestError):
        decode(data)


@pytest.mark.parametrize(
    "read", [parse_ticket, PutOpen.from_json, PutBatch.from_json, FindTime.from_json]
)
def test_short_message_that_is_long_is_refused_unread(read):
    data = b'{"version":1,"more":"' + b"x" * 256 * 1024 + b'"}'
    with pytest.raises(InvalidRequestError, match="bytes"):
        read(data)


@pytest.mark.parametrize("read", [AppendStaged.from_json, WatermarksRequest.from_json])
def test_long_message_has_its_bounds_too(read):
    """Reading one holds the interpreter lock, whoever has sent it."""
    with pytest.raises(InvalidRequestError, match="bytes"):
        read(b'{"version":1,"more":"' + b"x" * (8 << 20) + b'"}')
    with pytest.raises(InvalidRequestError, match="lists and objects"):
        read(b'{"version":1,"more":[' + b"[]," * 200_000 + b"[]]}")


@pytest.mark.parametrize("name", DECODERS)
def test_newer_version_is_told_from_damage(name):
    decode, data = DECODERS[name]
    newer = json.dumps({**json.loads(data), "version": 2}).encode()
    with pytest.raises(UnsupportedVersionError) as caught:
        decode(newer)
    assert "version 1" in caught.value.hint


@pytest.mark.parametrize("name", DECODERS)
def test_field_that_is_not_known_is_passed_over(name):
    decode, data = DECODERS[name]
    more = json.dumps({**json.loads(data), "later": {"deep": [1]}}).encode()
    assert decode(more) == decode(data)


@pytest.mark.parametrize("name", DECODERS)
def test_field_that_is_missing_or_of_another_kind_is_an_invalid_request(name):
    decode, data = DECODERS[name]
    message = json.loads(data)
    tried = 0
    for field in message.keys() - {"version"}:
        for value in (None, 1.5, True, -1, 1 << 63, "\ud800", {}, [None], [[]], ["\udfff"], "x"):
            changed = {**message, field: value}
            try:
                decoded = decode(json.dumps(changed).encode())
            except InvalidRequestError:
                tried += 1
            else:
                # Then it may have this value, and it counts.
                assert (decoded == decode(data)) == (value == message[field]), (field, value)
    assert tried > 0


@EXAMPLES
@given(name=st.sampled_from(sorted(DECODERS)), data=st.data())
def test_damaged_message_is_decoded_or_refused(name, data):
    """Goal: no bytes whatever raise anything but our errors."""
    decode, whole = DECODERS[name]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position : position + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=3)
        )
    with suppress(InvalidRequestError, UnsupportedVersionError):
        decode(bytes(damaged))


@pytest.mark.parametrize("name", ["orders", "/a", "/a/b/c", "/default/..", "/default/cur", ""])
def test_topic_that_is_no_name_is_refused(name):
    for make in (
        lambda: replace(A_TICKET, topic=name),
        lambda: WatermarksRequest(topics=(TOPIC, name)),
        lambda: replace(A_STATUS, topic=name),
        lambda: FindTime(topic=name, publish_time_ms=1, start=0, end=1),
        lambda: a_batch(topic=name),
    ):
        with pytest.raises(TopicNameError):
            make()


@pytest.mark.parametrize(("start", "end"), [(2, 1), (-1, 1), (0, 1 << 63)])
def test_range_that_is_none_is_refused(start, end):
    with pytest.raises(InvalidRequestError):
        replace(A_TICKET, start=start, end=end)
    with pytest.raises(InvalidRequestError):
        FindTime(topic=TOPIC, publish_time_ms=1, start=start, end=end)


@pytest.mark.parametrize(
    "key",
    [
        "storage/topics/default/orders/objects/data-0-9.dnb1",
        "staging/default/others/query/7/part-0",
        "staging/default/orders",
        "staging/default/orders/",
        "staging/default/orders/../../../storage/topics/default/orders/topic.json",
        "staging/default/orders/./part-0",
        "staging/default/orders//part-0",
        "/staging/default/orders/part-0",
        "",
    ],
)
def test_batch_names_nothing_but_its_own_staged_files(key):
    """Goal: staged files are removed in the end, so nobody may have another object removed."""
    with pytest.raises(InvalidRequestError):
        a_batch(key)
    message = json.loads(a_batch().to_json())
    message["files"][0]["key"] = key
    with pytest.raises(InvalidRequestError):
        AppendStaged.from_json(json.dumps(message).encode())


# -- errors -----------------------------------------------------------------------------------


def an_error(kind):
    """An error of any class."""
    if kind is OffsetOutOfRangeError:
        return kind("no such offset", earliest=5, next=9, topic=TOPIC, offset=17)
    if kind is DataGapError:
        return kind("a hole", start=5, end=9, topic=TOPIC)
    if kind is DiskError:
        return kind("the disk failed", errno=28, path="/data/wal.log")
    return kind("it failed", topic=TOPIC, offset=7, path="a/b", position=3, hint="wait")


KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, IsterError)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("Flight returned internal error, with message: ", ". Detail: Failed"),
        ("", '. Detail: Failed. gRPC client debug context: UNKNOWN:{"code":"X"}. Client context'),
    ],
)
def test_error_of_every_class_arrives_with_all_it_carries(kind, before, after):
    sent = an_error(kind)
    text = before + encode_error(sent) + after
    assert carries_error(text)
    arrived = decode_error(text)
    assert type(arrived) is kind
    assert vars(arrived) == vars(sent)
    assert str(arrived) == str(sent)


@EXAMPLES
@given(message=st.text(max_size=30), hint=st.none() | st.text(max_size=30))
def test_text_of_an_error_arrives_as_it_was(message, hint):
    sent = CorruptDataError(message, hint=hint, offset=0)
    assert vars(decode_error(encode_error(sent))) == vars(sent)


def test_disk_error_without_a_number_arrives():
    assert decode_error(encode_error(DiskError("gone", errno=None))).errno is None


def test_class_that_is_not_of_the_tree_arrives_as_the_nearest_one_that_is():
    class LocalError(CorruptDataError):
        pass

    assert type(decode_error(encode_error(LocalError("x", offset=3)))) is CorruptDataError


def test_mistake_of_the_server_is_not_blamed_on_the_call():
    arrived = decode_error(encode_error(ZeroDivisionError("division by zero")))
    assert type(arrived) is InvariantError
    assert "ZeroDivisionError: division by zero" in arrived.message


@pytest.mark.parametrize(
    "error",
    [
        CorruptDataError("m" * 10_000, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError("ä" * 10_000, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError('"\0' * 10_000, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError("\U0001f600" * 300, topic=TOPIC, offset=3, hint="read on"),
        CorruptDataError("short", topic=TOPIC, offset=3, hint="h" * 10_000),
        CorruptDataError("m" * 5000, topic="t" * 5000, offset=3, hint="h" * 5000, path="p" * 5000),
    ],
)
def test_long_error_is_cut_to_what_a_header_takes(error):
    text = encode_error(error)
    assert len(text.encode()) <= 2000
    arrived = decode_error(text)
    assert type(arrived) is CorruptDataError
    assert arrived.offset == 3
    for name in ("message", "topic", "hint", "path"):
        sent, got = getattr(error, name), getattr(arrived, name)
        assert got == sent or sent.startswith(got.removesuffix("..."))
    if error.hint == "read on":
        assert (arrived.topic, arrived.hint) == (TOPIC, "read on")
        assert arrived.message.startswith(error.message[:10])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "failed to connect to all addresses",
        "Socket closed\nTraceback (most recent call last):",
        '{"code":',
        '{"code":"NotFoundError","message":"cut sho',
        '{"code":' + "[" * 100_000,
        '{"code":"NewerError","message":"x","offset":3}',
        '{"code":"check","message":"x"}',
        '{"code":"__doc__","message":"x"}',
        '{"code":["NotFoundError"],"message":"x"}',
        '{"code":{},"message":{}}',
        '{"code":"DataGapError","message":"x","start":1}',
        '{"code":"OffsetOutOfRangeError","message":"x","earliest":"1","next":true}',
    ],
)
def test_text_without_a_known_error_means_that_the_server_does_not_answer(text):
    arrived = decode_error(text)
    assert type(arrived) is UnavailableError
    assert arrived.message
    assert "\n" not in arrived.message


def test_fields_of_a_known_error_that_make_no_sense_are_left_out():
    arrived = decode_error(
        '{"code":"NotFoundError","message":7,"topic":[],"offset":"x","hint":{},"position":true}'
    )
    assert type(arrived) is errors.NotFoundError
    assert (arrived.topic, arrived.offset, arrived.hint, arrived.position) == (None,) * 4


# -- settings ---------------------------------------------------------------------------------

SECRETS = {
    "access_key": "AKIASECRET1",
    "access_key_id": "AKIASECRET2",
    "secret_key": "hidden-secret-3",
    "secret_access_key": "hidden-secret-4",
    "session_token": "hidden-secret-5",
    "account_key": "hidden-secret-6",
    "sas_token": "hidden-secret-7",
    "credential": "hidden-secret-8",
    "credential_path": "/etc/hidden-secret-9",
    "token": "hidden-secret-10",
    "server_side_encryption_customer_key": "hidden-secret-11",
    "encryption_key": "hidden-secret-12",
    "external_id": "hidden-secret-13",
    "profile": "hidden-secret-14",
    "invented_next_year": "hidden-secret-15",
}


def test_settings_carry_no_secret():
    tree = {
        "storage": {
            "wal": {"dir": "/data/wal"},
            "cloud": {
                "backend": "s3",
                "root": "s3://bucket/prefix",
                "options": {**SECRETS, "region": "eu-1", "endpoint": "http://127.0.0.1:9000"},
            },
            "metadata": {
                "backend": "etcd",
                "endpoints": ["10.0.0.1:2379", "user:hidden-secret-16@10.0.0.2:2379"],
                "username": "reader",
                "password": "hidden-secret-17",
            },
        }
    }
    data = encode_settings(load_config(tree, {}))
    for value in SECRETS.values():
        assert value not in data.decode()
    assert b"hidden" not in data
    storage = decode_settings(data)["storage"]
    assert storage["cloud"] == {
        "backend": "s3",
        "root": "s3://bucket/prefix",
        "options": {"region": "eu-1", "endpoint": "http://127.0.0.1:9000"},
    }
    assert storage["metadata"] == {
        "backend": "etcd",
        "endpoints": ["10.0.0.1:2379"],
        "username": "reader",
    }


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://key:hidden@127.0.0.1:9000",
        "http://key:hid/den@127.0.0.1:9000",
        "https://account.example.com/?sig=hidden",
        "https://account.example.com/#hidden",
        "key:hidden@127.0.0.1:9000",
    ],
)
def test_address_that_may_hold_credentials_is_not_told(endpoint):
    options = {"endpoint": endpoint, "region": "eu-1"}
    tree = {
        "storage": {
            "wal": {"dir": "/data/wal"},
            "cloud": {"backend": "s3", "root": "s3://bucket", "options": options},
        }
    }
    data = encode_settings(load_config(tree, {}))
    assert b"hid" not in data
    assert decode_settings(data)["storage"]["cloud"]["options"] == {"region": "eu-1"}


@pytest.mark.parametrize(
    "source",
    [
        None,
        "/data",
        {"storage": {"mode": "local_only", "wal": {"dir": "/data/wal"}}},
        {"storage": {"mode": "memory", "ack": "memory"}},
        {
            "storage": {
                "ack": "tiered",
                "codec": "bincode1",
                "max_message_size": 1000,
                "wal": {"dir": "/data/wal", "retention": {"time_minutes": None, "size_mb": 5}},
                "uploader": {"engine": "none"},
                "cloud": {
                    "root": "/bucket",
                    "retention": {"time_minutes": 7},
                    "call_timeout_seconds": 9,
                },
                "cloud_reader": {"read_ahead": False, "on_damage": "skip"},
                "metadata": {"path": "/meta.db", "root_prefix": "/ister", "lease_ttl_seconds": 30},
            }
        },
        {
            "storage": {
                "wal": {"dir": "/data/wal"},
                "cloud": {
                    "backend": "s3",
                    "root": "s3://bucket/a@b",
                    "options": {"region": "eu-1", "virtual_host_style": True},
                },
                "metadata": {"backend": "etcd", "endpoints": ["a:1", "b:2"]},
            }
        },
    ],
)
def test_settings_without_secrets_arrive_as_they_are(source):
    config = load_config(source, {})
    assert load_config(decode_settings(encode_settings(config)), {}) == config


def test_what_is_not_about_the_stores_stays_with_the_server():
    """Goal: who may call a broker, and what it does with topics, is not told to its clients."""
    tree = {
        "broker": {"auth": {"super_admins": ["root-of-all"], "audit_file": "/var/audit"}},
        "dispatch": {"max_unacked_messages": 17},
        "storage": {"mode": "local_only"},
    }
    data = encode_settings(load_config(tree, {}))
    assert set(decode_settings(data)) == {"storage"}
    assert b"root-of-all" not in data
    assert b"audit" not in data


def test_settings_name_places_whatever_directory_the_client_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {
        "storage": {
            "wal": {"dir": "data/wal"},
            "cloud": {"root": "bucket"},
            "metadata": {"path": "meta.db"},
        }
    }
    storage = decode_settings(encode_settings(load_config(tree, {})))["storage"]
    assert storage["wal"]["dir"] == str(tmp_path / "data/wal")
    assert storage["cloud"]["root"] == str(tmp_path / "bucket")
    assert storage["metadata"]["path"] == str(tmp_path / "meta.db")


@pytest.mark.parametrize(
    "settings_tree",
    [
        {"storage": {"cloud": {"root": "s3://elsewhere/${AWS_SECRET_ACCESS_KEY}"}}},
        {"storage": {"metadata": {"endpoints": ["a:1", "${HOME}"]}}},
        {"storage": {"cloud": {"options": {"${HOME}": "x"}}}},
        {"storage": {"wal": {"dir": "\u0024{HOME}"}}},
        [],
        "x",
        None,
    ],
)
def test_settings_that_would_give_away_the_clients_environment_are_refused(settings_tree):
    data = json.dumps({"version": 1, "settings": settings_tree}).encode()
    with pytest.raises(InvalidRequestError):
        decode_settings(data)


def test_settings_nested_without_an_end_are_refused():
    data = b'{"version":1,"settings":' + b'{"a":' * 500 + b"1" + b"}" * 501
    with pytest.raises(InvalidRequestError, match="deep"):
        decode_settings(data)


# -- without pyarrow --------------------------------------------------------------------------


def test_without_pyarrow_the_client_says_what_to_install():
    program = """
import sys
sys.modules["pyarrow"] = None
from ister.client.contract import RangeTicket
from ister.client.flight import FlightClient
from ister.errors import ConfigError
ticket = RangeTicket(topic="/default/orders", start=1, end=2, incarnation="a")
assert RangeTicket.from_json(ticket.to_json()) == ticket
try:
    FlightClient("127.0.0.1:1")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install 'ister[arrow]'" in done.stdout


def test_settings_say_that_etcd_speaks_tls_and_keep_the_certificates():
    metadata = {
        "backend": "etcd",
        "endpoints": ["a:1", "https://b:2"],
        "tls": {"ca_file": "/etc/ca.pem", "cert_file": "/etc/me.pem", "key_file": "/etc/me.key"},
    }
    config = load_config({"storage": {"wal": {"dir": "/wal"}, "metadata": metadata}}, {})
    shared = decode_settings(encode_settings(config))["storage"]["metadata"]
    assert shared == {"backend": "etcd", "endpoints": ["https://a:1", "https://b:2"]}
