"""`ister completion`: a real bash completes with the script."""

import shutil
import subprocess

import pytest

from ister.cli.completion import make_script
from ister.cli.main import main, make_parser
from ister.cli.parser import walk_commands

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "ister.bash"
    path.write_text(make_script(make_parser(), "bash"))
    return path


def complete(script, line, directory):
    """What bash offers at the end of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"""
        source '{script}'
        COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
        COMP_LINE='{line}' COMP_POINT={len(line)}
        function_name=$(complete -p ister | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function_name ister '{words[-1]}' '{words[-2]}' 2>/dev/null
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        [BASH, "--norc", "-c", code], capture_output=True, text=True, check=True, cwd=directory
    )
    return set(done.stdout.split())


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_completes(script, tmp_path):
    (tmp_path / "ister.yml").touch()
    (tmp_path / "data").mkdir()
    for line, offered, not_offered in [
        ("ister ser", {"serve"}, {"topics"}),
        ("ister ", {"serve", "topics", "config", "pipeline"}, {"wal"}),
        ("ister config ", {"check", "show", "example"}, {"serve"}),
        ("ister config check --con", {"--config", "--connect"}, {"--json"}),
        ("ister pipeline compact --format ", {"dnb1", "parquet"}, {"delta"}),
        ("ister completion ", {"bash", "zsh", "fish", "tcsh"}, {"serve"}),
        ("ister serve --config ", {"ister.yml", "data"}, set()),
        ("ister serve --config is", {"ister.yml"}, {"data"}),
        ("ister serve --data-dir ", {"data"}, {"ister.yml"}),
        ("ister config check ", {"ister.yml"}, set()),
    ]:
        found = {item.rstrip("/") for item in complete(script, line, tmp_path)}
        assert offered <= found, line
        assert not not_offered & found, line


def test_script_of_each_shell_names_every_command(capsys):
    for shell in ["bash", "zsh", "fish", "tcsh"]:
        assert main(["completion", shell]) == 0, shell
        script = capsys.readouterr().out
        for command in make_parser().commands:
            assert command in script, shell


def test_script_is_one_that_the_shell_reads(tmp_path):
    for shell in ["bash", "zsh", "fish"]:
        if shutil.which(shell) is None:
            continue
        path = tmp_path / "script"
        path.write_text(make_script(make_parser(), shell))
        subprocess.run([shell, "-n", str(path)], check=True, capture_output=True)


def test_arguments_that_are_files_and_directories_are_completed_as_such():
    parser = make_parser()
    make_script(parser, "bash")
    kinds = {
        (command.prog, action.dest): action.complete["bash"]
        for command in walk_commands(parser)
        for action in command.arguments
        if hasattr(action, "complete")
    }
    assert kinds["ister serve", "config"].endswith("files")
    assert kinds["ister serve", "data_dir"].endswith("dirs")
    assert kinds["ister inspect wal", "path"].endswith("files")
    assert kinds["ister pipeline export", "schema"].endswith("files")


def test_shell_that_is_unknown_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["completion", "bahs"])
    assert stop.value.code == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
