"""The messages between a client and a topic's owner: both directions, and whatever else arrives."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from ister.base.model import AckLevel, Codec
from ister.config import load_config
from ister.errors import InvalidRequestError, TopicNameError, UnsupportedVersionError
from ister.format.manifest import StagedFile, decode_manifest, encode_manifest
from ister.topic.batches import AppendedBatch, StagedBatch
from ister.wire.contract import (
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
    decode_appended,
    encode_appended,
    parse_ticket,
)
from ister.wire.settings import decode_settings, encode_settings

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


def test_question_for_no_plan_is_refused():
    fields = {
        "topic": TOPIC,
        "incarnation": "a",
        "epoch": 1,
        "start": 1,
        "bytes_max": 2,
        "span_ms_max": 3,
        "objects_max": 4,
    }
    for wrong in ({"objects_max": 0}, {"objects_max": 10_001}, {"bytes_max": 0}, {"topic": "x"}):
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
    topic=NAMES, time_ms=st.integers(-(2**62), 2**63 - 1), offsets=RANGES, found=st.none() | NUMBERS
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
    files=st.lists(st.tuples(KEYS, NUMBERS, NUMBERS, st.none() | NUMBERS), max_size=4),
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
            StagedFile(
                key=f"staging{topic}/{key}"
                if position is None
                else f"staging/shared.files/{writer}/{key}",
                rows=rows,
                size_bytes=size,
                position=position,
            )
            for key, rows, size, position in files
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


def test_answer_to_a_batch_arrives_as_it_was_sent():
    for is_known in (False, True):
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
    assert FramesTicket(topic=TOPIC, start=1, end=2, incarnation="ä", epoch=3).to_json() == (
        b'{"version":1,"kind":"frames","topic":"/default/orders","start":1,"end":2,'
        b'"incarnation":"\\u00e4","epoch":3}'
    )
    planned = UploadPlanned(start=1, synced=9, codec=Codec.BINCODE2, objects=((5, 100),))
    assert planned.to_json() == (
        b'{"version":1,"start":1,"synced":9,"codec":"bincode2",'
        b'"objects":[{"end":5,"size":100}],"error":null}'
    )
    assert A_STATUS.to_json() == (
        b'{"version":1,"topic":"/default/orders","incarnation":"a","earliest":0,"trimmed":1,'
        b'"tiered":2,"synced":3,"written":4,"next":5,"codec":"bincode2","ack":"synced"}'
    )


@pytest.mark.parametrize("is_other", [True, False])
def test_result_of_a_batch_arrives_also_from_an_older_broker(is_other):
    appended = AppendedBatch(start=1, end=4, rows=2, is_known=True, is_other=is_other)
    sent = encode_appended(appended)
    assert decode_appended(sent) == appended
    assert (b'"other"' in sent) == is_other


def test_digest_of_a_file_arrives():
    files = tuple(
        StagedFile(key=f"staging/shared.files/q/{n}", rows=1, size_bytes=1, position=0, digest=n)
        for n in (None, 0, 7)
    )
    sent = AppendStaged(topic=TOPIC, staged=StagedBatch(writer="q", batch=0, files=files))
    assert AppendStaged.from_json(sent.to_json()) == sent
    assert decode_manifest(encode_manifest(files), key="m") == files


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


@pytest.mark.parametrize("name", DECODERS)
def test_something_else_is_refused(name):
    decode, data = DECODERS[name]
    for strange in STRANGE:
        with pytest.raises(InvalidRequestError):
            decode(strange)
    message = json.loads(data)
    with pytest.raises(UnsupportedVersionError) as caught:
        decode(json.dumps({**message, "version": 2}).encode())
    assert "version 1" in caught.value.hint
    for field in message.keys() - {"version"}:
        less = {key: value for key, value in message.items() if key != field}
        if (name, field) != ("any_ticket_for_frames", "kind"):
            with pytest.raises(InvalidRequestError):
                decode(json.dumps(less).encode())


@pytest.mark.parametrize("name", DECODERS)
def test_field_that_is_new_is_ignored_and_one_of_another_type_is_refused(name):
    decode, data = DECODERS[name]
    message = json.loads(data)
    assert decode(json.dumps({**message, "later": {"deep": [1]}}).encode()) == decode(data)
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


def test_message_that_is_too_large_is_refused_unread():
    """Parsing holds the interpreter lock, whatever client sent the message."""
    short = b'{"version":1,"more":"' + b"x" * 256 * 1024 + b'"}'
    for read in (parse_ticket, PutOpen.from_json, PutBatch.from_json, FindTime.from_json):
        with pytest.raises(InvalidRequestError, match="bytes"):
            read(short)
    for read in (AppendStaged.from_json, WatermarksRequest.from_json):
        with pytest.raises(InvalidRequestError, match="bytes"):
            read(b'{"version":1,"more":"' + b"x" * (8 << 20) + b'"}')
        with pytest.raises(InvalidRequestError, match="lists and objects"):
            read(b'{"version":1,"more":[' + b"[]," * 200_000 + b"[]]}")


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


def test_invalid_topic_name_is_refused():
    for name in ("orders", "/a", "/a/b/c", "/default/..", "/default/cur", ""):
        check_topic_name(name)


def check_topic_name(name):
    for make in (
        lambda: replace(A_TICKET, topic=name),
        lambda: WatermarksRequest(topics=(TOPIC, name)),
        lambda: replace(A_STATUS, topic=name),
        lambda: FindTime(topic=name, publish_time_ms=1, start=0, end=1),
        lambda: a_batch(topic=name),
    ):
        with pytest.raises(TopicNameError):
            make()


def test_invalid_range_is_refused():
    for start, end in ((2, 1), (-1, 1), (0, 1 << 63)):
        with pytest.raises(InvalidRequestError):
            replace(A_TICKET, start=start, end=end)
        with pytest.raises(InvalidRequestError):
            FindTime(topic=TOPIC, publish_time_ms=1, start=start, end=end)


def test_batch_names_nothing_but_its_own_staged_files():
    """Goal: staged files are removed in the end, so a request must not name another object."""
    for key in (
        "storage/topics/default/orders/objects/data-0-9.dnb1",
        "staging/default/others/query/7/part-0",
        "staging/default/orders",
        "staging/default/orders/",
        "staging/default/orders/../../../storage/topics/default/orders/topic.json",
        "staging/default/orders/./part-0",
        "staging/default/orders//part-0",
        "/staging/default/orders/part-0",
        "",
    ):
        with pytest.raises(InvalidRequestError):
            a_batch(key)
        message = json.loads(a_batch().to_json())
        message["files"][0]["key"] = key
        with pytest.raises(InvalidRequestError):
            AppendStaged.from_json(json.dumps(message).encode())


# -- without pyarrow --------------------------------------------------------------------------


def test_without_pyarrow_the_client_says_what_to_install():
    program = """
import sys
sys.modules["pyarrow"] = None
from ister.wire.contract import RangeTicket
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
