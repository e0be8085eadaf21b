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
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OPERATING = (ROOT / "docs" / "OPERATING.md").read_text()


def settings(kind: type, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for item in fields(kind):
        value = getattr(kind(), item.name)
        path = f"{prefix}{item.name}"
        found |= settings(type(value), f"{path}.") if is_dataclass(value) else {path}
    return found


def test_operating_lists_every_setting_and_no_other() -> None:
    tables = OPERATING.split("## Metrics")[0]
    roots = "storage|broker|dispatch|pipeline"
    listed = set(re.findall(rf"^\| `((?:{roots})\.[\w.]+)`", tables, re.MULTILINE))
    assert listed == settings(Config)


def test_operating_lists_every_metric_as_declared() -> None:
    for metric in METRICS:
        row = f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.description} |"
        assert row in OPERATING, metric.name
    kinds = "counter|gauge|histogram"
    assert len(re.findall(rf"^\| `[\w.]+` \| (?:{kinds}) \|", OPERATING, re.M)) == len(METRICS)


def test_spark_lists_every_option_and_no_other() -> None:
    text = (ROOT / "docs" / "SPARK.md").read_text()
    tables = text.split("## Reading options")[1].split("## Writing")
    for table, options in zip(tables, (READ_OPTIONS, WRITE_OPTIONS), strict=True):
        names = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
        listed = {name for cell in names for name in re.findall(r"\w+", cell)}
        assert listed == set(options)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_linked_and_named_files_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), target
    for target in re.findall(r"`((?:tests|docs|src|benchmarks|ister)/[\w/.]+\.\w+)`", text):
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
        assert is_public or is_module or is_member, module


def test_readme_example_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(import ister.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert example is not None
    exec(compile(example.group(1), "README.md", "exec"), {})
    with ister.open(tmp_path / "data") as log:
        (message,) = log.topic("/default/orders").read()
    assert message.payload == b"first"
    assert message.attributes == {"shop": "eu-1"}
