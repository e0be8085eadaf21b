"""`ister serve` runs a broker until it is stopped; `ister up` also runs the pipeline on Spark.

Owns: arguments, signals, and the greeting. SIGTERM and SIGINT stop it in order; a second one stops
it at once. Does not own: the process that runs the pipeline (`pipeline.child_process`).
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Annotated, Final, Self

from ister.base import failpoints, logs, tracing
from ister.base.allocator import keep_freed_buffers
from ister.base.extras import missing_extra
from ister.cli.command import Arg, command, register_command
from ister.cli.location import CONFIG_VARIABLE, DATA_DEFAULT
from ister.cli.output import console, is_terminal
from ister.cli.pipeline.child_process import RUNNING, PipelineBeside, find_obstacle, make_command
from ister.config import Config, StorageConfig, StorageMode, load_config
from ister.errors import ConfigError, UnavailableError

_log = logging.getLogger("ister.cli.serve")

_PORT_DEFAULT = ":6650"
_EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - only compared
_JSON_HELP = "print the addresses as JSON, and log as JSON"


class PipelineWish(Enum):
    """Whether the command also runs a pipeline."""

    NONE = "none"
    OPTIONAL = "optional"
    """Without Java or PySpark, says what is missing and runs the broker alone."""
    REQUIRED = "required"


class ServeOptions:
    """The settings, addresses and log of a broker that a command runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments of every command that runs a broker."""
        place = parser.add_mutually_exclusive_group()
        place.add_argument(
            "--config", metavar="FILE", help=f"config file (default: ${CONFIG_VARIABLE})"
        )
        place.add_argument(
            "--data-dir", metavar="DIR", help=f"data directory (default: {DATA_DEFAULT})"
        )
        add = parser.add_argument
        add("--host", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
        add("--port", metavar="N", type=int, help="gRPC port, 0 for any free one (default: 6650)")
        add("--flight-port", metavar="N", type=int, help="Arrow Flight port (default: 6651)")
        add("--http-port", metavar="N", type=int, help="HTTP port (default: 9040)")
        add(
            "--allow-insecure",
            action="store_true",
            help="listen on other addresses than localhost without authentication",
        )
        add(
            "--log-level",
            metavar="LEVEL",
            default="INFO",
            help="log level: DEBUG, INFO, WARNING or ERROR (default: %(default)s)",
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """Those that were given."""
        return cls(options)


@command(None, "serve", json=_JSON_HELP)
def serve(
    given: ServeOptions,
    *,
    pipeline: Annotated[
        bool, Arg("also run the pipeline, as `ister up` does; fail without Java or pyspark")
    ] = False,
) -> int:
    """Run a broker, with a dashboard.

    Serves topics over gRPC (Danube's protocol), Arrow Flight and HTTP, with a dashboard. Without
    arguments, uses ./ister-data and listens on this machine only. SIGTERM or Ctrl-C stops it in
    order.

    Examples:
        ister serve
        ister serve --config ister.yml --json
        ister serve --port 0 --flight-port 0 --http-port 0
    """
    return _run_broker(given.options, PipelineWish.REQUIRED if pipeline else PipelineWish.NONE)


@command(None, "up", json=_JSON_HELP)
def up(given: ServeOptions) -> int:
    """Run a broker and the pipeline on Spark.

    Runs a broker like `ister serve`, and the pipeline (`ister pipeline run`) in the background, in
    a small Spark session on this machine. The broker serves at once and never waits for Spark:
    while the pipeline does not run, the broker uploads. A pipeline that dies is restarted. Without
    Java or pyspark, one line says what is missing and the broker runs alone. SIGTERM or Ctrl-C
    stops the pipeline, then the broker.

    Examples:
        ister up
        ister up --data-dir /var/lib/ister
        ister up --config ister.yml --json
    """
    return _run_broker(given.options, PipelineWish.OPTIONAL)


COMMANDS: Final = {"serve": register_command(serve), "up": register_command(up)}
"""What registers each of the commands."""


def _run_broker(options: argparse.Namespace, wish: PipelineWish) -> int:
    """Runs a broker, and a pipeline beside it, until a signal stops both.

    Raises:
        ConfigError: The settings are invalid, or a required pipeline cannot run.
        UnavailableError: A port is taken.
    """
    # Arrow's own allocator keeps what one large batch took; the system's gives it back.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        from ister.broker.server import Broker  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing_extra("the broker", "broker", error) from error
    logs.configure(level=options.log_level.upper(), as_text=not options.json)
    config = load_settings(options)
    obstacle = None if wish is PipelineWish.NONE else find_obstacle(config)
    if obstacle is not None and wish is PipelineWish.REQUIRED:
        raise ConfigError(f"--pipeline: {obstacle.message}", hint=obstacle.hint)
    _check_ports(config)
    _raise_file_limit()
    tracing.start("ister-broker", os.environ)
    _set_aside_modules()
    keep_freed_buffers()
    if specification := os.environ.get("ISTER_FAILPOINTS"):
        failpoints.arm_from_environment(specification)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        broker = Broker(config)
        stopping = asyncio.Event()

        def stop() -> None:
            if stopping.is_set():
                os._exit(1)
            stopping.set()
            _log.info("stopping")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        starting = asyncio.ensure_future(broker.start())
        waiting = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            _log.info("stopped")
            return
        listening = starting.result().to_json()
        has_pipeline = wish is not PipelineWish.NONE and obstacle is None
        if options.json:
            ready: dict[str, object] = {"event": "ready", "pid": os.getpid(), **listening}
            if wish is not PipelineWish.NONE:
                ready["pipeline"] = "starting" if has_pipeline else "off"
            print(json.dumps(ready), flush=True)
        else:
            _greet(config, listening)
        if obstacle is not None:
            what = f"{obstacle.message} ({obstacle.hint})"
            _show_state(f"off, the broker uploads: {what}", as_log=options.json)
        pipeline = _start_pipeline(options, config, listening) if has_pipeline else None
        await waiting
        if pipeline is not None:
            # First: it gives the lease back, and the broker uploads its last messages by itself.
            await asyncio.to_thread(pipeline.stop)
        await broker.stop(leave_connections=True)
        # On the loop, so that no call is answered after the broker has stopped.
        tracing.stop()
        _log.info("stopped")
        _exit()

    try:
        with asyncio.Runner(loop_factory=_loop_factory(config)) as runner:
            runner.run(run())
    finally:
        tracing.stop()
    return 0


def _start_pipeline(
    options: argparse.Namespace, config: Config, listening: dict[str, str]
) -> PipelineBeside:
    source = find_source(options, os.environ)
    command = make_command(
        ["--config" if _is_file(source) else "--data", source],
        listening["flight"],
        config,
        log_level=options.log_level.upper(),
    )
    pipeline = PipelineBeside(command, show_state=partial(_show_state, as_log=options.json))
    pipeline.start()
    return pipeline


def _show_state(state: str, *, as_log: bool) -> None:
    """Shows the state of the pipeline: in a line on standard output, or in the log."""
    if as_log:
        _log.info("pipeline", extra={"state": state})
        return
    with suppress(OSError, ValueError):  # the reader of standard output is gone
        if is_terminal(sys.stdout):
            from rich.text import Text  # noqa: PLC0415 - only on a terminal

            style = "green" if state == RUNNING else ""
            console().print(Text.assemble(("pipeline: ", "dim"), (state, style)))
        else:
            print(f"pipeline: {state}", flush=True)


def _loop_factory(config: Config) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's loop factory, which costs less per call; None for asyncio's own loop.

    None if uvloop is not installed, and with TLS: uvloop reads from a connection before its
    handshake has begun, and what it read is lost. `broker.http.port` begins handshakes later, to
    limit how many are in progress.
    """
    if config.broker.tls.cert_file is not None:
        return None
    try:
        import uvloop  # noqa: PLC0415 - only where there are wheels of it
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _set_aside_modules() -> None:
    """Excludes loaded modules from garbage collection, which stops every thread for 50 ms and more.

    Called before topics are opened: frozen objects are never collected.
    """
    gc.collect()
    gc.freeze()


def _exit() -> None:
    """Ends the process, and with it connections on which calls may still be arriving."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _raise_file_limit() -> None:
    """Takes all the file handles that this process may have: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Without the permission, the current limit stays.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _describe_data(storage: StorageConfig) -> str:
    """Where messages are kept."""
    if storage.mode is StorageMode.BUCKET:
        return f"{storage.cloud.root} (no local files)"
    where = storage.wal.dir
    return os.path.dirname(os.path.abspath(where)) if where else "in memory"


def _greet(config: Config, listening: dict[str, str]) -> None:
    """Prints the addresses; on a terminal, also what to try next."""
    scheme = "https" if config.broker.tls.cert_file is not None else "http"
    advertised = config.broker.advertised
    connect_to = (
        advertised.connect_url or advertised.broker_url or f"{scheme}://{listening['grpc']}"
    )
    facts = {
        "gRPC": listening["grpc"],
        "Flight": listening["flight"],
        "HTTP": f"{scheme}://{listening['http']}/",
        "data": _describe_data(config.storage),
    }
    if is_terminal(sys.stdout):
        # A browser cannot open the address 0.0.0.0.
        address = listening["http"].replace(_EVERY_ADDRESS, "127.0.0.1")
        _show_panel(facts | {"HTTP": f"{scheme}://{address}/"})
    else:
        print("Ister is ready.")
        for name, value in facts.items():
            beside = f"   Danube's clients: {connect_to}" if name == "gRPC" else ""
            print(f"  {name:<6}  {value}{beside}")
        print("Press Ctrl-C to stop it.")
    sys.stdout.flush()


def _show_panel(facts: Mapping[str, str]) -> None:
    from rich.panel import Panel  # noqa: PLC0415 - only on a terminal
    from rich.text import Text  # noqa: PLC0415

    lines = [
        ("dashboard", facts["HTTP"], "bold cyan"),
        ("gRPC", f"{facts['gRPC']}  for `ister produce`, `ister consume`, Danube", ""),
        ("Flight", f"{facts['Flight']}  for Spark, Arrow, bulk publishing", ""),
        ("data", facts["data"], ""),
        ("", "", ""),
        ("try", "echo hello | ister produce /default/greetings", "green"),
    ]
    if not facts["gRPC"].endswith(_PORT_DEFAULT):
        lines.append(("", f"  --broker {facts['gRPC']}", "green"))
    lines.append(("end", "Ctrl-C", ""))
    text = Text("\n").join(
        Text.assemble((f"{name:<11}", "dim"), (value, style)) for name, value, style in lines
    )
    console().print(
        Panel(text, title="Ister is ready", title_align="left", border_style="cyan", expand=False),
        soft_wrap=False,
    )


def load_settings(options: argparse.Namespace) -> Config:
    """The settings that the arguments ask for.

    Raises:
        ConfigError: They do not make sense.
    """
    environment = dict(os.environ)
    for name, value in (
        ("ISTER_BROKER__HOST", options.host),
        ("ISTER_BROKER__PORTS__GRPC", options.port),
        ("ISTER_BROKER__PORTS__FLIGHT", options.flight_port),
        ("ISTER_BROKER__PORTS__HTTP", options.http_port),
        ("ISTER_BROKER__ALLOW_INSECURE", "true" if options.allow_insecure else None),
    ):
        if value is not None:
            environment[name] = str(value)
    source = find_source(options, environment)
    try:
        return load_config(source, environment)
    except ConfigError as error:
        if _is_file(source):
            error.path = error.path or source
            check = f"`ister config check {source}` shows all problems"
            error.hint = f"{error.hint}; {check}" if error.hint else check
        raise


def _is_file(source: str) -> bool:
    return source.endswith((".yml", ".yaml"))


def _check_ports(config: Config) -> None:
    """Finds ports that are taken before anything is made on the disk.

    Raises:
        UnavailableError: One is.
    """
    host, ports = config.broker.host, config.broker.ports
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in filter(None, (ports.grpc, ports.flight, ports.http)):
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((host, port))
            except OSError as error:
                # The broker reports all other errors.
                if error.errno == errno.EADDRINUSE:
                    raise UnavailableError(
                        f"cannot listen on {host}:{port}: {error.strerror}",
                        hint="is another broker running there?",
                    ) from error


def find_source(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The config file or the data directory that the arguments name."""
    source: str = (
        options.config or options.data_dir or environment.get(CONFIG_VARIABLE) or DATA_DEFAULT
    )
    return source
