"""`deploy/compose` without Docker: its command lines, run as processes of this machine.

etcd and the S3 are started with the words of `compose.yml`, the broker with the image's ENTRYPOINT,
CMD and settings, and asked by its HEALTHCHECK. Only addresses and directories are others.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import yaml

from ister.client import Client
from tests.servers.etcd import etcd_binary
from tests.servers.ports import free_port
from tests.support.waiting import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text())["services"]
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text().partition(" AS broker\n")[2]
PROGRAMS = Path(sys.executable).parent


def words_of(instruction):
    """What an instruction of the broker's image runs."""
    return json.loads(re.search(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])


def with_defaults(text):
    """`${NAME:-default}` as compose fills it in without an environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


class Machine:
    """Runs command lines with other addresses and directories than they name."""

    def __init__(self, directory, stack):
        self.directory, self._stack = directory, stack
        self.ports = {name: free_port() for name in ("etcd", "peer", "s3", "6650", "6651", "9040")}
        etcd, s3 = (f"127.0.0.1:{self.ports[name]}" for name in ("etcd", "s3"))
        self._changes = [
            ("0.0.0.0:2379", etcd),
            ("etcd:2379", etcd),
            ("s3:8333", s3),
            ("=:8333", f"={s3}"),
            ("/etcd-data", str(directory / "etcd")),
            ("/var/lib/ister", str(directory / "var")),
            *((f":{port}", f":{self.ports[port]}") for port in ("6650", "6651", "9040")),
        ]

    def changed(self, text):
        for old, new in self._changes:
            text = text.replace(old, new)
        return text

    def start(self, program, words, environment=()):
        command = [str(program), *(self.changed(with_defaults(word)) for word in words)]
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **dict(environment)},
                cwd=self.directory,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)
        return process

    def answers(self, name):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.ports[name]), 1).close()
            return True
        return False


def test_services_of_compose_start_and_keep_a_message(tmp_path):
    with contextlib.ExitStack() as stack:
        machine = Machine(tmp_path, stack)
        (tmp_path / "data" / "ister").mkdir(parents=True)
        peers = f"http://127.0.0.1:{machine.ports['peer']}"
        program, *words = COMPOSE["etcd"]["command"]
        assert program == "etcd"
        # Peers' port is the container's own there.
        own = [f"--{kind}-peer-urls={peers}" for kind in ("listen", "initial-advertise")]
        machine.start(etcd_binary(), [*words, *own, f"--initial-cluster=default={peers}"])
        words = COMPOSE["s3"]["command"]
        assert words[-1] == "/data"
        machine.start(PROGRAMS / "rclone", [*words[:-1], str(tmp_path / "data")])
        eventually(lambda: machine.answers("etcd") and machine.answers("s3"))

        config = tmp_path / "ister.yml"
        config.write_text(machine.changed((DEPLOY / "compose" / "ister.yml").read_text()))
        environment = {
            name: with_defaults(value) for name, value in COMPOSE["broker"]["environment"].items()
        }
        environment["ISTER_CONFIG"] = str(config)
        for name, port in (("GRPC", "6650"), ("FLIGHT", "6651"), ("HTTP", "9040")):
            environment[f"ISTER_BROKER__PORTS__{name}"] = str(machine.ports[port])
        assert words_of("ENTRYPOINT") == ["ister"]
        broker = machine.start(PROGRAMS / "ister", words_of("CMD"), environment)
        # The HEALTHCHECK goes on in a second line.
        _, *probe = words_of("  CMD")

        def is_healthy():
            assert broker.poll() is None, (tmp_path / "log").read_text()
            asked = [sys.executable, *map(machine.changed, probe)]
            return subprocess.run(asked, capture_output=True, check=False).returncode == 0

        eventually(is_healthy)
        with (
            Client(f"127.0.0.1:{machine.ports['6650']}") as client,
            client.producer("/default/t", create=True) as producer,
        ):
            producer.send(b"kept")
            producer.flush()
        broker.send_signal(getattr(signal, re.search(r"STOPSIGNAL (\w+)", DOCKERFILE)[1]))
        grace = int(COMPOSE["broker"]["stop_grace_period"].removesuffix("s"))
        assert broker.wait(grace) == 0
        # It uploads what it has before it ends.
        assert list((tmp_path / "data" / "ister" / "history").rglob("*")), "nothing in the bucket"
