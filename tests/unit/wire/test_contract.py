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
from ister.format.manifest import StagedFile
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
LEVELS, CODECS = st.sampled_from(AckLevel), st.sampled_from(Codec)
MARKS = ("earliest", "trimmed", "tiered", "synced", "written", "next")


def ranged(kind, **fields):
    """Messages with a topic, and a range of its offsets."""
    return st.builds(
        lambda span, **rest: kind(start=span[0], end=span[1], **rest), RANGES, topic=NAMES, **fields
    )


@st.composite
def staged_batches(draw):
    """Requests for a batch whose files are its topic's, or shared by several topics."""
    topic, writer = draw(NAMES), draw(TEXTS)
    files = []
    for key, position in draw(st.lists(st.tuples(KEYS, st.none() | NUMBERS), max_size=4)):
        place = topic if position is None else f"/shared.files/{writer}"
        files.append(
            StagedFile(
                key=f"staging{place}/{key}",
                rows=draw(NUMBERS),
                size_bytes=draw(NUMBERS),
                position=position,
                digest=None if position is None else draw(st.none() | NUMBERS),
            )
        )
    return AppendStaged(
        topic=topic,
        staged=StagedBatch(
            writer=writer,
            batch=draw(NUMBERS),
            is_repeatable=draw(st.booleans()),
            files=tuple(files),
        ),
        create=draw(st.booleans()),
        ack=draw(st.none() | LEVELS),
        codec=draw(st.none() | CODECS),
    )


MESSAGES = {
    RangeTicket: ranged(
        RangeTicket, incarnation=TEXTS, columns=st.none() | st.lists(TEXTS).map(tuple)
    ),
    FramesTicket: ranged(FramesTicket, incarnation=TEXTS, epoch=NUMBERS),
    FindTime: ranged(FindTime, publish_time_ms=st.integers(-(2**62), 2**63 - 1)),
    FoundTime: st.builds(FoundTime, offset=st.none() | NUMBERS),
    WatermarksRequest: st.builds(WatermarksRequest, topics=st.lists(NAMES, max_size=5).map(tuple)),
    TopicNames: st.builds(TopicNames, topics=st.lists(NAMES, max_size=5).map(tuple)),
    TopicStatus: st.builds(
        TopicStatus,
        topic=NAMES,
        incarnation=TEXTS,
        codec=CODECS,
        ack=LEVELS,
        **dict.fromkeys(MARKS, NUMBERS),
    ),
    PlanUpload: st.builds(
        PlanUpload,
        topic=NAMES,
        incarnation=TEXTS,
        epoch=NUMBERS,
        start=st.none() | NUMBERS,
        bytes_max=NUMBERS.filter(bool),
        span_ms_max=NUMBERS,
        objects_max=st.integers(1, 10_000),
    ),
    UploadPlanned: st.builds(
        UploadPlanned,
        start=NUMBERS,
        synced=NUMBERS,
        codec=CODECS,
        objects=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5).map(tuple),
        error=st.none() | TEXTS,
    ),
    AppendStaged: staged_batches(),
    PutOpen: st.builds(
        PutOpen,
        topic=NAMES,
        producer=st.none() | TEXTS,
        epoch=NUMBERS,
        create=st.booleans(),
        ack=st.none() | LEVELS,
    ),
    PutBatch: st.builds(PutBatch, sequence=NUMBERS),
    PutAck: st.builds(PutAck, sequence=NUMBERS, start=NUMBERS, end=NUMBERS, known=NUMBERS),
}


# -- messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MESSAGES)
@EXAMPLES
@given(data=st.data())
def test_message_arrives_as_it_was_sent(kind, data):
    sent = data.draw(MESSAGES[kind])
    arrived = kind.from_json(sent.to_json())
    assert arrived == sent
    assert repr(arrived) == repr(sent), "levels and codecs are no mere texts"


@EXAMPLES
@given(frames=MESSAGES[FramesTicket], rows=MESSAGES[RangeTicket])
def test_tickets_of_both_kinds_are_told_apart(frames, rows):
    assert parse_ticket(frames.to_json()) == frames
    assert parse_ticket(rows.to_json()) == rows
    for kind, other in ((RangeTicket, frames), (FramesTicket, rows)):
        with pytest.raises(InvalidRequestError):
            kind.from_json(other.to_json())


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("is_other", [True, False])
def test_result_of_a_batch_arrives_also_from_an_older_broker(is_known, is_other):
    appended = AppendedBatch(start=1, end=4, rows=2, is_known=is_known, is_other=is_other)
    sent = encode_appended(appended)
    assert decode_appended(sent) == appended
    assert (b'"other"' in sent) == is_other


def test_question_for_no_plan_is_refused():
    for wrong in ({"objects_max": 0}, {"objects_max": 10_001}, {"bytes_max": 0}, {"topic": "x"}):
        with pytest.raises((InvalidRequestError, TopicNameError)):
            replace(A_PLAN, **wrong)


def test_bytes_of_version_1_stay_what_they_are():
    """Goal: a client and a server of different releases understand each other."""
    assert A_TICKET.to_json() == (
        b'{"version":1,"topic":"/default/orders","start":1,"end":2,"incarnation":"a",'
        b'"columns":["offset"]}'
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
    assert FRAMES.to_json() == (
        b'{"version":1,"kind":"frames","topic":"/default/orders","start":1,"end":2,'
        b'"incarnation":"\\u00e4","epoch":3}'
    )
    assert PLANNED.to_json() == (
        b'{"version":1,"start":1,"synced":9,"codec":"bincode2",'
        b'"objects":[{"end":5,"size":100}],"error":null}'
    )
    assert A_STATUS.to_json() == (
        b'{"version":1,"topic":"/default/orders","incarnation":"a","earliest":0,"trimmed":1,'
        b'"tiered":2,"synced":3,"written":4,"next":5,"codec":"bincode2","ack":"synced"}'
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
FRAMES = FramesTicket(topic=TOPIC, start=1, end=2, incarnation="ä", epoch=3)
A_STATUS = TopicStatus(
    topic=TOPIC,
    incarnation="a",
    codec=Codec.BINCODE2,
    ack=AckLevel.SYNCED,
    **{name: number for number, name in enumerate(MARKS)},
)
A_PLAN = PlanUpload(
    topic=TOPIC, incarnation="a", epoch=5, start=1, bytes_max=2, span_ms_max=3, objects_max=4
)
PLANNED = UploadPlanned(start=1, synced=9, codec=Codec.BINCODE2, objects=((5, 100),))
SENT = [
    A_TICKET,
    FRAMES,
    WatermarksRequest(topics=(TOPIC,)),
    A_STATUS,
    TopicNames(topics=(TOPIC,)),
    FindTime(topic=TOPIC, publish_time_ms=1, start=2, end=3),
    FoundTime(offset=3),
    a_batch(),
    PutOpen(topic=TOPIC, producer="p", epoch=1, ack=AckLevel.SYNCED),
    PutBatch(sequence=1),
    PutAck(sequence=1, start=2, end=3, known=1),
    A_PLAN,
    PLANNED,
]
APPENDED = AppendedBatch(start=1, end=2, rows=1, is_known=False)
DECODERS = {
    **{type(message).__name__: (type(message).from_json, message.to_json()) for message in SENT},
    "appended": (decode_appended, encode_appended(APPENDED)),
    "any_ticket": (parse_ticket, A_TICKET.to_json()),
    "any_ticket_for_frames": (parse_ticket, FRAMES.to_json()),
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
