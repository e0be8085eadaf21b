"""Log lines: one JSON object each, whatever the values hold."""

import io
import json
import logging
import re

import pytest

from ister.base.logs import TextFormatter, configure


@pytest.fixture
def lines():
    """Logs of `ister` as lines, with the logger as it was afterwards."""
    logger = logging.getLogger("ister")
    before = (logger.handlers, logger.level, logger.propagate)
    stream = io.StringIO()
    configure(level="DEBUG", stream=stream)
    yield lambda: stream.getvalue().split("\n")[:-1]
    logger.handlers, logger.level, logger.propagate = before


def test_record_is_one_object_with_its_fields(lines):
    logging.getLogger("ister.wal.log").warning(
        "torn tail cut", extra={"topic": "/a/b", "position": 5, "ratio": 0.5, "left_out": None}
    )
    (line,) = lines()
    event = json.loads(line)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event.pop("time"))
    assert event == {
        "level": "WARNING",
        "target": "ister.wal.log",
        "event": "torn tail cut",
        "topic": "/a/b",
        "position": 5,
        "ratio": 0.5,
    }


@pytest.mark.parametrize(
    "value", ["two\nlines", "\r\n", "tab\t", 'quote"', "\x00", "ö€", "\x1b[31m"], ids=repr
)
def test_value_stays_on_one_line_and_comes_back(lines, value):
    logging.getLogger("ister.x").error("event %s", value, extra={"reason": value})
    (line,) = lines()
    event = json.loads(line)
    assert (event["event"], event["reason"]) == (f"event {value}", value)
    assert not set(line) & {"\n", "\r", "\0", "\x1b"}


def test_other_values_become_text(lines):
    logging.getLogger("ister.x").info("event", extra={"error": ValueError("no"), "items": [1]})
    event = json.loads(lines()[0])
    assert (event["error"], event["items"]) == ("no", "[1]")


def test_exception_is_part_of_the_line(lines):
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("ister.x").exception("event")
    (line,) = lines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_plain_line_has_the_time_of_the_record():
    record = logging.makeLogRecord(
        {"msg": "torn tail cut", "levelname": "WARNING", "created": 1769860800.25, "topic": "/a/b"}
    )
    assert (
        TextFormatter().format(record)
        == "2026-01-31T12:00:00.250Z ister: warning: torn tail cut (topic=/a/b)"
    )
