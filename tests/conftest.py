"""What all tests have in common, in whichever process they run.

Tests and their programs are imported from the root of the project, in child processes, too.
"""

import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ister.base import failpoints, threads
from ister.client.core import network
from tests.doc_runner.summary import summarize
from tests.support import skips
from tests.support.durations import Durations
from tests.support.machine import Machine
from tests.support.scale import IS_NIGHTLY
from tests.support.stores import Site
from tests.support.waiting import run_test

# Programs that tests start, Spark's workers among them, import what they use of `tests`.
_ROOT = str(Path(__file__).resolve().parents[1])
_known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _known:
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, _known)])

# The contexts of whoever runs the tests name brokers that are none of ours.
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"
for _name in ("ISTER_CONTEXT", "ISTER_BROKER", "ISTER_TOKEN"):
    os.environ.pop(_name, None)

# How long an example takes says nothing on a machine that is busy with other work. By day everybody
# gets the same examples, as the same simulated worlds (`support.scale`).
settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not IS_NIGHTLY,
)
settings.load_profile("busy")


# A broker that starts again on a busy machine takes longer than calls wait for one.
network.DEFAULT_TIMEOUT_SECONDS = 60.0

# A shell has the commands that it runs in the background ignore Ctrl-C, and so all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _our_threads() -> list[threading.Thread]:
    """All but those that compile and load loops: these are the process's, whoever started them."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("ister-") and not thread.name.startswith("ister-kernels")
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test leaves a thread of ours running, its failures on record or a failpoint armed."""
    before = _our_threads()
    yield
    failpoints.disarm()
    threads.forget()
    if before:
        # Of a broker that serves several tests, which starts threads when it needs them.
        return
    ours = _our_threads()
    deadline = time.monotonic() + 60
    for thread in ours:
        # One that ran a call has answered it, and may take a moment to end; those of a pool, too.
        if thread.name.startswith(("ister-call", "ister-open", "ister-objectstore-sync")):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in ours if thread.is_alive()]
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets logging up for itself alone."""
    logger = logging.getLogger("ister")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine whose logs are closed when the test ends."""
    with Machine() as machine:
        yield machine


@pytest.fixture
def site() -> Iterator[Site]:
    """Machines that share a bucket and a metadata store, closed when the test ends."""
    with Site() as site:
        yield site


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", type=Path, metavar="FILE", help="where durations go as JSON lines"
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    record = None if is_worker else config.getoption("--record-durations")
    config.pluginmanager.register(Durations(record), "durations")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run_test(pyfuncitem.function, {name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays until the end: the garbage collector need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which the processes of xdist take files; see `support.schedule`."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support.schedule import reorder  # noqa: PLC0415 - xdist may be missing

        reorder(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Which tests share a process; see `support.schedule`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.schedule import FilesAndSpark  # noqa: PLC0415 - xdist may be missing

    return FilesAndSpark(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (report for stat in terminalreporter.stats.values() for report in stat)
    if lines := summarize(reports):
        terminalreporter.section("documents")
        terminalreporter.write_line("\n".join(lines))
    if skips.IS_STRICT and (lines := skips.unlisted(terminalreporter.stats.get("skipped", ()))):
        terminalreporter.section("skips that are not listed in tests/support/skips.py", red=True)
        terminalreporter.write_line("\n".join(lines))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails for skips that are not listed; ends the Spark of this process, if it has one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", ()) if reporter is not None else ()
    if skips.IS_STRICT and session.exitstatus == 0 and skips.unlisted(skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    # A worker that is slow to end is killed.
    if (module := sys.modules.get("tests.support.spark_session")) is not None:
        module.stop_spark()
