"""The report shows the figures, is a page of its own, and escapes what it shows."""

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

from demo.charts import Band, Line, Mark, histogram, lines, tier_map
from demo.report import render

ROOT = Path(__file__).parents[3]
_EVIL = '<script>alert("1")</script>'


def _view(topic, end=1000, trimmed=0):
    return {
        "topic": topic,
        "earliest": 0,
        "watermarks": {
            "trimmed": trimmed,
            "tiered": 600,
            "synced": end,
            "written": end,
            "next": end,
        },
        "files": [
            {"name": "wal.0.log", "first_offset": trimmed, "next_offset": end, "bytes": 4096}
        ],
        "objects": [
            {
                "object_id": "data-0",
                "start_offset": 0,
                "end_offset": 599,
                "size": 2048,
                "format": "parquet",
                "messages": 600,
            }
        ],
        "cache": {"start": 900, "next": end, "messages": 100, "bytes": 1000},
        "subscriptions": [{"name": "billing", "type": "shared", "cursor": 900, "lag": 100}],
    }


def _latency(**more):
    return {
        "count": 2,
        "p50": 3.25,
        "p99": 9.5,
        "max": 12.0,
        "histogram": [[0.0, 1], [1.0, 0], [2.0, 1]],
    } | more


def figures(**more):
    """As a small demo would give them."""
    return {
        "ok": True,
        "version": "9.9.9",
        "seed": 7,
        "started_at": "2026-03-20T10:00:00+00:00",
        "machine": "2 cores",
        "messages": 123_456,
        "seconds": 61.4,
        "topics": [{"topic": "/default/orders", "messages": 123_456, "payload_bytes": 5}],
        "steps": [
            {
                "title": "Start a broker",
                "about": "on this machine",
                "seconds": 1.5,
                "result": "ready",
                "command": "ister serve",
            }
        ],
        "left_out": [],
        "failures": [],
        "tier_maps": [{"title": "At the end", "topics": [_view("/default/orders")]}],
        "traffic": {
            "subscriptions": [{"name": "billing", "topic": "/default/orders", "type": "shared"}],
            "bulk_messages": 100_000,
            "in_per_second": 31_234.0,
            "out_per_second": 12_345.0,
            "live_messages": 23_456,
            "live_from": 1.0,
            "pace": 3000.0,
            "seconds": 4.0,
            "samples": [[at / 5, 100 * at, 90 * at, {"billing": 10 * at}] for at in range(20)],
            "kill": {
                "at": 2.0,
                "ready_at": 3.0,
                "back_at": 3.25,
                "caught_up_at": 3.5,
                "away_seconds": 1.25,
                "pending": 77,
            },
            "switch": {"at": 1.5, "consumer": "risk-1"},
            "latency": {"steady": _latency(), "killed": _latency(p50=1500.0)},
        },
        "chain": {
            "messages": 123_456,
            "seconds": 1.0,
            "tiers": {"bucket": 100_000, "files": 23_000, "cache": 456},
            "words": "1 from the bucket, 2 from local files",
            "lost": 0,
            "duplicates": 42,
        },
        "proofs": {
            "chain": [
                {
                    "topic": "/default/orders",
                    "ok": True,
                    "acknowledged": 123_456,
                    "found": 123_456,
                    "lost": 0,
                    "misplaced": 0,
                    "doubled": 0,
                    "gaps": 0,
                }
            ],
            "deliveries": [
                {
                    "topic": "/default/orders",
                    "subscription": "billing",
                    "type": "shared",
                    "ok": True,
                    "messages": 123_456,
                    "missing": 0,
                    "duplicates": 42,
                    "disordered": 0,
                    "consumers": {"billing-1": 61_000, "billing-2": 62_498},
                }
            ],
            "sums": [{"name": "cents", "ok": True, "expected": 5, "found": 5}],
        },
        "compact": {"topics": [{"bytes": 8000, "new_bytes": 1000}], "errors": []},
        "sql": {"query": "SELECT 1 < 2", "rows": [["DE", 3, 12_345]], "seconds": 1.0},
        "stream": {"rows": [[8, 1, 100], [9, 2, 12_000]], "batches": 2, "seconds": 1.0},
        "table": {
            "engine": "DuckDB",
            "rows": [["DE", 3, 99_900]],
            "seconds": 0.1,
            "export": {"topics": [{"messages": 3, "files": 1, "bytes": 100}]},
        },
    } | more


class _Page(HTMLParser):
    """What is wrong with a page, and its tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_has_the_figures():
    page = _Page(render(figures()))
    text = " ".join(" ".join(page.text).split())
    for shown in (
        "Nothing was lost.",
        "123,456",
        "31,234/s",
        "3.2 ms",
        "1 : 8.0",
        "SELECT 1 < 2",
        "€\u00a0123.45",
        "€\u00a0999.00",
        "61,000, 62,498",
        "risk-1",
        "77 messages were on their way",
        "ister serve",
        "61 seconds in all",
    ):
        assert " ".join(shown.split()) in text, shown


def test_the_page_needs_nothing_but_itself():
    text = render(figures())
    page = _Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]
    assert not re.search(r"(?:src=|url\()[\"']?http", text)
    assert {tag for tag, named in page.tags if "href" in named} == {"a"}
    assert not [name for _, named in page.tags for name in named if name.startswith("on")]


def test_the_page_has_contents_and_every_link_leads_somewhere():
    page = _Page(render(figures()))
    links = [named["href"] for tag, named in page.tags if tag == "a"]
    sections = [named["id"] for tag, named in page.tags if tag == "h2"]
    assert len(sections) == len(set(sections)) >= 6
    inside = [link[1:] for link in links if link.startswith("#")]
    # Once in the contents, and once at the section itself, to be copied.
    assert sorted(inside) == sorted(sections * 2)
    tags = [tag for tag, _ in page.tags]
    assert tags.index("nav") < tags.index("h2")
    outside = [link for link in links if not link.startswith("#")]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert outside
    for link in outside:
        home, _, path = link.partition("/blob/main/")
        assert home == urls["Repository"]
        assert (ROOT / path).exists(), link


def test_every_drawing_has_words():
    page = _Page(render(figures()))
    drawings = [named for tag, named in page.tags if tag == "svg"]
    assert len(drawings) == 6
    assert all(named["role"] == "img" and len(named["aria-label"]) > 20 for named in drawings)


def test_what_comes_from_elsewhere_is_escaped():
    given = figures(
        failures=[_EVIL],
        left_out=[{"title": _EVIL, "why": _EVIL}],
        machine=_EVIL,
        tier_maps=[{"title": _EVIL, "topics": [_view(f"/default/{_EVIL}")]}],
    )
    given["steps"][0] |= {"title": _EVIL, "about": _EVIL, "result": _EVIL, "command": _EVIL}
    given["traffic"]["subscriptions"][0]["name"] = _EVIL
    given["traffic"]["samples"] = [[at, at, at, {_EVIL: at}] for at in range(9)]
    given["proofs"]["deliveries"][0]["subscription"] = _EVIL
    given["proofs"]["chain"][0]["topic"] = _EVIL
    given["sql"]["rows"] = [[_EVIL, 1, 1]]
    text = render(given)
    assert "<script" not in text
    assert _EVIL in "".join(_Page(text).text)


def test_a_failed_proof_is_the_headline():
    page = render(figures(failures=["/default/orders: 3 lost"]))
    assert "Something is wrong" in page
    assert "Nothing was lost" not in page
    assert "/default/orders: 3 lost" in page


def test_a_demo_without_spark_has_a_report_too():
    given = figures(left_out=[{"title": "Batch SQL", "why": "Java 17 or later"}])
    for name in ("compact", "sql", "stream", "table"):
        del given[name]
    page = render(given)
    assert "Left out" in page
    assert "Java 17 or later" in page
    assert "Iceberg table" not in page


def test_a_tier_map_is_to_scale():
    text = tier_map([_view("/default/a", 1000), _view("/default/b", 500)], about="two topics")
    widths = [
        float(width) for width in re.findall(r'<rect class="track"[^>]* width="([\d.]+)"', text)
    ]
    assert len(widths) == 6
    assert widths[0] == 2 * widths[3]
    blocks = {
        title.split(":")[0].split(",")[0]: float(width)
        for width, title in re.findall(r'bar c\d"[^>]* width="([\d.]+)"[^>]*><title>([^<]*)', text)[
            :3
        ]
    }
    assert blocks["parquet object"] == 0.6 * widths[0] - 1
    assert blocks["files"] == widths[0] - 1
    assert "offsets 900 up to 1,000" in text


def test_a_chart_of_nothing_is_a_chart():
    _Page(lines([Line("a", "c1", [])], about="nothing"))
    _Page(lines([], about="nothing", is_logarithmic=True))
    _Page(histogram([("a", "c1", [0, 0])], ["x", "y"], about="nothing"))
    _Page(tier_map([], about="nothing"))


def test_a_zoomed_chart_shows_what_is_in_it():
    text = lines(
        [Line("a", "c1", [(0.0, 1e6), (5.0, 10.0), (9.0, 20.0)])],
        about="zoomed",
        start=4.0,
        marks=[Mark(1.0, "before"), Mark(6.0, "kill", "kill")],
        bands=[Band(6.0, 7.0, "away")],
    )
    assert "before" not in text
    assert "kill" in text
    assert ">1M<" not in text
    assert ">20<" in text
