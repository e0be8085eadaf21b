"""The source itself: layers, forbidden imports, public names, headers, nothing left over."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import ister

_PACKAGE = Path(ister.__file__).resolve().parent
_PROJECT = _PACKAGE.parent.parent
_FILES = {
    ".".join(("ister", *path.relative_to(_PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(_PACKAGE.rglob("*.py"))
}
_TREES = {name: ast.parse(path.read_text()) for name, path in _FILES.items()}

_LAYERS = {
    **dict.fromkeys(
        (
            f"ister.{name}"
            for name in [
                "errors",
                "extras",
                "limits",
                "model",
                "partitions",
                "config",
                "config_reference",
                "yaml_tree",
                "clock",
                "clock_guard",
                "metrics",
                "failpoints",
                "forks",
                "logs",
                "threads",
                "tracing",
            ]
        ),
        0,
    ),
    "ister.format": 1,
    "ister.kernels": 1,
    "ister.fs": 1,
    "ister.objectstore": 1,
    "ister.metadata": 1,
    "ister.wal": 2,
    "ister.tier": 2,
    "ister.topic": 3,
    "ister.subscription": 4,
    "ister.api": 4,
    "ister": 4,
    "ister.broker": 5,
    "ister.client": 5,
    "ister.spark": 5,
    "ister.bench": 5,
    "ister.demo": 6,
    "ister.cli": 7,
}
_IO_MODULES = {"os", "io", "socket", "subprocess", "pathlib", "shutil", "tempfile", "mmap"}
_IO_ALLOWED = {"ister.config": {"os"}, "ister.failpoints": {"os"}, "ister.forks": {"os"}}

_PUBLIC = [
    "AckLevel",
    "AlreadyExistsError",
    "CapacityError",
    "ClosedError",
    "Codec",
    "CommitUnknownError",
    "Config",
    "ConfigError",
    "ConflictError",
    "CorruptDataError",
    "DataGapError",
    "DirectoryLockedError",
    "DiskError",
    "FencedError",
    "InvalidRequestError",
    "InvariantError",
    "IsterError",
    "Log",
    "Message",
    "MessageTooLargeError",
    "NotFoundError",
    "OffsetOutOfRangeError",
    "PartitionedTopic",
    "PermissionDeniedError",
    "Reader",
    "Repaired",
    "Tiered",
    "Topic",
    "TopicNameError",
    "TopicState",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedOperationError",
    "UnsupportedVersionError",
    "WaitTimeoutError",
    "Watermarks",
    "load_config",
    "open",
    "open_history",
]


def _layer(module):
    """The layer of a module, by the longest name that has one."""
    parts = module.split(".")
    for size in range(len(parts), 0, -1):
        name = ".".join(parts[:size])
        if name in _LAYERS and (name != "ister" or len(parts) == 1):
            return _LAYERS[name]
    raise AssertionError(f"{module} has no layer")


def _imports(tree):
    """Every module that is imported, whether at the top or inside of a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module)
            found.update(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in _FILES
            )
    return found


def _public_names(tree):
    """Names that a module defines at its top and that do not begin with `_`."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("module", _FILES)
def test_module_imports_its_own_or_lower_layers(module):
    for imported in _imports(_TREES[module]):
        # `from ister import failpoints` names the package on the way to a module of it.
        if imported.split(".")[0] == "ister" and imported != "ister":
            assert imported in _FILES, f"{module} imports {imported}, which is no module"
            assert _layer(imported) <= _layer(module), f"{module} imports {imported}"


@pytest.mark.parametrize("module", [name for name in _FILES if name.startswith("ister.spark")])
def test_spark_knows_neither_the_wal_nor_the_broker(module):
    for imported in _imports(_TREES[module]):
        assert not imported.startswith(("ister.wal", "ister.broker")), f"{module}: {imported}"


@pytest.mark.parametrize("module", [name for name in _FILES if _layer(name) < 4])
def test_module_below_the_surface_does_not_import_from_it(module):
    names = {
        alias.name
        for node in ast.walk(_TREES[module])
        if isinstance(node, ast.ImportFrom) and node.module == "ister"
        for alias in node.names
    }
    assert all(f"ister.{name}" in _FILES for name in names)


@pytest.mark.parametrize(
    "module", [name for name in _FILES if _layer(name) == 0 or name.startswith("ister.format")]
)
def test_values_and_formats_do_no_io(module):
    imported = {name.split(".")[0] for name in _imports(_TREES[module])}
    assert imported & _IO_MODULES <= _IO_ALLOWED.get(module, set())


@pytest.mark.parametrize("module", [name for name in _FILES if _layer(name) in (2, 3)])
def test_log_reaches_the_disk_through_the_seam_alone(module):
    imported = {name.split(".")[0] for name in _imports(_TREES[module])}
    assert imported & _IO_MODULES <= {"os"}
    used = {
        node.attr
        for node in ast.walk(_TREES[module])
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    assert used <= {"path"}, "names may be taken apart, and nothing else"


@pytest.mark.parametrize("module", [name for name in _FILES if name.startswith("ister.wal")])
def test_wal_does_not_know_topics(module):
    assert not {name for name in _imports(_TREES[module]) if name.startswith("ister.topic")}


@pytest.mark.parametrize("module", [name for name in _FILES if name.startswith("ister.tier")])
def test_tier_does_not_know_local_logs(module):
    above = ("ister.wal", "ister.topic", "ister.fs")
    assert not {name for name in _imports(_TREES[module]) if name.startswith(above)}


def test_public_names_are_those_documented():
    assert ister.__all__ == _PUBLIC
    assert ister.__all__ == sorted(ister.__all__)
    for name in _PUBLIC:
        assert getattr(ister, name).__doc__


@pytest.mark.parametrize("module", _FILES)
def test_module_has_a_header(module):
    header = ast.get_docstring(_TREES[module])
    assert header
    assert header.split("\n")[0].endswith((".", ":"))


@pytest.mark.parametrize("module", _FILES)
def test_module_lists_its_public_names(module):
    tree = _TREES[module]
    listed = getattr(importlib.import_module(module), "__all__", None)
    if listed is None:
        assert not _public_names(tree)
        return
    assert len(listed) == len(set(listed))
    for name in listed:
        assert hasattr(importlib.import_module(module), name), f"{name} does not exist"


@pytest.mark.parametrize("module", _FILES)
def test_nothing_is_left_to_do(module):
    found = re.findall(r"\b(?:FIXME|XXX|TODO|HACK)\b", _FILES[module].read_text())
    assert not found


def test_every_module_is_reachable():
    """Goal: no module that nothing imports and nothing starts."""
    project = tomllib.loads((_PROJECT / "pyproject.toml").read_text())
    entries = {
        target.partition(":")[0] for target in project["project"].get("scripts", {}).values()
    }
    reached, waiting = set(), [*entries & set(_FILES), "ister"]
    waiting += [name for name in _FILES if name.endswith("__main__")]
    # Used by tests and by programs that log, not by the package itself.
    waiting += ["ister.fs.memory", "ister.logs"]
    # What Spark's users import, and what `ister.spark.source` loads for Spark when it is needed.
    waiting += ["ister.spark", *(f"ister.spark.{name}" for name in ("batch", "stream", "sink"))]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        parents = [module.rpartition(".")[0]] if "." in module else []
        waiting += [name for name in (*_imports(_TREES[module]), *parents) if name in _FILES]
    dynamic = _named_in_texts(set(_FILES) - reached, reached)
    assert set(_FILES) - reached - dynamic == set()


def _named_in_texts(modules, reached):
    """Modules whose names stand in a text of a module that is reached, to be imported late."""
    texts = "\n".join(
        node.value
        for module in reached
        for node in ast.walk(_TREES[module])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {module for module in modules if module in texts or module.rpartition(".")[0] in texts}


def test_version_is_the_distributions():
    project = tomllib.loads((_PROJECT / "pyproject.toml").read_text())
    assert ister.__version__ == project["project"]["version"]


def test_threads_are_started_where_their_failures_are_recorded():
    """Elsewhere only by programs that end with what they do."""
    allowed = {"ister.threads", "ister.tracing", "ister.cli.produce", "ister.spark.jobs.service"}
    found = {
        name
        for name, path in _FILES.items()
        if "threading.Thread(" in path.read_text() and not name.startswith("ister.bench")
    }
    assert found <= allowed
