"""The source itself: layers, seams, public names, and no module without a user.

Where a rule has exceptions, they are exactly those: one that is no longer needed fails its test. A
rule that finds nothing to look at fails as well.
"""

import ast
import importlib
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
_TEXTS = {name: path.read_text() for name, path in _FILES.items()}


class _Lazily(dict):
    """What a function makes of each module, when a test asks: all workers import this file."""

    def __init__(self, make):
        super().__init__(dict.fromkeys(_FILES))
        self._make = make

    def __getitem__(self, module):
        if (found := super().__getitem__(module)) is None:
            found = self[module] = self._make(module)
        return found

    def items(self):
        return [(module, self[module]) for module in _FILES]

    def values(self):
        return [self[module] for module in _FILES]


_TREES = _Lazily(lambda module: ast.parse(_TEXTS[module]))

_LAYERS = {
    "ister.base": 0,
    "ister.config": 0,
    "ister.errors": 0,
    "ister.format": 1,
    "ister.kernels": 1,
    "ister.base.certificates": 1,
    "ister.fs": 1,
    "ister.objectstore": 1,
    "ister.metadata": 1,
    "ister.wal": 2,
    "ister.bucket": 2,
    "ister.wire": 3,
    "ister.topic": 3,
    "ister.rescue": 3,
    "ister.subscription": 4,
    "ister.api": 4,
    "ister": 4,
    "ister.broker": 5,
    "ister.client": 5,
    "ister.spark": 5,
    "ister.cli": 6,
    "ister.__main__": 6,
    "ister.testing": 6,
}
_FORBIDDEN = {
    # package: what it must not import although its layer would allow it
    "ister.wal": ("ister.topic", "ister.rescue"),
    "ister.bucket": ("ister.wal", "ister.topic", "ister.rescue", "ister.fs"),
    "ister.client": ("ister.broker",),
    "ister.broker": ("ister.client",),
    "ister.spark": ("ister.wal", "ister.broker"),
    "ister.cli": ("ister.wal", "ister.fs", "ister.format", "ister.bucket"),
}
_IO_MODULES = {"os", "io", "socket", "subprocess", "pathlib", "shutil", "tempfile", "mmap"}
_IO_ALLOWED = {
    **{f"ister.config.{name}": {"os"} for name in ("checks", "loading", "values")},
    "ister.base.forks": {"os"},
}

_PUBLIC = """
    AckLevel AlreadyExistsError CapacityError ClosedError Codec CommitUnknownError Config
    ConfigError ConflictError CorruptDataError DataGapError DirectoryLockedError DiskError
    FencedError InvalidRequestError IsterError Log Message MessageTooLargeError NotFoundError
    OffsetOutOfRangeError PartitionedTopic PermissionDeniedError Reader StoresDifferError Topic
    TopicNameError TopicState UnauthenticatedError UnavailableError UnsupportedOperationError
    UnsupportedVersionError UploadResult WaitTimeoutError WaitsForDiskError Watermarks load_config
    open open_bucket
"""


def _layer(module):
    """The layer of a module, by the longest name that has one."""
    parts = module.split(".")
    for size in range(len(parts), 0, -1):
        name = ".".join(parts[:size])
        if name in _LAYERS and (name != "ister" or len(parts) == 1):
            return _LAYERS[name]
    raise AssertionError(f"{module} has no layer")


def _is_in(module, package):
    return module == package or module.startswith(f"{package}.")


def _find_imports(module):
    """Every module that is imported, whether at the top or inside of a function."""
    found = set()
    for node in ast.walk(_TREES[module]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            found.add(node.module)
            found.update(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in _FILES
            )
    return found


_IMPORTS = _Lazily(_find_imports)


# -- layers -------------------------------------------------------------------------------------


def test_modules_import_their_own_or_lower_layers():
    for module, imports in _IMPORTS.items():
        for imported in imports:
            # `from ister import failpoints` names the package on the way to a module of it.
            if imported.split(".")[0] == "ister" and imported != "ister":
                assert imported in _FILES, f"{module} imports {imported}, which does not exist"
                assert _layer(imported) <= _layer(module), f"{module} imports {imported}"


def test_packages_do_not_import_what_is_forbidden_to_them():
    found = {
        module
        for package, forbidden in _FORBIDDEN.items()
        for module in _FILES
        if _is_in(module, package)
        if any(_is_in(imported, name) for imported in _IMPORTS[module] for name in forbidden)
    }
    assert found == set()


_BROKER_LAYERS = (
    {"counters", "tasks", "followed", "policies"},
    {"schemas", "security", "rpc"},
    {"cluster", "dispatch"},
    {"publish", "topics"},
    {"flight", "operations"},
    {"observe"},
    {"services"},
    {"http"},
    {"server"},
)
"""Packages of the broker, from the lowest."""


def test_imports_inside_the_broker_go_one_way():
    layers = {name: at for at, names in enumerate(_BROKER_LAYERS) for name in names}
    found = {
        (module.split(".")[2], imported.split(".")[2])
        for module, imports in _IMPORTS.items()
        for imported in imports
        if module.startswith("ister.broker.") and imported.startswith("ister.broker.")
    }
    assert {name for names in found for name in names} <= set(layers)
    # Pairs that are not parted yet; and what calls leave to the layer above them.
    known = {
        ("rpc", "security"),
        ("security", "rpc"),
        ("publish", "topics"),
        ("topics", "publish"),
        ("rpc", "dispatch"),
    }
    upward = {(own, other) for own, other in found - known if layers[other] > layers[own]}
    beside = {(own, other) for own, other in found - known if layers[other] == layers[own]}
    assert upward == set()
    assert {names for names in beside if names[0] != names[1]} == set()


def test_every_layer_has_modules():
    """The rules of this file look at modules: without any, each of them would pass."""
    assert {_layer(module) for module in _FILES} == set(range(7))
    named = {*_FORBIDDEN, *(name for names in _FORBIDDEN.values() for name in names)}
    assert named <= set(_FILES)


def test_modules_below_the_surface_do_not_import_from_it():
    found = {
        (module, alias.name)
        for module in _FILES
        if _layer(module) < 4
        for node in ast.walk(_TREES[module])
        if isinstance(node, ast.ImportFrom) and node.module == "ister"
        for alias in node.names
    }
    assert [(module, name) for module, name in found if f"ister.{name}" not in _FILES] == []


def test_values_and_formats_do_no_io():
    found = {
        module: {name.split(".")[0] for name in _IMPORTS[module]} & _IO_MODULES
        for module in _FILES
        if _layer(module) == 0 or _is_in(module, "ister.format")
    }
    assert {module: used for module, used in found.items() if used} == _IO_ALLOWED


def test_logs_reach_the_disk_through_the_seam_alone():
    logs = [module for module in _FILES if _layer(module) in (2, 3)]
    imported = {name.split(".")[0] for module in logs for name in _IMPORTS[module]}
    assert imported & _IO_MODULES == {"os"}
    used = {
        (module, node.attr)
        for module in logs
        for node in ast.walk(_TREES[module])
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    assert {name for _, name in used} == {"path"}, f"more of `os` than `os.path`: {used}"


# -- names and words ----------------------------------------------------------------------------


def test_public_names_are_those_documented():
    assert ister.__all__ == _PUBLIC.split()
    assert ister.__all__ == sorted(ister.__all__)
    for name in ister.__all__:
        assert getattr(ister, name).__doc__, name


@pytest.mark.parametrize(
    ("old", "new"), [("open_history", "open_bucket"), ("Tiered", "UploadResult")]
)
def test_names_of_the_release_before_work_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"ister.{old} is ister.{new} now"):
        found = getattr(ister, old)
    assert found is getattr(ister, new)


def test_listed_names_exist():
    """Packages list what users import from them; elsewhere a private name begins with `_`."""
    for module in _FILES:
        imported = importlib.import_module(module)
        listed = getattr(imported, "__all__", [])
        assert len(listed) == len(set(listed)), module
        for name in listed:
            assert hasattr(imported, name), f"{module}.{name} does not exist"


def test_version_is_the_distributions():
    project = tomllib.loads((_PROJECT / "pyproject.toml").read_text())
    assert ister.__version__ == project["project"]["version"]


# -- dead modules -------------------------------------------------------------------------------


def test_every_module_is_reachable():
    """Goal: no module that nothing imports and nothing starts."""
    project = tomllib.loads((_PROJECT / "pyproject.toml").read_text())
    entries = {
        target.partition(":")[0] for target in project["project"].get("scripts", {}).values()
    }
    waiting = [*entries & set(_FILES), "ister"]
    waiting += [name for name in _FILES if name.endswith("__main__")]
    # Used by programs that log, not by the package itself.
    waiting += ["ister.base.logs"]
    # What users of Spark and of a broker import.
    waiting += ["ister.spark", "ister.client", "ister.testing"]
    reached = set()
    while waiting:
        module = waiting.pop()
        if module in reached or module not in _FILES:
            continue
        reached.add(module)
        waiting += [*_IMPORTS[module], *_find_late_imports(module), module.rpartition(".")[0]]
    unreached = set(_FILES) - reached
    assert unreached == set(), "modules without a user"


def _find_late_imports(module):
    """Modules that `import_module` loads, by their name or by a package and a table of names."""
    calls = [
        node.args[0]
        for node in ast.walk(_TREES[module])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
    ]
    texts = {
        node.value
        for node in ast.walk(_TREES[module])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for call in calls:
        if isinstance(call, ast.JoinedStr):  # f"ister.spark.{name}" or f"{__name__}.{name}"
            package = ast.unparse(call)[2:-1].replace("{__name__}", module).partition(".{")[0]
            yield from (f"{package}.{text}" for text in texts)
        else:
            yield from texts & set(_FILES)


# -- threads and private names --------------------------------------------------------------------


def test_threads_are_started_where_their_failures_are_recorded():
    """Elsewhere only by programs that end with what they do."""
    allowed = {"ister.base.threads", "ister.base.tracing", "ister.cli.produce"}
    found = {name for name, text in _TEXTS.items() if "threading.Thread(" in text}
    assert found == allowed


def test_only_public_names_of_pyspark_are_used():
    """Private ones differ between the versions that `ister.spark.compat` speaks of."""
    private = {"_jvm", "_jdf", "_jsc", "_jrdd", "_jsparkSession", "_sc", "_active_spark_context"}
    found = set()
    for module, tree in _TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert node.attr not in private, f"{module}: {ast.unparse(node)}"
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                if name.split(".")[0] == "pyspark":
                    found.add(name)
                    assert "._" not in name, f"{module} imports {name}"
                    # Not in PySpark's reference: conversions that change with every version.
                    assert not _is_in(name, "pyspark.sql.pandas"), f"{module} imports {name}"
    assert found, "no module imports pyspark"


def test_nothing_uses_what_is_not_in_the_wheel():
    outside = {
        name
        for name, imports in _IMPORTS.items()
        if {imported.split(".")[0] for imported in imports} & {"benchmarks", "demo"}
    }
    assert outside == set()
