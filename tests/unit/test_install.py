"""`tools.install`: what it says while pip works, and when pip fails."""

import io

import pytest
from tools import install
from tools.install import Progress, follow

PIP = """\
Obtaining file:///src
Collecting rich>=13.9 (from ister==0.1.0)
  Downloading rich-15.0.0-py3-none-any.whl (310 kB)
Collecting pyspark<5,>=4.0 (from ister==0.1.0)
  Downloading pyspark-4.3.0.tar.gz (434.5 MB)
Requirement already satisfied: PyYAML>=6.0 in ./site-packages
Building wheels for collected packages: pyspark
Installing collected packages: rich, pyspark
Successfully installed pyspark-4.3.0 rich-15.0.0
"""


def test_progress_has_packages_megabytes_phase_and_time():
    progress = Progress()
    said = []
    for line in PIP.splitlines():
        progress.read(line)
        said.append(progress.words(75.4))
    assert said[1] == "  pip: collecting, 1 packages, 1:15"
    assert said[4] == "  pip: collecting, 2 packages, 435 MB downloaded, 1:15"
    assert said[6].startswith("  pip: building, 3 packages")
    assert said[7].startswith("  pip: installing, 3")
    assert said[8].startswith("  pip: installed, 3")


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("out", "shown"), [(_Terminal(), "\r\033[K  pip: "), (io.StringIO(), "  ")]
)
def test_the_last_line_is_shown_and_everything_is_kept(out, shown):
    lines = PIP.splitlines(keepends=True)
    assert follow(iter(lines), Progress(), out) == lines
    assert out.getvalue().startswith(shown)
    assert out.getvalue().endswith("0:00\n")
    assert "installed, 3 packages" in out.getvalue()


def test_a_line_comes_while_pip_is_silent(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(install, "_LOG_SECONDS", 0.001)

    def lines():
        yield "Collecting rich\n"
        # pip says nothing for as long as it installs.
        while "1 packages" not in out.getvalue():
            pass

    follow(lines(), Progress(), out)
    assert out.getvalue().count("pip: collecting, 1 packages") >= 2


def test_what_pip_said_is_shown_when_it_fails(capfd):
    pytest.importorskip("pip")
    assert install.main(["--no-index", "no-such-package-of-anybody"]) == 1
    said = capfd.readouterr().err
    assert "pip: collecting, " in said
    assert "No matching distribution found for no-such-package-of-anybody" in said
