"""The documents name things that exist, and all of them where they list them."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import ister
from ister.config import Config
from ister.metrics import METRICS
from ister.spark.options import READ_OPTIONS, WRITE_OPTIONS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def settings(kind: type, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for item in fields(kind):
        value = getattr(kind(), item.name)
        path = f"{prefix}{item.name}"
        found |= settings(type(value), f"{path}.") if is_dataclass(value) else {path}
    return found


def test_reference_lists_every_setting_and_no_other() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text()
    roots = "storage|broker|dispatch|pipeline"
    listed = re.findall(rf"^\| `((?:{roots})\.[\w.]+)`", text, re.MULTILINE)
    assert sorted(listed) == sorted(settings(Config))


def test_reference_lists_every_metric_once() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    kinds = "counter|gauge|histogram"
    listed = re.findall(rf"^\| `(\w+)` \| (?:{kinds}) \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(metric.exposed for metric in METRICS)


def test_settings_and_metrics_in_text_exist() -> None:
    known = settings(Config)
    sections = {path.rsplit(".", count)[0] for path in known for count in range(1, 4)}
    metrics = {metric.name for metric in METRICS} | {metric.exposed for metric in METRICS}
    for document in DOCUMENTS:
        text = document.read_text()
        for name in re.findall(r"`((?:storage|broker|dispatch|pipeline)\.[a-z_.]+)`", text):
            # Modules of the broker have names of that form, too.
            module = ROOT / "src" / "ister" / (name.replace(".", "/") + ".py")
            is_known = name in known or name in sections or name in metrics
            assert is_known or module.exists() or module.with_suffix("").is_dir(), (
                f"{document}: {name}"
            )


def test_spark_lists_every_option_and_no_other() -> None:
    text = (ROOT / "docs" / "SPARK.md").read_text()
    tables = text.split("## Reading options")[1].split("## Writing")
    for table, options in zip(tables, (READ_OPTIONS, WRITE_OPTIONS), strict=True):
        names = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
        listed = {name for cell in names for name in re.findall(r"\w+", cell)}
        assert listed == set(options)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text()
    kinds = "tests|docs|src|benchmarks|ister|deploy|examples|tools"
    for target in re.findall(rf"`((?:{kinds})/[\w/.-]+\.\w+)`", text):
        base = ROOT / "src" if target.startswith("ister/") else ROOT
        assert (base / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_and_modules_exist(document: Path) -> None:
    text = document.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", text):
        assert f"\n{target}:" in makefile, target
    for module in re.findall(r"`(ister(?:\.\w+)+)`", text):
        parts = module.split(".")
        path = ROOT / "src" / Path(*parts)
        is_public = len(parts) == 2 and hasattr(ister, parts[1])
        is_module = path.with_suffix(".py").exists() or path.is_dir()
        is_member = path.parent.with_suffix(".py").exists()
        is_logger = parts[1] in {"yml", "audit"}
        assert is_public or is_module or is_member or is_logger, module
