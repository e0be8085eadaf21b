"""Output of `ister consume`: forms of a message, and knowing what was read."""

import base64
import contextlib
import json
import os
import signal
import threading

import pytest

from ister.cli.interrupts import Interrupts
from ister.cli.messages_out import LineOutput, Received, StoppedError, formatter

MESSAGE = Received(
    "/default/t", 7, 1_760_745_600_123, "shop", b"pay\tload", {"b": "2", "a": "1"}, "eu"
)


def line(message, form="payload", *, is_json=False, delimiter=b"\n", is_terminal=False):
    make = formatter(form, is_json=is_json, delimiter=delimiter, is_terminal=is_terminal)
    return make(message)


def test_the_payload_is_as_it_is():
    assert line(MESSAGE._replace(payload=b"\xff\x1b[2J")) == b"\xff\x1b[2J\n"
    assert line(MESSAGE._replace(payload=b"x"), delimiter=b"\0") == b"x\0"


def test_a_terminal_is_not_moved_by_a_payload():
    shown = line(MESSAGE._replace(payload=b"a\x1b[2J\tb\xff\xc2\x9b"), is_terminal=True)
    assert shown == b"a\\x1b[2J\tb\\xff\\x9b\n"


def test_json_has_the_fields_that_scripts_know():
    found = json.loads(line(MESSAGE, is_json=True, is_terminal=True))
    assert found == {
        "topic": "/default/t",
        "offset": 7,
        "publish_time": 1_760_745_600_123,
        "producer_name": "shop",
        "payload": "pay\tload",
        "payload_base64": base64.b64encode(b"pay\tload").decode(),
        "attributes": {"a": "1", "b": "2"},
        "routing_key": "eu",
    }
    binary = json.loads(line(MESSAGE._replace(payload=b"\xff"), is_json=True))
    assert (binary["payload"], binary["payload_base64"]) == (None, "/w==")
    schema = json.loads(line(MESSAGE._replace(schema_id=3, schema_version=2), is_json=True))
    assert (schema["schema_id"], schema["schema_version"]) == (3, 2)


def test_full_and_hex():
    assert line(MESSAGE, "full") == (
        b"/default/t\t7\t2025-10-18T00:00:00.123Z\tshop\teu\ta=1,b=2\tpay\tload\n"
    )
    bare = MESSAGE._replace(routing_key=None, attributes={}, producer_name="", payload=b"")
    assert line(bare, "full").endswith(b"\t-\t-\t-\t\n")
    # Beyond the calendar.
    late = line(MESSAGE._replace(publish_time_ms=2**63), "full")
    assert late.startswith(b"/default/t\t7\t9223372036854775808\t")
    assert line(MESSAGE, "hex") == b"7061790a".replace(b"0a", b"096c6f6164") + b"\n"


# -- pipes ----------------------------------------------------------------------------------


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    with Interrupts() as interrupts:
        yield read_end, write_end, interrupts
    for fd in (read_end, write_end):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_a_line_counts_when_it_was_read(pipe):
    read_end, write_end, interrupts = pipe
    output = LineOutput(write_end, interrupts, is_careful=True)
    assert output.is_stepwise
    output.write(b"one\n")
    taken = threading.Event()
    waiting = threading.Thread(target=lambda: (output.taken(), taken.set()))
    waiting.start()
    try:
        assert not taken.wait(0.2)
        assert os.read(read_end, 2) == b"on"
        assert not taken.wait(0.2)
        assert os.read(read_end, 100) == b"e\n"
        assert taken.wait(10)
    finally:
        interrupts.stop()
        waiting.join()


def test_a_reader_that_leaves_before_reading(pipe):
    read_end, write_end, interrupts = pipe
    output = LineOutput(write_end, interrupts, is_careful=True)
    output.write(b"one\n")
    os.close(read_end)
    with pytest.raises(BrokenPipeError):
        output.taken()


def test_a_reader_that_leaves_after_reading(pipe):
    read_end, write_end, interrupts = pipe
    output = LineOutput(write_end, interrupts, is_careful=True)
    output.write(b"one\n")
    os.read(read_end, 100)
    os.close(read_end)
    output.taken()
    with pytest.raises(BrokenPipeError):
        output.write(b"two\n")


@pytest.mark.parametrize("is_careful", [True, False])
def test_long_lines_go_through_whole(pipe, is_careful):
    read_end, write_end, interrupts = pipe
    output = LineOutput(write_end, interrupts, is_careful=is_careful)
    found = bytearray()

    def read():
        while len(found) < 300_000:
            found.extend(os.read(read_end, 65536))

    reading = threading.Thread(target=read)
    reading.start()
    output.write(b"0123456789" * 30_000)
    reading.join(20)
    assert found == b"0123456789" * 30_000


def test_a_signal_ends_waiting_for_a_reader(pipe):
    _, write_end, interrupts = pipe
    output = LineOutput(write_end, interrupts, is_careful=False)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(StoppedError):
        output.write(b"x" * 1_000_000)
    assert interrupts.is_set


def test_what_is_no_pipe_is_written_and_counts(tmp_path):
    with Interrupts() as interrupts, (tmp_path / "f").open("wb") as file:
        output = LineOutput(file.fileno(), interrupts, is_careful=True)
        assert not output.is_stepwise
        output.write(b"x" * 100_000)
        output.taken()
    assert (tmp_path / "f").stat().st_size == 100_000


def test_the_first_signal_is_noted_and_the_second_raises():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert not interrupts.wait(0)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


# -- signals --------------------------------------------------------------------------------
