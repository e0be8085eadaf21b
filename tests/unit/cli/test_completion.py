"""`ister completion`: a real bash completes with the script, names of topics included."""

import contextlib
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

import ister
from ister.cli import known_names as known_names_module
from ister.cli.completion import make_script
from ister.cli.known_names import known_names
from ister.cli.main import main, make_parser
from ister.cli.parser import walk_commands
from ister.errors import NotFoundError, UnavailableError

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "ister.bash"
    path.write_text(make_script(make_parser(), "bash"))
    return path


def complete(script, line, directory, **variables):
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
        [BASH, "--norc", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=directory,
        env={**os.environ, **variables},
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


# -- names ----------------------------------------------------------------------------------


class _Broker:
    """A client of a broker with some topics, one of them with an evil subscription."""

    def __init__(self):
        self.asked = []

    @contextlib.contextmanager
    def connected(self, options):
        self.asked.append((options.broker, options.retry_for, options.answer_within))
        if options.broker == "dead:1":
            raise UnavailableError("no broker answers")
        yield self

    @property
    def admin(self):
        return self

    def namespaces(self):
        return ["default", "gone", "shop"]

    def topics(self, namespace):
        if namespace == "gone":
            raise NotFoundError("deleted")
        return {
            "default": ["/default/orders", "/default/parts-part-0", "/default/parts-part-1"],
            "shop": ["/shop/orders"],
        }[namespace]

    def schema_subjects(self):
        return [SimpleNamespace(subject="orders"), SimpleNamespace(subject="users")]

    def subscriptions(self, topic):
        names = ["billing", "bill-2", "$(touch evil)", "a b", "-x", "eu:1", "audit"]
        return names if topic == "/default/orders" else []


@pytest.fixture
def broker(monkeypatch):
    one = _Broker()
    monkeypatch.setattr(known_names_module, "connected", one.connected)
    monkeypatch.delenv("ISTER_BROKER", raising=False)
    return one


def test_names_are_those_of_the_broker(broker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert known_names("topics", "ister consume ", "") == [
        "/default/orders",
        "/default/parts",
        "/default/parts-part-0",
        "/default/parts-part-1",
        "/shop/orders",
    ]
    assert known_names("topics", "ister consume /sh", "/sh") == ["/shop/orders"]
    assert known_names("namespaces", "ister top --namespace ", "") == ["default", "gone", "shop"]
    assert known_names("subjects", "ister schema show or", "or") == ["orders"]
    # Names that a shell would evaluate, or take apart, are left out.
    line = "ister subscriptions seek /default/orders "
    assert known_names("subscriptions", line, "") == ["audit", "bill-2", "billing"]
    assert known_names("subscriptions", line + "bi", "bi") == ["bill-2", "billing"]
    assert known_names("subscriptions", "ister consume --subscription ", "") == []


def test_the_line_says_which_broker(broker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in (
        "ister consume --broker b:1 ",
        "ister consume --broker=b:1 /def",
        "ister topics list; echo x | ister consume --broker 'b:1' ",
        "ister consume --broker b:1 --from 7d --key 'eu ",
    ):
        assert known_names("topics", line, ""), line
        assert broker.asked[-1] == ("b:1", 1.0, 1.0), line
    assert known_names("topics", "ister consume --broker dead:1 ", "") == []
    # Wrong lines, and half of one.
    assert known_names("topics", "ister consume --retry-for x ", "") == []
    assert known_names("topics", "", "") != []


def test_names_of_a_directory(broker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ister.open(tmp_path / "data") as log:
        log.topic("/default/stored", create=True).append(b"x")
    asked = len(broker.asked)
    assert known_names("topics", "ister topics describe --data data ", "") == ["/default/stored"]
    assert known_names("namespaces", "ister topics list --data data --namespace ", "") == [
        "default"
    ]
    assert known_names("topics", "ister topics describe --data none ", "") == []
    assert len(broker.asked) == asked
    (tmp_path / "data").rename(tmp_path / "ister-data")
    monkeypatch.setattr(known_names_module, "connected", _no_broker)
    assert known_names("topics", "ister topics describe ", "") == ["/default/stored"]
    # A broker that is named is not replaced by a directory.
    assert known_names("topics", "ister topics describe --broker b:1 ", "") == []


def test_names_of_contexts_need_no_broker(broker, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert known_names("contexts", "ister context use ", "") == []
    assert main(["context", "add", "prod", "--broker", "b:1"]) == 0
    assert known_names("contexts", "ister consume --context p", "p") == ["prod"]
    assert broker.asked == []


@contextlib.contextmanager
def _no_broker(options):
    raise UnavailableError("no broker answers")
    yield


@pytest.mark.skipif(BASH is None, reason="there is no bash")
def test_bash_asks_for_names_and_evaluates_none(script, tmp_path):
    """The real function of the script, with an `ister` that says what it was asked."""
    fake = tmp_path / "bin" / "ister"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n"
        f'printf "%s\\n" "$@" >> {tmp_path}/asked\n'
        "echo noise >&2\n"
        "echo /default/orders\n"
        "echo '$(touch\\ evil)'\n"
    )
    fake.chmod(0o755)
    path = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    for line, kind in [
        ("ister consume /def", "topics"),
        ("ister topics describe --broker b:1 ", "topics"),
        ("ister subscriptions seek /default/orders bi", "subscriptions"),
        ("ister consume /default/orders --subscription ", "subscriptions"),
        ("ister subscriptions list --namespace ", "namespaces"),
        ("ister pipeline replay /default/a ", "topics"),
        ("ister schema show ", "subjects"),
        ("ister context use ", "contexts"),
        ("ister top --context ", "contexts"),
        ("ister namespaces delete ", "namespaces"),
    ]:
        (tmp_path / "asked").write_text("")
        found = complete(script, line, tmp_path, **path)
        assert "/default/orders" in found, line
        word = line.rpartition(" ")[2]
        expected = ["completion", "bash", "--names", kind, f"--prefix={word}", f"--line={line}"]
        assert (tmp_path / "asked").read_text().splitlines() == expected
    assert not (tmp_path / "evil").exists()


def test_the_command_prints_names(broker, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--names", "topics", "--prefix=/shop", "--line=ister consume /shop"]
    assert main(["completion", "bash", *arguments]) == 0
    assert capsys.readouterr() == ("/shop/orders\n", "")
    assert main(["completion", "zsh"]) == 0
    assert "_ister_names topics" in capsys.readouterr().out
    arguments[-1] = "--line=ister consume --broker dead:1 /shop"
    assert main(["completion", "bash", *arguments]) == 0
    assert capsys.readouterr() == ("", "")


def test_scripts_of_other_shells_ask_too():
    for shell, text in {
        "zsh": " _ister_names topics",
        "fish": "(ister completion fish --names topics --line (commandline -cp) 2>/dev/null)",
        "tcsh": "`ister completion tcsh --names topics`",
    }.items():
        assert text in make_script(make_parser(), shell), shell
