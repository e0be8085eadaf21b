"""The animation in the README: made of what a terminal was sent, light, whole without animation."""

import re
import sys
import xml.etree.ElementTree as ElementTree

from tools.demo_svg import TARGET, Row, Screen, Style, choose, draw, record, without_path

SVG = "{http://www.w3.org/2000/svg}"
# What rich sends: a title, a description, a bar that is drawn twice and taken away, a result.
SENT = [
    (0.0, "\x1b[36m  ▸  1  \x1b[0m\x1b[1;36mDay\x1b[0m\r\n\x1b[2m       what it is\x1b[0m\r\n"),
    (1.0, "\x1b[?25l    bar 10%\x1b[K\r\n    two"),
    (2.0, "\r\x1b[2K\x1b[1A\x1b[2K    bar 90%\r\n    two"),
    (3.0, "\r\x1b[2K\x1b[1A\x1b[2K\x1b[1;31m       kill -9\x1b[0m\r\n    bar\r\n    two"),
    (60.0, "\r\x1b[2K\x1b[1A\x1b[2K\x1b[?25h\x1b[32m     ✓ <done> & well\x1b[0m\r\n"),
]


def shown():
    screen = Screen()
    for at, text in SENT:
        screen.feed(text, at)
    return screen.rows


def test_screen_is_what_stays_of_what_was_sent():
    assert [row.text for row in shown()] == [
        "  ▸  1  Day",
        "       what it is",
        "       kill -9",
        "     ✓ <done> & well",
        "",
    ]


def test_descriptions_are_left_out():
    rows = choose(shown())
    assert [row.text.strip() for row in rows] == ["▸  1  Day", "kill -9", "✓ <done> & well"]
    assert [row.at for row in rows] == [0.0, 3.0, 60.0]


def test_path_of_the_checkout_is_not_shown():
    text = "│ report  /home/me/ister/ister-demo.html   │"
    row = without_path(Row([(char, Style()) for char in text], 1.0), "/home/me/ister")
    assert row.text == "│ report  ./ister-demo.html                │"
    assert len(row.cells) == len(text)


def test_drawing_is_whole_at_its_beginning_and_plays_in_order():
    drawn = draw(choose(shown()))
    root = ElementTree.fromstring(drawn)
    texts = ["".join(line.itertext()) for line in root.iter(f"{SVG}text")]
    assert texts == ["$ ister demo", "▸  1Day", "kill -9", "✓ <done> & well"]
    assert 'class="r b"' in drawn
    frames = re.findall(
        r"@keyframes k(\d+)\{0%,([\d.]+)%\{opacity:1\}[\d.]+%,([\d.]+)%\{opacity:0\}", drawn
    )
    assert [int(number) for number, _, _ in frames] == [1, 2, 3]
    # All lines go at once, and come back one after the other.
    assert len({held for _, held, _ in frames}) == 1
    comes = [float(at) for _, _, at in frames]
    assert float(frames[0][1]) < comes[0] < comes[1] < comes[2] < 100
    assert "prefers-reduced-motion:no-preference" in drawn


def test_recording_has_every_character_with_its_time():
    command = [sys.executable, "-c", "import os; print('ä' * 3, os.get_terminal_size().columns)"]
    pieces = record(command)
    assert "".join(text for _, text in pieces) == "äää 92\r\n"
    assert all(at >= 0 for at, _ in pieces)


def test_picture_of_the_readme_is_light_and_shows_the_kill_and_the_result():
    text = TARGET.read_text()
    assert len(text.encode()) < 100_000
    lines = ["".join(line.itertext()) for line in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert lines[0] == "$ ister demo"
    assert any("kill -9" in line for line in lines)
    assert any("Nothing was lost" in line for line in lines)
    assert any("./ister-demo.html" in line for line in lines)
    assert len(lines) < 60
