"""The documents name things that exist, and all of them where they list them."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import ister
from ister.base.metrics import METRICS
from ister.config.aliases import ALIASES as SETTING_ALIASES
from ister.config.reference import settings
from ister.spark.options import ALIASES, READ_OPTIONS, WRITE_OPTIONS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def mentions(pattern: str, *documents: Path) -> list[tuple[Path, Any]]:
    """Every match of a pattern in some documents, with its document.

    Raises:
        AssertionError: Nothing matches, so that the pattern is wrong.
    """
    found = [
        (document, match)
        for document in documents
        for match in re.findall(pattern, document.read_text(), re.MULTILINE)
    ]
    assert found, f"nothing in the documents matches {pattern}"
    return found


def test_reference_lists_every_setting_and_no_other() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text()
    text = text.partition("## Other names")[0]
    roots = "storage|broker|dispatch|pipeline"
    listed = re.findall(rf"^\| `((?:{roots})\.[\w.]+)`", text, re.MULTILINE)
    assert sorted(listed) == sorted(setting.path for setting in settings())


def test_reference_lists_every_metric_once() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    kinds = "counter|gauge|histogram"
    listed = re.findall(rf"^\| `(\w+)` \| (?:{kinds}) \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(metric.exposed for metric in METRICS)


def test_settings_and_metrics_in_text_exist() -> None:
    known = {*(setting.path for setting in settings()), *(alias.key for alias in SETTING_ALIASES)}
    sections = {path.rsplit(".", count)[0] for path in known for count in range(1, 4)}
    metrics = {metric.name for metric in METRICS} | {metric.exposed for metric in METRICS}
    pattern = r"`((?:storage|broker|dispatch|pipeline)\.[a-z_.]+)`"
    for document, name in mentions(pattern, *DOCUMENTS):
        # Modules of the broker have names of that form, too.
        module = ROOT / "src" / "ister" / (name.replace(".", "/") + ".py")
        is_known = name in known or name in sections or name in metrics
        assert is_known or module.exists() or module.with_suffix("").is_dir(), f"{document}: {name}"


def test_spark_lists_every_option_and_no_other() -> None:
    text = (ROOT / "docs" / "SPARK.md").read_text()
    tables = text.split("## Reading options")[1].split("## Writing")
    for table, options in zip(tables, (READ_OPTIONS, WRITE_OPTIONS), strict=True):
        names = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
        listed = {name for cell in names for name in re.findall(r"\w+", cell)}
        assert listed == set(options)


def test_spark_lists_the_names_of_the_kafka_source() -> None:
    text = (ROOT / "docs" / "SPARK.md").read_text()
    table = text.split("## Coming from Kafka")[1].split("## Where rows come from")[0]
    for alias, name in ALIASES.items():
        (row,) = [line for line in table.splitlines() if f"`{alias}`" in line]
        assert f"`{name}`" in row


def test_named_files_exist() -> None:
    kinds = "tests|docs|src|benchmarks|ister|deploy|examples|tools"
    for document, target in mentions(rf"`((?:{kinds})/[\w/.-]+\.\w+)`", *DOCUMENTS):
        base = ROOT / "src" if target.startswith("ister/") else ROOT
        assert (base / target).exists(), f"{document}: {target}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document, target in mentions(r"`make (\w+)`", *DOCUMENTS):
        assert f"\n{target}:" in makefile, f"{document}: {target}"


def test_named_modules_exist() -> None:
    for document, module in mentions(r"`(ister(?:\.\w+)+)`", *DOCUMENTS):
        parts = module.split(".")
        path = ROOT / "src" / Path(*parts)
        is_public = len(parts) == 2 and hasattr(ister, parts[1])
        is_module = path.with_suffix(".py").exists() or path.is_dir()
        is_member = path.parent.with_suffix(".py").exists()
        package = path.parent / "__init__.py"
        is_member |= package.exists() and f'"{parts[-1]}"' in package.read_text()
        is_logger = parts[1] in {"yml", "audit"}
        assert is_public or is_module or is_member or is_logger, f"{document}: {module}"


def names_in(path: Path) -> set[str]:
    """The functions and classes of a module, methods also as `Class.method`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if hasattr(item, "name")}
    return found


def test_architecture_names_functions_that_exist() -> None:
    """In a table, names stand behind the file that has them; elsewhere any file may have them."""
    package = ROOT / "src" / "ister"
    known = set().union(*(names_in(path) for path in package.rglob("*.py")))
    document = ROOT / "docs" / "ARCHITECTURE.md"
    for _, path in mentions(r"`([a-z_]+/[\w/]+\.py)`", document):
        assert (ROOT if path.startswith("tests/") else package).joinpath(path).exists(), path
    pattern = r"`([a-z_/]+\.py)`(?: \|)?((?: `[A-Z]?\w[\w.]*`)+)"
    for _, (path, names) in mentions(pattern, document):
        here = names_in(package / path)
        owner = re.findall(r"`(\w+)\.", names)
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in here or any(f"{one}.{name}" in here for one in owner), f"{path}: {name}"
    for _, name in mentions(r"`([A-Z]\w+\.\w+)(?:\(\))?`", document):
        assert name in known, name


def test_named_tests_exist() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for document, name in mentions(r"`(test_[a-z0-9_]+)`", *DOCUMENTS):
        assert f"def {name}(" in text, f"{document}: {name}"


def test_headers_of_packages_name_their_modules() -> None:
    """A line `name   what it is`, or `name, name   what they are`, names modules that exist.

    A package of more than ten modules names all of them.
    """
    found = set()
    for path in (ROOT / "src" / "ister").rglob("*/__init__.py"):
        modules = {file.stem for file in path.parent.glob("[!_]*.py")}
        modules |= {file.parent.name for file in path.parent.glob("*/__init__.py")}
        header = ast.get_docstring(ast.parse(path.read_text())) or ""
        listed = re.findall(r"^((?:[a-z_]+, )*[a-z_]+) {2,}\S", header, re.MULTILINE)
        unknown = {name for line in listed for name in line.split(", ")} - modules
        assert not unknown, f"{path}: {sorted(unknown)}"
        found.update(listed)
        if len(modules) > 10:
            missing = modules - set(re.findall(r"\w+", header))
            assert not missing, f"{path} does not name {sorted(missing)}"
    assert len(found) > 50, "the headers of packages list their modules"


def test_example_of_help_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = ister.__doc__ or ""
    example = re.search(r"^    import ister\n(?:(?:    .*)?\n)+", text, re.MULTILINE)
    assert example is not None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(textwrap.dedent(example[0]), {})
    assert printed.getvalue() == "0 b'first'\n"
