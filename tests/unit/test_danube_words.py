"""The table of words names metrics that there are, for each of those of Danube's documents."""

import re
from pathlib import Path

from ister.base.metrics import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "danube-words.md"


def section() -> str:
    _, _, rest = PAGE.read_text().partition("\n## Metrics\n")
    return rest.partition("\n## ")[0]


def test_table_names_metrics_that_are_on_metrics() -> None:
    """That each declared metric is told there is `test_prometheus`'s."""
    declared = {metric.exposed for metric in METRICS}
    rows = re.findall(r"^\| `[\w.]+` \| `(\w+)` \|", section(), re.MULTILINE)
    assert len(rows) == 45, "the metrics that the documents name"
    assert set(rows) <= declared
    differences = re.sub(r"^\| `[\w.]+` \|", "", section(), flags=re.MULTILINE)
    assert set(re.findall(r"`((?:ister|danube)_\w+)`", differences)) <= declared
