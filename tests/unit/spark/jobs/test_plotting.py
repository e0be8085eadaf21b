"""Plots: a page that parses, needs nothing from elsewhere, and has the numbers in it."""

import importlib
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ister.errors import ConfigError, InvalidRequestError, NotFoundError
from ister.spark.jobs.plotting import charts_of, check_plot, render_html, save_plot
from ister.spark.jobs.topic_stats import Counted, TopicStats

_VOID = {"meta", "br", "hr", "link", "img"}
_HOUR_US = 3_600_000_000


class Page(HTMLParser):
    """Checks that tags are closed in order; collects what the page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.references = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.references += [v for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def a_report(hours=30, topics=3):
    """A report of `stats`, as JSON has it."""
    found = TopicStats()
    found.total = Counted(1234, 56789)
    found.first_us, found.last_us = 0, hours * _HOUR_US - 1
    found.hours = {hour: Counted(hour + 1, 10) for hour in range(0, hours, 2)}
    found.producers = {f"<b>p{number}</b>": Counted(number, 1) for number in range(1, 30)}
    found.sizes = {0: 3, 1: 4, 11: 9}
    found.keyed, found.key_hashes = 5, [1, 2]
    found.sample_bytes, found.sample_compressed_bytes = 300, 100
    said = found.as_json()
    return {
        "totals": said,
        "topics": [
            {"topic": f"/default/t{number}&co", "objects": 3, **said} for number in range(topics)
        ],
    }


def test_the_page_parses_and_is_on_its_own():
    text = render_html(a_report())
    page = Page(text)
    assert page.references == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert "http" not in text.replace("http-equiv", "")
    assert "<b>p29</b>" not in text, "names are text, not markup"
    assert "/default/t0&amp;co" in text
    assert "prefers-color-scheme: dark" in text


def test_every_drawing_is_well_formed_and_says_what_it_is():
    text = render_html(a_report())
    drawings = [part.split("</svg>")[0] for part in text.split("<svg")[1:]]
    assert len(drawings) == 5
    for drawing in drawings:
        tree = ElementTree.fromstring(f"<svg{drawing}</svg>")
        assert tree.get("role") == "img"
        identities = {item.get("id") for item in tree if item.get("id")}
        assert set(tree.get("aria-labelledby").split()) == identities
        assert all(float(item.get("width")) >= 0 for item in tree.iter("rect"))
        assert all(
            float(item.get("x")) >= 0 and float(item.get("x")) <= 860 for item in tree.iter("rect")
        )
    assert "14 others" not in text
    assert "9 others" in text, "those beyond the twentieth producer"


def test_hours_without_messages_are_drawn_too():
    (hours,) = [chart for chart in charts_of(a_report()) if chart.label == "hour"]
    assert len(hours.bars) == 29
    assert [value for _, value in hours.bars[:4]] == [1, 0, 3, 0]


@pytest.mark.parametrize(("hours", "span"), [(240, "hour"), (24 * 60, "day"), (24 * 900, "month")])
def test_long_times_are_drawn_by_day_and_by_month(hours, span):
    report = a_report(hours)
    charts = charts_of(report)
    (chart,) = [chart for chart in charts if chart.label in ("hour", "day", "month")]
    assert chart.label == span
    assert len(chart.bars) <= 240
    assert sum(value for _, value in chart.bars) == sum(
        item["messages"] for item in report["totals"]["hours"]
    )


def test_sizes_that_no_message_has_are_drawn_too():
    sizes = charts_of(a_report())[-1]
    assert [name for name, _ in sizes.bars[:4]] == ["0", "1", "2", "4"]
    assert sizes.bars[0][1] == 3
    assert sizes.bars[1][1] == 4
    assert sizes.bars[-1] == ("1 K", 9)
    assert len(sizes.bars) == 12


def test_very_many_topics_fit():
    charts = charts_of(a_report(topics=100))
    assert len(charts[0].bars) == 31
    assert charts[0].bars[-1] == ("70 others", 70 * 1234)


def test_a_report_without_messages_has_a_page():
    report = {"totals": TopicStats().as_json(), "topics": []}
    Page(render_html(report))
    Page(render_html({"topics": [{"topic": "/default/a"}]}))


def test_a_page_is_saved(tmp_path):
    path = tmp_path / "stats.html"
    save_plot(str(path), a_report())
    assert Page(path.read_text(encoding="utf-8"))


def test_other_endings_and_directories_are_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"stats\.pdf"):
        check_plot(str(tmp_path / "stats.pdf"))
    with pytest.raises(NotFoundError):
        check_plot(str(tmp_path / "none" / "stats.html"))


def test_a_picture_needs_matplotlib(tmp_path, monkeypatch):
    real = importlib.import_module

    def load(name, *more):
        if name.startswith("matplotlib"):
            raise ImportError(name=name)
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(ConfigError, match="matplotlib"):
        check_plot(str(tmp_path / "stats.png"))


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "stats.png"
    save_plot(str(path), a_report())
    assert path.read_bytes().startswith(b"\x89PNG")
