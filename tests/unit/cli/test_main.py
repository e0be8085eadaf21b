"""The command as a whole: usage, exit codes, where errors go."""

import os
import subprocess
import sys

import pytest

import ister
from ister import __version__
from ister.cli.main import main
from ister.cli.output import confirm, print_table


def test_version_names_the_release(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ister {__version__}\n"


def test_installed_command_shows_an_error_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ister.cli.main", "inspect", "wal", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("ister: ")
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_to_a_full_disk_is_an_error_without_a_traceback():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ister.cli.main", "config", "example"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "ister: cannot write the output: No space left on device\n"


def test_help_in_a_locale_without_its_characters():
    done = subprocess.run(
        [sys.executable, "-m", "ister.cli.main", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"usage: ister COMMAND" in done.stdout


def test_closed_standard_files_are_no_terminal(monkeypatch):
    """`ister … <&- >&-`: Python has None in their place."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stdin", None)
    print_table(("a",), [("b",)])
    assert not confirm("Go on?", is_confirmed=False)


def test_output_into_a_closed_pipe_ends_quietly(tmp_path):
    """`ister … | head` must not complain; the pipe's reader is gone before anything is printed."""
    ister.open({"storage": {"wal": {"dir": str(tmp_path)}}}).close()
    child = subprocess.Popen(
        [sys.executable, "-m", "ister.cli.main", "inspect", "wal", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdout.close()
    error = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 1
    assert error == ""


@pytest.mark.parametrize("arguments", [["--data=~/data"], ["--data", "~/data"]])
def test_tilde_in_a_path_is_the_home_directory(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    with ister.open(tmp_path / "data") as log:
        log.topic("/default/a", create=True)
    assert main(["topics", "list", "--json", *arguments]) == 0
    assert "/default/a" in capsys.readouterr().out


def test_home_directory_of_an_unknown_user_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["topics", "list", "--data", "~nobody-of-that-name/x"])
    assert ended.value.code == 2
    assert "'~nobody-of-that-name/x'" in capsys.readouterr().err
