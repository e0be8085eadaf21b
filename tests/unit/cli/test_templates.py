"""Templates of `--format`, and the filters of commands that print messages."""

import json

import pytest

from ister.cli.main import make_parser
from ister.cli.message_options import Filters, Format, matching
from ister.cli.messages_out import Received
from ister.cli.templates import parse_template
from ister.errors import InvalidRequestError

PARSER = make_parser()
PAYLOAD = json.dumps({"user": {"id": 7, "name": "Ö"}, "tags": ["a", 1], "a b": True}).encode()
MESSAGE = Received(
    "/default/t", 7, 1_760_745_600_123, "shop", PAYLOAD, {"kind": "order", "a": "1"}, "eu", 3, 2
)
BARE = Received("/default/t", 8, 0, "", b"\xff\x1b[2J", {}, None)


def rendered(template, message=MESSAGE, shown=bytes):
    return parse_template(template, shown)(message)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{topic} {offset} {key}", "/default/t 7 eu"),
        ("{timestamp}|{timestamp_ms}", "2025-10-18T00:00:00.123Z|1760745600123"),
        ("{producer}/{schema_id}/{schema_version}/{size}", f"shop/3/2/{len(PAYLOAD)}"),
        ("{attributes}", "a=1,kind=order"),
        ("{attributes.kind}{attributes.none}", "order"),
        ("{payload.user.id}{payload.user.none}", "7"),
        ("{payload.user.name}", "Ö"),
        ("{payload.tags}{payload.tags[0]}", '["a",1]a'),
        ('{payload["a b"]}', "true"),
        ("{payload.user}", '{"id":7,"name":"Ö"}'),
        ("{{{offset}}}", "{7}"),
        (r"a\tb\n\\\x41\0\r", "a\tb\n\\A\0\r"),
        ("", ""),
    ],
)
def test_fields_are_filled_in(template, expected):
    assert rendered(template) == expected.encode()


def test_forms_of_the_payload():
    assert rendered("{payload}", BARE) == b"\xff\x1b[2J"
    assert rendered("{text}", BARE) == "\ufffd\x1b[2J".encode()
    assert rendered("{hex} {base64}", BARE) == b"ff1b5b324a /xtbMko="
    assert json.loads(rendered("{json}"))["routing_key"] == "eu"


def test_what_a_message_does_not_have_is_empty():
    assert rendered("[{key}{producer}{schema_id}{attributes}{payload.a}]", BARE) == b"[]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{ofset}", "unknown field {ofset} in template '{ofset}'; did you mean {offset}? known"),
        ("{}", "unknown field {}"),
        ("{zzz}", "known fields: topic, offset, key, payload, text, hex"),
        ("{offset", "'{' at character 1 has no closing brace"),
        ("a}", "'}' at character 2 is not expected"),
        (r"a\q", "unknown escape '\\\\q' at character 2"),
        ("a\\", "'\\\\' at character 2 is not expected"),
        (r"\x4", "unknown escape"),
        ("{payload[}", "expected a number"),
    ],
)
def test_a_wrong_template_is_refused(template, message):
    with pytest.raises(InvalidRequestError) as caught:
        parse_template(template, bytes)
    assert message in str(caught.value)


# -- options --------------------------------------------------------------------------------


def consume(*arguments):
    return PARSER.parse_args(["consume", "/default/t", *arguments])


def lines(*arguments, is_terminal=False):
    options = consume(*arguments)
    make = Format(options).formatter(is_terminal=is_terminal)
    return b"".join(map(make, matching(Filters(options).filter, [MESSAGE, BARE])))


def test_a_template_ends_with_the_delimiter():
    assert lines("--format", "{offset}") == b"7\n8\n"
    assert lines("--format", "{offset}", "--delimiter", ";") == b"7;8;"
    assert lines("--format", "{offset}", "-0") == b"7\x008\x00"


def test_a_terminal_is_moved_by_the_template_alone():
    arguments = ("--format", r"{offset}\n{payload}", "--key", "none")
    assert lines(*arguments, is_terminal=True) == b""
    assert lines("--format", r"\r{payload}", is_terminal=True).endswith(b"\r\\xff\\x1b[2J\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), b"7\n8\n"),
        (("--key", "e?"), b"7\n"),
        (("--key", "us", "--key", "eu"), b"7\n"),
        (("--attribute", "kind=ord*", "--attribute", "a"), b"7\n"),
        (("--attribute", "kind=other"), b""),
        (("--where", "user.id == 7"), b"7\n"),
        (("--where", "user.id == 7", "--where", 'tags ~ "b"'), b""),
        (("--contains", "[2J"), b"8\n"),
    ],
)
def test_filters_select(arguments, expected):
    assert lines("--format", "{offset}", *arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--where", "user.id = 7"), "invalid condition 'user.id = 7': expected ==,"),
        (("--attribute", "=x"), "use NAME=VALUE or NAME"),
        (("--format", "jsn"), "unknown format 'jsn': use payload, full, hex or a template"),
        (("--format", "{nope}"), "known fields: topic, offset,"),
        (("--from", "noon"), "@MILLISECONDS, or an age such as 7d"),
    ],
)
def test_wrong_options_are_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        consume(*arguments)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
