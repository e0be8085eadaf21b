"""Input of `ister produce`: bytes to messages."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.cli import messages_in
from ister.cli.messages_in import InputOptions, read_messages
from ister.cli.messages_out import Received, formatter
from ister.errors import InvalidRequestError, MessageTooLargeError


def reader(data, step=1 << 20):
    """Gives the bytes in pieces."""
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    return lambda size: pieces.pop(0) if pieces else b""


def payloads(data, step=1 << 20, **options):
    return [one.payload for one in read_messages(reader(data, step), InputOptions(**options))]


def test_a_line_is_a_message():
    for data, found in [
        (b"", []),
        (b"\n", [b""]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\n\nb\n", [b"a", b"", b"b"]),
        (b"a\r\n", [b"a\r"]),
        (b"\xff\x00\n", [b"\xff\x00"]),
    ]:
        assert payloads(data) == found, data


@given(
    lines=st.lists(st.binary(max_size=20), max_size=20),
    delimiter=st.binary(min_size=1, max_size=3),
    step=st.integers(1, 30),
)
def test_the_same_messages_however_the_bytes_arrive(lines, delimiter, step):
    data = delimiter.join(lines)
    expected = data.split(delimiter) if data else []
    if expected and not expected[-1]:
        expected.pop()
    assert payloads(data, step, delimiter=delimiter) == expected


def test_all_of_the_input_as_one():
    assert payloads(b"a\nb\n", 1, is_whole=True) == [b"a\nb\n"]
    assert payloads(b"", is_whole=True) == [b""]


def test_keys_and_attributes_of_all():
    (one,) = read_messages(reader(b"x"), InputOptions(key="k", attributes={"a": "1"}))
    assert one == (b"x", "k", {"a": "1"})


def test_a_field_of_a_message_is_its_key():
    for line, key in [
        (b'{"id": "a"}', "a"),
        (b'{"id": 7}', "7"),
        (b'{"id": {"x": [1]}}', '{"x":[1]}'),
        (b'{"id": null}', "default"),
        (b'{"other": 1}', "default"),
    ]:
        (one,) = read_messages(reader(line), InputOptions(key_field="id", key="default"))
        assert (one.payload, one.routing_key) == (line, key), line


def test_what_consume_prints_is_taken():
    as_line = formatter("payload", is_json=True, delimiter=b"", is_terminal=False)
    sent = [
        Received("/d/t", 0, 1, "p", "grün".encode(), {"a": "ü"}, "k"),
        Received("/d/t", 1, 1, "p", b"\xff\xfe", {}, None),
        Received("/d/t", 2, 1, "p", b"", {}, ""),
    ]
    data = b"".join(map(as_line, sent))
    found = list(read_messages(reader(data, 7), InputOptions(is_json=True)))
    assert [one.payload for one in found] == [one.payload for one in sent]
    assert [one.routing_key for one in found] == [one.routing_key for one in sent]
    assert [dict(one.attributes or {}) for one in found] == [one.attributes for one in sent]


def test_json_by_hand():
    lines = [
        {"payload": "x", "attributes": {"b": "2"}},
        {"payload": {"a": [1, "ü"]}},
        {"payload_base64": base64.b64encode(b"\0").decode(), "payload": "not this"},
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    options = InputOptions(is_json=True, key="k", attributes={"a": "1"})
    found = list(read_messages(reader(data), options))
    assert [one.payload for one in found] == [b"x", '{"a":[1,"ü"]}'.encode(), b"\0"]
    assert found[0].attributes == {"a": "1", "b": "2"}
    assert {one.routing_key for one in found} == {"k"}


def test_a_line_that_is_none_is_named():
    for line, what in [
        (b"nonsense", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "has no payload"),
        (b'{"payload_base64": "%%"}', "base64"),
        (b'{"payload_base64": 7}', "base64"),
        (b'{"payload": "x", "attributes": {"a": 1}}', "attributes"),
        (b'{"payload": "x", "attributes": [1]}', "attributes"),
        (b'{"payload": "x", "routing_key": 1}', "routing_key"),
        (b'{"payload": "\\ud800"}', "Unicode"),
    ]:
        data = b'{"payload": "good"}\n' + line
        with pytest.raises(InvalidRequestError, match=f"message 2 of the input: .*{what}"):
            list(read_messages(reader(data), InputOptions(is_json=True)))


def test_a_message_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(messages_in, "_LINE_BYTES_MAX", 100)
    monkeypatch.setattr(messages_in, "MESSAGE_SIZE_BYTES_MAX", 100)
    with pytest.raises(MessageTooLargeError, match="--delimiter"):
        payloads(b"x" * 1000, 10)
    with pytest.raises(MessageTooLargeError, match="--whole"):
        payloads(b"x\n" * 1000, 10, is_whole=True)
