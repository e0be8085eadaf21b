"""Output of commands: plain text in pipes, colours and bars on terminals, same words."""

import io
import re
import sys

import pytest

from ister.base.limits import GIB, KIB, MIB
from ister.cli import output
from ister.cli.output import (
    confirm,
    format_bytes,
    format_span,
    print_error,
    print_facts,
    print_table,
    progress,
)
from tests.support.commands import Terminal

ROWS = [("/default/orders", 12, 3.5, None, True), ("/shop/[a]", 7, 1234.5, "x", False)]
HEADERS = ("topic", "count", "rate", "note", "met")


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output and error terminals of 80 columns.

    To be called by the test: pytest sets its own between a fixture and the test.
    """

    def begin():
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        shown = Terminal()
        monkeypatch.setattr(sys, "stdout", shown)
        monkeypatch.setattr(sys, "stderr", shown)
        return shown

    return begin


def without_style(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# -- tables ---------------------------------------------------------------------------------


def test_table_in_a_pipe_is_whole_lines_without_style(capsys):
    long = "x" * 500
    print_table(HEADERS, [*ROWS, (long, 1, 1.0, None, True)], title="about it")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "about it"
    assert lines[1].split() == ["TOPIC", "COUNT", "RATE", "NOTE", "MET"]
    assert lines[2].split() == ["/default/orders", "12", "3.5", "-", "yes"]
    assert lines[3].split() == ["/shop/[a]", "7", "1,234", "x", "no"]
    assert lines[4].startswith(long)
    assert "\x1b" not in "".join(lines)


def test_table_on_a_terminal_has_the_same_words_and_brackets_are_no_markup(terminal):
    shown = terminal()
    print_table(HEADERS, ROWS, title="about it")
    text = without_style(shown.getvalue())
    words = [line.split() for line in text.splitlines()]
    assert words[0] == ["about", "it"]
    assert words[1] == ["TOPIC", "COUNT", "RATE", "NOTE", "MET"]
    assert words[2] == ["/default/orders", "12", "3.5", "-", "yes"]
    assert words[3] == ["/shop/[a]", "7", "1,234", "x", "no"]
    assert "\x1b[" in shown.getvalue()


def test_table_on_a_terminal_keeps_its_first_column_whole_and_fits(terminal):
    shown = terminal()
    name = "/default/" + "n" * 40
    print_table(("topic", "what"), [(name, "word " * 40)])
    lines = without_style(shown.getvalue()).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert lines[1].startswith(name)
    assert len(lines) > 3


def test_only_columns_of_numbers_stand_right(capsys):
    for cells, is_right in [
        ((1, None), True),
        ((None, None), False),
        (("a", 1), False),
        ((True, False), False),
    ]:
        print_table(("a-wide-title",), [(cell,) for cell in cells])
        line = capsys.readouterr().out.splitlines()[1]
        assert line.startswith(" ") is is_right, cells


def test_no_color_keeps_colours_away(terminal, monkeypatch):
    shown = terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(("state",), [("ok",), ("failed",)])
    print_error("text", hint="hint")
    colours = re.findall(r"\x1b\[[0-9;]*m", shown.getvalue())
    assert not [code for code in colours if re.search(r"\b(3[0-7]|9[0-7])\b", code)]


def test_facts_are_lines_in_both(terminal, monkeypatch):
    out = terminal()
    facts = {"a": "first", "longer": None, "n": 3}
    print_facts(facts, title="things")
    shown = without_style(out.getvalue())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_facts(facts, title="things")
    assert shown == sys.stdout.getvalue() == "things\na       first\nlonger  -\nn       3\n"


HOSTILE = "\x1b]0;title\x07\x1b[31m\x9b2J\r\n\u202e"
HARMLESS = r"\x1b]0;title\x07\x1b[31m\x9b2J\r\n\u202e"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_texts_of_others_do_not_control_a_terminal(terminal, monkeypatch, is_terminal):
    shown = terminal()
    monkeypatch.setattr(output, "is_terminal", lambda _: is_terminal)
    print_table(("reason",), [(HOSTILE,)])
    print_facts({"reason": HOSTILE})
    print_error(HOSTILE.replace("\n", ""), hint="first\nsecond\x9b")
    text = without_style(shown.getvalue())
    assert text.count(HARMLESS) == 2
    assert r"ister: \x1b]0;title" in text
    assert r"second\x9b" in text
    assert not set("\x1b\x07\x9b\r\u202e") & set(text)


# -- errors ---------------------------------------------------------------------------------


def test_error_in_a_pipe_is_one_line(capsys):
    print_error("it went [wrong]", hint="do this")
    assert capsys.readouterr().err == "ister: it went [wrong]; do this\n"
    print_error("alone")
    assert capsys.readouterr().err == "ister: alone\n"


def test_error_on_a_terminal_has_its_hint_on_a_line_of_its_own(terminal):
    shown = terminal()
    print_error("it went [wrong]", hint="do this")
    assert without_style(shown.getvalue()) == "ister: it went [wrong]\n       do this\n"


# -- progress -------------------------------------------------------------------------------


def test_progress_in_a_pipe_is_silent(capsys):
    with progress("work", 10) as bar:
        bar.advance(3)
        bar.describe("other")
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""


def test_progress_on_a_terminal_says_how_much_is_done(terminal):
    for total, unit, text in [
        (4, "topics", "4 of 4 topics"),
        (4 * MIB, "bytes", "4.0 MiB of 4.0 MiB"),
        (None, None, "4"),
        (4, None, "4 of 4"),
    ]:
        shown = terminal()
        with progress("work [a]", total, unit=unit) as bar:
            bar.advance(total or 4)
            bar.describe("more [b]")
        assert text in without_style(shown.getvalue()), total
        assert "more [b]" in shown.getvalue(), total
        # It is gone when it is over.
        assert shown.getvalue().endswith("\x1b[2K"), total


# -- questions ------------------------------------------------------------------------------


def test_question_that_nobody_can_be_asked_is_no(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert not confirm("Go on?", is_confirmed=False)
    assert "--yes" in capsys.readouterr().err


def test_question_on_a_terminal(terminal, monkeypatch):
    for answer, goes_on in [
        ("y\n", True),
        ("YES\n", True),
        ("\n", False),
        ("n\n", False),
        ("", False),
    ]:
        shown = terminal()
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert confirm("Go on?", is_confirmed=False) is goes_on, answer
        assert "Go on? [y/N] " in shown.getvalue(), answer


# -- figures --------------------------------------------------------------------------------


def test_sizes():
    for size, text in [
        (None, "?"),
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (MIB - 1, "1.0 MiB"),
        (12.3 * MIB, "12.3 MiB"),
        (GIB, "1.0 GiB"),
        (1500 * 1024 * GIB, "1.5 PiB"),
        (2000 * 1024 * 1024 * GIB, "2000.0 PiB"),
    ]:
        assert format_bytes(size) == text, size


def test_spans():
    for seconds, text in [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (600, "10 min"),
        (3599, "1.0 h"),
        (7200, "2.0 h"),
        (3 * 86400, "3.0 days"),
    ]:
        assert format_span(seconds) == text, seconds


# -- what it costs --------------------------------------------------------------------------
