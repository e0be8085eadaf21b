"""`ister context`: named brokers, what is stored, and which broker a command talks to."""

import argparse
import io
import json
import os
import stat
import sys

import pytest

from ister.cli.connection import add_broker_arguments, target_of
from ister.cli.contexts import contexts_path, load_contexts
from ister.cli.main import main
from ister.errors import ConfigError, NotFoundError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main(["context", *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def target(*arguments):
    parser = argparse.ArgumentParser()
    add_broker_arguments(parser)
    return target_of(parser.parse_args(arguments))


@pytest.fixture
def prod(run, home, monkeypatch):
    """A context with everything in it."""
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (home / name).write_text(name)
    monkeypatch.chdir(home)
    files = [f"--{name}-file={name}.pem" for name in ("ca", "cert", "key")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("canary-token\n"))
    code, *_ = run(
        *("add", "prod", "--broker", "broker.example:6650", *files),
        *("--server-name", "broker", "--token-stdin"),
    )
    assert code == 0


def test_a_context_is_stored_for_its_owner_alone_and_never_shows_its_token(run, home, prod):
    path = contexts_path()
    assert path == str(home / "config" / "ister" / "contexts.yaml")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(os.path.dirname(path)) == ["contexts.yaml"]
    stored = load_contexts().by_name["prod"]
    assert stored.token == "canary-token"
    assert stored.ca_file == str(home / "ca.pem")
    for arguments in (("list",), ("list", "--json"), ("show", "prod"), ("show", "prod", "--json")):
        code, out, err = run(*arguments)
        assert code == 0
        assert "broker.example:6650" in out
        assert "canary" not in out + err
    assert "canary" not in repr(stored)
    shown = json.loads(run("show", "prod", "--json")[1])
    assert shown["has_token"]
    assert shown["tls"]
    assert not shown["is_current"]


def test_contexts_are_used_replaced_and_removed(run, prod):
    assert run("add", "local", "--broker", "127.0.0.1:7000", "--use")[0] == 0
    assert target().address == "127.0.0.1:7000"
    code, _, err = run("add", "local", "--broker", "127.0.0.1:7001")
    assert code == 1
    assert "--replace" in err
    assert run("add", "local", "--broker", "127.0.0.1:7001", "--replace")[0] == 0
    assert target().address == "127.0.0.1:7001"
    assert run("use", "prod")[0] == 0
    lines = run("list")[1].splitlines()
    assert [line.split()[0] for line in lines if "*" in line] == ["prod"]
    assert run("use", "--none")[0] == 0
    assert target().address == "127.0.0.1:6650"
    assert not target().is_named
    assert run("use", "prod")[0] == 0
    assert run("remove", "prod")[0] == 0
    known = load_contexts()
    assert (list(known.by_name), known.current) == (["local"], None)


def test_what_is_wrong_is_said_when_a_context_is_added(run, home):
    for arguments, said in [
        (["no spaces", "--broker", "b:1"], "invalid context name"),
        (["x", "--broker", "b"], "invalid broker address"),
        (["x", "--broker", "b:1", "--ca-file", "none.pem"], "cannot be read"),
        (["x", "--broker", "b:1", "--cert-file", "c.pem"], "set together"),
        (["x", "--broker", "http://b:1", "--tls"], "contradict"),
        (["x", "--broker", "b:1", "--token-file", "none"], "cannot read the token file"),
    ]:
        code, out, err = run("add", *arguments)
        assert (code, out) == (1, ""), arguments
        assert said in err, arguments
    assert not os.path.exists(contexts_path())
    for arguments in (["use", "nope"], ["remove", "nope"], ["show", "nope"], ["show"], ["use"]):
        code, _, err = run(*arguments)
        assert code == 1, arguments
        assert err.startswith("ister: "), arguments


def test_options_then_environment_then_context_then_default(run, home, prod, monkeypatch):
    (home / "token").write_text("second\n")
    assert run("add", "other", "--broker", "o:1", "--token-file", str(home / "token"))[0] == 0
    assert run("use", "prod")[0] == 0
    found = target()
    assert (found.address, found.token) == ("broker.example:6650", "canary-token")
    assert found.tls_options().server_name == "broker"
    # The environment's context before the current one.
    monkeypatch.setenv("ISTER_CONTEXT", "other")
    assert (target().address, target().token) == ("o:1", "second")
    # A token of the environment before that of a context which the environment names.
    monkeypatch.setenv("ISTER_TOKEN", "environment")
    assert (target().address, target().token) == ("o:1", "environment")
    # A context that is given as an option before the environment.
    found = target("--context", "prod")
    assert (found.address, found.token) == ("broker.example:6650", "canary-token")
    found = target("--context", "prod", "--broker", "b:2", "--token", "given", "--tls")
    assert (found.address, found.token, found.ca_file) == ("b:2", "given", None)
    assert found.is_encrypted
    monkeypatch.setenv("ISTER_BROKER", "e:3")
    assert target().address == "e:3"


def test_a_token_of_a_context_is_not_sent_to_another_broker(run, prod, monkeypatch):
    assert run("use", "prod")[0] == 0
    found = target("--broker", "elsewhere:1")
    assert (found.token, found.is_encrypted) == (None, False)
    monkeypatch.setenv("ISTER_BROKER", "elsewhere:2")
    found = target()
    assert (found.address, found.token, found.is_encrypted) == ("elsewhere:2", None, False)


def test_a_file_that_others_may_read_or_nobody_can_is_told(run, home, prod, capsys):
    path = contexts_path()
    os.chmod(path, 0o644)
    load_contexts()
    assert f"chmod 600 {path}" in capsys.readouterr().err
    for text, said in [
        ("contexts: {prod: {}}", "has no broker"),
        ("contexts: {prod: {broker: b:1, ca: x}}", "unknown setting 'ca'"),
        ("contexts: [", "contexts.yaml"),
    ]:
        with open(path, "w") as file:
            file.write(text)
        with pytest.raises(ConfigError) as caught:
            target()
        assert said in str(caught.value)
    with open(path, "w") as file:
        file.write("current: null\ncontexts: {}\n")
    assert target().address == "127.0.0.1:6650"
    with pytest.raises(NotFoundError):
        target("--context", "nope")


def test_without_a_variable_the_file_is_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert contexts_path() == str(tmp_path / ".config" / "ister" / "contexts.yaml")


def test_a_file_with_a_typing_error_does_not_lead_elsewhere(run, home):
    """Neither to a connection in clear, nor to the default broker, nor to a file without it."""
    path = home / "config" / "ister" / "contexts.yaml"
    path.parent.mkdir(parents=True)
    for word, is_tls in (("on", True), ("yes", True), ("off", False)):
        path.write_text(f"current: a\ncontexts: {{a: {{broker: 'b.example:1', tls: {word}}}}}")
        assert load_contexts().by_name["a"].uses_tls is is_tls, word
    path.write_text("contexts: {a: {broker: 'b.example:1', tls: ture}}")
    with pytest.raises(ConfigError):
        load_contexts()
    path.write_text("current: b\ncontexts: {a: {broker: 'b.example:1'}}")
    with pytest.raises(NotFoundError):
        target()
    assert run("use", "a")[0] == 0
    path.write_text("contexts: [a]")
    code, _, error = run("add", "c", "--broker", "c.example:1")
    assert (code, "contexts are not names" in error) == (1, True)
    assert path.read_text() == "contexts: [a]"
