"""`ister serve`: settings from arguments, what it says, how it ends."""

import argparse
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest
import uvloop

from ister.cli import serve
from ister.cli.main import main
from ister.config import load_config
from tests.servers.broker import STOP_SECONDS
from tests.support.commands import Terminal

ANY_PORTS = ["--port=0", "--flight-port=0", "--http-port=0"]
PATIENCE_SECONDS = 120.0


def parsed(*arguments):
    """Settings as the command takes them from its arguments."""
    parser = argparse.ArgumentParser()
    serve.COMMANDS["serve"](parser.add_subparsers())
    return serve.load_settings(parser.parse_args(["serve", *arguments]))


# -- settings ---------------------------------------------------------------------------------


@pytest.fixture
def _no_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("ISTER_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_no_environment")
def test_without_arguments_it_is_for_this_machine_and_data_is_here():
    config = parsed()
    assert config.broker.host == "127.0.0.1"
    ports = config.broker.ports
    assert (ports.grpc, ports.flight, ports.http) == (6650, 6651, 9040)
    assert config.storage.wal.dir.endswith("ister-data/wal")
    assert not config.broker.allow_insecure


@pytest.mark.usefixtures("_no_environment")
def test_arguments_are_settings(tmp_path):
    config = parsed(
        f"--data-dir={tmp_path}/d",
        "--host=0.0.0.0",
        "--port=1",
        "--flight-port=2",
        "--http-port=3",
        "--allow-insecure",
    )
    assert config.storage.wal.dir == f"{tmp_path}/d/wal"
    assert config.broker.host == "0.0.0.0"
    ports = config.broker.ports
    assert (ports.grpc, ports.flight, ports.http) == (1, 2, 3)
    assert config.broker.allow_insecure


@pytest.mark.usefixtures("_no_environment")
def test_arguments_come_before_the_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "ister.yml"
    file.write_text(
        f"storage: {{wal: {{dir: {tmp_path}/f/wal}}}}\nbroker: {{ports: {{grpc: 7, flight: 8}}}}\n"
    )
    assert parsed(f"--config={file}").broker.ports.grpc == 7
    monkeypatch.setenv("ISTER_CONFIG", str(file))
    config = parsed("--port=9")
    assert (config.broker.ports.grpc, config.broker.ports.flight) == (9, 8)
    assert config.storage.wal.dir == f"{tmp_path}/f/wal"
    # A directory that is named is the one that is meant.
    assert parsed(f"--data-dir={tmp_path}/d").storage.wal.dir == f"{tmp_path}/d/wal"


# -- refusals ---------------------------------------------------------------------------------


def test_a_missing_library_is_answered_with_what_to_install(tmp_path):
    for library in ["grpc", "aiohttp", "google.protobuf"]:
        program = (
            f"import sys; sys.modules[{library!r}] = None\n"
            "from ister.cli.main import main\n"
            f"sys.exit(main(['serve', '--data-dir={tmp_path}/d']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 1, library
        assert "ister[broker]" in done.stderr, library
        assert "Traceback" not in done.stderr, library
        assert list(tmp_path.iterdir()) == [], library


# -- a process --------------------------------------------------------------------------------


@contextmanager
def process(directory, *arguments, **environment):
    """`ister serve` in a directory, ended whatever happens."""
    directory.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ISTER_")}
    with (
        (directory / "stderr").open("ab") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "ister.cli.main", "serve", *ANY_PORTS, *arguments],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**clean, **environment},
        ) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def read_until(child, wanted):
    """What a process says on standard output up to a text."""
    said, deadline = b"", time.monotonic() + PATIENCE_SECONDS
    while wanted not in said:
        wait = deadline - time.monotonic()
        assert select.select([child.stdout], [], [], max(wait, 0))[0], said
        chunk = os.read(child.stdout.fileno(), 65536)
        assert chunk, f"it ended: {said!r}"
        said += chunk
    return said.decode()


def end(child, number=signal.SIGTERM):
    """Its exit code, and how long it took."""
    start = time.monotonic()
    child.send_signal(number)
    return child.wait(PATIENCE_SECONDS), time.monotonic() - start


def test_without_arguments_it_serves_on_a_directory_here_and_ends_with_0(tmp_path):
    with process(tmp_path) as child:
        said = read_until(child, b"Press Ctrl-C to stop it.\n")
        assert said.startswith("Ister is ready.\n")
        assert f"  data    {tmp_path}/ister-data\n" in said
        [line] = [line for line in said.splitlines() if line.strip().startswith("gRPC")]
        host, port = line.split()[1].split(":")
        with closing(socket.create_connection((host, int(port)), 10)):
            pass
        code, took = end(child)
    assert code == 0, (tmp_path / "stderr").read_text()
    assert took < STOP_SECONDS
    assert (tmp_path / "ister-data" / "wal").is_dir()


def test_one_line_of_json_says_where_it_listens(tmp_path):
    with process(tmp_path, "--json", "--data-dir=d") as child:
        said = read_until(child, b"\n")
        event = json.loads(said)
        assert event.pop("event") == "ready"
        assert event.pop("pid") == child.pid
        assert set(event) == {"grpc", "flight", "http"}
        for address in event.values():
            host, port = address.split(":")
            assert host == "127.0.0.1"
            with closing(socket.create_connection((host, int(port)), 10)):
                pass
        code, took = end(child, signal.SIGINT)
        rest = child.stdout.read()
    assert (code, rest) == (0, b"")
    assert took < STOP_SECONDS
    logged = [json.loads(line) for line in (tmp_path / "stderr").read_text().splitlines()]
    said = [line["event"] for line in logged if line["target"] == "ister.cli.serve"]
    assert said == ["stopping", "stopped"]


# -- what is said at the start --------------------------------------------------------------

LISTENING = {"grpc": "127.0.0.1:7001", "flight": "127.0.0.1:7002", "http": "0.0.0.0:7003"}


def test_greeting_in_a_pipe_is_plain(capsys, tmp_path):
    serve._greet(load_config(str(tmp_path)), LISTENING)
    assert capsys.readouterr().out.splitlines() == [
        "Ister is ready.",
        "  gRPC    127.0.0.1:7001   Danube's clients: http://127.0.0.1:7001",
        "  Flight  127.0.0.1:7002",
        "  HTTP    http://0.0.0.0:7003/",
        f"  data    {tmp_path}",
        "Press Ctrl-C to stop it.",
    ]


@pytest.mark.parametrize("columns", ["80", "50"])
def test_greeting_on_a_terminal_is_a_panel_that_fits(columns, monkeypatch, tmp_path):
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", shown)
    serve._greet(load_config({"storage": {"mode": "memory"}}), LISTENING)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert "Ister is ready" in lines[0]
    assert all(len(line) <= int(columns) for line in lines)
    text = " ".join(line.strip("│ ") for line in lines)
    assert "http://127.0.0.1:7003/" in text
    assert "--broker 127.0.0.1:7001" in text
    assert "in memory" in text


@pytest.mark.usefixtures("_no_environment")
def test_settings_that_are_wrong_name_their_file_and_the_command_that_shows_all(capsys, tmp_path):
    for text, path in (("brokr: {}\n", "bad.yml:1"), ("storage: [\n", "bad.yml")):
        (tmp_path / "bad.yml").write_text(text)
        assert main(["serve", "--config", "bad.yml"]) == 1
        err = capsys.readouterr().err
        assert f"(path={path})" in err
        assert "`ister config check bad.yml` shows all problems" in err


@pytest.mark.usefixtures("_no_environment")
def test_a_port_that_is_taken_leaves_no_data_behind(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = [*ANY_PORTS[1:], f"--port={port}", f"--data-dir={tmp_path}/data"]
        assert main(["serve", *arguments]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_the_loop_is_uvloops_unless_there_is_tls(monkeypatch):
    plain = load_config({"storage": {"mode": "memory"}}, {})
    tls = {"cert_file": "/c.pem", "key_file": "/k.pem"}
    encrypted = load_config({"storage": {"mode": "memory"}, "broker": {"tls": tls}}, {})
    assert serve._loop_factory(plain) is uvloop.new_event_loop
    assert serve._loop_factory(encrypted) is None
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert serve._loop_factory(plain) is None
