"""HTML for notebooks: right, and nothing in it that came from outside is markup."""

import pytest

pytest.importorskip("pyarrow")

import ister
from ister.base.notebook import render_table


def test_everything_is_escaped():
    bad = "<script>alert('&')</script>"
    shown = render_table(bad, [bad], [[bad], [bad.encode()], [[bad]]], note=bad)
    assert "<script>" not in shown
    assert shown.count("&lt;script&gt;") == 6


def test_cells():
    shown = render_table("t", ["a"], [[None], [7], [True], [b"\xff"], ["x" * 1000]])
    cells = shown.split("<tr>")[2:]
    assert cells[0].startswith("<td></td>")
    assert 'right">7<' in cells[1]
    assert 'left">True<' in cells[2]
    assert "\\xff" in cells[3]
    assert f">{'x' * 200}…<" in cells[4]


def test_logs_topics_and_tables(tmp_path):
    with ister.open(tmp_path) as log:
        topic = log.topic("/default/orders", create=True)
        topic.append(b"<b>bold</b>", attributes={"<i>": "1"})
        topic.append(b"\xff")
        topic.flush()
        for shown in (log._repr_html_(), topic._repr_html_()):
            assert ">/default/orders<" in shown
            assert "<th>tiered</th>" in shown
            assert 'right">2<' in shown
        table = topic.table(columns=["offset", "text", "attributes"])
        shown = table._repr_html_()
        assert "&lt;b&gt;bold&lt;/b&gt;" in shown
        assert "{&#x27;&lt;i&gt;&#x27;: &#x27;1&#x27;}" in shown
        assert "<td></td>" in shown, "what is not text"
        assert "the first" not in shown
        assert repr(table) == "<TopicTable /default/orders>"
        topic.append_many([b"x"] * 20)
        topic.flush()
        assert table._repr_html_().count("<tr>") == 11
        assert "the first 10 rows" in table._repr_html_()
    assert "closed" in log._repr_html_()
    with ister.open(tmp_path) as log:
        assert ">not open<" in log._repr_html_()


def test_partitioned_topics(tmp_path):
    with ister.open(tmp_path) as log:
        for number in range(2):
            log.topic(f"/default/p-part-{number}", create=True)
        shown = log.partitioned("/default/p")._repr_html_()
    assert "/default/p-part-0" in shown
    assert "/default/p-part-1" in shown
