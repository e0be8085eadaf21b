"""A skip in CI fails the run, unless its reason is listed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = """
import pytest

from tests.support.cases import each

@each("number", [1, 2])
def test_alpha(number):
    pytest.skip("needs nginx")

def test_beta(): ...

def test_gamma(tmp_path):
    pytest.importorskip("no_such_module_at_all")
"""


@pytest.mark.parametrize(
    ("environment", "selected", "code"),
    [
        ({"ISTER_STRICT_SKIPS": "1"}, "alpha or beta", 0),
        ({"ISTER_STRICT_SKIPS": "1"}, "gamma or beta", 1),
        ({}, "gamma or beta", 0),
    ],
)
def test_skip_without_a_listed_reason_fails_where_it_is_strict(
    tmp_path, environment, selected, code
):
    root = Path(__file__).parents[2]
    inner = tmp_path / "test_inner.py"
    inner.write_text(_TESTS)
    clean = {name: value for name, value in os.environ.items() if name != "ISTER_STRICT_SKIPS"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *(f"--rootdir={root}", f"--confcutdir={root}", "-c", str(root / "pyproject.toml")),
            *("-p", "tests.conftest", "-k", selected, str(inner)),
        ],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("no_such_module_at_all" in done.stdout) == ("gamma" in selected)
